"""What happens to a run that is hit? Each test hits a real process, and then asks whether anything was lost.

Lost is a run that does not go on to the same final state as the undisturbed one, or one that ends without a
clear message or with a file that does not load. docs/faults.md has the table.
"""

import json
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest

from checkpoint import CheckpointError, load_checkpoint, load_model, load_newest
from running import (
    ROOT,
    curve,
    last_step,
    losses,
    options,
    rows,
    same_state,
    start,
    start_command,
    start_ranks,
    training,
    wait_for_all,
    write_files,
)

RESUME = options(train__resume="auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("faults") / "tiny")


@pytest.fixture(scope="module")
def straight(folder):
    """The undisturbed run of 40 steps."""
    start(folder, *options(train__out_dir=folder / "straight")).wait(0)
    assert len(losses(folder / "straight")) == 40
    return folder / "straight"


def goes_on(folder, out, straight, *arguments):
    """Resumes, to the end, and compares every row and the whole final state with the undisturbed run's."""
    process = start(folder, *options(train__out_dir=out), *RESUME, *arguments)
    process.wait(0)
    assert curve(out) == curve(straight)
    assert same_state(out, straight)
    return process


def everything_loads(out):
    """Every checkpoint in a run directory is whole, and nothing unfinished lies about."""
    for path in out.glob("*.pt"):
        load_checkpoint(path)
    for name in ("config.json", "summary.json"):
        if (out / name).exists():
            json.loads((out / name).read_text())


# ------------------------------------------------------------------------------------- kill -9

PLACES = [
    ("micro-batch", 69),  # 4 a step, and 15 in the evaluation of step 10: in accumulation, in step 14
    ("evaluation", 2),  # after the step, before its checkpoint
    ("row", 23),
    ("written by half", 6),  # saves: best and latest of step 5, 10, ...: the 6th is half of a latest.pt
    ("written", 4),  # whole, under a temporary name
    ("linked", 5),  # both names are the old one's
    ("renamed", 8),  # the folder is not synchronised
    ("summary", 1),  # all is done but the summary
]


@pytest.mark.parametrize("place, call", PLACES)
def test_killed_at_every_kind_of_moment(folder, straight, place, call):
    out = folder / f"killed_{place.replace(' ', '_')}"
    process = start(folder, *options(train__out_dir=out), fault={"signal": signal.SIGKILL, "at": place, "call": call})
    process.wait(-signal.SIGKILL)
    everything_loads(out)
    goes_on(folder, out, straight)
    assert not list(out.glob("*.tmp"))


def test_killed_near_step_17_and_resumed_with_other_evaluations(folder):
    """By the command as a user types it; every train_loss of 40 steps."""
    values = dict(train__checkpoint_interval=4, train__eval_interval=100)
    start(folder, *options(train__out_dir=folder / "whole_40", **values)).wait(0)
    command, out = ["train.py", str(folder / "tiny.py")], folder / "killed_17"
    process = start_command(folder, *command, *options(train__out_dir=out, **values))
    process.until(lambda: last_step(out) >= 17)
    process.send(signal.SIGKILL)
    process.wait(-signal.SIGKILL)
    assert 17 <= last_step(out) < 40
    values |= dict(train__eval_interval=3, data__eval_tokens=64)
    process = start_command(folder, *command, *options(train__out_dir=out, **values), *RESUME)
    process.wait(0)
    resumed = int(re.search(r"resumed .* at step (\d+)", process.out)[1])
    assert resumed >= 16 and resumed % 4 == 0
    assert training(out) == training(folder / "whole_40") and len(training(out)) == 40


def soak(folder, straight, kills, seed, extra=(), config="tiny"):
    """Starts the run again and again, and kills it at a random row and a random time behind it. Returns the figures."""
    chance, out = random.Random(seed), folder / f"soak_{config}_{seed}"
    survived = finished = saving = 0
    for number in range(kills):
        process = start(folder, *options(train__out_dir=out), *RESUME, *extra, config=config)
        reached = last_step(out)
        goal = reached + chance.randrange(0, 6)
        process.until(lambda: last_step(out) >= goal and process.out)
        end = time.monotonic() + chance.random() * 0.3
        process.until(lambda: time.monotonic() > end)
        process.send(signal.SIGKILL)
        finished += process.wait() == 0  # it was over already: the next round starts from the end
        assert process.wait() in (0, -signal.SIGKILL), process.out
        everything_loads(out)
        saving += any(out.glob("*.tmp"))
        survived += 1
        if process.wait() == 0:
            shutil.rmtree(out)
    start(folder, *options(train__out_dir=out), *RESUME, *extra, config=config).wait(0)
    pairs = list(zip(training(out), training(straight), strict=True))
    differing = sum(one != other for one, other in pairs)
    figures = {"kills": kills - finished, "survived": survived - finished, "saving": saving}
    return figures | {"steps": len(pairs), "differing": differing, "out": out}


def test_killed_at_random_moments(folder, straight):
    figures = soak(folder, straight, kills=3, seed=0)
    assert figures["differing"] == 0 and same_state(figures["out"], straight)
    assert curve(figures["out"]) == curve(straight)


@pytest.mark.soak
@pytest.mark.parametrize("config, extra", [("tiny", ()), ("tiny_moe", ("--optim.optimizer=muon",))])
def test_killed_20_times_at_random_moments(folder, config, extra, capsys):
    """Of a run that saves at every second step, so that many of them are in a save."""
    extra = [*extra, *options(train__max_steps=120, train__checkpoint_interval=2)]
    start(folder, *options(train__out_dir=folder / f"undisturbed_{config}"), *extra, config=config).wait(0)
    figures = soak(folder, folder / f"undisturbed_{config}", kills=20, seed=1, extra=extra, config=config)
    with capsys.disabled():
        print(f"\n{config} {' '.join(extra[:-2])}: {figures['kills']} kills, {figures['saving']} of them in a save, {figures['survived']} survived, "
              f"{figures['steps']} steps compared, {figures['differing']} differing")  # fmt: skip
    assert figures["kills"] == figures["survived"] == 20 and figures["differing"] == 0
    assert curve(figures["out"]) == curve(folder / f"undisturbed_{config}")
    assert same_state(figures["out"], folder / f"undisturbed_{config}")


# -------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number, place, call, step", [
    (signal.SIGTERM, "micro-batch", 27, 7),  # in accumulation
    (signal.SIGTERM, "written by half", 3, 11),  # in the save of step 10: one more step
    (signal.SIGTERM, "evaluation", 1, 10),
    (signal.SIGINT, "linked", 2, 11),
    (signal.SIGINT, "micro-batch", 203, 40),  # in the last step
])  # fmt: skip
def test_told_to_stop(folder, straight, number, place, call, step):
    """Finishes the step, saves, ends with status 0 and a line on how to go on, which works as it stands."""
    out = folder / f"told_{number}_{place.replace(' ', '_')}_{call}"
    process = start(folder, *options(train__out_dir=out), fault={"signal": number, "at": place, "call": call})
    process.wait(0)
    assert f"stopped by {signal.Signals(number).name} after step {step}, all saved in {out}" in process.out
    assert load_checkpoint(out / "latest.pt")["step"] == last_step(out) == step
    everything_loads(out)
    told = re.search(r"go on with the same command and (--\S+) (--\S+)", process.out).groups()
    start(folder, *told).wait(0)
    assert curve(out) == curve(straight) and same_state(out, straight)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_told_twice(folder, straight, second):
    """The second time it stops at once, also with the other signal; the checkpoint before stays."""
    out = folder / f"twice_{second}"
    process = start(folder, *options(train__out_dir=out, train__max_steps=100000), fault={"hang": 8, "file": str(folder / f"hangs_{second}")})
    process.until(lambda: (folder / f"hangs_{second}").exists())
    process.send(signal.SIGINT)
    process.until(lambda: (folder / f"hangs_{second}").read_text() == "told")
    assert process.poll() is None
    process.send(second)
    process.wait(-second)
    assert load_checkpoint(out / "latest.pt")["step"] == 5
    everything_loads(out)


