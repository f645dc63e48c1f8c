"""The loop: one GPU, many GPUs, or a laptop's CPU.

    for each step:  rate from the schedule; gradient of the mean loss over tokens_per_step tokens, in
                    micro-batches; clip; update; now and then evaluate, save, write a row of metrics.jsonl

    python train.py configs/quickstart.py
    python train.py configs/unified_120m.py --optim.learning_rate=8e-4 --train.micro_batch=16
    torchrun --standalone --nproc_per_node=8 train.py configs/unified_2b.py

A run lives in out/NAME: config.json, metrics.jsonl, latest.pt, previous.pt, best.pt, summary.json. Ctrl-C or
SIGTERM finishes the step, saves and stops (twice: stops at once); SIGUSR1 saves and goes on; and
`--train.resume=auto` goes on from latest.pt, bit for bit as if never stopped.
"""

import contextlib
import ctypes
import gc
import math
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from checkpoint import (
    CheckpointError,
    Rows,
    Signals,
    believing,
    check_training_state,
    claim_run_dir,
    cut_metrics,
    load_newest,
    load_weights_,
    random_state,
    save_checkpoint,
    set_random_state,
    settings_changed,
    write_json,
)
from config import Config, ConfigError, Fault, TrainConfig, command_line, notices, run_command
from data import DataError, Loader, evaluation_batches, open_split, read_meta
from memory import format_estimate, memory_estimate
from model import GPT, flops_per_token, parameter_count, scale_parameter_count
from moe import Routing, load_statistics, update_balance_
from optim import Optimizers, format_role_table, role_table, schedule, warmup_steps
from prepare_data import folder_tokenizer, prepare_if_missing


class TrainingStopped(Exception):
    """The run cannot go on: a message for the user. What was saved stays."""


# ------------------------------------------------------------------------------- where it runs


@dataclass(frozen=True)
class World:
    """This process's place among those of the run."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def on_main(self, function: Callable[[], object]) -> object:
        """What function() gives on rank 0, on every rank. If it fails there, nobody waits: the others leave too."""
        box = [None]
        if self.is_main:
            try:
                box = [function()]
            except CheckpointError as error:
                box = [error]
        if self.size > 1:
            dist.broadcast_object_list(box)
        if isinstance(box[0], CheckpointError):
            raise box[0] if self.is_main else SystemExit(2)  # said once
        return box[0]


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a config's train.device for the local_rank-th process of a machine."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError([Fault("train.device", "a device of this machine", wanted)])
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device(wanted)


def keep_freed_memory() -> None:
    """Tells Linux's C library to keep what a step frees for the next one: handed back to the system, large tensors' memory
    is cleared and mapped again, page by page, in every step. Elsewhere: nothing. It holds for the whole process."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another system, or another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block has a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the end of the heap stays


@contextlib.contextmanager
def joined_world(config: TrainConfig):
    """Joins the processes that torchrun started; alone without torchrun."""
    size, rank, local_rank = (int(os.environ.get(name, default)) for name, default in
                              (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))  # fmt: skip
    device = choose_device(config.device, local_rank)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized() and size > 1:
        dist.init_process_group(config.backend or ("nccl" if device.type == "cuda" else "gloo"))
    yield World(rank, size, device)
    if dist.is_initialized():  # not after an error, when waiting for the others may take forever
        dist.barrier()  # lets gloo's threads let go of the last tensors: its destructor waits for them with the GIL
        dist.destroy_process_group()


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here, found out by compiling a line; it needs a C++ compiler, or Triton."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
        return True
    except Exception as error:
        reason = str(error).strip().splitlines()
        print(f"note: torch.compile does not work here ({reason[0] if reason else error!r}); running without", file=sys.stderr)
        return False


