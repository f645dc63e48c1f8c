"""Does a run that was stopped and resumed equal the one that never stopped, and does the loop do what the config says?"""

import json
import math
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import train as train_module
from checkpoint import CheckpointError, Signals, load_checkpoint, load_model
from config import ConfigError, load_config
from data import DataError
from optim import schedule
from running import ROOT, curve, losses, options, rows, same_state, start, training, write_files
from train import TrainingStopped, World, spike_score, train

# warm-up takes 8 of 40 steps, an epoch 20, WSD decays from step 28 on, the evaluations are at 10, 20, 30
STOPS = {"in warm-up": 3, "before an epoch's end": 20, "behind it": 21, "in the decay": 33, "one before the end": 39}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny matrices are slower on two, and the processes of running.py have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("runs") / "tiny")


def run(folder, name="tiny", quiet=True, stopped=False, **values):
    """Trains in this process; returns the run directory. stopped: by a signal, which is else a mistake."""
    config = load_config(folder / f"{name}.py", options(**values))
    assert (train(config, quiet) is None) == stopped
    return config.train.out_dir


@pytest.fixture(scope="module")
def straight(folder):
    """The tiny run, never stopped."""
    return run(folder, train__out_dir=folder / "straight")


# ---------------------------------------------------------------------------------- exact resume


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["tiny", "tiny_moe"])
def test_stopped_often_equals_never_stopped(folder, name, optimizer):
    """Weights, optimizer, balance bias, progress, position and every row, bit for bit; 4 micro-batches a step."""
    values = dict(optim__optimizer=optimizer, train__checkpoint_interval=1000, data__eval_tokens=128)
    whole = run(folder, name, train__out_dir=folder / f"{name}_{optimizer}", **values)
    parts = folder / f"{name}_{optimizer}_parts"
    for stop in (*STOPS.values(), 40):
        run(folder, name, train__out_dir=parts, train__stop_at_step=stop, train__resume="auto", **values)
        assert losses(parts) == losses(whole)[:stop]
    assert training(parts) == training(whole)
    assert [row for row in curve(parts) if row["step"] not in STOPS.values()] == [
        row for row in curve(whole) if row["step"] not in STOPS.values()
    ]
    states = [load_checkpoint(path) for path in (parts / "latest.pt", folder / f"{name}_{optimizer}" / "latest.pt")]
    bias = [value for key, value in states[0]["model"].items() if key.endswith("balance_bias")]
    assert len(bias) == (2 if name == "tiny_moe" else 0) and all(b.any() for b in bias)
    for part in ("model", "optimizer", "loader", "random"):
        assert_same(states[0][part], states[1][part])
    assert states[0]["progress"]["recent_losses"] == states[1]["progress"]["recent_losses"]


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("name", ["tiny", pytest.param("tiny_moe", marks=pytest.mark.soak)])
def test_compiled_runs_resume_exactly(folder, name):
    """From a checkpoint in the middle, in a process of its own, which compiles anew."""
    values = dict(train__compile="true", train__max_steps=10, optim__optimizer="muon", train__keep_every=6)
    values |= dict(model__n_layer=1, data__eval_tokens=32)  # less to compile
    whole, part = folder / f"{name}_compiled", folder / f"{name}_compiled_part"
    processes = [start(folder, *options(train__out_dir=whole, **values), config=name)]
    processes[0].wait(0)
    part.mkdir()
    shutil.copy(whole / "step_0000006.pt", part / "latest.pt")
    shutil.copy(whole / "metrics.jsonl", part)
    processes.append(start(folder, *options(train__out_dir=part, train__resume="auto", **values), config=name))
    processes[1].wait(0)
    assert all(", compiled;" in process.out for process in processes)
    assert "at step 6" in processes[1].out
    assert curve(part) == curve(whole) and len(training(whole)) == 10
    assert same_state(part, whole)


def interrupt_evaluation(monkeypatch, step):
    """A SIGTERM at the start of the evaluation after `step`."""
    original = train_module.Run.evaluate

    def interrupted(self, signals=None):
        if self.progress.step == step:
            signal.raise_signal(signal.SIGTERM)
        return original(self, signals)

    monkeypatch.setattr(train_module.Run, "evaluate", interrupted)


