"""Is a checkpoint whole or refused, never half believed, and can nothing in it run or take memory?"""

import io
import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time
import zipfile

import pytest
import torch

import checkpoint
from checkpoint import (
    CheckpointError,
    Damaged,
    Rows,
    check_optimizer_state,
    check_same_model,
    check_training_state,
    claim_run_dir,
    content_hash,
    cut_metrics,
    load_checkpoint,
    load_model,
    load_newest,
    load_weights_,
    save_checkpoint,
    settings_changed,
)
from config import Config, TrainConfig
from conftest import ROOT
from model import GPT, ModelConfig
from norms import ScaleConfig
from optim import OptimConfig, Optimizers

SHAPE = dict(n_layer=2, n_head=2, d_model=16, d_ff=20, vocab_size=257, block_size=16)


def tiny_config(**changes):
    sections = dict(model=ModelConfig(**SHAPE), scale=ScaleConfig(strategy="unified"), optim=OptimConfig())
    sections["train"] = TrainConfig(max_steps=4, tokens_per_step=32)
    return Config(**(sections | changes)).resolved()


def tiny_state(config=None, step=3):
    """A checkpoint's content, with a model and an optimizer that made one step."""
    config = config or tiny_config()
    model = GPT(config.model, config.scale)
    optimizers = Optimizers(model, config.optim)
    model(torch.arange(16)[None], torch.arange(16)[None])[1].backward()
    optimizers.step()
    state = {"config": config.as_dict(), "model": dict(model.state_dict()), "step": step, "processes": 1}
    progress = {"recent_losses": [1 / 3, 5e-324], "best_val_loss": float("inf"), "branched_from": None}
    return state | {"optimizer": optimizers.state(), "progress": progress, "loader": {"position": 2**60}, "random": {}}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path / "latest.pt", tiny_state())
    return tmp_path / "latest.pt"


# ----------------------------------------------------------------------------- whole or refused


def test_what_is_saved_comes_back(saved):
    state = load_checkpoint(saved)
    assert state.pop("sha256") == content_hash(state) and state.pop("format") == checkpoint.FORMAT
    assert content_hash(state) == content_hash(tiny_state())
    assert state["progress"]["recent_losses"] == [1 / 3, 5e-324] and state["loader"] == {"position": 2**60}
    assert not list(saved.parent.glob("*.tmp"))


@pytest.mark.parametrize("change", ["value", "shape", "dtype", "key", "order", "number"])
def test_the_checksum_covers_everything(change):
    state = {"model": {"a": torch.arange(6.0), "b": torch.zeros(2)}, "step": 1}
    other = {"model": {"a": torch.arange(6.0), "b": torch.zeros(2)}, "step": 1}
    if change == "value":
        other["model"]["a"][3] = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    elif change == "shape":
        other["model"]["a"] = torch.arange(6.0).view(2, 3)
    elif change == "dtype":
        other["model"]["b"] = torch.zeros(2, dtype=torch.int32)
    elif change == "key":
        other["model"]["c"] = other["model"].pop("b")
    elif change == "number":
        other["step"] = True
    else:
        other = {"step": 1, "model": dict(reversed(other["model"].items()))}
    assert (content_hash(state) == content_hash(other)) == (change == "order")


def test_truncated_anywhere_is_damaged(saved):
    content = saved.read_bytes()
    lengths = [0, 1, 100, len(content) - 1] + random.Random(0).sample(range(len(content)), 12)
    for length in lengths:
        saved.write_bytes(content[:length])
        with pytest.raises(Damaged, match="latest.pt is damaged"):
            load_checkpoint(saved)


def test_a_flipped_bit_anywhere_is_seen(saved):
    """Or it changed no value: the archive has padding, and names of its own."""
    content, whole = saved.read_bytes(), load_checkpoint(saved)
    seen = 0
    for place in random.Random(1).sample(range(len(content) * 8), 150):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        saved.write_bytes(flipped)
        try:
            assert load_checkpoint(saved)["sha256"] == whole["sha256"]
        except Damaged:
            seen += 1
    assert seen > 75