def choose_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of the matmuls: the config's, else bfloat16 on a GPU that has it."""
    if config.dtype:
        return getattr(torch, config.dtype)
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def split_batch(config: Config, world_size: int) -> tuple[int, int]:
    """(contexts of one process a step, contexts of one micro-batch): equal parts, so that the mean of means is the mean."""
    contexts = config.train.tokens_per_step // config.model.block_size
    if contexts % world_size:
        fault = f"a multiple of block_size x processes = {config.model.block_size * world_size}"
        raise ConfigError([Fault("train.tokens_per_step", fault, config.train.tokens_per_step)])
    share = contexts // world_size
    return share, max(size for size in range(1, min(share, config.train.micro_batch) + 1) if share % size == 0)


# ------------------------------------------------------------------------------------- the run


@dataclass
class Progress:
    """What a run knows of itself besides weights and optimizer; saved with them."""

    step: int = 0
    best_val_loss: float = math.inf
    val_loss: float | None = None  # of the evaluation after this step, if there was one
    val_bits_per_byte: float | None = None
    seconds: float = 0.0  # in training steps alone
    wall_seconds: float = 0.0
    skips: int = 0  # bad steps in a row
    recent_losses: list[float] = field(default_factory=list)
    branched_from: dict | None = None


class Run:
    """One training run: everything that its step, evaluation and saving need."""

    def __init__(self, config: Config, world: World, quiet: bool = False):
        self.config, self.world, self.quiet = config, world, quiet
        self.progress, self.started = Progress(), time.perf_counter()
        self.lock = self.metrics = self.found = None  # until open_directory
        self.open_data()
        self.dtype = choose_dtype(config.train, world.device)
        if world.device.type == "cpu":
            keep_freed_memory()
        with torch.device("meta"):  # no memory until the weights are drawn
            self.model = GPT(config.model, config.scale, config.moe)
        self.model.to_empty(device=world.device)
        for buffer in self.model.buffers():
            buffer.zero_()  # the routers' balance bias; what is in empty memory differs from run to run
        self.model.init_weights_(torch.Generator().manual_seed(config.train.seed))
        if config.train.loss_chunk is not None:
            self.model.loss_chunk = config.train.loss_chunk
        self.model.activation_checkpointing = config.train.activation_checkpointing
        self.optimizers = Optimizers(self.model, config.optim, shard=config.train.shard_optimizer and world.size > 1)
        self.wrap()

    def open_data(self) -> None:
        """Splits, loader, and the sizes of micro-batches."""
        config, world = self.config, self.world
        self.share, self.micro_batch = split_batch(config, world.size)
        self.data_dir = prepare_if_missing(config.data)
        self.meta = read_meta(self.data_dir)
        if self.meta["vocab_size"] > config.model.vocab_size:
            fault = f"at least {self.meta['vocab_size']}, the tokens of {self.data_dir}"
            raise ConfigError([Fault("model.vocab_size", fault, config.model.vocab_size)])
        self.validation = open_split(self.data_dir, "validation", config.data.verify)
        next(self.evaluation_batches(), None)  # a split that is too short is an error now, not after the first steps
        self.loader = self.make_loader(config.train.seed)

    def make_loader(self, seed: int) -> Loader:
        """The training data in the order of `seed`."""
        stream = open_split(self.data_dir, "train", self.config.data.verify)
        contexts = self.share * self.world.size
        return Loader(stream, self.config.model.block_size, seed, contexts, self.world.rank, self.world.size)

    def wrap(self) -> None:
        """`compiled_model` for whole micro-batches, and `forward`, which also synchronises gradients over processes."""
        config, device = self.config.train, self.world.device
        wanted = config.compile if config.compile is not None else device.type == "cuda"
        self.compiled = wanted and can_compile(device)
        self.compiled_model = torch.compile(self.model) if self.compiled else self.model
        self.forward = self.compiled_model
        if self.world.size > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.forward = torch.nn.parallel.DistributedDataParallel(self.compiled_model, device_ids=ids)

    def evaluation_batches(self):
        """This process's part of the evaluation: always the same contexts."""
        data, world, block_size = self.config.data, self.world, self.config.model.block_size
        part = (data.eval_tokens, data.eval_start, world.rank, world.size)
        return evaluation_batches(self.validation, block_size, self.micro_batch, *part)

    def to_device(self, contexts: np.ndarray) -> tuple[Tensor, Tensor]:
        """(n, block_size + 1) token ids -> inputs and targets, (n, block_size) int64 on the device."""
        tokens = torch.from_numpy(contexts)
        if self.world.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.world.device, non_blocking=True)
        else:
            tokens = tokens.to(self.world.device)
        return tokens[:, :-1], tokens[:, 1:]

    def autocast(self):
        """Matmuls in self.dtype."""
        return torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype != torch.float32)

    # ---- one step

    def gradients(self) -> tuple[Tensor, Routing | None]:
        """Leaves the gradient of the step's mean loss in .grad; returns this process's mean loss and routing sums."""
        batches = np.split(self.loader.next(), self.share // self.micro_batch)
        loss_sum, routing_sum = torch.zeros((), device=self.world.device), None
        for number, batch in enumerate(batches):
            inputs, targets = self.to_device(batch)
            if self.world.size > 1:  # set before forward: DDP decides there
                self.forward.require_backward_grad_sync = number == len(batches) - 1
            with self.autocast():
                _, loss, routing = self.forward(inputs, targets, with_routing=True)
            total = loss if routing is None else loss + routing.auxiliary_loss.sum()
            (total / len(batches)).backward()
            loss_sum += loss.detach()
            if routing is not None:
                parts = [part.detach() for part in routing]
                routing_sum = parts if routing_sum is None else [a + b for a, b in zip(routing_sum, parts)]
        scale = 1 / len(batches)
        if routing_sum is not None:
            means = {name: part * (1 if name == "load" else scale) for name, part in zip(Routing._fields, routing_sum)}
            routing_sum = Routing(**means)
        return loss_sum * scale, routing_sum

    def training_step(self) -> dict:
        """One update. Returns the row of metrics.jsonl. Raises TrainingStopped for a bad step."""
        config, world, started = self.config, self.world, time.perf_counter()
        step, position = self.progress.step, self.loader.state()["position"]
        rate = schedule(step, config.optim, config.train.max_steps)
        self.optimizers.set_rate(rate)
        loss, routing = self.gradients()
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.optim.clip or math.inf)
        bad = (~grad_norm.isfinite()).to(loss.dtype)
        loss, bad = world.sum(torch.stack([loss / world.size, bad])).tolist()
        grad_norm, good = grad_norm.item(), math.isfinite(loss) and not bad  # good: the same on every rank
        row = {"train_loss": loss, "learning_rate": rate * config.optim.learning_rate, "grad_norm": grad_norm}
        if good:
            self.optimizers.step()
            row |= self.finish_routing(routing)
        self.optimizers.zero_grad()
        self.progress.step, self.progress.val_loss, self.progress.val_bits_per_byte = step + 1, None, None
        self.watch(row, good, position)
        seconds = time.perf_counter() - started
        self.progress.seconds += seconds
        return row | {"tokens_per_second": config.train.tokens_per_step / seconds}

    def finish_routing(self, routing: Routing | None) -> dict:
        """Updates the balance bias once, from the whole global batch; returns what a row says of the routers."""
        if routing is None:
            return {}
        load = self.world.sum(routing.load)
        update_balance_(self.model, load)
        busiest, idlest = load_statistics(load)
        means = self.world.sum(torch.stack([routing.entropy.mean(), routing.balance_loss.mean()])) / self.world.size
        names = ("expert_load_max", "expert_load_min", "router_entropy", "balance_loss")
        return dict(zip(names, (float(busiest), float(idlest), *means.tolist())))

    def watch(self, row: dict, good: bool, position: int) -> None:
        """Stops or skips a bad step, and marks a loss that is far above the recent ones."""
        train, progress = self.config.train, self.progress
        progress.skips = 0 if good else progress.skips + 1
        if not good:
            what = f"step {progress.step}: loss {row['train_loss']}, grad_norm {row['grad_norm']}; data position {position}"
            if train.bad_step == "stop" or progress.skips > train.max_skips:
                raise TrainingStopped(
                    f"{what}. Not finite, so the run stops; the checkpoint before it is kept. Try a lower "
                    "optim.learning_rate, a longer optim.warmup, train.dtype=float32, or train.bad_step=skip."
                )
            row |= {"skipped": True, "data_position": position}
            return
        if train.spike_window:
            score = spike_score(row["train_loss"], progress.recent_losses)
            if score > train.spike_threshold:
                row |= {"spike": score, "data_position": position}
            progress.recent_losses = (progress.recent_losses + [row["train_loss"]])[-train.spike_window :]

    # ---- evaluation

    @torch.no_grad()
    def evaluate(self, signals: Signals | None = None) -> dict | None:
        """A row: mean loss over the evaluation's tokens, over all processes. Touches no training state.

        No balancing term is in it. Bits a byte come from the tokens and bytes of the whole split.
        None if a signal to stop cut it short, on any process.
        """
        nats = tokens = 0.0
        for batch in self.evaluation_batches():
            if signals and signals.stop:
                break
            inputs, targets = self.to_device(batch)
            # a last, smaller batch is not worth compiling again
            model = self.compiled_model if len(batch) == self.micro_batch else self.model
            with self.autocast():
                nats += model(inputs, targets)[1].item() * targets.numel()
            tokens += targets.numel()
        device = self.world.device if self.world.size > 1 else "cpu"
        sums = torch.tensor([nats, tokens, bool(signals and signals.stop)], dtype=torch.float64, device=device)
        nats, tokens, stopped = self.world.sum(sums).tolist()
        if stopped:
            return None
        loss, split = nats / tokens, self.meta["splits"]["validation"]
        return {"val_loss": loss, "val_bits_per_byte": loss / math.log(2) * split["tokens"] / split["bytes"]}

    def evaluate_and_keep_best(self, signals: Signals | None = None) -> bool:
        """Evaluates, and saves best.pt if no evaluation was better. False if a signal to stop cut it short."""
        row, progress = self.evaluate(signals), self.progress
        if row is None:
            return False
        progress.val_loss, progress.val_bits_per_byte = row["val_loss"], row["val_bits_per_byte"]
        if row["val_loss"] < progress.best_val_loss:
            progress.best_val_loss = row["val_loss"]
            best = self.weights() | {"val_loss": row["val_loss"]}
            self.world.on_main(lambda: save_checkpoint(self.run_dir / "best.pt", best))
        self.write_row(row)
        return True

    def evaluation_is_due(self, last: int) -> bool:
        """Whether an evaluation belongs to the step just done, and is not done yet."""
        step = self.progress.step
        return self.progress.val_loss is None and (step >= last or is_due(step, self.config.train.eval_interval))

    # ---- saving and going on

    def weights(self) -> dict:
        """What load_model needs."""
        return {"config": self.config.as_dict(), "model": dict(self.model.state_dict()), "step": self.progress.step}

    def save(self) -> None:
        """latest.pt (the one before becomes previous.pt), and a keeper every `keep_every` steps."""
        optimizer = self.optimizers.state()  # with sharding every process takes part
        self.world.on_main(lambda: self.write_checkpoint(optimizer))

    def write_checkpoint(self, optimizer: dict) -> None:
        """What `save` does, on the main process: `optimizer` is the whole state, by parameter name."""
        self.progress.wall_seconds += time.perf_counter() - self.started
        self.started = time.perf_counter()
        state = self.weights() | {
            "optimizer": optimizer,
            "progress": vars(self.progress),
            "loader": self.loader.state(),
            "random": random_state(),
            "processes": self.world.size,
        }
        self.metrics.sync()  # the rows up to this step last as long as the checkpoint
        save_checkpoint(self.run_dir / "latest.pt", state, keep_previous=True)
        if is_due(self.progress.step, self.config.train.keep_every):
            save_checkpoint(self.run_dir / f"step_{self.progress.step:07d}.pt", state)

    def open_directory(self) -> None:
        """Claims the run directory, and goes on from what it holds or from the run to branch from."""
        name, sha256 = self.world.on_main(self.claim)
        self.run_dir = Path(name)
        if sha256:
            self.resume(self.found if self.world.is_main else load_newest(self.run_dir), sha256)
            self.found = None  # its memory
        elif self.config.train.branch:
            self.branch(Path(self.config.train.branch))
        if self.world.is_main:
            cut_metrics(self.run_dir / "metrics.jsonl", self.progress.step, self.progress.val_loss is not None)
            write_json(self.run_dir / "config.json", self.config.as_dict())
            self.metrics = Rows(self.run_dir / "metrics.jsonl")

    def claim(self) -> tuple[str, str | None]:
        """Locks the run directory; its name, and the checksum of the checkpoint to go on from, kept in `found`."""
        resume = self.config.train.resume == "auto"
        run_dir, self.lock = claim_run_dir(self.config.train.out_dir, resume)
        self.found = load_newest(run_dir, set_aside=True) if resume else None
        return str(run_dir), self.found["sha256"] if self.found else None

    def close(self) -> None:
        """Lets go of the run directory, and of the process group.

        What holds the group must go before it: as its last holder, DDP waits, at times for ever, for a thread
        that waits for the interpreter's lock.
        """
        for held in (self.metrics, self.lock):
            if held:
                held.close()
        if self.world.size > 1:
            self.forward = self.optimizers = None
            gc.collect()

    def set_training_state(self, state: dict, what: str, branched: bool = False) -> None:
        """Weights, optimizer, data position and random state of a checkpoint. Raises CheckpointError if they do not fit.

        `branched`: the data go on in the order of the checkpoint's seed, whatever this run's own one is.
        """
        check_training_state(state, self.model, self.config, what)
        with believing(what):
            if branched or state["progress"].get("branched_from"):
                self.loader = self.make_loader(int(state["loader"]["seed"]))
            load_weights_(self.model, state["model"], what)
            self.optimizers.load_state(state["optimizer"])
            self.loader.set_state(state["loader"])
            set_random_state(state["random"])

    def resume(self, state: dict | None, sha256: str) -> None:
        """Goes on from this run's own checkpoint, and says what differs from before."""
        what = f"the checkpoint in {self.run_dir}"
        if not state or state["sha256"] != sha256:
            raise CheckpointError(f"{what} is another one on process {self.world.rank}: all must see the same folder")
        self.set_training_state(state, what)
        with believing(what):
            self.progress = Progress(**state["progress"])
        self.say(f"resumed {self.run_dir} at step {self.progress.step}")
        if state["processes"] != self.world.size:
            self.say(f"  {self.world.size} processes now, {state['processes']} before: the same global order of data")
        for line in settings_changed(state, self.config):
            self.say(f"  changed: {line}")

    def branch(self, source: Path) -> None:
        """Starts from another run's weights, optimizer and data position, with steps of its own."""
        state, what = load_newest(source), f"the checkpoint in {source}"
        if state is None:
            raise CheckpointError(f"train.branch: {source} has no checkpoint")
        self.set_training_state(state, what, branched=True)
        self.progress.branched_from = {"run": str(source), "step": state["step"]}
        self.say(f"branched from {source} at its step {state['step']}")

    # ---- telling

    def say(self, text: str) -> None:
        if self.world.is_main and not self.quiet:
            print(text, flush=True)

    def write_row(self, row: dict) -> None:
        """Appends a line to metrics.jsonl; a number that is not finite becomes null, as JSON has none."""
        if self.world.is_main:
            head = {"step": self.progress.step, "tokens": self.progress.step * self.config.train.tokens_per_step}
            finite = {key: value if not isinstance(value, float) or math.isfinite(value) else None for key, value in row.items()}
            self.metrics.write(head | finite)

    def introduce(self) -> None:
        """The run's arithmetic and its role table."""
        config, world, train = self.config, self.world, self.config.train
        parameters, steps = parameter_count(self.model), train.max_steps
        active, scales = parameter_count(self.model, active=True), scale_parameter_count(self.model)
        tokens, split = steps * train.tokens_per_step, self.meta["splits"]
        block_size, accumulation = config.model.block_size, self.share // self.micro_batch
        active_text = f"{active:,} active, " if active != parameters else ""
        compiled = "compiled" if self.compiled else "not compiled"
        self.say(
            f"{config.name}: {parameters:,} parameters, {active_text}{scales:,} of them in scale vectors; "
            f"{flops_per_token(self.model):.3g} FLOPs a token\n"
            f"step: {train.tokens_per_step:,} tokens = {world.size} processes x {accumulation} micro-batches x "
            f"{self.micro_batch} contexts x {block_size} tokens\n"
            f"run:  {steps:,} steps, {warmup_steps(config.optim, steps):,} of them warm-up; {tokens:,} tokens = "
            f"{tokens / parameters:.3g} a parameter = {tokens / split['train']['tokens']:.3g} epochs\n"
            f"data: {self.data_dir}: {split['train']['tokens']:,} training and {split['validation']['tokens']:,} "
            f"validation tokens, {split['train']['bytes'] / split['train']['tokens']:.3g} bytes a token\n"
            f"on:   {world.device}, {str(self.dtype).removeprefix('torch.')}, {compiled}; in {self.run_dir}\n\n"
            f"{format_role_table(role_table(self.model, config.optim))}\n"
        )
        self.say_memory()

    def say_memory(self) -> None:
        """The estimate of a step's memory and, on a GPU, whether it fits and which key to change if not."""
        estimate = memory_estimate(self.config, self.micro_batch, self.dtype, self.world.size)
        self.say(f"memory: {format_estimate(estimate)}\n")
        if self.world.device.type == "cuda":
            there = torch.cuda.get_device_properties(self.world.device).total_memory
            if estimate["all"] > there:
                keys = "lower train.micro_batch, or set train.activation_checkpointing=true or train.shard_optimizer=true"
                self.say(f"  more than the GPU's {there / 1e9:.0f} GB: {keys}\n")

    def summary(self) -> dict:
        """What summary.json holds."""
        progress, steps = self.progress, self.progress.step
        tokens = steps * self.config.train.tokens_per_step
        return {
            "name": self.config.name,
            "val_loss": progress.val_loss,
            "best_val_loss": progress.best_val_loss,
            "val_bits_per_byte": progress.val_bits_per_byte,
            "steps": steps,
            "tokens": tokens,
            "parameters": parameter_count(self.model),
            "active_parameters": parameter_count(self.model, active=True),
            "scale_parameters": scale_parameter_count(self.model),
            "wall_seconds": progress.wall_seconds + time.perf_counter() - self.started,
            "tokens_per_second": tokens / progress.seconds if progress.seconds else None,
            "peak_memory_bytes": peak_memory(self.world.device),
            "seed": self.config.train.seed,
            "branched_from": progress.branched_from,
        }

    def conclude(self) -> dict:
        """Writes summary.json, prints the final numbers and a sample; returns the summary."""
        summary = self.summary()
        if self.world.is_main:
            write_json(self.run_dir / "summary.json", summary)
        self.say(
            f"\nvalidation loss {summary['val_loss']:.4f} nats a token, {summary['val_bits_per_byte']:.4f} bits a byte "
            f"(best {summary['best_val_loss']:.4f}); {summary['steps']:,} steps, {summary['tokens']:,} tokens, "
            f"{summary['wall_seconds']:.0f} s\nin {self.run_dir}: summary.json, metrics.jsonl, latest.pt, best.pt"
        )
        if self.config.train.sample_tokens and self.world.is_main and not self.quiet:
            print(f"\nthe model writes:\n{self.sample(self.config.train.sample_tokens)}")
        return summary

    def sample(self, tokens: int) -> str:
        """Text of `tokens` tokens, from the end token on, the same for the same weights and seed."""
        generator = torch.Generator(self.world.device).manual_seed(self.config.train.seed)
        start = torch.tensor([[self.meta["end_token"]]], device=self.world.device)
        written = self.model.generate(start, tokens, generator=generator)[0, 1:]
        return folder_tokenizer(self.data_dir).decode(written.tolist())


