"""Do many processes train what one trains, and does each of them know when something is wrong?"""

import pytest
import torch
import torch.distributed as dist

from checkpoint import load_checkpoint, save_checkpoint
from config import load_config
from optim import own_part
from running import curve, losses, options, rows, same_state, start, start_command, start_ranks, training, wait_for_all, write_files
from train import World

CLOSE = 2e-4  # float32, over these few steps, whatever the order of sums


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("ranks") / "tiny")


@pytest.fixture(scope="module")
def alone(folder):
    """One process, 40 steps."""
    return finish(folder, 1, train__out_dir=folder / "alone")


def finish(folder, processes, expected=0, config="tiny", fault=None, **values):
    """Trains with some processes and waits; returns the run directory."""
    if processes == 1:
        started = [start(folder, *options(**values), config=config, fault=fault)]
    else:
        started = start_ranks(folder, processes, *options(**values), config=config, fault=fault)
    wait_for_all(started, expected)
    return values["train__out_dir"], started


def distance(one, other):
    return max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True))


def evaluations(run_dir):
    return [row["val_loss"] for row in rows(run_dir) if "val_loss" in row]


# ----------------------------------------------------------------------- many processes, one run


def test_the_quickstart_by_torchrun_equals_one_process(tmp_path):
    values = dict(train__backend="gloo", train__dtype="float32", train__max_steps=12, train__log_interval=1)
    values |= dict(train__sample_tokens=0, data__eval_tokens=4096, train__compile="false")
    arguments = lambda name: ["train.py", "configs/quickstart.py", *options(train__out_dir=tmp_path / name, **values)]
    start_command(tmp_path, *arguments("one")).wait(0)
    start_command(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *arguments("two")).wait(0)
    assert len(losses(tmp_path / "one")) == 12
    assert distance(tmp_path / "one", tmp_path / "two") < CLOSE
    assert evaluations(tmp_path / "two") == pytest.approx(evaluations(tmp_path / "one"), abs=CLOSE)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_equal_one(folder, alone, processes):
    """Losses and evaluations; one writer; the tokens of an evaluation counted once."""
    out, started = finish(folder, processes, train__out_dir=folder / f"of_{processes}")
    assert distance(out, alone[0]) < CLOSE
    assert evaluations(out) == pytest.approx(evaluations(alone[0]), abs=CLOSE)
    assert [row["step"] for row in training(out)] == list(range(1, 41))
    assert "resumed" not in started[0].out
    assert all("validation loss" not in process.out for process in started[1:])


def test_experts_equal_one_process(folder):
    """With the balance bias alone: the balance loss is one of each process's own tokens."""
    values = dict(moe__balance_coefficient=0, moe__z_coefficient=0, train__max_steps=12)
    one, _ = finish(folder, 1, config="tiny_moe", train__out_dir=folder / "moe_one", **values)
    two, _ = finish(folder, 2, config="tiny_moe", train__out_dir=folder / "moe_two", **values)
    assert distance(one, two) < CLOSE
    models = [load_checkpoint(run_dir / "latest.pt")["model"] for run_dir in (one, two)]
    for name in models[0]:
        if name.endswith("balance_bias"):
            assert torch.equal(models[0][name], models[1][name]) and models[0][name].any()


def test_gradients_are_summed_over_processes_once_a_step(folder):
    """Two micro-batches a process and step; all of this model's gradients go in one all-reduce."""
    count = folder / "count.txt"
    finish(folder, 2, train__out_dir=folder / "counted", train__max_steps=8, fault={"count": str(count), "rank": 0})
    assert count.read_text().split() == [str(step) for step in range(8)]


def test_an_evaluation_smaller_than_the_processes(folder):
    out, _ = finish(folder, 2, train__out_dir=folder / "small", train__max_steps=2, data__eval_tokens=32)
    one, _ = finish(folder, 1, train__out_dir=folder / "small_1", train__max_steps=2, data__eval_tokens=32)
    assert evaluations(out) == pytest.approx(evaluations(one), abs=CLOSE)


