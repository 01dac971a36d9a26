"""Acceptance of drafted blocks: pure tensor functions, whose definitions the README gives.

Letters: N blocks (one an anchor) of B slots, Q = N*B slots, K = B - 1 of them drafts, H hidden
size, V words, S tokens of a pack. Drafts are columns 0 ... K-1 for slots 1 ... B-1. A draft that no
supervised token judges counts as refused, so it ends what is accepted of its block.
"""

from dataclasses import dataclass

import torch

from common.blocks import Blocks


@dataclass(frozen=True)
class Judged:
    """What became of N*K drafts.

    supervised, right (N, K) bool: a token judges the draft; the drafter's argmax is that token ·
    cross_entropy (N, K) float32, 0 where unsupervised · overlap (N, K) float32: sum_v min(p, q),
    0 where unsupervised, or None without the target's last hidden states.
    """

    supervised: torch.Tensor
    right: torch.Tensor
    cross_entropy: torch.Tensor
    overlap: torch.Tensor | None


@torch.no_grad()
def judge_drafts(
    hidden: torch.Tensor,
    head: torch.Tensor,
    blocks: Blocks,
    *,
    chunk_slots: int,
    final: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> Judged:
    """Compare drafts with the labels, and with the target's distribution where `final` gives it.

    hidden (Q, H) of the drafter, head (V, H), final (S, H): the target's normed last states over
    the pack. The supervised slots alone meet the head, `chunk_slots` at a time, once. q is the
    drafter's softmax of a slot, p the target's at the place before the slot's own, both of logits
    over `temperature`, in float32.
    """
    size = blocks.block_size
    chosen = torch.nonzero(blocks.supervised)[:, 0]
    places = (blocks.anchors[:, None] + torch.arange(size, device=hidden.device)).flatten() - 1
    loss, right, overlap = (
        torch.zeros(len(hidden), dtype=kind, device=hidden.device)
        for kind in (torch.float32, torch.bool, torch.float32)
    )
    for slots in chosen.split(chunk_slots):
        logits, labels = hidden[slots] @ head.T, blocks.labels[slots]
        right[slots] = logits.argmax(-1) == labels
        logits = logits.float()
        label_logits = logits.gather(1, labels[:, None])[:, 0]
        loss[slots] = logits.logsumexp(-1) - label_logits
        if final is not None:
            # neighbouring blocks share their places, so the target's head sees each of them once
            once, back = places[slots].unique(return_inverse=True)
            target = ((final[once] @ head.T).float() / temperature).softmax(-1)
            drafter = (logits / temperature).softmax(-1)
            overlap[slots] = torch.minimum(target[back], drafter).sum(-1)
    supervised, right, loss, overlap = (
        figure.view(-1, size)[:, 1:] for figure in (blocks.supervised, right, loss, overlap)
    )
    return Judged(supervised, right, loss, None if final is None else overlap)


def acceptance_lengths(right: torch.Tensor) -> torch.Tensor:
    """Tokens that a target step yields from each block, (N,) int64 of 1 ... B.

    right (N, K) bool: accepted are the drafts before the first wrong one; the target's own token
    comes on top.
    """
    return 1 + right.long().cumprod(dim=1).sum(dim=1)


def expected_lengths(overlap: torch.Tensor) -> torch.Tensor:
    """Expected acceptance length of each block under sampling, (N,) float32.

    1 + sum_k prod_{i<=k} a_i, where a_i = overlap (N, K) is the chance that the lossless rejection
    rule keeps a draft (arXiv 2211.17192), the ones before it kept.
    """
    return 1 + overlap.cumprod(dim=1).sum(dim=1)


SLOT_SUMS = ("supervised", "right", "reached", "reached_right", "overlap")


def slot_sums(judged: Judged) -> torch.Tensor:
    """Sums over blocks for each draft slot, (5, K) float64, rows as in SLOT_SUMS.

    A supervised draft is reached when all before it in its block are right.
    """
    before = torch.ones_like(judged.right)
    before[:, 1:] = judged.right[:, :-1].long().cumprod(dim=1).bool()
    reached = judged.supervised & before
    overlap = torch.zeros_like(judged.cross_entropy) if judged.overlap is None else judged.overlap
    figures = (judged.supervised, judged.right, reached, reached & judged.right, overlap)
    return torch.stack([figure.double().sum(dim=0) for figure in figures])


def slot_shares(sums: torch.Tensor) -> dict[str, tuple[float | None, ...]]:
    """Accuracy, conditional accuracy and mean overlap of each draft slot, from `slot_sums`.

    None for a slot that nothing judges or reaches.
    """
    supervised, right, reached, reached_right, overlap = sums.tolist()
    return {
        "accuracy": _shares(right, supervised),
        "conditional_accuracy": _shares(reached_right, reached),
        "overlap": _shares(overlap, supervised),
    }


def _shares(parts: list[float], wholes: list[float]) -> tuple[float | None, ...]:
    return tuple(part / whole if whole else None for part, whole in zip(parts, wholes, strict=True))


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


def shift_by_one(taps: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Hidden states moved one token later within each document, zeros at its first token.

    taps (1, S, L*H), documents (S,). Moved the other way a block would see its anchor's own state,
    which tells the next token.
    """
    shifted = torch.zeros_like(taps)
    same = documents[1:] == documents[:-1]
    shifted[0, 1:] = taps[0, :-1].where(same[:, None], 0)
    return shifted
