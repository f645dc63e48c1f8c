"""How is a run saved so that it can go on as if never stopped?

    write NAME.pt.tmp -> flush, fsync -> latest.pt becomes previous.pt -> rename to latest.pt -> fsync the folder

At every instant one whole checkpoint is on disk. A checkpoint holds tensors and JSON-like values only, so
that loading runs no code (`weights_only=True`), a format version, and a SHA-256 over all of its content; a
damaged one is told from a good one, and the previous one takes its place.

A run directory belongs to one process at a time: a lock that dies with its process.

Try it: `python checkpoint.py out/quickstart` checks a run's checkpoints and says what is in them.
"""

import fcntl
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from config import Config, ConfigError, from_dict
from model import GPT

FORMAT = 1  # of the checkpoint; another number means that this code would misread it


class CheckpointError(Exception):
    """A checkpoint that cannot be written, or is damaged, or does not fit: a message for the user."""


# ------------------------------------------------------------------------------------- files


def sync_folder(folder: Path) -> None:
    """Makes renames in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Writes JSON under a temporary name, flushes, renames."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


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
        temporary.unlink(missing_ok=True)
        kept = "the one saved before is unchanged" if path.exists() else "there was none before"
        raise CheckpointError(f"cannot save {path}: {error}; {kept}") from error


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
    """What save_checkpoint wrote, on the CPU. Raises CheckpointError if it is damaged or of another format."""
    try:
        check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint") from None
    except Exception as error:  # whatever a flipped bit makes of a zip file or a pickle
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0] if str(error) else error!r}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of format {FORMAT}")
    if state.pop("sha256", None) != content_hash(state):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    return state


def check_archive(path: Path) -> None:
    """Refuses, before any memory is taken, an archive whose parts claim more bytes than the file has."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise ValueError("its parts claim more bytes than the file has")


def load_newest(run_dir: Path) -> dict | None:
    """latest.pt, or previous.pt (said on stderr) if that is damaged; None if the run has no checkpoint."""
    found = [path for name in ("latest.pt", "previous.pt") if (path := run_dir / name).exists()]
    for path in found:
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            print(f"note: {error}", file=sys.stderr)
    if found:
        raise CheckpointError(f"no checkpoint in {run_dir} is whole; the run cannot go on from there")
    return None


# -------------------------------------------------------------------------------- run folder


class RunLock:
    """A lock on a run directory, held until release() or the end of the process, however it ends."""

    def __init__(self, run_dir: Path):
        """Raises BlockingIOError if another process holds it."""
        self.file = open(run_dir / ".lock", "a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise BlockingIOError(str(run_dir)) from None

    def release(self) -> None:
        self.file.close()


def claim_run_dir(wanted: str, resume: bool) -> tuple[Path, RunLock]:
    """The directory of this run and its lock: `wanted`, or the first free of wanted-2, wanted-3, ...

    Free is one that does not exist or is empty. With `resume` it is `wanted` itself; raises CheckpointError
    if another process is running in it.
    """
    number = 1
    while True:
        run_dir = Path(wanted if number == 1 else f"{wanted}-{number}")
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock = RunLock(run_dir)
            if resume or all(path.name == ".lock" for path in run_dir.iterdir()):
                return run_dir, lock
            lock.release()
        except BlockingIOError:
            if resume:
                raise CheckpointError(f"another process is running in {run_dir}") from None
        number += 1


def cut_metrics(path: Path, step: int) -> None:
    """Drops the rows past `step`, and a last line that was cut short, from metrics.jsonl."""
    if not path.exists():
        return
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("step", step + 1) <= step:
            rows.append(line + "\n")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(rows), encoding="utf-8")
    os.replace(temporary, path)


# ------------------------------------------------------------------------------------- model


def differing_fields(saved: dict, config: Config, sections: tuple[str, ...]) -> list[str]:
    """"section.field: saved value, value now" for every field that differs."""
    now, lines = config.as_dict(), []
    for section in sections:
        old, new = saved.get(section) or {}, now[section] or {}
        for name in dict.fromkeys([*new, *old]):
            if old.get(name) != new.get(name):
                lines.append(f"{section}.{name}: {old.get(name)!r} there, {new.get(name)!r} here")
    return lines


def check_same_model(saved: dict, config: Config, what: str) -> None:
    """Raises CheckpointError with the first fields that differ if the checkpoint is of another model."""
    lines = differing_fields(saved, config, ("model", "scale", "moe"))
    if saved.get("optim", {}).get("optimizer") != config.optim.optimizer:
        lines.append(f"optim.optimizer: {saved.get('optim', {}).get('optimizer')!r} there, {config.optim.optimizer!r} here")
    if lines:
        more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise CheckpointError(f"{what} is of another model:\n  " + "\n  ".join(lines[:5]) + more)


def load_weights_(model: GPT, weights: dict[str, Tensor], what: str) -> None:
    """Puts saved tensors into a model, shapes checked first. Raises CheckpointError naming what does not fit."""
    own = model.state_dict()
    wrong = [name for name in own if name not in weights or weights[name].shape != own[name].shape]
    wrong += [name for name in weights if name not in own]
    if wrong:
        raise CheckpointError(f"{what} does not fit the model: {', '.join(wrong[:5])}")
    model.load_state_dict(weights, assign=own[wrong[0] if wrong else next(iter(own))].is_meta)
    if model.config.tied:
        model.head.weight = model.embedding.weight  # assigning gave each its own


def load_model(run_dir: str | Path, which: str = "latest", device: str = "cpu") -> GPT:
    """The trained GPT of a run's latest.pt, or best.pt with which="best", in evaluation mode.

    Raises CheckpointError if there is none or it is damaged (for latest.pt, the previous one is used then).
    """
    run_dir = Path(run_dir)
    state = load_newest(run_dir) if which == "latest" else load_checkpoint(run_dir / f"{which}.pt")
    if state is None:
        raise CheckpointError(f"{run_dir} has no checkpoint")
    try:
        config = from_dict(state["config"])
    except ConfigError as error:
        raise CheckpointError(f"{run_dir}/{which}.pt: {error}") from error
    with torch.device("meta"):
        model = GPT(config.model, config.scale, config.moe)
    load_weights_(model, state["model"], f"{run_dir}/{which}.pt")
    return model.to(device).eval()


def main() -> None:
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
