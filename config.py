"""How does a file plus `--a.b=c` become one checked, typed config?

    defaults of the dataclasses  <-  configs/NAME.py  <-  --section.key=value  <-  what follows (None -> value)

A config file is ordinary Python that sets `config = Config(...)`; it is the one thing here that runs as
code. Overrides are text, read by the type of the field they set. All faults are collected and shown at
once, each with its key, what was expected, what was given and the nearest valid key.

Try it: `python config.py configs/quickstart.py --optim.learning_rate=1e-3` prints the resolved config.
"""

import dataclasses
import difflib
import importlib.util
import json
import math
import sys
import types
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import torch

from data import DataConfig, DataError
from model import GPT, ModelConfig, parameter_count
from moe import MoEConfig
from norms import ScaleConfig
from optim import OptimConfig, RoleError


@dataclass
class TrainConfig:
    """The loop: how long, how large a step, where it runs, what it keeps."""

    max_steps: Annotated[int | None, "steps, the schedule's horizon (default: from tokens_per_parameter)"] = None
    tokens_per_parameter: Annotated[float, "training tokens for each parameter, where max_steps is not given"] = 100.0
    tokens_per_step: Annotated[int, "tokens of one optimizer step over all processes, a multiple of block_size"] = 2**18
    micro_batch: Annotated[int, "contexts that one process computes at once, at most; shrinks to fit"] = 8
    stop_at_step: Annotated[int | None, "stop after this step and leave the schedule as it is"] = None
    seed: Annotated[int, "fixes first weights and the order of data"] = 0
    log_interval: Annotated[int, "steps from one row of metrics.jsonl to the next"] = 10
    eval_interval: Annotated[int, "steps from one evaluation to the next; there is one at the end in any case"] = 250
    checkpoint_interval: Annotated[int, "steps from one checkpoint to the next; there is one at the end in any case"] = 250
    keep_every: Annotated[int, "keep the checkpoint of every so many steps for good; 0: none"] = 0
    out_dir: Annotated[str | None, "run directory (default out/NAME); a taken one gets -2, -3, ..."] = None
    resume: Annotated[Literal["never", "auto"], "auto: go on from out_dir/latest.pt if there is one"] = "never"
    branch: Annotated[str | None, "start from this run's weights, optimizer and data position, in a directory of its own"] = None
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], "where it runs; auto: the fastest there is"] = "auto"
    dtype: Annotated[Literal["float32", "bfloat16"] | None, "of the matmuls (default bfloat16 on a GPU that has it)"] = None
    compile: Annotated[bool | None, "torch.compile (default: on a GPU)"] = None
    backend: Annotated[Literal["nccl", "gloo"] | None, "how processes talk (default nccl on GPUs, gloo on CPUs)"] = None
    shard_optimizer: Annotated[bool, "each process keeps the optimizer state of its share of the parameters"] = False
    activation_checkpointing: Annotated[bool, "compute blocks again in backward instead of keeping their activations"] = False
    loss_chunk: Annotated[int | None, "tokens whose logits exist at once (default: 2^25 logits' worth); 0: all"] = None
    bad_step: Annotated[Literal["stop", "skip"], "what a loss or gradient that is not finite does"] = "stop"
    max_skips: Annotated[int, "with bad_step=skip: bad steps in a row before the run stops"] = 5
    spike_window: Annotated[int, "steps whose losses say what is usual; 0: spikes are not looked for"] = 100
    spike_threshold: Annotated[float, "a loss so many robust standard deviations above the median is logged as a spike"] = 6.0
    sample_tokens: Annotated[int, "tokens that the model writes at the end"] = 0

    def problems(self) -> list[tuple[str, str, object]]:
        """Faults as (field, what was expected, what was given)."""
        positive = ("max_steps", "tokens_per_parameter", "tokens_per_step", "micro_batch", "stop_at_step")
        positive += ("log_interval", "eval_interval", "checkpoint_interval", "max_skips", "spike_threshold")
        not_negative = ("keep_every", "loss_chunk", "sample_tokens", "spike_window", "seed")
        faults = [(name, "more than 0", value) for name in positive if (value := getattr(self, name)) is not None and value <= 0]
        faults += [(name, "at least 0", value) for name in not_negative if (value := getattr(self, name) or 0) < 0]
        return faults


@dataclass
class Config:
    """One run. `moe` is None in a dense model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    moe: MoEConfig | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    name: str = "run"

    def resolved(self) -> "Config":
        """A copy in which every field that follows from others has its value. Raises ConfigError."""
        if faults := find_faults(self):
            raise ConfigError(faults)
        full = replace(self, model=self.model.resolved(), scale=self.scale.resolved(), data=self.data.resolved())
        steps = full.train.max_steps
        if steps is None:
            tokens = full.train.tokens_per_parameter * count_parameters(full)
            steps = max(1, round(tokens / full.train.tokens_per_step))
        out_dir = full.train.out_dir or f"out/{self.name}"
        return replace(full, train=replace(full.train, max_steps=steps, out_dir=out_dir))

    def as_dict(self) -> dict:
        """Nested plain values, as config.json has them."""
        return dataclasses.asdict(self)


SECTIONS = {"model": ModelConfig, "scale": ScaleConfig, "moe": MoEConfig, "optim": OptimConfig}
SECTIONS |= {"data": DataConfig, "train": TrainConfig}


def count_parameters(config: Config) -> int:
    """Parameters of the config's model, counted on the meta device: no memory."""
    with torch.device("meta"):
        return parameter_count(GPT(config.model, config.scale, config.moe))


