"""Anchors, block inputs, the one mask predicate, labels and weights: pure tensor functions.

Letters: S tokens of a pack, N anchors, B block size, Q = N*B block slots. Slot k of the block at
anchor a stands at position a+k of its document and predicts the token there; slot 0 holds the
anchor's own token and predicts nothing. Sources: z-lab/dflash model.py; the sliding rule is that of
SpecForge, vLLM and SGLang (causal inside the block, window counted from each query); a DFlash 2's
sliding layers see the whole block.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from common.attention import AttentionMask, GroupedMask, MaskGroup

GROUP_BLOCKS = 8  # 2 to 16 take the same time at 128 blocks of 16 over 1,024 tokens, 32 twice it
DPACE_ALPHA = 0.5  # the floor of a slot's chance, so that later slots are learnt early on too
PADDING = -1  # the document number of padding tokens

MaskPredicate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Pack:
    """Documents side by side in one row, padding at the end.

    input_ids (S,) int64 · loss_mask (S,) bool · documents (S,) int32, PADDING on padding ·
    positions (S,) int64, from 0 in each document.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class Blocks:
    """N blocks of B slots over one pack.

    anchors (N,) int64, places in the pack · keep (N,) bool, False on padded blocks ·
    input_ids, positions, labels (Q,) int64 · supervised (Q,) bool: the slot's label counts.
    """

    anchors: torch.Tensor
    keep: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    supervised: torch.Tensor

    @property
    def block_size(self) -> int:
        return len(self.input_ids) // len(self.anchors)


def legal_anchors(pack: Pack) -> torch.Tensor:
    """Where a block may start, (S,) bool: the token and its successor are supervised, one document.

    The successor's rule leaves every block with at least one supervised slot.
    """
    legal = torch.zeros_like(pack.loss_mask)
    same = (pack.documents[:-1] == pack.documents[1:]) & (pack.documents[:-1] != PADDING)
    legal[:-1] = pack.loss_mask[:-1] & pack.loss_mask[1:] & same
    return legal


