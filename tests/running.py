"""A tiny run for the tests: its config and data, real processes that train it, and faults built into them.

A process is forked from a server that has imported torch already, which takes a tenth of a start from nothing;
it is a process like any other, with its own id, to be hit by real signals. `start_command` starts one from
nothing, by the command that a user types.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 240  # seconds that anything here may take on a busy machine: only a fault takes so long
WORDS = "the scale vector of a norm folds into the matrix behind it and conditions how fast it learns".split()

CONFIG = """
from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from moe import MoEConfig
from norms import ScaleConfig
from optim import OptimConfig

config = Config(
    model=ModelConfig(n_layer=2, n_head=2, d_model=32, d_ff=64, vocab_size=257, block_size=32),
    scale=ScaleConfig(strategy="unified"),
    moe={moe},
    optim=OptimConfig(learning_rate=3e-3, schedule="wsd", warmup=0.2, decay_share=0.3),
    data=DataConfig(path={data!r}, source={source!r}, tokenizer="bytes"),
    train=TrainConfig(max_steps=40, tokens_per_step=256, micro_batch=2, log_interval=1, eval_interval=10,
                      checkpoint_interval=5, out_dir={out!r}, device="cpu"),
)
"""
MOE = "MoEConfig(n_expert=4, top_k=2, n_shared=1, d_ff=16, bias_rate=0.01)"


def write_files(folder: Path) -> Path:
    """A prepared data folder, and tiny.py and tiny_moe.py, runs of 40 steps in which an epoch ends. Returns `folder`."""
    from prepare_data import prepare

    text, random = folder / "text", np.random.default_rng(0)
    text.mkdir(parents=True)
    for number in range(40):
        (text / f"{number:02d}.txt").write_text(" ".join(random.choice(WORDS, 30)))
    prepare(str(text), "bytes", folder / "data", validation_fraction=0.2, progress=False)
    for name, moe in (("tiny", "None"), ("tiny_moe", MOE)):
        values = dict(moe=moe, data=str(folder / "data"), source=str(text), out=str(folder / "out"))
        (folder / f"{name}.py").write_text(CONFIG.format(**values))
    return folder


def options(**values) -> list[str]:
    """train__max_steps=3 -> --train.max_steps=3"""
    return [f"--{key.replace('__', '.')}={value}" for key, value in values.items()]


# ----------------------------------------------------------------------------- what a run wrote


def rows(run_dir: Path) -> list[dict]:
    """The whole lines of metrics.jsonl so far."""
    path = Path(run_dir) / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def curve(run_dir: Path) -> list[dict]:
    """The rows without what a clock gave."""
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows(run_dir)]


def training(run_dir: Path) -> list[dict]:
    """The rows of training steps without what a clock gave."""
    return [row for row in curve(run_dir) if "train_loss" in row]


def losses(run_dir: Path) -> list[float]:
    return [row["train_loss"] for row in training(run_dir)]


def last_step(run_dir: Path) -> int:
    return max((row["step"] for row in rows(run_dir)), default=0)


def same_state(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, optimizer, progress and position, bit for bit."""
    from checkpoint import content_hash, load_checkpoint

    states = [load_checkpoint(Path(run_dir) / "latest.pt") for run_dir in (one, other)]
    for state in states:
        for key in ("seconds", "wall_seconds"):
            state["progress"].pop(key)
        del state["config"], state["sha256"]
    return content_hash(states[0]) == content_hash(states[1])


# ----------------------------------------------------------------------------------- processes


