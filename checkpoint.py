"""How is a run saved so that it can go on as if never stopped?

    write NAME.pt.tmp -> flush, fsync -> latest.pt becomes previous.pt -> rename to latest.pt -> fsync the folder

At every instant one whole checkpoint is on disk. A checkpoint holds tensors and JSON-like values only, so
that loading runs no code (`weights_only=True`), a format version, and a SHA-256 over all of its content; a
damaged one is told from a good one, and the previous one takes its place.

A run directory belongs to one process at a time: a lock that dies with its process.

Try it: `python checkpoint.py out/quickstart` checks a run's checkpoints and says what is in them.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import signal
import sys
import time
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from config import Config, ConfigError, from_dict
from model import GPT

FORMAT = 1  # of the checkpoint; another number means that this code would misread it
FIELDS = {"config": dict, "model": dict, "step": int}  # of every checkpoint
TRAINING_FIELDS = {"optimizer": dict, "progress": dict, "loader": dict, "random": dict, "processes": int}
MOST_VALUES, DEEPEST = 10**6, 10  # in a checkpoint, by far: more is an attack on memory or time


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read, or does not fit: a message for the user."""


class Damaged(CheckpointError):
    """A file that was a checkpoint, or never was one."""


# ------------------------------------------------------------------------------------- files


def sync_folder(folder: Path) -> None:
    """Makes renames in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a small file under a temporary name, flushes, renames. Raises CheckpointError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, value: object) -> None:
    """The same for a value as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def content_hash(value: object) -> str:
    """SHA-256 of nested dicts and lists of tensors and JSON-like values; keys in order, dtypes and shapes included."""
    digest = hashlib.sha256()

    def add(item: object) -> None:
        if isinstance(item, Tensor):
            digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
            digest.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                digest.update(f"{key}:".encode())
                add(item[key])
        elif isinstance(item, (list, tuple)):
            digest.update(f"[{len(item)}]".encode())
            for part in item:
                add(part)
        else:
            digest.update(repr(item).encode())

    add(value)
    return digest.hexdigest()


def save_checkpoint(path: Path, state: dict, keep_previous: bool = False) -> None:
    """Writes `state` to `path`. Raises CheckpointError and leaves what was there if it cannot."""
    state = {**state, "format": FORMAT}
    check_plain(state)
    state["sha256"] = content_hash(state)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            link_previous(path)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        remove_unfinished(path.parent)
        kept = "the one saved before is unchanged" if path.exists() else "there was none before"
        raise CheckpointError(f"cannot save {path}: {error}; {kept}") from error


def remove_unfinished(folder: Path) -> None:
    """Removes what a save that failed, or was killed, has left behind."""
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)


