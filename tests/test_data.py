"""Are the tokens that come next the right ones, and is no damaged folder believed?"""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import data
from data import (
    DataConfig,
    DataError,
    Loader,
    Shard,
    TokenStream,
    evaluation_batches,
    open_split,
    permute,
    read_meta,
    round_keys,
)
from prepare_data import prepare

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path):
    """A prepared folder: 997 bytes of text and an end token in train, shards of 100 tokens."""
    text = bytes(np.random.default_rng(0).integers(256, size=997, dtype=np.uint8))
    (tmp_path / "text.bin").write_bytes(text)
    out = tmp_path / "tokens"
    prepare(
        str(tmp_path / "text.bin"),
        out=out,
        validation_fraction=0,
        document_bytes=0,
        shard_tokens=100,
        progress=False,
    )
    return out


@pytest.fixture
def stream(folder):
    return open_split(folder, "train")


def counting_stream(length, split_at=()):
    """Token i is i, in shards cut at the given places: a wrong token shows where it came from."""
    shards = [Shard(Path("none"), part, None) for part in np.split(np.arange(length, dtype=np.uint32), split_at)]
    return TokenStream("numbers", shards, length, "fingerprint")


def rewrite_meta(folder, change):
    meta = json.loads((folder / "meta.json").read_bytes())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


# ---- the stream ----


def test_stream_is_the_text_with_an_end_token(folder, stream, tmp_path):
    expected = list((tmp_path / "text.bin").read_bytes()) + [256]
    assert len(stream) == 998 and len(stream.shards) == 10
    assert stream.read(0, 998).tolist() == expected
    assert stream.read(0, 998).dtype == np.int64


@pytest.mark.parametrize("start, stop", [(0, 0), (0, 1), (99, 101), (100, 200), (150, 998), (998, 998), (95, 705)])
def test_reads_span_shards(stream, start, stop):
    assert stream.read(start, stop).tolist() == stream.read(0, 998)[start:stop].tolist()


@pytest.mark.parametrize("start, stop", [(-1, 5), (5, 4), (0, 999)])
def test_reading_outside_the_stream_is_an_error(stream, start, stop):
    with pytest.raises(IndexError):
        stream.read(start, stop)


def test_a_shard_replaced_under_a_running_job_changes_nothing(folder, stream):
    before = stream.read(0, 998)
    other = np.zeros(100, np.uint16)
    np.save(folder / "other.npy", other)
    os.replace(folder / "other.npy", folder / "train_00003.npy")
    (folder / "train_00004.npy").unlink()
    assert (stream.read(0, 998) == before).all()
    with pytest.raises(DataError, match="train_00003.npy.*sha256"):
        open_split(folder, "train")


@pytest.mark.parametrize("damage", ["overwrite", "truncate"])
def test_a_shard_written_to_under_a_running_job_stops_it(folder, stream, damage):
    path = folder / "train_00003.npy"
    stream.read(300, 310)
    if damage == "truncate":
        os.truncate(path, 10)
    else:
        with open(path, "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\0\0")
        os.utime(path, ns=(0, 0))  # another time of change, however coarse the clock of the file system is
    with pytest.raises(DataError, match="train_00003.npy: was written to"):
        stream.read(390, 410)
    assert len(stream.read(0, 300)) == 300


def test_an_id_beyond_the_vocabulary_is_named_with_shard_and_position(folder):
    path = folder / "train_00002.npy"
    tokens = np.load(path)
    tokens[[17, 30]] = 257, 300
    np.save(path, tokens)
    stream = open_split(folder, "train", verify="size")
    assert len(stream.read(200, 217)) == 17
    with pytest.raises(DataError, match=r"train_00002.npy: token 17 is 257, and the vocabulary ends at 256"):
        stream.read(210, 250)


def test_more_shards_than_the_soft_limit_of_open_files(folder):
    script = """
import resource, sys
import data
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (9, hard))
print(len(data.open_split(sys.argv[1], "train")))
"""
    done = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "998\n", done.stderr


