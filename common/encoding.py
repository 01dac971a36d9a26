"""Blocks of lines -> token arrays, in worker processes that share one tokenizer by fork."""

import contextlib
import gc
import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from common.chat import ChatTokenizer, Encoded, EncodeSettings, encode_row
from common.reading import Block, fetch
from common.rows import Reject, RowRejected, parse_line
from common.run import UserError
from common.shards import InputRange
from common.store import Entry, Store


def spool_prompts(
    store: Store, entries: Sequence[Entry], compressed: dict[str, str], path: Path
) -> None:
    """Put the requests of --prompts on disk, to be looked up by custom_id; other lines are left."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("create table requests (custom_id text primary key, body text)")
        for entry in entries:
            whole = InputRange(entry.key, entry.size, entry.etag, 0, entry.size)
            for block in fetch(store, whole, compressed.get(entry.key)):
                for line in block.data.split(b"\n"):
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        request = json.loads(line)
                        row = request["custom_id"], json.dumps(request["body"])
                        database.execute("insert or replace into requests values (?, ?)", row)


@dataclass
class EncodedBlock:
    """A block's rows in flat arrays, which pickle as plain memory; never lists of tokens.

    ids, sources, cut, no_reasoning: one a row. lengths (rows,) int64, tokens (T,) int32,
    mask (T,) bool. rejects: lines of the shard's rejected file, still without line numbers.
    """

    ids: list[str] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    cut: int = 0
    no_reasoning: int = 0
    rejects: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


class Encoder:
    """What every worker shares: made once, before the workers are forked."""

    def __init__(
        self, tokenizer: ChatTokenizer, settings: EncodeSettings, prompts: Path | None
    ) -> None:
        self._tokenizer, self._settings, self._prompts = tokenizer, settings, prompts
        self._database: sqlite3.Connection | None = None

    def __call__(self, block: Block) -> EncodedBlock:
        result = EncodedBlock()
        rows: list[Encoded] = []
        offset = block.offset
        for number, line in enumerate(block.data.split(b"\n")):
            ended = offset + len(line) < block.offset + len(block.data)
            found = parse_line(
                line + b"\n" if ended else line,
                fallback_id=f"{block.key}@{offset}",
                prompts=self._look_up if self._prompts else None,
            )
            for row in found:
                try:
                    if isinstance(row, Reject):
                        raise RowRejected(row.reason, row.error)
                    rows.append(encode_row(row, self._tokenizer, self._settings))
                    result.ids.append(row.id)
                    result.sources.append(row.source)
                except RowRejected as error:
                    facts = {"key": block.key, "line": None, "offset": offset, "id": row.id}
                    facts |= {"reason": error.reason, "error": str(error)}
                    result.rejects.append((number, facts))
            offset += len(line) + 1
        if rows:
            result.tokens = np.concatenate([row.input_ids for row in rows])
            result.mask = np.concatenate([row.loss_mask for row in rows])
            result.lengths = np.array([len(row.input_ids) for row in rows])
        result.cut = sum(row.cut for row in rows)
        result.no_reasoning = sum(row.no_reasoning for row in rows)
        return result

    def _look_up(self, custom_id: str) -> dict[str, Any] | None:
        if self._database is None:  # opened in the worker: connections do not survive a fork
            self._database = sqlite3.connect(f"file:{self._prompts}?mode=ro", uri=True)
        query = "select body from requests where custom_id = ?"
        found = self._database.execute(query, (custom_id,)).fetchone()
        return json.loads(found[0]) if found else None


_encoder: Encoder | None = None  # set before the fork, so that workers inherit the tokenizer


def encode_block(block: Block) -> EncodedBlock:
    assert _encoder is not None
    return _encoder(block)


def start_worker() -> None:
    """In a new worker: leave signals to the parent, and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class WorkerPool:
    """Encodes blocks in forked workers; a block whose worker dies is done again, alone."""

    def __init__(self, encoder: Encoder, workers: int) -> None:
        global _encoder
        _encoder, self._workers = encoder, workers
        gc.collect()
        gc.freeze()  # keep the collector from touching, and so copying, the shared pages
        self._pool = self._fork(workers)

    def _fork(self, workers: int) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(workers, get_context("fork"), initializer=start_worker)
        pool.submit(int).result()  # forks all of them now, before this process has threads
        return pool

    def submit(self, block: Block) -> Future[EncodedBlock]:
        try:
            return self._pool.submit(encode_block, block)
        except BrokenProcessPool as error:
            failed: Future[EncodedBlock] = Future()
            failed.set_exception(error)
            return failed

    def result(self, block: Block, future: Future[EncodedBlock]) -> EncodedBlock:
        """A block's result. Raises UserError that names it when it kills a worker of its own."""
        try:
            return future.result()
        except BrokenProcessPool:
            alone = self._fork(1)
            try:
                result = alone.submit(encode_block, block).result()
            except BrokenProcessPool as error:
                raise UserError(
                    f"a worker was killed twice on {block.key} at byte {block.offset} (out of "
                    "memory?): lower --workers, or look at the line there"
                ) from error
            finally:
                alone.shutdown()
            if self._pool._broken:
                self._pool.shutdown()
                self._pool = self._fork(self._workers)
            return result

    def close(self) -> None:
        """Stop the workers at once, whatever they are doing."""
        for process in (self._pool._processes or {}).values():
            process.terminate()
        self._pool.shutdown(cancel_futures=True)
