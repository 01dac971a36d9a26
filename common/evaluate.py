"""Held-out loss, slot accuracy and acceptance length of a drafter, from the target's own rows.

Every legal anchor of the held-out rows is drafted from, in passes of a fixed number of anchors, and
each draft is compared with what the target really said (greedy, teacher-forced). Two acceptance
lengths are given, both counting the bonus token: the mean over all anchors, which favours easy
stretches, and the walked one, which starts at the first generated token and jumps by what was
accepted, as serving does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from common.batches import PackedRows
from common.blocks import decay_weights, legal_anchors, make_blocks
from common.dist import World
from common.drafter import DrafterConfig
from common.drafting import CHUNK_SLOTS, TargetEnds, draft_blocks, padded_taps, tensor_pack
from common.loss import (
    acceptance_lengths,
    block_predictions,
    walked_acceptance,
    weighted_loss,
)
from common.run import UserError
from common.wire import HiddenStates


@dataclass(frozen=True)
class Evaluation:
    """Figures over `rows` held-out rows; slot_accuracy[k-1] belongs to slot k of a block.

    The loss is cross-entropy with position decay, whatever the drafter is trained with, so that
    runs of different --loss compare.
    """

    loss: float
    acceptance_length: float
    walked_acceptance_length: float
    slot_accuracy: tuple[float, ...]
    rows: int


@torch.no_grad()
def evaluate(
    drafter: nn.Module,
    config: DrafterConfig,
    ends: TargetEnds,
    hidden_states: HiddenStates,
    *,
    packs: Sequence[PackedRows],
    rows: int,
    num_anchors: int,
    gamma: float,
    attention: str,
    world: World,
) -> Evaluation:
    """Evaluate on `packs`; every rank calls it with the same packs and gets the same figures.

    The passes, `num_anchors` anchors of one pack each, are dealt to the ranks in turn; ranks with
    one pass less repeat one without counting it, since a sharded drafter needs all of them. Raises
    UserError on all ranks alike when one of them gets no hidden states.
    """
    legal = [
        torch.nonzero(legal_anchors(tensor_pack([pack], device=world.device)))[:, 0]
        for pack in packs
    ]
    passes = [
        (number, start)
        for number, anchors in enumerate(legal)
        for start in range(0, len(anchors), num_anchors)
    ]
    offsets = [0, *torch.tensor([len(anchors) for anchors in legal]).cumsum(0).tolist()]
    lengths = torch.zeros(offsets[-1], dtype=torch.int64, device=world.device)
    sums = torch.zeros(2 + 2 * config.block_size, dtype=torch.float64, device=world.device)
    taps_of: tuple[int, torch.Tensor] | None = None  # a pack's number and its hidden states
    for turn in range(0, len(passes), world.size):
        counted = turn + world.rank < len(passes)
        number, start = passes[turn + world.rank] if counted else passes[turn]
        pack = tensor_pack([packs[number]], device=world.device)
        if taps_of is None or taps_of[0] != number:
            states = _fetch(hidden_states, packs[number])
            taps_of = None if states is None else (number, states)
        if world.sum([float(taps_of is None)])[0]:
            raise UserError("no hidden states for the evaluation: is every server there?")
        assert taps_of is not None
        taps = padded_taps([packs[number]], [taps_of[1]], ends.embedding)
        chosen = legal[number][start : start + num_anchors]
        blocks = make_blocks(
            pack,
            *_fixed(chosen, num_anchors),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
        )
        output = draft_blocks(
            drafter, config, ends, pack=pack, blocks=blocks, taps=taps, attention=attention
        )
        if not counted:
            continue
        weights = decay_weights(blocks, gamma=gamma)
        loss = weighted_loss(output, ends.head, blocks, weights)
        sums += torch.cat([loss.loss[None], loss.weight[None], loss.correct, loss.supervised])
        predictions = block_predictions(output, ends.head, chunk_slots=CHUNK_SLOTS)
        first = offsets[number] + start
        lengths[first : first + len(chosen)] = acceptance_lengths(predictions, blocks)[
            : len(chosen)
        ]
    world.sum_tensor(sums)
    world.sum_tensor(lengths)
    tokens, steps = _walk(legal, packs, lengths, offsets)
    size = config.block_size
    accuracy = sums[2 : 2 + size] / sums[2 + size :].clamp(min=1)
    return Evaluation(
        loss=float(sums[0] / sums[1].clamp(min=1e-12)),
        acceptance_length=float(lengths.double().mean()) if len(lengths) else 1.0,
        walked_acceptance_length=tokens / steps if steps else 1.0,
        slot_accuracy=tuple(accuracy[1:].tolist()),
        rows=rows,
    )


def _fetch(hidden_states: HiddenStates, pack: PackedRows) -> torch.Tensor | None:
    """A pack's hidden states; None when no server answers."""
    try:
        return hidden_states.submit(pack.token_lists).result().hidden
    except UserError:
        return None


def _fixed(anchors: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad anchors to `size`, with a mask of the real ones."""
    padded = torch.zeros(size, dtype=anchors.dtype, device=anchors.device)
    padded[: len(anchors)] = anchors
    return padded, torch.arange(size, device=anchors.device) < len(anchors)


def _walk(
    legal: Sequence[torch.Tensor],
    packs: Sequence[PackedRows],
    lengths: torch.Tensor,
    offsets: Sequence[int],
) -> tuple[int, int]:
    """Walked (tokens, target steps) over all documents of all packs."""
    tokens = steps = 0
    for number, anchors in enumerate(legal):
        drafted = lengths[offsets[number] : offsets[number + 1]]
        documents = torch.from_numpy(packs[number].documents).to(anchors.device)[anchors]
        for document in range(len(packs[number].token_lists)):
            mine = documents == document
            walked = walked_acceptance(drafted[mine], anchors[mine])
            tokens, steps = tokens + walked[0], steps + walked[1]
    return tokens, steps
