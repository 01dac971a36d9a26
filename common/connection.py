"""A connection to one hidden-state server: what it serves, and why it cannot be reached.

Each failure is a line that says what to do: a token, a certificate, or a server that is not there
(yet). The requests for hidden states themselves are common/client.py's.
"""

import json
import re
import socket
import ssl
from typing import Any

import pyarrow as pa
from pyarrow import flight

from common.run import UserError
from common.wire import Description, bearer

DESCRIBE_TIMEOUT_S = 10.0
# what OpenSSL says in a failed handshake, and what a person has to do; no later try can help
TLS_FLAG = "--tls-root-certs (with --ping --tls-cert)"
TLS_ERRORS = {
    "certificate verify failed": f"its certificate is not the one of {TLS_FLAG}",
    "wrong version number": f"it does not speak TLS: leave out {TLS_FLAG}",
}
TLS_PROBE_S = 2.0


class ServerUnavailable(UserError):
    """Nothing answers at an address (yet)."""


def describe(
    address: str,
    *,
    token: bytes | None = None,
    tls_root_certs: bytes | None = None,
    timeout_s: float = DESCRIBE_TIMEOUT_S,
) -> Description:
    """Ask a server what it serves. Raises ServerUnavailable or UserError, one line each."""
    with connect(address, token, tls_root_certs) as client:
        has_tls = tls_root_certs is not None
        return describe_on(client, address, has_tls=has_tls, timeout_s=timeout_s)


def describe_on(
    client: flight.FlightClient,
    address: str,
    *,
    has_tls: bool,
    timeout_s: float = DESCRIBE_TIMEOUT_S,
) -> Description:
    """The same on a connection that stays."""
    answer = _act(client, "describe", address, has_tls=has_tls, timeout_s=timeout_s)
    try:
        return Description.from_json(answer)
    except UserError as error:
        raise UserError(f"{address}: {error}") from error


def server_stats(
    address: str, *, token: bytes | None = None, tls_root_certs: bytes | None = None
) -> dict[str, float]:
    """What a server has done so far. Raises ServerUnavailable or UserError, one line each."""
    with connect(address, token, tls_root_certs) as client:
        has_tls = tls_root_certs is not None
        answer = _act(client, "stats", address, has_tls=has_tls, timeout_s=DESCRIBE_TIMEOUT_S)
        return json.loads(answer)


def _act(
    client: flight.FlightClient, action: str, address: str, *, has_tls: bool, timeout_s: float
) -> bytes:
    try:
        options = flight.FlightCallOptions(timeout=timeout_s)
        results = list(client.do_action(flight.Action(action, b""), options))
        return results[0].body.to_pybytes()
    except flight.FlightUnauthenticatedError as error:
        raise UserError(f"{address} refuses the token: give its --token-file") from error
    except (pa.ArrowException, OSError, IndexError) as error:
        problem = _tls_problem(address, error, has_tls=has_tls)
        if problem is not None:
            raise UserError(f"{address}: {problem}") from error
        raise ServerUnavailable(
            f"no hidden-state server answers at {address} ({reason_of(error)})"
        ) from error


def _tls_problem(address: str, error: BaseException, *, has_tls: bool) -> str | None:
    """What is wrong with the encryption, when that is why a call failed."""
    for sign, meaning in TLS_ERRORS.items():
        if sign in str(error):
            return meaning
    # a server that wants TLS says nothing to those who come without
    if not has_tls and "Socket closed" in str(error) and _speaks_tls(address):
        return f"it speaks TLS: give its certificate as {TLS_FLAG}"
    return None


def _speaks_tls(address: str) -> bool:
    place = re.fullmatch(r"(?:.*://)?\[?(.*?)\]?:(\d+)", address)
    if place is None:
        return False
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        plain = socket.create_connection((place[1], int(place[2])), timeout=TLS_PROBE_S)
        with plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def connect(address: str, token: bytes | None, tls_root_certs: bytes | None) -> flight.FlightClient:
    """A client of a server, which is not contacted yet. Raises UserError for an odd address."""
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
        self._header = {"authorization": bearer(token)}

    def start_call(self, info: Any) -> flight.ClientMiddleware:
        return _TokenHeader(self._header)


class _TokenHeader(flight.ClientMiddleware):
    def __init__(self, header: dict[str, str]) -> None:
        super().__init__()
        self._header = header

    def sending_headers(self) -> dict[str, str]:
        return self._header


def reason_of(error: BaseException) -> str:
    """The cause of an error of gRPC in a few words, without its inner monologue."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = line.partition(" gRPC client debug context")[0].partition(". Detail:")[0]
    return line.rpartition(": ")[2] if "last error" in line else line
