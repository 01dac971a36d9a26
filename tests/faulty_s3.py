"""A proxy in front of a real S3 server that misbehaves on purpose, the same way for a seed.

Requests pass unchanged, Host included, so that signatures stay valid. With the given share of
requests it answers 500 or 503 SlowDown, resets the connection before the server sees the request
or after it did (lost), cuts the answer's body half-way, with its length announced (cut and
cut_reset), without (cut_unsized) or as whole chunks (cut_chunked), or delays. The same request
meets at most three faults in a row, so that a client that retries always succeeds. Rules answer for
the server, such as `delete:403:AccessDenied`.
By hand: python -m tests.faulty_s3 --upstream http://127.0.0.1:9000
"""

import argparse
import collections
import contextlib
import json
import random
import re
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from tests.servers import S3Server, free_port, serving

KINDS = (
    "error500",
    "slowdown",
    "reset",
    "lost",
    "cut",
    "cut_reset",
    "cut_unsized",
    "cut_chunked",
    "delay",
)
FAULTS_IN_A_ROW = 3
COPY_BYTES = 1_000_000


@contextlib.contextmanager
def faulty(
    server: S3Server,
    *,
    seed: int = 0,
    share: float = 0.1,
    kinds: Sequence[str] = KINDS,
    rules: Sequence[str] = (),
    expire_after: int | None = None,
    bytes_per_s: int | None = None,
    refuse_checksums: bool = False,
    log: Path | None = None,
    port: int | None = None,
) -> Iterator[str]:
    """The endpoint URL of a proxy process in front of `server`; the flags of the same names."""
    port = port or free_port()
    command = [
        sys.executable, "-m", "tests.faulty_s3", "--upstream", server.endpoint_url,
        "--port", str(port), "--seed", str(seed), "--share", str(share), "--kinds", *kinds,
    ]  # fmt: skip
    for rule in rules:
        command += ["--rule", rule]
    for flag, value in (("expire-after", expire_after), ("bytes-per-s", bytes_per_s), ("log", log)):
        command += [] if value is None else [f"--{flag}", str(value)]
    command += ["--refuse-checksums"] if refuse_checksums else []
    with serving(command, port) as proxy:
        yield proxy.endpoint_url


def requests_of(log: Path) -> list[dict[str, Any]]:
    """What the proxy noted of each: method, target, range, access_key, amz (headers), fault."""
    return [json.loads(line) for line in log.read_text().splitlines()]


@dataclass
class Message:
    """The first line and headers of a request or an answer."""

    first: str
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def without(self, *names: str) -> "Message":
        kept = [(key, value) for key, value in self.headers if key.lower() not in names]
        return Message(self.first, kept)

    def to_bytes(self) -> bytes:
        lines = [self.first, *(f"{key}: {value}" for key, value in self.headers)]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")


def read_message(stream: BinaryIO) -> Message | None:
    first = stream.readline()
    if not first:
        return None
    headers = []
    while (line := stream.readline()) not in (b"\r\n", b"\n", b""):
        key, _, value = line.decode("latin-1").partition(":")
        headers.append((key, value.strip()))
    return Message(first.decode("latin-1").rstrip(), headers)


def read_body(stream: BinaryIO, head: Message, *, until_closed: bool) -> Iterator[bytes]:
    """A body's bytes as they come; chunked framing is taken off."""
    if "chunked" in head.get("transfer-encoding"):
        while size := int(stream.readline().split(b";")[0], 16):
            yield stream.read(size)
            stream.readline()
        while stream.readline() not in (b"\r\n", b""):
            pass
        return
    length = head.get("content-length")
    left = int(length) if length else 2**63 if until_closed else 0
    while left and (block := stream.read1(min(left, COPY_BYTES))):  # type: ignore[attr-defined]
        left -= len(block)
        yield block