def test_evaluation_between_checkpoint_and_end(folder, straight, monkeypatch):
    """A signal during an evaluation: the state is saved, and resuming makes up for the evaluation first."""
    parts = folder / "no_evaluation"
    interrupt_evaluation(monkeypatch, 20)
    run(folder, stopped=True, train__out_dir=parts)
    state = load_checkpoint(parts / "latest.pt")
    assert state["step"] == 20 and state["progress"]["val_loss"] is None
    assert "val_loss" not in rows(parts)[-1]
    monkeypatch.undo()
    run(folder, train__out_dir=parts, train__resume="auto")
    assert curve(parts) == curve(straight)
    assert same_state(parts, straight)


@pytest.mark.parametrize("step", [10, 40])
def test_a_lost_row_of_an_evaluation_does_not_come_twice(folder, straight, step, monkeypatch):
    """Killed after the row of an evaluation that the checkpoint does not know of."""
    parts = folder / f"twice_{step}"
    interrupt_evaluation(monkeypatch, step)
    run(folder, stopped=True, train__out_dir=parts)
    monkeypatch.undo()
    row = next(row for row in rows(straight) if row["step"] == step and "val_loss" in row)
    with open(parts / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n" + '{"step": 41, "tok')
    run(folder, train__out_dir=parts, train__resume="auto")
    assert curve(parts) == curve(straight)


def test_a_finished_run_resumed_stays_as_it_is(folder, straight):
    before = curve(straight)
    assert run(folder, train__out_dir=straight, train__resume="auto") == straight
    assert curve(straight) == before


def test_evaluation_changes_no_training_loss(folder, straight):
    other = run(folder, train__out_dir=folder / "seldom", train__eval_interval=7, data__eval_tokens=96)
    assert losses(other) == losses(straight)
    assert len(curve(other)) != len(curve(straight))
    assert_same(load_checkpoint(folder / "seldom" / "latest.pt")["model"], load_checkpoint(folder / "straight" / "latest.pt")["model"])


# ---------------------------------------------------------------------------------- the batch


def test_micro_batches_equal_one_batch(folder, straight):
    """4 micro-batches a step, in `straight`, and 1."""
    whole = run(folder, train__out_dir=folder / "whole", train__micro_batch=8)
    worst = max(abs(a - b) for a, b in zip(losses(whole), losses(straight), strict=True))
    assert 0 < worst < 2e-5
    norms = [[row["grad_norm"] for row in training(run_dir)] for run_dir in (whole, straight)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)  # AdamW does not feel a gradient that is 4 times too large
    evaluations = [[row["val_loss"] for row in rows(run_dir) if "val_loss" in row] for run_dir in (whole, straight)]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=2e-5)


def test_the_micro_batch_shrinks_to_fit(folder):
    config = load_config(folder / "tiny.py", options(train__tokens_per_step=32 * 12, train__micro_batch=5))
    assert train_module.split_batch(config, 1) == (12, 4)
    assert train_module.split_batch(config, 4) == (3, 3)
    with pytest.raises(ConfigError, match="train.tokens_per_step: expected a multiple of block_size x processes = 160"):
        train_module.split_batch(config, 5)


def test_the_first_loss_is_the_mean_over_its_contexts(folder, straight):
    """Against the data and the model, without the loop."""
    config = load_config(folder / "tiny.py", [])
    alone = train_module.Run(config, World(0, 1, torch.device("cpu")), quiet=True)
    contexts = torch.from_numpy(alone.loader.next())
    with torch.no_grad():
        loss = alone.model(contexts[:, :-1], contexts[:, 1:])[1].item()
    assert loss == pytest.approx(losses(straight)[0], abs=1e-6)


# ------------------------------------------------------------------------------- run directory


def test_what_a_run_leaves(folder, straight):
    for row in training(straight):
        assert row["tokens"] == 256 * row["step"]
        assert row.keys() >= {"train_loss", "learning_rate", "grad_norm"}
    assert [row["step"] for row in training(straight)] == list(range(1, 41))
    optim = load_config(folder / "tiny.py", []).optim
    rates = [optim.learning_rate * schedule(step, optim, 40) for step in range(40)]
    assert [row["learning_rate"] for row in training(straight)] == rates
    assert [row["step"] for row in rows(straight) if "val_loss" in row] == [10, 20, 30, 40]
    summary = json.loads((folder / "straight" / "summary.json").read_text())
    last = rows(straight)[-1]
    assert summary["val_loss"] == last["val_loss"] and summary["val_bits_per_byte"] == last["val_bits_per_byte"]
    assert summary["steps"] == 40 and summary["tokens"] == 40 * 256
    best = min(row["val_loss"] for row in rows(straight) if "val_loss" in row)
    assert summary["best_val_loss"] == best == load_checkpoint(folder / "straight" / "best.pt")["val_loss"]
    names = {path.name for path in (folder / "straight").iterdir()}
    assert names == {".lock", "config.json", "metrics.jsonl", "summary.json", "latest.pt", "previous.pt", "best.pt"}
    assert json.loads((folder / "straight" / "config.json").read_text())["train"]["max_steps"] == 40


