"""ablate.py: pairs that are pairs, runs that are never lost or mixed, statistics that hold what they promise."""

import json
import math
import multiprocessing
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import ablate
from ablate import (
    Job,
    Ledger,
    Study,
    collect,
    config_hash,
    holm,
    make_jobs,
    paired,
    run_missing,
    seeds_needed,
    summarize,
    tokens_at_loss,
    write_report,
)
from config import Config, ConfigError, TrainConfig
from conftest import ROOT
from data import DataConfig, DataError
from model import ModelConfig
from optim import OptimConfig
from prepare_data import prepare

STUDY_FILE = """
from ablate import Study
from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from optim import OptimConfig

study = Study(
    base=Config(
        model=ModelConfig(n_layer=1, n_head=1, d_model=8, d_ff=8, vocab_size=257, vocab_multiple=1, block_size=16),
        optim=OptimConfig(learning_rate=1e-2),
        data=DataConfig(path={path!r}, source={source!r}, eval_tokens=640),
        train=TrainConfig(max_steps=8, tokens_per_step=128, micro_batch=8, eval_interval=4, device="cpu"),
    ),
    {settings}
)
"""
ARMS = {"plain": {}, "same": {}, "slow": {"optim.learning_rate": 1e-5}, "none": {"scale.strategy": "none"}}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small run faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """(data folder, source) of a few thousand tokens."""
    folder = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(0)
    for number in range(60):
        words = generator.choice(["scale", "vector", "norm", "decay", "weight", "of", "the"], 40)
        (folder / f"{number}.txt").write_text(" ".join(words))
    prepare(str(folder), out=folder / "tokens", validation_fraction=0.4, progress=False)
    meta = json.loads((folder / "tokens" / "meta.json").read_text())
    assert meta["splits"]["validation"]["tokens"] > 1400  # the study's part and the tuning part
    return str(folder / "tokens"), str(folder)


def base_config(text):
    return Config(
        model=ModelConfig(n_layer=1, n_head=1, d_model=8, d_ff=8, vocab_size=257, vocab_multiple=1, block_size=16),
        optim=OptimConfig(learning_rate=1e-2),
        data=DataConfig(path=text[0], source=text[1], eval_tokens=640),
        train=TrainConfig(max_steps=8, tokens_per_step=128, micro_batch=8, eval_interval=4, device="cpu"),
    )


def tiny_study(text, arms=ARMS, seeds=(0, 1, 2), **settings):
    return Study(base=base_config(text), arms=arms, seeds=seeds, **settings)


def run(study, folder, seeds=None):
    """Makes the missing runs in this process; returns the new rows."""
    return run_missing(make_jobs(study.configs(), seeds or study.seeds), folder / "runs.jsonl", at_once=0)


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """(study, folder) with all runs of ARMS made."""
    study, folder = tiny_study(text), tmp_path_factory.mktemp("finished")
    run(study, folder)
    return study, folder


def results_of(study, folder):
    return collect(study, study.configs(), Ledger(folder / "runs.jsonl").rows())


def arm_of(summary, name):
    return next(arm for arm in summary["arms"] if arm["name"] == name)


def synthetic(study, losses):
    """Results of made-up losses {arm: [of each seed]}."""
    rows = []
    for arm, config in study.configs().items():
        for seed, loss in enumerate(losses[arm]):
            row = dict(arm=arm, seed=seed, config_hash=config_hash(config), data_sha256="x", crashed=False)
            row |= dict(val_loss=loss, diverged=loss is None, reason="loss nan", parameters=10, learning_rate=0.1)
            rows.append(row | dict(tokens_per_second=100.0, curve=[[100, 3.0], [1000, 2.0]], machine={}))
    return collect(study, study.configs(), rows)


# ------------------------------------------------------------------------------------- pairs


def test_identical_arm_differs_by_exactly_zero(finished):
    same = arm_of(summarize(results_of(*finished)), "same")
    assert (same["difference"], same["ci_low"], same["ci_high"], same["p_value"]) == (0.0, 0.0, 0.0, 1.0)


