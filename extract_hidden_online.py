"""Stage 2: serve the frozen target's hidden states to trainers, live.

Reads   a causal language model (--target, a folder or hub id) and token ids from trainers.
Writes  nothing: tokens in, hidden states of the tapped layers out, over Arrow Flight. A hidden
        state depends on the target, the layers and the request alone, so a server keeps no state
        and can be restarted at any time; trainers wait and ask again. With --output it writes the
        hidden states of a dataset's first rows to files instead, for small runs.
Prints  the address of each server on stdout, one a line, when it is ready.

  python extract_hidden_online.py --target ./Qwen3.6-27B                  # every GPU, ports 8815...
  python extract_hidden_online.py --target ./Qwen3.6-27B --check          # are the taps right?
  python extract_hidden_online.py --ping 127.0.0.1:8815                   # what does it serve?
  python extract_hidden_online.py --target ./Qwen3.6-27B --data s3://bucket/tokens/ \\
      --output ./hidden --limit 200                                       # files for small runs

Exit codes: 0 done, 1 failed, 2 usage, 143 after SIGTERM, 130 after Ctrl-C.
"""

import argparse
import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from common import run
from common.connection import describe, server_stats
from common.lifetime import Waiting
from common.server import HiddenStateServer
from common.shards import TokenizedDataset
from common.store import add_store_arguments, open_store
from common.stored import StoredPlan
from common.storing import (
    check_room,
    committed_bytes,
    first_rows,
    only_writer,
    settle_stored_plan,
    token_bytes,
    write_hidden_states,
)
from common.target import MAX_BATCH_TOKENS, Target
from common.target_files import default_target_layers, target_facts
from common.timing import peak_memory_bytes
from common.wire import (
    ColocatedHiddenStates,
    bearer,
    read_certificates,
    read_secret,
    read_server_certificate,
)
from common.workfolder import work_folder

STATUS_LOOKS = 50  # of 0.2 s: what the rates are taken over
SAMPLE_TOKENS = 2048  # of the forward that --check times
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
        "--max-tokens-per-request", type=run.positive_int, default=16_384, help="bound of memory"
    )
    group.add_argument(
        "--max-tokens-per-batch",
        type=run.positive_int,
        default=MAX_BATCH_TOKENS,
        help="of one forward, padding included; all servers of a trainer should agree",
    )
    group.add_argument("--token-file", type=Path, help="secret that trainers must know")
    group.add_argument("--tls-cert", type=Path, help="PEM certificate")
    group.add_argument("--tls-key", type=Path, help="PEM key")
    group = parser.add_argument_group("writing instead of serving")
    group.add_argument("--data", help="stage 1's output, s3:// or a folder")
    group.add_argument("--output", help="where its hidden states are written, s3:// or a folder")
    group.add_argument("--limit", type=run.positive_int, help="its first rows, so many")
    group.add_argument("--work-dir", type=Path, help="local space for one file [/tmp]")
    group.add_argument(
        "--data-timeout",
        type=run.non_negative_float,
        default=300.0,
        help="seconds to wait for plan and shards",
    )
    add_store_arguments(group)
    group = parser.add_argument_group("instead of serving")
    group.add_argument("--check", action="store_true", help="compare taps with the model, and exit")
    group.add_argument("--ping", metavar="HOST:PORT", help="print what a server serves, and exit")
    group.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # ends when that process does
    args = parser.parse_args(argv)
    try:
        return resolve(args)
    except run.UsageError as error:
        parser.error(str(error))


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Check the flags against each other and settle the ones left open."""
    if args.ping is not None:
        split_address(args.ping.rpartition("://")[2], "--ping")
        return args
    if not args.target:
        raise run.UsageError("the following arguments are required: --target")
    args.host, args.port = split_address(args.listen, "--listen")
    args.address = args.listen.rpartition(":")[0]
    if not is_loopback(args.host) and not args.token_file:
        raise run.UsageError(
            f"--listen {args.listen}: beyond this machine a --token-file is needed, so that not "
            "everybody can use the target"
        )
    if args.check and args.data:
        raise run.UsageError("--check and --data exclude each other")
    if args.layers and len(set(args.layers)) != len(args.layers):
        raise run.UsageError(f"--layers {','.join(map(str, args.layers))}: must be distinct")
    if len({bool(flag) for flag in (args.data, args.output, args.limit)}) > 1:
        raise run.UsageError("--data, --output and --limit must be given together")
    if bool(args.tls_cert) != bool(args.tls_key):
        raise run.UsageError("--tls-cert and --tls-key must be given together")
    if args.devices is None:
        count = torch.cuda.device_count()
        args.devices = ",".join(f"cuda:{index}" for index in range(count)) or "cpu"
    args.devices = args.devices.split(",")
    for device in args.devices:
        check_device(device)
    if args.port and args.port + len(args.devices) - 1 > 65_535:
        raise run.UsageError(
            f"--listen {args.listen}: {len(args.devices)} devices need ports up to "
            f"{args.port + len(args.devices) - 1}, and the last one is 65535"
        )
    if args.dtype == "auto":
        args.dtype = "float32" if args.devices[0] == "cpu" else "bfloat16"
    return args


def split_address(text: str, flag: str) -> tuple[str, int]:
    """The parts of HOST:PORT or [IPV6]:PORT. Raises UsageError that names the flag."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in host and host != f"[{bare}]":
        raise run.UsageError(f"{flag} {text}: an address of IPv6 needs brackets: [{host}]:{port}")
    if not bare or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise run.UsageError(f"{flag} {text}: must be HOST:PORT")
    return bare, int(port)


