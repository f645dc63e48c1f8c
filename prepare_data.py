"""Text in, token shards out: how does text become a folder that data.py can trust?

    documents -> tokens, an end token after each -> shards of one split + meta.json

A document goes to validation where sha256(its bytes) / 2^256 < validation fraction: content decides,
not position, so more text never moves a document across, and copies of one document land together.
Documents are streamed, so that memory does not grow with the text.

One process prepares a folder at a time: it holds a lock beside the folder, which dies with it, and the
others wait and then use the result. meta.json is written last. A folder without it is no data folder
yet, and what an interrupted preparation left there is removed and made again.

Try it: `python prepare_data.py stdlib` turns the running Python's standard library into
data/stdlib_bytes, with no download, and ends with a table.
"""

import argparse
import base64
import fcntl
import glob
import hashlib
import io
import json
import os
import platform
import queue
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from data import FORMAT, SPLITS, TOKEN_DTYPES, DataConfig, DataError, default_path, open_split, read_meta

SHARD_TOKENS = 100_000_000
SINGLE_FILE_DOCUMENT_BYTES = 8192  # small enough that 1 MB of text has documents in both splits
BATCH_BYTES = 2**22  # text that the tokenizer threads share out at a time
DOWNLOAD_SECONDS = 30  # for GPT-2's vocabulary, 1.5 MB
RECORD_SUFFIXES = (".jsonl", ".parquet")
TEXT_SUFFIXES = (".txt", *RECORD_SUFFIXES)  # looked for in a folder; a file or glob may name any text
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
ONLINE = {  # name: arguments of datasets.load_dataset
    "shakespeare": {"path": "text", "data_files": SHAKESPEARE, "sample_by": "document"},
    "openwebtext": {"path": "Skylion007/openwebtext"},
    "fineweb-edu": {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-350BT"},
}


# ---- tokenizers ----


class BytesTokenizer:
    """Token = byte, 0 to 255; 256 ends a document. Any bytes can be encoded."""

    name, vocab_size, end_token = "bytes", 257, 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """(tokens,) int64, no end token added."""
        # surrogateescape gives back the raw bytes of a command line that was not UTF-8
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, end tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", "replace")


class BPETokenizer:
    """Byte-pair encoding of tiktoken; the end token is its last id."""

    def __init__(self, name: str, encoding):
        self.name, self.encoding = name, encoding
        self.vocab_size, self.end_token = encoding.n_vocab, encoding.n_vocab - 1

    def encode(self, text: str | bytes) -> np.ndarray:
        """(tokens,) int64, no end token added. Raises UnicodeDecodeError for bytes that are not UTF-8."""
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        # ordinary: "<|endoftext|>" inside a text is that text, not the end of a document
        return np.array(self.encoding.encode_ordinary(text), np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, end tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode([int(token) for token in ids if token != self.end_token])


def load_tokenizer(name: str) -> BytesTokenizer | BPETokenizer:
    """The tokenizer "bytes", "gpt2" or that of a .tiktoken file.

    It has encode(str or bytes) -> (tokens,) int64, decode(ids) -> str, vocab_size (end token included),
    end_token and name. Raises DataError if it is unknown, damaged, or cannot be downloaded.
    """
    if name == "bytes":
        return BytesTokenizer()
    if name != "gpt2" and not name.endswith(".tiktoken"):
        raise DataError(f"tokenizer {name!r}: should be bytes, gpt2, or the name of a .tiktoken file")
    try:
        import tiktoken
    except ImportError:
        raise DataError(f"tokenizer {name!r} needs tiktoken: pip install tiktoken (or use bytes)") from None
    if name == "gpt2":
        return BPETokenizer(name, download_gpt2(tiktoken))
    ranks = read_ranks(name)
    end = {"<|endoftext|>": len(ranks)}
    encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=end)
    return BPETokenizer(os.path.basename(name), encoding)


def folder_tokenizer(folder: str | Path) -> BytesTokenizer | BPETokenizer:
    """The tokenizer that a prepared folder was made with: a .tiktoken file was copied into it.

    Raises DataError as load_tokenizer and read_meta do, and if the copy is not the one that was used.
    """
    meta = read_meta(folder)
    if not meta["tokenizer"].endswith(".tiktoken"):
        return load_tokenizer(meta["tokenizer"])
    copy = Path(folder) / "tokenizer.tiktoken"
    if tokenizer_sha256(str(copy)) != meta.get("tokenizer_sha256"):
        raise DataError(f"{copy}: not the tokenizer that {folder} was made with; prepare the folder again")
    return load_tokenizer(str(copy))


def download_gpt2(tiktoken):
    """tiktoken's GPT-2 encoding, from its cache or the network. Raises DataError after DOWNLOAD_SECONDS."""
    found = queue.SimpleQueue()

    def load() -> None:
        try:
            found.put(tiktoken.get_encoding("gpt2"))
        except Exception as error:  # of several network libraries
            found.put(error)

    # tiktoken sets no time limit; a daemon thread can be left behind when the network answers nothing
    threading.Thread(target=load, daemon=True).start()
    try:
        encoding = found.get(timeout=DOWNLOAD_SECONDS)
    except queue.Empty:
        encoding = TimeoutError(f"no answer in {DOWNLOAD_SECONDS} seconds")
    if isinstance(encoding, Exception):
        reason = f"the GPT-2 vocabulary is not cached and could not be downloaded ({type(encoding).__name__})"
        raise DataError(f"tokenizer 'gpt2': {reason}; use a .tiktoken file (--tokenizer FILE.tiktoken), or bytes")
    return encoding


def read_ranks(path: str) -> dict[bytes, int]:
    """A .tiktoken file, lines of `base64(token) rank`, as {token: rank}.

    Raises DataError unless the ranks are 0 .. n-1 and every single byte has one: then any text can be encoded.
    """
    ranks = {}
    for number, line in enumerate(read_tokenizer_file(path).splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(f"{path}: line {number} is not `base64 rank`; give a .tiktoken file") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise DataError(f"{path}: ranks should run from 0 without a gap and cover every single byte")
    return ranks


def read_tokenizer_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer file {path}: {error.strerror}") from None


def tokenizer_sha256(name: str) -> str | None:
    """The checksum of a .tiktoken file, by which two of one name are told apart; None for the others."""
    return hashlib.sha256(read_tokenizer_file(name)).hexdigest() if name.endswith(".tiktoken") else None


# ---- sources: where documents come from ----


class Document(NamedTuple):
    data: bytes
    where: str  # file, and line or row, for messages
    offset: int = 0  # of the first byte in its file


class Source(NamedTuple):
    version: str
    size: int | None  # bytes of text, for the progress bar; None: not known before reading
    local: bool  # can be read again at no great cost, so a folder made from it can be compared with it
    documents: Callable[[], Iterator[Document]]


def open_source(source: str, field: str, document_bytes: int | None, max_bytes: int) -> Source:
    """stdlib, an online name, or a file, folder or glob. Raises DataError if there is no such thing.

    document_bytes: text files are cut into documents of about this size, at line ends; 0: a file is a
    document; None: 0, but SINGLE_FILE_DOCUMENT_BYTES where the source is one text file.
    max_bytes: the source ends with the document that reaches it; 0: with its last.
    """
    if source in ONLINE:
        version = " ".join(ONLINE[source][key] for key in ("path", "name", "data_files") if key in ONLINE[source])
        size, read = None, partial(online_documents, source, field, document_bytes)
    else:
        is_stdlib = source == "stdlib"
        paths = stdlib_paths() if is_stdlib else local_paths(source)
        version = f"Python {platform.python_version()}" if is_stdlib else f"{len(paths)} files"
        if document_bytes is None:
            document_bytes = SINGLE_FILE_DOCUMENT_BYTES if len(paths) == 1 else 0
        size, read = text_size(paths), partial(file_documents, paths, field, document_bytes)
    if size and max_bytes:
        size = min(size, max_bytes)
    return Source(version, size, source not in ONLINE, lambda: limited(read(), max_bytes))


def stdlib_paths() -> list[Path]:
    """The standard library's .py files, sorted, without tests and what differs between installations.

    sysconfig names the folder of the base interpreter, so a virtual environment changes nothing.
    """
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "__pycache__"}
    root, paths = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, folders, files in os.walk(root):
        # config-*, _sysconfigdata* and sitecustomize describe how this interpreter was compiled and installed
        folders[:] = [name for name in folders if name not in left_out and not name.startswith("config-")]
        files = [name for name in files if not name.startswith(("_sysconfigdata", "sitecustomize"))]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def local_paths(source: str) -> list[Path]:
    """The files of a path or glob, sorted. Raises DataError if there are none."""
    path = Path(source)
    if path.is_dir():
        paths = [file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file()]
        expected = f"no {', '.join(TEXT_SUFFIXES)} file in this folder; name other text by a glob such as '*.md'"
    elif path.exists():
        paths, expected = [path], ""
    else:
        paths = [Path(name) for name in glob.glob(source, recursive=True) if os.path.isfile(name)]
        expected = f"no such file, folder or glob, and none of the names stdlib, {', '.join(ONLINE)}"
    if not paths:
        raise DataError(f"source {source!r}: {expected}")
    return sorted(paths, key=Path.as_posix)


def text_size(paths: list[Path]) -> int | None:
    """Bytes of text; None where files hold records, whose size is not that of their text."""
    if any(path.suffix in RECORD_SUFFIXES for path in paths):
        return None
    return sum(path.stat().st_size for path in paths)


def file_documents(paths: list[Path], field: str, document_bytes: int) -> Iterator[Document]:
    """The documents of every file, read by what its suffix says."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from jsonl_documents(path, field)
        elif path.suffix == ".parquet":
            yield from parquet_documents(path, field)
        else:
            with open(path, "rb") as file:
                yield from cut(file, str(path), document_bytes)


def cut(file: BinaryIO, where: str, document_bytes: int) -> Iterator[Document]:
    """A text as documents of whole lines, at least document_bytes each but for the last; 0: as one."""
    if not document_bytes:
        yield Document(file.read(), where)
        return
    offset = 0
    while data := b"".join(file.readlines(document_bytes)):
        yield Document(data, where, offset)
        offset += len(data)


def jsonl_documents(path: Path, field: str) -> Iterator[Document]:
    """One document a line: the value of `field`."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise DataError(f"{path}, line {number}: not valid JSON") from None
            yield field_document(record, field, f"{path}, line {number}")


def parquet_documents(path: Path, field: str) -> Iterator[Document]:
    """One document a row: the value of column `field`."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{path}: no column {field!r}; --field can be one of {names}")
            rows = (row for batch in file.iter_batches(columns=[field]) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield field_document(row, field, f"{path}, row {number}")
    except ArrowException as error:
        raise DataError(f"{path}: not a readable .parquet file ({error})") from None


def online_documents(source: str, field: str, document_bytes: int | None) -> Iterator[Document]:
    """Streams a data set of ONLINE; shakespeare, a single text, is cut like a single file."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"source {source!r} is streamed with datasets: pip install datasets") from None
    try:
        for number, row in enumerate(datasets.load_dataset(**ONLINE[source], split="train", streaming=True), 1):
            document = field_document(row, field, f"{source}, row {number}")
            if source != "shakespeare":
                yield document
                continue
            size = SINGLE_FILE_DOCUMENT_BYTES if document_bytes is None else document_bytes
            yield from cut(io.BytesIO(document.data), document.where, size)
    except DataError:
        raise
    except Exception as error:  # of the several network libraries below datasets
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"source {source!r}: could not be read online ({reason}); try stdlib or a file") from None


