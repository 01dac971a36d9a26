"""`make demo`: the whole chain on an embedded example, as a user would run it with a real bucket.

Trains a tiny target (kept under .demo/), lets it answer a few hundred questions, starts an S3
server of its own, and runs pipeline.sh against it. Stage 1 of the pipeline does shard 0; the other
shards are done beside it, as a second machine would, once the trainer has taken its first step.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import boto3
import torch

from common import run
from common.journal import read_metrics
from demo.completions import write_completions
from demo.target import target_folder
from demo.tokenizer import MASK_TOKEN

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
BUCKET = "demo"
NUM_SHARDS = 8
TOKENIZE_FLAGS = (
    f"--num-shards {NUM_SHARDS} --max-length 256 --min-loss-tokens 4 --mask-token {MASK_TOKEN}"
)
EXTRACT_FLAGS = "--layers 0,1,2"
TRAIN_FLAGS = (
    "--layers 0,1,2 --draft-layers 2 --block-size 8 --sliding-window 0 --gamma 4 "
    "--pack-length 256 --global-batch 8 --anchor-ratio 0.125 --learning-rate 4e-3 --epochs 100 "
    "--max-steps 250 --eval-fraction 0.1 --eval-rows 48 --eval-every 50 --save-every 100 "
    "--log-every 25"
)
FIRST_STEP = re.compile(r"^(\S+) INFO train: step=1/")


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.make_parser(__doc__)
    args = parser.parse_args(argv)
    run.raise_on_signals()
    log = run.setup_logging("demo", debug=args.debug)
    torch.set_num_threads(1)  # a second thread makes matrices this small far slower
    began = time.monotonic()
    target = target_folder(WORK, log)
    count = write_completions(target, WORK / "completions", log)
    log.info(f"completions={count} by the target itself, in {WORK / 'completions'}")
    shutil.rmtree(WORK / "run", ignore_errors=True)
    with s3_server(log) as environment:
        upload(WORK / "completions", environment)
        environment |= pipeline_settings(target)
        code, first_step_at = run_pipeline(environment, log)
        if code != 0:
            raise run.UserError(f"pipeline.sh ended with exit code {code}; its log is above")
        records = read_records(environment)
    run.print_table("Demo", summary(target, records, first_step_at, time.monotonic() - began))
    return 0


# ---- the S3 server


@contextlib.contextmanager
def s3_server(log: Any) -> Iterator[dict[str, str]]:
    """moto's server on a free loopback port; yields the environment that points clients at it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, server)
        url = f"http://127.0.0.1:{port}"
        log.info(f"s3={url} bucket={BUCKET}")
        yield {
            **os.environ,
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.terminate()
        server.wait()


def wait_for_port(port: int, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise run.UserError("the demo's S3 server did not start: is moto installed in .venv?")


def client(environment: dict[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )


def upload(folder: Path, environment: dict[str, str]) -> None:
    s3 = client(environment)
    s3.create_bucket(Bucket=BUCKET)
    for path in sorted(folder.iterdir()):
        s3.upload_file(str(path), BUCKET, f"completions/{path.name}")


def read_records(environment: dict[str, str]) -> list[dict[str, Any]]:
    """The commit records of all shards, with the time each was put."""
    s3, records = client(environment), []
    for index in range(NUM_SHARDS):
        answer = s3.get_object(Bucket=BUCKET, Key=f"tokens/shard-{index:05d}.json")
        records.append({**json.loads(answer["Body"].read()), "at": answer["LastModified"]})
    return records


# ---- the pipeline


def pipeline_settings(target: Path) -> dict[str, str]:
    """The variables on top of pipeline.sh."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    return {
        "INPUT": f"s3://{BUCKET}/completions/",
        "DATA": f"s3://{BUCKET}/tokens/",
        "TARGET": str(target),
        "RUN": str(WORK / "run"),
        "LISTEN": listen,
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "TOKENIZE_FLAGS": f"{TOKENIZE_FLAGS} --shards 0:1",
        "EXTRACT_FLAGS": EXTRACT_FLAGS,
        "TRAIN_FLAGS": TRAIN_FLAGS,
    }


def run_pipeline(environment: dict[str, str], log: Any) -> tuple[int, str | None]:
    """Run pipeline.sh, and the rest of stage 1 after the trainer's first step line.

    Returns the exit code and the time of that line.
    """
    first_step_at, others = None, None
    pipeline = subprocess.Popen(
        ["bash", str(ROOT / "pipeline.sh")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in lines(pipeline.stdout):
            sys.stderr.write(line)
            if first_step_at is None and (found := FIRST_STEP.match(line)):
                first_step_at = found.group(1)
                log.info("the trainer took its first step; tokenizing the other shards beside it")
                others = tokenize_others(environment)
        code = pipeline.wait()
        if others is not None and others.wait() != 0:
            raise run.UserError("the second tokenizing run failed; its log is above")
        return code, first_step_at
    finally:
        for process in (pipeline, others):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()


def lines(stream: IO[str] | None) -> Iterator[str]:
    assert stream is not None
    yield from stream


def tokenize_others(environment: dict[str, str]) -> subprocess.Popen:
    command = [
        *(sys.executable, str(ROOT / "tokenize_completions.py")),
        *("--input", environment["INPUT"], "--output", environment["DATA"]),
        *("--tokenizer", environment["TARGET"], *TOKENIZE_FLAGS.split()),
        *("--shards", f"1:{NUM_SHARDS}"),
    ]
    return subprocess.Popen(command, env=environment, stdout=sys.stderr)


# ---- the end


def summary(
    target: Path, records: list[dict[str, Any]], first_step_at: str | None, wall_s: float
) -> list[tuple[str, Any]]:
    metrics = read_metrics(WORK / "run")
    steps = [entry for entry in metrics if "loss" in entry]
    evaluations = [entry for entry in metrics if "eval_loss" in entry]
    before, after = evaluations[0], evaluations[-1]
    tokens = sum(record["tokens"] for record in records)
    loss_tokens = sum(record["loss_tokens"] for record in records)
    seconds = sum(entry["step_s"] for entry in steps)

    def change(key: str) -> str:
        return f"{before[key]:.2f} -> {after[key]:.2f}"

    slots = [
        f"{sum(e['eval_slot_accuracy']) / len(e['eval_slot_accuracy']):.2f}"
        for e in (before, after)
    ]
    return [
        ("samples", f"{sum(record['rows'] for record in records):,}"),
        ("tokens", f"{tokens:,}"),
        ("loss-token share", f"{loss_tokens / tokens:.1%}"),
        ("first training step at", first_step_at),
        (
            "last shard committed at",
            f"{max(record['at'] for record in records):%Y-%m-%dT%H:%M:%SZ}",
        ),
        ("training tokens/s (CPU)", f"{sum(e['tokens'] for e in steps) / seconds:,.0f}"),
        ("target", target),
        ("steps", steps[-1]["step"]),
        ("training loss", f"{steps[0]['loss']:.2f} -> {steps[-1]['loss']:.2f}"),
        ("held-out rows", f"{before['eval_rows']} -> {after['eval_rows']}"),
        ("held-out loss", change("eval_loss")),
        ("per-slot accuracy, mean", f"{slots[0]} -> {slots[1]}"),
        ("per-slot accuracy, last", " ".join(f"{a:.2f}" for a in after["eval_slot_accuracy"])),
        ("acceptance length, all anchors", change("eval_acceptance_length")),
        ("acceptance length, walked", change("eval_walked_acceptance_length")),
        ("export", WORK / "run" / "export"),
        ("curves", WORK / "run" / "curves.png"),
        ("wall time", run.format_duration(wall_s)),
    ]


if __name__ == "__main__":
    run.exit_with(main)
