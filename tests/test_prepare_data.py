"""Does every document arrive, once, whole, in its split, whatever happens on the way?"""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import prepare_data
from data import DataConfig, DataError, open_split, read_meta
from prepare_data import folder_tokenizer, load_tokenizer, prepare, prepare_if_missing

ROOT = Path(__file__).parent.parent
WORDS = "the scale vector of a norm folds into the matrix behind it and conditions how fast it learns".split()


def quiet(source, *arguments, **keywords):
    return prepare(str(source), *arguments, progress=False, **keywords)


def read_documents(folder, split):
    """The documents of a split as bytes, from the shards of a bytes folder."""
    stream = open_split(folder, split)
    tokens = stream.read(0, len(stream))
    assert len(tokens) == 0 or tokens[-1] == 256
    ends = np.flatnonzero(tokens == 256)
    return [bytes(part[part < 256].astype(np.uint8)) for part in np.split(tokens, ends + 1)[:-1]]


def write_corpus(folder, count):
    """`count` text files of different words."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(count):
        (folder / f"{number:04d}.txt").write_text(" ".join(random.choice(WORDS, 30)))
    return folder


def write_ranks(path, merges=(b"th", b"the", b" s", b"in")):
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def command(*arguments, cwd, check=None):
    """prepare_data.py as a process of its own."""
    line = [sys.executable, str(ROOT / "prepare_data.py"), *map(str, arguments)]
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert check is None or done.returncode == check, done.stderr
    return done


def python(script, *arguments, cwd):
    """A Python process that can import the repository; not waited for."""
    line = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(line, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


# ---- tokenizers ----


@pytest.mark.parametrize("text", ["", "plain", "naïve → 日本語 🙂", "line\r\n\ttab\0"])
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_token) == ("bytes", 257, 256)
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode()) and ids.dtype == np.int64
    assert tokenizer.decode([*ids, 256]) == text
    assert tokenizer.encode(b"\xff\x00").tolist() == [255, 0]
    assert tokenizer.decode([255, 65]) == "\ufffdA"


@pytest.mark.parametrize("text", ["", "the thin thing", "naïve → 日本語 🙂", "<|endoftext|>", "  \n\n x"])
def test_bpe_round_trip(tmp_path, text):
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(str(write_ranks(tmp_path / "tiny.tiktoken")))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_token) == ("tiny.tiktoken", 261, 260)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and 260 not in ids
    assert tokenizer.decode([*ids, 260]) == text
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()


def test_bpe_merges_by_rank(tmp_path):
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(str(write_ranks(tmp_path / "tiny.tiktoken")))
    assert tokenizer.encode("the sin").tolist() == [257, 258, 259]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "should run from 0"),
        (b"!!!! 0\n", "line 1"),
        (b"YQ== 0\nYg==\n", "line 2"),
        (b"YQ== zero\n", "line 1"),
        (b"YQ== 0\nYg== 1\n", "cover every single byte"),
    ],
)
def test_a_damaged_tokenizer_file_is_refused(tmp_path, content, message):
    pytest.importorskip("tiktoken")
    path = tmp_path / "bad.tiktoken"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(path))


def test_a_gap_in_the_ranks_is_refused(tmp_path):
    """The end token is the number of ranks, which a gap would make an id in use."""
    pytest.importorskip("tiktoken")
    path = write_ranks(tmp_path / "gap.tiktoken")
    path.write_bytes(path.read_bytes() + base64.b64encode(b"zz") + b" 261\n")
    with pytest.raises(DataError, match="without a gap"):
        load_tokenizer(str(path))


def test_an_unknown_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match="bytes, gpt2, or"):
        load_tokenizer("words")
    with pytest.raises(DataError, match="No such file"):
        load_tokenizer(str(tmp_path / "none.tiktoken"))


def stub_tiktoken(monkeypatch, get_encoding):
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=get_encoding))


def test_gpt2_without_a_network_names_both_ways_on(monkeypatch, tmp_path):
    def fail(name):
        raise ConnectionError("no network")

    stub_tiktoken(monkeypatch, fail)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(DataError, match=r"ConnectionError.*\.tiktoken.*bytes"):
        quiet(tmp_path / "text.txt", "gpt2", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gpt2_does_not_wait_for_a_network_that_answers_nothing(monkeypatch):
    import threading

    never = threading.Event()
    stub_tiktoken(monkeypatch, lambda name: never.wait())
    monkeypatch.setattr(prepare_data, "DOWNLOAD_SECONDS", 0)
    with pytest.raises(DataError, match=r"TimeoutError.*\.tiktoken.*bytes"):
        load_tokenizer("gpt2")
    never.set()


@pytest.mark.parametrize("vocab_size, dtype", [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_dtype_holds_the_largest_id(monkeypatch, tmp_path, vocab_size, dtype):
    class Largest:
        name, end_token = "largest", vocab_size - 1

        def encode(self, text):
            return np.full(len(text), vocab_size - 1)

    Largest.vocab_size = vocab_size
    monkeypatch.setattr(prepare_data, "load_tokenizer", lambda name: Largest())
    (tmp_path / "text.txt").write_text("text")
    assert quiet(tmp_path / "text.txt", out=tmp_path / "out", validation_fraction=0)["dtype"] == dtype
    assert open_split(tmp_path / "out", "train").read(0, 5).tolist() == [vocab_size - 1] * 5


# ---- what is in the folder ----


def test_every_document_arrives_once(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 60)
    (corpus / "empty.txt").touch()
    (corpus / "raw.txt").write_bytes(b"\xff\xfe raw \x00")
    (corpus / "ignored.bin").write_bytes(b"not text by its name")
    meta = quiet(corpus, out=tmp_path / "out", validation_fraction=0.2, shard_tokens=500)
    found = {split: read_documents(tmp_path / "out", split) for split in ("train", "validation")}
    texts = sorted(path.read_bytes() for path in corpus.glob("*.txt") if path.stat().st_size)
    assert sorted(found["train"] + found["validation"]) == texts
    assert meta == read_meta(tmp_path / "out") and meta["empty_documents"] == 1
    for split, documents in found.items():
        summary = meta["splits"][split]
        assert summary["documents"] == len(documents) > 0
        assert summary["bytes"] == sum(map(len, documents))
        assert summary["tokens"] == summary["bytes"] + summary["documents"]
        assert all(shard["tokens"] == 500 for shard in summary["shards"][:-1])
        for shard in summary["shards"]:
            content = (tmp_path / "out" / shard["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard["sha256"]
    files = [shard["file"] for split in found for shard in meta["splits"][split]["shards"]]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(["meta.json", *files])


def test_shards_are_plain_npy_files(tmp_path):
    (tmp_path / "text.txt").write_text("abc")
    quiet(tmp_path / "text.txt", out=tmp_path / "out", validation_fraction=0)
    tokens = np.load(tmp_path / "out" / "train_00000.npy", allow_pickle=False)
    assert tokens.dtype == np.uint16 and tokens.tolist() == [97, 98, 99, 256]


def test_the_split_is_a_function_of_content_alone(tmp_path):
    """More text, other names and another order move no document; copies land together."""
    corpus = write_corpus(tmp_path / "corpus", 80)
    quiet(corpus, out=tmp_path / "small", validation_fraction=0.3)
    held_out = set(read_documents(tmp_path / "small", "validation"))
    for path in corpus.glob("*.txt"):
        (corpus / f"copy_{hashlib.md5(path.name.encode()).hexdigest()}.txt").write_bytes(path.read_bytes())
    (corpus / "0000_more.txt").write_text("one more document")
    quiet(corpus, out=tmp_path / "large", validation_fraction=0.3)
    train, validation = (read_documents(tmp_path / "large", split) for split in ("train", "validation"))
    assert len(train) + len(validation) == 161
    assert set(validation) - {b"one more document"} == held_out
    assert not set(train) & set(validation)
    assert 80 * 0.3 - 4 * 4.1 < len(held_out) < 80 * 0.3 + 4 * 4.1  # four standard deviations


def test_preparing_twice_gives_the_same_bytes(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 30)
    for name in ("a", "b"):
        quiet(corpus, out=tmp_path / name, shard_tokens=1000)
    files = sorted(os.listdir(tmp_path / "a"))
    assert files == sorted(os.listdir(tmp_path / "b"))
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_the_order_of_documents_survives_batches_and_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "BATCH_BYTES", 500)
    corpus = write_corpus(tmp_path / "corpus", 50)
    quiet(corpus, out=tmp_path / "out", validation_fraction=0)
    assert read_documents(tmp_path / "out", "train") == [path.read_bytes() for path in sorted(corpus.iterdir())]


def test_a_bpe_folder_decodes_to_its_text_and_carries_its_tokenizer(tmp_path):
    pytest.importorskip("tiktoken")
    ranks = write_ranks(tmp_path / "tiny.tiktoken")
    (tmp_path / "text.txt").write_text("the thin thing\nnaïve\n")
    meta = quiet(tmp_path / "text.txt", str(ranks), out=tmp_path / "out", validation_fraction=0)
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_token"]) == ("tiny.tiktoken", 261, 260)
    ranks.unlink()
    stream = open_split(tmp_path / "out", "train")
    tokens = stream.read(0, len(stream))
    assert len(stream) < meta["splits"]["train"]["bytes"] and tokens[-1] == 260
    assert folder_tokenizer(tmp_path / "out").decode(tokens) == "the thin thing\nnaïve\n"
    write_ranks(tmp_path / "out" / "tokenizer.tiktoken", merges=(b"he", b"the", b" s", b"in"))
    with pytest.raises(DataError, match="not the tokenizer"):
        folder_tokenizer(tmp_path / "out")


def test_bpe_names_the_file_and_byte_that_are_not_utf8(tmp_path):
    pytest.importorskip("tiktoken")
    ranks = str(write_ranks(tmp_path / "tiny.tiktoken"))
    corpus = write_corpus(tmp_path / "corpus", 3)
    (corpus / "broken.txt").write_bytes(b"line\n" * 5000 + b"caf\xe9 \n")
    with pytest.raises(DataError, match="broken.txt: not UTF-8 at byte 25003;"):
        quiet(corpus, ranks, out=tmp_path / "out")
    with pytest.raises(DataError, match="broken.txt: not UTF-8 at byte 25003;"):  # cut into documents
        quiet(corpus / "broken.txt", ranks, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- sources ----


def test_a_single_text_is_cut_at_line_ends(tmp_path):
    text = "".join(f"line {number} of a long text\n" for number in range(2000)) + "no end"
    (tmp_path / "text.txt").write_text(text)
    quiet(tmp_path / "text.txt", out=tmp_path / "out", validation_fraction=0)
    documents = read_documents(tmp_path / "out", "train")
    assert b"".join(documents) == text.encode() and len(documents) == len(text) // 8192 + 1
    assert all(8192 <= len(document) < 8300 and document.endswith(b"\n") for document in documents[:-1])
    meta = quiet(tmp_path / "text.txt", out=tmp_path / "whole", document_bytes=0)
    assert sum(split["documents"] for split in meta["splits"].values()) == 1


def test_a_glob_names_any_text(tmp_path):
    for name in ("b.md", "a.md", "c.rst", "deep/d.md"):
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).write_text(name)
    quiet(tmp_path / "docs" / "*.md", out=tmp_path / "flat", validation_fraction=0)
    assert read_documents(tmp_path / "flat", "train") == [b"a.md", b"b.md"]
    quiet(tmp_path / "docs" / "**" / "*.md", out=tmp_path / "deep", validation_fraction=0)
    assert read_documents(tmp_path / "deep", "train") == [b"a.md", b"b.md", b"deep/d.md"]


def test_jsonl(tmp_path):
    lines = [{"text": "one"}, {"text": "zwei ü", "other": 1}, {"text": ""}, {"text": None}, {"body": "x", "text": "3"}]
    path = tmp_path / "records.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    meta = quiet(path, out=tmp_path / "out", validation_fraction=0)
    assert read_documents(tmp_path / "out", "train") == [b"one", "zwei ü".encode(), b"3"]
    assert meta["empty_documents"] == 2


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": "x"', "line 2: not valid JSON"),
        (b'{"text": "\xff"}', "line 2: not valid JSON"),
        (b"[" * 100_000, "line 2: not valid JSON"),
        (b'{"body": "x"}', r"line 2: no field 'text' \(found: body\)"),
        (b'["text"]', "line 2: no field"),
        (b'{"text": 7}', "line 2: field 'text' is int, not text"),
        (b'{"text": "\\ud800"}', "line 2: field 'text' holds half a surrogate"),
    ],
)
def test_a_bad_record_is_named(tmp_path, line, message):
    (tmp_path / "records.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match="records.jsonl, " + message):
        quiet(tmp_path / "records.jsonl", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "records.parquet"
    parquet.write_table(pyarrow.table({"body": ["one", None, "zwei ü"], "n": [1, 2, 3]}), path)
    quiet(path, out=tmp_path / "out", field="body", validation_fraction=0)
    assert read_documents(tmp_path / "out", "train") == [b"one", "zwei ü".encode()]
    for field, message in (("text", "no column 'text'.*body, n"), ("n", "row 1: field 'n' is int")):
        with pytest.raises(DataError, match=message):
            quiet(path, out=tmp_path / "other", field=field)
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="not a readable .parquet"):
        quiet(path, out=tmp_path / "other")


@pytest.mark.parametrize(
    "module, source, tokenizer",
    [("pyarrow", "x.parquet", "bytes"), ("datasets", "openwebtext", "bytes"), ("tiktoken", "x.txt", "gpt2")],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, module, source, tokenizer):
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    if "." in source:
        source = tmp_path / source
        source.write_text("x")
    with pytest.raises(DataError, match=f"pip install {module}"):
        quiet(source, tokenizer, out=tmp_path / "out")


def stub_datasets(monkeypatch, rows):
    asked = []

    def load_dataset(**keywords):
        asked.append(keywords)
        return rows()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_online_sources_are_streamed_up_to_max_bytes(tmp_path, monkeypatch):
    def endless():
        number = 0
        while True:
            number += 1
            yield {"text": f"document {number:04d}"}

    asked = stub_datasets(monkeypatch, endless)
    quiet("fineweb-edu", out=tmp_path / "out", max_bytes=100, validation_fraction=0)
    assert asked == [{"path": "HuggingFaceFW/fineweb-edu", "name": "sample-350BT", "split": "train", "streaming": True}]
    assert len(read_documents(tmp_path / "out", "train")) == 8  # of 13 bytes
    quiet("fineweb-edu", out=tmp_path / "out", max_bytes=100, validation_fraction=0)
    assert len(asked) == 1  # what is complete is not downloaded again


def test_shakespeare_is_cut_like_a_single_file(tmp_path, monkeypatch):
    text = "To be, or not to be\n" * 2000
    stub_datasets(monkeypatch, lambda: iter([{"text": text}]))
    quiet("shakespeare", out=tmp_path / "out", validation_fraction=0)
    documents = read_documents(tmp_path / "out", "train")
    assert b"".join(documents) == text.encode() and len(documents) == 5


def test_a_network_that_fails_midway_leaves_nothing(tmp_path, monkeypatch):
    def rows():
        yield {"text": "fine"}
        raise ConnectionError("reset by peer")

    stub_datasets(monkeypatch, rows)
    with pytest.raises(DataError, match="'openwebtext': could not be read online .*reset by peer"):
        quiet("openwebtext", out=tmp_path / "out", shard_tokens=2)
    assert not (tmp_path / "out").exists()


def test_stdlib_is_the_base_librarys_own_text():
    paths = prepare_data.stdlib_paths()
    names = [path.relative_to(Path(os.__file__).parent).as_posix() for path in paths]
    assert names == sorted(names) and {"os.py", "json/decoder.py", "unittest/mock.py"} <= set(names)
    unwanted = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "__pycache__"}
    assert not any(unwanted & set(name.split("/")) for name in names)
    assert not any("sysconfigdata" in name or name.startswith("config-") for name in names)
    assert 5e6 < sum(path.stat().st_size for path in paths) < 40e6


@pytest.mark.parametrize("source", ["missing.txt", "none/*.txt", "stdlibs", "empty_folder", "\0", "x" * 5000])
def test_a_source_that_is_not_there(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    Path("empty_folder").mkdir()
    with pytest.raises(DataError):
        quiet(source, out="out")
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["empty.txt", "folder"])
def test_a_source_without_text(tmp_path, name):
    (tmp_path / "folder").mkdir()
    for path in ("empty.txt", "folder/a.txt", "folder/b.txt"):
        (tmp_path / path).touch()
    with pytest.raises(DataError, match="no text in the source"):
        quiet(tmp_path / name, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_split_is_allowed_with_a_warning(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one document")
    meta = quiet(tmp_path / "text.txt", out=tmp_path / "out", validation_fraction=1e-9)
    assert meta["splits"]["validation"] == {"tokens": 0, "bytes": 0, "documents": 0, "shards": []}
    assert "the validation split is empty" in capsys.readouterr().err
    assert len(open_split(tmp_path / "out", "validation")) == 0
    quiet(tmp_path / "text.txt", out=tmp_path / "wanted", validation_fraction=0)
    assert capsys.readouterr().err == ""


# ---- a folder that is there ----


def test_a_complete_folder_is_reused_and_that_is_said(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus", 5)
    meta = quiet(corpus, out=tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert prepare(str(corpus), out=tmp_path / "out") == meta
    assert "already prepared from the same text" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_of_something_else_is_refused_and_kept(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 5)
    out = tmp_path / "out"
    quiet(corpus, out=out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(DataError, match="validation_fraction 0.05, not 0.1"):
        quiet(corpus, out=out, validation_fraction=0.1)
    with pytest.raises(DataError, match="from source .*corpus', not 'stdlib'"):
        quiet("stdlib", out=out)
    (corpus / "0000.txt").write_text((corpus / "0000.txt").read_text()[::-1])  # of the same length
    with pytest.raises(DataError, match="from other text"):
        quiet(corpus, out=out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_damaged_folder_is_not_reused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 5)
    quiet(corpus, out=tmp_path / "out", validation_fraction=0)
    os.truncate(tmp_path / "out" / "train_00000.npy", 300)
    with pytest.raises(DataError, match="train_00000.npy: wrong length.*delete the folder"):
        quiet(corpus, out=tmp_path / "out", validation_fraction=0)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 5)
    (corpus / "train_00000.npy").write_bytes(b"somebody's")
    with pytest.raises(DataError, match="holds other files"):
        quiet(corpus, out=corpus)
    assert len(list(corpus.iterdir())) == 6


def test_an_empty_folder_is_used(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 5)
    (tmp_path / "out").mkdir()
    quiet(corpus, out=tmp_path / "out")
    assert read_meta(tmp_path / "out")


def test_out_is_a_file(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 5)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(DataError, match="out"):
        quiet(corpus, out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


# ---- faults ----

KILLED = """
import os, signal, sys, prepare_data
write = prepare_data.write_file
def write_then_die(path, *parts):
    if path.name == sys.argv[3]:
        path.with_name(path.name + ".tmp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, *parts)
prepare_data.write_file = write_then_die
prepare_data.prepare(sys.argv[1], out=sys.argv[2], shard_tokens=300, progress=False)
"""


@pytest.mark.parametrize("last", ["train_00000.npy", "train_00004.npy", "meta.json"])
def test_killed_while_writing(tmp_path, capsys, last):
    """The lock is free again, what was half-written is no data folder, and preparing anew gives the same bytes."""
    corpus, out = write_corpus(tmp_path / "corpus", 20), tmp_path / "out"
    process = python(KILLED, corpus, out, last, cwd=tmp_path)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert (out / f"{last}.tmp").exists()
    with pytest.raises(DataError, match="not a prepared data folder"):
        read_meta(out)
    capsys.readouterr()
    prepare(str(corpus), out=out, shard_tokens=300)
    assert "that an interrupted preparation left" in capsys.readouterr().out
    quiet(corpus, out=tmp_path / "undisturbed", shard_tokens=300)
    for path in (tmp_path / "undisturbed").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert len(list(out.iterdir())) == len(list((tmp_path / "undisturbed").iterdir()))


def test_several_processes_at_once(tmp_path):
    """One prepares, the others use it."""
    corpus = write_corpus(tmp_path / "corpus", 20)
    script = "import sys, prepare_data; print(prepare_data.prepare(sys.argv[1], out='data/x', shard_tokens=300) != {})"
    processes = [python(script, corpus, cwd=tmp_path) for _ in range(4)]
    printed = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, printed
    assert sum("already prepared" in out for out, _ in printed) == 3
    assert all(out.endswith("True\n") for out, _ in printed)
    assert len(open_split(tmp_path / "data/x", "train")) > 0


def test_a_second_process_waits_for_the_first(tmp_path):
    """Here the first is this test, which holds the lock until the other says that it waits."""
    corpus, out = write_corpus(tmp_path / "corpus", 5), tmp_path / "out"
    script = "import sys, prepare_data; prepare_data.prepare(sys.argv[1], out=sys.argv[2])"
    with prepare_data.locked(out, progress=False):
        process = python(script, corpus, out, cwd=tmp_path)
        assert "another process is preparing it; waiting" in process.stdout.readline()
        assert not out.exists()
    process.communicate()
    assert process.returncode == 0 and read_meta(out)


@pytest.mark.parametrize("limit", [5, 2000])
def test_a_disk_that_is_full(tmp_path, limit):
    """The system itself refuses the write; no meta.json, no half-written shard stays, and there is no traceback."""
    corpus = write_corpus(tmp_path / "corpus", 20)
    script = """
import resource, sys, prepare_data
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
prepare_data.main([sys.argv[1], "--out", sys.argv[2], "--shard-tokens", "1500"])
"""
    process = python(script, corpus, tmp_path / "out", limit, cwd=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert "prepare_data.py: " in errors and "File too large" in errors and "Traceback" not in errors
    assert not (tmp_path / "out").exists()
    assert quiet(corpus, out=tmp_path / "out")["splits"]["train"]["tokens"]


def test_no_space_left_is_said_in_those_words(tmp_path, monkeypatch):
    import errno

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    corpus = write_corpus(tmp_path / "corpus", 5)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="out: No space left on device"):
        quiet(corpus, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    corpus = write_corpus(tmp_path / "corpus", 5)
    monkeypatch.setattr(prepare_data, "choose_split", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quiet(corpus, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as stop:
        prepare_data.main([str(corpus), "--out", str(tmp_path / "out")])
    assert stop.value.code == 130


def test_a_meta_that_was_written_names_only_whole_shards(tmp_path, monkeypatch):
    """meta.json comes last: whenever it exists, every shard it names does."""
    seen = []
    write = prepare_data.write_file

    def record(path, *parts):
        assert not (path.parent / "meta.json").exists()
        write(path, *parts)
        seen.append(path.name)

    monkeypatch.setattr(prepare_data, "write_file", record)
    quiet(write_corpus(tmp_path / "corpus", 20), out=tmp_path / "out", shard_tokens=300)
    assert seen[-1] == "meta.json" and len(seen) > 5


# ---- preparing on first use ----


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus", 20)
    return tmp_path


def test_the_default_folder_is_prepared_once_and_that_is_said(here, capsys):
    config = DataConfig(source="corpus")
    assert prepare_if_missing(config) == "data/corpus_bytes"
    assert "data/corpus_bytes: preparing it from corpus as bytes tokens" in capsys.readouterr().out
    assert prepare_if_missing(config.resolved()) == "data/corpus_bytes"
    assert capsys.readouterr().out == ""


def test_a_folder_given_by_hand_is_prepared_where_there_is_none(here):
    config = DataConfig(path="mine", source="corpus")
    assert prepare_if_missing(config) == "mine" and len(open_split("mine", "train"))
    assert prepare_if_missing(DataConfig(path="mine")) == "mine"  # the defaults say nothing about it


@pytest.mark.parametrize("source", ["stdlib", "corpus"])
def test_a_folder_given_by_hand_without_meta_is_an_error(here, source):
    """It may be other data that lost its meta.json: it is neither replaced by the source nor removed."""
    quiet("corpus", out="mine", shard_tokens=1000)
    Path("mine/meta.json").unlink()
    before = sorted(os.listdir("mine"))
    with pytest.raises(DataError, match="mine: exists but is no prepared data folder"):
        prepare_if_missing(DataConfig(path="mine", source=source))
    assert sorted(os.listdir("mine")) == before


def test_a_folder_given_by_hand_whose_preparation_was_killed_is_redone(here):
    process = python(KILLED, "corpus", "mine", "train_00001.npy", cwd=here)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert prepare_if_missing(DataConfig(path="mine", source="corpus")) == "mine"
    assert len(open_split("mine", "train"))


def test_processes_of_one_job_may_all_find_it_missing(here):
    script = """
import prepare_data
from data import DataConfig
print("at", prepare_data.prepare_if_missing(DataConfig(path="mine", source="corpus")))
"""
    processes = [python(script, cwd=here) for _ in range(4)]
    printed = [process.communicate() for process in processes]
    assert [out.splitlines()[-1] for out, _ in printed] == ["at mine"] * 4, printed


def test_a_folder_made_from_something_else_is_not_trained_on(here):
    pytest.importorskip("tiktoken")
    write_corpus(here / "a-b", 5)
    write_corpus(here / "a" / "b", 6)
    prepare_if_missing(DataConfig(source="a-b"))
    with pytest.raises(DataError, match="made with source 'a-b', not 'a/b'"):  # the same default folder
        prepare_if_missing(DataConfig(source="a/b"))
    with pytest.raises(DataError, match="made with source"):
        prepare_if_missing(DataConfig(path="data/a-b_bytes", source="corpus"))
    with pytest.raises(DataError, match="made with tokenizer 'bytes', not 'gpt2'"):
        prepare_if_missing(DataConfig(path="data/a-b_bytes", tokenizer="gpt2"))
    for name, merges in (("x", (b"th",)), ("y", (b"he",))):
        (here / name).mkdir()
        write_ranks(here / name / "one.tiktoken", merges)
    prepare_if_missing(DataConfig(source="corpus", tokenizer="x/one.tiktoken"))
    with pytest.raises(DataError, match="tokenizer_sha256"):
        prepare_if_missing(DataConfig(source="corpus", tokenizer="y/one.tiktoken"))


# ---- the command ----


def test_command(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 40)
    done = command("corpus", "--validation", "0.2", "--shard-tokens", "2000", cwd=tmp_path, check=0)
    meta = read_meta(tmp_path / "data" / "corpus_bytes")
    header, train, validation, total = [line.split() for line in done.stdout.splitlines()[:4]]
    assert header == "split documents bytes tokens bytes a token shards".split()
    for row in (train, validation):
        summary = meta["splits"][row[0]]
        counts = [summary["documents"], summary["bytes"], summary["tokens"], len(summary["shards"])]
        assert [int(cell.replace(",", "")) for cell in row[1:4] + row[5:]] == counts
    size = sum(path.stat().st_size for path in corpus.iterdir())
    assert total[0] == "total" and total[1:4] == ["40", f"{size:,}", f"{size + 40:,}"]
    assert total[4] == f"{size / (size + 40):.3f}"
    assert "tokenizing" in done.stderr  # the bar


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing.txt"], "no such file"),
        (["empty.txt"], "no text in the source"),
        ([], "usage"),
        (["text.txt", "--validation", "2"], "between 0 and 1"),
        (["text.txt", "--validation", "nan"], "between 0 and 1"),
        (["text.txt", "--tokenizer", "words"], "bytes, gpt2, or"),
        (["text.txt", "--shard-tokens", "0"], "shard tokens 0"),
        (["text.txt", "--max-bytes", "-1"], "0 or more"),
        (["text.txt", "--unknown"], "unrecognized"),
    ],
)
def test_bad_input_exits_2_with_a_message(tmp_path, arguments, message):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    done = command(*arguments, cwd=tmp_path, check=2)
    assert message in done.stderr
    assert not list(tmp_path.glob("data/*/"))