def test_told_to_save(folder, straight):
    """SIGUSR1: a checkpoint after this step, and on it goes."""
    out = folder / "usr1"
    fault = {"signal": signal.SIGUSR1, "at": "micro-batch", "call": 27}
    values = dict(train__checkpoint_interval=1000, train__keep_every=0)
    process = start(folder, *options(train__out_dir=out, **values), fault=fault)
    process.wait(0)
    assert load_checkpoint(out / "previous.pt")["step"] == 7
    assert curve(out) == curve(straight)


def test_a_signal_before_there_is_anything_to_save(folder, straight):
    """SIGUSR1 while a run is still starting does not kill it."""
    out = folder / "early"
    start(folder, *options(train__out_dir=out), fault={"signal": signal.SIGUSR1, "at": "start", "call": 1}).wait(0)
    assert curve(out) == curve(straight)


# ------------------------------------------------------------------------------------ full disk


def test_no_space_for_a_checkpoint(folder, straight):
    """The system refuses to let a file grow: a message, status 2, and the checkpoint before stays."""
    out = folder / "full"
    start(folder, *options(train__out_dir=out, train__stop_at_step=10)).wait(0)
    before = (out / "latest.pt").read_bytes()
    process = start(folder, *options(train__out_dir=out), *RESUME, fault={"limit": len(before) // 2})
    process.wait(2)
    assert "cannot save" in process.out and "the one saved before is unchanged" in process.out
    assert "Traceback" not in process.out
    assert (out / "latest.pt").read_bytes() == before and not list(out.glob("*.tmp"))
    everything_loads(out)
    # stop_at_step made an evaluation of its own at step 10, which this run has too
    goes_on(folder, out, straight)


def test_no_space_for_a_row(folder, straight):
    out = folder / "full_rows"
    start(folder, *options(train__out_dir=out, train__stop_at_step=30)).wait(0)
    limit = (out / "metrics.jsonl").stat().st_size + 400  # in the middle of a row soon, before the next checkpoint
    process = start(folder, *options(train__out_dir=out), *RESUME, fault={"limit": limit}, environment={"TQDM_DISABLE": "1"})
    process.wait(2)
    assert "cannot write" in process.out and "metrics.jsonl" in process.out and "Traceback" not in process.out
    assert last_step(out) in (31, 32, 33) and load_checkpoint(out / "latest.pt")["step"] == 30
    everything_loads(out)
    goes_on(folder, out, straight)


# --------------------------------------------------------------------------- damaged checkpoints


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[: len(content) * 2 // 3]
    elif how == "a bit flipped":
        content[len(content) // 2] ^= 16
    else:
        content = bytearray()
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "a bit flipped", "emptied"])
def test_a_damaged_checkpoint(folder, straight, how):
    """Is told; the run goes on from the one before, which is not lost by the next save."""
    out = folder / f"damaged_{how.replace(' ', '_')}"
    start(folder, *options(train__out_dir=out), fault={"signal": signal.SIGKILL, "at": "micro-batch", "call": 69}).wait(-signal.SIGKILL)
    before = load_checkpoint(out / "previous.pt")["step"]
    damage(out / "latest.pt", how)
    assert load_model(out) is not None  # from the previous one
    fault = {"signal": signal.SIGKILL, "at": "linked", "call": 1}
    process = start(folder, *options(train__out_dir=out), *RESUME, fault=fault)
    process.wait(-signal.SIGKILL)
    assert "latest.pt is damaged" in process.out and f"at step {before}" in process.out
    assert load_newest(out)["step"] == before
    goes_on(folder, out, straight)


def test_all_checkpoints_damaged(folder):
    out = folder / "all_damaged"
    start(folder, *options(train__out_dir=out, train__stop_at_step=12)).wait(0)
    for name in ("latest.pt", "previous.pt"):
        damage(out / name, "truncated")
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".damaged"}
    process = start(folder, *options(train__out_dir=out), *RESUME)
    process.wait(2)
    assert "is whole; the run cannot go on from there" in process.out and "Traceback" not in process.out
    assert before["metrics.jsonl"] == (out / "metrics.jsonl").read_bytes()
    load_checkpoint(out / "best.pt")


def test_a_checkpoint_of_another_kind(folder):
    """best.pt under the name of latest.pt is whole, and yet nothing to go on from."""
    out = folder / "best_as_latest"
    start(folder, *options(train__out_dir=out, train__stop_at_step=10)).wait(0)
    shutil.copy(out / "best.pt", out / "latest.pt")
    process = start(folder, *options(train__out_dir=out), *RESUME)
    process.wait(2)
    assert "no usable optimizer" in process.out and "Traceback" not in process.out


# ---------------------------------------------------------------------------------------- data


@pytest.fixture
def own_data(folder, tmp_path):
    """A copy of the data, to be spoiled."""
    shutil.copytree(folder / "data", tmp_path / "data")
    return tmp_path / "data"


def paused_at_17(folder, out, data, file):
    """A run that waits after step 17 until `file` says so."""
    process = start(folder, *options(train__out_dir=out, data__path=data), fault={"wait": 17, "file": str(file)})
    process.until(lambda: file.exists())
    return process


def test_a_shard_replaced_under_a_running_job(folder, straight, own_data, tmp_path):
    """By another file of that name: the job goes on reading the one that it has open."""
    process = paused_at_17(folder, tmp_path / "run", own_data, tmp_path / "at_17")
    shard = own_data / "train_00000.npy"
    tokens = np.load(shard)
    np.save(own_data / "new.npy", tokens[::-1].copy())
    os.replace(own_data / "new.npy", shard)
    (tmp_path / "at_17").write_text("go on")
    process.wait(0)
    assert curve(tmp_path / "run") == curve(straight)
    process = start(folder, *options(train__out_dir=tmp_path / "run2", data__path=own_data))
    process.wait(2)  # the next one does not take it for what meta.json describes
    assert "its sha256 is not the one in meta.json" in process.out and not (tmp_path / "run2").exists()


def test_a_shard_written_into_under_a_running_job(folder, straight, own_data, tmp_path):
    process = paused_at_17(folder, tmp_path / "run", own_data, tmp_path / "at_17")
    shard = own_data / "train_00000.npy"
    content = shard.read_bytes()
    shard.write_bytes(content[:2000] + content[1000:2000] + content[3000:])
    (tmp_path / "at_17").write_text("go on")
    process.wait(2)
    assert "was written to while in use" in process.out and "Traceback" not in process.out
    everything_loads(tmp_path / "run")
    shutil.copy(folder / "data" / shard.name, shard)
    goes_on(folder, tmp_path / "run", straight, *options(data__path=own_data))


@pytest.mark.parametrize("lie, message", [
    ("missing", "no meta.json"),
    ("tokens", "wrong length"),
    ("outside", "is not a plain name"),
    ("sha256", "its sha256 is not the one in meta.json"),
    ("huge", "wrong length"),
    ("dtype", "holds 'uint16', meta.json says uint8"),
    ("junk", "not valid JSON"),
])  # fmt: skip
def test_meta_json_missing_or_lying(folder, own_data, tmp_path, lie, message):
    """No run directory is made, no memory taken, and no file outside the folder opened."""
    path = own_data / "meta.json"
    meta = json.loads(path.read_text())
    split = meta["splits"]["train"]
    shard = split["shards"][0]
    if lie in ("tokens", "huge"):
        shard["tokens"] = split["tokens"] = split["tokens"] - 7 if lie == "tokens" else 10**15
    elif lie == "outside":
        shard["file"] = "../data/train_00000.npy"
    elif lie == "sha256":
        shard["sha256"] = "0" * 64
    elif lie == "dtype":
        meta["dtype"], meta["vocab_size"], meta["end_token"] = "uint8", 256, 255
    path.write_text(json.dumps(meta) if lie != "junk" else "{")
    if lie == "missing":
        path.unlink()
    process = start(folder, *options(train__out_dir=tmp_path / "run", data__path=own_data))
    process.wait(2)
    assert message in process.out and "Traceback" not in process.out
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------ two runs, many processes


def test_two_runs_in_one_directory(folder, straight):
    """The second gets another directory, or with resume is refused; the first does not notice."""
    out, file = folder / "shared", folder / "shared_at_17"
    process = start(folder, *options(train__out_dir=out), fault={"wait": 17, "file": str(file)})
    process.until(lambda: file.exists())
    refused = start(folder, *options(train__out_dir=out), *RESUME)
    refused.wait(2)
    assert f"another process is running in {out}" in refused.out and "Traceback" not in refused.out
    start(folder, *options(train__out_dir=out, train__stop_at_step=2)).wait(0)
    assert len(losses(folder / "shared-2")) == 2
    file.write_text("go on")
    process.wait(0)
    assert curve(out) == curve(straight) and same_state(out, straight)


def test_one_process_of_two_killed(folder, straight):
    """By torchrun, as a user starts it: the job ends, not with 0, and goes on from its checkpoint."""
    out, torchrun = folder / "rank_killed", ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "train.py", str(folder / "tiny.py"), *options(train__out_dir=out, train__max_steps=4000)]
    job = start_command(folder, *command)
    job.until(lambda: last_step(out) >= 12)
    victim = [pid for pid in children(job.pid) if environment(pid).get("RANK") == "1"]
    os.kill(victim[0], signal.SIGKILL)
    assert job.wait() not in (0, None)
    assert f"lost another one; go on with the same command and --train.out_dir={out} --train.resume=auto" in job.out
    everything_loads(out)
    step = load_checkpoint(out / "latest.pt")["step"]
    assert step >= 10 and step % 5 == 0
    resumed = start_ranks(folder, 2, *options(train__out_dir=out, train__max_steps=4000, train__stop_at_step=step + 5), *RESUME)
    wait_for_all(resumed, 0)
    assert f"at step {step}" in resumed[0].out
    whole = start_ranks(folder, 2, *options(train__out_dir=folder / "none_killed", train__max_steps=4000, train__stop_at_step=step + 5))
    wait_for_all(whole, 0)
    assert training(out) == training(folder / "none_killed")