def link_previous(path: Path) -> None:
    """latest.pt gets the second name previous.pt, by a hard link, so that neither name is ever missing."""
    link = path.with_name("previous.pt.tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without hard links: the old file moves, and latest.pt is missing for an instant
        link = path
    os.replace(link, path.with_name("previous.pt"))


def load_checkpoint(path: Path) -> dict:
    """What save_checkpoint wrote, its "sha256" included, on the CPU.

    Raises Damaged if it is; CheckpointError if it cannot be read, or is of another format.
    """
    try:
        check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        check_plain(state)
        digest = content_hash({key: state[key] for key in state if key != "sha256"})
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint") from None
    except (OSError, MemoryError) as error:  # no word about the file's content: it may well be whole
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except Exception as error:  # whatever a flipped bit makes of a zip file or a pickle
        raise Damaged(f"{path} is damaged: {str(error).splitlines()[0] if str(error) else error!r}") from error
    if state.get("sha256") != digest:
        raise Damaged(f"{path} is damaged: its checksum does not fit its content")
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of format {FORMAT}")
    check_fields(state, FIELDS, str(path))
    return state


def check_archive(path: Path) -> None:
    """Refuses, before any memory is taken, an archive whose parts claim more bytes than the file has."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise ValueError("its parts claim more bytes than the file has")


def check_plain(value: object) -> None:
    """Raises ValueError for anything but JSON-like values and plain tensors, each with memory of its own size.

    (A tensor with stride 0 is small in the file and would take any amount of memory once it is copied.)
    """
    found, count = [(value, 0)], 0
    while found:
        item, depth = found.pop()
        count += 1
        if count > MOST_VALUES or depth > DEEPEST:
            raise ValueError("more values, or deeper nested, than a checkpoint has")
        if isinstance(item, dict) and all(type(key) is str for key in item):
            found += [(part, depth + 1) for part in item.values()]
        elif type(item) in (list, tuple):
            found += [(part, depth + 1) for part in item]
        elif isinstance(item, Tensor):
            if type(item) is not Tensor or item.layout is not torch.strided or not item.is_contiguous():
                raise ValueError("a tensor that is not plain and contiguous")
        elif type(item) not in (str, int, float, bool, type(None)):
            raise ValueError(f"a value of type {type(item).__name__}")


def check_fields(state: dict, types: dict[str, type], what: str) -> None:
    """Raises CheckpointError unless the state has these fields, of these types."""
    wrong = [name for name, expected in types.items() if not isinstance(state.get(name), expected)]
    if wrong:
        raise CheckpointError(f"{what} is not the checkpoint that is needed here: no usable {', '.join(wrong)} in it")


def load_newest(run_dir: Path, set_aside: bool = False) -> dict | None:
    """latest.pt, or previous.pt if that is damaged (said on stderr); None if the run has no checkpoint.

    `set_aside` renames a damaged latest.pt, which the next save would else make the previous one.
    """
    found = [path for name in ("latest.pt", "previous.pt") if (path := run_dir / name).exists()]
    for path in found:
        try:
            return load_checkpoint(path)
        except Damaged as error:
            print(f"note: {error}" + ("; trying previous.pt" if path != found[-1] else ""), file=sys.stderr)
            if set_aside and path != found[-1]:
                os.replace(path, path.with_name("latest.pt.damaged"))
    if found:
        raise CheckpointError(f"no checkpoint in {run_dir} is whole; the run cannot go on from there")
    return None


# -------------------------------------------------------------------------------- run folder


class RunLock:
    """A lock on a run directory, held until close() or the end of the process, however it ends."""

    def __init__(self, run_dir: Path):
        """Raises BlockingIOError if another process holds it, OSError where the file system has no locks."""
        self.file = open(run_dir / ".lock", "a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise

    def close(self) -> None:
        self.file.close()


def claim_run_dir(wanted: str, resume: bool) -> tuple[Path, RunLock]:
    """The directory of this run and its lock: `wanted`, or the first free of wanted-2, wanted-3, ...

    Free is one that does not exist or is empty. With `resume` it is `wanted` itself. Raises CheckpointError
    if another process is running in that, or if there can be no directory or no lock.
    """
    number = 1
    while True:
        run_dir = Path(wanted if number == 1 else f"{wanted}-{number}")
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run_dir)
        except BlockingIOError:
            if resume:
                raise CheckpointError(f"another process is running in {run_dir}") from None
        except OSError as error:
            raise CheckpointError(f"cannot run in {run_dir}: {error.strerror}; name another train.out_dir") from error
        else:
            if resume or all(path.name == ".lock" for path in run_dir.iterdir()):
                remove_unfinished(run_dir)
                return run_dir, lock
            lock.close()
        number += 1


def cut_metrics(path: Path, step: int, evaluated: bool) -> None:
    """Drops the rows past a checkpoint, and a line that was cut short, from metrics.jsonl.

    Past it is what has a later step, or, unless it was saved `evaluated`, an evaluation of the same one.
    """
    if not path.exists():
        return
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            if row["step"] <= (step if evaluated or "val_loss" not in row else step - 1):
                rows.append(line + "\n")
    write_text(path, "".join(rows))


class Rows:
    """metrics.jsonl, open to append to: each row is with the system as soon as it is written."""

    def __init__(self, path: Path):
        self.path, self.file = path, open(path, "ab", buffering=0)

    def write(self, row: dict) -> None:
        """Appends a line. Raises CheckpointError if the disk is full."""
        line = (json.dumps(row) + "\n").encode()
        try:
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}; what was saved before is unchanged") from error

    def sync(self) -> None:
        """Makes the rows so far survive a power cut."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


# ----------------------------------------------------------------------------------- process


def random_state() -> dict:
    """The state of torch's global generators. Training draws nothing from them today; a change of it may."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict) -> None:
    """Sets what random_state gave."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Signals:
    """SIGTERM or SIGINT: `stop` when the step is done, a second one at once. SIGUSR1: `save` when it is done."""

    STOP = (signal.SIGTERM, signal.SIGINT)

    def __enter__(self) -> "Signals":
        self.stop, self.save, self.since = "", False, 0.0
        self.before = {number: signal.signal(number, self.handle) for number in (*self.STOP, signal.SIGUSR1)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, _frame) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.stop:
            self.stop, self.since = signal.Signals(number).name, time.monotonic()
            # torchrun passes on what a cluster has sent to every process already: for a while, twice is once
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                for stop in self.STOP:
                    signal.signal(stop, signal.SIG_DFL)  # so that a second one ends even what hangs
        elif time.monotonic() - self.since > 5:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


# ------------------------------------------------------------------------------------- model


def differing_fields(saved: Config, config: Config, sections: tuple[str, ...]) -> list[str]:
    """"section.field: saved value, value now" for every field that differs."""
    before, now, lines = saved.as_dict(), config.as_dict(), []
    for section in sections:
        old, new = before[section] or {}, now[section] or {}
        for name in dict.fromkeys([*new, *old]):
            if old.get(name) != new.get(name):
                lines.append(f"{section}.{name}: {old.get(name)!r} there, {new.get(name)!r} here")
    return lines


def saved_config(state: dict, what: str) -> Config:
    """The config in a checkpoint, with the defaults of keys that are newer. Raises CheckpointError if it is none."""
    try:
        return from_dict(state["config"])
    except ConfigError as error:
        raise CheckpointError(f"{what}: {error}") from error


def check_same_model(saved: Config, config: Config, what: str) -> None:
    """Raises CheckpointError with the first fields that differ if the checkpoint is of another model."""
    lines = differing_fields(saved, config, ("model", "scale", "moe"))
    lines += [line for line in differing_fields(saved, config, ("optim",)) if line.startswith("optim.optimizer:")]
    if lines:
        more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise CheckpointError(f"{what} is of another model:\n  " + "\n  ".join(lines[:5]) + more)


def load_weights_(model: GPT, weights: dict[str, Tensor], what: str) -> None:
    """Puts saved tensors into a model, shapes and dtypes checked first. Raises CheckpointError naming what does not fit."""
    own = model.state_dict()
    wrong = [name for name in own if not is_like(weights.get(name), own[name])]
    wrong += [name for name in weights if name not in own]
    if wrong:
        raise CheckpointError(f"{what} does not fit the model: {', '.join(wrong[:5])}")
    model.load_state_dict(weights, assign=next(iter(own.values())).is_meta)
    if model.config.tied:
        model.head.weight = model.embedding.weight  # assigning gave each its own


def is_like(saved: object, own: Tensor) -> bool:
    """Whether a saved value is a tensor that can take the place of `own`."""
    return isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (own.shape, own.dtype)


def check_optimizer_state(named: dict[str, dict], model: GPT, what: str) -> None:
    """Raises CheckpointError unless all parameters have a state that fits, or none has one yet."""

    def fits(name: str, own: Tensor) -> bool:
        buffers = named.get(name)
        return isinstance(buffers, dict) and all(is_like(b, own) or is_like(b, own.new_zeros(())) for b in buffers.values())

    parameters = dict(model.named_parameters())
    wrong = [name for name in named if name not in parameters]
    wrong += [name for name, own in parameters.items() if not fits(name, own)] if named else []
    if wrong:
        raise CheckpointError(f"{what} has no optimizer state that fits: {', '.join(wrong[:5])}")


def check_training_state(state: dict, model: GPT, config: Config, what: str) -> None:
    """Raises CheckpointError unless `model`, a run of `config`, can go on from a checkpoint."""
    check_fields(state, TRAINING_FIELDS, what)
    check_same_model(saved_config(state, what), config, what)
    check_optimizer_state(state["optimizer"], model, what)


def settings_changed(state: dict, config: Config) -> list[str]:
    """A line for every setting that is not what it was in a checkpoint, but for the directory and resume itself."""
    changes = differing_fields(saved_config(state, "the checkpoint"), config, ("optim", "data", "train"))
    kept = [line for line in changes if not line.startswith(("train.resume", "train.out_dir"))]
    return [line.replace(" there", " before").replace(" here", " now") for line in kept]


@contextlib.contextmanager
def believing(what: str):
    """Turns what goes wrong while a checkpoint's values are put to use into a CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{what} does not hold what a run needs: {error!r}") from error


def load_model(run_dir: str | Path, which: str = "latest", device: str = "cpu") -> GPT:
    """The trained GPT of a run's latest.pt, or best.pt with which="best", in evaluation mode.

    Raises CheckpointError if there is none or it is damaged (for latest.pt, the previous one is used then).
    """
    run_dir = Path(run_dir)
    state = load_newest(run_dir) if which == "latest" else load_checkpoint(run_dir / f"{which}.pt")
    if state is None:
        raise CheckpointError(f"{run_dir} has no checkpoint")
    what = f"the {which} checkpoint in {run_dir}"
    config = saved_config(state, what)
    if config.model.n_layer > len(state["model"]):  # before modules are built for layers that are not there
        raise CheckpointError(f"{what} does not fit the model: {config.model.n_layer} layers")
    with torch.device("meta"), believing(what):
        model = GPT(config.model, config.scale, config.moe)
    load_weights_(model, state["model"], what)
    return model.to(device).eval()


def main() -> None:
    """The command line: prints what the checkpoints in the given folders hold, or why one cannot be read."""
    for argument in sys.argv[1:]:
        for path in sorted(Path(argument).glob("*.pt")):
            try:
                state = load_checkpoint(path)
                tensors = sum(weight.numel() for weight in state["model"].values())
                print(f"{path}: whole; step {state['step']}, {tensors:,} numbers in the model")
            except CheckpointError as error:
                print(error)


if __name__ == "__main__":
    main()
