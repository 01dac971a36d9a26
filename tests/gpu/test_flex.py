"""Compiled flex attention, forward and backward, against SDPA with the dense mask.

A CPU has flex's forward alone, and eager: only that is compared there.
"""

from dataclasses import replace

import pytest
import torch

from common.attention import attend
from common.blocks import Pack, dense_mask, flex_mask, layer_masks, make_blocks
from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from tests.gpu import DEVICE, ON_CUDA

LENGTH, SIZE, ANCHORS = 1024 if ON_CUDA else 256, 16, 64 if ON_CUDA else 16
HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128  # those of the 27B's drafter
WINDOW = 64
PADDED = 5  # blocks
# of the largest value: float32 would show TF32's 10 bits, bfloat16 has 8 itself
TOLERANCES = [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)]


def pack_and_blocks():
    """Three documents and padding; the last anchors are padded blocks."""
    lengths = [LENGTH // 4, LENGTH // 2, LENGTH // 8]
    positions = torch.zeros(LENGTH, dtype=torch.int64)
    documents = torch.full((LENGTH,), -1, dtype=torch.int32)
    start = 0
    for number, length in enumerate(lengths):
        positions[start : start + length] = torch.arange(length)
        documents[start : start + length] = number
        start += length
    generator = torch.Generator().manual_seed(0)
    pack = Pack(
        input_ids=torch.randint(1000, (LENGTH,), generator=generator).to(DEVICE),
        loss_mask=(documents >= 0).to(DEVICE),
        documents=documents.to(DEVICE),
        positions=positions.to(DEVICE),
    )
    kept = torch.randperm(start - 1, generator=generator)[: ANCHORS - PADDED].sort().values
    anchors = torch.cat([kept, torch.zeros(PADDED, dtype=torch.int64)]).to(DEVICE)
    keep = torch.arange(ANCHORS, device=DEVICE) < ANCHORS - PADDED
    return pack, make_blocks(pack, anchors, keep, block_size=SIZE, mask_token_id=9)


def assert_near(got, want, tolerance):
    """To `tolerance` of the largest value wanted; the largest difference, in those."""
    scale = float(want.abs().max())
    difference = float((got.to(want.dtype) - want).abs().max()) / scale
    assert scale > 0 and difference <= tolerance, difference
    return difference


@pytest.mark.parametrize("causal", [True, False], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "sliding"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
def test_attention_and_its_gradients(dtype, tolerance, window, causal, record_property):
    """Against float64 from the same inputs; queries, keys and values laid out as a layer's."""
    if window is None and not causal:
        pytest.skip("full layers are alike")
    pack, blocks = pack_and_blocks()
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    counts = {"q": (ANCHORS * SIZE, HEADS), "k": (LENGTH + ANCHORS * SIZE, KEY_HEADS)}
    shapes = [counts["q"], counts["k"], counts["k"]]
    inputs = [
        torch.randn(1, *shape, HEAD_DIM, generator=generator, device=DEVICE).to(dtype)
        for shape in shapes
    ]
    results = {}
    for form, wide in (("flex", dtype), ("dense", torch.float64)):
        make = flex_mask if form == "flex" else dense_mask
        mask = make(pack, blocks, sliding_window=window, causal=causal)
        with_gradients = ON_CUDA or form == "dense"
        leaves = [tensor.to(wide, copy=True).requires_grad_(with_gradients) for tensor in inputs]
        output = attend(*(leaf.transpose(1, 2) for leaf in leaves), mask)
        results[form] = [output.detach()]
        if ON_CUDA:
            output.square().sum().backward()
            results[form] += [leaf.grad for leaf in leaves]
    differences = [
        assert_near(got, want, tolerance)
        for got, want in zip(results["flex"], results["dense"], strict=True)
    ]
    record_property("figure", f"off by {max(differences):.1e}")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 6e-2)], ids=str
)
def test_a_drafter_and_its_gradients(dtype, tolerance, record_property):
    """Both layer types in one model, by the masks that training makes."""
    config = DrafterConfig.for_target(
        hidden_size=512,
        intermediate_size=512,
        vocab_size=1000,
        num_target_layers=8,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=4096,
        eos_token_id=0,
        target_layer_ids=(1, 3),
        num_layers=2,
        block_size=SIZE,
        mask_token_id=9,
        sliding_window=WINDOW,
    )
    config = replace(config, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
    assert config.head_dim == HEAD_DIM and len(set(config.layer_types)) == 2
    drafter = Drafter(config)
    drafter.reset_parameters(seed=0)
    drafter = drafter.to(DEVICE, dtype).requires_grad_(ON_CUDA)
    pack, blocks = pack_and_blocks()
    generator = torch.Generator(device=DEVICE).manual_seed(2)
    taps, embeddings = (
        torch.randn(1, count, width, generator=generator, device=DEVICE).to(dtype)
        for count, width in ((LENGTH, 1024), (ANCHORS * SIZE, 512))
    )
    results = {}
    for form in ("sdpa", "flex"):
        masks = layer_masks(
            pack, blocks, layer_types=config.layer_types, sliding_window=WINDOW, attention=form
        )
        drafter.zero_grad()
        output = drafter(
            taps,
            embeddings,
            context_positions=pack.positions[None],
            block_positions=blocks.positions[None],
            masks=masks,
        )
        kept = output[0][blocks.keep.repeat_interleave(SIZE)]
        results[form] = {"states": kept.detach().float()}
        if ON_CUDA:
            kept.float().square().mean().backward()
            results[form] |= {name: p.grad.float() for name, p in drafter.named_parameters()}
    differences = []
    for name, want in results["sdpa"].items():
        limit = tolerance if name == "states" else 5 * tolerance
        differences.append(assert_near(results["flex"][name], want, limit))
    record_property("figure", f"off by {max(differences):.1e}")