def test_load_model_gives_the_trained_model(folder, straight):
    evaluation = [row["val_loss"] for row in rows(straight) if "val_loss" in row]
    config = load_config(folder / "tiny.py", [])
    for which, expected in (("latest", evaluation[-1]), ("best", min(evaluation))):
        judge = train_module.Run(config, World(0, 1, torch.device("cpu")), quiet=True)
        judge.model.load_state_dict(load_model(straight, which).state_dict())
        assert judge.evaluate()["val_loss"] == pytest.approx(expected, abs=1e-6)


def test_a_taken_directory_is_left_alone(folder):
    out = folder / "taken"
    for number in range(3):
        run(folder, train__out_dir=out, train__max_steps=2)
        where = out if number == 0 else folder / f"taken-{number + 1}"
        assert len(losses(where)) == 2
    run(folder, train__out_dir=folder / "taken-2", train__max_steps=4, train__resume="auto")
    assert [len(losses(folder / name)) for name in ("taken", "taken-2", "taken-3")] == [2, 4, 2]


def test_keepers(folder):
    out = run(folder, train__out_dir=folder / "keepers", train__max_steps=10, train__keep_every=4, train__checkpoint_interval=3)
    kept = sorted((folder / "keepers").glob("step_*.pt"))
    assert [path.name for path in kept] == ["step_0000004.pt", "step_0000008.pt"]
    assert [load_checkpoint(path)["step"] for path in kept] == [4, 8]
    assert load_checkpoint(folder / "keepers" / "previous.pt")["step"] == 9 and len(losses(out)) == 10


def test_stopping_early_leaves_the_schedule(folder, straight):
    out = run(folder, train__out_dir=folder / "early", train__stop_at_step=5)
    assert training(out) == training(straight)[:5]
    assert math.isfinite(json.loads((folder / "early" / "summary.json").read_text())["val_loss"])


def test_branch(folder, straight):
    """Another run's weights, optimizer and data position, also once it is resumed under another seed."""
    source = run(folder, train__out_dir=folder / "source", train__stop_at_step=20)
    values = dict(train__branch=source, train__max_steps=20, train__seed=5, optim__schedule="constant", optim__warmup=0)
    whole = run(folder, train__out_dir=folder / "branch", **values)
    assert losses(whole)[0] == losses(straight)[20]
    parts = folder / "branch_parts"
    for stop in (7, 20):
        run(folder, train__out_dir=parts, train__resume="auto", train__stop_at_step=stop, **values)
    assert losses(parts) == losses(whole)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        run(folder, train__out_dir=folder / "nowhere", train__branch=folder / "text")


# ------------------------------------------------------------------------------------ bad input