# ---- a folder that lies ----


def damage_missing_shard(folder):
    (folder / "train_00001.npy").unlink()


def damage_truncated(folder):
    os.truncate(folder / "train_00001.npy", 200)


def damage_longer(folder):
    with open(folder / "train_00001.npy", "ab") as file:
        file.write(b"\0\0")


def damage_flipped_bit(folder):
    path = folder / "train_00001.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_other_dtype(folder):
    np.save(folder / "train_00001.npy", np.zeros(100, np.int16))


def damage_other_length(folder):
    np.save(folder / "train_00001.npy", np.zeros(99, np.uint16))


def damage_pickle(folder):
    np.save(folder / "train_00001.npy", np.array([print] * 100, dtype=object), allow_pickle=True)


def damage_not_npy(folder):
    (folder / "train_00001.npy").write_bytes(b"not an array" * 20)


def damage_empty(folder):
    (folder / "train_00001.npy").write_bytes(b"")


def damage_folder_as_shard(folder):
    damage_missing_shard(folder)
    (folder / "train_00001.npy").mkdir()


def damage_fifo_as_shard(folder):
    damage_missing_shard(folder)
    os.mkfifo(folder / "train_00001.npy")


DAMAGES = [value for name, value in list(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_by_name(folder, damage):
    damage(folder)
    for verify in ("size", "auto")[damage is damage_flipped_bit :]:  # all but this one show without a checksum
        with pytest.raises(DataError, match="train_00001.npy"):
            open_split(folder, "train", verify)


def test_the_size_check_alone_does_not_read_the_tokens(folder):
    damage_flipped_bit(folder)
    assert len(open_split(folder, "train", verify="size")) == 998
    with pytest.raises(DataError, match="sha256"):
        open_split(folder, "train", verify="sha256")


def test_no_header_gets_past_the_check(folder):
    """Every one-byte change of the header, and many nonsense headers, end in DataError or change nothing."""
    path = folder / "train_00000.npy"
    good, right = path.read_bytes(), open_split(folder, "train").read(0, 100)
    offset, random = len(good) - 200, np.random.default_rng(0)
    headers = [good[:i] + bytes([random.integers(256)]) + good[i + 1 : offset] for i in range(offset)]
    for literal in (b"(" * 5000, b"{" * 80, b"__import__('os').abort()", b"{'descr': '|O'}", b"[" * 9000):
        headers.append(b"\x93NUMPY\x01\x00" + len(literal).to_bytes(2, "little") + literal)
    refused = 0
    for header in headers:
        path.write_bytes(header + good[offset:])
        try:
            assert (open_split(folder, "train", verify="size").read(0, 100) == right).all()
        except DataError:
            refused += 1
    assert refused > len(headers) // 3


def test_a_size_in_meta_is_checked_before_memory_is_taken(folder):
    def lie(meta):
        split = meta["splits"]["train"]
        split["tokens"] += 10**15
        split["shards"][0]["tokens"] += 10**15

    rewrite_meta(folder, lie)
    with pytest.raises(DataError, match="train_00000.npy: wrong length"):
        open_split(folder, "train")


def put(*path, value):
    """A change of meta.json: the value at a path of keys; None removes the key."""

    def change(meta):
        place = meta
        for key in path[:-1]:
            place = place[key]
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return change


SHARD = ("splits", "train", "shards", 0)
LIES = [
    (put("format", value=2), "format 2"),
    (put("format", value=None), "format None"),
    (put("tokenizer", value=3), "tokenizer should be str"),
    (put("vocab_size", value="257"), "vocab_size should be int"),
    (put("vocab_size", value=True), "vocab_size should be int"),
    (put("vocab_size", value=65537), "vocab_size 65537 does not fit uint16"),
    (put("vocab_size", value=0), "vocab_size 0"),
    (put("end_token", value=257), "end_token 257"),
    (put("dtype", value="object"), "dtype 'object'"),
    (put("dtype", value="float32"), "dtype 'float32'"),
    (put("splits", value=[]), "splits should be dict"),
    (put("splits", "train", value=None), "train: should be an object"),
    (put("splits", "validation", value=7), "validation: should be an object"),
    (put("splits", "train", "tokens", value=997), "not the sum"),
    (put("splits", "train", "bytes", value=0), "no bytes"),
    (put("splits", "train", "shards", value={}), "shards should be list"),
    (put(*SHARD, value="train_00000.npy"), "should be an object"),
    (put(*SHARD, "tokens", value=-1), "should have tokens"),
    (put(*SHARD, "tokens", value=1e2), "tokens should be int"),
    (put(*SHARD, "sha256", value=None), "sha256 should be str"),
    *[
        (put(*SHARD, "file", value=name), "not a plain name")
        for name in ("../train_00000.npy", "/etc/passwd", "/tmp/a.npy", "a/b.npy", "..", "", "a\0.npy", "a.pkl")
    ],
]


@pytest.mark.parametrize("change, message", LIES)
def test_a_lying_meta_is_refused(folder, change, message):
    rewrite_meta(folder, change)
    with pytest.raises(DataError, match=message):
        read_meta(folder)
    with pytest.raises(DataError, match="meta.json"):
        open_split(folder, "train")


NO_OBJECTS = [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("content", NO_OBJECTS)
def test_a_meta_that_is_no_object_is_refused(folder, content):
    (folder / "meta.json").write_bytes(content)
    with pytest.raises(DataError, match="meta.json"):
        read_meta(folder)


def test_a_missing_or_huge_meta_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match="no meta.json"):
        read_meta(tmp_path)
    os.truncate(folder / "meta.json", 2**40)  # sparse: it takes no disk, and must take no memory
    with pytest.raises(DataError, match="larger"):
        read_meta(folder)


# ---- the order ----


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_permute_is_a_bijection(n):
    for epoch in range(3):
        assert sorted(permute(np.arange(n), n, round_keys(0, epoch))) == list(range(n))


def test_permute_does_not_depend_on_what_is_asked_together():
    keys = round_keys(5, 2)
    whole = permute(np.arange(1000), 1000, keys)
    assert [int(permute(np.array([i]), 1000, keys)[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()


def test_every_element_goes_everywhere_equally_often():
    """Over 4000 keys each of 12 elements stands at each of 12 places about 333 times: chi-square of 121 degrees."""
    n, draws = 12, 4000
    counts = np.zeros((n, n))
    for seed in range(draws):
        counts[np.arange(n), permute(np.arange(n), n, round_keys(seed, 0))] += 1
    expected = draws / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 121 - 4 * 15.6 < chi_square < 121 + 4 * 15.6  # four standard deviations, sqrt(2 · 121) each


def test_neighbours_and_epochs_are_uncorrelated():
    n = 5000
    first, second = (permute(np.arange(n), n, round_keys(0, epoch)) for epoch in range(2))
    other_seed = permute(np.arange(n), n, round_keys(1, 0))
    pairs = [(first[:-1], first[1:]), (first, second), (first, other_seed), (first, np.arange(n))]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)


def test_an_order_of_197_million_contexts_takes_no_memory():
    n = 197_000_000
    index = np.random.default_rng(0).choice(n, 1000, replace=False, shuffle=False)
    tracemalloc.start()
    found = permute(index, n, round_keys(0, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(found.tolist())) == 1000 and 0 <= found.min() and found.max() < n
    assert peak < 2**20


# ---- the loader ----


def test_contexts_overlap_by_one_token_and_cover_the_split_once_an_epoch():
    stream = counting_stream(103, split_at=(7, 50, 51))
    loader = Loader(stream, block_size=10, seed=0, sequences_per_step=5)
    assert loader.contexts == 10
    rows = np.concatenate([loader.next(), loader.next()])
    assert rows.shape == (10, 11) and rows.dtype == np.int64
    assert sorted(rows[:, 0].tolist()) == list(range(0, 100, 10))
    assert (rows == rows[:, :1] + np.arange(11)).all()
    targets = np.sort(rows[:, 1:].ravel())
    assert targets.tolist() == list(range(1, 101))


def test_each_epoch_has_its_own_order_and_steps_run_across_its_end():
    stream = counting_stream(71)
    loader = Loader(stream, block_size=10, seed=3, sequences_per_step=4)
    starts = np.concatenate([loader.next()[:, 0] for _ in range(7)]) // 10  # 28 contexts: 4 epochs of 7
    epochs = starts.reshape(4, 7)
    assert (np.sort(epochs, axis=1) == np.arange(7)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert starts.tolist() == loader.order(np.arange(28)).tolist()


def test_a_step_longer_than_an_epoch():
    loader = Loader(counting_stream(31), block_size=10, seed=0, sequences_per_step=9)
    starts = loader.next()[:, 0] // 10
    assert (np.sort(starts.reshape(3, 3), axis=1) == np.arange(3)).all()


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_together_see_the_order_of_one_process(world_size):
    stream = counting_stream(131)
    one = Loader(stream, 10, seed=1, sequences_per_step=6)
    ranks = [Loader(stream, 10, 1, 6, rank, world_size) for rank in range(world_size)]
    for _ in range(5):
        assert (np.concatenate([loader.next() for loader in ranks]) == one.next()).all()


def test_the_seed_decides_the_order():
    stream = counting_stream(1001)
    orders = [Loader(stream, 10, seed, 100).next()[:, 0].tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("steps", [0, 1, 5, 11])
def test_a_saved_state_goes_on_exactly(steps):
    """With another step size and other ranks too, since the order is of contexts, not of steps."""
    stream = counting_stream(131)
    loader = Loader(stream, 10, seed=1, sequences_per_step=6)
    for _ in range(steps):
        loader.next()
    state = json.loads(json.dumps(loader.state()))
    assert state["position"] == 6 * steps
    expected = np.concatenate([loader.next(), loader.next()])
    resumed = Loader(stream, 10, 1, 6)
    resumed.next()  # reads ahead of a place that is no longer wanted
    resumed.set_state(state)
    assert resumed.state() == state
    assert (np.concatenate([resumed.next(), resumed.next()]) == expected).all()
    halves = [Loader(stream, 10, 1, 12, rank, 2) for rank in range(2)]
    for half in halves:
        half.set_state(state)
    assert (np.concatenate([half.next() for half in halves]) == expected).all()


def test_asking_for_the_state_changes_nothing():
    stream = counting_stream(131)
    asked, silent = (Loader(stream, 10, 1, 6) for _ in range(2))
    for _ in range(4):
        asked.state()
        assert (asked.next() == silent.next()).all()


def test_the_next_step_is_read_while_this_one_is_used():
    loader = Loader(counting_stream(131), 10, 1, 6)
    loader.next()
    position, reading = loader.reading
    assert position == loader.state()["position"] == 6
    assert (reading.result() == loader.read_step(6)).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 2}, "of seed 2, and this run has 1"),
        ({"block_size": 11}, "block_size"),
        ({"contexts": 12}, "contexts"),
        ({"stream": "other"}, "stream"),
        ({"position": -1}, "-1, not a count"),
        ({"position": 1.5}, "not a count"),
        ({"position": 2**70}, "not a count"),
    ],
)
def test_a_state_of_another_run_is_refused(change, message):
    loader = Loader(counting_stream(131), 10, 1, 6)
    with pytest.raises(DataError, match=message):
        loader.set_state(loader.state() | change)
    with pytest.raises(DataError):
        loader.set_state({})


def test_the_fingerprint_is_of_the_tokens(folder, tmp_path):
    fingerprints = set()
    for number, text in enumerate(["abc", "abc", "abd"]):
        source = tmp_path / f"{number}.txt"
        source.write_text(text)
        prepare(str(source), out=tmp_path / str(number), validation_fraction=0, progress=False)
        fingerprints.add(open_split(tmp_path / str(number), "train").fingerprint)
    assert len(fingerprints) == 2


def test_a_read_that_fails_leaves_the_position(folder):
    stream = open_split(folder, "train")
    loader = Loader(stream, 99, 0, 10)
    loader.next()
    loader.reading[1].result()  # the step read ahead is complete before the shard is cut
    os.truncate(folder / "train_00000.npy", 10)
    loader.next()
    for _ in range(2):
        with pytest.raises(DataError, match="was written to"):
            loader.next()
    assert loader.state()["position"] == 20


@pytest.mark.parametrize("block_size, contexts", [(996, 1), (997, 1), (498, 2)])
def test_the_shortest_split_is_one_context(stream, block_size, contexts):
    assert Loader(stream, block_size, 0, 1).contexts == contexts


def test_a_split_shorter_than_one_context_is_refused(folder, stream):
    with pytest.raises(DataError, match="998 tokens, shorter than one context .* = 999 tokens"):
        Loader(stream, 998, 0, 1)
    empty = open_split(folder, "validation")
    for use in (lambda: Loader(empty, 1, 0, 1), lambda: evaluation_batches(empty, 1, 1)):
        with pytest.raises(DataError, match="validation split: .*shorter than one context"):
            use()


def test_a_step_that_does_not_divide_is_refused(stream):
    with pytest.raises(DataError, match="7 sequences a step do not divide over 2"):
        Loader(stream, 10, 0, 7, world_size=2)


# ---- evaluation ----


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "tokens, start, expected",
    [
        (0, 0, range(0, 100, 10)),
        (45, 0, range(0, 40, 10)),
        (10, 0, range(0, 10, 10)),
        (1000, 0, range(0, 100, 10)),
        (0, 25, range(25, 95, 10)),
        (30, 25, range(25, 55, 10)),
    ],
)
def test_evaluation_covers_its_part_once_in_order(world_size, tokens, start, expected):
    stream = counting_stream(103)
    rows = []
    for rank in range(world_size):
        for batch in evaluation_batches(stream, 10, 4, tokens, start, rank, world_size):
            assert 1 <= len(batch) <= 4 and batch.shape[1] == 11 and batch.dtype == np.int64
            rows += batch.tolist()
    assert [row[0] for row in rows] == list(expected)
    assert all(row == list(range(row[0], row[0] + 11)) for row in rows)


@pytest.mark.parametrize("tokens, start", [(9, 0), (0, 95), (0, 1000), (5, 95)])
def test_a_part_shorter_than_one_context_is_refused_at_once(tokens, start):
    with pytest.raises(DataError, match="shorter than one context"):
        evaluation_batches(counting_stream(103), 10, 4, tokens, start)


# ---- the config and the demonstration ----


def test_config_is_filled_and_checked():
    config = DataConfig()
    assert config.resolved().path == "data/stdlib_bytes" and config.path is None
    assert config.problems() == [] and config.resolved().problems() == []
    assert DataConfig(path="here").resolved().path == "here"
    assert DataConfig(source="../a b/*.txt", tokenizer="x/mine.tiktoken").resolved().path == "data/a-b-.txt_mine"
    bad = DataConfig(tokenizer="words", eval_tokens=-1, eval_start=-2, source="", path="")
    assert [problem[0] for problem in bad.problems()] == ["path", "source", "tokenizer", "eval_tokens", "eval_start"]
    assert bad.problems()[2][2] == "words"


def test_demonstration(capsys):
    data.main()
    printed = capsys.readouterr().out.splitlines()
    expected = printed[-3].split(": ")[1]
    ranks = [line.split(": ")[1] for line in printed[-2:]]
    assert expected == (ranks[0] + ranks[1]).replace("][", ", ")