# ------------------------------------------------------------------------------------ faults


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with one key."""

    key: str
    expected: str
    given: object

    def __str__(self) -> str:
        return f"{self.key}: expected {self.expected}; given {self.given!r}; nearest valid key: {nearest_key(self.key)}"


class ConfigError(Exception):
    """Everything that is wrong with a config, for the person who wrote it."""

    def __init__(self, faults: list[Fault]):
        self.faults = faults
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n".join([f"the config has {count}:", *(f"  {fault}" for fault in faults)]))


def valid_keys() -> dict[str, Any]:
    """{section.key: its annotation}"""
    return {
        f"{section}.{name}": annotation
        for section, kind in SECTIONS.items()
        for name, annotation in typing.get_type_hints(kind, include_extras=True).items()
    }


def nearest_key(key: str) -> str:
    """The valid key that looks most like `key`, or whose last part does."""
    keys = list(valid_keys())
    by_last_part = {known.split(".")[1]: known for known in keys}
    last_part = key.split(".")[-1]
    if key in keys or last_part in by_last_part:
        return key if key in keys else by_last_part[last_part]
    close = difflib.get_close_matches(key, keys, 1)
    close = close or [by_last_part[name] for name in difflib.get_close_matches(last_part, by_last_part, 1, 0.5)]
    return close[0] if close else "none is near, --help lists them"


def find_faults(config: Config) -> list[Fault]:
    """All faults of a config: types first, then each section's own checks, then those across sections."""
    faults = []
    for section in SECTIONS:
        part = getattr(config, section)
        if part is None and section == "moe":
            continue
        wrong = type_faults(section, part)
        faults += wrong
        if not wrong:
            faults += [Fault(f"{section}.{name}", expected, given) for name, expected, given in getattr(part, "problems", list)()]
    return faults or cross_faults(config)


def type_faults(section: str, part: Any) -> list[Fault]:
    """Fields whose value is not of their type, as a config file may set them."""
    if not isinstance(part, SECTIONS[section]):
        return [Fault(section, f"a {SECTIONS[section].__name__}", part)]
    hints = typing.get_type_hints(SECTIONS[section], include_extras=True)
    return [
        Fault(f"{section}.{name}", describe(hint), getattr(part, name))
        for name, hint in hints.items()
        if not is_instance(getattr(part, name), hint)
    ]


def cross_faults(config: Config) -> list[Fault]:
    """Faults that no section sees alone."""
    faults, train, block_size = [], config.train, config.model.block_size
    if train.tokens_per_step % block_size:
        faults.append(Fault("train.tokens_per_step", f"a multiple of model.block_size = {block_size}", train.tokens_per_step))
    if config.data.tokenizer == "bytes" and config.model.vocab_size < 257:
        faults.append(Fault("model.vocab_size", "at least 257: 256 bytes and the end token", config.model.vocab_size))
    return faults


def notices(config: Config) -> None:
    """Says on stderr what is legal but worth a word."""
    d_ff = config.model.d_ff
    lines = config.moe.notices() if config.moe else []
    if config.moe is None and d_ff % 64:
        nearest = max(64, round(d_ff / 64) * 64)
        lines.append(f"model.d_ff = {d_ff} is not a multiple of 64, which matmuls on a GPU want: {nearest} is the nearest")
    for line in lines:
        print(f"note: {line}", file=sys.stderr)


# ------------------------------------------------------------------------------------- types


def strip(annotation: Any) -> Any:
    """Annotated[T, help] -> T"""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def options(annotation: Any) -> list[Any]:
    """The members of a union, literals as Literal[...]; a plain type is its only member."""
    kind = strip(annotation)
    return list(typing.get_args(kind)) if typing.get_origin(kind) in (Union, types.UnionType) else [kind]


