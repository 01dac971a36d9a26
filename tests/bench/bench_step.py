"""A drafter's step, forward and backward, on one CPU thread: ours, the naive way, and a peer's.

  naive       dense mask, logits of all slots at once, cross entropy, autograd
  recomputed  the same in chunks of slots, each under torch.utils.checkpoint: what the best of the
              published trainers does; three matrix products with the head instead of two
  ours        masks, drafter and loss as the trainer calls them

All of it in one run, turn by turn, so read the ratios: `make bench-step`. Time is the thread's CPU
time of a whole step, which other work on the machine disturbs least. Memory is the peak of the
process (VmHWM: what the kernel counts when memory runs out, which torch's profiler does not see all
of) over what is there before a step: weights, gradients, embedding, head, taps. Each way has a new
process for it, and a small step first that loads all code.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, embedding
from torch.utils.checkpoint import checkpoint

from common import run
from common.blocks import (
    Blocks,
    Pack,
    decay_weights,
    dense_mask,
    legal_anchors,
    make_blocks,
    sample_anchors,
)
from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.drafting import TargetEnds, draft_blocks
from common.loss import weighted_loss

HIDDEN, LAYERS, WORDS, TOKENS, ANCHORS, SIZE, TAPS = 512, 2, 65_536, 1024, 128, 16, 5
PROMPT, DOCUMENT = 50, 256  # four conversations a pack, a fifth of each unsupervised
ROUNDS = 3
GOAL_TIME, GOAL_MEMORY = 0.65, 0.25
RECOMPUTED_SLOTS = 256  # 64 MB of logits a chunk


@dataclass(frozen=True)
class Parts:
    """What is there before a step begins."""

    drafter: Drafter
    ends: TargetEnds
    pack: Pack
    blocks: Blocks
    weights: torch.Tensor
    taps: torch.Tensor


def make_parts() -> Parts:
    config = DrafterConfig.for_target(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 7 // 2,  # about the target's 17408 / 5120
        vocab_size=WORDS,
        num_target_layers=16,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=4096,
        eos_token_id=0,
        target_layer_ids=range(1, 1 + TAPS),
        num_layers=LAYERS,
        block_size=SIZE,
        mask_token_id=9,
        sliding_window=2048,
    )
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(config)
    drafter.reset_parameters(seed=0)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    positions = torch.arange(TOKENS) % DOCUMENT
    pack = Pack(
        input_ids=torch.randint(WORDS, (TOKENS,), generator=generator),
        loss_mask=positions >= PROMPT,
        documents=(torch.arange(TOKENS) // DOCUMENT).int(),
        positions=positions,
    )
    ends = TargetEnds(
        embedding=torch.randn(WORDS, HIDDEN, generator=generator) * 0.02,
        head=torch.randn(WORDS, HIDDEN, generator=generator) * 0.02,
    )
    taps = torch.randn(1, TOKENS, TAPS * HIDDEN, generator=generator)
    blocks = draw_blocks(pack, ANCHORS)
    return Parts(drafter, ends, pack, blocks, decay_weights(blocks, gamma=7.0), taps)


def draw_blocks(pack: Pack, count: int) -> Blocks:
    generator = torch.Generator().manual_seed(1)
    anchors, keep = sample_anchors(legal_anchors(pack), count, generator=generator)
    return make_blocks(pack, anchors, keep, block_size=SIZE, mask_token_id=9)


# ---- the three ways


def dense_draft(parts: Parts) -> torch.Tensor:
    """The drafter under dense masks of all queries and keys, (Q, H)."""
    config = parts.drafter.config
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    masks = {
        kind: dense_mask(parts.pack, parts.blocks, sliding_window=windows[kind])
        for kind in config.layer_types
    }
    output = parts.drafter(
        parts.taps,
        embedding(parts.blocks.input_ids, parts.ends.embedding)[None],
        context_positions=parts.pack.positions[None],
        block_positions=parts.blocks.positions[None],
        masks=masks,
    )
    return output[0]


def dense_loss(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return (cross_entropy((hidden @ head.T).float(), labels, reduction="none") * weights).sum()


def naive(parts: Parts) -> torch.Tensor:
    hidden = dense_draft(parts)
    return dense_loss(hidden, parts.ends.head, parts.blocks.labels, parts.weights)


def recomputed(parts: Parts) -> torch.Tensor:
    hidden = dense_draft(parts)
    loss = torch.zeros(())
    for start in range(0, len(hidden), RECOMPUTED_SLOTS):
        part = slice(start, start + RECOMPUTED_SLOTS)
        labels, weights = parts.blocks.labels[part], parts.weights[part]
        loss = loss + checkpoint(
            dense_loss, hidden[part], parts.ends.head, labels, weights, use_reentrant=False
        )
    return loss


def ours(parts: Parts) -> torch.Tensor:
    hidden = draft_blocks(
        parts.drafter,
        parts.drafter.config,
        parts.ends,
        pack=parts.pack,
        blocks=parts.blocks,
        taps=parts.taps,
        attention="sdpa",
    )
    return weighted_loss(hidden, parts.ends.head, parts.blocks, parts.weights).loss


WAYS: dict[str, Callable[[Parts], torch.Tensor]] = {
    "naive": naive,
    "recomputed": recomputed,
    "ours": ours,
}


def step(way: str, parts: Parts) -> float:
    """The loss of a whole step, whose gradients are added to the drafter's."""
    loss = WAYS[way](parts) / parts.weights.sum()
    loss.backward()
    return float(loss.detach())


# ---- measuring


def extra_bytes(way: str) -> int:
    """The peak of a step over what is there before it; for a new process."""
    torch.set_num_threads(1)
    parts = make_parts()
    one = draw_blocks(parts.pack, 1)
    step(way, replace(parts, blocks=one, weights=decay_weights(one, gamma=7.0)))
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts from here
    before = status_bytes("VmRSS")
    step(way, parts)
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def seconds(way: str, parts: Parts) -> float:
    began = time.process_time()
    step(way, parts)
    return time.process_time() - began


def main() -> int:
    torch.set_num_threads(1)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {way: pool.apply(extra_bytes, (way,)) for way in WAYS}
    parts = make_parts()
    losses = {way: step(way, parts) for way in WAYS}
    rounds = [{way: seconds(way, parts) for way in WAYS} for _ in range(ROUNDS)]

    def ratio(way: str) -> float:
        return statistics.median(times[way] / times["naive"] for times in rounds)

    def line(way: str) -> str:
        best = min(times[way] for times in rounds)
        return (
            f"{best:.2f} s, x {ratio(way):.2f}; {run.format_bytes(memory[way])} extra, "
            f"x {memory[way] / memory['naive']:.2f}; loss {losses[way]:.6f}"
        )

    def goal(name: str, have: float, limit: float) -> tuple[str, str]:
        return f"goal: {limit} of naive {name}", "met" if have <= limit else f"MISSED ({have:.2f})"

    share = float(parts.blocks.supervised.float().mean())
    run.print_table(
        f"A step of {ANCHORS} blocks of {SIZE} over {TOKENS} tokens, {WORDS} words, hidden "
        f"{HIDDEN}, {LAYERS} layers; one CPU thread",
        [
            ("supervised slots", f"{share:.0%}"),
            *((way, line(way)) for way in WAYS),
            goal("time", ratio("ours"), GOAL_TIME),
            goal("memory", memory["ours"] / memory["naive"], GOAL_MEMORY),
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