def field_document(record: object, field: str, where: str) -> Document:
    """The text of one record. null is an empty document. Raises DataError for anything but text."""
    if not isinstance(record, dict) or field not in record:
        names = ", ".join(record) if isinstance(record, dict) else "not an object"
        raise DataError(f"{where}: no field {field!r} (found: {names}); name the text's field with --field")
    text = record[field]
    if not isinstance(text, str | None):
        raise DataError(f"{where}: field {field!r} is {type(text).__name__}, not text; name another with --field")
    try:
        return Document((text or "").encode(), where)
    except UnicodeEncodeError:
        raise DataError(f"{where}: field {field!r} holds half a surrogate pair, which is no text") from None


def limited(documents: Iterator[Document], max_bytes: int) -> Iterator[Document]:
    """Documents up to and with the one that reaches max_bytes; 0: all."""
    total = 0
    for document in documents:
        yield document
        total += len(document.data)
        if max_bytes and total >= max_bytes:
            return


# ---- writing a folder ----


def prepare(
    source: str,
    tokenizer: str = "bytes",
    out: str | Path | None = None,
    *,
    field: str = "text",
    validation_fraction: float = 0.05,
    document_bytes: int | None = None,
    max_bytes: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = True,
) -> dict:
    """Makes `out` (default data/SOURCE_TOKENIZER) a folder of token shards. Returns its meta.json.

    field: of .jsonl, .parquet and online records. validation_fraction: of documents, about. document_bytes:
    see open_source. max_bytes: stop after the document that reaches it (0: read all). progress: show a bar
    and say what happens. May be called by several processes at once: one prepares, the others wait. A
    folder already made from the same text in the same way is used as it is.
    Raises DataError if the folder was made from something else or holds other files, the source is missing,
    empty or unreadable, or the disk is full; `out` is then left without a half-written data set.
    """
    check_arguments(validation_fraction, document_bytes, max_bytes, shard_tokens)
    out = Path(out or default_path(source, tokenizer))
    recipe = {
        "source": source,
        "tokenizer": os.path.basename(tokenizer),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "field": field,
        "validation_fraction": validation_fraction,
        "document_bytes": document_bytes,
        "max_bytes": max_bytes,
    }
    try:
        text = open_source(source, field, document_bytes, max_bytes)
        with locked(out, progress):
            if (out / "meta.json").exists():
                return reuse(out, recipe, text, progress)
            return write_folder(out, recipe, text, tokenizer, shard_tokens, progress)
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror or error}") from None


