"""The chunked losses on the GPU against all logits at once, in float32 and bfloat16."""

from dataclasses import fields, replace

import pytest
import torch

from common.blocks import decay_weights
from common.losses import block_loss
from tests.gpu import DEVICE
from tests.test_losses import naive_loss, teacher_case

WORDS = 50_001  # no multiple of a tile


def on_device(blocks):
    moved = {part.name: getattr(blocks, part.name).to(DEVICE) for part in fields(blocks)}
    return replace(blocks, **moved)


@pytest.mark.parametrize("tile_bytes", [8 << 20, None], ids=["tiles", "one tile"])
@pytest.mark.parametrize("kind", ["ce", "dpace", "kd", "ce+tv"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str
)
def test_loss_and_gradient(kind, tile_bytes, dtype, tolerance, record_property):
    """The naive way runs in float32 from the same, rounded inputs."""
    blocks, *states = teacher_case(kind, WORDS, sharp=4.0, near=0.5)
    blocks = on_device(blocks)
    hidden, head, final = (tensor.to(DEVICE, dtype) for tensor in states)
    weights = decay_weights(blocks, gamma=7.0)
    ours = hidden.clone().requires_grad_()
    sums = block_loss(kind, ours, head, blocks, weights, final=final, tile_bytes=tile_bytes)
    (sums.loss / sums.weight).backward()
    plain = hidden.float().requires_grad_()
    want, weight = naive_loss(kind, plain, head.float(), blocks, weights, final.float())
    (want / weight).backward()
    torch.testing.assert_close(
        sums.loss / sums.weight, (want / weight).detach(), atol=0, rtol=tolerance
    )
    difference = float((ours.grad.float() - plain.grad).norm() / plain.grad.norm())
    assert difference <= tolerance
    record_property("figure", f"gradient off by {difference:.1e}")
