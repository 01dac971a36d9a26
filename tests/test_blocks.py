"""The one mask predicate against a plain loop, both forms of it, labels, weights and anchors."""

import math
import shutil

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from common.attention import GroupedMask, attend
from common.blocks import (
    PADDING,
    Pack,
    decay_weights,
    dense_mask,
    flex_mask,
    grouped_mask,
    layer_masks,
    legal_anchors,
    make_blocks,
    sample_anchors,
)

SIZE, MASK = 4, 99
LENGTHS = (11, 6, 9)  # then padding


@pytest.fixture
def pack():
    length = 32
    documents = torch.full((length,), PADDING, dtype=torch.int32)
    positions = torch.zeros(length, dtype=torch.int64)
    start = 0
    for number, tokens in enumerate(LENGTHS):
        documents[start : start + tokens] = number
        positions[start : start + tokens] = torch.arange(tokens)
        start += tokens
    generator = torch.Generator().manual_seed(0)
    return Pack(
        input_ids=torch.randint(0, 90, (length,), generator=generator),
        loss_mask=(torch.rand(length, generator=generator) < 0.8) & (documents != PADDING),
        documents=documents,
        positions=positions,
    )


# anchor 0; overlapping ones; blocks past their document's end; the last token; two padded blocks
ANCHORS = torch.tensor([0, 3, 4, 5, 9, 10, 11, 16, 17, 25, 0, 0])
KEEP = torch.tensor([True] * 10 + [False] * 2)


def blocks_of(pack, anchors=ANCHORS, keep=KEEP):
    return make_blocks(pack, anchors, keep, block_size=SIZE, mask_token_id=MASK)


def allowed(pack, anchors, keep, query, key, window):
    """The rule in words, one (query, key) pair at a time."""
    block, slot = divmod(query, SIZE)
    anchor = int(anchors[block])
    length = len(pack.input_ids)
    if key >= length:
        key_block, key_slot = divmod(key - length, SIZE)
        if key_block != block:
            return False
        return key_slot <= slot if window else True
    if not keep[block] or pack.documents[key] != pack.documents[anchor]:
        return False
    if not key < anchor:
        return False
    return not window or int(pack.positions[key]) > int(pack.positions[anchor]) + slot - window


@pytest.mark.parametrize("window", [None, 4, 7])
def test_the_mask_equals_a_loop_over_all_pairs(pack, window):
    blocks = blocks_of(pack)
    mask = dense_mask(pack, blocks, sliding_window=window)
    queries, keys = len(ANCHORS) * SIZE, len(pack.input_ids) + len(ANCHORS) * SIZE
    assert mask.shape == (1, 1, queries, keys) and mask.dtype == torch.bool
    for query in range(queries):
        for key in range(keys):
            want = allowed(pack, ANCHORS, KEEP, query, key, window)
            assert bool(mask[0, 0, query, key]) == want, (query, key)
    assert mask.any(-1).all(), "a query that sees nothing has no softmax"


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_flex_forward_equals_sdpa_with_the_dense_mask(pack, kind):
    blocks = blocks_of(pack)
    window = 6 if kind == "sliding_attention" else None
    queries, keys = len(ANCHORS) * SIZE, len(pack.input_ids) + len(ANCHORS) * SIZE
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 16) for h, n in ((4, queries), (2, keys), (2, keys)))
    with torch.no_grad():
        flex = flex_attention(
            q, k, v, block_mask=flex_mask(pack, blocks, sliding_window=window), enable_gqa=True
        )
        dense = scaled_dot_product_attention(
            q, k, v, attn_mask=dense_mask(pack, blocks, sliding_window=window), enable_gqa=True
        )
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_the_compiled_block_mask_equals_the_eager_one(pack, monkeypatch):
    """What a GPU does, by the same compiler front: it refused an earlier form of the predicate."""
    blocks = blocks_of(pack)
    eager = flex_mask(pack, blocks, sliding_window=6)
    compiled = torch.compile(create_block_mask, dynamic=False)
    monkeypatch.setattr("common.blocks.create_block_mask", compiled)
    other = flex_mask(pack, blocks, sliding_window=6)
    for one, two in zip(eager.as_tuple(), other.as_tuple(), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, two)


@pytest.mark.parametrize("per_group", [1, 3, 8, 100])
@pytest.mark.parametrize("window", [None, 4, 7])
def test_groups_leave_out_only_what_no_slot_sees(pack, monkeypatch, window, per_group):
    monkeypatch.setattr("common.blocks.GROUP_BLOCKS", per_group)
    blocks = blocks_of(pack)
    dense = dense_mask(pack, blocks, sliding_window=window)
    grouped = grouped_mask(pack, blocks, sliding_window=window)
    length, rebuilt = grouped.context_length, torch.zeros_like(dense)
    for queries, context, mask in grouped.groups:
        seen = mask.shape[-1] - (queries.stop - queries.start)
        assert seen == context.stop - context.start
        rebuilt[:, :, queries, context] = mask[..., :seen]
        own = slice(length + queries.start, length + queries.stop)
        rebuilt[:, :, queries, own] = mask[..., seen:]
    assert torch.equal(rebuilt, dense)


