"""Hidden states for the trainer: computed beside it, or served over Arrow Flight. One interface.

The protocol. Action `describe` answers JSON (`Description`), `stats` what the server
has done. DoExchange with the command
{"version": 1, "final": false} takes one record batch a request: column `input_ids: list<int32>`, a
row a document, app_metadata the request's id. The answer is one or more batches with the same
app_metadata, columns `hidden: fixed_size_binary(L*H*2)` and, with final,
`final: fixed_size_binary(H*2)`, a row a token, little-endian bfloat16; then a message without a
batch, app_metadata {"id", "end": true}. A request that cannot be answered gets {"id", "error"}
instead and the stream lives on. Requests are computed as they come, never merged or split, so
served and colocated hidden states are the same bits on the same kind of device.
"""

import dataclasses
import json
import os
import ssl
from collections.abc import Iterator, Sequence
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
from common.target_files import embedding_fingerprint

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its errors reach us as exceptions anyway

PROTOCOL_VERSION = 1
ANSWER_BYTES = 2_000_000  # of one record batch: larger ones travel at half the speed
MAX_ID_BYTES = 256  # of a request's id, which is sent back with each batch of the answer
MAX_TOKEN_BYTES, SPARE_BYTES = 16, 65_536  # of a request: an id, an offset, bits for nulls
# of a description: which may differ between servers that give the same hidden states
FREE_FACTS = ("target", "max_tokens_per_request")


@dataclass(frozen=True)
class Description:
    """What a source of hidden states serves; `layers` are output ids (hidden_states[i + 1])."""

    version: int
    target: str
    weights_fingerprint: str
    embedding_sha256: str
    layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    dtype: str
    max_tokens_per_request: int
    max_tokens_per_batch: int
    final: bool

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Description":
        """Raises UserError for an answer of another protocol version, or of another program."""
        try:
            facts = json.loads(data)
            version = facts["version"]
            if version == PROTOCOL_VERSION:
                return cls(**{**facts, "layers": tuple(facts["layers"])})
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                "this is no description of hidden states as this checkout knows it: run both sides "
                "from the same checkout"
            ) from error
        raise UserError(
            f"the hidden-state server speaks protocol version {version}, not {PROTOCOL_VERSION}: "
            "run both sides from the same checkout"
        )

    def differences(self, other: "Description") -> list[str]:
        """What makes the hidden states of both differ, field by field; empty when nothing does."""
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name} is {mine[name]}, not {others[name]}"
            for name in mine
            if name not in FREE_FACTS and mine[name] != others[name]
        ]


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
            embedding_sha256=embedding_fingerprint(target.embedding),
            layers=target.layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            dtype=str(target.dtype).removeprefix("torch."),
            max_tokens_per_request=max_tokens_per_request,
            max_tokens_per_batch=target.max_tokens,
            final=target.final,
        )

    def submit(self, documents: Sequence[np.ndarray], *, final: bool = False) -> Future[Taps]:
        answer: Future[Taps] = Future()
        answer.set_result(self.compute(documents, final=final))
        return answer

    def compute(self, documents: Sequence[np.ndarray], *, final: bool) -> Taps:
        """The taps, rounded to bfloat16. Raises ValueError for a request that is not allowed."""
        check_size(sum(map(len, documents)), self.description.max_tokens_per_request)
        return self.target.forward(documents, final=final, dtype=torch.bfloat16)

    def close(self) -> None:
        pass


def check_size(tokens: int, max_tokens: int) -> None:
    """Raises ValueError for a request of more tokens than are allowed."""
    if tokens > max_tokens:
        raise ValueError(
            f"{tokens} tokens in one request; at most {max_tokens} (--max-tokens-per-request)"
        )


def read_command(descriptor: Any) -> bool:
    """Whether a DoExchange wants final states too. Raises FlightServerError for other commands."""
    try:
        command = json.loads(descriptor.command)
        version, final = command["version"], command.get("final", False)
        if not isinstance(final, bool):
            raise TypeError(final)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise flight.FlightServerError('the command must be {"version": 1, "final": …}') from error
    if version != PROTOCOL_VERSION:
        raise flight.FlightServerError(f"protocol version {version}, this is {PROTOCOL_VERSION}")
    return final


