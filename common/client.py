"""Hidden states from servers: requests spread over them, asked again where one dies."""

import contextlib
import ctypes
import functools
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import flight

from common.connection import (
    DESCRIBE_TIMEOUT_S,
    ServerUnavailable,
    connect,
    describe,
    describe_on,
    reason_of,
)
from common.run import UserError
from common.target import Taps
from common.wire import PROTOCOL_VERSION, Description

STREAMS_PER_SERVER = 2  # one request is computed while another one's answer travels
RETRY_S = 0.5
KEPT_BYTES = {-3: 32 << 20, -1: 256 << 20}  # glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
SILENT_S = 10.0  # an answer that takes longer has its server asked whether it lives
LIFE_SIGN_TIMEOUT_S = 10.0


class RequestRefused(UserError):
    """A server's {"id", "error"} answer: the request itself is at fault."""


@dataclass
class Request:
    """Documents on their way to a server, and the answer to come."""

    documents: Sequence[np.ndarray]
    final: bool
    answer: Future[Taps]
    failed_at: float | None = None  # when a server first failed on it, in time.monotonic()


class ServedHiddenStates:
    """Hidden states from servers: a request goes to a free one, and to another if that one dies.

    Raises UserError when no server answers within `connect_timeout_s`. Later, a request fails with
    UserError when every server has been gone for that long, or when servers that can be reached
    have failed on it for that long; and at once when a server differs from the first, answers less
    than `tokens_per_request`, or lets us not in.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        token: bytes | None = None,
        tls_root_certs: bytes | None = None,
        connect_timeout_s: float = 300.0,
        tokens_per_request: int = 0,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self._addresses, self._timeout_s = list(addresses), connect_timeout_s
        self._token, self._certificates = token, tls_root_certs
        self._tokens_per_request = tokens_per_request
        self._requests: queue.Queue[Request] = queue.Queue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._down: dict[int, tuple[float, str]] = {}  # by worker: since when, and why
        self._streams: dict[int, Stream] = {}  # by worker
        self._given_up: str | None = None  # set once, and the end of every request from then on
        self.description = self._first_description(on_wait)
        self._num_workers = STREAMS_PER_SERVER * len(self._addresses)
        self._workers = []
        for number in range(self._num_workers):
            address = self._addresses[number % len(self._addresses)]
            self._workers.append(
                threading.Thread(target=self._work, args=(number, address), daemon=True)
            )
        self._workers.append(threading.Thread(target=self._watch, daemon=True))
        for worker in self._workers:
            worker.start()

    def submit(self, documents: Sequence[np.ndarray], *, final: bool = False) -> Future[Taps]:
        request = Request(documents, final, Future())
        self._requests.put(request)
        if self._given_up is not None:
            self._fail_all(self._given_up)
        return request.answer

    def close(self) -> None:
        self._closed.set()
        for worker in self._workers:
            worker.join(timeout=10.0)  # a thread inside Arrow at the interpreter's exit would abort

    def _first_description(self, on_wait: Callable[[float], None] | None) -> Description:
        began = time.monotonic()
        while True:
            for address in self._addresses:
                try:
                    have = self._describe(address)
                    self._first_address = address
                    return have
                except ServerUnavailable as error:
                    last = error
            waited = time.monotonic() - began
            if waited >= self._timeout_s:
                raise UserError(
                    f"nothing came within {self._timeout_s:.0f} s (--server-timeout): {last}; "
                    "start extract_hidden_online.py --listen there, or correct --hidden-states"
                )
            if on_wait is not None:
                on_wait(waited)
            time.sleep(RETRY_S)

    def _work(self, number: int, address: str) -> None:
        while not self._closed.is_set():
            stream = self._open(number, address)
            while stream is not None and not stream.is_cancelled and not self._closed.is_set():
                try:
                    request = self._requests.get(timeout=RETRY_S)
                except queue.Empty:
                    continue
                try:
                    request.answer.set_result(stream.ask(request))
                except RequestRefused as error:
                    request.answer.set_exception(error)
                except (pa.ArrowException, OSError, EOFError, StopIteration) as error:
                    self._ask_again(request, address, error)
                    break
                except Exception as error:  # an answer of no kind that this side knows
                    reason = f"{type(error).__name__}: {error}"
                    request.answer.set_exception(
                        UserError(f"{address} gave an answer that cannot be read ({reason})")
                    )
                    break
            if stream is not None:
                self._streams.pop(number, None)
                stream.close()
            self._closed.wait(RETRY_S)  # a server that fails at once must not be asked in a loop

    def _watch(self) -> None:
        """Give up streams of servers that are there no more, though nothing ends the connection.

        A stopped process or a machine without power answers neither the request nor us.
        """
        while not self._closed.wait(RETRY_S):
            silent: dict[str, float] = {}
            for stream in list(self._streams.values()):
                if (silent_s := stream.silent_s()) > SILENT_S:
                    silent[stream.address] = max(silent_s, silent.get(stream.address, 0.0))
            for address, silent_s in silent.items():
                self._ask_for_life(address, time.monotonic() - silent_s)
            self._give_up_in_time()

    def _ask_for_life(self, address: str, heard_at: float) -> None:
        """Whether a server lives that was heard last so long ago; cancel all its streams if not."""
        here = [item for item in list(self._streams.items()) if item[1].address == address]
        try:
            self._describe(address, timeout_s=LIFE_SIGN_TIMEOUT_S)
        except UserError as error:
            for number, stream in here:
                stream.is_cancelled = True  # all before the first one's request looks for another
                with self._lock:
                    self._down.setdefault(number, (heard_at, str(error)))
            for _, stream in here:
                stream.cancel()
            return
        for _, stream in here:
            stream.is_heard()

    def _give_up_in_time(self) -> None:
        with self._lock:
            if len(self._down) < self._num_workers:
                return
            since, reason = max(self._down.values())
        if time.monotonic() - since >= self._timeout_s:
            self._fail_all(f"no hidden-state server for {self._timeout_s:.0f} s: {reason}")

    def _describe(self, address: str, timeout_s: float = DESCRIBE_TIMEOUT_S) -> Description:
        return describe(
            address, token=self._token, tls_root_certs=self._certificates, timeout_s=timeout_s
        )

    def _ask_again(self, request: Request, address: str, error: BaseException) -> None:
        """The server died, or failed: another one, or the same again, until the time is over."""
        now = time.monotonic()
        if request.failed_at is None:
            request.failed_at = now
        if now - request.failed_at < self._timeout_s:
            self._requests.put(request)
            return
        reason = reason_of(error)
        request.answer.set_exception(
            UserError(f"{address} cannot answer, tried for {self._timeout_s:.0f} s: {reason}")
        )

    def _open(self, number: int, address: str) -> "Stream | None":
        while not self._closed.is_set():
            try:
                # on the stream's own connection: one that is there can be cancelled
                client = connect(address, self._token, self._certificates)
                with contextlib.ExitStack() as unless_opened:
                    unless_opened.callback(client.close)
                    has_tls = self._certificates is not None
                    self._check(address, describe_on(client, address, has_tls=has_tls))
                    unless_opened.pop_all()
                stream = Stream(client, address)
                with self._lock:
                    self._down.pop(number, None)
                self._streams[number] = stream
                return stream
            except (ServerUnavailable, pa.ArrowException, OSError) as error:
                with self._lock:
                    self._down.setdefault(number, (time.monotonic(), str(error)))
            except UserError as error:
                self._given_up = str(error)
                self._fail_all(self._given_up)
            self._closed.wait(RETRY_S)
        return None

    def _check(self, address: str, have: Description) -> None:
        """Raises UserError for a server whose answers would not be the others', or too short."""
        differences = have.differences(self.description)
        if differences:
            raise UserError(
                f"{address} serves other hidden states than {self._first_address}: its "
                f"{'; its '.join(differences)}: start all servers with the same --target, "
                "--layers, --dtype, --final and --max-tokens-per-batch"
            )
        if have.max_tokens_per_request < self._tokens_per_request:
            raise UserError(
                f"{address} answers {have.max_tokens_per_request} tokens a request, and "
                f"{self._tokens_per_request} are needed: start it with --max-tokens-per-request "
                f"{self._tokens_per_request} or more"
            )

    def _fail_all(self, reason: str) -> None:
        while True:
            try:
                self._requests.get_nowait().answer.set_exception(UserError(reason))
            except queue.Empty:
                return


