"""Anchors, block inputs, the one mask predicate, labels and weights: pure tensor functions.

Letters: S tokens of a pack, N anchors, B block size, Q = N*B block slots. Slot k of the block at
anchor a stands at position a+k of its document and predicts the token there; slot 0 holds the
anchor's own token and predicts nothing. Sources: z-lab/dflash model.py; the sliding rule is that of
SpecForge, vLLM and SGLang (causal inside the block, window counted from each query).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

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
    """exp(-(k-1)/gamma) on supervised slots, 0 elsewhere: (Q,) float32 (arXiv 2602.06036)."""
    slots = torch.arange(blocks.block_size, device=blocks.anchors.device)
    decay = torch.exp(-(slots.float() - 1) / gamma)
    return decay.repeat(len(blocks.anchors)) * blocks.supervised


def mask_predicate(pack: Pack, blocks: Blocks, *, sliding_window: int | None) -> MaskPredicate:
    """The rule of attention, as flex_attention's mask_mod(b, h, q_idx, kv_idx) -> bool.

    Queries are the Q block slots; keys are the S context tokens, then the Q block slots. A slot
    sees context of its document strictly before its anchor, and its own block: all of it in full
    layers (`sliding_window` None), itself and earlier slots in sliding ones, whose context reaches
    back window - 1 positions from the query. Padded blocks see only their own block.
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
        key_slot_index = (kv_idx - context_length).clamp(min=0)
        key_block, key_slot = key_slot_index // size, key_slot_index % size
        before = (
            keep[block]
            & (documents[token] == anchor_document[block])
            & (positions[token] < anchor_position[block])
        )
        own = key_block == block
        if sliding_window is not None:
            reach = anchor_position[block] + slot - (sliding_window - 1)
            before = before & (positions[token] >= reach)
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
) -> dict[str, torch.Tensor | BlockMask]:
    """The masks of the layer types in use: dense (1, 1, Q, S+Q) for sdpa, BlockMask for flex."""
    masks = {}
    for kind in sorted(set(layer_types)):
        window = sliding_window if kind == "sliding_attention" else None
        predicate = mask_predicate(pack, blocks, sliding_window=window)
        make = dense_mask if attention == "sdpa" else flex_mask
        masks[kind] = make(predicate, pack, blocks)
    return masks


def dense_mask(predicate: MaskPredicate, pack: Pack, blocks: Blocks) -> torch.Tensor:
    """The predicate over all (query, key) pairs: (1, 1, Q, S+Q) bool.

    Called once with broadcasting indices: create_mask would gather at every pair, ten times slower.
    """
    queries, keys = len(blocks.input_ids), len(pack.input_ids) + len(blocks.input_ids)
    device = pack.input_ids.device
    query = torch.arange(queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return predicate(zero, zero, query, key)[None, None]


def flex_mask(predicate: MaskPredicate, pack: Pack, blocks: Blocks) -> BlockMask:
    """The predicate as flex_attention's sparse block mask."""
    queries, keys = len(blocks.input_ids), len(pack.input_ids) + len(blocks.input_ids)
    return create_block_mask(
        predicate, None, None, queries, keys, device=str(pack.input_ids.device)
    )
