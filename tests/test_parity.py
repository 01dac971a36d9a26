"""The training forward, all anchors of a pack at once, equals drafting anchor by anchor as served.

This one equality holds positions, mask, layout and off-by-one together; each deliberate mistake
below must move the output by more than 0.1.
"""

import dataclasses

import pytest
import torch

from common.blocks import Pack, layer_masks, make_blocks
from common.drafter import ContextCache, Drafter
from common.drafter_config import DrafterConfig
from tests.tiny_models import tiny_drafter_config

HIDDEN, LAYERS, WORDS, MASK, SIZE = 32, 3, 50, 49, 6
LENGTHS = (23, 17, 31)
ANCHORS = [0, 3, 4, 5, 20, 23, 24, 30, 40, 60, 70]


def make_config(window: int) -> DrafterConfig:
    return tiny_drafter_config(
        hidden_size=HIDDEN,
        intermediate_size=48,
        max_position_embeddings=128,
        vocab_size=WORDS,
        block_size=SIZE,
        mask_token_id=MASK,
        target_layer_ids=(0, 1, 2),
        layer_types=("sliding_attention",) * 2 + ("full_attention",)
        if window
        else ("full_attention",) * 3,
        sliding_window=window or None,
    )


@pytest.fixture
def parts():
    return make_parts()


def make_parts():
    torch.manual_seed(0)
    length = 128
    documents = torch.full((length,), -1, dtype=torch.int32)
    positions = torch.zeros(length, dtype=torch.int64)
    start = 0
    for number, tokens in enumerate(LENGTHS):
        documents[start : start + tokens] = number
        positions[start : start + tokens] = torch.arange(tokens)
        start += tokens
    pack = Pack(
        input_ids=torch.randint(WORDS - 1, (length,)),
        loss_mask=documents >= 0,
        documents=documents,
        positions=positions,
    )
    return pack, torch.randn(1, length, LAYERS * HIDDEN), torch.randn(WORDS, HIDDEN)


def make_drafter(config: DrafterConfig) -> Drafter:
    drafter = Drafter(config)
    drafter.reset_parameters(seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * 2.0 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(1 + 0.4 * torch.randn_like(parameter))
    return drafter


def training_output(drafter, pack, taps, table, *, change_blocks=None, change_pack=None):
    config = drafter.config
    anchors = torch.tensor(ANCHORS)
    keep = torch.ones(len(ANCHORS), dtype=torch.bool)
    blocks = make_blocks(pack, anchors, keep, block_size=SIZE, mask_token_id=MASK)
    masked_by = blocks
    if change_blocks is not None:
        blocks, masked_by = change_blocks(blocks)
    masks = layer_masks(
        pack,
        masked_by,
        layer_types=config.layer_types,
        sliding_window=config.sliding_window,
        attention="sdpa",
        causal=config.causal,
    )
    output = drafter(
        taps,
        table[blocks.input_ids][None],
        context_positions=pack.positions[None],
        block_positions=blocks.positions[None],
        masks=masks,
    )
    return output[0].view(len(ANCHORS), SIZE, HIDDEN)


def served_output(drafter, pack, taps, table):
    """Draft at each anchor with a cache that grows through the document, as an engine does."""
    outputs = []
    for anchor in ANCHORS:
        document = pack.documents[anchor]
        start = int(torch.nonzero(pack.documents == document)[0])
        cache = ContextCache()
        ids = torch.full((SIZE,), MASK)
        drafted_at = sorted({start, *[a for a in ANCHORS if start <= a <= anchor]})
        seen = start
        for place in drafted_at:  # earlier drafts must leave no trace
            ids[0] = pack.input_ids[place]
            output = drafter.draft(taps[:, seen:place], table[ids][None], cache=cache)
            seen = place
        outputs.append(output[0])
    return torch.stack(outputs)


@pytest.mark.parametrize("window", [0, 8, 64])
def test_training_forward_equals_serving_forward(parts, window):
    pack, taps, table = parts
    drafter = make_drafter(make_config(window))
    trained = training_output(drafter, pack, taps, table)
    served = served_output(drafter, pack, taps, table)
    torch.testing.assert_close(trained, served, atol=1e-5, rtol=1e-5)


def sees_anchor(blocks):
    moved = dataclasses.replace(blocks, anchors=blocks.anchors + 1)
    return blocks, moved


def positions_shifted(blocks):
    return dataclasses.replace(blocks, positions=blocks.positions + 1), blocks


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize(
    "mistake", ["context <= anchor", "positions + 1", "taps swapped", "hidden states shifted"]
)
def test_a_mistake_shows(parts, mistake, window):
    pack, taps, table = parts
    drafter = make_drafter(make_config(window))
    served = served_output(drafter, pack, taps, table)
    change = {"context <= anchor": sees_anchor, "positions + 1": positions_shifted}.get(mistake)
    if mistake == "taps swapped":
        first, second, third = taps.chunk(3, dim=-1)
        taps = torch.cat([second, first, third], dim=-1)
    if mistake == "hidden states shifted":
        taps = taps.roll(1, dims=1)
    wrong = training_output(drafter, pack, taps, table, change_blocks=change)
    assert (wrong - served).abs().max() > 0.1
