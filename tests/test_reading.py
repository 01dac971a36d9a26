"""Blocks of whole lines: every line once, wherever objects are cut, and no half objects."""

import gzip
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from common import reading
from common.run import UserError
from common.shards import InputRange
from common.store import open_store


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1000, 10**6])
@pytest.mark.parametrize("kind", [None, "gzip", "zstd"])
def test_each_line_is_in_one_block_wherever_pieces_are_cut(
    tmp_path, monkeypatch, piece_bytes, kind
):
    monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    lines = [b"x" * (n * n % 90) for n in range(60)] + [b"long" * 800, b"", b"end"]
    data = b"\n".join(lines)
    halves = (data[:1500], data[1500:])  # two frames, cut inside a line
    stored = data if kind is None else b"".join(pa.compress(h, kind, asbytes=True) for h in halves)
    if kind == "gzip":
        stored = b"".join(map(gzip.compress, halves))
    (tmp_path / "in.jsonl").write_bytes(stored)
    store = open_store(str(tmp_path))
    (entry,) = store.list()
    ends = [0, len(stored) // 3, len(stored)] if kind is None else [0, len(stored)]
    blocks = [
        block
        for start, end in zip(ends, ends[1:], strict=False)
        for piece in reading.pieces(
            InputRange(entry.key, entry.size, entry.etag, start, end), kind is not None
        )
        for block in reading.read_blocks(store, piece, kind)
    ]
    assert b"".join(block.data for block in blocks) == data
    assert all(block.data.endswith(b"\n") for block in blocks[:-1])
    sizes = [len(block.data) for block in blocks]
    assert [block.offset for block in blocks] == [sum(sizes[:n]) for n in range(len(sizes))]
    assert len(blocks) > 1 or piece_bytes > len(data)
    os.utime(tmp_path / "in.jsonl", ns=(1, 1))
    whole = InputRange(entry.key, entry.size, entry.etag, 0, entry.size)
    with pytest.raises(UserError, match="changed since"):
        list(reading.read_blocks(store, whole, kind))


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_cut_object_is_named_and_not_read_short(tmp_path, kind):
    data = b"".join(b"%d\n" % number for number in range(10_000))
    packed = gzip.compress(data) if kind == "gzip" else pa.compress(data, kind, asbytes=True)
    (tmp_path / "in.jsonl").write_bytes(packed[: len(packed) // 2])
    store = open_store(str(tmp_path))
    (entry,) = store.list()
    whole = InputRange(entry.key, entry.size, entry.etag, 0, entry.size)
    with pytest.raises(UserError, match=rf"in.jsonl: cut or damaged {kind}"):
        list(reading.read_blocks(store, whole, kind))


def test_a_reading_thread_keeps_two_blocks_at_most_and_stops_when_told():
    made, stopped = [], threading.Event()

    def blocks():
        for number in range(100):
            made.append(number)
            yield reading.Block("k", number, b"", 0)

    with ThreadPoolExecutor(1) as threads:
        ahead = reading.Reading(blocks(), threads, stopped)
        for number in range(10):
            block = ahead.next_block()
            assert block is not None and block.offset == number
            assert len(made) <= number + 3
        stopped.set()
    assert len(made) < 15


def test_a_reading_passes_on_what_went_wrong_and_ends_with_none():
    def blocks():
        yield reading.Block("k", 0, b"", 0)
        raise UserError("broken")

    with ThreadPoolExecutor(1) as threads:
        ahead = reading.Reading(blocks(), threads, threading.Event())
        assert ahead.next_block() is not None
        with pytest.raises(UserError, match="broken"):
            ahead.next_block()
        assert reading.Reading(iter(()), threads, threading.Event()).next_block() is None