def test_a_damaged_newest_is_told_and_the_previous_used(saved, capsys):
    save_checkpoint(saved, tiny_state(step=4), keep_previous=True)
    assert load_newest(saved.parent)["step"] == 4 and not capsys.readouterr().err
    saved.write_bytes(saved.read_bytes()[:-100])
    assert load_newest(saved.parent)["step"] == 3
    assert "latest.pt is damaged" in capsys.readouterr().err
    assert saved.exists()
    assert load_newest(saved.parent, set_aside=True)["step"] == 3
    assert sorted(path.name for path in saved.parent.iterdir()) == ["latest.pt.damaged", "previous.pt"]
    save_checkpoint(saved, tiny_state(step=5), keep_previous=True)
    assert [load_checkpoint(saved.parent / name)["step"] for name in ("latest.pt", "previous.pt")] == [5, 3]


def test_all_damaged_stops(saved):
    save_checkpoint(saved, tiny_state(step=4), keep_previous=True)
    for name in ("latest.pt", "previous.pt"):
        (saved.parent / name).write_bytes(b"PK nonsense")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        load_newest(saved.parent)
    assert load_newest(saved.parent / "elsewhere") is None


def test_what_cannot_be_read_is_not_called_damaged(saved, monkeypatch):
    """Another format or a failing disk says nothing about the content: no older checkpoint takes its place."""
    save_checkpoint(saved, tiny_state(step=4), keep_previous=True)
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="not a checkpoint of format 2"):
        load_newest(saved.parent, set_aside=True)
    monkeypatch.undo()
    for error in (OSError(5, "Input/output error"), MemoryError()):
        monkeypatch.setattr(torch, "load", lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(CheckpointError, match="cannot read") as raised:
            load_newest(saved.parent, set_aside=True)
        assert not isinstance(raised.value, Damaged) and saved.exists()


@pytest.mark.parametrize("function", ["fsync", "replace", "link", "open"])
def test_a_failing_disk_leaves_what_was_there(saved, monkeypatch, function):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if function == "open":
        monkeypatch.setattr("builtins.open", fail)
    else:
        monkeypatch.setattr(os, function, fail)
    if function == "link":  # a file system without hard links
        save_checkpoint(saved, tiny_state(step=4), keep_previous=True)
    else:
        with pytest.raises(CheckpointError, match="cannot save .*No space left.*the one saved before is unchanged"):
            save_checkpoint(saved, tiny_state(step=4), keep_previous=True)
    monkeypatch.undo()
    assert load_newest(saved.parent)["step"] == (4 if function == "link" else 3)
    assert not list(saved.parent.glob("*.tmp"))


# ----------------------------------------------------------------------------------- no harm


class Touch:
    """Pickled, it is a call of os.system."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def pack(path, pickled, compression=zipfile.ZIP_STORED, records=()):
    """An archive as torch writes them around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little"), *records):
            archive.writestr(f"latest/{name}", content)


def test_a_pickle_that_runs_code_runs_none(tmp_path):
    state = tiny_state() | {"format": 1, "evil": Touch(tmp_path / "ran")}
    pack(tmp_path / "latest.pt", pickle.dumps({"evil": Touch(tmp_path / "ran")}, 2))
    torch.save(state, tmp_path / "previous.pt")
    for name in ("latest.pt", "previous.pt"):
        with pytest.raises(Damaged, match="is damaged"):
            load_checkpoint(tmp_path / name)
    (tmp_path / "best.pt").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(CheckpointError):
        load_model(tmp_path, "best")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "previous.pt", weights_only=False)  # the trap works
    assert (tmp_path / "ran").exists()