# --------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_another_process_count_goes_on_in_the_same_order(folder, alone, before, after):
    out = folder / f"from_{before}_to_{after}"
    finish(folder, before, train__out_dir=out, train__stop_at_step=17)
    assert load_checkpoint(out / "latest.pt")["loader"]["position"] == 17 * 8
    _, started = finish(folder, after, train__out_dir=out, train__resume="auto")
    assert f"{after} processes now, {before} before: the same global order of data" in started[0].out
    assert load_checkpoint(out / "latest.pt")["loader"]["position"] == 40 * 8
    assert distance(out, alone[0]) < CLOSE


@pytest.mark.parametrize("shard", ["false", "true"])
def test_two_processes_resume_exactly(folder, shard):
    values = dict(train__shard_optimizer=shard, optim__optimizer="muon", train__max_steps=14)
    whole, _ = finish(folder, 2, train__out_dir=folder / f"two_{shard}", **values)
    parts = folder / f"two_{shard}_parts"
    finish(folder, 2, train__out_dir=parts, train__stop_at_step=9, **values)
    finish(folder, 2, train__out_dir=parts, train__resume="auto", **values)
    assert training(parts) == training(whole)
    states = [load_checkpoint(run_dir / "latest.pt") for run_dir in (whole, parts)]
    for part in ("model", "optimizer"):
        for name, value in states[0][part].items():
            other = states[1][part][name]
            pairs = zip(value.values(), other.values()) if isinstance(value, dict) else [(value, other)]
            assert all(torch.equal(a, b) for a, b in pairs), name


def test_a_process_that_sees_another_checkpoint_stops(folder):
    """As on nodes that do not share the folder."""
    out = folder / "unshared"
    finish(folder, 2, train__out_dir=out, train__stop_at_step=3)
    other = folder / "unshared_there"
    other.mkdir()
    state = load_checkpoint(out / "latest.pt")
    del state["sha256"]
    save_checkpoint(other / "latest.pt", state | {"step": 2})
    fault = {"elsewhere": [str(out), str(other)], "rank": 1}
    started = start_ranks(folder, 2, *options(train__out_dir=out, train__resume="auto"), fault=fault)
    assert started[1].wait() == 2 and "is another one on process 1: all must see the same folder" in started[1].out
    assert started[0].wait() != 0
    assert load_checkpoint(out / "latest.pt")["step"] == 3


# ------------------------------------------------------------------------------------- sharding


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sharded_equals_ddp(folder, optimizer):
    """The same losses, a complete checkpoint, and one process goes on from it; and the other way round."""
    values = dict(optim__optimizer=optimizer, train__max_steps=16)
    plain, _ = finish(folder, 2, train__out_dir=folder / f"plain_{optimizer}", **values)
    sharded, _ = finish(folder, 2, train__out_dir=folder / f"shard_{optimizer}", train__shard_optimizer="true", **values)
    assert distance(plain, sharded) < CLOSE
    assert optimizer == "muon" or losses(plain) == losses(sharded)  # Muon's batches of matrices have other sizes
    states = [load_checkpoint(run_dir / "latest.pt")["optimizer"] for run_dir in (plain, sharded)]
    assert states[0].keys() == states[1].keys()
    for name, buffers in states[0].items():
        assert buffers.keys() == states[1][name].keys()
        for key, buffer in buffers.items():
            torch.testing.assert_close(states[1][name][key], buffer, rtol=1e-3, atol=1e-5)
    for first, second in (("true", "false"), ("false", "true")):
        out = folder / f"{optimizer}_{first}_{second}"
        finish(folder, 2, train__out_dir=out, train__shard_optimizer=first, train__stop_at_step=8, **values)
        finish(folder, 2 if second == "true" else 1, train__out_dir=out, train__shard_optimizer=second, train__resume="auto", **values)
        assert distance(out, plain) < CLOSE