def sample_anchors(
    legal: torch.Tensor, num_anchors: int, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw anchors uniformly without replacement: (N,) int64 ascending, and (N,) bool keep.

    When fewer are legal, the rest are padded blocks at place 0 with keep False, so that shapes
    never change.
    """
    places = torch.nonzero(legal)[:, 0]
    order = torch.randperm(len(places), generator=generator)[:num_anchors]
    chosen = places[order].sort().values
    anchors = torch.zeros(num_anchors, dtype=torch.int64)
    anchors[: len(chosen)] = chosen
    return anchors, torch.arange(num_anchors) < len(chosen)


def make_blocks(
    pack: Pack,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Lay out the blocks of `anchors` (N,): the clean anchor token, then mask tokens."""
    slots = torch.arange(block_size, device=anchors.device)
    places = anchors[:, None] + slots
    inside = places < len(pack.input_ids)
    places = places.clamp(max=len(pack.input_ids) - 1)
    same = pack.documents[places] == pack.documents[anchors][:, None]
    labels = pack.input_ids[places]
    supervised = keep[:, None] & inside & same & pack.loss_mask[places] & (slots > 0)
    input_ids = torch.where(slots == 0, labels, mask_token_id)
    positions = pack.positions[anchors][:, None] + slots
    return Blocks(
        anchors=anchors,
        keep=keep,
        input_ids=input_ids.flatten(),
        positions=positions.flatten(),
        labels=labels.flatten(),
        supervised=supervised.flatten(),
    )


def decay_weights(blocks: Blocks, *, gamma: float) -> torch.Tensor:
    """exp(-(k-1)/gamma) on supervised slots, 0 elsewhere: (Q,) float32 (arXiv 2602.06036).

    With gamma 0 there is no decay: 1 on supervised slots.
    """
    if gamma == 0:
        return blocks.supervised.float()
    slots = torch.arange(blocks.block_size, device=blocks.anchors.device)
    decay = torch.exp(-(slots.float() - 1).clamp(min=0) / gamma)
    return decay.repeat(len(blocks.anchors)) * blocks.supervised


def dpace_weights(blocks: Blocks, cross_entropy: torch.Tensor) -> torch.Tensor:
    """What each supervised slot adds to the expected acceptance, 0 elsewhere: (Q,) float32.

    cross_entropy (Q,). With q_k = exp(-CE_k), made no smaller than a half by (q_k + 1) / 2, C_j is
    the product of the block's first j, the chance that all of them are accepted; slot k weighs
    the sum of C_j for j >= k (D-PACE, arXiv 2605.18810, alpha 0.5). Unsupervised slots are passed
    over: they neither break the product nor count in the sum.
    """
    supervised = blocks.supervised.view(len(blocks.anchors), blocks.block_size)
    accepted = DPACE_ALPHA + (1 - DPACE_ALPHA) * torch.exp(-cross_entropy).view_as(supervised)
    reached = torch.where(supervised, accepted, 1.0).cumprod(dim=1) * supervised
    from_here = reached.flip(1).cumsum(dim=1).flip(1) * supervised
    return from_here.flatten()


def mask_predicate(
    pack: Pack, blocks: Blocks, *, sliding_window: int | None, causal: bool = True
) -> MaskPredicate:
    """The rule of attention, as flex_attention's mask_mod(b, h, q_idx, kv_idx) -> bool.

    Queries are the Q block slots; keys are the S context tokens, then the Q block slots. A slot
    sees context of its document strictly before its anchor, and its own block: all of it in full
    layers (`sliding_window` None), itself and earlier slots in sliding ones, all of it there too
    unless `causal`; the context of sliding ones reaches back window - 1 positions from the query.
    Padded blocks see only their own block.
    """
    context_length, size = len(pack.input_ids), blocks.block_size
    anchor_document = pack.documents[blocks.anchors]
    anchor_position = pack.positions[blocks.anchors]
    documents, positions, keep = pack.documents, pack.positions, blocks.keep

    def predicate(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        block, slot = q_idx // size, q_idx % size
        token = kv_idx.clamp(max=context_length - 1)
        # Below 0 for context keys, which no block is. A clamp here, torch 2.13's inductor can't
        # compile in create_block_mask ("vr must not be None for symbol q0").
        key_block, key_slot = (kv_idx - context_length) // size, (kv_idx - context_length) % size
        before = (
            keep[block]
            & (documents[token] == anchor_document[block])
            & (positions[token] < anchor_position[block])
        )
        own = key_block == block
        if sliding_window is not None:
            reach = anchor_position[block] + slot - (sliding_window - 1)
            before = before & (positions[token] >= reach)
            if causal:
                own = own & (key_slot <= slot)
        return torch.where(kv_idx < context_length, before, own)

    return predicate


def layer_masks(
    pack: Pack,
    blocks: Blocks,
    *,
    layer_types: Sequence[str],
    sliding_window: int | None,
    attention: str,
    causal: bool = True,
) -> dict[str, AttentionMask]:
    """The masks of the layer types in use: a BlockMask for flex; for sdpa groups on a CPU, which
    run eagerly, and a dense mask elsewhere, whose shape never changes.
    """
    masks: dict[str, AttentionMask] = {}
    for kind in sorted(set(layer_types)):
        window = sliding_window if kind == "sliding_attention" else None
        if attention == "flex":
            masks[kind] = flex_mask(pack, blocks, sliding_window=window, causal=causal)
        elif pack.input_ids.device.type == "cpu":
            masks[kind] = grouped_mask(pack, blocks, sliding_window=window, causal=causal)
        else:
            masks[kind] = dense_mask(pack, blocks, sliding_window=window, causal=causal)
    return masks


def dense_mask(
    pack: Pack, blocks: Blocks, *, sliding_window: int | None, causal: bool = True
) -> torch.Tensor:
    """The predicate over all (query, key) pairs: (1, 1, Q, S+Q) bool."""
    queries, keys = _sizes(pack, blocks)
    device = pack.input_ids.device
    return _mask_over(
        mask_predicate(pack, blocks, sliding_window=sliding_window, causal=causal),
        torch.arange(queries, device=device),
        torch.arange(keys, device=device),
    )


def grouped_mask(
    pack: Pack, blocks: Blocks, *, sliding_window: int | None, causal: bool = True
) -> GroupedMask:
    """The predicate over groups of neighbouring blocks and the stretch of context they can see.

    Anchors ascend, so the stretch is short: a group's pairs are an eighth of all at 128 blocks.
    """
    predicate = mask_predicate(pack, blocks, sliding_window=sliding_window, causal=causal)
    length, size = len(pack.input_ids), blocks.block_size
    # a kept block sees places first <= place < anchor; a padded one sees none
    first = blocks.anchors - pack.positions[blocks.anchors]
    if sliding_window is not None:
        first = torch.maximum(first, blocks.anchors - (sliding_window - 1))
    starts = torch.where(blocks.keep, first, length).split(GROUP_BLOCKS)
    ends = torch.where(blocks.keep, blocks.anchors, 0).split(GROUP_BLOCKS)
    groups, begin = [], 0
    for start, end in zip(starts, ends, strict=True):
        queries = slice(begin, begin + len(start) * size)
        stop = int(end.max())
        context = slice(min(int(start.min()), stop), stop)
        own = torch.arange(queries.start, queries.stop)
        keys = torch.cat([torch.arange(context.start, context.stop), length + own])
        groups.append(MaskGroup(queries, context, _mask_over(predicate, own, keys)))
        begin = queries.stop
    return GroupedMask(length, tuple(groups))


def _mask_over(predicate: MaskPredicate, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The predicate over these queries and keys, (1, 1, q, k) bool.

    Called once with broadcasting indices: create_mask would gather at every pair, ten times slower.
    """
    zero = torch.zeros((), dtype=torch.int64, device=queries.device)
    return predicate(zero, zero, queries[:, None], keys[None, :])[None, None]


def flex_mask(
    pack: Pack, blocks: Blocks, *, sliding_window: int | None, causal: bool = True
) -> BlockMask:
    """The predicate as flex_attention's sparse block mask.

    Compiled on CUDA: as it stands create_block_mask evaluates the predicate on all Q x KV pairs
    (0.7 GB for a pack of 4,096 tokens with 512 blocks), compiled it keeps only tiles of 128. With
    fixed numbers of anchors and tokens one static graph serves the whole run.
    """
    queries, keys = _sizes(pack, blocks)
    device = pack.input_ids.device
    make = _compiled_create_block_mask() if device.type == "cuda" else create_block_mask
    predicate = mask_predicate(pack, blocks, sliding_window=sliding_window, causal=causal)
    return make(predicate, None, None, queries, keys, device=str(device))


@functools.cache
def _compiled_create_block_mask() -> Any:
    return torch.compile(create_block_mask, dynamic=False)  # on first use, as it imports inductor


def _sizes(pack: Pack, blocks: Blocks) -> tuple[int, int]:
    """Numbers of queries and of keys."""
    return len(blocks.input_ids), len(pack.input_ids) + len(blocks.input_ids)
