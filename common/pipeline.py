"""The flow of stage 1: read pieces, encode their blocks, make shards of them, put them in place.

    download threads -> blocks, bounded in bytes -> worker processes -> block files on local disk
    -> worker processes make shards of them -> upload threads -> commit records

All of it goes on at once. A shard's content depends on its plan alone: blocks are encoded in any
order and put together in the order of their inputs.
"""

import functools
import itertools
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common import run
from common.assembling import AssembleTask, EncodedBlock
from common.encoding import assemble_surely, encode_surely
from common.plan import VERSION, InputRange, Plan, check_plan
from common.reading import ByteBudget, pieces, read_blocks
from common.s3 import CredentialsExpired
from common.shards import record_key, shard_name
from common.store import Store
from common.timing import Clock, Seconds
from common.workers import Pool, WorkerDied

BLOCK_BYTES_AHEAD = 256_000_000  # read and not yet encoded, at most
PIECES_AHEAD = 128  # beyond the one whose turn it is: what they make waits on the local disk
UPLOAD_THREADS = 4
UPLOADS_AHEAD = 4  # finished shards on the local disk
KILLED_LINES = 10  # more lines that kill workers mean that the machine is too small
WAIT_S = 0.5
RECENT_S = 10.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class BlockDone:
    """A block is encoded: the stored bytes it was read from, and what it holds."""

    stored: int
    encoded: EncodedBlock


@dataclass(frozen=True)
class ShardDone:
    """A shard is committed."""

    record: dict[str, Any]


@dataclass(frozen=True)
class StillWaiting:
    """Nothing happened for a moment."""


class Flow(Protocol):
    """What makes shards and tells how it goes; see ShardPipeline."""

    failures: dict[int, str]
    waits_s: Seconds
    cpu_s: Seconds
    bytes_in: int
    bytes_out: int

    @property
    def bottleneck(self) -> str: ...

    def events(self, indexes: Sequence[int]) -> Generator["Event", None, None]: ...


Event = BlockDone | ShardDone | StillWaiting


Blocks = queue.SimpleQueue[tuple[int, Future[list[EncodedBlock]]] | Exception | None]


