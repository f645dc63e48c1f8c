"""Where do the tokens live, and which come next?

Where: a folder of shards (numpy .npy files) beside a meta.json that says what they hold. A split,
train or validation, is its shards one after the other: a `TokenStream` of tokens t_0 .. t_{n-1}, read
through memory maps.

Which: context c is the block_size + 1 tokens from c · block_size on, so that neighbours share one
token and every token but the first is predicted exactly once an epoch:

    contexts = (n - 1) // block_size
    epoch    = position // contexts
    context  = permute(position mod contexts; seed, epoch)

`position` counts contexts since the start of training. The order is computed from it alone, by a
small Feistel network, and never stored: 197 million contexts cost as little as ten, a run goes on
where it stopped by remembering one number, and any number of processes sees the same global order.

    round k: (left, right) <- (right, left xor hash(right, key_k))     a bijection on 2^(2h) numbers
    cycle walking: repeat until the result is below `contexts`         a bijection on `contexts` numbers

Try it: `python data.py` shows two epochs of a tiny stream, a state saved and set, and two ranks'
parts of the same step.
"""

import bisect
import errno
import hashlib
import itertools
import json
import os
import re
import resource
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

FORMAT = 1  # of meta.json and the shards; another number means that this code would misread them
SPLITS = ("train", "validation")
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
META_BYTES = 2**24  # a meta.json beyond this is not one: a thousand shards take 0.2 MB
PREPARE_AGAIN = "delete the folder and prepare it again"
VERIFY_BYTES = 2**28  # "auto" verifies the checksums of a split up to this size, in under a second

META_TYPES = {
    "format": int,
    "tokenizer": str,
    "vocab_size": int,
    "end_token": int,
    "dtype": str,
    "source": str,
    "source_version": str,
    "splits": dict,
}
SPLIT_TYPES = {"tokens": int, "bytes": int, "documents": int, "shards": list}
SHARD_TYPES = {"file": str, "tokens": int, "sha256": str}

Verify = Literal["auto", "size", "sha256"]


class DataError(Exception):
    """What is wrong with the data, where, and what to do about it: a message for the user."""


@dataclass
class DataConfig:
    """Which text, as which tokens, and which part of it is evaluated on."""

    path: Annotated[str | None, "folder of token shards (default data/SOURCE_TOKENIZER, e.g. data/stdlib_bytes)"] = None
    source: Annotated[str, "text to prepare when the folder is missing: stdlib, a path, or an online name"] = "stdlib"
    tokenizer: Annotated[str, "bytes, gpt2, or a .tiktoken file"] = "bytes"
    eval_tokens: Annotated[int, "evaluate on this many validation tokens, always the same (0: the whole split)"] = 0
    eval_start: Annotated[
        int, "first validation token that an evaluation reads (so that tuning can use another part)"
    ] = 0
    verify: Annotated[Verify, "check of every shard at the start (auto: sha256 if quick)"] = "auto"

    def resolved(self) -> "DataConfig":
        """A copy in which path is filled."""
        return replace(self, path=self.path or default_path(self.source, self.tokenizer))

    def problems(self) -> list[tuple[str, str, object]]:
        """Faults as (field, what was expected, what was given); [] if there are none."""
        known = self.tokenizer in ("bytes", "gpt2") or self.tokenizer.endswith(".tiktoken")
        checks = [
            ("path", "the name of a folder", self.path != ""),
            ("source", "stdlib, a path, or an online name", self.source != ""),
            ("tokenizer", "bytes, gpt2, or the name of a .tiktoken file", known),
            ("eval_tokens", "0 or more", self.eval_tokens >= 0),
            ("eval_start", "0 or more", self.eval_start >= 0),
        ]
        return [(name, expected, getattr(self, name)) for name, expected, holds in checks if not holds]


def default_path(source: str, tokenizer: str) -> str:
    """data/SOURCE_TOKENIZER, with every character that is awkward in a file name replaced."""
    names = source, os.path.basename(tokenizer).removesuffix(".tiktoken")
    return "data/" + "_".join(re.sub(r"[^\w.-]+", "-", name).strip("-.") or "text" for name in names)


# ---- meta.json and shards: nothing in them is believed before it is checked ----