def test_attention_in_groups_equals_the_dense_one_with_its_gradients(pack):
    blocks = blocks_of(pack)
    queries, keys = len(ANCHORS) * SIZE, len(pack.input_ids) + len(ANCHORS) * SIZE
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, n, 16) for h, n in ((4, queries), (2, keys), (2, keys))]
    results = []
    for make in (dense_mask, grouped_mask):
        given = [x.clone().requires_grad_() for x in inputs]
        output = attend(*given, make(pack, blocks, sliding_window=6))
        output.square().sum().backward()
        results.append([output.detach(), *[x.grad for x in given]])
    for grouped, dense in zip(*reversed(results), strict=True):
        torch.testing.assert_close(grouped, dense, atol=1e-5, rtol=1e-5)


def test_each_layer_type_gets_its_own_mask(pack):
    blocks = blocks_of(pack)
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    for attention, form in (("sdpa", GroupedMask), ("flex", BlockMask)):
        masks = layer_masks(pack, blocks, layer_types=kinds, sliding_window=4, attention=attention)
        assert set(masks) == set(kinds)
        assert all(isinstance(mask, form) for mask in masks.values())
    masks = layer_masks(pack, blocks, layer_types=kinds, sliding_window=4, attention="sdpa")
    sizes = {kind: sum(int(group.mask.sum()) for group in masks[kind].groups) for kind in kinds}
    assert sizes == {
        "full_attention": int(dense_mask(pack, blocks, sliding_window=None).sum()),
        "sliding_attention": int(dense_mask(pack, blocks, sliding_window=4).sum()),
    }
    assert sizes["sliding_attention"] < sizes["full_attention"]


def test_inputs_labels_and_supervision_slot_by_slot(pack):
    blocks = blocks_of(pack)
    for block, anchor in enumerate(ANCHORS.tolist()):
        for slot in range(SIZE):
            index, place = block * SIZE + slot, anchor + slot
            inside = place < 32 and pack.documents[place] == pack.documents[anchor]
            want = bool(KEEP[block] and slot > 0 and inside and pack.loss_mask[place])
            assert bool(blocks.supervised[index]) == want, (anchor, slot)
            assert blocks.positions[index] == pack.positions[anchor] + slot
            assert blocks.input_ids[index] == (pack.input_ids[anchor] if slot == 0 else MASK)
            if inside:
                assert blocks.labels[index] == pack.input_ids[place]
    weights = decay_weights(blocks, gamma=3.0)
    for index in range(len(weights)):
        slot = index % SIZE
        want = math.exp(-(slot - 1) / 3.0) if blocks.supervised[index] else 0.0
        assert float(weights[index]) == pytest.approx(want, rel=1e-6)


def test_legal_anchors_need_their_own_and_the_next_token(pack):
    legal = legal_anchors(pack)
    for place in range(32):
        want = (
            place + 1 < 32
            and bool(pack.loss_mask[place] and pack.loss_mask[place + 1])
            and pack.documents[place] == pack.documents[place + 1] != PADDING
        )
        assert bool(legal[place]) == want, place
    assert legal.any()


def test_anchors_are_drawn_without_replacement_sorted_and_padded():
    legal = torch.zeros(100, dtype=torch.bool)
    legal[20:80] = True
    anchors, keep = sample_anchors(legal, 30, generator=torch.Generator().manual_seed(1))
    assert keep.all() and len(set(anchors.tolist())) == 30
    assert anchors.tolist() == sorted(anchors.tolist()) and legal[anchors].all()
    again, _ = sample_anchors(legal, 30, generator=torch.Generator().manual_seed(1))
    other, _ = sample_anchors(legal, 30, generator=torch.Generator().manual_seed(2))
    assert torch.equal(anchors, again) and not torch.equal(anchors, other)
    anchors, keep = sample_anchors(legal, 90, generator=torch.Generator())
    assert anchors.shape == keep.shape == (90,) and keep.sum() == 60
    assert anchors[keep].tolist() == list(range(20, 80))
    _, keep = sample_anchors(torch.zeros(100, dtype=torch.bool), 5, generator=torch.Generator())
    assert not keep.any()


def test_every_legal_place_is_equally_likely_whatever_its_document():
    legal = torch.zeros(200, dtype=torch.bool)
    legal[5:15] = True  # a short document
    legal[40:190] = True  # a long one
    counts = torch.zeros(200)
    for seed in range(400):
        anchors, keep = sample_anchors(legal, 32, generator=torch.Generator().manual_seed(seed))
        counts[anchors[keep]] += 1
    share = counts[legal] / 400
    assert share.mean() == pytest.approx(32 / 160)
    assert counts[5:15].mean() / 400 == pytest.approx(32 / 160, rel=0.1)
    assert share.std() < 0.03
