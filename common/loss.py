"""Weighted cross-entropy through the target's frozen head.

Letters: Q slots, H hidden size, V vocabulary. Logits never exist for all words: slots without
supervision are dropped first, the rest meet the head in tiles of the vocabulary. The head needs no
gradient, so the one towards the drafter's states, softmax(logits) @ head - head[label], is summed
up while a tile's logits are there, as flash attention sums softmax @ values: two matrix products a
tile, and nothing is computed again. Tiles are of words with all slots, not of slots with all words:
on a CPU the softmax then stays in the cache, and the products run a sixth faster (1,920 slots, 512
wide, 65,536 words, against chunks of 256 slots).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import softplus

from common.blocks import Blocks

# Half of a shared cache of 32 MB; on a GPU enough for full products, and little beside 96 GB.
TILE_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class LossSums:
    """Sums over supervised slots, to be added up over micro-batches and ranks and then divided.

    loss: () float32, sum of weight * cross-entropy, differentiable · slot_weights: (n,) float32,
    of each supervised slot · correct, supervised: (B,) float32, slots by their number in the block.
    """

    loss: torch.Tensor
    slot_weights: torch.Tensor
    correct: torch.Tensor
    supervised: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """The sum of the weights, ()."""
        return self.slot_weights.sum()


def weighted_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    blocks: Blocks,
    weights: torch.Tensor,
    *,
    factors: Callable[[torch.Tensor], torch.Tensor] | None = None,
    tile_bytes: int | None = None,
) -> LossSums:
    """Sum of weights * cross-entropy of the slots' labels, not divided by anything.

    hidden (Q, H), head (V, H) frozen, both of the compute dtype; weights (Q,); softmax in float32.
    `factors` turns the slots' cross-entropy, (Q,) with 0 where unsupervised, into factors (Q,) of
    the weights, which count as constants. `tile_bytes` bounds the float32 logits that exist at
    once, TILE_BYTES by default. A batch without supervised slots gives loss 0 and zero gradients.
    """
    if tile_bytes is None:
        tile_bytes = TILE_BYTES[hidden.device.type]
    chosen = torch.nonzero(blocks.supervised)[:, 0]

    def weigh(cross_entropy: torch.Tensor) -> torch.Tensor:
        if factors is None:
            return weights[chosen]
        of_slots = torch.zeros(len(blocks.labels), device=hidden.device)
        of_slots[chosen] = cross_entropy
        return weights[chosen] * factors(of_slots)[chosen]

    loss, slot_weights, correct = _TiledCrossEntropy.apply(
        hidden[chosen], head, blocks.labels[chosen], weigh, tile_bytes
    )
    return LossSums(loss, slot_weights, *count_slots(blocks, chosen, correct))


def count_slots(
    blocks: Blocks, chosen: torch.Tensor, correct: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many are right and how many there are of each slot, (B,) float32 each.

    chosen (n,) are indices of supervised slots, correct (n,) is 1 where they are right.
    """
    slots = chosen % blocks.block_size
    counts = torch.zeros(2, blocks.block_size, device=chosen.device)
    counts[0].index_add_(0, slots, correct)
    counts[1].index_add_(0, slots, torch.ones_like(correct))
    return counts[0], counts[1]


class _TiledCrossEntropy(torch.autograd.Function):
    """Sum of weighted cross-entropy, the weights, and which slots' argmax is the label.

    `weigh` gives the weights (n,) for the cross-entropy (n,), which is known when the gradient is
    not yet scaled: so weights that depend on it cost nothing.

    The softmax of a slot is kept apart from its label: the label's logit, and over all other words
    the highest logit, the sum of exp(logit - highest), and that sum weighted by the words' rows of
    the head. So 1 - p(label) is never a difference, and bf16 keeps the small gradients of slots
    that are nearly right.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weigh: Callable[[torch.Tensor], torch.Tensor],
        tile_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels = labels[:, None]
        highest = torch.full(labels.shape, torch.finfo(torch.float32).min, device=hidden.device)
        others, label_logit = torch.zeros_like(highest), torch.zeros_like(highest)
        rival = torch.zeros_like(labels)  # the first word with the highest logit
        needs_gradient = ctx.needs_input_grad[0]
        pull = torch.zeros(hidden.shape, device=hidden.device) if needs_gradient else None
        start = 0
        for tile in head.split(tile_words(len(labels), tile_bytes)):
            logits = (hidden @ tile.T).float()
            column = labels - start
            here = (column >= 0) & (column < len(tile))
            column = column.clamp(0, len(tile) - 1)
            found = logits.gather(1, column)
            label_logit = torch.where(here, found, label_logit)
            logits.scatter_(1, column, torch.where(here, -torch.inf, found))
            top, word = logits.max(1, keepdim=True)
            rival = torch.where(top > highest, word + start, rival)
            before, highest = highest, torch.maximum(highest, top)
            shrink = (before - highest).exp_()
            logits.sub_(highest).exp_()
            others.mul_(shrink).add_(logits.sum(1, keepdim=True))
            if pull is not None:
                pull.mul_(shrink).add_(logits.to(head.dtype) @ tile)
            start += len(tile)
        behind = others.log() + highest - label_logit  # log of (1 - p) / p for the label's p
        cross_entropy = softplus(behind[:, 0])
        weights = weigh(cross_entropy)
        if pull is not None:
            # weight * (1 - p) * (the other words' mean row - the label's row)
            pull.div_(others).sub_(head[labels[:, 0]]).mul_(weights[:, None] * behind.sigmoid())
            ctx.save_for_backward(pull.to(hidden.dtype))
        # bf16 logits tie often: as argmax, the first of equals wins
        won = (label_logit > highest) | ((label_logit == highest) & (labels < rival))
        correct = won[:, 0].float()
        ctx.mark_non_differentiable(weights, correct)
        return (weights * cross_entropy).sum(), weights, correct

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return upstream[0].to(gradient.dtype) * gradient, None, None, None, None


def tile_words(slots: int, tile_bytes: int) -> int:
    """Words whose float32 logits for so many slots fill a tile, in multiples of 64."""
    return max(1, tile_bytes // (4 * max(slots, 1)) // 64) * 64
