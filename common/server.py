"""The hidden-state server: one target, many streams, one forward at a time; see common/wire.py."""

import contextlib
import hmac
import ipaddress
import json
import logging
import os
import socket
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
    read_id,
)

MAX_STREAMS = 32  # each holds an answer at most, so this bounds the memory of slow readers
STUCK_S = 60.0  # a client that takes no more of its answer for so long is hung up on
IDLE_S = 60.0  # so is one that asks nothing for so long, when others are refused for want of room
LOOK_S = 1.0
REFUSALS_EVERY_S = 10.0  # log lines of wrong tokens


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
        self._num_busy = 0
        self._streams: list[_Stream] = []
        self._turned_away = False  # a client since the last look, for want of room
        super().__init__(
            location,
            middleware=None if token is None else {"token": _TokenCheck(token)},
            tls_certificates=list(tls_certificates),
        )
        threading.Thread(target=self._watch, daemon=True).start()

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
        return {**self.meter.sums(), "queue": self._device.waiting, "streams": len(self._streams)}

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
        with self._stream(context) as stream:
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
                    self._answer(chunk, writer, stream, final=final)
                finally:
                    stream.goes_on("waits")
                    with self._idle:
                        self._num_busy -= 1
                        self._idle.notify_all()

    @contextlib.contextmanager
    def _stream(self, context: Any) -> Iterator["_Stream"]:
        stream = _Stream(context)
        with self._idle:
            if len(self._streams) >= MAX_STREAMS:
                self._turned_away = True
                raise flight.FlightUnavailableError(f"{MAX_STREAMS} streams are open already")
            self._streams.append(stream)
        try:
            yield stream
        finally:
            with self._idle:
                self._streams.remove(stream)

    def _watch(self) -> None:
        """Hang up on clients that hold a place and take nothing, or ask nothing, any more."""
        while not self._closing.wait(LOOK_S):
            with self._idle:
                left = {
                    stream.peer for stream in self._streams if stream.for_s("answers") > STUCK_S
                }
                if self._turned_away and not left:
                    quiet: dict[str, float] = {}  # by client: its streams may share a connection
                    for stream in self._streams:
                        waited_s = stream.for_s("waits")
                        quiet[stream.peer] = min(waited_s, quiet.get(stream.peer, waited_s))
                    quietest = max(quiet, key=lambda peer: quiet[peer])
                    left = {quietest} if quiet[quietest] > IDLE_S else set()
                self._turned_away = False
            for peer in left:
                logging.getLogger(__name__).warning(
                    f"hung up on {peer}: it has taken or asked nothing for a minute, and holds a "
                    "place that others may need"
                )
                _hang_up(peer)

    def _answer(self, chunk: Any, writer: Any, stream: "_Stream", *, final: bool) -> None:
        have, metadata = self._hidden_states.description, b""
        try:
            metadata = read_id(chunk)
            documents = read_documents(chunk.data, max_tokens=have.max_tokens_per_request)
            stream.goes_on("is computed for")
            with contextlib.ExitStack() as at_work:
                with self._device.turn():  # one forward at a time, answers travel meanwhile
                    if stream.context.is_cancelled():
                        return
                    at_work.enter_context(self.meter.at_work())
                    copy = self._copies.start(self._hidden_states.compute(documents, final=final))
                taps = copy()
        except (ValueError, pa.ArrowInvalid, torch.OutOfMemoryError) as error:
            message = {"id": metadata.decode(errors="replace"), "error": str(error)}
            stream.goes_on("answers")
            writer.write_metadata(json.dumps(message).encode())
            return
        for batch in answer_batches(taps):
            stream.goes_on("answers")
            writer.write_with_metadata(batch, metadata)
        self.meter.add_answer(len(taps.hidden))  # before the client can ask for the stats
        end = {"id": metadata.decode(errors="replace"), "end": True}
        writer.write_metadata(json.dumps(end).encode())


@dataclass(eq=False)
class _Stream:
    """What a stream does, and since when: it waits, is computed for, or answers."""

    context: Any
    doing: str = "waits"
    since: float = field(default_factory=time.monotonic)

    @property
    def peer(self) -> str:
        return self.context.peer()

    def goes_on(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()

    def for_s(self, doing: str) -> float:
        """How long it has done so; 0 when it does something else."""
        return time.monotonic() - self.since if doing == self.doing else 0.0


def _hang_up(peer: str) -> None:
    """Close the connection of a peer such as ipv4:127.0.0.1:34567.

    Flight can end no stream from outside, and a write that waits for a client that reads no more
    would wait for ever. So its socket is looked for among this process's own.
    """
    host, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    wanted = _address(host.strip("[]"), int(port))
    for descriptor in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # no socket, or closed meanwhile
            own = socket.socket(fileno=int(descriptor))
            try:
                is_ip = own.family in (socket.AF_INET, socket.AF_INET6)
                if is_ip and _address(*own.getpeername()[:2]) == wanted:
                    own.shutdown(socket.SHUT_RDWR)
            finally:
                own.detach()  # it is gRPC's to close


def _address(host: str, port: int) -> tuple[str, int]:
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), port


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
    """Lets nobody in without the token, and says so now and then; Flight does not tell who it was.

    The token itself, right or wrong, is never logged.
    """

    def __init__(self, token: bytes) -> None:
        super().__init__()
        self._expected = bearer(token).encode()
        self._lock, self._refused, self._last_line = threading.Lock(), 0, float("-inf")

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        given = [value.encode() for value in headers.get("authorization", [])]
        if not any(hmac.compare_digest(self._expected, value) for value in given):
            self._log("a wrong token" if given else "no token")
            raise flight.FlightUnauthenticatedError("wrong or missing token (--token-file)")

    def _log(self, what: str) -> None:
        with self._lock:
            self._refused += 1
            if time.monotonic() - self._last_line < REFUSALS_EVERY_S:
                return
            self._last_line = time.monotonic()
            logging.getLogger(__name__).warning(
                f"refused a call with {what} (--token-file); {self._refused:,} so far"
            )