def describe(annotation: Any) -> str:
    """A type in words."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    words = []
    for kind in options(annotation):
        is_literal = typing.get_origin(kind) is Literal
        words.append("one of " + ", ".join(map(str, typing.get_args(kind))) if is_literal else names[kind])
    return " or ".join(words)


def is_instance(value: Any, annotation: Any) -> bool:
    """isinstance for the types that a config has; a whole number is a number, true is not."""
    for kind in options(annotation):
        if typing.get_origin(kind) is Literal:
            if value in typing.get_args(kind) and isinstance(value, str):
                return True
        elif kind is float:
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                return True
        elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return True
    return False


def parse_value(text: str, annotation: Any) -> Any:
    """Text -> a value of the annotated type. Raises ValueError."""
    kinds = options(annotation)
    literals = [value for kind in kinds if typing.get_origin(kind) is Literal for value in typing.get_args(kind)]
    if text in literals:
        return text
    if text.lower() == "none" and type(None) in kinds:
        return None
    if bool in kinds:
        return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
    if str in kinds:
        return text
    if int in kinds or float in kinds:
        number = float(text)
        if not math.isfinite(number) or (int in kinds and number != int(number)):
            raise ValueError(text)
        return (int(text) if text.lstrip("+-").replace("_", "").isdigit() else int(number)) if int in kinds else number
    raise ValueError(text)


# ----------------------------------------------------------------------------------- loading


def load_config(path: str | Path, overrides: list[str] = ()) -> Config:
    """The resolved config of a file and its overrides (`--section.key=value`). Raises ConfigError, all faults in it."""
    config = replace(run_config_file(Path(path)), name=Path(path).stem)
    config, faults = apply_overrides(config, overrides)
    faults += find_faults(config)
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return config.resolved()


def run_config_file(path: Path) -> Config:
    """Runs the file and returns its `config`."""
    if not path.is_file():
        known = sorted(str(other) for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(str(path), known, 1, 0.3)
        raise ConfigError([Fault("CONFIG", "a config file" + (f", such as {close[0]}" if close else ""), str(path))])
    spec = importlib.util.spec_from_file_location("config_file", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError([Fault("CONFIG", "a file that runs", f"{path}: {type(error).__name__}: {error}")]) from error
    if not isinstance(getattr(module, "config", None), Config):
        raise ConfigError([Fault("CONFIG", "a file that sets config = Config(...)", str(path))])
    return module.config


def apply_overrides(config: Config, overrides: list[str]) -> tuple[Config, list[Fault]]:
    """A copy with every valid override applied, and the faults of the others."""
    keys, values, faults = valid_keys(), {}, []
    for argument in overrides:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not equals:
            faults.append(Fault(key, "--section.key=value", argument))
        elif key not in keys:
            faults.append(Fault(key, "a known key", argument))
        else:
            try:
                section, name = key.split(".")
                values.setdefault(section, {})[name] = parse_value(text, keys[key])
            except (ValueError, KeyError, OverflowError):
                faults.append(Fault(key, describe(keys[key]), text))
    parts = {section: replace(getattr(config, section) or MoEConfig(), **changes) for section, changes in values.items()}
    return replace(config, **parts), faults


def from_dict(values: dict) -> Config:
    """The Config that `as_dict` wrote, as plain values. Raises ConfigError where they do not fit."""
    parts, keys, faults = {}, valid_keys(), []
    for section, kind in SECTIONS.items():
        given = values.get(section)
        if section == "moe" and given is None:
            continue
        given = given if isinstance(given, dict) else {}
        unknown = [name for name in given if f"{section}.{name}" not in keys]
        faults += [Fault(f"{section}.{name}", "a known key", given[name]) for name in unknown]
        parts[section] = kind(**{name: value for name, value in given.items() if name not in unknown})
    config = Config(**parts, name=str(values.get("name", "run")))
    if faults := faults + find_faults(config):
        raise ConfigError(faults)
    return config


# ---------------------------------------------------------------------------------- commands


def help_text(config: Config | None = None) -> str:
    """Every key with its default (or its value in `config`) and its effect."""
    lines = []
    for section, kind in SECTIONS.items():
        part = (getattr(config, section) if config else None) or kind()
        lines.append(f"\n{section}: {kind.__doc__.splitlines()[0]}")
        for name, annotation in typing.get_type_hints(kind, include_extras=True).items():
            effect = typing.get_args(annotation)[1]
            lines.append(f"  --{section}.{name}={str(getattr(part, name)).lower()}\n        {effect}; {describe(annotation)}")
    return "\n".join(lines)


def command_line(usage: str, arguments: list[str] | None = None) -> Config:
    """The config that a command was called with: CONFIG [--section.key=value ...]. `--help` prints and exits."""
    arguments = sys.argv[1:] if arguments is None else arguments
    asks_help = any(argument in ("--help", "-h") for argument in arguments)
    files = [argument for argument in arguments if not argument.startswith("-")]
    if asks_help:
        print(usage + "\n" + help_text(run_config_file(Path(files[0])) if files else None))
        raise SystemExit(0)
    if len(files) != 1:
        raise ConfigError([Fault("CONFIG", f"one config file: {usage}", " ".join(files) or "none")])
    return load_config(files[0], [argument for argument in arguments if argument != files[0]])


def run_command(main: typing.Callable[[], None], *others: type[Exception]) -> None:
    """Runs main(); a fault that the user can mend is a message on stderr and exit status 2, not a traceback."""
    try:
        main()
    except (ConfigError, DataError, RoleError, *others) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    """The command line: prints a config with every key, as JSON."""
    config = command_line("usage: python config.py CONFIG [--section.key=value ...]")
    notices(config)
    print(json.dumps(config.as_dict(), indent=2))


if __name__ == "__main__":
    from config import main, run_command  # this file as the module whose classes config files use, not as a script

    run_command(main)