def test_a_small_file_takes_no_large_memory(tmp_path):
    path = tmp_path / "latest.pt"
    pack(path, bytes(10**8), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**6
    with pytest.raises(Damaged, match="claim more bytes than the file has"):
        load_checkpoint(path)
    torch.save({"model": {"a": torch.zeros(1).expand(10**13)}}, path)
    with pytest.raises(Damaged, match="not plain and contiguous"):
        load_checkpoint(path)
    nested = [0]
    for _ in range(9):
        nested = [nested] * 10
    torch.save({"model": nested}, path)
    with pytest.raises(Damaged, match="more values, or deeper nested"):
        load_checkpoint(path)


def test_a_storage_cannot_claim_more_than_its_record(tmp_path):
    path = tmp_path / "latest.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in records if name.endswith("data.pkl")]
    claimed = records[name].replace(b"K\x04tq", b"J\x00\x00\x00\x40tq").replace(b"K\x04\x85", b"J\x00\x00\x00\x40\x85")
    assert claimed != records[name]
    with zipfile.ZipFile(path, "w") as archive:
        for other, content in records.items():
            archive.writestr(other, claimed if other == name else content)
    with pytest.raises(Damaged):
        load_checkpoint(path)


@pytest.mark.parametrize("value", [{1, 2}, {1: 2}, torch.zeros(2, 3).T, torch.zeros(2).to_sparse(), torch.Size([2]), 1j, torch.float32])
def test_only_plain_values_are_saved(tmp_path, value):
    with pytest.raises(ValueError):
        save_checkpoint(tmp_path / "latest.pt", {"value": value})
    assert not list(tmp_path.iterdir())


def test_a_lying_config_builds_no_huge_model(tmp_path):
    state = tiny_state()
    for key, value in (("n_layer", 10**9), ("d_model", 2**40), ("vocab_size", 2**50)):
        model = state["config"]["model"] | {key: value}
        save_checkpoint(tmp_path / "latest.pt", state | {"config": state["config"] | {"model": model}})
        started = time.monotonic()
        with pytest.raises(CheckpointError):
            load_model(tmp_path)
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("junk", [None, 7, "x", [], {"model": 3}, {"model": {"n_layer": "x"}}, {"train": {"os.system": 1}}])
def test_a_junk_config_is_a_message(tmp_path, junk):
    state = tiny_state()
    save_checkpoint(tmp_path / "latest.pt", state | {"config": junk})
    with pytest.raises(CheckpointError):
        load_model(tmp_path)
    with pytest.raises(CheckpointError):
        check_training_state(load_newest(tmp_path), GPT(tiny_config().model), tiny_config(), "it")


@pytest.mark.parametrize("missing", ["optimizer", "progress", "loader", "random", "processes"])
def test_missing_parts_are_a_message(missing):
    config, state = tiny_config(), tiny_state()
    model = GPT(config.model, config.scale)
    check_training_state(state, model, config, "it")
    del state[missing]
    with pytest.raises(CheckpointError, match=f"no usable {missing}"):
        check_training_state(state, model, config, "it")


# ------------------------------------------------------------------------------------ it fits


def test_the_first_fields_that_differ_are_named():
    config = tiny_config()
    other = tiny_config(model=ModelConfig(**SHAPE | {"n_layer": 3, "d_model": 32}), optim=OptimConfig(optimizer="muon"))
    check_same_model(config, config, "it")
    with pytest.raises(CheckpointError) as raised:
        check_same_model(config, other, "the checkpoint in out/x")
    message = str(raised.value).splitlines()
    assert message[0] == "the checkpoint in out/x is of another model:"
    assert "  model.n_layer: 2 there, 3 here" in message and "  model.d_model: 16 there, 32 here" in message
    assert "optim.optimizer: 'adamw' there, 'muon' here" in str(raised.value)
    lines = settings_changed({"config": config.as_dict()}, tiny_config(train=TrainConfig(max_steps=9, resume="auto", tokens_per_step=32)))
    assert lines == ["train.max_steps: 4 before, 9 now"]


def test_weights_of_another_shape_or_dtype_are_refused():
    config = tiny_config()
    weights = dict(GPT(config.model, config.scale).state_dict())
    name = "blocks.1.attention.q.weight"
    for wrong in (weights[name][:-1], weights[name].double(), "text", None):
        with torch.device("meta"):
            model = GPT(config.model, config.scale)
        with pytest.raises(CheckpointError, match=name):
            load_weights_(model, weights | {name: wrong}, "it")
    with pytest.raises(CheckpointError, match="extra"):
        load_weights_(GPT(config.model, config.scale), weights | {"extra": weights[name]}, "it")


def test_optimizer_state_is_complete_or_refused():
    config, state = tiny_config(), tiny_state()
    model, named = GPT(config.model, config.scale), state["optimizer"]
    check_optimizer_state(named, model, "it")
    check_optimizer_state({}, model, "it")
    name = next(iter(named))
    for wrong in (
        {key: value for key, value in named.items() if key != name},
        named | {"extra": named[name]},
        named | {name: {"exp_avg": torch.zeros(1)}},
        named | {name: named[name] | {"exp_avg": named[name]["exp_avg"].double()}},
        named | {name: 3},
    ):
        with pytest.raises(CheckpointError, match="no optimizer state that fits"):
            check_optimizer_state(wrong, model, "it")


@pytest.mark.parametrize("tied", [False, True])
def test_load_model(tmp_path, tied):
    config = tiny_config(model=ModelConfig(**SHAPE, tied=tied))
    model = GPT(config.model, config.scale)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    save_checkpoint(tmp_path / "best.pt", {"config": config.as_dict(), "model": dict(model.state_dict()), "step": 1})
    loaded = load_model(tmp_path, "best")
    idx = torch.arange(10)[None]
    assert torch.equal(loaded(idx)[0], model(idx)[0])
    assert loaded.tied == tied and not loaded.training
    assert (loaded.head.weight is loaded.embedding.weight) == tied
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load_model(tmp_path)


def test_the_command_says_what_is_whole(saved):
    (saved.parent / "best.pt").write_bytes(saved.read_bytes()[:999])
    line = [sys.executable, "checkpoint.py", str(saved.parent)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "latest.pt: whole; step 3" in done.stdout and "best.pt is damaged" in done.stdout


# --------------------------------------------------------------------------------- run folder


def hold(run_dir, ready):
    held = claim_run_dir(run_dir, resume=False)
    ready.send(1)
    time.sleep(1000)
    del held


def test_a_lock_dies_with_its_process(tmp_path):
    """Also with one that is killed at once."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(str(tmp_path / "run"), theirs), daemon=True)
    process.start()
    ours.recv()
    with pytest.raises(CheckpointError, match="another process is running in"):
        claim_run_dir(str(tmp_path / "run"), resume=True)
    second, lock = claim_run_dir(str(tmp_path / "run"), resume=False)
    assert second == tmp_path / "run-2"
    process.kill()
    process.join()
    assert claim_run_dir(str(tmp_path / "run"), resume=True)[0] == tmp_path / "run"
    lock.close()
    assert claim_run_dir(str(tmp_path / "run-2"), resume=True)[0] == second


def test_directories_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot run in .*name another train.out_dir"):
        claim_run_dir(str(tmp_path / "file"), resume=False)

    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(checkpoint.fcntl, "flock", no_locks)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="cannot run in .*Operation not supported"):
            claim_run_dir(str(tmp_path / "run"), resume)


def test_rows_past_the_checkpoint_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "train_loss": 2.0}, {"step": 2, "train_loss": 1.5}, {"step": 2, "val_loss": 1.4}, {"step": 3, "train_loss": 1}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for step, evaluated, left in ((2, True, 3), (2, False, 2), (1, True, 1), (0, False, 0), (3, False, 4)):
        path.write_text(text + 'not json\n[1]\n{"step": null}\n{"step": 1, "tr')
        cut_metrics(path, step, evaluated)
        assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:left]
    cut_metrics(tmp_path / "none.jsonl", 3, True)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_row_that_does_not_fit_on_the_disk(tmp_path):
    rows = Rows(tmp_path / "metrics.jsonl")
    rows.write({"step": 1})
    rows.close()
    full = Rows(tmp_path / "metrics.jsonl")
    full.file.close()
    full.file = io.FileIO("/dev/full", "w") if os.path.exists("/dev/full") else pytest.skip("no /dev/full here")
    with pytest.raises(CheckpointError, match="cannot write .*No space left on device; what was saved before is unchanged"):
        full.write({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