def check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise run.UsageError(f"--devices {name}: not a device like cuda:0 or cpu") from error
    if device.type not in ("cpu", "cuda"):
        raise run.UsageError(f"--devices {name}: not a device like cuda:0 or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise run.UsageError(f"--devices {name}: {torch.cuda.device_count()} GPUs are visible here")


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def load_target(args: argparse.Namespace, device: str, log: Any) -> Target:
    """The frozen target on its device, up to the highest tap unless --final; says what it is."""
    depth = target_facts(args.target).num_layers
    layers = args.layers or default_target_layers(depth)
    began = time.monotonic()
    target = Target.load(
        args.target,
        layers=layers,
        dtype=getattr(torch, args.dtype),
        device=torch.device(device),
        final=args.final,
        head=False,
        max_tokens=args.max_tokens_per_batch,
    )
    kernels = {k: "yes" if v else "no, the reference" for k, v in target.fast_kernels().items()}
    found = run.format_fields(kernels) if kernels else "none needed"
    log.info(
        f"target={target.name} class={target.class_name} device={device} "
        f"loaded_s={time.monotonic() - began:.1f} weights={run.format_bytes(target.weight_bytes)} "
        f"peak_host_memory={run.format_bytes(peak_memory_bytes())}"
    )
    log.info(
        f"taps={','.join(map(str, layers))} of layers 0 to {depth - 1}: the output of layer i, "
        "compared with the model's own hidden_states[i + 1]"
    )
    log.info(f"batching=padded on the right, documents are never packed; kernels: {found}")
    return target


def serve(args: argparse.Namespace, log: Any) -> int:
    """Serve one device until SIGTERM or Ctrl-C."""
    began, started = time.monotonic(), run.utc_now()
    check_port(args)
    token = read_token(args.token_file)
    certificates = read_server_certificate(args.tls_cert, args.tls_key)
    target = load_target(args, args.devices[0], log)
    hidden_states = ColocatedHiddenStates(
        target, max_tokens_per_request=args.max_tokens_per_request
    )
    scheme = "grpc+tls" if certificates else "grpc"
    try:
        server = HiddenStateServer(
            f"{scheme}://{args.address}:{args.port}",
            hidden_states,
            token=token,
            tls_certificates=certificates,
        )
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise run.UserError(f"--listen {args.listen}: cannot bind there ({reason})") from error
    received: list[int] = []  # later signals change nothing: the end is bounded by GRACE_S
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, frame: received.append(number))
    log.info(f"serving {hidden_states.description.to_json().decode()}")
    print(f"{args.address}:{server.port}", flush=True)
    with contextlib.closing(run.Progress(log, total=None, unit="tok")) as progress:
        # Flight's own wait does not wake for Python's signal handlers, and signal.pause() may miss
        # a signal that comes just before it
        status = Status(server)
        while not received:
            time.sleep(0.2)
            tokens, fields = status.since_last()
            progress.update(tokens, **fields)
    ended = server.stop(grace_s=GRACE_S)
    summarize(args, server.stats(), log, started=started, wall_s=time.monotonic() - began)
    code = run.EXIT_INTERRUPTED if received[0] == signal.SIGINT else run.EXIT_TERMINATED
    if not ended:
        # a trainer holds a stream open: the interpreter's own end would wait for it for ever
        sys.stdout.flush()
        os._exit(code)
    return code