def check_arguments(validation_fraction: float, document_bytes: int | None, max_bytes: int, shard_tokens: int) -> None:
    if not 0 <= validation_fraction <= 1:
        raise DataError(f"validation fraction {validation_fraction}: should be between 0 and 1")
    if (document_bytes or 0) < 0 or max_bytes < 0:
        raise DataError("document bytes and max bytes should be 0 or more")
    if not 1 <= shard_tokens <= SHARD_TOKENS:
        raise DataError(f"shard tokens {shard_tokens}: should be between 1 and {SHARD_TOKENS}")


@contextmanager
def locked(out: Path, progress: bool) -> Iterator[None]:
    """Holds the lock beside the folder. The system releases it when its process ends, however it ends.

    The lock file has content as long as the folder may be half-written: what `is_unfinished` looks at.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(lock_path(out), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{out}: another process is preparing it; waiting", progress)
            fcntl.flock(lock, fcntl.LOCK_EX)
        print("preparing", file=lock, flush=True)
        try:
            yield
        finally:
            lock.truncate(0)


def lock_path(out: Path) -> Path:
    return Path(f"{out}.lock")


def is_unfinished(out: Path) -> bool:
    """Whether a process prepares the folder now, or was killed while it did."""
    return lock_path(out).exists() and lock_path(out).stat().st_size > 0


def say(message: str, progress: bool) -> None:
    if progress:
        print(message, flush=True)


def reuse(out: Path, recipe: dict, text: Source, progress: bool) -> dict:
    """meta.json of a complete folder. Raises DataError if it is damaged or made from something else."""
    meta = read_meta(out)
    asked = recipe | ({"documents_sha256": hash_documents(text)} if text.local else {})
    for name, value in asked.items():
        if meta.get(name) != value:
            made = "other text" if name == "documents_sha256" else f"{name} {meta.get(name)!r}, not {value!r}"
            raise DataError(f"{out}: already prepared, from {made}; choose another --out, or delete the folder")
    for split in SPLITS:
        open_split(out, split)
    say(f"{out}: already prepared from the same text; used as it is", progress)
    return meta


def hash_documents(text: Source) -> str:
    """documents_sha256 of meta.json: the sha256 over the sha256 of every document, in order."""
    digest = hashlib.sha256()
    for document in text.documents():
        digest.update(hashlib.sha256(document.data).digest())
    return digest.hexdigest()


def write_folder(out: Path, recipe: dict, text: Source, tokenizer: str, shard_tokens: int, progress: bool) -> dict:
    """Writes the shards, then meta.json, and takes everything back if that fails."""
    codec = load_tokenizer(tokenizer)
    if removed := remove_half_written(out):
        say(f"{out}: removed {removed} files that an interrupted preparation left", progress)
    out.mkdir(exist_ok=True)
    try:
        if recipe["tokenizer_sha256"]:
            write_file(out / "tokenizer.tiktoken", read_tokenizer_file(tokenizer))
        meta = recipe | write_shards(out, text, codec, recipe["validation_fraction"], shard_tokens, progress)
        sync_folder(out)  # the shards' names are on the disk before the file that vouches for them
        write_file(out / "meta.json", json.dumps(meta, indent=1).encode())
        sync_folder(out)
    except BaseException:
        with suppress(OSError):
            remove_half_written(out)
            out.rmdir()
        raise
    warn_of_empty_splits(meta, out)
    return meta


def write_shards(
    out: Path, text: Source, codec, validation_fraction: float, shard_tokens: int, progress: bool
) -> dict:
    """Streams every document into the shards of its split. Returns what meta.json says about them."""
    dtype = next(name for name in TOKEN_DTYPES if codec.vocab_size <= np.iinfo(name).max + 1)
    writers = {split: SplitWriter(out, split, dtype, shard_tokens) for split in SPLITS}
    digest, empty = hashlib.sha256(), 0
    with tqdm(total=text.size, unit="B", unit_scale=True, desc="tokenizing", disable=not progress) as bar:
        for document, ids in encoded(text.documents(), codec):
            key = hashlib.sha256(document.data).digest()
            digest.update(key)
            if document.data:
                split = choose_split(key, validation_fraction)
                writers[split].add(np.append(ids, codec.end_token), len(document.data))
            else:
                empty += 1
            bar.update(len(document.data))
    for writer in writers.values():
        writer.flush()
    splits = {split: writer.summary for split, writer in writers.items()}
    if not any(summary["tokens"] for summary in splits.values()):
        raise DataError(f"nothing to prepare: no text in the source ({empty} empty documents)")
    return {
        "format": FORMAT,
        "vocab_size": codec.vocab_size,
        "end_token": codec.end_token,
        "dtype": dtype,
        "source_version": text.version,
        "documents_sha256": digest.hexdigest(),
        "empty_documents": empty,
        "splits": splits,
    }


def choose_split(key: bytes, validation_fraction: float) -> str:
    """The split of a document, from the 32 bytes of its sha256 alone."""
    return "validation" if int.from_bytes(key) < validation_fraction * 2**256 else "train"


def encoded(documents: Iterator[Document], codec) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its tokens, (tokens,) int64, in order; threads share the work of a batch.

    Threads are enough: tiktoken releases Python's lock while it encodes.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch in batches(documents, BATCH_BYTES):
            yield from zip(batch, pool.map(partial(encode_document, codec), batch))


def batches(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    """Lists of documents of about `size` bytes together."""
    batch, total = [], 0
    for document in documents:
        batch.append(document)
        total += len(document.data) + 1  # so that empty documents end a batch too
        if total >= size:
            yield batch
            batch, total = [], 0
    yield batch


def encode_document(codec, document: Document) -> np.ndarray:
    """(tokens,) int64. Raises DataError with file and byte where the text is not UTF-8 and must be."""
    try:
        return codec.encode(document.data)
    except UnicodeDecodeError as error:
        place = document.offset + error.start
        advice = "convert the file to UTF-8, or use --tokenizer bytes, which takes any bytes"
        raise DataError(f"{document.where}: not UTF-8 at byte {place}; {advice}") from None


class SplitWriter:
    """Collects the tokens of one split and writes a shard whenever one is full."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int):
        self.folder, self.split = folder, split
        self.buffer = np.empty(shard_tokens, dtype)  # takes memory only as far as it is filled
        self.filled = 0
        self.summary = {"tokens": 0, "bytes": 0, "documents": 0, "shards": []}

    def add(self, ids: np.ndarray, size: int) -> None:
        """Appends one document: its tokens (tokens,), end token included, and its bytes of text."""
        for name, count in (("tokens", len(ids)), ("bytes", size), ("documents", 1)):
            self.summary[name] += count
        while len(ids):
            part, ids = np.split(ids, [len(self.buffer) - self.filled])
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            if self.filled == len(self.buffer):
                self.flush()

    def flush(self) -> None:
        """Writes what has been collected, if anything, as the next shard."""
        tokens, shards = self.buffer[: self.filled], self.summary["shards"]
        if not self.filled:
            return
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
        digest = hashlib.sha256(header.getvalue())
        digest.update(tokens)
        name = f"{self.split}_{len(shards):05d}.npy"
        # not np.save: it hides why a write failed
        write_file(self.folder / name, header.getvalue(), tokens)
        shards.append({"file": name, "tokens": len(tokens), "sha256": digest.hexdigest()})
        self.filled = 0


