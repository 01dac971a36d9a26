"""How fast hidden states travel: Arrow Flight on loopback against a raw socket and a memcpy.

One answer is what a target gives for a pack of 4,096 tokens with five taps of 5,120: 210 MB. All in
one run on one machine, so read the ratios: `make bench-wire`.
"""

import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from common import run
from common.client import Request, Stream
from common.connection import connect
from common.server import HiddenStateServer
from common.target import Taps
from common.wire import ColocatedHiddenStates, Description

TOKENS, WIDTH = 4096, 5 * 5120
ANSWER_BYTES = TOKENS * WIDTH * 2
ROUNDS, ANSWERS = 3, 6  # the best of so many rounds of so many answers
GOAL_BYTES_S, GOAL_SOCKET_SHARE = 1e9, 0.65
# dflash-method.md and the model's config: what a target's forward of the reference run makes
TARGET_FLOP_A_TOKEN, GPU_FLOP_S, TOKEN_BYTES = 47.2e9, 400e12, 51_200


class ReadyHiddenStates(ColocatedHiddenStates):
    """Answers any request with the same states at once, so that only the wire takes time."""

    def __init__(self) -> None:
        self.target: Any = type("NoTarget", (), {"device": torch.device("cpu")})
        self.description = Description(
            1, "none", "", "", (0, 1, 2, 3, 4), WIDTH // 5, 128, "bfloat16", TOKENS, TOKENS, False
        )
        self._hidden = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16).fill_(0.5)

    def compute(self, documents: Sequence[np.ndarray], *, final: bool) -> Taps:
        return Taps(self._hidden, None)


def serve_flight(port: Any) -> None:
    server = HiddenStateServer(
        "grpc://127.0.0.1:0", ReadyHiddenStates(), token=None, tls_certificates=[]
    )
    port.value = server.port
    server.wait()


def serve_socket(port: Any) -> None:
    data = memoryview(bytearray(ANSWER_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port.value = server.getsockname()[1]
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer_bytes, args=(connection, data), daemon=True).start()


def answer_bytes(connection: socket.socket, data: memoryview) -> None:
    with connection:
        while connection.recv(1):
            connection.sendall(data)


def flight_stream(port: int) -> Callable[[], None]:
    stream = Stream(connect(f"127.0.0.1:{port}", None, None), "")
    request = Request([np.zeros(TOKENS, np.int32)], False, Future())

    def ask() -> None:
        assert len(stream.ask(request).hidden) == TOKENS

    return ask


def socket_stream(port: int) -> Callable[[], None]:
    connection = socket.create_connection(("127.0.0.1", port))

    def ask() -> None:
        buffer = memoryview(np.empty(ANSWER_BYTES, np.uint8))  # a new one for each, as for tensors
        connection.sendall(b"x")
        have = 0
        while have < ANSWER_BYTES:
            have += connection.recv_into(buffer[have:])

    return ask


def memcpy_stream(port: int) -> Callable[[], None]:
    source = np.ones(ANSWER_BYTES, np.uint8)

    def ask() -> None:
        np.copyto(np.empty(ANSWER_BYTES, np.uint8), source)

    return ask


def rate(make_stream: Callable[[int], Callable[[], None]], port: int, streams: int) -> float:
    """Bytes per second over so many streams at once, the best round."""
    asks = [make_stream(port) for _ in range(streams)]

    def ask_all(ask: Callable[[], None]) -> None:
        for _ in range(ANSWERS):
            ask()

    best = 0.0
    with ThreadPoolExecutor(streams) as pool:
        for _ in range(ROUNDS):
            began = time.monotonic()
            list(pool.map(ask_all, asks))
            best = max(best, ANSWERS * streams * ANSWER_BYTES / (time.monotonic() - began))
    return best


def main() -> int:
    spawn = multiprocessing.get_context("spawn")
    ports = {}
    for name, serve in (("flight", serve_flight), ("socket", serve_socket)):
        port = spawn.Value("i", 0)
        spawn.Process(target=serve, args=(port,), daemon=True).start()
        while not port.value:
            time.sleep(0.1)
        ports[name] = port.value
    memcpy = rate(memcpy_stream, 0, 1)
    raw = {count: rate(socket_stream, ports["socket"], count) for count in (1, 4)}
    ours = {count: rate(flight_stream, ports["flight"], count) for count in (1, 4)}
    needed = GPU_FLOP_S / TARGET_FLOP_A_TOKEN * TOKEN_BYTES

    def line(count: int) -> str:
        return f"{ours[count] / 1e9:.2f} GB/s, {ours[count] / raw[count]:.0%} of a raw socket"

    def goal(met: bool) -> str:
        return "met" if met else "MISSED"

    run.print_table(
        "Hidden states over the wire, answers of 210 MB",
        [
            ("one stream", line(1)),
            ("four streams", line(4)),
            ("raw socket", f"{raw[1] / 1e9:.2f} GB/s, four {raw[4] / 1e9:.2f} GB/s"),
            ("memcpy to new memory", f"{memcpy / 1e9:.2f} GB/s"),
            (
                "a GPU at 400 TFLOP/s makes",
                f"{needed / 1e9:.2f} GB/s (47.2 GFLOP, 51.2 kB a token)",
            ),
            ("goal: 1 GB/s", goal(ours[1] >= GOAL_BYTES_S)),
            ("goal: 65 % of a raw socket", goal(ours[1] >= GOAL_SOCKET_SHARE * raw[1])),
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
