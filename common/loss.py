"""Weighted cross-entropy through the target's frozen head, and acceptance lengths.

Logits never exist for all slots: slots without supervision are dropped first, the rest go through
the head in chunks. The head needs no gradient, so a chunk's gradient towards the drafter's states
is formed while its logits are there: two matrix products a chunk, and nothing is computed again.
"""

from dataclasses import dataclass
from typing import Any

import torch

from common.blocks import Blocks


@dataclass(frozen=True)
class LossSums:
    """Sums over supervised slots, to be added up over micro-batches and ranks and then divided.

    loss: () float32, sum of weight * cross-entropy, differentiable · weight: () float32, sum of
    weights · correct, supervised: (B,) float32, slots by their number in the block.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    correct: torch.Tensor
    supervised: torch.Tensor


def weighted_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    blocks: Blocks,
    weights: torch.Tensor,
    *,
    chunk_slots: int,
) -> LossSums:
    """Sum of weights * cross-entropy of the slots' labels, not divided by anything.

    hidden (Q, H), head (V, H) frozen, weights (Q,); softmax in float32. A batch without supervised
    slots gives loss 0 and zero gradients.
    """
    chosen = torch.nonzero(blocks.supervised)[:, 0]
    loss, correct = _ChunkedCrossEntropy.apply(
        hidden[chosen], head, blocks.labels[chosen], weights[chosen], chunk_slots
    )
    slots = chosen % blocks.block_size
    counts = torch.zeros(2, blocks.block_size, device=hidden.device)
    counts[0].index_add_(0, slots, correct)
    counts[1].index_add_(0, slots, torch.ones_like(correct))
    return LossSums(loss, weights[chosen].sum(), counts[0], counts[1])


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of weighted cross-entropy, and which slots' argmax is the label."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        chunk_slots: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.zeros((), device=hidden.device)
        correct = torch.zeros(len(labels), device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(labels), chunk_slots):
            part = slice(start, start + chunk_slots)
            label, weight = labels[part, None], weights[part]
            logits = (hidden[part] @ head.T).float()
            correct[part] = (logits.argmax(-1) == label[:, 0]).float()
            normalizer = logits.logsumexp(-1)
            loss += (weight * (normalizer - logits.gather(1, label)[:, 0])).sum()
            if gradient is not None:
                # d loss / d logits = weight * (softmax - onehot), written over the logits
                logits.sub_(normalizer[:, None]).exp_()
                logits.scatter_add_(1, label, torch.full_like(label, -1, dtype=logits.dtype))
                logits.mul_(weight[:, None])
                gradient[part] = logits.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return upstream[0].to(gradient.dtype) * gradient, None, None, None, None


@torch.no_grad()
def block_predictions(
    hidden: torch.Tensor, head: torch.Tensor, *, chunk_slots: int
) -> torch.Tensor:
    """The greedy token of every slot, (Q,) int64, for hidden (Q, H) and head (V, H)."""
    return torch.cat([(part @ head.T).argmax(-1) for part in hidden.split(chunk_slots)])


def acceptance_lengths(predictions: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Tokens a target step would yield from each block, (N,) int64: accepted drafts + 1.

    predictions (Q,). A draft is accepted while it and all before it equal the label; an
    unsupervised slot ends the count.
    """
    right = (predictions == blocks.labels) & blocks.supervised
    right = right.view(len(blocks.anchors), blocks.block_size)[:, 1:]
    return 1 + right.long().cumprod(dim=1).sum(dim=1)


def walked_acceptance(lengths: torch.Tensor, anchors: torch.Tensor) -> tuple[int, int]:
    """(tokens, target steps) of one document served with greedy drafts.

    `anchors` (A,) ascending are all legal anchors of the document, `lengths` (A,) their acceptance
    lengths. The walk starts at the first, the first generated token, and jumps by what was
    accepted; it ends where no draft can be judged. Equals the real greedy loop in float32.
    """
    length_at = dict(zip(anchors.tolist(), lengths.tolist(), strict=True))
    tokens = steps = 0
    place = next(iter(length_at), None)
    while place in length_at:
        tokens, steps = tokens + length_at[place], steps + 1
        place += length_at[place]
    return tokens, steps