def read_token(path: Path | None) -> bytes | None:
    """The token of a file, found fit for a header before anything is loaded."""
    token = read_secret(path)
    if token is not None:
        bearer(token)
    return token


class Status:
    """What a server did since it was asked last, as a number of tokens and fields for people."""

    def __init__(self, server: HiddenStateServer) -> None:
        self._server = server
        self._history: deque[dict[str, float]] = deque([server.stats()], maxlen=STATUS_LOOKS)

    def since_last(self) -> tuple[float, dict[str, str]]:
        last, past, now = self._history[-1], self._history[0], self._server.stats()
        self._history.append(now)
        seconds = max(now["up_s"] - past["up_s"], 1e-9)
        fields = {
            "requests": f"{now['requests']:,.0f}",
            "tok/s_last_10s": run.format_count((now["tokens"] - past["tokens"]) / seconds),
            "busy": f"{min(1.0, (now['busy_s'] - past['busy_s']) / seconds):.0%}",
            "queue": f"{now['queue']:.0f}",
            "streams": f"{now['streams']:.0f}",
        }
        return now["tokens"] - last["tokens"], fields


def check_port(args: argparse.Namespace) -> None:
    """Refuse a port that is taken before minutes are spent on loading the target."""
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        with socket.create_server((args.host, args.port), family=family):
            pass
    except OSError as error:
        raise run.UserError(
            f"--listen {args.listen}: cannot bind there ({error.strerror or error}); choose "
            "another port, or end what listens there"
        ) from error


def summarize(
    args: argparse.Namespace,
    stats: Mapping[str, float],
    log: Any,
    *,
    started: str,
    wall_s: float,
) -> None:
    """The facts of run.json as one line, since there is no output to put it beside; the table."""
    counts = {"requests": int(stats["requests"]), "tokens": int(stats["tokens"])}
    facts = run.run_facts(settings=vars(args), started=started, counts=counts)
    log.info(f"run {json.dumps(facts, sort_keys=True)}")
    run.print_table(
        "Hidden states served",
        [
            ("target", args.target),
            ("device", args.devices[0]),
            ("requests", f"{counts['requests']:,}"),
            ("tokens", run.format_count(counts["tokens"])),
            ("device at work", f"{stats['busy_s'] / stats['up_s']:.0%} of the time"),
            ("time", run.format_duration(wall_s)),
        ],
        file=sys.stderr,
    )