def command(*arguments):
    line = [sys.executable, "train.py", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def test_bad_keys_make_no_directory(folder):
    done = command(folder / "tiny.py", "--train.max_step=3", "--optim.learning_rate=fast", f"--train.out_dir={folder / 'bad'}")
    assert done.returncode == 2 and not (folder / "bad").exists()
    assert "train.max_steps" in done.stderr and "optim.learning_rate" in done.stderr and "Traceback" not in done.stderr


def test_another_shape_is_named_and_nothing_is_touched(folder):
    out = run(folder, train__out_dir=folder / "shape", train__max_steps=2)
    before = {path.name: path.read_bytes() for path in (folder / "shape").iterdir()}
    process = start(folder, *options(train__out_dir=out, train__resume="auto", model__d_model=64, scale__kind="er", optim__optimizer="muon"))
    process.wait(2)
    for line in ("model.d_model: 32 there, 64 here", "scale.kind: 'or' there, 'er' here", "optim.optimizer: 'adamw' there, 'muon' here"):
        assert line in process.out
    assert "Traceback" not in process.out
    assert before == {path.name: path.read_bytes() for path in (folder / "shape").iterdir()}


def test_other_data_or_seed_are_refused(folder):
    out = run(folder, train__out_dir=folder / "seed", train__max_steps=2)
    with pytest.raises(DataError, match="seed 0, and this run has 1"):
        run(folder, train__out_dir=out, train__resume="auto", train__seed=1, train__max_steps=4)


def test_changed_settings_are_said(folder, capsys):
    out = run(folder, train__out_dir=folder / "changed", train__max_steps=2)
    run(folder, quiet=False, train__out_dir=out, train__resume="auto", train__max_steps=3, optim__learning_rate=1e-3)
    printed = capsys.readouterr().out
    assert "resumed" in printed and "at step 2" in printed
    assert "changed: optim.learning_rate: 0.003 before, 0.001 now" in printed
    assert "changed: train.max_steps: 2 before, 3 now" in printed and "changed: train.resume" not in printed


# ------------------------------------------------------------------------------------ bad steps


def nan_at(monkeypatch, *steps):
    """Makes the gradients of these steps not a number."""
    from running import place_nan

    monkeypatch.setattr(train_module.Run, "gradients", train_module.Run.gradients)
    place_nan(steps)


def test_a_bad_step_stops_and_keeps_the_checkpoint(folder, straight, monkeypatch):
    nan_at(monkeypatch, 8)
    with pytest.raises(TrainingStopped, match="step 8: loss .*grad_norm nan; data position 56"):
        run(folder, train__out_dir=folder / "bad_stop")
    assert load_checkpoint(folder / "bad_stop" / "latest.pt")["step"] == 5
    monkeypatch.undo()
    run(folder, train__out_dir=folder / "bad_stop", train__resume="auto")
    assert curve(folder / "bad_stop") == curve(straight) and same_state(folder / "bad_stop", straight)


def test_bad_steps_are_skipped_up_to_a_limit(folder, monkeypatch):
    nan_at(monkeypatch, 3, 4, 9)
    out = run(folder, train__out_dir=folder / "skip", train__max_steps=12, train__bad_step="skip", train__max_skips=2)
    skipped = [row for row in training(out) if row.get("skipped")]
    assert [(row["step"], row["data_position"], row["grad_norm"]) for row in skipped] == [(3, 16, None), (4, 24, None), (9, 64, None)]
    assert all(weight.isfinite().all() for weight in load_checkpoint(folder / "skip" / "latest.pt")["model"].values())
    with pytest.raises(TrainingStopped, match="step 4: .*data position 24"):
        run(folder, train__out_dir=folder / "skip_1", train__max_steps=12, train__bad_step="skip", train__max_skips=1)


def test_a_skipped_step_changes_no_weight(folder, monkeypatch):
    nan_at(monkeypatch, 3)
    for stop in (2, 3):
        run(folder, "tiny_moe", train__out_dir=folder / f"skip_at_{stop}", train__stop_at_step=stop, train__bad_step="skip")
    states = [load_checkpoint(folder / f"skip_at_{stop}" / "latest.pt") for stop in (2, 3)]
    assert_same(states[0]["model"], states[1]["model"])
    assert_same(states[0]["optimizer"], states[1]["optimizer"])


def test_spike_score():
    recent = [2.0 + 0.01 * (number % 5) for number in range(50)]
    assert spike_score(2.02, recent) == pytest.approx(0, abs=1e-9)
    assert spike_score(3.0, recent) == pytest.approx(0.98 / (1.4826 * 0.01))
    assert spike_score(9.0, recent[:19]) == 0 and spike_score(9.0, [2.0] * 50) == 0


def test_a_spike_is_logged_with_step_and_position(folder, monkeypatch):
    original = train_module.Run.gradients

    def spiking(self):
        loss, routing = original(self)
        return (loss + 50 if self.progress.step + 1 == 33 else loss), routing

    monkeypatch.setattr(train_module.Run, "gradients", spiking)
    out = run(folder, train__out_dir=folder / "spike", train__log_interval=1000)
    (spike,) = [row for row in rows(out) if "spike" in row]
    assert spike["step"] == 33 and spike["data_position"] == 32 * 8 and spike["spike"] > 6


# -------------------------------------------------------------------------------------- signals


def test_signals_wait_for_the_step():
    with Signals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert signals.save and not signals.stop
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_under_torchrun_the_same_signal_twice_is_once(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop == "SIGTERM" and signal.getsignal(signal.SIGTERM) == signals.handle
        monkeypatch.setattr(signals, "since", signals.since - 6)
        with pytest.raises(Killed):
            monkeypatch.setattr(signal, "raise_signal", Killed.by)
            signals.handle(signal.SIGTERM, None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Killed(Exception):
    @classmethod
    def by(cls, number):
        raise cls(number)