def test_sabotaged_rate_is_significantly_worse(finished):
    slow = arm_of(summarize(results_of(*finished)), "slow")
    assert slow["difference"] > 0.05 and slow["ci_low"] > 0 and slow["holm_p_value"] < 0.05


def test_run_repeats_bit_for_bit(finished, tmp_path):
    study, folder = finished
    run(replace(study, arms={"plain": {}}), tmp_path, seeds=(1,))
    (again,) = Ledger(tmp_path / "runs.jsonl").rows()
    before = results_of(study, folder).runs["plain"][1]
    assert again["val_loss"] == before["val_loss"] and again["curve"] == before["curve"]


def test_seeds_differ_and_runs_go_seed_by_seed(finished):
    study, folder = finished
    rows = Ledger(folder / "runs.jsonl").rows()
    assert [(row["seed"], row["arm"]) for row in rows] == [(seed, arm) for seed in study.seeds for arm in study.arms]
    assert len({row["val_loss"] for row in rows if row["arm"] == "plain"}) == len(study.seeds)


def test_row_says_what_ran(finished):
    row = Ledger(finished[1] / "runs.jsonl").rows()[0]
    assert row["curve"][-1] == [row["tokens"], row["val_loss"]] and row["steps"] == 8 and row["tokens"] == 1024
    assert row["machine"]["torch"] and row["machine"]["threads"] >= 1 and row["tokens_per_second"] > 0
    assert not row["diverged"] and row["learning_rate"] == 1e-2 and row["best_val_loss"] <= row["val_loss"]
    assert sorted(path.name for path in finished[1].iterdir() if path.name == "work") == []


# ------------------------------------------------------------------------- resume, not mixed


def test_finished_runs_are_skipped(text, tmp_path):
    study = tiny_study(text, {"plain": {}, "none": {"scale.strategy": "none"}}, seeds=(0,))
    assert len(run(study, tmp_path)) == 2
    assert run(study, tmp_path) == []
    more = run(study, tmp_path, seeds=study.first_seeds(2))
    assert [row["seed"] for row in more] == [1, 1]


def test_changed_config_is_not_mixed(text, tmp_path):
    before = tiny_study(text, {"plain": {}}, seeds=(0, 1))
    after = tiny_study(text, {"plain": {"optim.learning_rate": 2e-2}}, seeds=(0, 1))
    run(before, tmp_path)
    assert len(run(after, tmp_path)) == 2
    results = results_of(after, tmp_path)
    assert results.left_out["another config"] == 2
    assert {row["learning_rate"] for row in results.all_rows()} == {2e-2}
    assert len(Ledger(tmp_path / "runs.jsonl").rows()) == 4


def test_hash_leaves_out_what_changes_no_result(text):
    config = base_config(text).resolved()
    train, data = replace(config.train, seed=9, out_dir="y"), replace(config.data, path="z")
    other = replace(config, name="x", train=train, data=data)
    assert config_hash(config) == config_hash(other)
    assert config_hash(config) != config_hash(replace(config, train=replace(config.train, max_steps=9)))
    assert config_hash(config) != config_hash(replace(config, model=replace(config.model, qk_norm=True)))


def test_other_data_and_repeated_lines_are_counted(text):
    study = tiny_study(text, {"plain": {}})
    (row,) = synthetic(study, {"plain": [2.0]}).all_rows()
    rows = [row | {"data_sha256": "old"}, row, row | {"val_loss": 9.0}, row | {"crashed": True}]
    results = collect(study, study.configs(), rows)
    assert results.left_out == {"another config": 0, "other data": 1, "crashed": 1, "repeated": 1}
    assert results.runs["plain"][0]["val_loss"] == 2.0


