"""JSONL objects in blocks of whole lines: ranges of plain files, all members of compressed ones.

A line belongs to the range that holds its first byte, so ranges of one object, read anywhere, give
every line once.
"""

import contextlib
import io
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from common.run import UserError
from common.shards import InputRange
from common.store import Entry, Store

PIECE_BYTES = 8_000_000  # read and encoded in one go
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
    """An input range in pieces that are read in one go; a compressed one is one piece."""
    step = max(1, part.end) if compressed else PIECE_BYTES
    for start in range(part.start, part.end, step):
        yield InputRange(part.key, part.size, part.etag, start, min(start + step, part.end))


def read_blocks(store: Store, piece: InputRange, compression: str | None) -> Iterator[Block]:
    """The lines of a piece; a line belongs to the piece that holds its first byte."""
    if compression is not None:
        yield from decompressed_blocks(store, piece, compression)
        return
    lead = 1 if piece.start else 0
    data = store.read(piece.key, piece.start - lead, piece.end, etag=piece.etag)
    skipped = data.find(b"\n") + 1 if lead else 0
    if lead and not skipped:
        return  # inside one long line that begins earlier
    offset, parts, end = piece.start - lead + skipped, [data[skipped:]], piece.end
    while parts[-1] and end < piece.size and not parts[-1].endswith(b"\n"):
        more = store.read(piece.key, end, min(end + 1_000_000, piece.size), etag=piece.etag)
        parts.append(more[: more.find(b"\n") + 1] or more)
        end += len(more)
    if parts[0]:
        yield Block(piece.key, offset, b"".join(parts), piece.end - piece.start)


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


class Reading:
    """A piece that a thread reads, at most two blocks ahead of its consumer."""

    def __init__(
        self, blocks: Iterable[Block], threads: ThreadPoolExecutor, stopped: threading.Event
    ) -> None:
        self._blocks, self._stopped = blocks, stopped
        self._queue: queue.Queue[Block | Exception | None] = queue.Queue(1)
        threads.submit(self._read)

    def next_block(self) -> Block | None:
        """The next block, None at the end. Raises what reading it raised."""
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def _read(self) -> None:
        try:
            for block in self._blocks:
                if not self._put(block):
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: Block | Exception | None) -> bool:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.5)
                return True
        return False
