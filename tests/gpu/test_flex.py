"""Compiled flex attention, forward and backward, against SDPA with the dense mask, on a GPU."""

import pytest
import torch

from common.blocks import Pack, layer_masks, make_blocks
from common.drafter import Drafter
from common.drafter_config import DrafterConfig

LENGTH, SIZE, ANCHORS = 512, 16, 64


def drafter_and_inputs(dtype: torch.dtype):
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
        sliding_window=64,
    )
    torch.manual_seed(0)
    drafter = Drafter(config)
    drafter.reset_parameters(seed=0)
    drafter = drafter.to("cuda", dtype)
    documents = torch.arange(LENGTH, device="cuda") // 200
    pack = Pack(
        input_ids=torch.randint(1000, (LENGTH,), device="cuda"),
        loss_mask=torch.ones(LENGTH, dtype=torch.bool, device="cuda"),
        documents=documents.int(),
        positions=torch.arange(LENGTH, device="cuda") % 200,
    )
    anchors = torch.randperm(LENGTH - 1, device="cuda")[:ANCHORS].sort().values
    keep = torch.arange(ANCHORS, device="cuda") < ANCHORS - 3
    blocks = make_blocks(pack, anchors, keep, block_size=SIZE, mask_token_id=9)
    taps = torch.randn(1, LENGTH, 1024, device="cuda", dtype=dtype)
    embeddings = torch.randn(1, ANCHORS * SIZE, 512, device="cuda", dtype=dtype)
    return drafter, pack, blocks, taps, embeddings


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 6e-2)], ids=str
)
def test_flex_equals_sdpa_forward_and_backward(dtype, tolerance):
    drafter, pack, blocks, taps, embeddings = drafter_and_inputs(dtype)
    results = {}
    for attention in ("sdpa", "flex"):
        masks = layer_masks(
            pack, blocks, layer_types=drafter.config.layer_types, sliding_window=64,
            attention=attention,
        )  # fmt: skip
        drafter.zero_grad()
        output = drafter(
            taps,
            embeddings,
            context_positions=pack.positions[None],
            block_positions=blocks.positions[None],
            masks=masks,
        )
        kept = output[0][blocks.keep.repeat_interleave(SIZE)]
        kept.float().square().mean().backward()
        gradients = {name: p.grad.float() for name, p in drafter.named_parameters()}
        results[attention] = kept.detach().float(), gradients
    (dense, dense_gradients), (flex, flex_gradients) = results["sdpa"], results["flex"]
    torch.testing.assert_close(flex, dense, atol=tolerance, rtol=tolerance)
    for name, gradient in dense_gradients.items():
        scale = float(gradient.abs().max())
        difference = float((flex_gradients[name] - gradient).abs().max())
        assert difference <= 5 * tolerance * scale, name