def test_line_cut_short_is_no_run_and_the_next_starts_fresh(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"arm": "a"}\n{"arm": "b", "se')
    with Ledger(path).opened() as ledger:
        ledger.append({"arm": "c"})
    assert [row["arm"] for row in Ledger(path).rows()] == ["a", "c"]


def test_two_writers_are_refused(tmp_path):
    with Ledger(tmp_path / "runs.jsonl").opened():
        with pytest.raises(ConfigError, match="no other study"):
            with Ledger(tmp_path / "runs.jsonl").opened():
                raise AssertionError("a second writer was let in")


# ------------------------------------------------------------------- divergence and crashes


def test_divergence_is_recorded_and_counted(text, tmp_path):
    arms = {"plain": {}, "wild": {"optim.learning_rate": 1e30, "optim.clip": 0.0}}
    study = tiny_study(text, arms)
    run(study, tmp_path)
    wild = arm_of(summarize(results_of(study, tmp_path)), "wild")
    assert wild["diverged"] == 3 and wild["seeds"] == 3 and wild["mean"] >= math.log(257)
    write_report(study, "study", tmp_path, "command")
    report = (tmp_path / "report.md").read_text()
    assert "3 of 3" in report and "- wild, seed 0: " in report


def test_diverged_seed_counts_with_the_loss_of_guessing(text):
    results = synthetic(tiny_study(text, {"plain": {}, "none": {}}), {"plain": [2.0, 2.0], "none": [1.0, None]})
    none = arm_of(summarize(results), "none")
    assert none["seeds"] == 2 and none["diverged"] == 1
    assert none["difference"] == pytest.approx((-1 + math.log(257) - 2) / 2) and none["ci_low"] < 0 < none["ci_high"]


def test_crash_is_recorded_others_go_on_and_it_is_tried_again(text, tmp_path, monkeypatch):
    study = tiny_study(text, {"plain": {}, "none": {"scale.strategy": "none"}}, seeds=(0,))
    right = ablate.train

    def sometimes(config, quiet):
        if config.scale.strategy == "none":
            raise MemoryError("no room")
        return right(config, quiet)

    monkeypatch.setattr(ablate, "train", sometimes)
    assert [(row["arm"], row["crashed"]) for row in run(study, tmp_path)] == [("plain", False), ("none", True)]
    monkeypatch.undo()
    assert [(row["arm"], row["crashed"]) for row in run(study, tmp_path)] == [("none", False)]
    assert results_of(study, tmp_path).left_out["crashed"] == 1


def test_process_that_dies_is_a_crash(text):
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=sys.exit, args=(7,))
    process.start()
    sender.close()
    config = base_config(text).resolved()
    row = ablate.receive(receiver, process, Job("plain", 0, config, "x"))
    assert row["crashed"] and "exit code 7" in row["reason"]


# -------------------------------------------------------------------------------- statistics


def test_paired_interval_against_a_hand_example():
    """d = 1, 2, 3, 6: mean 3, sd sqrt(14 / 3), standard error sqrt(14 / 12); t(0.975, 3) = 3.18245."""
    result = paired([1.0, 2.0, 3.0, 6.0])
    half = 3.18244631 * math.sqrt(14 / 12)
    assert result["difference"] == 3 and result["ci_low"] == pytest.approx(3 - half, rel=1e-6)
    assert result["ci_high"] == pytest.approx(3 + half, rel=1e-6)
    assert result["p_value"] == pytest.approx(0.0689, abs=3e-4)


def test_paired_without_spread_or_pairs():
    assert paired([0.0, 0.0])["p_value"] == 1 and paired([0.5, 0.5])["p_value"] == 0
    assert paired([0.5])["ci_low"] is None and paired([0.5])["p_value"] is None


def test_interval_covers_the_truth_in_95_of_100_studies():
    """4000 synthetic studies of 8 seeds: the seed's own effect, which pairs cancel, is larger than the noise."""
    generator, truth, covered, false_alarms = np.random.default_rng(0), 0.003, 0, 0
    for _ in range(4000):
        seed_effect, noise = generator.normal(0, 0.02, 8), generator.normal(0, 0.003, (2, 8))
        baseline, arm = 1.5 + seed_effect + noise[0], 1.5 + truth + seed_effect + noise[1]
        result = paired(list(arm - baseline))
        covered += result["ci_low"] <= truth <= result["ci_high"]
        false_alarms += paired(list(arm - truth - baseline))["p_value"] < 0.05
    assert 0.93 <= covered / 4000 <= 0.97 and 0.03 <= false_alarms / 4000 <= 0.07


