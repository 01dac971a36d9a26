"""A target with Qwen3.6-27B's widths, few layers, random weights: tokens/s, share of peak, memory.

On a GPU its true widths in bfloat16; on a CPU a fifth of them in float32, which shows what the taps
cost (`make bench-target`). Taps against the same forward without them, turn by turn in one run.
The time of all its layers up to the last tap is extrapolated by FLOPs, as --plan counts them.

  python -m tests.gpu.bench_target --layers 8
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from common import run
from common.flops import TargetWork, target_work
from common.planner import TARGET_SHARE
from common.target import Target
from common.target_files import default_target_layers, target_facts
from common.target_model import build_without_weights
from tests.gpu.report import Report, against_goal, device_name, measured_rate

# config.json of Qwen/Qwen3.6-27B; the last layer of four has full attention
WIDTHS = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
CPU_WIDTHS = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
GOAL_TAP_COST = 0.03
GOAL_SHARE = 0.55  # of the measured rate
QWEN = str(Path(__file__).parent.parent / "data/qwen3.6-27b")
PACK_TOKENS = 4096


def make_model(widths: dict[str, int], layers: int, device: torch.device) -> Any:
    config = Qwen3_5TextConfig(
        **widths, vocab_size=4096, num_hidden_layers=layers, tie_word_embeddings=True
    )
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        torch.set_default_dtype(dtype)
        model = Qwen3_5ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def seconds(work: Any, device: torch.device) -> float:
    began = time.monotonic()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - began


def whole_work() -> TargetWork:
    """What --plan counts for the 27B, up to its last tap."""
    layers = default_target_layers(target_facts(QWEN).num_layers)
    return target_work(build_without_weights(QWEN, layers=layers, final=False))


def bench(args: argparse.Namespace, device: torch.device) -> Report:
    """All of it on one device."""
    widths = WIDTHS if device.type == "cuda" else CPU_WIDTHS
    length = args.length or (2048 if device.type == "cuda" else 128)
    model = make_model(widths, args.layers, device)
    work = target_work(model)
    taps = tuple(sorted({round(i * (args.layers - 2) / 4) for i in range(5)}))
    target = Target(model, name="random", layers=taps, final=True, max_tokens=1 << 20)
    target.check()
    documents = [np.full(length, number, np.int32) for number in range(args.documents)]
    ids = torch.tensor(np.stack(documents), dtype=torch.int64, device=device)
    decoder = model.get_decoder()

    @torch.no_grad()
    def bare() -> None:
        decoder(input_ids=ids, use_cache=False)

    def tapped() -> None:
        target.forward(documents, dtype=torch.bfloat16)

    bare()  # the first forward compiles and fills caches
    tapped()
    pairs = [(seconds(bare, device), seconds(tapped, device)) for _ in range(args.rounds)]
    without, with_taps = (min(times) for times in zip(*pairs, strict=True))
    cost = statistics.median(tapped / bare for bare, tapped in pairs) - 1
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    rate = measured_rate(device)
    tokens = args.documents * length
    flops_per_s = tokens * work.forward(length) / with_taps
    whole = PACK_TOKENS * whole_work().forward(length)
    whole_s, planned_s = whole / flops_per_s, whole / (TARGET_SHARE * rate)
    kernels = target.fast_kernels()
    slow = [name for name, there in kernels.items() if not there]
    verdict = "met" if cost <= GOAL_TAP_COST else "MISSED"
    report = Report(
        f"Target of {args.layers} layers, hidden {widths['hidden_size']}, on {device_name(device)}"
    )
    report.rows = [
        ("kernels", f"not there, so the slow reference runs: {', '.join(slow)}" if slow
         else ", ".join(kernels)),
        ("tokens a forward", f"{args.documents} x {length}"),
        ("with taps", f"{tokens / with_taps:,.0f} tokens/s"),
        ("without", f"{tokens / without:,.0f} tokens/s"),
        ("cost of the taps", f"{cost:+.1%} (median of {args.rounds}); goal 3 %: {verdict}"),
        ("bf16 products", f"{rate / 1e12:.3g} TFLOP/s, measured"),
        ("rate", f"{flops_per_s / 1e12:.3g} TFLOP/s, "
         + against_goal(flops_per_s / rate, GOAL_SHARE, device)),
        (f"27B, {PACK_TOKENS:,} tokens", f"{whole_s:.3g} s at this rate; "
         f"planner {planned_s:.3g} s at {TARGET_SHARE:.0%}"),
        ("peak GPU memory", run.format_bytes(memory) if memory else "no GPU here"),
    ]  # fmt: skip
    report.figures = {
        "tokens_per_s": tokens / with_taps,
        "tap_cost": cost,
        "rate_tflops": rate / 1e12,
        "tflops": flops_per_s / 1e12,
        "share_of_rate": flops_per_s / rate,
        "whole_s": whole_s,
        "planned_s": planned_s,
        "peak_bytes": memory,
    }
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=run.positive_int, default=8)
    parser.add_argument("--documents", type=run.positive_int, default=4)
    parser.add_argument("--length", type=run.positive_int, help="tokens a document")
    parser.add_argument("--rounds", type=run.positive_int, default=7)
    parser.add_argument("--output", type=Path, help="the figures, as JSON")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    return bench(args, device).finish(args.output)


if __name__ == "__main__":
    sys.exit(main())