@dataclass
class Behaviour:
    """What the proxy does to requests; `decide` is the only thing with a state."""

    options: argparse.Namespace
    lock: threading.Lock = field(default_factory=threading.Lock)
    tries: collections.Counter[str] = field(default_factory=collections.Counter)
    in_a_row: collections.Counter[str] = field(default_factory=collections.Counter)
    calls: int = 0
    first_access_key: str = ""

    def decide(self, request: Message) -> str:
        """The fault for this request, or ""; a rule's answer as STATUS:CODE:XML."""
        with self.lock:
            fault = self._fixed(request) or self._drawn(request)
        if self.options.log:
            self._note(request, fault)
        return fault

    def _fixed(self, request: Message) -> str:
        self.calls += 1
        self.first_access_key = self.first_access_key or access_key(request)
        expires = self.options.expire_after
        if (
            expires is not None
            and self.calls > expires
            and access_key(request) == self.first_access_key
        ):
            return "400:ExpiredToken:"
        if self.options.refuse_checksums and checksum_headers(request):
            return "400:InvalidArgument:"
        for rule in self.options.rule:
            operation, _, answer = rule.partition(":")
            if operation in ("all", operation_of(request)):
                return answer if answer.count(":") >= 2 else f"{answer}:"
        return ""

    def _drawn(self, request: Message) -> str:
        # A resumed read keeps its end, so it counts as the same request.
        method, target, _ = request.first.split(" ")
        target = re.sub(r"uploadId=[^&]*", "", target)  # differs from run to run
        name = f"{method} {target} {request.get('range').rpartition('-')[2]}"
        self.tries[name] += 1
        draw = random.Random(f"{self.options.seed} {name} {self.tries[name]}")
        hit = draw.random() < self.options.share
        if not hit or not self.options.kinds or self.in_a_row[name] >= FAULTS_IN_A_ROW:
            self.in_a_row[name] = 0
            return ""
        self.in_a_row[name] += 1
        return draw.choice(self.options.kinds)

    def _note(self, request: Message, fault: str) -> None:
        method, target, _ = request.first.split(" ")
        line = json.dumps(
            {
                "method": method,
                "target": target,
                "range": request.get("range"),
                "access_key": access_key(request),
                "amz": {
                    key.lower(): text for key, text in request.headers if "x-amz-" in key.lower()
                },
                "fault": fault,
            }
        )
        with self.lock, self.options.log.open("a") as file:
            file.write(f"{line}\n")


def access_key(request: Message) -> str:
    found = re.search(r"Credential=([^/]+)/", request.get("authorization"))
    return found[1] if found else ""


def checksum_headers(request: Message) -> list[str]:
    """The headers by which a store without checksum support is upset."""
    upsetting = ("x-amz-checksum-", "x-amz-sdk-checksum-algorithm", "x-amz-trailer")
    found = [key for key, _ in request.headers if key.lower().startswith(upsetting)]
    if "aws-chunked" in request.get("content-encoding"):
        found.append("aws-chunked")
    return found


def operation_of(request: Message) -> str:
    """put (create, parts and completion too), get, list or delete."""
    method, target, _ = request.first.split(" ")
    if method in ("PUT", "POST"):
        return "put"
    if method == "DELETE":
        return "delete"
    return "get" if urlsplit(target).path.strip("/").count("/") else "list"