def children(pid):
    """Processes below a process."""
    found = []
    for task in (f"/proc/{pid}/task/{thread}/children" for thread in os.listdir(f"/proc/{pid}/task")):
        for child in map(int, open(task).read().split()):
            found += [child, *children(child)]
    return found


def environment(pid):
    content = open(f"/proc/{pid}/environ", "rb").read().decode(errors="replace")
    return dict(part.partition("=")[::2] for part in content.split("\0"))


@pytest.mark.parametrize("policy, status", [("skip", 0), ("stop", 1)])
def test_a_gradient_that_is_not_finite_on_one_process(folder, policy, status):
    """All see it: all skip the step and go on alike, or all stop and the checkpoint before stays."""
    out = folder / f"nan_{policy}"
    values = dict(train__out_dir=out, train__bad_step=policy, train__max_steps=14, train__eval_interval=7)
    processes = start_ranks(folder, 2, *options(**values), fault={"nan": [8], "rank": 1})
    wait_for_all(processes, status)
    everything_loads(out)
    if policy == "skip":
        (row,) = [row for row in rows(out) if row.get("skipped")]
        assert (row["step"], row["data_position"]) == (8, 7 * 8) and last_step(out) == 14
        assert all(weight.isfinite().all() for weight in load_checkpoint(out / "latest.pt")["model"].values())
    else:
        assert all("step 8: loss" in process.out and "Try a lower optim.learning_rate" in process.out for process in processes)
        assert load_checkpoint(out / "latest.pt")["step"] == 5


def test_the_table_names_every_test():
    """docs/faults.md and this file agree."""
    table = (ROOT / "docs" / "faults.md").read_text()
    here = set(re.findall(r"^def (test_\w+)", open(__file__).read(), re.M)) - {"test_the_table_names_every_test"}
    named = set(re.findall(r"`(test_\w+)`", table))
    assert here <= named
    known = here | set(re.findall(r"^def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py")), re.M))
    assert named <= known
