"""Hidden states for the trainer: computed beside it, or served over Arrow Flight. One interface.

The protocol. Action `describe` answers JSON (`Description`). DoExchange with the command
{"version": 1, "final": false} takes one record batch a request: column `input_ids: list<int32>`, a
row a document, app_metadata the request's id. The answer is one or more batches with the same
app_metadata, columns `hidden: fixed_size_binary(L*H*2)` and, with final,
`final: fixed_size_binary(H*2)`, a row a token, little-endian bfloat16; then a message without a
batch, app_metadata {"id", "end": true}. A request that cannot be answered gets {"id", "error"}
instead and the stream lives on. Requests are computed as they come, never merged or split, so
served and colocated hidden states are the same bits on the same kind of device.
"""

import dataclasses
import hmac
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from pyarrow import flight

from common.run import UserError
from common.target import Taps, Target

PROTOCOL_VERSION = 1
ANSWER_BYTES = 64_000_000  # of one record batch: Arrow's IPC and gRPC move it in one piece
STREAMS_PER_SERVER = 2  # one request is computed while another one's answer travels
RETRY_S = 0.5


@dataclass(frozen=True)
class Description:
    """What a source of hidden states serves; `layers` are output ids (hidden_states[i + 1])."""

    version: int
    target: str
    weights_fingerprint: str
    layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    dtype: str
    max_tokens_per_request: int
    final: bool

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Description":
        """Raises UserError for an answer of another protocol version."""
        facts = json.loads(data)
        if facts.get("version") != PROTOCOL_VERSION:
            raise UserError(
                f"the hidden-state server speaks protocol version {facts.get('version')}, not "
                f"{PROTOCOL_VERSION}: run both sides from the same checkout"
            )
        return cls(**{**facts, "layers": tuple(facts["layers"])})


class HiddenStates(Protocol):
    """Token ids in, hidden states out; a request is one forward, whoever computes it."""

    description: Description

    def submit(self, documents: Sequence[np.ndarray], *, final: bool = False) -> Future[Taps]:
        """Ask for the taps of documents (int32 ids): bfloat16, (T, L*H), in request order."""

    def close(self) -> None:
        """Give up connections; unanswered requests are dropped."""


class ColocatedHiddenStates:
    """Hidden states of a target in this process, computed when asked for, on its device."""

    def __init__(self, target: Target, *, max_tokens_per_request: int) -> None:
        self.target = target
        self.description = Description(
            version=PROTOCOL_VERSION,
            target=target.name,
            weights_fingerprint=target.fingerprint,
            layers=target.layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            dtype=str(target.dtype).removeprefix("torch."),
            max_tokens_per_request=max_tokens_per_request,
            final=target.final,
        )

    def submit(self, documents: Sequence[np.ndarray], *, final: bool = False) -> Future[Taps]:
        answer: Future[Taps] = Future()
        answer.set_result(self.compute(documents, final=final))
        return answer

    def compute(self, documents: Sequence[np.ndarray], *, final: bool) -> Taps:
        """The taps, rounded to bfloat16. Raises ValueError for a request that is not allowed."""
        tokens = sum(len(document) for document in documents)
        if tokens > self.description.max_tokens_per_request:
            raise ValueError(
                f"{tokens} tokens in one request; at most "
                f"{self.description.max_tokens_per_request} (--max-tokens-per-request)"
            )
        taps = self.target.forward(documents, final=final)
        rounded = None if taps.final is None else taps.final.to(torch.bfloat16)
        return Taps(taps.hidden.to(torch.bfloat16), rounded)

    def close(self) -> None:
        pass


# ---- server


