"""The tiled loss against plain Python and dense autograd."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.blocks import Pack, decay_weights, make_blocks
from common.loss import weighted_loss

HIDDEN, WORDS, SIZE = 12, 30, 5


@pytest.fixture
def parts():
    """Two documents, an unsupervised hole in the first, a block past each one's end, one pad."""
    documents = torch.tensor([0] * 14 + [1] * 10 + [-1] * 8, dtype=torch.int32)
    torch.manual_seed(0)
    loss_mask = documents >= 0
    loss_mask[[0, 1, 6, 14]] = False
    pack = Pack(
        input_ids=torch.randint(0, WORDS, (32,)),
        loss_mask=loss_mask,
        documents=documents,
        positions=torch.cat([torch.arange(14), torch.arange(10), torch.zeros(8)]).long(),
    )
    anchors = torch.tensor([2, 4, 5, 12, 16, 22, 0])
    keep = torch.tensor([True] * 6 + [False])
    blocks = make_blocks(pack, anchors, keep, block_size=SIZE, mask_token_id=1)
    return pack, blocks, torch.randn(len(anchors) * SIZE, HIDDEN), torch.randn(WORDS, HIDDEN)


def test_loss_equals_plain_python(parts):
    pack, blocks, hidden, head = parts
    gamma, total, weight_sum, correct = 4.0, 0.0, 0.0, 0
    for block, anchor in enumerate(blocks.anchors.tolist()):
        for slot in range(1, SIZE):
            place = anchor + slot
            if not blocks.keep[block] or place >= 32:
                continue
            if pack.documents[place] != pack.documents[anchor] or not pack.loss_mask[place]:
                continue
            logits = [
                sum(
                    float(a) * float(b)
                    for a, b in zip(hidden[block * SIZE + slot], row, strict=True)
                )
                for row in head
            ]
            label = int(pack.input_ids[place])
            weight = math.exp(-(slot - 1) / gamma)
            total += weight * (math.log(sum(map(math.exp, logits))) - logits[label])
            weight_sum += weight
            correct += logits.index(max(logits)) == label
    sums = weighted_loss(hidden, head, blocks, decay_weights(blocks, gamma=gamma))
    assert float(sums.loss) == pytest.approx(total, rel=1e-5)
    assert float(sums.weight) == pytest.approx(weight_sum, rel=1e-6)
    assert float(sums.correct.sum()) == correct
    assert sums.supervised[0] == 0 and sums.supervised.sum() == blocks.supervised.sum() > 0


def naive(hidden, head, blocks, weights):
    """Loss, gradient and right slots from all logits at once, cross entropy and autograd."""
    hidden = hidden.detach().clone().requires_grad_()
    logits = hidden @ head.T
    each = cross_entropy(logits.to(weights.dtype), blocks.labels, reduction="none")
    loss = (each * weights).sum() / weights.sum()
    loss.backward()
    right = (logits.argmax(-1) == blocks.labels) & blocks.supervised
    return loss.detach(), hidden.grad, right.view(len(blocks.anchors), -1).sum(0)


def ours(hidden, head, blocks, weights, tile_bytes=None):
    hidden = hidden.detach().clone().requires_grad_()
    sums = weighted_loss(hidden, head, blocks, weights, tile_bytes=tile_bytes)
    loss = sums.loss / sums.weight
    loss.backward()
    return loss.detach(), hidden.grad, sums.correct.long()


def random_case(words, *, width=64, scale=1.0, sharp=0.0):
    """Forty blocks over one document; `sharp` draws the states towards their labels' rows."""
    generator = torch.Generator().manual_seed(words)
    pack = Pack(
        input_ids=torch.randint(words, (200,), generator=generator),
        loss_mask=torch.rand(200, generator=generator) < 0.9,
        documents=torch.zeros(200, dtype=torch.int32),
        positions=torch.arange(200),
    )
    anchors = torch.arange(0, 200, 5)
    blocks = make_blocks(
        pack, anchors, torch.ones(40, dtype=torch.bool), block_size=16, mask_token_id=1
    )
    hidden = torch.randn(40 * 16, width, generator=generator) * scale
    head = torch.randn(words, width, generator=generator) / width**0.5
    return blocks, hidden + sharp * head[blocks.labels], head


TILES = [1, 256 * 1000, 256 * 1000 * 3, None]  # one, a few or many tiles of 64 words and more


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("sharp", [0.0, 4.0, 30.0])
@pytest.mark.parametrize("words", [2, 64, 1000, 1025])
def test_loss_and_gradients_equal_the_naive_ones(words, sharp, tile_bytes):
    blocks, hidden, head = random_case(words, sharp=sharp)
    weights = decay_weights(blocks, gamma=7.0)
    want, want_gradient, want_right = naive(hidden, head, blocks, weights)
    loss, gradient, right = ours(hidden, head, blocks, weights, tile_bytes)
    torch.testing.assert_close(loss, want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, atol=1e-6, rtol=1e-6)
    assert torch.equal(right, want_right)
    assert gradient[~blocks.supervised].abs().max() == 0


@pytest.mark.parametrize("tile_bytes", TILES)
def test_logits_far_apart_neither_overflow_nor_vanish(tile_bytes):
    blocks, hidden, head = random_case(1000, scale=200.0)
    weights = decay_weights(blocks, gamma=7.0)
    double = naive(hidden.double(), head.double(), blocks, weights.double())
    loss, gradient, _ = ours(hidden, head, blocks, weights, tile_bytes)
    torch.testing.assert_close(loss, double[0].float(), atol=0, rtol=1e-5)
    torch.testing.assert_close(gradient, double[1].float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tile_bytes", [1, None])
def test_a_batch_without_supervision_gives_zero_and_finite_gradients(parts, tile_bytes):
    pack, blocks, hidden, head = parts
    nothing = make_blocks(
        pack, blocks.anchors, torch.zeros_like(blocks.keep), block_size=SIZE, mask_token_id=1
    )
    hidden = hidden.requires_grad_()
    weights = decay_weights(nothing, gamma=2.0)
    sums = weighted_loss(hidden, head, nothing, weights, tile_bytes=tile_bytes)
    sums.loss.backward()
    assert sums.loss.item() == 0 and sums.weight.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("tile_bytes", [1, None])
@pytest.mark.parametrize("sharp", [0.0, 4.0, 12.0])
def test_bf16_is_as_near_to_float64_as_the_naive_way(sharp, tile_bytes):
    blocks, hidden, head = random_case(1000, sharp=sharp)
    hidden, head = hidden.bfloat16(), head.bfloat16()
    weights = decay_weights(blocks, gamma=7.0)
    exact = naive(hidden.double(), head.double(), blocks, weights.double())
    plain = naive(hidden, head, blocks, weights)
    loss, gradient, right = ours(hidden, head, blocks, weights, tile_bytes)
    assert loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert float(loss) == pytest.approx(float(exact[0]), rel=0.01)
    assert torch.equal(right, plain[2]), "ties are broken as argmax does"

    def error(gradient):
        return float((gradient.double() - exact[1]).norm() / exact[1].norm())

    assert error(gradient) <= max(1.1 * error(plain[1]), 0.004)  # bf16's own rounding
