"""A target with Qwen3.6-27B's widths, few layers, random weights: tokens/s, peak share, memory.

On a GPU its true widths in bfloat16; on a CPU a fifth of them in float32, which shows what the taps
cost (`make bench-target`). Taps against the same forward without them, turn by turn in one run.

  python -m tests.gpu.bench_target --layers 8 --peak-tflops 500
"""

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from common import run
from common.target import Target

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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=run.positive_int, default=8)
    parser.add_argument("--documents", type=run.positive_int, default=4)
    parser.add_argument("--length", type=run.positive_int, help="tokens a document")
    parser.add_argument("--rounds", type=run.positive_int, default=7)
    parser.add_argument("--peak-tflops", type=float, default=400.0, help="of the GPU, bf16 dense")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widths = WIDTHS if device.type == "cuda" else CPU_WIDTHS
    length = args.length or (2048 if device.type == "cuda" else 128)
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = make_model(widths, args.layers, device)
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
    tokens = args.documents * length
    matrices = sum(
        weight.numel()
        for name, weight in decoder.named_parameters()
        if weight.dim() == 2 and "embed" not in name
    )
    tflops = 2 * matrices * tokens / with_taps / 1e12
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU thread"
    kernels = ", ".join(
        f"{k} {'yes' if there else 'no'}" for k, there in target.fast_kernels().items()
    )
    verdict = "met" if cost <= GOAL_TAP_COST else "MISSED"
    run.print_table(
        f"Target of {args.layers} layers, hidden {widths['hidden_size']}, on {name}",
        [
            ("kernels", kernels),
            ("tokens a forward", f"{args.documents} x {length}"),
            ("with taps", f"{tokens / with_taps:,.0f} tokens/s"),
            ("without", f"{tokens / without:,.0f} tokens/s"),
            ("cost of the taps", f"{cost:+.1%} (median of {args.rounds}); goal 3 %: {verdict}"),
            ("matrix products", f"{tflops:.2f} TFLOP/s"
             + (f", {tflops / args.peak_tflops:.0%} of {args.peak_tflops:.0f}" if memory else "")),
            ("peak GPU memory", run.format_bytes(memory) if memory else "no GPU here"),
        ],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
