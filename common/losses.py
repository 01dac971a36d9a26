"""The losses of --loss by name: hard labels, weighted in two ways, or the target's distribution.

Letters: n supervised slots, H hidden size, V vocabulary, S tokens of a pack. q is the drafter's
distribution at slot s of the block at anchor a, whose label is token a+s; p is the target's own
there, softmax(head @ its normed last state at position a+s-1).

  ce      -log q(label), weighted by position
  dpace   the same, weighted by what a slot adds to the expected acceptance (D-PACE,
          arXiv 2605.18810), and by position where --gamma asks for it
  kd      -sum_v p log q, soft cross-entropy: the gradient of KL(p || q) (Model-Optimizer)
  tv      sum_v |p - q|, not halved: 0 to 2, and what sampling rejects is half of it
  ce+tv   0.1 ce + 0.9 tv (DSpark, arXiv 2607.05147, its terms that a DFlash drafter has)

The teacher meets the head at supervised slots alone. Its losses go through in chunks of slots with
all words: p and q are needed whole, and so three matrix products a chunk are enough, where tiles of
words would have to make all logits twice.
"""

import functools
from typing import Any

import torch

from common.blocks import Blocks, dpace_weights
from common.loss import TILE_BYTES, LossSums, count_slots, weighted_loss

# parts of ce, kd and tv in the losses that look at the target's distribution
TEACHER_TERMS = {
    "kd": {"kd": 1.0},
    "tv": {"tv": 1.0},
    "ce+tv": {"ce": 0.1, "tv": 0.9},
}
DEFAULT_GAMMA = 7.0  # of the position decay: the paper's, for blocks of 16
LOSSES = ("ce", "dpace", *TEACHER_TERMS)


def needs_teacher(kind: str) -> bool:
    """Whether a loss wants the target's last hidden states."""
    return kind in TEACHER_TERMS


def block_loss(
    kind: str,
    hidden: torch.Tensor,
    head: torch.Tensor,
    blocks: Blocks,
    weights: torch.Tensor,
    *,
    final: torch.Tensor | None,
    tile_bytes: int | None = None,
) -> LossSums:
    """Sums of the loss `kind`, not divided by anything.

    hidden (Q, H) of the drafter and head (V, H), both of the compute dtype; weights (Q,) by
    position; final (S, H), the target's normed last states over the pack, where needs_teacher.
    LossSums.slot_weights are those by position for all but dpace, which weighs anew.
    """
    if kind in TEACHER_TERMS:
        assert final is not None, f"{kind} needs the target's last hidden states"
        return _teacher_loss(
            TEACHER_TERMS[kind], hidden, final, head, blocks, weights, tile_bytes=tile_bytes
        )
    factors = functools.partial(dpace_weights, blocks) if kind == "dpace" else None
    return weighted_loss(hidden, head, blocks, weights, factors=factors, tile_bytes=tile_bytes)


def _teacher_loss(
    terms: dict[str, float],
    hidden: torch.Tensor,
    final: torch.Tensor,
    head: torch.Tensor,
    blocks: Blocks,
    weights: torch.Tensor,
    *,
    tile_bytes: int | None,
) -> LossSums:
    if tile_bytes is None:
        tile_bytes = TILE_BYTES[hidden.device.type]
    chosen = torch.nonzero(blocks.supervised)[:, 0]
    # the state before a token is the one that says it; a supervised slot is at least the anchor's
    # successor, and of its document
    before = blocks.anchors[chosen // blocks.block_size] + chosen % blocks.block_size - 1
    loss, correct = _ChunkedDistillation.apply(
        hidden[chosen], final[before], head, blocks.labels[chosen], weights[chosen], terms,
        max(1, tile_bytes // (4 * len(head))),
    )  # fmt: skip
    return LossSums(loss, weights[chosen], *count_slots(blocks, chosen, correct))


class _ChunkedDistillation(torch.autograd.Function):
    """Weighted sum of `terms` of p and q, and which slots' argmax is the label.

    A chunk holds about five float32 arrays (chunk_slots, V) at its peak. Neither p nor the head
    gets a gradient; the one towards hidden (n, H) is made with the value, coefficients @ head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        teacher: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        terms: dict[str, float],
        chunk_slots: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros(len(hidden), device=hidden.device)
        correct = torch.zeros_like(values)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk_slots):
            part = slice(start, start + chunk_slots)
            logits = (hidden[part] @ head.T).float()
            label = labels[part, None]
            correct[part] = (logits.argmax(1) == labels[part]).float()
            log_q = logits.log_softmax(1)
            q, p = log_q.exp(), (teacher[part] @ head.T).float().softmax(1)
            coefficients = torch.zeros_like(q)
            for term, share in terms.items():
                if term == "ce":
                    values[part] -= share * log_q.gather(1, label)[:, 0]
                    slope = _balanced(q.clone(), label)
                elif term == "kd":
                    values[part] -= share * (p * log_q).sum(1)
                    slope = _balanced(q - p, p.argmax(1, keepdim=True))
                else:
                    values[part] += share * (q - p).abs().sum(1)
                    slope = _variation_slope(q, p)
                coefficients.add_(slope, alpha=share)
            if gradient is not None:
                coefficients.mul_(weights[part, None])
                gradient[part] = coefficients.to(head.dtype) @ head
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return (weights * values).sum(), correct

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (upstream[0] * gradient.float()).to(gradient.dtype), *[None] * 6


def _balanced(slope: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """q - p in place, (n, V), exact at its largest word too: a slot's sum is zero.

    Where p and q are both nearly 1, at `word` (n, 1), their difference would lose its digits; it
    is minus the sum of the others. For p = 1 at the label, give q: it is replaced there.
    """
    slope.scatter_(1, word, 0.0)
    return slope.scatter_(1, word, -slope.sum(1, keepdim=True))


def _variation_slope(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The gradient of sum_v |q - p| by the logits, (n, V).

    It is q_v (s_v - sum_u q_u s_u) with s the sign of q - p: twice q_v times the mass of the words
    on the other side, which is no difference of near numbers either.
    """
    above = q > p
    mass_above = (q * above).sum(1, keepdim=True)
    mass_below = (q * ~above).sum(1, keepdim=True)
    return 2 * q * torch.where(above, mass_below, -mass_above)