def read_meta(folder: str | Path) -> dict:
    """meta.json of a prepared folder, checked.

    Returns {format, tokenizer, vocab_size, end_token, dtype, source, source_version, ..., splits: {train,
    validation: {tokens, bytes, documents, shards: [{file, tokens, sha256}]}}}; counts are ints, tokens
    include the end tokens, bytes are those of the text.
    Raises DataError if the file is missing, of another format, or contradicts itself.
    """
    path = Path(folder) / "meta.json"
    try:
        if path.stat().st_size > META_BYTES:
            raise DataError(f"{path}: larger than a meta.json can be; {PREPARE_AGAIN}")
        meta = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{folder}: not a prepared data folder (no meta.json); make one with prepare_data.py") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not valid JSON; {PREPARE_AGAIN}") from None
    check_meta(meta, str(path))
    return meta


def check_meta(meta: object, where: str) -> None:
    """Raises DataError unless meta has every field, of its type, and they agree with each other."""
    if isinstance(meta, dict) and meta.get("format") != FORMAT:
        found = show(meta.get("format"))
        raise DataError(f"{where}: format {found}, this code reads format {FORMAT}; {PREPARE_AGAIN}")
    check_types(meta, META_TYPES, where)
    if meta["dtype"] not in TOKEN_DTYPES:
        raise DataError(f"{where}: dtype {show(meta['dtype'])} is none of {', '.join(TOKEN_DTYPES)}")
    if not 0 < meta["vocab_size"] <= np.iinfo(meta["dtype"]).max + 1:
        raise DataError(f"{where}: vocab_size {show(meta['vocab_size'])} does not fit {meta['dtype']}")
    if not 0 <= meta["end_token"] < meta["vocab_size"]:
        raise DataError(f"{where}: end_token {show(meta['end_token'])} is not below vocab_size {meta['vocab_size']}")
    for split in SPLITS:
        check_split(meta["splits"].get(split), f"{where}: {split}")


def check_split(summary: object, where: str) -> None:
    """The same for one split of meta.json. Shards are plain names, so that none lies outside the folder."""
    check_types(summary, SPLIT_TYPES, where)
    for shard in summary["shards"]:
        check_types(shard, SHARD_TYPES, f"{where}: shards")
        if not re.fullmatch(r"\w[\w.-]*\.npy", shard["file"]):
            raise DataError(f"{where}: shard {show(shard['file'])} is not a plain name like train_00000.npy")
        if shard["tokens"] < 1:
            raise DataError(f"{where}: shard {shard['file']} should have tokens, not {show(shard['tokens'])}")
    if summary["tokens"] != sum(shard["tokens"] for shard in summary["shards"]):
        raise DataError(f"{where}: tokens {show(summary['tokens'])} is not the sum over its shards")
    if summary["tokens"] and min(summary["bytes"], summary["documents"]) < 1:
        raise DataError(f"{where}: has tokens but no bytes or documents")


def check_types(value: object, types: dict[str, type], where: str) -> None:
    """Raises DataError unless value is a dict with these keys, each exactly of its type."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: should be an object with {', '.join(types)}, not {show(value)}")
    for name, expected in types.items():
        if type(value.get(name)) is not expected:  # not isinstance: true is no count
            raise DataError(f"{where}: {name} should be {expected.__name__}, not {show(value.get(name))}")


def show(value: object) -> str:
    """A value from an untrusted file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass
class Shard:
    """An open shard: its tokens, mapped, and the file's state when they were."""

    path: Path
    tokens: np.ndarray  # (tokens,) of the shard's dtype
    state: os.stat_result

    def check_unchanged(self) -> None:
        """Raises DataError if the mapped file was written to.

        A file that replaced it under the same name is another one: the map holds the old one, which the
        job goes on reading as if nothing had happened. Writing into the mapped file does change the tokens.
        """
        try:
            now = os.stat(self.path)
        except OSError:
            return  # removed: the map still holds it
        same_file = (now.st_dev, now.st_ino) == (self.state.st_dev, self.state.st_ino)
        if same_file and (now.st_size, now.st_mtime_ns) != (self.state.st_size, self.state.st_mtime_ns):
            raise DataError(f"{self.path}: was written to while in use; {PREPARE_AGAIN}, then resume")


