"""From packs to a drafter's output, and a step's gradients: what training and evaluation share."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding

from common.batches import PackedRows, seeded_generator
from common.blocks import (
    PADDING,
    Blocks,
    Pack,
    decay_weights,
    layer_masks,
    legal_anchors,
    make_blocks,
    sample_anchors,
)
from common.dist import World
from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.feed import ReadyStep
from common.guards import tap_figures
from common.loss import LossSums
from common.losses import block_loss, needs_teacher
from common.selection import SELECTOR_ALPHA, SelectorSums, selector_loss
from common.target import Taps


@dataclass(frozen=True)
class TargetEnds:
    """The target's frozen embedding and head, (V, H) each, in the drafter's compute dtype."""

    embedding: torch.Tensor
    head: torch.Tensor


def tensor_pack(packs: Sequence[PackedRows], *, device: torch.device) -> Pack:
    """Join packs into one row of their total length, documents numbered on."""
    documents, first = [], 0
    for pack in packs:
        numbered = torch.from_numpy(pack.documents)
        documents.append(torch.where(numbered >= 0, numbered + first, numbered))
        first += len(pack.token_lists)
    return Pack(
        input_ids=_joined([pack.input_ids for pack in packs]).to(device),
        loss_mask=_joined([pack.loss_mask for pack in packs]).to(device),
        documents=torch.cat(documents).to(device),
        positions=_joined([pack.positions for pack in packs]).to(device),
    )


def _joined(arrays: Sequence) -> torch.Tensor:
    return torch.cat([torch.from_numpy(array) for array in arrays])


def padded_taps(
    packs: Sequence[PackedRows], hidden: Sequence[torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """Lay hidden states (T, L*H) of each pack's documents over its S positions: (1, sum S, L*H).

    Padding positions are zero. `like` gives the dtype and the device. From the host to a GPU they
    go through pinned memory on a stream of their own: the host is ahead of the GPU by most of a
    micro-batch, so 210 MB a pack cross while the one before is in its backward.
    """
    length = sum(len(pack.input_ids) for pack in packs)
    from_host = like.is_cuda and not any(states.is_cuda for states in hidden)
    stream = _copy_stream(like.device) if from_host else None
    with torch.cuda.stream(stream):
        taps = torch.zeros(1, length, hidden[0].shape[1], dtype=like.dtype, device=like.device)
        start = 0
        for pack, states in zip(packs, hidden, strict=True):
            source = states.pin_memory() if from_host and len(states) else states
            place = taps[0, start : start + pack.num_tokens]
            place.copy_(source, non_blocking=from_host)
            start += len(pack.input_ids)
    if stream is not None:
        consumer = torch.cuda.current_stream(like.device)
        consumer.wait_stream(stream)
        taps.record_stream(consumer)  # else its memory could be given away while in use there
    return taps


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def draft_blocks(
    drafter: nn.Module,
    config: DrafterConfig,
    ends: TargetEnds,
    *,
    pack: Pack,
    blocks: Blocks,
    taps: torch.Tensor,
    attention: str,
) -> torch.Tensor:
    """Draft all blocks of a pack in one forward: the drafter's output (N*B, H)."""
    masks = layer_masks(
        pack,
        blocks,
        layer_types=config.layer_types,
        sliding_window=config.sliding_window,
        attention=attention,
        causal=config.causal,
    )
    output = drafter(
        taps,
        embedding(blocks.input_ids, ends.embedding)[None],
        context_positions=pack.positions[None],
        block_positions=blocks.positions[None],
        masks=masks,
    )
    return output[0]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward needs, all of one fixed shape: packs joined into a row, and their blocks."""

    packs: tuple[PackedRows, ...]
    pack: Pack
    blocks: Blocks
    weights: torch.Tensor
    taps: tuple[Taps, ...]


def micro_batches(
    ready: ReadyStep,
    config: DrafterConfig,
    *,
    step: int,
    seed: int,
    size: int,
    num_anchors: int,
    gamma: float,
    device: torch.device,
) -> list[MicroBatch]:
    """Join a rank's packs into forwards of `size` packs and draw `num_anchors` anchors in each.

    A pack's anchors depend on (seed, step, its index in the global batch) alone.
    """
    batches = []
    for start in range(0, len(ready.packs), size):
        packs = ready.packs[start : start + size]
        anchors, keep, offset = [], [], 0
        for number, rows in enumerate(packs, start=ready.first + start):
            generator = torch.Generator().manual_seed(
                int(seeded_generator("anchors", seed, step, number).integers(2**63))
            )
            legal = legal_anchors(tensor_pack([rows], device=torch.device("cpu")))
            chosen, kept = sample_anchors(legal, num_anchors, generator=generator)
            anchors.append(chosen + offset)
            keep.append(kept)
            offset += len(rows.input_ids)
        pack = tensor_pack(packs, device=device)
        blocks = make_blocks(
            pack,
            torch.cat(anchors).to(device),
            torch.cat(keep).to(device),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
        )
        weights = decay_weights(blocks, gamma=gamma)
        taps = tuple(taps.result() for taps in ready.taps[start : start + size])
        batches.append(MicroBatch(packs, pack, blocks, weights, taps))
    return batches


@dataclass(frozen=True)
class StepSums:
    """Figures of one step over all ranks.

    The losses are per unit of weight, the selector's 0 without one; tap_figures (F, 3, L) are of
    each forward.
    """

    loss: float
    selector_loss: float
    correct: float
    selector_correct: float
    supervised: float
    tokens: int
    loss_tokens: int
    anchors: int
    tap_figures: torch.Tensor


def _forward(
    drafter: Drafter,
    config: DrafterConfig,
    ends: TargetEnds,
    batch: MicroBatch,
    taps: torch.Tensor,
    *,
    loss_kind: str,
    attention: str,
) -> tuple[LossSums, SelectorSums | None]:
    """The losses of a micro-batch, whose hidden states lie in `taps` (1, S, L*H)."""
    final = None
    if needs_teacher(loss_kind):
        states = [each.final for each in batch.taps if each.final is not None]
        final = padded_taps(batch.packs, states, ends.head)[0]
    output = draft_blocks(
        drafter,
        config,
        ends,
        pack=batch.pack,
        blocks=batch.blocks,
        taps=taps,
        attention=attention,
    )
    loss = block_loss(loss_kind, output, ends.head, batch.blocks, batch.weights, final=final)
    selector = drafter.candidate_selector
    if selector is None:
        return loss, None
    return loss, selector_loss(
        selector, output, ends.head, batch.blocks, loss.slot_weights, top_k=selector.top_k
    )


def accumulate_gradients(
    drafter: Any,
    config: DrafterConfig,
    ends: TargetEnds,
    batches: Sequence[MicroBatch],
    *,
    loss_kind: str,
    attention: str,
    world: World,
) -> StepSums:
    """Run forward and backward over a rank's micro-batches; gradients end up summed over ranks.

    The loss is the weighted mean over all supervised slots of the global batch, so neither the
    split into micro-batches and ranks nor the scale of the weights changes the update, and one
    learning rate serves every loss. The sums are divided by the global sum of the weights by
    position, known before the first forward. dpace's own weights are known only after the last
    one: its gradients are then brought to their sum, once.
    """
    total_weight, tokens, loss_tokens, anchors = world.sum(
        [
            float(sum(batch.weights.sum() for batch in batches)),
            sum(pack.num_tokens for batch in batches for pack in batch.packs),
            float(sum(batch.pack.loss_mask.sum() for batch in batches)),
            float(sum(batch.blocks.keep.sum() for batch in batches)),
        ]
    )
    num_layers = len(config.target_layer_ids)
    # summed where they are: fetching them for each micro-batch would hold the host up
    sums = torch.zeros(4 + 2 * config.block_size, dtype=torch.float64, device=world.device)
    # each rank fills its own forwards' places, so that the sum over ranks holds them all
    figures = torch.zeros(
        world.size, len(batches), 3, num_layers, dtype=torch.float64, device=world.device
    )
    for index, batch in enumerate(batches):
        drafter.set_requires_gradient_sync(index == len(batches) - 1)
        states = [taps.hidden for taps in batch.taps]
        taps = padded_taps(batch.packs, states, ends.embedding)
        real = batch.pack.documents != PADDING
        figures[world.rank, index] = tap_figures(taps, real, num_layers=num_layers)
        loss, selection = _forward(
            drafter, config, ends, batch, taps, loss_kind=loss_kind, attention=attention
        )
        total, of_selector = loss.loss, sums.new_zeros(2)
        if selection is not None:
            total = total + SELECTOR_ALPHA * selection.loss
            of_selector = torch.stack([selection.loss.detach(), selection.correct])
        (total / max(total_weight, 1e-12)).backward()
        scalars = torch.cat([torch.stack([loss.loss.detach(), loss.weight]), of_selector])
        sums += torch.cat([scalars, loss.correct, loss.supervised])
    summed = world.sum(torch.cat([sums, figures.flatten()]).tolist())
    loss_sum, weight_sum, selector_sum, selector_correct, *counts = summed[: len(sums)]
    if loss_kind == "dpace":
        for parameter in drafter.parameters():
            parameter.grad.mul_(total_weight / max(weight_sum, 1e-12))
        total_weight = weight_sum
    return StepSums(
        loss=loss_sum / max(total_weight, 1e-12),
        selector_loss=selector_sum / max(total_weight, 1e-12),
        selector_correct=selector_correct,
        correct=sum(counts[: config.block_size]),
        supervised=sum(counts[config.block_size :]),
        tokens=int(tokens),
        loss_tokens=int(loss_tokens),
        anchors=int(anchors),
        tap_figures=torch.tensor(summed[len(sums) :], dtype=torch.float64).view(-1, 3, num_layers),
    )
