"""Which variant wins, and how sure is that?

A study file names arms, each a few overrides of one base config, and seeds. A seed fixes the first weights that
arms share, the order of data and the tokens of the evaluation, so arms are compared in pairs: for arm a, baseline
b and seeds s = 1 .. n, with d_s = loss(a, s) - loss(b, s),

    difference   mean(d) ± t(0.975, n - 1) sd(d) / sqrt(n)           95 % interval
    p-value      of t = mean(d) sqrt(n) / sd(d), two-sided; over all arms by Holm: p_(i) max_{j<=i} (m - j + 1) p_(j)
    compute      the tokens at which the baseline's mean curve has the arm's loss, over the arm's own tokens

    python ablate.py configs/study_tiny.py                 runs what is missing, then writes the report
    python ablate.py configs/study_tiny.py --report        draws the report again from runs.jsonl alone
    python ablate.py configs/study_tiny.py --tune          tries the learning rates that the study lists

Each finished run is one line of OUT/runs.jsonl. A stopped study goes on with the same command. Runs go seed by
seed, so that a stop leaves complete pairs; one that diverges is counted with the loss of guessing, never dropped.

Try it: the first command above, about a minute on two CPU cores; then look at out/study_tiny/report.md.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import runpy
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import write_json
from config import Config, ConfigError, Fault, apply_overrides, count_parameters, find_faults, run_command
from data import DataError, evaluation_batches, open_split, read_meta
from optim import schedule, treatment, warmup_steps
from prepare_data import prepare_if_missing
from train import TrainingStopped, train

LEVEL = 0.95  # of intervals; 1 - LEVEL is the error rate that Holm's correction keeps over all arms
POWER = 0.8  # chance to find the smallest difference of interest, for "seeds needed"

# ----------------------------------------------------------------------------------- the study


@dataclass(frozen=True)
class Study:
    """What a study file sets as `study`.

    arms: {name: {"section.key": value}} over `base`. seeds: fixed before any run. comparisons: {arm: a further
    baseline}. lengths: arms that are the baseline trained shorter or longer; their final losses are the curve
    from which saved compute is read, and they take no part in the tests.
    learning_rates: {arm: rates} to try with `--tune`, on `tuning_seeds` and under the overrides `tuning`, which
    must move the evaluation to other tokens. smallest_difference: the smallest of interest, nats a token.
    """

    base: Config
    arms: dict[str, dict[str, object]]
    seeds: tuple[int, ...] = tuple(range(8))
    baseline: str = "plain"
    comparisons: dict[str, str] = field(default_factory=dict)
    lengths: tuple[str, ...] = ()
    learning_rates: dict[str, list[float]] = field(default_factory=dict)
    tuning_seeds: tuple[int, ...] = (1000, 1001)
    tuning: dict[str, object] = field(default_factory=dict)
    smallest_difference: float = 0.003

    def problems(self) -> list[Fault]:
        """What is wrong beside the configs of the arms."""
        known = "one of the arms: " + ", ".join(self.arms)
        named = {"baseline": [self.baseline], "lengths": self.lengths, "learning_rates": self.learning_rates}
        named["comparisons"] = [*self.comparisons, *self.comparisons.values()]
        pairs = [(key, name) for key, names in named.items() for name in names]
        faults = [Fault(f"study.{key}", known, name) for key, name in pairs if name not in self.arms]
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            faults.append(Fault("study.seeds", "different seeds, at least one", self.seeds))
        if self.learning_rates and set(self.seeds) & set(self.tuning_seeds):
            faults.append(Fault("study.tuning_seeds", "seeds that are not among study.seeds", self.tuning_seeds))
        if self.smallest_difference <= 0:
            faults.append(Fault("study.smallest_difference", "more than 0", self.smallest_difference))
        return faults

    def arm_config(self, arm: str, changes: dict[str, object]) -> tuple[Config, list[Fault]]:
        """The config of an arm under further changes, and its faults with the arm's name."""
        settings = self.arms[arm] | changes
        config, faults = apply_overrides(self.base, [f"--{key}={value}" for key, value in settings.items()])
        faults += find_faults(config)
        return replace(config, name=arm), [replace(fault, expected=f"{fault.expected} (arm {arm})") for fault in faults]

    def configs(self, changes: dict[str, object] | None = None) -> dict[str, Config]:
        """{arm: resolved config}. Raises ConfigError with the faults of all arms."""
        made = {arm: self.arm_config(arm, changes or {}) for arm in self.arms}
        raise_faults([fault for _, faults in made.values() for fault in faults])
        return {arm: config.resolved() for arm, (config, _) in made.items()}

    def first_seeds(self, count: int | None) -> tuple[int, ...]:
        """`count` seeds: the study's own, and where it has fewer, the numbers after its largest."""
        more = range(max(self.seeds) + 1, max(self.seeds) + 1 + (count or 0))
        return self.seeds if count is None else (*self.seeds, *more)[:count]


def load_study(path: Path) -> Study:
    """The `study` of a file, checked. Raises ConfigError."""
    if not path.is_file():
        known = ", ".join(sorted(map(str, path.parent.glob("study_*.py")))) or "configs/study_NAME.py"
        raise ConfigError([Fault("STUDY", f"a study file, such as {known}", str(path))])
    try:
        study = runpy.run_path(str(path)).get("study")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError([Fault("STUDY", "a file that runs", f"{path}: {type(error).__name__}: {error}")]) from error
    if not isinstance(study, Study):
        raise ConfigError([Fault("STUDY", "a file that sets study = Study(...)", str(path))])
    raise_faults(study.problems())
    study.configs()
    return study


