"""Drafts of a DFlash 2: candidates of each slot, the walk through them, the selector's loss.

Letters: Q slots, n supervised ones, N blocks of B slots, S = B - 1 drafts, H hidden size,
V vocabulary, K candidates, P predecessors. A slot's candidates are the K words of the highest
logits; each scores its own logit plus what the selector gives for the word before it. A block is
walked from its anchor on: the word chosen at a slot is the next one's predecessor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding_bag

from common.blocks import Blocks
from common.loss import TILE_BYTES, tile_words

SELECTOR_ALPHA = 1.0  # of the selector's loss beside the base loss


@dataclass(frozen=True)
class SelectorSums:
    """Sums over supervised slots, to be divided by the base loss's sum of weights.

    loss: () float32, differentiable · correct: () float32, slots whose label scores highest, its
    true predecessor given; a label that is no candidate counts as wrong.
    """

    loss: torch.Tensor
    correct: torch.Tensor


def selector_loss(
    selector: nn.Module,
    hidden: torch.Tensor,
    head: torch.Tensor,
    blocks: Blocks,
    slot_weights: torch.Tensor,
    *,
    top_k: int,
    tile_bytes: int | None = None,
) -> SelectorSums:
    """Cross-entropy of the labels among the candidates, after the text's own token before them.

    hidden (Q, H) and head (V, H), both of the compute dtype; slot_weights (n,) of the supervised
    slots, as the base loss weighs them. A label that is no candidate takes the place of the last.
    """
    chosen = torch.nonzero(blocks.supervised)[:, 0]
    states, labels = hidden[chosen], blocks.labels[chosen, None]
    with torch.no_grad():
        logits, words = top_words(states, head, top_k=top_k, tile_bytes=tile_bytes)
        missing = (words != labels).all(1)
        words[:, -1] = torch.where(missing, labels[:, 0], words[:, -1])
        said = (states.float() * head[labels[:, 0]].float()).sum(1)
        logits[:, -1] = torch.where(missing, said, logits[:, -1])
    unary = _CandidateLogits.apply(states, head, words, logits)
    # a supervised slot is never a block's first, whose label is the anchor itself
    pairs = selector(states, blocks.labels[chosen - 1, None], words)[:, 0]
    log_chances = (unary + pairs).log_softmax(1)
    is_label = words == labels
    loss = -(slot_weights * log_chances.masked_select(is_label)).sum()
    won = is_label.gather(1, log_chances.detach().argmax(1, keepdim=True))[:, 0] & ~missing
    return SelectorSums(loss, won.float().sum())


@torch.no_grad()
def top_words(
    states: torch.Tensor, head: torch.Tensor, *, top_k: int, tile_bytes: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K highest logits of states (n, H), descending, (n, K) float32, and their words (n, K).

    Tile by tile of the vocabulary, as the loss.
    """
    if tile_bytes is None:
        tile_bytes = TILE_BYTES[states.device.type]
    best = torch.zeros(len(states), 0, device=states.device)
    words = torch.zeros(len(states), 0, dtype=torch.int64, device=states.device)
    start = 0
    for tile in head.split(max(top_k, tile_words(len(states), tile_bytes))):
        logits, places = (states @ tile.T).float().topk(min(top_k, len(tile)), dim=1)
        best, words = torch.cat([best, logits], 1), torch.cat([words, places + start], 1)
        best, kept = best.topk(min(top_k, best.shape[1]), dim=1)
        words = words.gather(1, kept)
        start += len(tile)
    return best, words


class _CandidateLogits(torch.autograd.Function):
    """Logits (n, K) that are known already, with their gradient towards the states (n, H)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        head: torch.Tensor,
        words: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(head, words)
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        head, words = ctx.saved_tensors
        # sum_k g_k head[word_k], without the gathered rows (n, K, H)
        shares = upstream[0].to(head.dtype)
        return embedding_bag(words, head, per_sample_weights=shares, mode="sum"), None, None, None


Choice = Callable[[torch.Tensor], torch.Tensor]


def walk(scores: torch.Tensor, words: torch.Tensor, choose: Choice) -> torch.Tensor:
    """The words chosen on the way from each anchor, (N, S) int64.

    scores (N, S, P, K): of slot s's candidates words (N, S, K) after each of the slot before's;
    after the anchor, for which P may hold it any number of times, at the first slot. `choose` turns
    a slot's scores (N, K) into places (N,).
    """
    blocks = torch.arange(len(scores), device=scores.device)
    path, before = [], torch.zeros_like(blocks)
    for slot in range(scores.shape[1]):
        before = choose(scores[blocks, slot, before])
        path.append(words[blocks, slot, before])
    return torch.stack(path, dim=1)


def highest(scores: torch.Tensor) -> torch.Tensor:
    """The greedy choice."""
    return scores.argmax(-1)
