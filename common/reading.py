"""JSONL objects in blocks of whole lines: ranges of plain files, all members of compressed ones.

A line belongs to the range that holds its first byte, so ranges of one object, read anywhere, give
every line once.
"""

import io
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from common.plan import InputRange
from common.run import UserError
from common.store import Entry, Store

PIECE_BYTES = 8_000_000  # at most so much is read and encoded in one go
OVERREAD_BYTES = 65_536  # beyond a piece, for the end of its last line
SAMPLE_BYTES = 300_000
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def find_compressed(store: Store, inputs: Sequence[Entry], threads: int) -> dict[str, str]:
    """Compression by key, told by the first bytes, not by the name."""

    def look(entry: Entry) -> str | None:
        start = store.read(entry.key, 0, 4, etag=entry.etag)
        return next((name for magic, name in COMPRESSIONS.items() if start.startswith(magic)), None)

    with ThreadPoolExecutor(threads) as pool:
        found = zip(inputs, pool.map(look, inputs), strict=True)
        return {entry.key: kind for entry, kind in found if kind is not None}


@dataclass(frozen=True)
class Block:
    """Whole lines of one input, where they begin in it, and the stored bytes read for them."""

    key: str
    offset: int
    data: bytes
    stored: int


def pieces(part: InputRange, compressed: bool) -> Iterator[InputRange]:
    """An input range in equal pieces that are read in one go; a compressed one is one piece."""
    count = 1 if compressed else max(1, -(-(part.end - part.start) // PIECE_BYTES))
    cuts = [part.start + (part.end - part.start) * n // count for n in range(count + 1)]
    for start, end in itertools.pairwise(cuts):
        yield InputRange(part.key, part.size, part.etag, start, end)


def read_blocks(store: Store, piece: InputRange, compression: str | None) -> Iterator[Block]:
    """The lines of a piece; a line belongs to the piece that holds its first byte."""
    if compression is not None:
        yield from decompressed_blocks(store, piece, compression)
        return
    base = max(0, piece.start - 1)  # the byte before tells whether a line begins at the first
    stop = min(piece.size, piece.end + OVERREAD_BYTES)  # mostly the end of the last line
    data = store.read(piece.key, base, stop, etag=piece.etag)
    first = data.find(b"\n", 0, piece.end - base) + 1 if piece.start else 0
    if piece.start and first in (0, piece.end - base):
        return  # no line begins here
    searched, step = piece.end - base - 1, OVERREAD_BYTES
    while (end := data.find(b"\n", searched)) < 0 and stop < piece.size:
        searched, step = len(data), 4 * step
        more = store.read(piece.key, stop, min(stop + step, piece.size), etag=piece.etag)
        data, stop = data + more, stop + len(more)
    last = end + 1 if end >= 0 else len(data)
    if last > first:
        yield Block(piece.key, base + first, data[first:last], piece.end - piece.start)


class StoredBytes(io.RawIOBase):
    """An object of a store as a file that is read from start to end."""

    def __init__(self, store: Store, piece: InputRange) -> None:
        self._store, self._piece, self.position = store, piece, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece, end = self._piece, min(self.position + len(buffer), self._piece.size)
        if end == self.position:
            return 0
        data = self._store.read(piece.key, self.position, end, etag=piece.etag)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def decompressed_blocks(store: Store, piece: InputRange, compression: str) -> Iterator[Block]:
    """A compressed object's lines in blocks; all frames and members of it, and no half ones."""
    stored = StoredBytes(store, piece)
    buffered = io.BufferedReader(stored, buffer_size=PIECE_BYTES)
    offset, credited, parts = 0, 0, list[bytes]()
    try:
        with pa.CompressedInputStream(pa.PythonFile(buffered, mode="r"), compression) as stream:
            while chunk := stream.read(PIECE_BYTES):
                cut = chunk.rfind(b"\n") + 1
                parts.append(chunk[:cut] if cut else chunk)
                if cut:
                    data = b"".join(parts)
                    yield Block(piece.key, offset, data, stored.position - credited)
                    offset, credited = offset + len(data), stored.position
                    parts = [chunk[cut:]]
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{piece.key}: cut or damaged {compression} file ({error})") from error
    if data := b"".join(parts):
        yield Block(piece.key, offset, data, stored.position - credited)


def first_block(source: Store, part: InputRange, compression: str | None) -> Block | None:
    """The first lines of an input, about SAMPLE_BYTES of them; None when it has none."""
    end = part.end if compression else min(part.end, part.start + SAMPLE_BYTES)
    piece = InputRange(part.key, part.size, part.etag, part.start, end)
    block = next(read_blocks(source, piece, compression), None)
    if block is None or len(block.data) <= 2 * SAMPLE_BYTES:
        return block
    cut = block.data.find(b"\n", SAMPLE_BYTES) + 1
    return Block(block.key, block.offset, block.data[: cut or None], block.stored)


class ByteBudget:
    """Bytes that may be in memory at a time; one block always may, however large."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._closed = limit, 0, False
        self._changed = threading.Condition()

    def acquire(self, amount: int) -> bool:
        """Wait until there is room; false when the budget is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._used or self._used + amount <= self._limit
            )
            self._used += 0 if self._closed else amount
            return not self._closed

    def release(self, amount: int) -> None:
        with self._changed:
            self._used -= amount
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
