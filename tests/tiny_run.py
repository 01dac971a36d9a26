"""A small tokenized dataset, a tiny target, and the trainer's command line for them."""

import fcntl
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.journal import read_metrics
from demo import tokenizer as demo_tokenizer
from tests import forked
from tests.tiny_models import tiny_target

ROOT = Path(__file__).parent.parent
TRAINER = str(ROOT / "train_dflash_online.py")
# fmt: off
FLAGS = (
    "--layers", "0,1,2", "--draft-layers", "2", "--block-size", "8", "--sliding-window", "16",
    "--pack-length", "256", "--global-batch", "4", "--anchor-ratio", "0.2", "--gamma", "4",
    "--learning-rate", "2e-3", "--eval-fraction", "0.1", "--eval-rows", "8",
    "--shard-timeout", "60", "--save-every", "1000", "--log-every", "1",
    "--force",  # a few steps learn what countings look like, not yet from the hidden states
)
# fmt: on
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def make_inputs(folder: Path, *, files: int = 4, rows: int = 30) -> Path:
    """JSONL files of countings, whose every next token follows from the ones before."""
    folder.mkdir()
    for number in range(files):
        lines = []
        for row in range(number * rows, (number + 1) * rows):
            numbers = " ".join(str(row % 7 + step) for step in range(8 + row % 9))
            turn = {"role": "assistant", "reasoning": "go on", "content": numbers}
            messages = [{"role": "user", "content": f"count from {row % 7}"}, turn]
            lines.append(json.dumps({"id": f"row-{row}", "messages": messages}))
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_target(folder: Path) -> Path:
    tiny_target(folder)
    demo_tokenizer.build(folder)
    return folder


class Parts(NamedTuple):
    """What most runs start from: JSONL files, their shards, and the target of both."""

    inputs: Path
    data: Path
    target: Path


def make_parts(root: Path) -> Parts:
    """All of it in `root`, made by whoever comes first; the others wait and find it."""
    parts = Parts(root / "in", root / "data", root / "target")
    root.mkdir(exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / ".made").exists():
            tokenize(make_inputs(parts.inputs), parts.data, make_target(parts.target))
            (root / ".made").touch()
    return parts


def tokenize(inputs: Path, output: Path, tokenizer: Path, *flags: str) -> Path:
    command = [
        *(sys.executable, str(ROOT / "tokenize_completions.py"), "--input", str(inputs)),
        *("--output", str(output), "--tokenizer", str(tokenizer), "--num-shards", "3"),
        *("--max-length", "256", "--min-loss-tokens", "4", *flags),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return output


def training_command(data: Path | str, target: Path, output: Path, *flags: str) -> list[str]:
    return [
        *("--data", str(data), "--target", str(target), "--output", str(output)),
        *(*FLAGS, *flags),
    ]


def train(
    data: Path | str, target: Path, output: Path, *flags: str, ranks: int = 0
) -> subprocess.CompletedProcess:
    """Run the trainer to its end: by itself, or on some ranks as under torchrun."""
    command = training_command(data, target, output, *flags)
    how = dict(env=ENVIRONMENT, timeout=240)
    if not ranks:
        return forked.run_to_end("train_dflash_online", command, **how)
    return forked.run_ranks("train_dflash_online", command, ranks=ranks, **how)


def comparable(output: Path) -> list[dict]:
    """A run's metrics without what may differ between equal runs."""
    return [
        {k: v for k, v in entry.items() if k != "time" and not k.endswith(("_s", "_per_s"))}
        for entry in read_metrics(output)
    ]


def assert_alike(one: Path, other: Path, *, rel: float, abs: float) -> None:
    """The same metrics within rounding."""
    for entry, counterpart in zip(comparable(one), comparable(other), strict=True):
        for key, value in entry.items():
            want, got = (_numbers(figure) for figure in (value, counterpart[key]))
            assert got == pytest.approx(want, rel=rel, abs=abs, nan_ok=True), (key, entry["step"])


def _numbers(figure: Any) -> Any:
    """None, the accuracy of slots that nothing came to, as a number that equals itself."""
    if isinstance(figure, list):
        return [math.nan if number is None else number for number in figure]
    return figure


def read_checkpoint(run: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint's float32 weights and optimizer moments, by name."""
    name = (run / "checkpoints/latest").read_text().strip()
    dcp_to_torch_save(run / "checkpoints" / name, scratch / "whole.pt")
    whole = torch.load(scratch / "whole.pt", weights_only=True)
    tensors = {f"model.{key}": value for key, value in whole["model"].items()}
    for key, moments in whole["optimizer"]["state"].items():
        tensors |= {f"{key}.{name}": value for name, value in moments.items()}
    return tensors


def assert_same_run(one: Path, other: Path, scratch: Path) -> None:
    """The same metrics, and the same weights, moments and export to the bit."""
    assert comparable(one) == comparable(other)
    want, got = (read_checkpoint(run, scratch) for run in (one, other))
    assert want.keys() == got.keys() and len(want) > 50
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key
    for name in ("model.safetensors", "config.json"):
        assert (one / "export" / name).read_bytes() == (other / "export" / name).read_bytes()