# --------------------------------------------------------------------------------- small things


def spike_score(loss: float, recent: list[float]) -> float:
    """Robust z-score: distance from the median over 1.4826 times the median absolute deviation; 0 with few losses."""
    if len(recent) < 20:
        return 0.0
    middle = statistics.median(recent)
    spread = 1.4826 * statistics.median(abs(other - middle) for other in recent)
    return (loss - middle) / spread if spread > 0 else 0.0


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on a GPU, resident for a process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ------------------------------------------------------------------------------------ the loop


def is_due(step: int, interval: int) -> bool:
    """Whether something happens after this step that happens every `interval` of them (0: never)."""
    return interval > 0 and step > 0 and step % interval == 0


def agreed(signals: Signals, world: World) -> tuple[bool, bool]:
    """(stop, save): whether any process was told to."""
    wishes = torch.tensor([float(bool(signals.stop)), float(signals.save)], device=world.device)
    signals.save = False
    stop, save = world.sum(wishes).tolist()
    return stop > 0, save > 0


def loop(run: Run, signals: Signals) -> bool:
    """Trains to the last step, or to where a signal stops it, and saves. Returns whether it came to the end.

    A signal comes first: an evaluation that it keeps from happening is made up for on resuming.
    """
    train, progress = run.config.train, run.progress
    last, stop = min(train.max_steps, train.stop_at_step or train.max_steps), False
    if run.evaluation_is_due(last):
        stop = not run.evaluate_and_keep_best(signals)
        run.save()
    hidden = run.quiet or not run.world.is_main
    with tqdm(total=last, initial=progress.step, unit="step", disable=hidden, dynamic_ncols=True) as bar:
        while progress.step < last and not stop:
            row, step = run.training_step(), progress.step
            bar.update()
            bar.set_postfix_str(f"loss {row['train_loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s", refresh=False)
            if is_due(step, train.log_interval) or step == last or "spike" in row or "skipped" in row:
                run.write_row(row)
            stop, save = agreed(signals, run.world)
            if not stop and run.evaluation_is_due(last):
                stop = not run.evaluate_and_keep_best(signals)
            if stop or save or step == last or is_due(step, train.checkpoint_interval) or is_due(step, train.keep_every):
                run.save()
    return not stop


def train(config: Config, quiet: bool = False) -> dict | None:
    """Trains as `config` (resolved) says. Returns the summary; None if a signal stopped the run before its end.

    Raises ConfigError, DataError and CheckpointError before training, TrainingStopped in it.
    """
    with joined_world(config.train) as world, contextlib.closing(Run(config, world, quiet)) as run:
        run.open_directory()
        run.introduce()
        how = f"go on with the same command and --train.out_dir={run.run_dir} --train.resume=auto"
        with Signals() as signals:
            try:
                finished = loop(run, signals)
            except RuntimeError:
                if world.size > 1:
                    print(f"\nprocess {world.rank} failed, or lost another one; {how}", file=sys.stderr)
                raise
        if finished:
            return run.conclude()
        run.say(f"\nstopped by {signals.stop or 'a signal'} after step {run.progress.step}, all saved in {run.run_dir}\n{how}")
        return None


def main() -> None:
    """The command line: trains a config."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as long as there is nothing to save, it does not kill either
    config = command_line("usage: python train.py CONFIG [--section.key=value ...]")
    if int(os.environ.get("RANK", 0)) == 0:
        notices(config)
    try:
        train(config)
    except TrainingStopped as error:
        print(f"\n{error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_command(main, CheckpointError, OSError)
