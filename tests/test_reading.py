"""Blocks of whole lines: every line once, wherever objects are cut, and no half objects."""

import gzip
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from common import reading
from common.plan import InputRange
from common.run import UserError
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
def test_a_compressed_object_is_not_read_whole_for_its_first_lines(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(reading, "PIECE_BYTES", 100_000)
    data = b"".join(os.urandom(500).hex().encode() + b"\n" for _ in range(2_000))
    packed = gzip.compress(data) if kind == "gzip" else pa.compress(data, kind, asbytes=True)
    (tmp_path / "in.jsonl").write_bytes(packed)
    store = open_store(str(tmp_path))
    (entry,) = store.list()
    whole = InputRange(entry.key, entry.size, entry.etag, 0, entry.size)
    blocks = list(reading.read_blocks(store, whole, kind))
    assert 0 < blocks[0].stored < entry.size / 3
    assert sum(block.stored for block in blocks) == entry.size
    assert b"".join(block.data for block in blocks) == data


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


def test_a_byte_budget_makes_readers_wait_but_lets_one_large_block_through():
    budget, got = reading.ByteBudget(100), []

    def take(amount):
        got.append((amount, budget.acquire(amount)))

    with ThreadPoolExecutor(2) as threads:
        assert budget.acquire(1000)  # alone, however large
        waiting = threads.submit(take, 60)
        time.sleep(0.2)
        assert got == []
        budget.release(1000)
        waiting.result(10)
        waiting = threads.submit(take, 41)
        time.sleep(0.2)
        assert got == [(60, True)]
        budget.close()
        waiting.result(10)
    assert got == [(60, True), (41, False)]
