"""How fast is a training step, how much memory does it take, and where does the time go?

A step is all of it: forward, loss, backward, clip, optimizer. It is train.py's own, on random tokens. Runs that are
compared take turns in one process, A B A B, so that whatever else the machine does falls on all of them; a sample is
the mean of the steps of one turn (as many as fill 0.2 s). A ratio is that of the medians of two rows:

    unified_time_over_plain          120m, 2 contexts, compiled, in plain's faster dtype
    unified_memory_over_plain        the same; ..._checkpointed: each block computed again in backward (not compiled)
    throughput_over_transformers     tokens a second of plain over transformers' LlamaForCausalLM, same shape and AdamW,
                                     each in its fastest setting: the lower of quickstart's size and 120m
    matmul_rate_over_peak            the step's linear maps run alone, over the step: 120m, plain, float32; ..._bf16
    moe_time_over_dense              quickstart_moe over a dense model of equal active width, forward and backward
    chunked_loss_memory_over_naive   forward and backward of the loss alone, from hidden states, 120m's vocabulary
    loader_time_over_step            quickstart: the loader alone, nothing read ahead, over the fastest step
    growth_250m_over_120m            tokens a second times parameters, 250m over 120m: 1 if the cost is flat

"Alone" is each linear map's forward matmul and its two backward ones, at the step's shapes and dtype, into memory that
is there already; maps that read the same input are one matmul; attention's own two are left out. A setting is a
dtype and whether the model is compiled. Memory is what tensors take at the highest point of a step: weights, optimizer
state, and all that the allocator gave out during the step and had not got back (libraries' own scratch is not in it).

Try it:
    python bench.py                                                    the quickstart's step
    python bench.py configs/unified_120m.py --against configs/baseline_120m.py --train.compile=true
    python bench.py configs/unified_120m.py --profile                  its ten costliest operations
    python bench.py --suite cpu --json bench.json                      all of the ratios above
"""

import argparse
import gc
import itertools
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages of the profiler's own; read when torch is imported

import numpy as np
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor
from torch.profiler import ProfilerActivity
from tqdm import tqdm

from config import Config, ConfigError, Fault, load_config, run_command
from data import Loader, open_split
from model import GPT, default_loss_chunk, flops_per_token, parameter_count
from norms import STRATEGIES, ScaleConfig
from optim import adamw_is_fused
from prepare_data import prepare_if_missing
from train import Run, World, can_compile, choose_device, choose_dtype, split_batch

CONFIGS = Path(__file__).parent / "configs"
SLOW = 60  # seconds: a dtype that a step's matmuls take longer in is left out, as bfloat16 on a CPU without instructions for it
CPU_TOKENS = 2048  # of one step, where a config is measured on a CPU: what a laptop takes a few seconds for

# Dense bfloat16 FLOP/s of a device, from its vendor's data sheet; the first name that fits counts
PEAK_RATES = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI300X": 1307e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}

# Those of the docstring, which stand before the others
MAIN_RATIOS = (
    "unified_time_over_plain",
    "unified_memory_over_plain",
    "throughput_over_transformers",
    "matmul_rate_over_peak",
    "matmul_rate_over_peak_bf16",
    "moe_time_over_dense",
    "chunked_loss_memory_over_naive",
    "loader_time_over_step",
    "growth_250m_over_120m",
)


class Setting(NamedTuple):
    """How a model is run."""

    dtype: str
    compiled: bool

    def __str__(self) -> str:
        return f"{self.dtype} {'compiled' if self.compiled else 'eager'}"


def own_setting(config: Config, device: torch.device) -> Setting:
    """The setting that a config asks for, and train.py takes if torch.compile works."""
    compiled = device.type == "cuda" if config.train.compile is None else config.train.compile
    return Setting(str(choose_dtype(config.train, device)).removeprefix("torch."), compiled)


SETTINGS = [Setting(dtype, compiled) for compiled in (False, True) for dtype in ("float32", "bfloat16")]


# ------------------------------------------------------------------------- what is measured


class RandomTokens:
    """Stands where train.py has its loader: (contexts, block_size + 1) int64 token ids, new ones each step."""

    def __init__(self, contexts: int, block_size: int, vocab_size: int):
        self.shape, self.vocab_size = (contexts, block_size + 1), vocab_size
        self.generator = np.random.default_rng(0)

    def next(self) -> np.ndarray:
        return self.generator.integers(self.vocab_size, size=self.shape)

    def state(self) -> dict:
        return {"position": 0}