class HiddenStateServer(flight.FlightServerBase):
    """Serves one target. `on_request(tokens)` is called after each answered request."""

    def __init__(
        self,
        location: str,
        hidden_states: ColocatedHiddenStates,
        *,
        token: bytes | None,
        tls_certificates: Sequence[tuple[bytes, bytes]],
        on_request: Callable[[int], None],
    ) -> None:
        self._hidden_states, self._on_request = hidden_states, on_request
        self._device_lock = threading.Lock()
        self._closing = threading.Event()
        self._idle = threading.Condition()
        self._num_busy = 0
        super().__init__(
            location,
            middleware=None if token is None else {"token": _TokenCheck(token)},
            tls_certificates=list(tls_certificates),
        )

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [("describe", "what this server serves, as JSON")]

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        if action.type != "describe":
            raise flight.FlightServerError(f"unknown action {action.type!r}; there is: describe")
        yield flight.Result(self._hidden_states.description.to_json())

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
        final = _read_command(descriptor)
        writer.begin(_answer_schema(self._hidden_states.description, final=final))
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

    def _answer(self, chunk: Any, writer: Any, *, final: bool) -> None:
        metadata = chunk.app_metadata.to_pybytes() if chunk.app_metadata else b""
        request_id = metadata.decode(errors="replace")
        try:
            documents = _read_documents(chunk.data)
            with self._device_lock:  # one forward at a time; answers may travel meanwhile
                taps = self._hidden_states.compute(documents, final=final)
                taps = Taps(taps.hidden.cpu(), None if taps.final is None else taps.final.cpu())
        except (ValueError, pa.ArrowInvalid, torch.cuda.OutOfMemoryError) as error:
            message = {"id": request_id, "error": str(error)}
            writer.write_metadata(json.dumps(message).encode())
            return
        for batch in _answer_batches(taps):
            writer.write_with_metadata(batch, metadata)
        writer.write_metadata(json.dumps({"id": request_id, "end": True}).encode())
        self._on_request(len(taps.hidden))


def _bearer(token: bytes) -> str:
    # an empty token would let everybody in, and others do not fit into an HTTP header
    if not token or not all(0x20 <= byte < 0x7F for byte in token):
        raise UserError("--token-file: must hold one line of printable ASCII")
    return f"Bearer {token.decode()}"


class _TokenCheck(flight.ServerMiddlewareFactory):
    def __init__(self, token: bytes) -> None:
        self._expected = _bearer(token).encode()

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        given = [value.encode() for value in headers.get("authorization", [])]
        if not any(hmac.compare_digest(self._expected, value) for value in given):
            raise flight.FlightUnauthenticatedError("wrong or missing token (--token-file)")


def _read_command(descriptor: Any) -> bool:
    try:
        command = json.loads(descriptor.command)
        version, final = command["version"], command.get("final", False)
    except (ValueError, KeyError, TypeError) as error:
        raise flight.FlightServerError('the command must be {"version": 1, "final": …}') from error
    if version != PROTOCOL_VERSION:
        raise flight.FlightServerError(f"protocol version {version}, this is {PROTOCOL_VERSION}")
    return bool(final)