class Connection(socketserver.BaseRequestHandler):
    """One client's connection: a request at a time, each through a connection of its own."""

    server: "Proxy"

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream: BinaryIO = self.request.makefile("rb", buffering=COPY_BYTES)
        with contextlib.suppress(OSError), self.stream:
            while (request := read_message(self.stream)) and self._exchange(request):
                pass

    def _exchange(self, request: Message) -> bool:
        """Answer one request; True when the connection can carry another."""
        fault = self.server.behaviour.decide(request)
        if fault == "delay":
            time.sleep(random.Random(request.first).uniform(0.05, 0.5))
        answer = {"error500": "500:InternalError:", "slowdown": "503:SlowDown:"}.get(fault, fault)
        if ":" in answer:
            return self._answer_instead(request, answer)
        if fault == "reset":
            return self._reset()
        with socket.create_connection(self.server.upstream) as upstream:
            self._send_request(request, upstream)
            with upstream.makefile("rb", buffering=COPY_BYTES) as stream:
                head = read_message(stream)
                if head is None or fault == "lost":
                    return self._reset()
                return self._send_answer(request, head, stream, fault)

    def _answer_instead(self, request: Message, answer: str) -> bool:
        if not request.get("expect"):
            for _ in read_body(self.stream, request, until_closed=False):
                pass
        status, code, more = answer.split(":", 2)
        body = f"<Error><Code>{code}</Code><Message>by the proxy</Message>{more}</Error>".encode()
        fields = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        head = Message(f"HTTP/1.1 {status} Fault", [*fields, ("Connection", "close")])
        with_body = not request.first.startswith("HEAD ")
        self.request.sendall(head.to_bytes() + (body if with_body else b""))
        return False

    def _reset(self) -> bool:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    def _send_request(self, request: Message, upstream: socket.socket) -> None:
        if request.get("expect"):
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunked = "chunked" in request.get("transfer-encoding")
        upstream.sendall(request.without("expect").to_bytes())
        for block in self._slowly(read_body(self.stream, request, until_closed=False)):
            upstream.sendall(as_chunk(block) if chunked else block)
        upstream.sendall(as_chunk(b"") if chunked else b"")

    def _send_answer(self, request: Message, head: Message, stream: BinaryIO, fault: str) -> bool:
        status = head.first.split(" ")[1]
        if request.first.startswith("HEAD ") or status in ("204", "304"):
            self.request.sendall(head.to_bytes())
            return head.get("connection").lower() != "close"
        body = read_body(stream, head, until_closed=True)
        if fault.startswith("cut"):
            return self._send_cut(head, b"".join(body), fault)
        sized = bool(head.get("content-length"))
        head = head if sized else head.without("transfer-encoding")
        head.headers += [] if sized else [("Connection", "close")]
        self.request.sendall(head.to_bytes())
        for block in self._slowly(body):
            self.request.sendall(block)
        return sized and head.get("connection").lower() != "close"

    def _send_cut(self, head: Message, body: bytes, fault: str) -> bool:
        half = body[: len(body) // 2]
        if fault in ("cut", "cut_reset"):
            self.request.sendall(head.to_bytes() + half)
            if fault == "cut_reset" and body:
                time.sleep(0.05)  # a reset throws away what the client has not read yet
                return self._reset()
            return not body
        head = head.without("content-length", "transfer-encoding", "connection")
        if fault == "cut_unsized":
            head.headers.append(("Connection", "close"))
            self.request.sendall(head.to_bytes() + half)
            return False
        head.headers.append(("Transfer-Encoding", "chunked"))
        chunks = (as_chunk(half) if half else b"") + as_chunk(b"")
        self.request.sendall(head.to_bytes() + chunks)
        return True

    def _slowly(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        rate = self.server.behaviour.options.bytes_per_s
        for block in blocks:
            if rate:
                time.sleep(len(block) / rate)
            yield block


def as_chunk(block: bytes) -> bytes:
    return f"{len(block):x}\r\n".encode() + block + b"\r\n"


class Proxy(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", options.port), Connection)
        upstream = urlsplit(options.upstream)
        self.upstream = (upstream.hostname, upstream.port)
        self.behaviour = Behaviour(options)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        # The base class's shutdown() would send a FIN where a reset is wanted.
        request.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True, help="the real server's URL")
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.1, help="of requests that meet a fault")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--rule", action="append", default=[], help="(put|get|list|delete|all):STATUS:CODE[:XML]"
    )
    parser.add_argument(
        "--expire-after", type=int, help="calls before the first access key seen is ExpiredToken"
    )
    parser.add_argument("--bytes-per-s", type=int, help="speed limit of each connection")
    parser.add_argument("--refuse-checksums", action="store_true")
    parser.add_argument("--log", type=Path, help="a JSON line for each request")
    options = parser.parse_args()
    with Proxy(options) as proxy:
        print(f"http://127.0.0.1:{options.port} -> {options.upstream}", file=sys.stderr)
        proxy.serve_forever()


if __name__ == "__main__":
    main()