class Training(Run):
    """train.py's run of a config, in whatever setting it is asked for, all on the same weights.

    One step is one micro-batch of `contexts` contexts.
    """

    def __init__(self, config: Config, contexts: int, device: torch.device, compiles: bool):
        tokens = contexts * config.model.block_size
        train = replace(config.train, tokens_per_step=tokens, micro_batch=contexts, compile=compiles)
        super().__init__(replace(config, train=train), World(0, 1, device), quiet=True)
        self.tokens = tokens

    def open_data(self) -> None:
        self.share, self.micro_batch = split_batch(self.config, self.world.size)
        shape = self.config.model
        self.loader = RandomTokens(self.share, shape.block_size, shape.vocab_size)

    def in_setting(self, setting: Setting, function: Callable[[], object]) -> None:
        """Calls `function`, one of those below, in a setting."""
        self.dtype = getattr(torch, setting.dtype)
        self.forward = self.compiled_model if setting.compiled else self.model
        function()

    def step(self, setting: Setting, checkpointing: bool = False) -> Callable[[], None]:
        """A function that takes one training step."""

        def run():
            self.model.activation_checkpointing = checkpointing
            self.training_step()

        return partial(self.in_setting, setting, run)

    def forward_backward(self, setting: Setting) -> Callable[[], None]:
        """A function that computes the gradient, and drops it."""

        def run():
            self.gradients()
            self.optimizers.zero_grad()

        return partial(self.in_setting, setting, run)

    def resident(self) -> Iterable[Tensor]:
        """The tensors that stay from step to step."""
        states = [state for optimizer in self.optimizers.all for state in optimizer.state.values()]
        return itertools.chain(self.model.parameters(), self.model.buffers(), tensors_of(states))


def tensors_of(states: Iterable[dict]) -> list[Tensor]:
    """The tensors among the values of optimizer states."""
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


