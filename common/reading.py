"""JSONL objects in blocks of whole lines: ranges of plain files, all members of compressed ones.

A line belongs to the range that holds its first byte, so ranges of one object, read anywhere, give
every line once.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
    """Whole lines of one input: where they begin, and their first line number when it is known."""

    key: str
    offset: int
    data: bytes


def pieces(part: InputRange, compressed: bool) -> Iterator[InputRange]:
    """An input range in pieces that are read in one go."""
    step = part.end if compressed else PIECE_BYTES
    for start in range(part.start, part.end, step):
        yield InputRange(part.key, part.size, part.etag, start, min(start + step, part.end))


def fetch(store: Store, piece: InputRange, compression: str | None) -> list[Block]:
    """The lines of a piece; a line belongs to the piece that holds its first byte."""
    if compression is not None:
        return list(decompressed_blocks(store, piece, compression))
    lead = 1 if piece.start else 0
    data = store.read(piece.key, piece.start - lead, piece.end, etag=piece.etag)
    skipped = data.find(b"\n") + 1 if lead else 0
    if lead and not skipped:
        return []  # inside one long line that begins earlier
    offset, data = piece.start - lead + skipped, data[skipped:]
    end = piece.end
    while data and end < piece.size and not data.endswith(b"\n"):
        more = store.read(piece.key, end, min(end + 1_000_000, piece.size), etag=piece.etag)
        newline = more.find(b"\n") + 1
        data += more[:newline] if newline else more
        end += len(more)
        if newline:
            break
    return [Block(piece.key, offset, data)] if data else []


def decompressed_blocks(store: Store, piece: InputRange, compression: str) -> Iterator[Block]:
    """A compressed object's lines in blocks; all frames and members of it, and no half ones."""
    packed = store.read(piece.key, etag=piece.etag)
    offset, rest = 0, b""
    try:
        with pa.CompressedInputStream(pa.BufferReader(packed), compression) as stream:
            while chunk := stream.read(PIECE_BYTES):
                data = rest + chunk
                cut = data.rfind(b"\n") + 1
                if cut:
                    yield Block(piece.key, offset, data[:cut])
                    offset += cut
                rest = data[cut:]
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{piece.key}: cut or damaged {compression} file ({error})") from error
    if rest:
        yield Block(piece.key, offset, rest)