def serve_devices(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """One server process a device, on consecutive ports; all end when one does."""
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for index, device in enumerate(args.devices):
            port = args.port + index if args.port else 0
            own = ["--devices", device, "--listen", f"{args.address}:{port}"]
            own += ["--parent", str(os.getpid())]
            child = subprocess.Popen([sys.executable, __file__, *argv, *own])
            children[f"{device} (server {index + 1})"] = child
        while True:
            for name, child in children.items():
                if child.poll() is not None:
                    raise run.UserError(
                        f"the process of {name} ended with exit code {child.returncode}: the "
                        "others are stopped too"
                    )
            time.sleep(0.2)
    finally:
        for child in children.values():
            child.terminate()
        for child in children.values():
            child.wait()


def end_with_parent(parent: int) -> None:
    """Have this process stop, as by SIGTERM, when the one that started it is there no more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def ping(args: argparse.Namespace) -> int:
    """Print what a server serves and what it has done."""
    token, certificates = read_token(args.token_file), read_certificates(args.tls_cert)
    have = describe(args.ping, token=token, tls_root_certs=certificates)
    stats = server_stats(args.ping, token=token, tls_root_certs=certificates)
    print(json.dumps({**json.loads(have.to_json()), "stats": stats}, indent=2))
    return 0


def check(target: Target, device: str) -> None:
    """Print the memory and speed of a target whose taps have been found right."""
    documents = [np.zeros(SAMPLE_TOKENS, np.int32)]
    target.forward(documents)  # the first forward compiles and fills caches
    began = time.monotonic()
    taps = target.forward(documents)
    taps.hidden[-1, -1].item()  # a GPU is done only now
    rate = SAMPLE_TOKENS / (time.monotonic() - began)
    layers = ",".join(map(str, target.layers))
    print(
        f"ok: {device}: the taps of layers {layers} are hidden_states[i + 1]; {target.class_name}, "
        f"weights {run.format_bytes(target.weight_bytes)}, {run.format_count(rate)} tokens/s"
    )


def write(args: argparse.Namespace, log: Any) -> int:
    """Write the hidden states of the first --limit rows of --data to --output."""
    if len(args.devices) > 1:
        log.info(f"writing on {args.devices[0]} alone")
    output = open_store(args.output, endpoint_url=args.endpoint_url)
    with (
        only_writer(args.output),
        work_folder(args.work_dir, prefix="hidden-") as folder,
    ):
        output.check_writable()
        dataset = TokenizedDataset(
            args.data, cache_dir=folder / "data", endpoint_url=args.endpoint_url
        )
        waiting, timeout_s = Waiting(log).for_, args.data_timeout
        data_plan = dataset.wait_for_plan(
            timeout_s=timeout_s, on_wait=waiting("plan.json", timeout_s=timeout_s)
        )
        rows = first_rows(dataset, args.limit, timeout_s=timeout_s, waiting=waiting)
        lengths = [len(row) for row in rows]
        if not lengths:
            raise run.UserError(f"--data {args.data}: has no rows")
        if max(lengths) > args.max_tokens_per_request:
            raise run.UserError(
                f"a row has {max(lengths):,} tokens: give --max-tokens-per-request "
                f"{max(lengths)} or more"
            )
        target = load_target(args, args.devices[0], log)
        hidden_states = ColocatedHiddenStates(
            target, max_tokens_per_request=args.max_tokens_per_request
        )
        tokens = sum(lengths)
        size = tokens * token_bytes(hidden_states.description)
        log.info(
            f"rows={len(lengths):,} tokens={tokens:,} "
            f"hidden states={run.format_bytes(size)} "
            f"({token_bytes(hidden_states.description):,} bytes a token) to {args.output}"
        )
        plan = StoredPlan(hidden_states.description, data_plan.sha256, len(lengths))
        check_room(args.output, max(0, size - committed_bytes(output, plan)), folder)
        settle_stored_plan(output, plan)
        began = time.monotonic()
        with contextlib.closing(run.Progress(log, total=tokens, unit="tok")) as progress:
            write_hidden_states(
                first_rows(dataset, args.limit, timeout_s=args.data_timeout),
                hidden_states,
                output,
                plan,
                folder=folder,
                on_rows=lambda rows, amount: progress.update(amount),
            )
    run.print_table(
        "Hidden states written",
        [
            ("rows", f"{len(lengths):,}"),
            ("tokens", f"{tokens:,}"),
            ("bytes", run.format_bytes(size)),
            ("time", run.format_duration(time.monotonic() - began)),
            ("output", output.uri),
        ],
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.ping is not None:
        return ping(args)
    run.raise_on_signals()
    if args.parent is not None:
        end_with_parent(args.parent)
    log = run.setup_logging("extract", debug=args.debug)
    if args.devices[0] == "cpu":
        torch.set_num_threads(1)  # a second thread makes matrices this small far slower
    run.print_settings(log, vars(args))
    if args.check:
        for device in args.devices:
            check(load_target(args, device, log), device)
        return 0
    if args.data:
        return write(args, log)
    if len(args.devices) > 1:
        return serve_devices(args, argv)
    return serve(args, log)


if __name__ == "__main__":
    run.exit_with(main)