def _read_documents(batch: pa.RecordBatch | None) -> list[np.ndarray]:
    if batch is None or batch.schema.names != ["input_ids"]:
        raise ValueError("a request is one batch with the column input_ids: list<int32>")
    column = batch.column(0)
    if column.type != pa.list_(pa.int32()) or column.null_count:
        raise ValueError(f"input_ids must be list<int32> without nulls, not {column.type}")
    if column.values.null_count:
        raise ValueError("input_ids holds null tokens")
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return [values[start:end] for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


def _answer_schema(have: Description, *, final: bool) -> pa.Schema:
    fields = [("hidden", pa.binary(len(have.layers) * have.hidden_size * 2))]
    if final:
        fields.append(("final", pa.binary(have.hidden_size * 2)))
    return pa.schema(fields)


def _answer_batches(taps: Taps) -> Iterator[pa.RecordBatch]:
    parts = {"hidden": taps.hidden} | ({} if taps.final is None else {"final": taps.final})
    rows = max(1, ANSWER_BYTES // sum(part.shape[1] * 2 for part in parts.values()))
    for start in range(0, len(taps.hidden), rows):
        arrays = []
        for part in parts.values():
            piece = part[start : start + rows].contiguous()
            buffer = pa.py_buffer(piece.view(torch.int16).numpy())
            width = pa.binary(piece.shape[1] * 2)
            arrays.append(pa.FixedSizeBinaryArray.from_buffers(width, len(piece), [None, buffer]))
        yield pa.RecordBatch.from_arrays(arrays, names=list(parts))


# ---- client


class RequestRefused(UserError):
    """A server's {"id", "error"} answer: the request itself is at fault."""


@dataclass
class _Request:
    documents: Sequence[np.ndarray]
    final: bool
    answer: Future[Taps]
    failed_at: float | None = None  # when a server first failed on it, in time.monotonic()


class ServedHiddenStates:
    """Hidden states from servers: a request goes to a free one, and to another if that one dies.

    Raises UserError when no server answers within `connect_timeout_s`, or servers differ. Later, a
    request fails with UserError when every server has been gone for that long, or when servers that
    can be reached have failed on it for that long.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        token: bytes | None = None,
        tls_root_certs: bytes | None = None,
        connect_timeout_s: float = 300.0,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self._addresses, self._timeout_s = list(addresses), connect_timeout_s
        self._token, self._certificates = token, tls_root_certs
        self._requests: queue.Queue[_Request] = queue.Queue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._down_since: dict[int, float] = {}
        self._differing: str | None = None  # set once, and the end of every request from then on
        self.description = self._first_description(on_wait)
        self._num_workers = STREAMS_PER_SERVER * len(self._addresses)
        self._workers = []
        for number in range(self._num_workers):
            address = self._addresses[number % len(self._addresses)]
            self._workers.append(
                threading.Thread(target=self._work, args=(number, address), daemon=True)
            )
        for worker in self._workers:
            worker.start()

    def submit(self, documents: Sequence[np.ndarray], *, final: bool = False) -> Future[Taps]:
        request = _Request(documents, final, Future())
        self._requests.put(request)
        if self._differing is not None:
            self._fail_all(self._differing)
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
                    return describe(address, token=self._token, tls_root_certs=self._certificates)
                except ServerUnavailable as error:
                    last = error
            waited = time.monotonic() - began
            if waited >= self._timeout_s:
                raise UserError(
                    f"no hidden-state server answered within {self._timeout_s:.0f} s: {last}"
                )
            if on_wait is not None:
                on_wait(waited)
            time.sleep(RETRY_S)

    def _work(self, number: int, address: str) -> None:
        while not self._closed.is_set():
            stream = self._open(number, address)
            while stream is not None and not self._closed.is_set():
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
                    stream = None
            self._closed.wait(RETRY_S)  # a server that fails at once must not be asked in a loop

    def _ask_again(self, request: _Request, address: str, error: BaseException) -> None:
        """The server died, or failed: another one, or the same again, until the time is over."""
        now = time.monotonic()
        if request.failed_at is None:
            request.failed_at = now
        if now - request.failed_at < self._timeout_s:
            self._requests.put(request)
            return
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        request.answer.set_exception(
            UserError(f"{address} cannot answer, tried for {self._timeout_s:.0f} s: {reason}")
        )

    def _open(self, number: int, address: str) -> "_Stream | None":
        while not self._closed.is_set():
            try:
                have = describe(address, token=self._token, tls_root_certs=self._certificates)
                if dataclasses.replace(have, max_tokens_per_request=0) != dataclasses.replace(
                    self.description, max_tokens_per_request=0
                ):
                    self._differing = f"{address} serves {have}, the others {self.description}"
                    self._fail_all(self._differing)
                    return None
                with self._lock:
                    self._down_since.pop(number, None)
                return _Stream(_connect(address, self._token, self._certificates), address)
            except (UserError, pa.ArrowException, OSError) as error:
                self._note_down(number, str(error))
                self._closed.wait(RETRY_S)
        return None

    def _note_down(self, number: int, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._down_since.setdefault(number, now)
            all_down = len(self._down_since) == self._num_workers
            given_up = all_down and now - max(self._down_since.values()) >= self._timeout_s
        if given_up:
            self._fail_all(f"no hidden-state server for {self._timeout_s:.0f} s: {reason}")

    def _fail_all(self, reason: str) -> None:
        while True:
            try:
                self._requests.get_nowait().answer.set_exception(UserError(reason))
            except queue.Empty:
                return


def read_secret(path: Path | None) -> bytes | None:
    """The bytes of a token or certificate file; None without one. Raises UserError."""
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not secret:
        raise UserError(f"{path}: is empty")
    return secret


class ServerUnavailable(UserError):
    """Nothing answers at an address (yet)."""


def describe(
    address: str, *, token: bytes | None = None, tls_root_certs: bytes | None = None
) -> Description:
    """Ask a server what it serves. Raises ServerUnavailable or UserError, one line each."""
    try:
        with _connect(address, token, tls_root_certs) as client:
            options = flight.FlightCallOptions(timeout=10.0)
            results = list(client.do_action(flight.Action("describe", b""), options))
    except flight.FlightUnauthenticatedError as error:
        raise UserError(f"{address} refuses the token: give its --token-file") from error
    except (pa.ArrowException, OSError) as error:
        raise ServerUnavailable(f"no hidden-state server answers at {address}") from error
    return Description.from_json(results[0].body.to_pybytes())


def _connect(
    address: str, token: bytes | None, tls_root_certs: bytes | None
) -> flight.FlightClient:
    if "://" not in address:
        address = f"{'grpc+tls' if tls_root_certs else 'grpc'}://{address}"
    options: dict[str, Any] = {"tls_root_certs": tls_root_certs} if tls_root_certs else {}
    if token is not None:
        options["middleware"] = [_TokenSender(token)]
    try:
        return flight.FlightClient(address, **options)
    except (pa.ArrowInvalid, ValueError) as error:
        raise UserError(f"{address}: not an address like HOST:PORT") from error


class _TokenSender(flight.ClientMiddlewareFactory):
    def __init__(self, token: bytes) -> None:
        self._header = {"authorization": _bearer(token)}

    def start_call(self, info: Any) -> flight.ClientMiddleware:
        return _TokenHeader(self._header)


class _TokenHeader(flight.ClientMiddleware):
    def __init__(self, header: dict[str, str]) -> None:
        super().__init__()
        self._header = header

    def sending_headers(self) -> dict[str, str]:
        return self._header


class _Stream:
    """One DoExchange per kind of request, on one connection; a request at a time."""

    def __init__(self, client: flight.FlightClient, address: str) -> None:
        self._client, self._address = client, address
        self._exchanges: dict[bool, tuple[Any, Any]] = {}
        self._next_id = 0

    def ask(self, request: _Request) -> Taps:
        """Raises RequestRefused for an error answer, Arrow's errors when the server is gone."""
        writer, reader = self._exchange(request.final)
        self._next_id += 1
        lengths = [len(document) for document in request.documents]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), type=pa.int32())
        tokens = pa.array(np.concatenate([np.asarray(d, np.int32) for d in request.documents]))
        batch = pa.record_batch({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
        writer.write_with_metadata(batch, str(self._next_id).encode())
        return self._read_answer(reader, num_tokens=sum(lengths), final=request.final)

    def _exchange(self, final: bool) -> tuple[Any, Any]:
        if final not in self._exchanges:
            command = json.dumps({"version": PROTOCOL_VERSION, "final": final}).encode()
            writer, reader = self._client.do_exchange(flight.FlightDescriptor.for_command(command))
            writer.begin(pa.schema([("input_ids", pa.list_(pa.int32()))]))
            self._exchanges[final] = writer, reader
        return self._exchanges[final]

    def _read_answer(self, reader: Any, *, num_tokens: int, final: bool) -> Taps:
        parts: dict[str, torch.Tensor] = {}
        done = 0
        while True:
            chunk = reader.read_chunk()
            if chunk.data is None:
                message = json.loads(chunk.app_metadata.to_pybytes())
                if "error" in message:
                    raise RequestRefused(f"{self._address} refused a request: {message['error']}")
                if done != num_tokens:
                    raise OSError(f"{self._address}: {done} of {num_tokens} tokens answered")
                return Taps(parts["hidden"], parts["final"] if final else None)
            rows = chunk.data.num_rows
            for name, column in zip(chunk.data.schema.names, chunk.data.columns, strict=True):
                width = column.type.byte_width // 2
                values = np.frombuffer(column.buffers()[1], dtype=np.int16)
                values = values[column.offset * width : (column.offset + rows) * width]
                if name not in parts:
                    parts[name] = torch.empty(num_tokens, width, dtype=torch.bfloat16)
                parts[name].view(torch.int16).numpy()[done : done + rows] = values.reshape(rows, -1)
            done += rows