class Llama:
    """transformers' Llama of a config's shape, with the training step that is usual for it and the config's AdamW."""

    def __init__(self, config: Config, contexts: int, device: torch.device):
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM(llama_config(config)).to(device)
        self.compiled_model = torch.compile(self.model)
        optim, self.device, self.clip = config.optim, device, config.optim.clip
        options = dict(lr=optim.learning_rate, betas=(optim.beta1, optim.beta2), eps=optim.eps)
        options |= dict(weight_decay=optim.decay_matrix, fused=adamw_is_fused(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.tokens = contexts * config.model.block_size
        self.loader = RandomTokens(contexts, config.model.block_size, config.model.vocab_size)

    def step(self, setting: Setting) -> Callable[[], None]:
        """A function that takes one training step."""
        forward, dtype = self.compiled_model if setting.compiled else self.model, getattr(torch, setting.dtype)
        on = dtype != torch.float32

        def run():
            tokens = torch.from_numpy(self.loader.next()[:, :-1]).to(self.device)
            with torch.autocast(self.device.type, dtype, enabled=on):
                loss = forward(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

        return run


def llama_config(config: Config):
    """transformers' LlamaConfig of the same matrices, the padding of the vocabulary included."""
    from transformers import LlamaConfig

    shape = config.model.resolved()
    return LlamaConfig(
        vocab_size=shape.padded_vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layer,
        num_attention_heads=shape.n_head,
        num_key_value_heads=shape.n_kv_head,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.block_size,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )


def matmul_shapes(config: Config, tokens: int) -> list[tuple[int, int, int, int]]:
    """(rows, d_in, d_out, how many) of the forward matmuls of one step's linear maps.

    Experts are taken as evenly loaded; the head as the chunks of the loss.
    """
    shape, moe = config.model.resolved(), config.moe
    d, layers, query = shape.d_model, shape.n_layer, shape.n_head * shape.head_dim
    shapes = [(tokens, d, query + 2 * shape.n_kv_head * shape.head_dim, layers), (tokens, query, d, layers)]
    feedforwards = [(tokens, shape.d_ff, 1)]
    if moe:
        shapes.append((tokens, d, moe.n_expert, layers))
        feedforwards = [(tokens * moe.top_k // moe.n_expert, moe.d_ff, moe.n_expert), (tokens, moe.d_ff, moe.n_shared)]
    for rows, d_ff, times in feedforwards:
        shapes += [(rows, d, 2 * d_ff, layers * times), (rows, d_ff, d, layers * times)]
    chunk = min(loss_chunk(config) or tokens, tokens)
    heads = [(chunk, tokens // chunk), (tokens % chunk, 1)]
    return shapes + [(rows, d, shape.padded_vocab_size, times) for rows, times in heads if rows]


def loss_chunk(config: Config) -> int:
    """Tokens whose logits exist at once, as the model has it: the config's number, or the default."""
    given = config.train.loss_chunk
    return default_loss_chunk(config.model.padded_vocab_size) if given is None else given


class Matmuls:
    """The matmuls of a step's linear maps, forward and backward, and nothing else. `flops`: of one run."""

    def __init__(self, config: Config, tokens: int, dtype: str, device: torch.device):
        shapes = matmul_shapes(config, tokens)
        self.flops = sum(6 * rows * d_in * d_out * times for rows, d_in, d_out, times in shapes)
        self.work = []
        for rows, d_in, d_out, times in shapes:
            sizes = ((rows, d_in), (d_out, d_in), (rows, d_out))
            tensors = [0.02 * torch.randn(size, device=device, dtype=getattr(torch, dtype)) for size in sizes]
            gradients = [torch.empty_like(tensor) for tensor in tensors[:2]]
            self.work.append((*tensors, *gradients, times))

    @torch.no_grad()
    def __call__(self) -> None:
        for x, weight, y, x_gradient, weight_gradient, times in self.work:
            for _ in range(times):
                torch.mm(x, weight.T, out=y)
                torch.mm(y, weight, out=x_gradient)
                torch.mm(y.T, x, out=weight_gradient)


def matmul_seconds(config: Config, tokens: int, dtype: str, device: torch.device, part: int = 128) -> float:
    """About how long the step's matmuls take in a dtype, from a `part`-th of its tokens."""
    few = max(1, tokens // part)
    return seconds(Matmuls(config, few, dtype, device), device, 0) * tokens / few


class LossAlone:
    """Forward and backward of the loss from hidden states on, in float32; `chunk`: tokens at once, 0 for all."""

    def __init__(self, config: Config, tokens: int, device: torch.device, chunk: int):
        shape = replace(config.model, n_layer=1)
        self.model = GPT(shape, config.scale).to(device)
        self.model.loss_chunk = chunk
        self.hidden = torch.randn(tokens, shape.d_model, device=device, requires_grad=True)
        self.targets = torch.randint(shape.vocab_size, (tokens,), device=device)

    def __call__(self) -> None:
        self.model.loss(self.hidden, self.targets).backward()
        self.model.zero_grad()
        self.hidden.grad = None


# ---------------------------------------------------------------------------- how it is measured


def synchronize(device: torch.device) -> None:
    """Waits for what the device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device, at_least: float) -> float:
    """Seconds of one run: the mean over as many as fill `at_least`."""
    runs, start = 0, time.perf_counter()
    while True:
        run()
        synchronize(device)
        runs += 1
        if (elapsed := time.perf_counter() - start) >= at_least:
            return elapsed / runs


def peak_bytes(run: Callable[[], object], device: torch.device, resident: Iterable[Tensor] = ()) -> int:
    """Bytes at the highest point of a run: `resident`, plus what was allocated since its start and not freed."""
    gc.collect()
    held = sum(tensor.numel() * tensor.element_size() for tensor in resident)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return held + torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return held + max(itertools.accumulate(changes), default=0)


def costliest(run: Callable[[], object], device: torch.device, steps: int = 2, count: int = 10) -> list[dict]:
    """The operations that take most time by themselves: name, calls and seconds of a step, share of the whole."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            run()
        synchronize(device)
    cost = f"self_{'cpu' if device.type == 'cpu' else 'device'}_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, cost))
    costs = [getattr(event, cost) / steps / 1e6 for event in events]
    return [
        {"name": event.key, "calls": event.count / steps, "seconds": own, "share": own / sum(costs)}
        for event, own in list(zip(events, costs))[:count]
    ]


@dataclass
class Report:
    """Rows of samples, and ratios of the medians of two rows; `as_dict` is the JSON."""

    rows: dict[str, dict] = field(default_factory=dict)
    pairs: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    profile: list[dict] = field(default_factory=list)

    def median(self, row: str) -> float:
        return statistics.median(self.rows[row]["samples"])

    def ratio(self, name: str) -> float | None:
        """Median of the pair's first row over that of its second; None where there is no pair."""
        pair = self.pairs[name]
        return self.median(pair[0]) / self.median(pair[1]) if pair else None

    def spread(self, row: str) -> float:
        """Largest minus smallest sample, over the median."""
        samples = self.rows[row]["samples"]
        return (max(samples) - min(samples)) / self.median(row)

    def notice(self, text: str) -> None:
        """Keeps a line for the JSON, and says it now."""
        self.notices.append(text)
        tqdm.write(f"note: {text}", file=sys.stderr)

    def as_dict(self, device: torch.device) -> dict:
        """The JSON; rows without a sample are left out."""
        rows = [{"name": name, **row} for name, row in self.rows.items() if row["samples"]]
        for row in rows:
            row |= {"median": self.median(row["name"]), "spread": self.spread(row["name"])}
            row |= {"mfu": utilization(row, device)} if device.type == "cuda" else {}
        return {
            "machine": machine(device),
            "ratios": {name: self.ratio(name) for name in sorted(self.pairs, key=lambda name: name not in MAIN_RATIOS)},
            "pairs": {name: list(pair) for name, pair in self.pairs.items() if pair},
            "rows": rows,
            "notices": self.notices,
            "profile": self.profile,
        }


def machine(device: torch.device) -> dict:
    """What was measured on."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "peak_rate": peak_rate(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else memory_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers") if util.find_spec("transformers") else None,
    }


def processor_name() -> str:
    """The CPU's name, with the flags that say how fast its bfloat16 is."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
    return " ".join([facts.get("model name", platform.machine()), *flags])


def memory_bytes() -> int | None:
    """The machine's memory, where the system says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def peak_rate(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a known GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    words = set(re.split(r"[\s-]", name))
    return next((rate for known, rate in PEAK_RATES.items() if set(known.split()) <= words), None)


def utilization(row: dict, device: torch.device) -> float | None:
    """MFU: the model's FLOPs over those the GPU can do in that time; None if one of them is not known."""
    peak = peak_rate(device) if row.get("dtype") == "bfloat16" else None
    return row["model_flops"] / statistics.median(row["samples"]) / peak if peak and row.get("model_flops") else None


class Bench:
    """Rows that take turns.

    settings: those to try; rounds: samples of each row; at_least: seconds of a turn.
    """

    def __init__(self, device: torch.device, settings: list[Setting], rounds: int = 5, at_least: float = 0.2, bar=None):
        self.device, self.rounds, self.at_least, self.report = device, rounds, at_least, Report()
        self.bar = tqdm(disable=True) if bar is None else bar
        self.measures: dict[str, Callable[[], float]] = {}
        wants_compiling = any(setting.compiled for setting in settings)
        self.compiles = wants_compiling and can_compile(device)
        self.settings = [setting for setting in settings if self.compiles or not setting.compiled]
        if wants_compiling and not self.compiles:
            self.report.notice("torch.compile does not work here: every setting is eager")

    def training(self, config: Config, contexts: int) -> Training:
        """A model that trains on steps of `contexts` contexts."""
        return Training(config, contexts, self.device, self.compiles)

    def own_setting(self, config: Config) -> Setting:
        """The setting that train.py would take."""
        dtype, compiled = own_setting(config, self.device)
        return Setting(dtype, compiled and self.compiles)

    def add(self, name: str, measure: Callable[[], float], unit: str = "seconds", **facts) -> str:
        """A row whose samples `measure` gives. Returns its name."""
        self.report.rows[name] = {"unit": unit, "samples": [], **facts}
        self.measures[name] = measure
        return name

    def add_time(self, name: str, run: Callable[[], object], per: float = 1, **facts) -> str:
        """A row of seconds a run over `per`, after one run that compiles and makes the optimizer's state."""
        self.bar.set_postfix_str(f"{name}: first run")
        run()
        return self.add(name, lambda: seconds(run, self.device, self.at_least) / per, **facts)

    def add_memory(self, name: str, run: Callable[[], object], subject: Training | None = None) -> str:
        """A row of peak bytes of a run, which has run before if it is a training step: its state has to be there."""
        resident = (lambda: subject.resident()) if subject else tuple
        return self.add(name, lambda: peak_bytes(run, self.device, resident()), unit="bytes")

    def add_matmuls(self, name: str, config: Config, tokens: int, dtypes: Iterable[str]) -> dict[str, str]:
        """{dtype: row} of the step's linear maps run alone."""
        rows = {}
        for dtype in dtypes:
            matmuls = Matmuls(config, tokens, dtype, self.device)
            rows[dtype] = self.add_time(f"{name} matmuls alone, {dtype}", matmuls, dtype=dtype, flops=matmuls.flops)
        return rows

    def add_loader(self, name: str, config: Config, contexts: int) -> str:
        """A row of the data loader, asked again and again, so that nothing it reads ahead is free."""
        stream = open_split(prepare_if_missing(config.data), "train")
        return self.add_time(name, Loader(stream, config.model.block_size, 0, contexts).next)

    def turns(self, names: Iterable[str], rounds: int | None = None) -> None:
        """Samples the rows one after the other, `rounds` times over."""
        for _, name in itertools.product(range(min(rounds or self.rounds, self.rounds)), dict.fromkeys(names)):
            self.bar.set_postfix_str(name)
            self.report.rows[name]["samples"].append(self.measures[name]())

    def compare(self, pairs: dict[str, tuple | None], also: Iterable[str] = (), rounds: int | None = None) -> None:
        """Makes each pair a ratio, from new samples of all their rows in turns; those of a screening are dropped.

        `also`: rows that take turns with them.
        """
        rows = list(dict.fromkeys([row for pair in pairs.values() if pair for row in pair] + list(also)))
        for row in rows:
            self.report.rows[row]["samples"].clear()
        self.turns(rows, rounds)
        self.report.pairs |= pairs

    def drop_models(self) -> None:
        """Lets go of all models, unless the caller holds them; samples stay."""
        self.measures.clear()
        gc.collect()

    def forget(self) -> None:
        """Lets go of all models and of what was compiled for them."""
        self.drop_models()
        torch._dynamo.reset()


# ------------------------------------------------------------------------------------ the suites


@dataclass(frozen=True)
class Size:
    """A shape to measure at: its name in rows, a file of configs/ (or a path), contexts of a step."""

    name: str
    file: str
    contexts: int
    overrides: tuple[str, ...] = ()
    rounds: int | None = None  # samples of each row, where a step takes so long that fewer than the bench's must do

    def config(self, strategy: str | None = None) -> Config:
        """The file's config, in another strategy if one is named."""
        path = self.file if self.file.endswith(".py") else CONFIGS / f"{self.file}.py"
        config = load_config(path, list(self.overrides))
        return replace(config, scale=ScaleConfig(strategy=strategy)).resolved() if strategy else config


ADAMW = ("--optim.optimizer=adamw",)  # as transformers' step has it: Newton-Schulz is no part of what is compared
QUICKSTART, QUICKSTART_MOE = Size("quickstart", "quickstart", 16, ADAMW), Size("quickstart_moe", "quickstart_moe", 16)
ON_CPU = {size: Size(size, f"baseline_{size}", 2, rounds=3) for size in ("120m", "250m")}
ON_GPU = {size: Size(size, f"baseline_{size}", contexts) for size, contexts in (("120m", 16), ("500m", 8), ("1b", 8))}


class Comparison:
    """One size: plain, unified, transformers' Llama and the bare matmuls.

    `rows`: {subject: {setting: row of its training steps}}; `suffix` ends the names of the ratios.
    """

    def __init__(self, bench: Bench, size: Size, suffix: str = ""):
        self.bench, self.size, self.suffix = bench, size, suffix
        config = size.config("plain")
        self.subjects = {name: bench.training(size.config(name), size.contexts) for name in ("plain", "unified")}
        if util.find_spec("transformers"):
            self.subjects["transformers"] = Llama(config, size.contexts, bench.device)
        tokens = self.subjects["plain"].tokens
        every = dict.fromkeys(setting.dtype for setting in bench.settings)
        dtypes = [dtype for dtype in every if not self.is_slow(dtype, config, tokens)]
        self.settings = [setting for setting in bench.settings if setting.dtype in dtypes]
        self.matmuls = bench.add_matmuls(size.name, config, tokens, dtypes)
        self.rows: dict[str, dict[Setting, str]] = {who: {} for who in self.subjects}

    def is_slow(self, dtype: str, config: Config, tokens: int) -> bool:
        """Whether the step's matmuls would take over SLOW seconds; then a notice says so. float32 is never left out."""
        if dtype == "float32" or (took := matmul_seconds(config, tokens, dtype, self.bench.device)) <= SLOW:
            return False
        self.bench.report.notice(f"{self.size.name}: no {dtype}, the matmuls of a step would take about {took:.0f} s in it")
        return True

    def row(self, who: str, setting: Setting) -> str:
        """The row of a subject in a setting, made when first asked for."""
        if setting not in self.rows[who]:
            subject = self.subjects[who]
            facts = {"tokens": subject.tokens, "dtype": setting.dtype, "matmuls": self.matmuls[setting.dtype]}
            facts["model_flops"] = flops_per_token(self.subjects["plain"].model) * subject.tokens
            name = f"{self.size.name} {who}, {setting}"
            self.rows[who][setting] = self.bench.add_time(name, subject.step(setting), **facts)
        return self.rows[who][setting]

    def screen(self) -> None:
        """Two samples of plain and transformers in every setting, in turns: eager ones first, then compiled ones."""
        for compiled in (False, True):
            settings = [setting for setting in self.settings if setting.compiled == compiled]
            tried = itertools.product([who for who in self.rows if who != "unified"], settings)
            self.bench.turns([self.row(who, setting) for who, setting in tried if self.is_promising(who, setting)], 2)

    def is_promising(self, who: str, setting: Setting) -> bool:
        """False where compiling cannot win: over 2 s a step, mostly matmuls, and 1.3 times what the other dtype takes.

        Plain is compiled in float32 in any case, for its share of the matmul rate.
        """
        if not setting.compiled or (who, setting.dtype) == ("plain", "float32"):
            return True
        median, rows = self.bench.report.median, self.rows[who].items()
        eager = {other.dtype: median(row) for other, row in rows if not other.compiled}
        return not eager or eager[setting.dtype] <= max(2.0, 1.3 * min(eager.values()))

    def fastest(self, who: str, **wanted) -> Setting:
        """The setting with the lowest median, among those with the wanted dtype or `compiled` if there are any."""
        rows = self.rows[who]
        fitting = [s for s in rows if all(getattr(s, name) == value for name, value in wanted.items())]
        return min(fitting or rows, key=lambda setting: self.bench.report.median(rows[setting]))

    def time_pairs(self) -> dict[str, tuple[str, str] | None]:
        """{ratio: its rows}, of everything that is timed at this size; `screen` comes first."""
        best = self.fastest("plain", compiled=True)
        eager = Setting(best.dtype, False)
        pairs = {
            "unified_time_over_plain": (self.row("unified", best), self.row("plain", best)),
            "unified_time_over_plain_eager": (self.row("unified", eager), self.row("plain", eager)),
        }
        if best.compiled:
            pairs["compiled_time_over_eager"] = self.row("plain", best), self.row("plain", eager)
        by_dtype = {dtype: self.row("plain", self.fastest("plain", dtype=dtype)) for dtype in self.matmuls}
        for dtype, suffix in (("float32", ""), ("bfloat16", "_bf16")):
            if any(setting.dtype == dtype for setting in self.bench.settings):
                pair = (self.matmuls[dtype], by_dtype[dtype]) if dtype in by_dtype else None  # left out as too slow
                pairs[f"matmul_rate_over_peak{suffix}"] = pair
        if len(by_dtype) == 2:
            pairs["bfloat16_time_over_float32"] = by_dtype["bfloat16"], by_dtype["float32"]
        return {name + self.suffix: pair for name, pair in pairs.items()} | self.throughput_pair()

    def throughput_pair(self) -> dict[str, tuple[str, str] | None]:
        """Their seconds over ours: the fastest setting of each."""
        pair = None
        if "transformers" in self.rows:
            pair = tuple(self.row(who, self.fastest(who)) for who in ("transformers", "plain"))
        return {f"throughput_over_transformers_{self.size.name}": pair}

    def memory_pair(self, setting: Setting, checkpointing: bool) -> dict[str, tuple[str, str]]:
        """Peak memory of a step, with activation checkpointing or without."""
        pair = tuple(self.memory_row(who, setting, checkpointing) for who in ("unified", "plain"))
        return {"unified_memory_over_plain" + "_checkpointed" * checkpointing + self.suffix: pair}

    def memory_row(self, who: str, setting: Setting, checkpointing: bool) -> str:
        subject = self.subjects[who]
        name = f"{self.size.name} {who}, {setting}{', checkpointed' * checkpointing}, memory"
        return self.bench.add_memory(name, subject.step(setting, checkpointing), subject)

    def run(self) -> Setting:
        """Everything. Returns plain's fastest setting."""
        self.screen()
        self.bench.compare(self.time_pairs(), rounds=self.size.rounds)
        best = self.fastest("plain", compiled=True)
        for setting, checkpointing in ((best, False), (Setting(best.dtype, False), True)):
            self.bench.compare(self.memory_pair(setting, checkpointing), rounds=2)  # counted bytes hardly differ
        return self.fastest("plain")


def compare_with_loader(bench: Bench, size: Size, suffix: str) -> None:
    """The small size: its comparison, each strategy against plain, and the loader alone over the fastest step."""
    comparison = Comparison(bench, size, suffix)
    setting = comparison.run()
    loader = bench.add_loader(f"{size.name} loader", size.config(), size.contexts)
    step = comparison.subjects["plain"].step(setting)
    beside = bench.add_time(f"{size.name} plain beside the loader, {setting}", step)
    bench.compare({"loader_time_over_step": (loader, beside)})
    compare_strategies(bench, size, bench.settings[0])


def compare_strategies(bench: Bench, size: Size, setting: Setting) -> None:
    """The step of every strategy over plain's, in one setting; two models at a time."""
    plain = bench.training(size.config("plain"), size.contexts).step(setting)
    kind = "compiled" if setting.compiled else "eager"
    for strategy in (strategy for strategy in STRATEGIES if strategy != "plain"):
        step = bench.training(size.config(strategy), size.contexts).step(setting)
        names = [f"{size.name} {name}, {setting}" for name in (f"strategy {strategy}", f"plain beside {strategy}")]
        pair = tuple(bench.add_time(name, run) for name, run in zip(names, (step, plain)))
        bench.compare({f"{strategy}_time_over_plain_{size.name}_{kind}": pair})
        del bench.measures[names[0]], step


def compare_with_larger(bench: Bench, size: Size, larger: Size) -> None:
    """A size's comparison, and what a token costs a parameter there and at a larger size, in the same setting."""
    comparison, rows = Comparison(bench, size), []
    setting, plain = comparison.run(), comparison.subjects["plain"]
    del comparison
    bench.drop_models()  # the larger one needs their place
    for each in (size, larger):
        training = plain if each is size else bench.training(each.config("plain"), each.contexts)
        cost = training.tokens * parameter_count(training.model)
        name = f"{each.name} plain, {setting}, a token a parameter"
        rows.append(bench.add_time(name, training.step(setting), per=cost))
    bench.compare({f"growth_{larger.name}_over_{size.name}": tuple(rows)}, rounds=larger.rounds)


def compare_experts(bench: Bench, size: Size) -> None:
    """A mixture of experts over a dense model whose feed-forward is as wide as the experts a token passes through."""
    config = size.config()
    width = (config.moe.top_k + config.moe.n_shared) * config.moe.d_ff
    dense = replace(config, moe=None, model=replace(config.model, d_ff=width))
    setting, rows = bench.own_setting(config), []
    for name, each in (("experts", config), ("dense", dense)):
        training = bench.training(each, size.contexts)
        run = training.forward_backward(setting)
        rows.append(bench.add_time(f"{size.name} {name}, forward and backward, {setting}", run, tokens=training.tokens))
    bench.compare({"moe_time_over_dense": tuple(rows)})


def compare_losses(bench: Bench, size: Size) -> None:
    """The loss in chunks over the loss in one piece: memory, and time."""
    config = size.config("plain")
    tokens = size.contexts * config.model.block_size
    kinds = {"chunked": loss_chunk(config), "naive": 0}
    losses = {kind: LossAlone(config, tokens, bench.device, chunk) for kind, chunk in kinds.items()}
    memory = [bench.add_memory(f"{size.name} loss, {kind}, memory", loss) for kind, loss in losses.items()]
    times = [bench.add_time(f"{size.name} loss, {kind}", loss) for kind, loss in losses.items()]
    bench.compare({"chunked_loss_memory_over_naive": tuple(memory), "chunked_loss_time_over_naive": tuple(times)})


def measure_largest(bench: Bench) -> None:
    """On a GPU: 1b with rows a multiple of 64, and one step of unified 2b, one context a step, with its peak memory."""
    setting = bench.settings[-1]
    for size in (Size("1b, d_ff 4800", "baseline_1b", 8, ("--model.d_ff=4800",)), Size("2b unified", "unified_2b", 1)):
        training = bench.training(size.config(), size.contexts)
        name, step = f"{size.name}, {setting}", training.step(setting)
        flops = flops_per_token(training.model) * training.tokens
        rows = [bench.add_time(name, step, tokens=training.tokens, dtype=setting.dtype, model_flops=flops)]
        bench.turns(rows + [bench.add_memory(f"{name}, memory", step, training)])
        del training, step
        bench.forget()


def take_lowest(bench: Bench, name: str) -> None:
    """The lowest of the ratios NAME_SIZE becomes NAME; null where there is none."""
    report = bench.report
    pairs = [pair for ratio, pair in report.pairs.items() if ratio.startswith(f"{name}_") and pair]
    report.pairs[name] = min(pairs, key=lambda pair: report.median(pair[0]) / report.median(pair[1]), default=None)
    if not pairs:
        report.notice(f"{name} is null: transformers is not installed, `pip install transformers` adds it")


Stages = dict[str, Callable[[Bench], object]]


def cpu_stages(small=QUICKSTART, large=ON_CPU["120m"], larger=ON_CPU["250m"], experts=QUICKSTART_MOE) -> Stages:
    """{what it does: a function of the bench}: the ratios of the module's docstring."""
    return {
        "the loss": partial(compare_losses, size=large),
        "experts": partial(compare_experts, size=experts),
        small.name: partial(compare_with_loader, size=small, suffix=f"_{small.name}"),
        large.name: partial(compare_with_larger, size=large, larger=larger),
        "transformers": partial(take_lowest, name="throughput_over_transformers"),
    }


def full_stages() -> Stages:
    """The same, and each strategy compiled and at 120m."""
    more = [(QUICKSTART, SETTINGS[2]), (ON_CPU["120m"], SETTINGS[0]), (ON_CPU["120m"], SETTINGS[3])]
    return cpu_stages() | {
        f"strategies at {size.name}, {setting}": partial(compare_strategies, size=size, setting=setting)
        for size, setting in more
    }


def gpu_stages() -> Stages:
    """The comparison at three sizes, the largest steps, and the loss."""
    stages: Stages = {"the loss": partial(compare_losses, size=ON_GPU["120m"])}
    for name, size in ON_GPU.items():
        stages[name] = lambda bench, name=name, size=size: Comparison(bench, size, f"_{name}").run()
    stages["largest"] = measure_largest
    return stages | {"transformers": partial(take_lowest, name="throughput_over_transformers")}


SUITES = {"cpu": (cpu_stages, SETTINGS), "full": (full_stages, SETTINGS), "gpu": (gpu_stages, SETTINGS[1::2])}


def run_stages(bench: Bench, stages: Stages) -> Report:
    """All stages, one after the other, each without the models of those before."""
    bench.bar.reset(len(stages))
    for name, stage in stages.items():
        bench.bar.set_description(name)
        stage(bench)
        bench.forget()
        bench.bar.update()
    return bench.report


# ---------------------------------------------------------------------------------- the commands


def measure_configs(bench: Bench, sizes: list[Size], profile: bool = False) -> Report:
    """Step, bare matmuls and peak memory of one config, or of two that take turns, each in its own setting."""
    rows = [measure_config(bench, size, profile) for size in sizes]
    if len(rows) == 1:
        pairs = {"matmul_rate_over_peak": (rows[0]["matmuls"], rows[0]["time"])}
    else:
        pairs = {f"{what}_over_against": (rows[0][what], rows[1][what]) for what in ("time", "memory")}
    bench.compare(pairs, also=[row for each in rows for row in each.values()])
    return bench.report


def measure_config(bench: Bench, size: Size, profile: bool) -> dict[str, str]:
    """{"matmuls", "time", "memory": row} of a config in its own setting; `profile` adds its costliest operations."""
    config = size.config()
    training, setting = bench.training(config, size.contexts), bench.own_setting(config)
    step, name = training.step(setting), f"{size.name}, {setting}"
    matmuls = bench.add_matmuls(size.name, config, training.tokens, [setting.dtype])[setting.dtype]
    facts = {"tokens": training.tokens, "dtype": setting.dtype, "matmuls": matmuls}
    facts["model_flops"] = flops_per_token(training.model) * training.tokens
    rows = {"matmuls": matmuls, "time": bench.add_time(name, step, **facts)}
    if profile:
        bench.report.profile += [{"of": name, **row} for row in costliest(step, bench.device)]
    return rows | {"memory": bench.add_memory(f"{name}, memory", step, training)}


def sizes_to_measure(files: list[str], overrides: list[str], contexts: int | None) -> list[Size]:
    """The config files as sizes of equal steps. Raises ConfigError, also for two configs of different block_size."""
    configs = [load_config(file, overrides) for file in files]
    blocks = [config.model.block_size for config in configs]
    if blocks[0] != blocks[-1]:
        raise ConfigError([Fault("model.block_size", f"{blocks[0]} in both configs, for equal steps", blocks[-1])])
    on_gpu = choose_device(configs[0].train.device, 0).type == "cuda"
    usual = configs[0].train.micro_batch if on_gpu else max(1, CPU_TOKENS // blocks[0])
    names = files if len(set(files)) == len(files) else [files[0], f"{files[0]} again"]
    return [Size(name, file, contexts or usual, tuple(overrides)) for name, file in zip(names, files)]


def show(value: float, unit: str) -> str:
    """A sample for people."""
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    scale, short = next((pair for pair in ((1, "s"), (1e3, "ms"), (1e6, "us")) if value * pair[0] >= 1), (1e12, "ps"))
    return f"{value * scale:.3g} {short}"


def format_row(row: dict, report: Report, device: torch.device) -> str:
    """A line of the table."""
    seconds = report.median(row["name"])
    cells = [f"{row['name']:68}{show(seconds, row['unit']):>12}{row['spread']:7.0%}"]
    cells.append(f"{row['tokens'] / seconds:12,.0f}" if row.get("tokens") else f"{'':12}")
    matmuls = row.get("matmuls")
    if row.get("flops"):
        cells.append(f"{row['flops'] / seconds / 1e9:9,.0f} GFLOP/s")
    elif matmuls and report.rows[matmuls]["samples"]:
        cells.append(f"{report.median(matmuls) / seconds:9.0%}")
    if device.type == "cuda" and "model_flops" in row:
        cells.append(f"  MFU {'n/a' if row['mfu'] is None else format(row['mfu'], '.0%')}")
    return "".join(cells).rstrip()


def format_report(report: Report, device: torch.device) -> str:
    """Machine, rows, ratios and profile, for people."""
    values = report.as_dict(device)
    facts = ", ".join(f"{name} {value}" for name, value in values["machine"].items() if value is not None)
    lines = [facts, "", f"{'row':68}{'median':>12}{'spread':>7}{'tokens/s':>12}{'of matmuls':>11}"]
    lines += [format_row(row, report, device) for row in values["rows"]]
    lines += ["", "ratio"]
    lines += [f"{name:68}{'null' if r is None else format(r, '.3f'):>12}" for name, r in values["ratios"].items()]
    if report.profile:
        lines += ["", f"{'costliest operations':68}{'a step':>12}{'share':>7}{'calls':>12}"]
    for row in report.profile:
        cost = f"{show(row['seconds'], 'seconds'):>12}{row['share']:7.0%}{row['calls']:12,.0f}"
        lines.append(f"{row['name'][:67]:68}{cost}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line; all that it does not know is taken as --section.key=value of the configs."""
    made = argparse.ArgumentParser(description="Measure training steps.", allow_abbrev=False)
    made.add_argument("config", nargs="?", default="configs/quickstart.py", help="what to measure (%(default)s)")
    made.add_argument("--against", metavar="CONFIG", help="a second config, which takes turns with the first")
    made.add_argument("--suite", choices=SUITES, help="a fixed set of comparisons instead; full is cpu and more")
    made.add_argument("--json", metavar="FILE", type=Path, help="write machine, ratios, pairs and rows")
    made.add_argument("--profile", action="store_true", help="name the ten costliest operations of the config's step")
    made.add_argument("--contexts", type=int, help=f"contexts of a step ({CPU_TOKENS} tokens; on a GPU micro_batch)")
    made.add_argument("--rounds", type=int, default=5, help="samples of each row (%(default)s)")
    return made


def run_suite(name: str, rounds: int, bar: tqdm) -> tuple[Report, torch.device]:
    """One of SUITES, on the device that it is meant for."""
    stages, settings = SUITES[name]
    device = choose_device("cuda" if name == "gpu" else "cpu", 0)
    return run_stages(Bench(device, settings, rounds, bar=bar), stages()), device


def run_configs(arguments: argparse.Namespace, overrides: list[str], bar: tqdm) -> tuple[Report, torch.device]:
    """What the command line names instead of a suite."""
    files = [file for file in (arguments.config, arguments.against) if file]
    sizes = sizes_to_measure(files, overrides, arguments.contexts)
    configs = [size.config() for size in sizes]
    device = choose_device(configs[0].train.device, 0)
    bench = Bench(device, [own_setting(config, device) for config in configs], arguments.rounds, bar=bar)
    # A line of the profile for each kernel that torch.compile writes for a CPU
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": arguments.profile}):
        return measure_configs(bench, sizes, arguments.profile), device


def main() -> None:
    """The command line: benchmarks a config or a suite, or profiles a step."""
    arguments, overrides = parser().parse_known_args()
    # A training run compiles for one shape; several in this process must not make a graph for all shapes of it
    static = torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64)
    with static, tqdm(dynamic_ncols=True, delay=1) as bar:  # a fault in the settings comes before any bar
        if arguments.suite:
            report, device = run_suite(arguments.suite, arguments.rounds, bar)
        else:
            report, device = run_configs(arguments, overrides, bar)
    print(format_report(report, device))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_dict(device), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