class Process:
    """A running process. out: what it printed, both streams together."""

    def __init__(self, pid: int, log: Path, popen: subprocess.Popen | None = None):
        self.pid, self.log, self.popen = pid, log, popen

    @property
    def out(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def poll(self) -> int | None:
        """The exit status, -9 after SIGKILL; None while it runs."""
        if self.popen:
            return self.popen.poll()
        ended = self.log.with_suffix(".exit")
        return int(ended.read_text()) if ended.exists() else None

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def until(self, condition) -> None:
        """Waits until condition() holds, or the process has ended."""
        end = time.monotonic() + DEADLINE
        while not condition() and self.poll() is None:
            assert time.monotonic() < end, f"still waiting; it printed:\n{self.out}"
            time.sleep(0.005)

    def wait(self, expected: int | None = None) -> int:
        """Its exit status; with `expected`, fails unless it is that."""
        self.until(lambda: False)
        status = self.poll()
        assert expected is None or status == expected, f"ended with {status}; it printed:\n{self.out}"
        return status


def wait_for_all(processes: list[Process], expected: int) -> None:
    """Waits until all have ended with the expected status; when one has not, those that wait for it are killed."""
    failed = lambda: [process for process in processes if process.poll() not in (None, expected)]
    try:
        for process in processes:
            process.until(lambda: failed())
        assert not failed(), "".join(f"{process.pid} ended with {process.poll()}:\n{process.out}\n" for process in processes)
    finally:
        for process in processes:
            process.send(signal.SIGKILL)


class Server:
    """Forks processes that train."""

    def __init__(self):
        line = [sys.executable, __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.popen = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        atexit.register(self.popen.kill)

    def start(self, log: Path, arguments: list[str], fault: dict, environment: dict) -> Process:
        job = {"log": str(log), "arguments": arguments, "fault": fault, "environment": environment}
        self.popen.stdin.write(json.dumps(job) + "\n")
        self.popen.stdin.flush()
        return Process(int(self.popen.stdout.readline()), log)


servers: list[Server] = []


def start(folder: Path, *arguments: str, config: str = "tiny", fault: dict | None = None, environment: dict | None = None) -> Process:
    """A process of its own that does what `python train.py folder/config.py arguments` does, with a fault in it."""
    if not servers:
        servers.append(Server())
    log = folder / f"log_{time.monotonic_ns()}.txt"
    return servers[0].start(log, [str(folder / f"{config}.py"), *arguments], fault or {}, environment or {})


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_ranks(folder: Path, count: int, *arguments: str, fault: dict | None = None, config: str = "tiny") -> list[Process]:
    """`count` processes that train one run together over gloo. The fault is in all; its "rank" says whom it hits."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        start(folder, *arguments, config=config, fault=fault, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]


def start_command(folder: Path, *line: str) -> Process:
    """`python line...`, from nothing, in a session of its own."""
    log = folder / f"log_{time.monotonic_ns()}.txt"
    with open(log, "w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        popen = subprocess.Popen([sys.executable, *line], stdout=file, stderr=file, cwd=ROOT, env=environment, start_new_session=True)
    return Process(popen.pid, log, popen)


def serve() -> None:
    """Forks a process for each line of stdin; answers with its id, and writes its exit status beside its log."""
    import train  # noqa: F401: the slow part, once

    for line in sys.stdin:
        job, (reading, writing) = json.loads(line), os.pipe()
        if os.fork() == 0:  # the one who waits for the process
            pid = os.fork()
            if pid == 0:
                run_job(job)
            os.write(writing, b"%d" % pid)
            os.close(writing)
            _, status = os.waitpid(pid, 0)
            ended = Path(job["log"]).with_suffix(".exit")
            ended.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            os.replace(ended.with_suffix(".new"), ended)
            os._exit(0)
        os.close(writing)
        print(os.read(reading, 20).decode(), flush=True)
        os.close(reading)
        while True:  # takes note of those who wait no longer
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break


def run_job(job: dict) -> None:
    """Becomes the process of a job."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.setsid()
    os.environ.update(job["environment"])
    sys.argv = ["train.py", *job["arguments"]]
    status = 1
    try:
        import train
        from checkpoint import CheckpointError
        from config import run_command

        arm(job["fault"])
        run_command(train.main, CheckpointError, OSError)
        status = 0
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# -------------------------------------------------------------------------------------- faults


def arm(fault: dict) -> None:
    """Builds a fault into this process.

    {"signal": n, "at": place, "call": k} sends it signal n when it comes to a place for the k-th time.
    {"nan": steps} makes the gradient of those steps not a number; {"rank": r}: on that process alone.
    {"limit": bytes}: no file can grow beyond. {"count": file}: the all-reduces of gradients are counted in it.
    {"elsewhere": [folder, other]}: it finds the checkpoints of one folder in the other.
    {"wait": step, "file": path}: after a step it makes the file, and waits until "go on" is in it.
    {"hang": step, "file": path}: the same, but for ever; once a signal was handled, "told" is in the file.
    """
    if int(os.environ.get("RANK", 0)) != fault.get("rank", int(os.environ.get("RANK", 0))):
        return
    if "at" in fault:
        place_signal(fault)
    if "nan" in fault:
        place_nan(fault["nan"])
    if "limit" in fault:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["limit"], fault["limit"]))
    if "count" in fault:
        place_counter(Path(fault["count"]))
    if "file" in fault:
        place_pause(fault, Path(fault["file"]))
    if "elsewhere" in fault:
        import train

        folder, other = map(Path, fault["elsewhere"])
        load = train.load_newest
        train.load_newest = lambda run_dir, *more: load(other if run_dir == folder else run_dir, *more)


def place_signal(fault: dict) -> None:
    import checkpoint
    import torch
    import train

    left = [fault["call"]]

    def hit() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), fault["signal"])

    def before(owner, name: str, concerns=lambda *_: True) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments, **keywords):
            if concerns(*arguments):
                hit()
            return original(*arguments, **keywords)

        setattr(owner, name, wrapped)

    def save_in_halves(state, file, save=torch.save) -> None:
        import io

        buffer = io.BytesIO()
        save(state, buffer)
        content = buffer.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        hit()
        file.write(content[len(content) // 2 :])

    places = {
        "micro-batch": lambda: before(train.Run, "to_device"),
        "evaluation": lambda: before(train.Run, "evaluate"),
        "row": lambda: before(train.Run, "write_row"),
        "written by half": lambda: setattr(torch, "save", save_in_halves),
        "written": lambda: before(checkpoint, "link_previous"),
        "linked": lambda: before(os, "replace", lambda _, to: Path(to).name == "latest.pt"),
        "renamed": lambda: before(checkpoint, "sync_folder"),
        "start": lambda: before(train, "joined_world"),
        "summary": lambda: before(train.Run, "summary"),
    }
    places[fault["at"]]()


def place_nan(steps: list[int]) -> None:
    import train

    original = train.Run.gradients

    def gradients(run):
        if run.progress.step + 1 not in steps:
            return original(run)
        handle = next(run.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
        try:
            return original(run)
        finally:
            handle.remove()

    train.Run.gradients = gradients


def place_pause(fault: dict, file: Path) -> None:
    import train

    original = train.Run.training_step

    def training_step(run):
        row = original(run)
        if run.progress.step == fault.get("wait", fault.get("hang")):
            file.touch()
            while "hang" in fault or file.read_text() != "go on":
                time.sleep(0.005)
                if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and not file.read_text():
                    file.write_text("told")
        return row

    train.Run.training_step = training_step


def place_counter(path: Path) -> None:
    import train
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    original = train.Run.wrap

    def wrap(run):
        def counted(group, bucket):
            with open(path, "a") as file:
                file.write(f"{run.progress.step}\n")
            return allreduce_hook(group, bucket)

        original(run)
        run.forward.register_comm_hook(None, counted)

    train.Run.wrap = wrap


if __name__ == "__main__":
    serve()