class ShardPipeline:
    """Makes shards of one plan, see `events`.

    failures: what was wrong with a shard's inputs, by index. waits_s: seconds by what the flow
    waited for: download, encode or upload. cpu_s: CPU seconds by step.
    """

    def __init__(
        self,
        source: Store,
        output: Store,
        plan: Plan,
        compressed: Mapping[str, str],
        *,
        folder: Path,
        pool: Pool,
        download_workers: int,
    ) -> None:
        self._source, self._output, self._plan = source, output, plan
        self._compressed, self._folder, self._pool = compressed, folder, pool
        self._budget = ByteBudget(BLOCK_BYTES_AHEAD)
        self._readers = ThreadPoolExecutor(download_workers, "download")
        self._uploaders = ThreadPoolExecutor(UPLOAD_THREADS, "upload")
        self._uploads: deque[Future[dict[str, Any]]] = deque()
        self._killed_lines, self._numbers = 0, itertools.count()
        self._free_paths = queue.SimpleQueue[Path]()
        self.failures: dict[int, str] = {}
        self.waits_s = Seconds()
        self._recent_s = {"encode": 0.0, "download": 0.0, "upload": 0.0}
        self.cpu_s = Seconds()
        self.bytes_in = self.bytes_out = 0

    @property
    def bottleneck(self) -> str:
        """What the flow has waited for most of late: download, encode or upload."""
        return max(self._recent_s, key=lambda kind: self._recent_s[kind])

    def events(self, indexes: Sequence[int]) -> Generator[Event, None, None]:
        """Make these shards; what happens on the way, as it happens.

        An input that cannot be read puts its shard into `failures`, and the others go on. Raises
        UserError when nothing can go on, and whatever a worker raised.
        """
        todo = (
            (index, part, piece)
            for index in indexes
            for part in self._plan.shards[index]
            for piece in pieces(part, part.key in self._compressed)
        )
        reading = self._read_ahead(todo)
        try:
            pending = next(reading, None)
            for index in indexes:
                blocks: list[tuple[InputRange, EncodedBlock]] = []
                while pending is not None and pending[0] == index:
                    yield from self._collect(*pending, blocks)
                    pending = next(reading, None)
                if index not in self.failures:
                    self._uploads.append(self._uploaders.submit(self._finish, index, blocks))
                yield from self._report(len(self._uploads) > UPLOADS_AHEAD)
            while self._uploads:
                yield from self._report(True)
        finally:
            self._stop()

    def _read_ahead(
        self, todo: Iterator[tuple[int, InputRange, InputRange]]
    ) -> Iterator[tuple[int, InputRange, Blocks]]:
        """Pieces in order, many of them under way; the blocks of each come in a queue."""
        ahead: deque[tuple[int, InputRange, Blocks]] = deque()
        while True:
            while len(ahead) <= PIECES_AHEAD and (item := next(todo, None)) is not None:
                index, part, piece = item
                blocks: Blocks = queue.SimpleQueue()
                self._readers.submit(self._read, piece, blocks)
                ahead.append((index, part, blocks))
            if not ahead:
                return
            yield ahead.popleft()

    def _read(self, piece: InputRange, blocks: Blocks) -> None:
        """In a download thread: read a piece and have its blocks encoded; None ends the queue."""
        clock = Clock()
        try:
            for block in read_blocks(self._source, piece, self._compressed.get(piece.key)):
                self.bytes_in += block.stored
                size, path = len(block.data), self._block_path()
                if not self._budget.acquire(size):
                    return
                future = self._pool.submit(functools.partial(encode_surely, block=block, path=path))
                future.add_done_callback(functools.partial(self._encoded, size))
                blocks.put((block.stored, future))
            blocks.put(None)
        except Exception as error:
            blocks.put(error)
        clock.charge("download")
        self.cpu_s.add(clock.cpu_s)

    def _block_path(self) -> Path:
        """A file for a block: an old one when there is one, whose pages are quicker to write."""
        try:
            return self._free_paths.get_nowait()
        except queue.Empty:
            return self._folder / f"block-{next(self._numbers)}"

    def _encoded(self, size: int, done: Future[list[EncodedBlock]]) -> None:
        self._budget.release(size)

    def _collect(
        self,
        index: int,
        part: InputRange,
        blocks: Blocks,
        encoded_blocks: list[tuple[InputRange, EncodedBlock]],
    ) -> Iterator[Event]:
        """Wait for a piece's blocks and for what is made of them."""
        while (item := (yield from self._wait(blocks.get, "download"))) is not None:
            if isinstance(item, run.UserError) and not isinstance(item, CredentialsExpired):
                self.failures.setdefault(index, str(item))
                return
            if isinstance(item, Exception):
                raise item
            stored, future = item
            for encoded in (yield from self._wait(functools.partial(_result, future), "encode")):
                self.cpu_s.add(encoded.cpu_s)
                self._killed_lines += encoded.rejected["worker_killed"]
                if self._killed_lines > KILLED_LINES:
                    raise run.UserError(
                        "workers keep dying, most likely because memory is short; run again with "
                        "fewer --tokenize-workers"
                    )
                encoded_blocks.append((part, encoded))
                yield BlockDone(stored, encoded)
                stored = 0

    def _report(self, wait: bool) -> Iterator[Event]:
        """The uploads that are done; the oldest one in any case if `wait`."""
        while self._uploads and (wait or self._uploads[0].done()):
            upload = functools.partial(_result, self._uploads.popleft())
            yield ShardDone((yield from self._wait(upload, "upload")))
            wait = False

    def _wait(self, get: Callable[..., Result], kind: str) -> Generator[Event, None, Result]:
        """What `get` gives, with an event now and then; the time goes to what it waits for."""
        while True:
            began = time.monotonic()
            try:
                return get(timeout=WAIT_S)
            except queue.Empty:
                yield StillWaiting()
            finally:
                if kind != "upload":  # what keeps a piece back is whatever is short
                    kind = "download" if self._pool.idle else "encode"
                self._charge(kind, time.monotonic() - began)

    def _charge(self, kind: str, seconds: float) -> None:
        self.waits_s.add({kind: seconds})
        fading = math.exp(-seconds / RECENT_S)
        self._recent_s = {name: fading * past for name, past in self._recent_s.items()}
        self._recent_s[kind] += seconds

    def _finish(
        self, index: int, blocks: Sequence[tuple[InputRange, EncodedBlock]]
    ) -> dict[str, Any]:
        """In an upload thread: make a shard, put rejects, shard and, last of all, its record."""
        arrow = self._folder / f"{shard_name(index)}.arrow"
        rejects = self._folder / f"{shard_name(index)}.rejected"
        call = functools.partial(assemble_surely, task=AssembleTask(blocks, arrow, rejects))
        try:
            facts, cpu_s = self._pool.submit(call, urgent=True).result()
        except WorkerDied as error:
            raise run.UserError(
                f"two workers died making {shard_name(index)} (out of memory?); run again with "
                "fewer --tokenize-workers"
            ) from error
        for _, block in blocks:
            self._free_paths.put(block.path)
            block.rejects_path.unlink(missing_ok=True)
        record = {
            "version": VERSION,
            "index": index,
            "plan_sha256": self._plan.sha256,
            "file": arrow.name,
            **facts,
        }
        check_plan(self._output, self._plan)
        self._output.upload(f"rejected/{shard_name(index)}.jsonl", rejects)
        self._output.upload(arrow.name, arrow)
        check_plan(self._output, self._plan)
        self._output.write(record_key(index), run.json_bytes(record))
        self.bytes_out += record["bytes"]
        self.cpu_s.add(cpu_s)
        arrow.unlink()
        rejects.unlink()
        return record

    def _stop(self) -> None:
        """Leave no thread behind; what is not under way is dropped, uploads end or fail."""
        self._budget.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._pool.close()
        self._uploaders.shutdown(cancel_futures=True)


def _result(future: Future[Result], *, timeout: float) -> Result:
    """A future's result. Raises queue.Empty when it takes longer."""
    if not wait([future], timeout).done:
        raise queue.Empty
    return future.result()
