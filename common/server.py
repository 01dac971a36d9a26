"""The hidden-state server: one target, many streams, one forward at a time; see common/wire.py."""

import contextlib
import hmac
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch
from pyarrow import flight

from common.target import Taps
from common.wire import (
    ColocatedHiddenStates,
    answer_batches,
    answer_schema,
    bearer,
    read_command,
    read_documents,
)

MAX_STREAMS = 32  # each holds an answer at most, so this bounds the memory of slow readers


class HiddenStateServer(flight.FlightServerBase):
    """Serves one target. `stats` tells what it has done so far."""

    def __init__(
        self,
        location: str,
        hidden_states: ColocatedHiddenStates,
        *,
        token: bytes | None,
        tls_certificates: Sequence[tuple[bytes, bytes]],
    ) -> None:
        self._hidden_states, self.meter = hidden_states, Meter()
        self._device = _Turns()
        self._copies = _HostCopies(hidden_states.target.device)
        self._closing = threading.Event()
        self._idle = threading.Condition()
        self._num_busy = self._num_streams = 0
        super().__init__(
            location,
            middleware=None if token is None else {"token": _TokenCheck(token)},
            tls_certificates=list(tls_certificates),
        )

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [
            ("describe", "what this server serves, as JSON"),
            ("stats", "what it has done so far, as JSON"),
        ]

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        if action.type == "describe":
            yield flight.Result(self._hidden_states.description.to_json())
        elif action.type == "stats":
            yield flight.Result(json.dumps(self.stats()).encode())
        else:
            raise flight.FlightServerError(
                f"unknown action {action.type!r}; there are: describe, stats"
            )

    def stats(self) -> dict[str, float]:
        """Sums since the start; requests waiting for the device, and open streams, now."""
        return {**self.meter.sums(), "queue": self._device.waiting, "streams": self._num_streams}

    def stop(self, *, grace_s: float) -> bool:
        """Take no new requests, finish those at hand; whether all streams ended in that time.

        Flight waits for the streams that clients hold open, busy or not, and has no way to end
        them: on False only the end of the process does.
        """
        deadline = time.monotonic() + grace_s
        self._closing.set()
        ending = threading.Thread(target=self.shutdown, daemon=True)
        ending.start()
        with self._idle:
            self._idle.wait_for(lambda: self._num_busy == 0, timeout=grace_s)
        ending.join(timeout=min(1.0, max(0.0, deadline - time.monotonic())))
        return not ending.is_alive()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        final = read_command(descriptor)
        with self._stream():
            writer.begin(answer_schema(self._hidden_states.description, final=final))
            while True:
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    return
                with self._idle:
                    if self._closing.is_set():
                        return  # unanswered: the client asks another server
                    self._num_busy += 1
                try:
                    self._answer(chunk, writer, final=final)
                finally:
                    with self._idle:
                        self._num_busy -= 1
                        self._idle.notify_all()

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        with self._idle:
            if self._num_streams >= MAX_STREAMS:
                raise flight.FlightUnavailableError(f"{MAX_STREAMS} streams are open already")
            self._num_streams += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_streams -= 1

    def _answer(self, chunk: Any, writer: Any, *, final: bool) -> None:
        metadata = chunk.app_metadata.to_pybytes() if chunk.app_metadata else b""
        request_id = metadata.decode(errors="replace")
        try:
            documents = read_documents(chunk.data)
            with contextlib.ExitStack() as at_work:
                with self._device.turn():  # one forward at a time, answers travel meanwhile
                    at_work.enter_context(self.meter.at_work())
                    copy = self._copies.start(self._hidden_states.compute(documents, final=final))
                taps = copy()
        except (ValueError, pa.ArrowInvalid, torch.OutOfMemoryError) as error:
            message = {"id": request_id, "error": str(error)}
            writer.write_metadata(json.dumps(message).encode())
            return
        for batch in answer_batches(taps):
            writer.write_with_metadata(batch, metadata)
        self.meter.add_answer(len(taps.hidden))  # before the client can ask for the stats
        writer.write_metadata(json.dumps({"id": request_id, "end": True}).encode())


class Meter:
    """What a server has done: requests, tokens, and the seconds in which its device was at work."""

    def __init__(self) -> None:
        self._lock, self._began = threading.Lock(), time.monotonic()
        self._requests = self._tokens = self._at_work = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    def add_answer(self, tokens: int) -> None:
        with self._lock:
            self._requests += 1
            self._tokens += tokens

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """The device is busy from here to the end, with this request or with others too."""
        with self._lock:
            if self._at_work == 0:
                self._busy_since = time.monotonic()
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1
                if self._at_work == 0:
                    self._busy_s += time.monotonic() - self._busy_since

    def sums(self) -> dict[str, float]:
        with self._lock:
            return {
                "requests": self._requests,
                "tokens": self._tokens,
                "busy_s": self._busy_s,
                "up_s": time.monotonic() - self._began,
            }


class _Turns:
    """A lock that goes to whoever has waited longest: a stream has one request, so all are equal.

    A threading.Lock may go to the same busy thread again and again.
    """

    def __init__(self) -> None:
        self._lock, self._taken = threading.Lock(), False
        self._queue: deque[threading.Event] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        mine = threading.Event()
        with self._lock:
            if self._taken:
                self._queue.append(mine)
            else:
                self._taken = True
                mine.set()
        mine.wait()
        try:
            yield
        finally:
            with self._lock:
                if self._queue:
                    self._queue.popleft().set()
                else:
                    self._taken = False


class _HostCopies:
    """Copies to the host on a stream of their own, which overlap the next forward."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, taps: Taps) -> Callable[[], Taps]:
        """Begin to copy what was computed last; the call that waits for it gives it."""
        stream = self._stream
        if stream is None:
            return lambda: taps
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            hidden = _copy_to_host(taps.hidden, stream)
            final = None if taps.final is None else _copy_to_host(taps.final, stream)
            done = stream.record_event()

        def finish() -> Taps:
            done.synchronize()
            return Taps(hidden, final)

        return finish


def _copy_to_host(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    tensor.record_stream(stream)  # its memory must not be given away before
    return host.copy_(tensor, non_blocking=True)


class _TokenCheck(flight.ServerMiddlewareFactory):
    def __init__(self, token: bytes) -> None:
        self._expected = bearer(token).encode()

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        given = [value.encode() for value in headers.get("authorization", [])]
        if not any(hmac.compare_digest(self._expected, value) for value in given):
            raise flight.FlightUnauthenticatedError("wrong or missing token (--token-file)")