def open_shard(path: Path, entry: dict, dtype: str, verify: bool) -> Shard:
    """Maps one shard after checking it against its entry in meta.json, its length before memory is taken.

    Raises DataError if it is missing, no .npy file of that dtype and length, or (verify) of another sha256.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(f"{path}: not a regular file")
        with open(path, "rb") as file:  # one open file for check and map: nothing can be swapped in between
            offset = check_shard(file, path, entry, dtype)
            if verify and hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise DataError(f"{path}: its sha256 is not the one in meta.json; {PREPARE_AGAIN}")
            tokens = np.memmap(file, dtype, "r", offset, (entry["tokens"],))
            return Shard(path, np.asarray(tokens), os.fstat(file.fileno()))
    except FileNotFoundError:
        raise DataError(f"{path}: named in meta.json but missing; {PREPARE_AGAIN}") from None
    except OSError as error:
        advice = "; raise the limit with `ulimit -n`" if error.errno == errno.EMFILE else ""
        raise DataError(f"{path}: {error.strerror}{advice}") from None



def check_shard(file, path: Path, entry: dict, dtype: str) -> int:
    """Checks the .npy header against meta.json and the file's size. Returns the offset of the first token."""
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(version)
        shape, _, found = np.lib.format.read_array_header_1_0(file)  # a literal, parsed and never run
    except Exception:  # numpy's parser fails on a damaged header in many ways
        raise DataError(f"{path}: not a .npy shard; {PREPARE_AGAIN}") from None
    if found != np.dtype(dtype):  # a dtype of objects, which only a pickle could fill, ends here too
        raise DataError(f"{path}: holds {show(found.name)}, meta.json says {dtype}; {PREPARE_AGAIN}")
    size = os.fstat(file.fileno()).st_size
    needed = file.tell() + entry["tokens"] * found.itemsize
    if shape != (entry["tokens"],) or size != needed:
        counts = f"{show(shape)} tokens in {size} bytes, meta.json says {show(entry['tokens'])} in {show(needed)}"
        raise DataError(f"{path}: wrong length: {counts}; {PREPARE_AGAIN}")
    offset = file.tell()
    file.seek(0)
    return offset


class TokenStream:
    """The tokens of one split, shard after shard, read through memory maps opened at the start.

    name: for messages. vocab_size: ids must be below it. fingerprint: changes with any token.
    """

    def __init__(self, name: str, shards: list[Shard], vocab_size: int, fingerprint: str):
        self.name, self.shards, self.vocab_size, self.fingerprint = name, shards, vocab_size, fingerprint
        self.ends = list(itertools.accumulate(len(shard.tokens) for shard in shards))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop): (stop - start,) int64, across shards where needed.

        Raises IndexError outside the stream; DataError if a shard was written to since it was opened, or
        holds an id beyond the vocabulary.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        tokens, place = np.empty(stop - start, np.int64), start
        while place < stop:
            number = bisect.bisect_right(self.ends, place)  # the first shard that ends behind place
            shard, end = self.shards[number], self.ends[number]
            first = place - (end - len(shard.tokens))
            part = self.checked(shard, first, min(stop, end) - place)
            tokens[place - start : place - start + len(part)] = part
            place += len(part)
        return tokens

    def checked(self, shard: Shard, first: int, count: int) -> np.ndarray:
        """`count` tokens of one shard, after the checks that `read` promises."""
        shard.check_unchanged()
        part = shard.tokens[first : first + count]
        if part.max() >= self.vocab_size:
            place = int(np.argmax(part >= self.vocab_size))
            found = f"token {first + place} is {part[place]}, and the vocabulary ends at {self.vocab_size - 1}"
            raise DataError(f"{shard.path}: {found}; {PREPARE_AGAIN}")
        return part


def open_split(folder: str | Path, split: str, verify: Verify = "auto") -> TokenStream:
    """Opens the "train" or "validation" split of a prepared folder, every shard checked against meta.json.

    verify: "size" compares each shard's dtype and length with meta.json and its file's size; "sha256" its
    checksum too; "auto" does so for splits of up to VERIFY_BYTES. Raises DataError.
    """
    meta = read_meta(folder)
    entries, width = meta["splits"][split]["shards"], np.dtype(meta["dtype"]).itemsize
    small = meta["splits"][split]["tokens"] * width <= VERIFY_BYTES
    checksum = verify == "sha256" or (verify == "auto" and small)
    allow_open_files()
    shards = [open_shard(Path(folder) / entry["file"], entry, meta["dtype"], checksum) for entry in entries]
    fingerprint = hashlib.sha256("".join(entry["sha256"] for entry in entries).encode()).hexdigest()
    return TokenStream(f"{folder}, {split} split", shards, meta["vocab_size"], fingerprint)