def test_holm_against_a_hand_example():
    """p = 0.01, 0.04, 0.03, 0.005 sorted times 4, 3, 2, 1: 0.02, 0.03, 0.06, then 0.04 raised to 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0] and holm([]) == []


def test_seeds_needed_finds_the_difference_as_often_as_it_says():
    n = seeds_needed(0.004, 0.003)
    generator = np.random.default_rng(1)
    found = sum(paired(list(generator.normal(0.003, 0.004, n)))["p_value"] < 0.05 for _ in range(1500)) / 1500
    assert 0.77 < found < 0.88 and seeds_needed(None, 0.003) is None and seeds_needed(1.0, 1e-4) is None


def test_tokens_at_loss():
    """On 3 - log10(tokens / 100), the loss 2.5 is at 10^2.5 tokens; an uptick does not count."""
    curve = [(100, 3.0), (1000, 2.0), (2000, 2.1), (10000, 1.0)]
    assert tokens_at_loss(curve, 2.5)[0] == pytest.approx(10**2.5)
    assert tokens_at_loss(curve, 0.9) == (None, "below") and tokens_at_loss(curve, 3.1) == (None, "above")


# ------------------------------------------------------------------------------------ report


def test_summary_is_what_the_rows_give(finished):
    study, folder = finished
    write_report(study, "study", folder, "command")
    summary = json.loads((folder / "summary.json").read_text())
    assert [arm["name"] for arm in summary["arms"]] == list(ARMS) and summary["baseline"] == "plain"
    losses = {}
    for row in map(json.loads, (folder / "runs.jsonl").read_text().splitlines()):
        losses.setdefault(row["arm"], {})[row["seed"]] = row["val_loss"]
    for arm in summary["arms"]:
        differences = np.array([losses[arm["name"]][seed] - losses["plain"][seed] for seed in (0, 1, 2)])
        half = 4.302653 * differences.std(ddof=1) / math.sqrt(3)
        mean = np.mean(list(losses[arm["name"]].values()))
        assert arm["seeds"] == 3 and arm["mean"] == pytest.approx(mean, abs=1e-12)
        assert arm["difference"] == pytest.approx(differences.mean(), abs=1e-12)
        assert arm["ci_low"] == pytest.approx(differences.mean() - half, abs=1e-7)


def test_report_needs_the_rows_alone(finished, tmp_path, monkeypatch):
    study, folder = finished
    (tmp_path / "runs.jsonl").write_text((folder / "runs.jsonl").read_text())
    monkeypatch.setattr(ablate, "train", None)
    monkeypatch.setattr(ablate, "prepare_if_missing", None)
    write_report(study, "study", tmp_path, "command")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"runs.jsonl", "summary.json", "report.md", "losses.png", "curves.png"}
    first = (tmp_path / "losses.png").read_bytes()
    write_report(study, "study", tmp_path, "command")
    assert (tmp_path / "losses.png").read_bytes() == first and first[:4] == b"\x89PNG"


def test_further_baselines_and_lengths(text):
    arms = {"plain": {}, "none": {}, "hg": {}, "half": {"train.max_steps": 4}, "double": {"train.max_steps": 16}}
    study = tiny_study(text, arms, comparisons={"hg": "none"}, lengths=("half", "double"))
    losses = {"plain": [2.0, 2.0], "none": [2.5, 2.6], "hg": [2.4, 2.3], "half": [3.0, 3.0], "double": [1.0, 1.0]}
    summary = summarize(synthetic(study, losses))
    assert [arm["name"] for arm in summary["arms"]] == ["plain", "none", "hg"]
    assert summary["comparisons"][0]["difference"] == pytest.approx(-0.2)
    assert arm_of(summary, "none")["compute_saved"] == pytest.approx(2**-0.55)
    assert [length["tokens"] for length in summary["lengths"]] == [512, 2048]


def test_report_without_the_baseline_says_so(text):
    study = tiny_study(text, {"plain": {}, "none": {}})
    results = synthetic(study, {"plain": [], "none": [2.0]})
    with pytest.raises(DataError, match="no finished run of the baseline plain"):
        summarize(results)


# --------------------------------------------------------------------------------- bad input


def test_all_faults_of_all_arms_at_once(text):
    arms = {"plain": {"optim.learning_rat": 1.0}, "none": {"scale.strategy": "non", "model.n_layer": 0}}
    with pytest.raises(ConfigError) as error:
        tiny_study(text, arms).configs()
    message = str(error.value)
    assert len(error.value.faults) >= 3
    assert "(arm plain)" in message and "(arm none)" in message and "optim.learning_rate" in message


@pytest.mark.parametrize(
    "settings",
    [
        dict(baseline="plan"),
        dict(comparisons={"none": "nothing"}),
        dict(lengths=("half",)),
        dict(learning_rates={"hg": [1e-3]}),
        dict(seeds=(1, 1)),
        dict(learning_rates={"none": [1e-3]}, tuning_seeds=(0,)),
        dict(smallest_difference=0.0),
    ],
)
def test_study_faults(text, settings):
    assert len(tiny_study(text, **{"arms": {"plain": {}, "none": {}}, **settings}).problems()) == 1


def test_tuning_must_not_see_the_studys_evaluation(text):
    study = tiny_study(text, learning_rates={"plain": [1e-3, 1e-2]}, tuning={"data.eval_start": 320})
    with pytest.raises(ConfigError, match="share no token"):
        ablate.tuning_configs(study)


# ------------------------------------------------------------------------------- the command


def command(*arguments):
    return subprocess.run([sys.executable, "ablate.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)


def write_study(folder, text, settings):
    path = folder / "study_test.py"
    path.write_text(STUDY_FILE.format(path=text[0], source=text[1], settings=settings))
    return path


def test_command_runs_in_processes_and_reports(text, tmp_path):
    path = write_study(tmp_path, text, "arms={'plain': {}, 'same': {}}, seeds=(0, 1)")
    done = command(path, "--out", tmp_path / "out", "--seeds", 1, "--jobs", 2)
    assert done.returncode == 0, done.stderr
    rows = Ledger(tmp_path / "out" / "runs.jsonl").rows()
    assert len(rows) == 2 and rows[0]["val_loss"] == rows[1]["val_loss"] and not (tmp_path / "out" / "work").exists()
    assert "too few seeds" in done.stdout


def test_command_names_what_is_wrong(text, tmp_path):
    unknown = command(tmp_path / "study_none.py")
    assert unknown.returncode == 2 and "study_none.py" in unknown.stderr and "Traceback" not in unknown.stderr
    path = write_study(tmp_path, text, "arms={'plain': {'model.n_laier': 2}, 'x': {'train.seed': 'one'}}")
    wrong = command(path, "--jobs", 1)
    assert wrong.returncode == 2 and "model.n_layer" in wrong.stderr and "(arm x)" in wrong.stderr


def test_main_checks_its_arguments(text, tmp_path):
    path = write_study(tmp_path, text, "arms={'plain': {}}")
    for arguments in (["--seeds", "0"], ["--jobs", "-1"], ["--arms", "plan"], ["--tune"]):
        with pytest.raises(ConfigError):
            ablate.main([str(path), "--out", str(tmp_path / "out"), *arguments])


def test_tune_finds_the_best_rate_and_warns_at_the_edge(text, tmp_path, capsys):
    settings = "arms={'plain': {}}, learning_rates={'plain': [1e-4, 1e-3, 3e-2]}, tuning_seeds=(70,),"
    path = write_study(tmp_path, text, settings + " tuning={'data.eval_start': 704}")
    ablate.main([str(path), "--out", str(tmp_path / "out"), "--tune", "--jobs", "0"])
    table = (tmp_path / "out" / "tuning.md").read_text()
    assert "the best rate, 0.03, is at the edge" in table and "the study uses 0.01" in table
    assert table.strip() in capsys.readouterr().out
    rows = Ledger(tmp_path / "out" / "tuning.jsonl").rows()
    assert [row["seed"] for row in rows] == [70, 70, 70] and not (tmp_path / "out" / "runs.jsonl").exists()
