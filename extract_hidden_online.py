"""Stage 2: serve the frozen target's hidden states to trainers, live.

Reads   a causal language model (--target, a folder or hub id) and token ids from trainers.
Writes  nothing: tokens in, hidden states of the tapped layers out, over Arrow Flight. A hidden
        state depends on the target, the layers and the request alone, so a server keeps no state
        and can be restarted at any time; trainers wait and ask again.
Prints  the address of each server on stdout, one a line, when it is ready.

  python extract_hidden_online.py --target ./Qwen3.6-27B                  # every GPU, ports 8815...
  python extract_hidden_online.py --target ./Qwen3.6-27B --check          # are the taps right?
  python extract_hidden_online.py --ping 127.0.0.1:8815                   # what does it serve?

Exit codes: 0 done, 1 failed, 2 usage, 143 after SIGTERM, 130 after Ctrl-C.
"""

import argparse
import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from common import run
from common.target import Target, default_target_layers, target_facts
from common.wire import ColocatedHiddenStates, HiddenStateServer, describe, read_secret

REPORT_EVERY_S = 10.0
GRACE_S = 10.0  # for the requests at hand when the server is told to stop


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = run.make_parser(__doc__)
    group = parser.add_argument_group("target")
    group.add_argument("--target", help="folder or hub id of the target")
    group.add_argument("--layers", type=run.int_list, help="tapped layers [five, evenly spread]")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto: float32 on CPU, bfloat16 on CUDA",
    )
    group.add_argument("--final", action="store_true", help="also serve the last hidden state")
    group = parser.add_argument_group("serving")
    group.add_argument("--listen", default="127.0.0.1:8815", help="HOST:PORT; port 0 picks one")
    group.add_argument("--devices", help="cuda:0,cuda:1 or cpu: a server each [all GPUs]")
    group.add_argument(
        "--max-tokens-per-request", type=run.positive_int, default=65_536, help="bound of memory"
    )
    group.add_argument("--token-file", type=Path, help="secret that trainers must know")
    group.add_argument("--tls-cert", type=Path, help="PEM certificate")
    group.add_argument("--tls-key", type=Path, help="PEM key")
    group = parser.add_argument_group("instead of serving")
    group.add_argument("--check", action="store_true", help="compare taps with the model, and exit")
    group.add_argument("--ping", metavar="HOST:PORT", help="print what a server serves, and exit")
    args = parser.parse_args(argv)
    try:
        return resolve(args)
    except run.UsageError as error:
        parser.error(str(error))


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Check the flags against each other and settle the ones left open."""
    if args.ping:
        return args
    if not args.target:
        raise run.UsageError("the following arguments are required: --target")
    host, _, port = args.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise run.UsageError(f"--listen {args.listen}: must be HOST:PORT")
    args.host, args.port = host, int(port)
    if not is_loopback(host) and not args.token_file:
        raise run.UsageError(
            f"--listen {args.listen}: beyond this machine a --token-file is needed, so that not "
            "everybody can use the target"
        )
    if bool(args.tls_cert) != bool(args.tls_key):
        raise run.UsageError("--tls-cert and --tls-key must be given together")
    if args.devices is None:
        count = torch.cuda.device_count()
        args.devices = ",".join(f"cuda:{index}" for index in range(count)) or "cpu"
    args.devices = args.devices.split(",")
    for device in args.devices:
        check_device(device)
    if args.dtype == "auto":
        args.dtype = "float32" if args.devices[0] == "cpu" else "bfloat16"
    return args


def check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise run.UsageError(f"--devices {name}: not a device like cuda:0 or cpu") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise run.UsageError(f"--devices {name}: {torch.cuda.device_count()} GPUs are visible here")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_target(args: argparse.Namespace, device: str) -> Target:
    """The frozen target on its device, cut after the highest tap unless --final."""
    layers = args.layers or default_target_layers(target_facts(args.target).num_layers)
    return Target.load(
        args.target,
        layers=layers,
        dtype=getattr(torch, args.dtype),
        device=torch.device(device),
        final=args.final,
    )


class Meter:
    """Counts what was served; says so every 10 s in which something was."""

    def __init__(self, log: Any) -> None:
        self._log, self._lock = log, threading.Lock()
        self.requests = self.tokens = self._last_tokens = 0
        self._last_line = time.monotonic()

    def add(self, tokens: int) -> None:
        with self._lock:
            self.requests += 1
            self.tokens += tokens
            now = time.monotonic()
            if now - self._last_line < REPORT_EVERY_S:
                return
            rate = (self.tokens - self._last_tokens) / (now - self._last_line)
            self._last_tokens, self._last_line = self.tokens, now
        self._log.info(
            f"requests={self.requests:,} tokens={run.format_count(self.tokens)} "
            f"tokens/s={run.format_count(rate)}"
        )


def serve(args: argparse.Namespace, log: Any) -> int:
    """Serve one device until SIGTERM or Ctrl-C."""
    began, started = time.monotonic(), run.utc_now()
    token, certificate, key = map(read_secret, (args.token_file, args.tls_cert, args.tls_key))
    target = load_target(args, args.devices[0])
    hidden_states = ColocatedHiddenStates(
        target, max_tokens_per_request=args.max_tokens_per_request
    )
    meter = Meter(log)
    scheme = "grpc+tls" if certificate else "grpc"
    try:
        server = HiddenStateServer(
            f"{scheme}://{args.host}:{args.port}",
            hidden_states,
            token=token,
            tls_certificates=[(certificate, key)] if certificate and key else [],
            on_request=meter.add,
        )
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise run.UserError(f"--listen {args.listen}: cannot bind there ({reason})") from error
    received: list[int] = []  # later signals change nothing: the end is bounded by GRACE_S
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, frame: received.append(number))
    log.info(f"serving {hidden_states.description.to_json().decode()}")
    print(f"{args.host}:{server.port}", flush=True)
    # Flight's own wait does not wake for Python's signal handlers, and signal.pause() may miss a
    # signal that comes just before it
    while not received:
        time.sleep(0.2)
    ended = server.stop(grace_s=GRACE_S)
    summarize(args, meter, log, started=started, wall_s=time.monotonic() - began)
    code = run.EXIT_INTERRUPTED if received[0] == signal.SIGINT else run.EXIT_TERMINATED
    if not ended:
        # a trainer holds a stream open: the interpreter's own end would wait for it for ever
        sys.stdout.flush()
        os._exit(code)
    return code


def summarize(
    args: argparse.Namespace, meter: Meter, log: Any, *, started: str, wall_s: float
) -> None:
    """The facts of run.json as one line, since there is no output to put it beside; the table."""
    counts = {"requests": meter.requests, "tokens": meter.tokens}
    facts = run.run_facts(settings=vars(args), started=started, counts=counts)
    log.info(f"run {json.dumps(facts, sort_keys=True)}")
    run.print_table(
        "Hidden states served",
        [
            ("target", args.target),
            ("device", args.devices[0]),
            ("requests", f"{meter.requests:,}"),
            ("tokens", run.format_count(meter.tokens)),
            ("time", run.format_duration(wall_s)),
        ],
        file=sys.stderr,
    )


def serve_devices(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """One server process a device, on consecutive ports; all end when one does."""
    children = []
    for index, device in enumerate(args.devices):
        port = args.port + index if args.port else 0
        own = ["--devices", device, "--listen", f"{args.host}:{port}"]
        children.append(subprocess.Popen([sys.executable, __file__, *argv, *own]))
    try:
        while all(child.poll() is None for child in children):
            time.sleep(0.2)
        return run.EXIT_FAILED
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.ping:
        have = describe(
            args.ping,
            token=read_secret(args.token_file),
            tls_root_certs=read_secret(args.tls_cert),
        )
        print(json.dumps(json.loads(have.to_json()), indent=2))
        return 0
    run.raise_on_sigterm()
    log = run.setup_logging("extract", debug=args.debug)
    if args.devices[0] == "cpu":
        torch.set_num_threads(1)  # a second thread makes matrices this small far slower
    run.print_settings(log, vars(args))
    if args.check:
        for device in args.devices:
            target = load_target(args, device)
            target.check()
            layers = ",".join(map(str, target.layers))
            print(f"ok: {device}: the taps of layers {layers} are hidden_states[i + 1]")
        return 0
    if len(args.devices) > 1:
        return serve_devices(args, argv)
    return serve(args, log)


if __name__ == "__main__":
    run.exit_with(main)