def allow_open_files() -> None:
    """Raises this process's own limit on open files to 8192, or as far as it may: each map keeps one open.

    200 billion tokens are 2000 shards, and a common limit is 1024 files, or 256.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


# ---- the order of contexts ----


def round_keys(seed: int, epoch: int) -> np.ndarray:
    """(8,) uint64: one key for each round of the permutation of one epoch."""
    return np.frombuffer(hashlib.blake2b(f"{seed} {epoch}".encode()).digest(), "<u8").astype(np.uint64)


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """A pseudorandom bijection on 0 .. n-1, computed element by element.

    index: (k,) integers below n. keys: (rounds,) uint64. Returns (k,) int64. Memory: O(k), whatever n is.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # 2^(2 half) >= n, and below 4 n: four tries on average at most
    values = feistel(index.astype(np.uint64), half, keys)
    outside = values >= n
    while outside.any():  # ends: following a permutation's cycle from inside leads back inside
        values[outside] = feistel(values[outside], half, keys)
        outside = values >= n
    return values.astype(np.int64)


def feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """A bijection on the numbers of 2·half bits: (k,) uint64 -> (k,) uint64."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return left << bits | right


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every bit of (k,) uint64 depends on every bit put in."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def count_contexts(stream: TokenStream, block_size: int) -> int:
    """(len - 1) // block_size. Raises DataError if that is 0."""
    contexts = (len(stream) - 1) // block_size
    if contexts < 1:
        needed = f"one context (block_size + 1 = {block_size + 1} tokens)"
        advice = "prepare more text, set another validation fraction, or lower block_size"
        raise DataError(f"{stream.name}: {len(stream)} tokens, shorter than {needed}; {advice}")
    return contexts


def read_contexts(stream: TokenStream, block_size: int, contexts: np.ndarray) -> np.ndarray:
    """Contexts by number, (n,) -> (n, block_size + 1) int64: inputs [:, :-1], targets [:, 1:]."""
    starts = (contexts * block_size).tolist()
    return np.stack([stream.read(start, start + block_size + 1) for start in starts])