def read_documents(batch: pa.RecordBatch | None, *, max_tokens: int) -> list[np.ndarray]:
    """A request's documents, int32 ids. Raises ValueError for a batch that is no request."""
    if batch is None or batch.schema.names != ["input_ids"]:
        raise ValueError("a request is one batch with the column input_ids: list<int32>")
    column = batch.column(0)
    if column.type != pa.list_(pa.int32()):
        raise ValueError(f"input_ids must be list<int32> without nulls, not {column.type}")
    check_size(len(column), max_tokens)  # a document has a token at least
    size, most = batch.get_total_buffer_size(), MAX_TOKEN_BYTES * max_tokens + SPARE_BYTES
    if size > most:
        raise ValueError(f"{size} bytes in one request; at most {most}")
    batch.validate(full=True)  # offsets that do not rise, buffers that end too early
    if column.null_count or column.values.null_count:
        raise ValueError("input_ids must be list<int32> without nulls, and holds null tokens")
    offsets = column.offsets.to_numpy()
    check_size(int(offsets[-1] - offsets[0]), max_tokens)
    values = column.values.to_numpy()
    return [values[start:end] for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


def read_id(chunk: Any) -> bytes:
    """A request's id. Raises ValueError for one that is longer than MAX_ID_BYTES."""
    if not chunk.app_metadata:
        return b""
    if chunk.app_metadata.size > MAX_ID_BYTES:
        raise ValueError(
            f"app_metadata of {chunk.app_metadata.size} bytes: a request's id has {MAX_ID_BYTES} "
            "at most"
        )
    return chunk.app_metadata.to_pybytes()


def answer_schema(have: Description, *, final: bool) -> pa.Schema:
    """Of the batches of an answer."""
    fields = [("hidden", pa.binary(len(have.layers) * have.hidden_size * 2))]
    if final:
        fields.append(("final", pa.binary(have.hidden_size * 2)))
    return pa.schema(fields)


def answer_batches(taps: Taps) -> Iterator[pa.RecordBatch]:
    """Taps on the CPU in batches of about ANSWER_BYTES, which share their memory."""
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


def read_secret(path: Path | None) -> bytes | None:
    """The bytes of a token or certificate file; None without one. Raises UserError."""
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"token or certificate {path}: {error.strerror}") from error
    if not secret:
        raise UserError(f"token or certificate {path}: is empty")
    return secret


def read_certificates(path: Path | None) -> bytes | None:
    """PEM certificates to trust; None without a file. Raises UserError."""
    pem = read_secret(path)
    if pem is not None:
        try:
            ssl.create_default_context(cadata=pem.decode())
        except (ssl.SSLError, ValueError) as error:
            raise UserError(f"{path}: holds no PEM certificate") from error
    return pem


def read_server_certificate(
    certificate: Path | None, key: Path | None
) -> list[tuple[bytes, bytes]]:
    """A server's certificate with its key, both PEM; none without files. Raises UserError."""
    if certificate is None or key is None:
        return []
    pair = read_certificates(certificate), read_secret(key)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=lambda: "")  # never asks for one
    except (ssl.SSLError, ValueError) as error:
        raise UserError(
            f"--tls-key {key}: is no PEM key without a password that fits --tls-cert {certificate}"
        ) from error
    assert pair[0] is not None and pair[1] is not None
    return [(pair[0], pair[1])]


def bearer(token: bytes) -> str:
    """The authorization header of a token. Raises UserError for one that no header can carry."""
    # an empty token would let everybody in, and others do not fit into an HTTP header
    if not token or not all(0x20 <= byte < 0x7F for byte in token):
        raise UserError("--token-file: must hold one line of printable ASCII")
    return f"Bearer {token.decode()}"