def write_file(path: Path, *parts: bytes | np.ndarray) -> None:
    """Writes to a temporary name, waits for the disk, renames: under its name a file is always whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_half_written(out: Path) -> int:
    """Removes our own files from a folder without meta.json. Returns how many there were.

    Raises DataError, before anything is removed, if it holds files that are not ours.
    """
    if not out.exists():
        return 0
    ours = re.compile(r"(train|validation)_\d{5,}\.npy(\.tmp)?|(meta\.json|tokenizer\.tiktoken)(\.tmp)?")
    names = [name for name in os.listdir(out) if not name.startswith(".")]
    for name in names:
        if not ours.fullmatch(name):
            raise DataError(f"{out}: holds other files ({name}) and no meta.json; choose another --out")
    for name in names:
        (out / name).unlink()
    return len(names)


def warn_of_empty_splits(meta: dict, out: Path) -> None:
    for split, unwanted in (("train", 1), ("validation", 0)):
        if not meta["splits"][split]["tokens"] and meta["validation_fraction"] != unwanted:
            advice = "too few documents: add text, or choose another --validation or --document-bytes"
            print(f"{out}: warning: the {split} split is empty; {advice}", file=sys.stderr)


def prepare_if_missing(data_config: DataConfig) -> str:
    """The data folder of a config, prepared first where it is missing, which is said on stdout.

    A folder given by hand that exists without meta.json is left alone, unless its preparation was
    interrupted: it may be other data that lost its meta.json. Raises DataError for it, as prepare does, and
    if the folder was made from another source or tokenizer than the config names.
    """
    config = data_config.resolved()
    folder, is_default = Path(config.path), config.path == default_path(config.source, config.tokenizer)
    if not (folder / "meta.json").exists():
        stranger = not is_default and folder.exists() and not is_unfinished(folder)
        if stranger and not (folder / "meta.json").exists():  # again: another process may have finished it meanwhile
            advice = "name another, or prepare it with `python prepare_data.py SOURCE --out FOLDER`"
            raise DataError(f"{folder}: exists but is no prepared data folder (no meta.json); {advice}")
        print(f"{folder}: preparing it from {config.source} as {config.tokenizer} tokens", flush=True)
        prepare(config.source, config.tokenizer, folder)
    check_origin(config, is_default)
    return config.path


def check_origin(config: DataConfig, is_default: bool) -> None:
    """Raises DataError if the folder was made from something else than a config says.

    Two sources can have the same default folder. With a folder given by hand, the defaults of source and
    tokenizer say nothing about it.
    """
    meta = read_meta(config.path)
    asked = {}
    if is_default or config.source != DataConfig.source:
        asked["source"] = config.source
    if is_default or config.tokenizer != DataConfig.tokenizer:
        asked["tokenizer"] = os.path.basename(config.tokenizer)
    if os.path.exists(config.tokenizer):  # not needed any more: the folder has a copy
        asked["tokenizer_sha256"] = tokenizer_sha256(config.tokenizer)
    for name, value in asked.items():
        if meta.get(name) != value:
            raise DataError(f"{config.path}: made with {name} {meta.get(name)!r}, not {value!r}; set another data.path")


# ---- the command ----


def table(meta: dict) -> str:
    """What was prepared, a line a split: documents, bytes of text, tokens, bytes a token, shards."""
    rows = {
        split: np.array([summary["documents"], summary["bytes"], summary["tokens"], len(summary["shards"])])
        for split, summary in meta["splits"].items()
    }
    rows["total"] = sum(rows.values())
    lines = [f"{'split':12}{'documents':>12}{'bytes':>18}{'tokens':>18}{'bytes a token':>15}{'shards':>8}"]
    for name, (documents, size, tokens, shards) in rows.items():
        rate = f"{size / tokens:.3f}" if tokens else "-"
        lines.append(f"{name:12}{documents:>12,}{size:>18,}{tokens:>18,}{rate:>15}{shards:>8,}")
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Turns text into a folder of token shards.")
    add = parser.add_argument
    add("source", help=f"stdlib; a file, folder or glob of text, .jsonl, .parquet; or {', '.join(ONLINE)}")
    add("--tokenizer", default="bytes", help="bytes (default), gpt2, or a .tiktoken file")
    add("--out", help="folder to make (default data/SOURCE_TOKENIZER)")
    add("--field", default="text", help="where the text is in a record of .jsonl, .parquet or an online source")
    add("--validation", type=float, default=0.05, help="fraction of documents held out (default 0.05)")
    add("--document-bytes", type=int, help="cut text files into documents of about this size (0: do not)")
    add("--max-bytes", type=int, default=0, help="stop after this much text (0: read it all)")
    add("--shard-tokens", type=int, default=SHARD_TOKENS, help="most tokens in one shard")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """The command line. Exit status 2 where the text or an argument is bad, 130 where it is interrupted."""
    options = parse_arguments(arguments)
    out = options.out or default_path(options.source, options.tokenizer)
    try:
        meta = prepare(
            options.source,
            options.tokenizer,
            out,
            field=options.field,
            validation_fraction=options.validation,
            document_bytes=options.document_bytes,
            max_bytes=options.max_bytes,
            shard_tokens=options.shard_tokens,
        )
    except DataError as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("prepare_data.py: interrupted; nothing half-written was left behind", file=sys.stderr)
        sys.exit(130)
    print(table(meta))
    if meta["empty_documents"]:
        print(f"{meta['empty_documents']} empty documents were left out")
    print(f"{out}: {meta['source']} ({meta['source_version']}), {meta['tokenizer']} tokens, {meta['dtype']}")


if __name__ == "__main__":
    main()