def state_bytes(rank, folder, port, results):
    """Bytes of optimizer state that each of two processes holds after a step, with and without sharding."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    from train import Run

    torch.set_num_threads(1)
    for shard in ("false", "true"):
        config = load_config(folder / "tiny.py", options(train__shard_optimizer=shard, optim__optimizer="muon"))
        run = Run(config, World(rank, 2, torch.device("cpu")), quiet=True)
        run.training_step()
        run.optimizers.state()  # gathering keeps nothing behind
        buffers = [b for o in run.optimizers.all for s in (o, own_part(o)) for state in s.state.values() for b in state.values()]
        held = {buffer.untyped_storage().data_ptr(): buffer.nbytes for buffer in buffers}
        results.put((rank, shard, sum(held.values())))
        run.close()
    dist.destroy_process_group()


def test_sharding_takes_half_the_memory(folder):
    from running import free_port

    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    torch.multiprocessing.spawn(state_bytes, (folder, free_port(), results), nprocs=2)
    held = {(rank, shard): size for rank, shard, size in (results.get() for _ in range(4))}
    whole = held[0, "false"]
    assert held[1, "false"] == whole
    assert held[0, "true"] + held[1, "true"] == whole
    assert max(held[0, "true"], held[1, "true"]) < 0.6 * whole


# ---------------------------------------------------------------------------------- one of many


def test_one_process_alone_has_a_gradient_that_is_not_finite(folder):
    """Skipped by all; the weights stay the same everywhere, or the losses of both would differ from one's."""
    values = dict(train__max_steps=12, train__bad_step="skip")
    two, _ = finish(folder, 2, train__out_dir=folder / "nan_of_2", fault={"nan": [5, 6], "rank": 1}, **values)
    one, _ = finish(folder, 1, train__out_dir=folder / "nan_of_1", fault={"nan": [5, 6]}, **values)
    assert [row["step"] for row in rows(two) if row.get("skipped")] == [5, 6]
    assert distance(one, two) < CLOSE
    out, started = finish(folder, 2, 1, train__out_dir=folder / "nan_stop", train__max_steps=12, fault={"nan": [8], "rank": 1})
    assert all("step 8: loss" in process.out and "Not finite, so the run stops" in process.out for process in started)
    assert load_checkpoint(out / "latest.pt")["step"] == 5


def test_a_save_that_fails_ends_all(folder):
    out, started = finish(folder, 2, 2, train__out_dir=folder / "full", train__max_steps=12, fault={"limit": 100_000})
    assert "cannot save" in started[0].out and "cannot save" not in started[1].out
    assert "Traceback" not in started[0].out + started[1].out


def test_a_taken_directory_ends_all(folder):
    from checkpoint import claim_run_dir

    run_dir, lock = claim_run_dir(str(folder / "locked"), resume=True)
    _, started = finish(folder, 2, 2, train__out_dir=run_dir, train__resume="auto")
    assert "another process is running in" in started[0].out and "Traceback" not in started[0].out + started[1].out
    lock.close()


def test_a_signal_to_one_stops_all_after_the_same_step(folder):
    import signal

    fault = {"signal": signal.SIGTERM, "at": "micro-batch", "call": 11, "rank": 1}  # two a step: in the 6th
    out, started = finish(folder, 2, train__out_dir=folder / "told", train__max_steps=12, train__eval_interval=100, fault=fault)
    assert "stopped by a signal after step 6" in started[0].out and "--train.resume=auto" in started[0].out
    assert load_checkpoint(out / "latest.pt")["step"] == 6
    finish(folder, 2, train__out_dir=out, train__max_steps=12, train__eval_interval=100, train__resume="auto")
    whole, _ = finish(folder, 2, train__out_dir=folder / "untold", train__max_steps=12, train__eval_interval=100)
    assert curve(out) == curve(whole) and same_state(out, whole)