def raise_faults(faults: list[Fault]) -> None:
    """Raises ConfigError if there are any, each once: arms share a base."""
    if faults:
        raise ConfigError(list({str(fault): fault for fault in faults}.values()))


# ----------------------------------------------------------------------------------- one run

# settings that change no result, or that the row names on its own
NOT_HASHED = ("train.seed", "train.out_dir", "train.resume", "data.path", "data.verify")


def config_hash(config: Config) -> str:
    """16 hexadecimal digits of the settings that make the result of a resolved config.

    A switch that is off (none, false, 0) does not count, so that a new switch leaves the hashes of old runs.
    """
    sections = {name: part for name, part in config.as_dict().items() if isinstance(part, dict)}
    values = {f"{name}.{key}": value for name, part in sections.items() for key, value in part.items() if value}
    text = json.dumps({key: value for key, value in values.items() if key not in NOT_HASHED}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_fingerprint(config: Config) -> str:
    """16 hexadecimal digits that change with any token; prepares the data where they are missing.

    Raises DataError if they cannot be prepared or the evaluation has no context.
    """
    folder = prepare_if_missing(config.data)
    validation = open_split(folder, "validation", config.data.verify)
    next(evaluation_batches(validation, config.model.block_size, 1, config.data.eval_tokens, config.data.eval_start))
    splits = read_meta(folder)["splits"]
    shards = [shard["sha256"] for split in ("train", "validation") for shard in splits[split]["shards"]]
    return hashlib.sha256("".join(shards).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """One run to make: an arm's resolved config under one seed."""

    arm: str
    seed: int
    config: Config
    data_sha256: str

    @property
    def key(self) -> tuple:
        """What makes two runs the same run."""
        return self.arm, self.seed, config_hash(self.config), self.data_sha256


def row_key(row: dict) -> tuple:
    return row["arm"], row["seed"], row["config_hash"], row["data_sha256"]


def make_jobs(configs: dict[str, Config], seeds: tuple[int, ...]) -> list[Job]:
    """All runs, seed by seed, so that a stop leaves complete pairs."""
    data = {arm: data_fingerprint(config) for arm, config in configs.items()}
    return [
        Job(arm, seed, replace(config, train=replace(config.train, seed=seed)), data[arm])
        for seed in seeds
        for arm, config in configs.items()
    ]


def run_job(job: Job, folder: Path) -> dict | None:
    """Trains, and returns the line of runs.jsonl; None if a signal stopped it. Nothing stays in `folder`."""
    place = Path(tempfile.mkdtemp(prefix=f"{job.arm}-{job.seed}-", dir=folder))
    try:
        result = train_once(replace(job.config, train=replace(job.config.train, out_dir=str(place / "run"))))
    except Exception as error:  # whatever it is, the other runs go on
        result = {"crashed": True, "reason": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return None if result is None else describe(job) | result


def train_once(config: Config) -> dict | None:
    """What one training run gave. Diverged: stopped by a number that is not finite, or worse than guessing."""
    result = {"crashed": False, "diverged": False, "reason": None, "val_loss": None, "best_val_loss": None}
    try:
        summary = train(config, quiet=True)
        if summary is None:
            return None
        result |= {key: finite(summary[key]) for key in ("val_loss", "best_val_loss")}
        if result["val_loss"] is None or result["val_loss"] > guessing_loss(config):
            result |= {"diverged": True, "reason": f"final loss {summary['val_loss']}: worse than guessing"}
    except TrainingStopped as error:
        result |= {"diverged": True, "reason": str(error).split(". ")[0]}
    return result | read_metrics(Path(config.train.out_dir) / "metrics.jsonl")


def read_metrics(path: Path) -> dict:
    """Steps, tokens, speed and the evaluation curve of a run."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "tokens": rows[-1]["tokens"] if rows else 0,
        "tokens_per_second": round(statistics.median(speeds), 1) if speeds else None,
        "curve": [[row["tokens"], row["val_loss"]] for row in rows if row.get("val_loss") is not None],
    }


def describe(job: Job) -> dict:
    """What a row says of its run beside the result."""
    names = ("arm", "seed", "config_hash", "data_sha256")
    return dict(zip(names, job.key)) | {
        "learning_rate": job.config.optim.learning_rate,
        "parameters": count_parameters(job.config),
        "machine": machine(job.config.train.device),
    }


def machine(wanted: str) -> dict:
    """Processor or GPU, torch's version, threads: what the last digits and the speed of a run depend on."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), processor)
    on_gpu = wanted in ("auto", "cuda") and torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else wanted.replace("auto", "cpu")
    return {"processor": processor, "device": device, "torch": torch.__version__, "threads": torch.get_num_threads()}


def guessing_loss(config: Config) -> float:
    """Nats a token of a model that knows nothing: log(vocab_size)."""
    return math.log(config.model.vocab_size)


def finite(value: float | None) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


# ----------------------------------------------------------------------------------- many runs


class Ledger:
    """A file of finished runs, a line each, written by one process at a time and never rewritten."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict]:
        """All runs in it; a line that was cut short when the machine went down is no run."""
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    @contextlib.contextmanager
    def opened(self) -> Iterator["Ledger"]:
        """Opened for `append`, and locked. Raises ConfigError if another process writes to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as self.file:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fault = Fault("--out", "a folder that no other study writes to now", str(self.path.parent))
                raise ConfigError([fault]) from None
            if self.file.tell() and not self.path.read_bytes().endswith(b"\n"):
                self.file.write(b"\n")  # ends the line that was cut short
            yield self

    def append(self, row: dict) -> None:
        """One line, on disk when this returns."""
        self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def run_missing(jobs: list[Job], path: Path, at_once: int) -> list[dict]:
    """Makes the runs that the file lacks, `at_once` together (0: in this process), and returns the new rows.

    Crashed runs are tried again. Raises KeyboardInterrupt when stopped; what has finished is in the file.
    """
    new, folder = [], path.parent / "work"
    with Ledger(path).opened() as ledger:
        done = {row_key(row) for row in ledger.rows() if not row["crashed"]}
        missing = [job for job in jobs if job.key not in done]
        folder.mkdir(exist_ok=True)
        bar = tqdm(total=len(jobs), initial=len(jobs) - len(missing), unit="run", dynamic_ncols=True)
        try:
            for row in run_in_processes(missing, folder, at_once) if at_once else run_here(missing, folder):
                ledger.append(row)
                new.append(row)
                bar.set_postfix_str(f"seed {row['seed']}, {row['arm']}: {outcome(row)}", refresh=False)
                bar.update()
        finally:
            bar.close()
            shutil.rmtree(folder, ignore_errors=True)
    return new


def outcome(row: dict) -> str:
    """A run's result in a word."""
    return "crashed" if row["crashed"] else "diverged" if row["diverged"] else f"{row['val_loss']:.4f}"


def run_here(jobs: list[Job], folder: Path) -> Iterator[dict]:
    """The runs one after the other in this process, for a debugger."""
    for job in jobs:
        row = run_job(job, folder)
        if row is None:
            raise KeyboardInterrupt
        yield row


def run_in_processes(jobs: list[Job], folder: Path, at_once: int) -> Iterator[dict]:
    """The runs, each in a process of its own, so that one that dies takes no other with it."""
    threads = max(1, cores() // at_once)
    waiting, running = list(reversed(jobs)), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running |= [start(waiting.pop(), folder, threads)]
            for receiver in multiprocessing.connection.wait(list(running)):
                row = receive(receiver, *running.pop(receiver))
                if row is None:
                    raise KeyboardInterrupt  # the signal reached the run first
                yield row
    finally:
        stop([process for process, _ in running.values()])


def start(job: Job, folder: Path, threads: int) -> tuple:
    """(connection, (process, job)) of a run that has begun. Ctrl-C is for this process, which then ends the others."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the state of torch's threads
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, folder, threads, sender), daemon=True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited until training sets its own
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    sender.close()  # the worker's copy is then the last, and its death an end of file
    return receiver, (process, job)


def work(job: Job, folder: Path, threads: int, sender) -> None:
    """The worker: one run, then its row through the pipe."""
    torch.set_num_threads(threads)
    sender.send(run_job(job, folder))


def receive(receiver, process, job: Job) -> dict | None:
    """The row of a run that ended, however it did."""
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return describe(job) | {"crashed": True, "reason": f"the process ended with exit code {process.exitcode}"}
    finally:
        process.join()
        receiver.close()


def stop(processes: list) -> None:
    """Ends the runs that are under way; they are made again from their start."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(30)
        if process.is_alive():
            process.kill()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------- statistics


def paired(differences: list[float]) -> dict:
    """Mean, t interval and p-value of paired differences (n,); None for what n < 2 does not give."""
    from scipy import stats

    values, n = np.asarray(differences, dtype=float), len(differences)
    mean = float(values.mean()) if n else None
    result = {"difference": mean, "ci_low": None, "ci_high": None, "p_value": None, "sd": None}
    if n < 2:
        return result
    sd = float(values.std(ddof=1))
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * sd / math.sqrt(n)
    p_value = 2 * float(stats.t.sf(abs(mean) * math.sqrt(n) / sd, n - 1)) if sd > 0 else float(mean == 0)
    return result | {"ci_low": mean - half, "ci_high": mean + half, "p_value": p_value, "sd": sd}


def holm(p_values: list[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given: (m - rank) p, made monotone, at most 1; None stays None.

    Rejecting where they are below 0.05 errs in any arm with a chance of at most 5 % (Holm, 1979).
    """
    order = sorted((index for index, p in enumerate(p_values) if p is not None), key=lambda index: p_values[index])
    adjusted, largest = [None] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def seeds_needed(sd: float | None, difference: float, most: int = 1000) -> int | None:
    """Seeds with which a true `difference` is found with a chance of POWER at LEVEL; None: more than `most`."""
    from scipy import stats

    if sd is None:
        return None
    for n in range(2, most + 1):
        critical = stats.t.ppf((1 + LEVEL) / 2, n - 1)
        if sd == 0 or stats.nct.sf(critical, n - 1, difference * math.sqrt(n) / sd) >= POWER:
            return n
    return None


def tokens_at_loss(curve: list[tuple[float, float]], loss: float) -> tuple[float | None, str | None]:
    """Tokens at which a curve of (tokens, loss) comes down to `loss`, linear in log(tokens).

    (None, "above" | "below") where the loss is higher, or lower, than anywhere on the curve.
    """
    tokens, losses = np.asarray(sorted(curve), dtype=float).T
    losses = np.minimum.accumulate(losses)  # an uptick between evaluations is no return to fewer tokens
    if loss > losses[0] or loss < losses[-1]:
        return None, "above" if loss > losses[0] else "below"
    return float(np.exp(np.interp(-loss, -losses, np.log(tokens)))), None


def integrated_decay(config: Config, role: str) -> float:
    """Σ η λ over the run: weights that get no gradient shrink by exp(-Σ η λ)."""
    chosen, steps = treatment(role, config.optim), config.train.max_steps
    shares = sum(schedule(step, config.optim, steps) for step in range(steps))
    return shares * config.optim.learning_rate * chosen.multiplier * chosen.decay


# --------------------------------------------------------------------------- runs -> summary


@dataclass
class Results:
    """The rows that count, {arm: {seed: row}}, and how many others the file has, by the reason."""

    study: Study
    configs: dict[str, Config]
    runs: dict[str, dict[int, dict]]
    left_out: dict[str, int]

    def loss(self, arm: str, seed: int) -> float:
        """A run's loss; that of guessing if it diverged without one."""
        loss = self.runs[arm][seed]["val_loss"]
        return guessing_loss(self.configs[arm]) if loss is None else loss

    def shared_seeds(self, arm: str, other: str) -> list[int]:
        return sorted(set(self.runs[arm]) & set(self.runs[other]))

    def differences(self, arm: str, baseline: str) -> list[float]:
        """loss(arm) - loss(baseline) of every seed that both have."""
        return [self.loss(arm, seed) - self.loss(baseline, seed) for seed in self.shared_seeds(arm, baseline)]

    def mean_loss(self, arm: str) -> float:
        return statistics.fmean(self.loss(arm, seed) for seed in self.runs[arm])

    def mean_curve(self, arm: str) -> list[tuple[float, float]]:
        """(tokens, mean loss over seeds), where every seed was evaluated."""
        points: dict[int, list[float]] = {}
        for row in self.runs[arm].values():
            for tokens, loss in row["curve"]:
                points.setdefault(tokens, []).append(loss)
        seeds = len(self.runs[arm])
        return [(tokens, statistics.fmean(losses)) for tokens, losses in sorted(points.items()) if len(losses) == seeds]

    def tested_arms(self) -> list[str]:
        """The arms that are compared with the baseline."""
        return [arm for arm in self.runs if arm != self.study.baseline and arm not in self.study.lengths]

    def all_rows(self) -> list[dict]:
        return [row for runs in self.runs.values() for row in runs.values()]


def collect(study: Study, configs: dict[str, Config], rows: list[dict]) -> Results:
    """The rows of the configs as they are now, on the data of the newest of them; the first of equal ones."""
    hashes = {arm: config_hash(config) for arm, config in configs.items()}
    runs: dict[str, dict[int, dict]] = {arm: {} for arm in configs}
    left_out = dict.fromkeys(("another config", "other data", "crashed", "repeated"), 0)
    current = [row for row in rows if hashes.get(row["arm"]) == row["config_hash"]]
    left_out["another config"] = len(rows) - len(current)
    for row in current:
        if row["data_sha256"] != current[-1]["data_sha256"]:
            left_out["other data"] += 1
        elif row["crashed"]:
            left_out["crashed"] += 1
        elif row["seed"] in runs[row["arm"]]:
            left_out["repeated"] += 1
        else:
            runs[row["arm"]][row["seed"]] = row
    return Results(study, configs, {arm: made for arm, made in runs.items() if made}, left_out)


def compare(results: Results, arm: str, baseline: str) -> dict:
    """One arm against one baseline."""
    differences = results.differences(arm, baseline)
    result = {"name": arm, "baseline": baseline, "seeds": len(differences)} | paired(differences)
    return result | {"seeds_needed": seeds_needed(result["sd"], results.study.smallest_difference)}


def summarize(results: Results) -> dict:
    """What summary.json holds; losses and differences in nats a token. Raises DataError without a baseline."""
    study, baseline = results.study, results.study.baseline
    if baseline not in results.runs:
        raise DataError(f"no finished run of the baseline {baseline} under the study's present config")
    arms = [summarize_arm(results, arm) for arm in (baseline, *results.tested_arms())]
    pairs = [(arm, other) for arm, other in study.comparisons.items() if arm in results.runs and other in results.runs]
    comparisons = [compare(results, arm, other) for arm, other in pairs]
    for tests in (arms[1:], comparisons):  # two families of tests
        for test, adjusted in zip(tests, holm([test["p_value"] for test in tests])):
            test["holm_p_value"] = adjusted
    lengths = [
        {"name": arm, "tokens": run_tokens(results, arm), "mean": results.mean_loss(arm)}
        for arm in study.lengths
        if arm in results.runs
    ]
    summary = {"baseline": baseline, "smallest_difference": study.smallest_difference, "arms": arms}
    return summary | {"comparisons": comparisons, "lengths": lengths, "left_out": results.left_out}


def summarize_arm(results: Results, arm: str) -> dict:
    """An arm against the baseline: {"name", "seeds", "mean", "difference", "ci_low", "ci_high", "p_value", ...}."""
    rows = list(results.runs[arm].values())
    saved, outside = compute_saved(results, arm)
    return compare(results, arm, results.study.baseline) | {
        "name": arm,
        "mean": results.mean_loss(arm),
        "holm_p_value": None,
        "diverged": sum(row["diverged"] for row in rows),
        "compute_saved": saved,
        "compute_outside": outside,
        "step_time_ratio": step_time_ratio(results, arm),
        "learning_rate": rows[0]["learning_rate"],
        "parameters": rows[0]["parameters"],
    }


def run_tokens(results: Results, arm: str) -> int:
    """Training tokens of an arm's whole run."""
    train_config = results.configs[arm].train
    return train_config.max_steps * train_config.tokens_per_step


def compute_saved(results: Results, arm: str) -> tuple[float | None, str | None]:
    """(tokens that the baseline needs for the arm's mean loss, over the arm's; outside as in tokens_at_loss)."""
    study = results.study
    names = [name for name in (study.baseline, *study.lengths) if name in results.runs]
    ends = [(run_tokens(results, name), results.mean_loss(name)) for name in names]
    curve = ends if len(ends) > 1 else results.mean_curve(study.baseline)
    tokens, outside = tokens_at_loss(curve, results.mean_loss(arm)) if curve else (None, None)
    return (tokens / run_tokens(results, arm) if tokens else None), outside


def step_time_ratio(results: Results, arm: str) -> float | None:
    """Median over seeds of the arm's step time over the baseline's."""
    base = results.runs[results.study.baseline]
    speeds = [(base[seed]["tokens_per_second"], results.runs[arm][seed]["tokens_per_second"])
              for seed in results.shared_seeds(arm, results.study.baseline)]  # fmt: skip
    ratios = [ours / theirs for ours, theirs in speeds if ours and theirs]
    return statistics.median(ratios) if ratios else None


# ------------------------------------------------------------------------------- report.md


def number(value: float | None, form: str = "+.4f") -> str:
    return "-" if value is None else format(value, form)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column to the left, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verdict(test: dict, smallest: float) -> str:
    """What the test allows one to say."""
    if test["p_value"] is None:
        return "too few seeds"
    if test["holm_p_value"] < 1 - LEVEL:
        return "lower" if test["difference"] < 0 else "higher"
    return f"within ±{smallest:g}" if -smallest < test["ci_low"] and test["ci_high"] < smallest else "open"


def test_cells(test: dict, smallest: float) -> list[str]:
    """The columns that both tables of differences share."""
    interval = f"{number(test['ci_low'])} to {number(test['ci_high'])}"
    p_values = [number(test["p_value"], ".2g"), number(test["holm_p_value"], ".2g")]
    needed = number(test["seeds_needed"], "d")
    return [str(test["seeds"]), number(test["difference"]), interval, *p_values, verdict(test, smallest), needed]


TEST_HEAD = ["seeds", "difference", "95 % interval", "p", "p (Holm)", "verdict", "seeds needed"]


def compute_text(arm: dict, reach: tuple[float, float]) -> str:
    """Compute at equal loss, or which end of the curve the loss lies beyond."""
    if arm["compute_saved"] is not None:
        return f"{arm['compute_saved']:.3f}x"
    return {"above": f"below {reach[0]:.2f}x", "below": f"above {reach[1]:.2f}x", None: "-"}[arm["compute_outside"]]


def curve_reach(results: Results, summary: dict) -> tuple[float, float]:
    """First and last point of the baseline's curve, over the tokens of a whole run."""
    baseline = results.study.baseline
    whole, lengths = run_tokens(results, baseline), [length["tokens"] for length in summary["lengths"]]
    points = [*(lengths or [tokens for tokens, _ in results.mean_curve(baseline)]), whole]
    return min(points) / whole, max(points) / whole


def difference_tables(results: Results, summary: dict) -> str:
    """Every arm against the baseline, then the further comparisons."""
    smallest, reach = summary["smallest_difference"], curve_reach(results, summary)
    head = ["arm", "mean loss", *TEST_HEAD, "compute", "step time", "diverged"]
    rows = []
    for arm in summary["arms"]:
        cells = test_cells(arm, smallest) if arm["name"] != summary["baseline"] else [str(arm["seeds"]), *["-"] * 6]
        cells += [compute_text(arm, reach), number(arm["step_time_ratio"], ".2f")]
        cells.append(f"{arm['diverged']} of {len(results.runs[arm['name']])}")
        rows.append([arm["name"], number(arm["mean"], ".4f"), *cells])
    parts = [f"## Differences to {summary['baseline']}", table(head, rows)]
    if summary["comparisons"]:
        rows = [[test["name"], test["baseline"], *test_cells(test, smallest)] for test in summary["comparisons"]]
        parts += ["## Differences to other baselines", table(["arm", "baseline", *TEST_HEAD], rows)]
    return "\n\n".join(parts)


def reading(results: Results, summary: dict) -> str:
    """What the columns mean."""
    curve = "final losses of " + ", ".join([summary["baseline"], *(length["name"] for length in summary["lengths"])])
    if not summary["lengths"]:
        curve = f"mean curve within the runs of {summary['baseline']} (an estimate: the rate has not yet fallen there)"
    return (
        "Losses and differences are in nats a token, on the same validation tokens for all; a negative difference is a "
        "lower loss. Differences are paired by seed, intervals and p-values are Student's t, and Holm's correction is "
        "over the rows of a table. *Verdict*: lower or higher where Holm's p is below 0.05, else within the smallest "
        f"difference of interest, ±{summary['smallest_difference']:g}, if the whole interval is, else open. *Seeds "
        f"needed*: to find that difference with a chance of {POWER:.0%}, from the spread seen here. *Compute*: tokens "
        f"that the baseline needs for the arm's loss, over the arm's; read from the {curve}, linearly in log(tokens). "
        "*Step time*: median over seeds of the ratio to the baseline's. A diverged run (not finite, or worse than "
        "guessing) counts with its loss, or that of guessing where it has none; it is never dropped, so that an arm "
        "which has one gets a wide interval."
    )


def regime_table(results: Results) -> str:
    """The numbers that say which regime an arm was trained in."""
    head = ["arm", "parameters", "tokens", "tokens a parameter", "steps", "tokens a step", "warm-up", "peak rate"]
    rows = []
    for arm, runs in results.runs.items():
        config, parameters = results.configs[arm], next(iter(runs.values()))["parameters"]
        steps, tokens = config.train.max_steps, run_tokens(results, arm)
        cells = [f"{parameters:,}", f"{tokens:,}", f"{tokens / parameters:.1f}"]
        cells += [f"{steps:,}", f"{config.train.tokens_per_step:,}"]
        cells += [f"{warmup_steps(config.optim, steps) / steps:.1%}", f"{config.optim.learning_rate:g}"]
        cells += [f"{integrated_decay(config, role):.2f}" for role in ("matrix", "input_scale", "output_scale")]
        rows.append([arm, *cells])
    head += [f"Σ η λ, {role}" for role in ("matrices", "input scales", "output scales")]
    return "## Regime\n\n" + table(head, rows)


def troubles(results: Results) -> str:
    """Every diverged run, and what the file holds beside the rows counted."""
    lines = [f"- {row['arm']}, seed {row['seed']}: {row['reason']}" for row in results.all_rows() if row["diverged"]]
    counts = ", ".join(f"{count} {reason}" for reason, count in results.left_out.items() if count) or "none"
    lines = ["## Runs that diverged", "", *(lines or ["None."])]
    return "\n".join([*lines, "", f"Lines of runs.jsonl left out: {counts}."])


def provenance(results: Results, command: str) -> str:
    """How these numbers were made."""
    rows = results.all_rows()
    machines = dict.fromkeys(", ".join(f"{key} {value}" for key, value in row["machine"].items()) for row in rows)
    seeds = sorted({row["seed"] for row in rows})
    data = results.configs[results.study.baseline].data
    lines = [f"- command: `{command}`", f"- seeds: {', '.join(map(str, seeds))}"]
    lines.append(f"- data: {data.source} as {data.tokenizer}, fingerprint {rows[0]['data_sha256']}")
    lines.append(f"- evaluation: {data.eval_tokens or 'all'} validation tokens from token {data.eval_start} on")
    lines += [f"- machine: {text}" for text in machines]
    if len(machines) > 1:
        lines.append("- The runs come from several machines, whose last digits may differ by more than arms do.")
    return "## How it was made\n\n" + "\n".join(lines)


def write_text(path: Path, text: str) -> None:
    """Under a temporary name first, so that a stop leaves no half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_report(study: Study, name: str, out: Path, command: str) -> str:
    """summary.json, report.md and figures from the .jsonl files in `out`. Returns the tables of differences."""
    results = collect(study, study.configs(), Ledger(out / "runs.jsonl").rows())
    summary = summarize(results)
    write_json(out / "summary.json", summary)
    tables = difference_tables(results, summary)
    parts = [f"# {name}", tables, reading(results, summary)]
    parts += ["![differences](losses.png)", "![curves](curves.png)", regime_table(results), troubles(results)]
    if tuning := Ledger(out / "tuning.jsonl").rows():
        parts.append(tuning_text(study, tuning))
    write_text(out / "report.md", "\n\n".join([*parts, provenance(results, command)]) + "\n")
    draw_losses(results, summary, out / "losses.png")
    draw_curves(results, out / "curves.png")
    return tables


# ---------------------------------------------------------------------------------- figures


def new_figure(width: float, height: float, panels: int = 1):
    """A figure without a window, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def save_figure(figure, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", metadata={"Software": None})
    os.replace(temporary, path)


def draw_losses(results: Results, summary: dict, path: Path) -> None:
    """Differences to the baseline: each seed a dot, mean and interval over them."""
    arms = [arm for arm in summary["arms"] if arm["name"] != summary["baseline"] and arm["difference"] is not None]
    figure, (axes,) = new_figure(7.5, 1.6 + 0.42 * max(1, len(arms)))
    smallest = summary["smallest_difference"]
    axes.axvspan(-smallest, smallest, color="0.92", zorder=0, label=f"smallest difference of interest, ±{smallest:g}")
    axes.axvline(0, color="0.4", linewidth=1, zorder=1)
    for place, arm in enumerate(arms):
        draw_arm(axes, results, arm, place)
    axes.set_yticks(range(len(arms)), [arm["name"] for arm in arms])
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_xlabel(f"validation loss minus that of {summary['baseline']}, paired by seed (nats a token)")
    axes.set_title("left is better; bars: mean and 95 % t interval, dots: seeds", fontsize=10)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    save_figure(figure, path)


def draw_arm(axes, results: Results, arm: dict, place: int) -> None:
    """One row of losses.png. Diverged seeds are named, as their losses lie far outside."""
    baseline = results.study.baseline
    diverged = [seed for seed in results.shared_seeds(arm["name"], baseline)
                if results.runs[arm["name"]][seed]["diverged"] or results.runs[baseline][seed]["diverged"]]  # fmt: skip
    good = [seed for seed in results.shared_seeds(arm["name"], baseline) if seed not in diverged]
    dots = [results.loss(arm["name"], seed) - results.loss(baseline, seed) for seed in good]
    axes.plot(dots, [place + 0.18] * len(dots), "o", color="tab:blue", alpha=0.5, markersize=4)
    if diverged:
        text = f"{len(diverged)} diverged: interval in report.md"
        place_at = dict(transform=axes.get_yaxis_transform(), ha="right", va="center")  # x in shares of the width
        axes.text(0.99, place, text, color="tab:red", fontsize=8, **place_at)
    elif arm["ci_low"] is not None:
        half = arm["ci_high"] - arm["difference"]
        axes.errorbar(arm["difference"], place - 0.08, xerr=half, fmt="D", color="black", markersize=4, capsize=3)


def draw_curves(results: Results, path: Path) -> None:
    """Left: loss against tokens. Right: the same minus the baseline's, whose small differences the left cannot show."""
    from matplotlib import colormaps

    arms = [arm for arm in results.runs if any(row["curve"] for row in results.runs[arm].values())]
    figure, (left, right) = new_figure(12, 4.8, panels=2)
    for index, arm in enumerate(arms):
        other_length = arm in results.study.lengths
        color = "black" if other_length or arm == results.study.baseline else colormaps["tab20"](index % 20)
        draw_band(left, curve_points(results, arm, None), color, arm, "--" if other_length else "-")
        if not other_length:
            draw_band(right, curve_points(results, arm, results.study.baseline), color, arm)
    for axes in (left, right):
        axes.set_xlabel("training tokens (millions)")
    left.set(ylabel="validation loss (nats a token)", title="loss: mean and range over seeds")
    right.set_ylabel(f"validation loss minus that of {results.study.baseline} (nats a token)")
    right.set_title("paired difference: mean and standard error")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    save_figure(figure, path)


def curve_points(results: Results, arm: str, baseline: str | None) -> list[tuple[float, float, float, float]]:
    """(tokens, mean, low, high) over seeds: the range of losses, or the standard error of paired differences."""
    values: dict[int, list[float]] = {}
    for seed in results.shared_seeds(arm, baseline or arm):
        below = dict(map(tuple, results.runs[baseline][seed]["curve"])) if baseline else None
        for tokens, loss in results.runs[arm][seed]["curve"]:
            if below is None or tokens in below:
                values.setdefault(tokens, []).append(loss - (below[tokens] if below else 0.0))
    points = []
    for tokens, losses in sorted(values.items()):
        mean = statistics.fmean(losses)
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
        low, high = (mean - error, mean + error) if baseline else (min(losses), max(losses))
        points.append((tokens, mean, low, high))
    return points


def draw_band(axes, points: list[tuple[float, float, float, float]], color, label: str, style: str = "-") -> None:
    """A line with a band."""
    if points:
        tokens, mean, low, high = zip(*points)
        millions = [count / 1e6 for count in tokens]
        axes.plot(millions, mean, style, color=color, label=label, linewidth=1.3)
        axes.fill_between(millions, low, high, color=color, alpha=0.2, linewidth=0)


# ----------------------------------------------------------------------------- learning rates


def tuning_configs(study: Study) -> dict[tuple[str, float], Config]:
    """{(arm, rate): config} of every run of the grid. Raises ConfigError if it would see the study's own evaluation."""
    grid = [(arm, rate) for arm, rates in study.learning_rates.items() for rate in rates]
    if not grid:
        raise ConfigError([Fault("study.learning_rates", "{arm: rates}, for --tune", study.learning_rates)])
    made = {(arm, rate): study.arm_config(arm, study.tuning | {"optim.learning_rate": rate}) for arm, rate in grid}
    faults = [fault for _, faults in made.values() for fault in faults]
    configs = study.configs()
    for (arm, _), (config, _) in made.items():
        if evaluations_overlap(config, configs[arm]):
            fault = f"data.eval_start and data.eval_tokens that share no token with the study's (arm {arm})"
            faults.append(Fault("study.tuning", fault, study.tuning))
    raise_faults(faults)
    return {key: config.resolved() for key, (config, _) in made.items()}


def evaluations_overlap(one: Config, other: Config) -> bool:
    """Whether two configs evaluate on a common token; eval_tokens 0 reads to the end."""
    first, second = sorted((one.data, other.data), key=lambda data: data.eval_start)
    return first.eval_tokens == 0 or first.eval_start + first.eval_tokens > second.eval_start


def tune(study: Study, out: Path, at_once: int, arms: list[str]) -> list[dict]:
    """Runs the grids into tuning.jsonl and writes tuning.md. Returns the new rows."""
    configs = {key: config for key, config in tuning_configs(study).items() if key[0] in arms}
    data = {key: data_fingerprint(config) for key, config in configs.items()}
    jobs = [
        Job(arm, seed, replace(config, train=replace(config.train, seed=seed)), data[arm, rate])
        for seed in study.tuning_seeds
        for (arm, rate), config in configs.items()
    ]
    new = run_missing(jobs, out / "tuning.jsonl", at_once)
    text = tuning_text(study, Ledger(out / "tuning.jsonl").rows())
    write_text(out / "tuning.md", text + "\n")
    print(text)
    return new


def tuning_losses(study: Study, rows: list[dict]) -> dict[str, dict[float, list[float]]]:
    """{arm: {rate: losses over seeds}} of the grids as they are now."""
    losses: dict[str, dict[float, list[float]]] = {}
    for (arm, rate), config in tuning_configs(study).items():
        wanted = config_hash(config)
        found = [row for row in rows if (row["arm"], row["config_hash"], row["crashed"]) == (arm, wanted, False)]
        values = {row["seed"]: guessing_loss(config) if row["val_loss"] is None else row["val_loss"] for row in found}
        if values:
            losses.setdefault(arm, {})[rate] = list(values.values())
    return losses


def tuning_text(study: Study, rows: list[dict]) -> str:
    """A table of mean losses by rate, the best rate of each arm, and warnings."""
    losses = tuning_losses(study, rows)
    rates = sorted({rate for grid in losses.values() for rate in grid})
    used, lines, warnings = study.configs(), [], []
    for arm, grid in losses.items():
        means = {rate: statistics.fmean(values) for rate, values in grid.items()}
        best = min(means, key=means.get)
        rate = used[arm].optim.learning_rate
        lines.append([arm, *(number(means.get(rate), ".4f") for rate in rates), f"{best:g}", f"{rate:g}"])
        if best in (min(means), max(means)):
            warnings.append(f"- {arm}: the best rate, {best:g}, is at the edge of its grid: widen it.")
        if not math.isclose(best, rate):
            warnings.append(f"- {arm}: the study uses {rate:g}, and {best:g} was better here.")
    head = ["arm", *(f"{rate:g}" for rate in rates), "best", "the study's"]
    seeds = ", ".join(map(str, study.tuning_seeds))
    text = f"Mean validation loss by peak rate, on seeds {seeds} and validation tokens of their own."
    return "\n\n".join(["## Learning rates", text, table(head, lines), *warnings])


# ------------------------------------------------------------------------------- the command


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare variants over paired seeds, with intervals.")
    parser.add_argument("study", type=Path, help="a file such as configs/study_cpu.py")
    parser.add_argument("--seeds", type=int, help="how many seeds (default: those of the study)")
    jobs = "runs at once, which share the cores; 0: in this process (default: one a core, or one on a GPU)"
    parser.add_argument("--jobs", type=int, help=jobs)
    parser.add_argument("--out", type=Path, help="folder of runs.jsonl and the report (default out/STUDY)")
    parser.add_argument("--arms", help="only these arms and the baseline, by comma")
    parser.add_argument("--report", action="store_true", help="no training: draw the report again from runs.jsonl")
    parser.add_argument("--tune", action="store_true", help="try the learning rates that the study lists")
    return parser.parse_args(arguments)


def chosen_arms(study: Study, text: str | None) -> list[str]:
    """The arms to run, in the study's order. Raises ConfigError for unknown names."""
    names = text.split(",") if text else list(study.arms)
    known = "arms of the study: " + ", ".join(study.arms)
    raise_faults([Fault("--arms", known, name) for name in names if name not in study.arms])
    return [arm for arm in study.arms if arm in names]


def check_numbers(options: argparse.Namespace) -> None:
    """Raises ConfigError for counts that make no sense."""
    least = {"seeds": 1, "jobs": 0}
    given = {name: getattr(options, name) for name in least}
    wrong = {name: value for name, value in given.items() if value is not None and value < least[name]}
    raise_faults([Fault(f"--{name}", f"at least {least[name]}", value) for name, value in wrong.items()])


def run_study(study: Study, options: argparse.Namespace, out: Path) -> list[dict]:
    """The runs that are missing. Returns the new rows."""
    at_once = (1 if torch.cuda.is_available() else cores()) if options.jobs is None else options.jobs
    arms = chosen_arms(study, options.arms)
    if options.tune:
        return tune(study, out, at_once, arms)
    configs = {arm: config for arm, config in study.configs().items() if arm in (*arms, study.baseline)}
    return run_missing(make_jobs(configs, study.first_seeds(options.seeds)), out / "runs.jsonl", at_once)


def stop_on_signals() -> None:
    """SIGINT and SIGTERM end the study; set by hand, since a shell starts background jobs deaf to the first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def main(arguments: list[str] | None = None) -> None:
    """The command. Exit status 1 if a run crashed, 130 if stopped."""
    options = parse_arguments(arguments)
    check_numbers(options)
    study = load_study(options.study)
    out = options.out or Path("out") / options.study.stem
    try:
        stop_on_signals()
        new = [] if options.report else run_study(study, options, out)
    except KeyboardInterrupt:
        print(f"\nstopped; finished runs are in {out}, and the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None
    if not options.tune:
        print(write_report(study, options.study.stem, out, f"python ablate.py {options.study} --out {out}"))
        print(f"\nin {out}: runs.jsonl, summary.json, report.md, losses.png, curves.png")
    if crashed := [row for row in new if row["crashed"]]:
        lines = (f"crashed: {row['arm']}, seed {row['seed']}: {row['reason']}" for row in crashed)
        print("\n".join(lines), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    from ablate import main  # this file as the module whose Study the study files use, not as a script

    run_command(main)
