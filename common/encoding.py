"""Blocks of lines -> token arrays, in worker processes that share one tokenizer by fork."""

import contextlib
import gc
import json
import os
import queue
import signal
import sqlite3
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from common.chat import ChatTokenizer, Encoded, EncodeSettings, encode_row
from common.reading import Block, read_blocks
from common.rows import Reject, RowRejected, parse_line
from common.run import UserError
from common.shards import InputRange
from common.store import Entry, Store

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def spool_prompts(
    store: Store, entries: Sequence[Entry], compressed: dict[str, str], path: Path
) -> None:
    """Put the requests of --prompts on disk, to be looked up by custom_id; other lines are left."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("create table requests (custom_id text primary key, body text)")
        for entry in entries:
            whole = InputRange(entry.key, entry.size, entry.etag, 0, entry.size)
            for block in read_blocks(store, whole, compressed.get(entry.key)):
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
        self,
        tokenizer: ChatTokenizer,
        settings: EncodeSettings,
        *,
        prompts: Path | None,
        all_turns: bool,
    ) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._prompts, self._all_turns = prompts, all_turns
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
                all_turns=self._all_turns,
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


def serve_blocks(encoder: Encoder, connection: Connection, parent: int) -> None:
    """A worker: encode what comes in until the parent is gone; signals are left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        block = connection.recv()
        try:
            connection.send(encoder(block))
        except Exception as error:
            error.add_note(traceback.format_exc())
            connection.send(error)


@dataclass(frozen=True)
class Worker:
    process: BaseProcess
    connection: Connection


class WorkerPool:
    """Encodes blocks in forked workers; a block whose worker dies is done once more by a new one.

    Each worker has a pipe and a thread of its own, so its death is the end of that pipe at once,
    even halfway through a result (there a ProcessPoolExecutor, whose workers share one, hangs).
    """

    def __init__(self, encoder: Encoder, workers: int) -> None:
        self._encoder, self._lock, self._closed = encoder, threading.Lock(), False
        gc.collect()
        gc.freeze()  # keep the collector from touching, and so copying, the shared pages
        self._workers = [self._fork() for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers)

    def submit(self, block: Block) -> Future[EncodedBlock]:
        """A block's result to come; it raises UserError when the block killed two workers."""
        return self._threads.submit(self._encode, block)

    def close(self) -> None:
        """Stop the workers at once, whatever they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown()

    def _encode(self, block: Block) -> EncodedBlock:
        worker = self._idle.get()  # there are as many as threads
        try:
            for _ in range(2):
                try:
                    worker.connection.send(block)
                    result = worker.connection.recv()
                except (EOFError, OSError):
                    worker = self._replace(worker)
                    continue
                if isinstance(result, Exception):
                    raise result
                return result
        finally:
            self._idle.put(worker)
        raise UserError(
            f"a worker was killed twice on {block.key} at byte {block.offset} (out of memory?): "
            "lower --workers, or look at the lines there"
        )

    def _replace(self, dead: Worker) -> Worker:
        with self._lock:
            if self._closed:
                raise CancelledError
            dead.process.join()
            dead.connection.close()
            self._workers.remove(dead)
            self._workers.append(self._fork())
            return self._workers[-1]

    def _fork(self) -> Worker:
        """Start a worker; never two at once, or one would hold the other's pipe open."""
        context = get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve_blocks, args=(self._encoder, theirs, os.getpid()), daemon=True
        )
        # Until it has its own handlers a worker would run ours, and may swallow a signal in them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        theirs.close()
        return Worker(process, ours)
