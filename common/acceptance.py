"""Acceptance of drafted blocks: pure tensor functions, whose definitions the README gives.

Letters: N blocks (one an anchor) of B slots, Q = N*B slots, K = B - 1 of them drafts, H hidden
size, V words, S tokens of a pack. Drafts are columns 0 ... K-1 for slots 1 ... B-1. A draft that no
supervised token judges counts as refused, so it ends what is accepted of its block.
"""

from dataclasses import dataclass

import torch

from common.blocks import Blocks
from common.dflash2 import CandidateSelector
from common.selection import highest, walk


@dataclass(frozen=True)
class Judged:
    """What became of N*K drafts.

    supervised, right (N, K) bool: a token judges the draft; the draft is that token ·
    cross_entropy (N, K) float32 of the slots' own softmax, 0 where unsupervised · overlap (N, K)
    float32: sum_v min(p, q), 0 where unsupervised, or None without the target's last hidden states.
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
    selector: CandidateSelector | None = None,
) -> Judged:
    """Compare drafts with the labels, and with the target's distribution where `final` gives it.

    hidden (Q, H) of the drafter, head (V, H), final (S, H): the target's normed last states over
    the pack. The supervised slots alone meet the head, `chunk_slots` at a time, once. q is the
    drafter's softmax of a slot, p the target's at the place before the slot's own, both of logits
    over `temperature`, in float32. A draft is the slot's argmax.

    With a `selector` drafts are what the greedy walk from the anchor chooses, each after the draft
    before it, be that right or wrong; where no token judges that one, after the text's own. q is
    then the selector's over the slot's candidates, 0 elsewhere, after the text's own token: what
    serving samples from when the drafts before were kept. Every rank of a sharded selector calls.
    """
    size = blocks.block_size
    chosen = torch.nonzero(blocks.supervised)[:, 0]
    places = (blocks.anchors[:, None] + torch.arange(size, device=hidden.device)).flatten() - 1
    loss, right, overlap = (
        torch.zeros(len(hidden), dtype=kind, device=hidden.device)
        for kind in (torch.float32, torch.bool, torch.float32)
    )
    candidates = None if selector is None else _Candidates(blocks, selector.top_k)
    for slots in chosen.split(chunk_slots):
        logits, labels = hidden[slots] @ head.T, blocks.labels[slots]
        right[slots] = logits.argmax(-1) == labels
        logits = logits.float()
        if candidates is not None:
            candidates.take(slots, logits)
        label_logits = logits.gather(1, labels[:, None])[:, 0]
        loss[slots] = logits.logsumexp(-1) - label_logits
        if final is not None:
            # neighbouring blocks share their places, so the target's head sees each of them once
            once, back = places[slots].unique(return_inverse=True)
            target = ((final[once] @ head.T).float() / temperature).softmax(-1)[back]
            drafter = (logits / temperature).softmax(-1)
            overlap[slots] = torch.minimum(target, drafter).sum(-1)
            if candidates is not None:
                candidates.take_target(slots, target)
    if selector is not None and candidates is not None:
        right, overlap = candidates.judge(selector, hidden, temperature=temperature)
    supervised, right, loss, overlap = (
        figure.view(-1, size)[:, 1:] for figure in (blocks.supervised, right, loss, overlap)
    )
    return Judged(supervised, right, loss, None if final is None else overlap)


class _Candidates:
    """Every slot's K candidates, and what selector and target make of them.

    An unsupervised slot has the text's token as all of its candidates.
    """

    def __init__(self, blocks: Blocks, top_k: int) -> None:
        self.blocks, self.top_k = blocks, top_k
        self.words = blocks.labels[:, None].repeat(1, top_k)  # (Q, K)
        self.logits = torch.zeros(self.words.shape, device=self.words.device)
        self.target = torch.zeros_like(self.logits)  # p of each candidate

    def take(self, slots: torch.Tensor, logits: torch.Tensor) -> None:
        """The candidates of `slots`, by their logits (n, V)."""
        self.logits[slots], self.words[slots] = logits.topk(self.top_k, dim=-1)

    def take_target(self, slots: torch.Tensor, target: torch.Tensor) -> None:
        """What the target's distributions (n, V) give to the candidates of `slots`."""
        self.target[slots] = target.gather(1, self.words[slots])

    def judge(
        self, selector: CandidateSelector, hidden: torch.Tensor, *, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which slots the walk drafts right, and the overlap of each: (Q,), as in judge_drafts."""
        size = self.blocks.block_size
        words, labels, supervised = (
            figure.unflatten(0, (-1, size))
            for figure in (self.words, self.blocks.labels, self.blocks.supervised)
        )
        before = torch.cat([words[:, :-1], labels[:, :-1, None]], dim=2)  # (N, B-1, K+1)
        scores = selector(hidden.unflatten(0, (-1, size))[:, 1:], before, words[:, 1:])
        scores = scores + self.logits.unflatten(0, (-1, size))[:, 1:, None]
        right, overlap = (
            torch.zeros_like(supervised),
            torch.zeros(words.shape[:2], device=words.device),
        )
        right[:, 1:] = (walk(scores, words[:, 1:], highest) == labels[:, 1:]) & supervised[:, 1:]
        drafter = (scores[:, :, -1] / temperature).softmax(-1)
        target = self.target.unflatten(0, (-1, size))[:, 1:]
        overlap[:, 1:] = torch.minimum(target, drafter).sum(-1) * supervised[:, 1:]
        return right.flatten(), overlap.flatten()


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