class Stream:
    """One DoExchange per kind of request, on one connection; a request at a time."""

    def __init__(self, client: flight.FlightClient, address: str) -> None:
        _keep_freed_memory()
        self._client, self.address = client, address
        self._exchanges: dict[bool, tuple[Any, Any]] = {}
        self._next_id = 0
        self._asked: float | None = None  # since when an answer is awaited
        self.is_cancelled = False

    def silent_s(self) -> float:
        """For how long the server has owed an answer and sent nothing."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def is_heard(self) -> None:
        """The server lives: it may take as long again."""
        if self._asked is not None:
            self._asked = time.monotonic()

    def cancel(self) -> None:
        """End what is under way; the thread that waits for it gets an error."""
        self.is_cancelled = True
        for _, reader in list(self._exchanges.values()):
            reader.cancel()

    def close(self) -> None:
        """Let go of the connection; Arrow would complain on stderr about streams left open."""
        self.cancel()
        for writer, _ in self._exchanges.values():
            with contextlib.suppress(pa.ArrowException, OSError):
                writer.close()
        self._client.close()

    def ask(self, request: Request) -> Taps:
        """Raises RequestRefused for an error answer, Arrow's errors when the server is gone."""
        self._next_id += 1
        lengths = [len(document) for document in request.documents]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), type=pa.int32())
        tokens = pa.array(np.concatenate([np.asarray(d, np.int32) for d in request.documents]))
        batch = pa.record_batch({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
        self._asked = time.monotonic()
        try:
            writer, reader = self._exchange(request.final)
            writer.write_with_metadata(batch, str(self._next_id).encode())
            return self._read_answer(reader, num_tokens=sum(lengths), final=request.final)
        finally:
            self._asked = None

    def _exchange(self, final: bool) -> tuple[Any, Any]:
        if final not in self._exchanges:
            command = json.dumps({"version": PROTOCOL_VERSION, "final": final}).encode()
            writer, reader = self._client.do_exchange(flight.FlightDescriptor.for_command(command))
            writer.begin(pa.schema([("input_ids", pa.list_(pa.int32()))]))
            self._exchanges[final] = writer, reader
        if self.is_cancelled:
            raise OSError(f"{self.address} answers nothing any more")
        return self._exchanges[final]

    def _read_answer(self, reader: Any, *, num_tokens: int, final: bool) -> Taps:
        parts: dict[str, torch.Tensor] = {}
        done = 0
        while True:
            chunk = reader.read_chunk()
            self.is_heard()
            if chunk.data is None:
                message = json.loads(chunk.app_metadata.to_pybytes())
                if "error" in message:
                    raise RequestRefused(f"{self.address} refused a request: {message['error']}")
                if done != num_tokens:
                    raise OSError(f"{self.address}: {done} of {num_tokens} tokens answered")
                return Taps(parts["hidden"], parts["final"] if final else None)
            rows = chunk.data.num_rows
            for name, column in zip(chunk.data.schema.names, chunk.data.columns, strict=True):
                width = column.type.byte_width // 2
                values = np.frombuffer(column.buffers()[1], dtype=np.int16)
                values = values[column.offset * width : (column.offset + rows) * width]
                if name not in parts:
                    # numpy asks for huge pages and torch.empty does not: a fifth of the time
                    memory = torch.from_numpy(np.empty((num_tokens, width), np.int16))
                    parts[name] = memory.view(torch.bfloat16)
                parts[name].view(torch.int16).numpy()[done : done + rows] = values.reshape(rows, -1)
            done += rows


@functools.cache
def _keep_freed_memory() -> None:
    """Have malloc reuse the pieces of an answer for the next, not give them back to the kernel.

    Page faults on them took two thirds of the time of receiving an answer.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc; others do well without
    if mallopt is not None:
        for parameter, size in KEPT_BYTES.items():
            mallopt(parameter, size)