class Loader:
    """Endless training steps: contexts in an order that is a function of the position alone.

    A step is `sequences_per_step` consecutive positions, over an epoch's end too; rank r of world_size
    takes the r-th of world_size equal parts. While a step is in use, one thread reads the next.
    Raises DataError if the split is shorter than one context or a step does not divide by the ranks.
    """

    def __init__(
        self,
        stream: TokenStream,
        block_size: int,
        seed: int,
        sequences_per_step: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        if sequences_per_step < 1 or sequences_per_step % world_size:
            raise DataError(f"{sequences_per_step} sequences a step do not divide over {world_size} processes")
        self.stream, self.block_size, self.seed = stream, block_size, seed
        self.sequences_per_step, self.rank, self.world_size = sequences_per_step, rank, world_size
        self.contexts = count_contexts(stream, block_size)
        self.position = 0  # contexts that next() has returned, over all ranks
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.reading: tuple[int, Future] | None = None  # the position being read ahead, and its arrays

    def next(self) -> np.ndarray:
        """This rank's part of the next step: (sequences_per_step // world_size, block_size + 1) int64.

        Raises DataError as TokenStream.read does; the position then stays where it was.
        """
        self.read_ahead()
        arrays = self.reading[1].result()
        self.position += self.sequences_per_step
        self.read_ahead()
        return arrays

    def read_ahead(self) -> None:
        """Has the thread read the step at `position`, unless it does already."""
        if self.reading is None or self.reading[0] != self.position:
            self.reading = self.position, self.thread.submit(self.read_step, self.position)

    def read_step(self, position: int) -> np.ndarray:
        """This rank's part of the step that begins at `position`."""
        count = self.sequences_per_step // self.world_size
        first = position + self.rank * count
        contexts = self.order(np.arange(first, first + count))
        return read_contexts(self.stream, self.block_size, contexts)

    def order(self, positions: np.ndarray) -> np.ndarray:
        """Positions (n,) -> the contexts that stand there, (n,) int64."""
        epochs, contexts = np.divmod(positions, self.contexts)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            contexts[here] = permute(contexts[here], self.contexts, round_keys(self.seed, epoch))
        return contexts

    def identity(self) -> dict:
        """What the order depends on, beside the position."""
        stream = {"contexts": self.contexts, "stream": self.stream.fingerprint}
        return {"seed": self.seed, "block_size": self.block_size} | stream

    def state(self) -> dict:
        """Where training stands, to be given to set_state: {"position": contexts returned, "seed", ...}."""
        return {"position": self.position} | self.identity()

    def set_state(self, state: dict) -> None:
        """Goes on from a saved state, with any number of ranks and any sequences_per_step.

        Raises DataError if it was saved with another seed, block_size or other data.
        """
        for name, here in self.identity().items():
            if state.get(name) != here:
                saved = show(state.get(name))
                raise DataError(f"{self.stream.name}: the saved position is of {name} {saved}, and this run has {here}")
        position = state.get("position")
        if type(position) is not int or not 0 <= position < 2**62:
            raise DataError(f"{self.stream.name}: the saved position is {show(position)}, not a count of contexts")
        self.position = position


def evaluation_batches(
    stream: TokenStream,
    block_size: int,
    batch: int,
    tokens: int = 0,
    start: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[np.ndarray]:
    """The contexts of a fixed part of a split, in order: arrays (n <= batch, block_size + 1) int64.

    The part is `tokens` predicted tokens (0, or more than there are: all) from token `start` on, in whole
    contexts. Over all ranks every context comes once; a rank may get one more than another, or none.
    Raises DataError, when called, if the part is shorter than one context.
    """
    contexts = (len(stream) - start - 1) // block_size
    if tokens:
        contexts = min(contexts, tokens // block_size)
    if contexts < 1:
        part = f"{tokens or 'all'} tokens from token {start} on, of {len(stream)}"
        advice = "evaluate on more tokens, start earlier, prepare more text, or lower block_size"
        raise DataError(f"{stream.name}: {part}: shorter than one context of {block_size} tokens; {advice}")
    first, last = (contexts * part // world_size for part in (rank, rank + 1))
    return read_part(stream, block_size, batch, start, first, last)


def read_part(
    stream: TokenStream, block_size: int, batch: int, start: int, first: int, last: int
) -> Iterator[np.ndarray]:
    """Contexts first .. last-1 counted from token `start`, `batch` at a time."""
    for number in range(first, last, batch):
        places = [start + context * block_size for context in range(number, min(number + batch, last))]
        yield np.stack([stream.read(place, place + block_size + 1) for place in places])


def main() -> None:
    """The demonstration: two epochs of an alphabet in order, three steps, and the state in between."""
    import tempfile

    from prepare_data import prepare  # upward, for the demonstration alone

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "alphabet.txt"
        text.write_text("abcdefghijklmnopqrstuvwxyz")
        prepare(str(text), out=f"{folder}/tokens", validation_fraction=0, progress=False)
        stream = open_split(f"{folder}/tokens", "train")
    # The folder is gone, and the stream still reads: the maps hold their files.
    print(f"{len(stream)} tokens, the last one ends the document: {stream.read(0, len(stream)).tolist()}")
    loader = Loader(stream, block_size=4, seed=1, sequences_per_step=2)
    print(f"{loader.contexts} contexts of 4 + 1 tokens, which overlap by one; two epochs of them, in order:")
    for epoch in range(2):
        print(f"  epoch {epoch}: {loader.order(np.arange(6) + 6 * epoch).tolist()}")

    def letters(step: np.ndarray) -> list[str]:
        return ["".join(map(chr, row)) for row in step]

    print(f"steps of 2: {letters(loader.next())}, {letters(loader.next())}")
    state = loader.state()
    print(f"state: {state | {'stream': state['stream'][:8] + '...'}}")
    print(f"the next step: {letters(loader.next())}")
    for rank in range(2):
        part = Loader(stream, 4, 1, 2, rank, world_size=2)
        part.set_state(state)
        print(f"the same from the saved state, rank {rank} of 2: {letters(part.next())}")


if __name__ == "__main__":
    main()
