"""Forked worker processes: tasks in, small results out, and none lost when a worker dies.

Each worker has a pipe and a thread of its own, so its death is the end of that pipe at once, even
halfway through a result (there a ProcessPoolExecutor, whose workers share one, hangs). A worker
that is stopped or gets nowhere is killed, which makes it a dead one.
"""

import gc
import itertools
import mmap
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common.timing import peak_memory_bytes

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
STOPPED_S = 3.0  # a worker in state T this long is given up
STUCK_S = 60.0  # and one that has work but used no CPU time
POLL_S = 0.5
SLOT_BYTES = 9_000_000  # memory that a worker shares with the parent, a usual task's bytes
CHUNK_BYTES = 1 << 18  # of larger ones: a pipe takes longer pieces at a third of the speed

Result = TypeVar("Result")

Handler = Callable[[Any, bytes], Any]  # (task, its bytes) -> result; runs in the workers
Ask = Callable[[Any, bytes], Any]  # the same from the parent's side; may raise WorkerDied


class WorkerDied(Exception):
    """The worker that had a task was killed, stopped or stuck; there is a new one already."""


@dataclass(order=True)
class _Job:
    rank: tuple[int, int]
    call: Callable[[Ask], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


@dataclass(frozen=True)
class Worker:
    """A worker process, the connection to it, and the memory that its payloads pass through."""

    process: BaseProcess
    connection: Connection
    slot: mmap.mmap


class Pool(Protocol):
    """What runs a handler somewhere else; see WorkerPool."""

    @property
    def idle(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def handover_cpu_s(self) -> float: ...

    def submit(self, call: Callable[[Ask], Result], *, urgent: bool = False) -> Future[Result]: ...

    def close(self) -> None: ...


class WorkerPool:
    """Forked processes that run `handler`; what it needs is loaded before they fork.

    idle: workers that have nothing to do now. peak_bytes: the largest resident size of any.
    handover_cpu_s: CPU seconds of the threads that hand tasks over.
    """

    def __init__(self, handler: Handler, workers: int) -> None:
        self._handler, self._lock, self._closed = handler, threading.Lock(), False
        self._numbers = itertools.count()
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self.idle, self.peak_bytes = workers, 0
        self.handover_cpu_s = 0.0
        gc.collect()
        gc.freeze()  # keep the collector from touching, and so copying, the shared pages
        self._workers = [self._fork() for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name="worker", daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[Ask], Result], *, urgent: bool = False) -> Future[Result]:
        """The result to come of `call(ask)`, where ask(task, payload) is answered by one worker.

        `urgent` calls go before the others. CancelledError when the pool is closed meanwhile.
        """
        job = _Job((0 if urgent else 1, next(self._numbers)), call, Future())
        self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """Stop the workers at once, whatever they are doing; what waits is cancelled."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.process.kill()
        for _ in self._threads:
            self.submit(lambda ask: None, urgent=True)  # wakes a thread
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.process.join()
            worker.slot.close()
        while not self._jobs.empty():
            self._jobs.get().future.cancel()

    # ---- the parent's threads, one a worker

    def _serve(self, worker: Worker) -> None:
        current = [worker]

        def ask(task: Any, payload: bytes) -> Any:
            try:
                return self._exchange(current[0], task, payload)
            except (EOFError, OSError) as error:
                current[0] = self._replace(current[0])
                raise WorkerDied from error

        while not self._closed:
            job = self._jobs.get()
            began = time.thread_time()
            self._count(idle=-1)
            try:
                job.future.set_result(job.call(ask))
            except BaseException as error:
                job.future.set_exception(error)
            del job  # and with it the bytes it holds
            self._count(idle=1, cpu_s=time.thread_time() - began)

    def _count(self, *, idle: int, cpu_s: float = 0.0) -> None:
        with self._lock:
            self.idle += idle
            self.handover_cpu_s += cpu_s

    def _exchange(self, worker: Worker, task: Any, payload: bytes) -> Any:
        if len(payload) <= SLOT_BYTES:
            worker.slot[: len(payload)] = payload
        worker.connection.send((task, len(payload)))
        if len(payload) > SLOT_BYTES:
            with memoryview(payload) as view:
                for start in range(0, len(view), CHUNK_BYTES):
                    worker.connection.send_bytes(view[start : start + CHUNK_BYTES])
        watch = _Watch(worker.process.pid)
        while not worker.connection.poll(POLL_S):
            if watch.gets_nowhere():
                worker.process.kill()
        result, peak = worker.connection.recv()
        self.peak_bytes = max(self.peak_bytes, peak)
        if isinstance(result, Exception):
            raise result
        return result

    def _replace(self, dead: Worker) -> Worker:
        with self._lock:
            if self._closed:
                raise CancelledError
            dead.process.kill()
            dead.process.join()
            dead.connection.close()
            dead.slot.close()
            self._workers.remove(dead)
            self._workers.append(self._fork())
            return self._workers[-1]

    def _fork(self) -> Worker:
        """Start a worker; never two at once, or one would hold the other's pipe open."""
        context = get_context("fork")
        ours, theirs = context.Pipe()
        slot = mmap.mmap(-1, SLOT_BYTES)
        process = context.Process(
            target=_work, args=(self._handler, theirs, slot, os.getpid()), daemon=True
        )
        # Until it has its own handlers a worker would run ours, and may swallow a signal in them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        theirs.close()
        return Worker(process, ours, slot)


class _Watch:
    """Whether a process at work is stopped, or uses no CPU time."""

    def __init__(self, pid: int | None) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._cpu_ticks, self._moved, self._ran = -1, time.monotonic(), time.monotonic()

    def gets_nowhere(self) -> bool:
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return False  # gone, or no /proc: the pipe tells
        now, ticks = time.monotonic(), int(fields[11]) + int(fields[12])
        if ticks != self._cpu_ticks:
            self._cpu_ticks, self._moved = ticks, now
        if fields[0] not in "Tt":
            self._ran = now
        return now - self._ran > STOPPED_S or now - self._moved > STUCK_S


def _work(handler: Handler, connection: Connection, slot: mmap.mmap, parent: int) -> None:
    """A worker: do what comes in until the parent is gone; signals are left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        task, size = connection.recv()
        payload = slot[:size] if size <= SLOT_BYTES else _receive(connection, size)
        try:
            result = handler(task, payload)
        except Exception as error:
            error.add_note(traceback.format_exc())
            result = error
        connection.send((result, peak_memory_bytes()))


def _receive(connection: Connection, size: int) -> bytes:
    payload, filled = bytearray(size), 0
    while filled < size:
        filled += connection.recv_bytes_into(payload, filled)
    return bytes(payload)
