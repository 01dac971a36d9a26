"""The chunked loss against plain Python and dense autograd; acceptance by hand."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.blocks import Pack, decay_weights, make_blocks
from common.loss import acceptance_lengths, block_predictions, walked_acceptance, weighted_loss

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


@pytest.mark.parametrize("chunk_slots", [1, 3, 1000])
def test_loss_equals_plain_python(parts, chunk_slots):
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
    sums = weighted_loss(
        hidden, head, blocks, decay_weights(blocks, gamma=gamma), chunk_slots=chunk_slots
    )
    assert float(sums.loss) == pytest.approx(total, rel=1e-5)
    assert float(sums.weight) == pytest.approx(weight_sum, rel=1e-6)
    assert float(sums.correct.sum()) == correct
    assert sums.supervised[0] == 0 and sums.supervised.sum() == blocks.supervised.sum() > 0


@pytest.mark.parametrize("chunk_slots", [2, 1000])
def test_gradients_equal_dense_autograd(parts, chunk_slots):
    _, blocks, hidden, head = parts
    weights = decay_weights(blocks, gamma=2.0)
    ours, dense = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = weighted_loss(ours, head, blocks, weights, chunk_slots=chunk_slots).loss
    (loss / 7).backward()
    each = cross_entropy(dense @ head.T, blocks.labels, reduction="none")
    ((each * weights).sum() / 7).backward()
    torch.testing.assert_close(ours.grad, dense.grad, atol=1e-6, rtol=1e-6)
    assert ours.grad[~blocks.supervised].abs().max() == 0


def test_a_batch_without_supervision_gives_zero_and_finite_gradients(parts):
    pack, blocks, hidden, head = parts
    nothing = make_blocks(
        pack, blocks.anchors, torch.zeros_like(blocks.keep), block_size=SIZE, mask_token_id=1
    )
    hidden = hidden.requires_grad_()
    sums = weighted_loss(hidden, head, nothing, decay_weights(nothing, gamma=2.0), chunk_slots=1000)
    sums.loss.backward()
    assert sums.loss.item() == 0 and sums.weight.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_bf16_states_keep_a_float32_softmax(parts):
    _, blocks, hidden, head = parts
    weights = decay_weights(blocks, gamma=2.0)
    exact = weighted_loss(hidden, head, blocks, weights, chunk_slots=1000).loss
    half = weighted_loss(
        hidden.bfloat16().requires_grad_(), head.bfloat16(), blocks, weights, chunk_slots=1000
    ).loss
    assert half.dtype == torch.float32
    assert float(half) == pytest.approx(float(exact), rel=0.02)


def test_acceptance_counts_leading_right_drafts_and_the_bonus(parts):
    _, blocks, _, _ = parts
    right = blocks.labels.clone()
    # anchors 2, 4, 5, 12, 16, 22: slots after the hole at 6 and past the ends 13, 23 never count
    assert acceptance_lengths(right, blocks).tolist() == [4, 2, 1, 2, 5, 2, 1]
    wrong = right.clone()
    wrong[4 * SIZE + 2] += 1
    assert acceptance_lengths(wrong, blocks).tolist() == [4, 2, 1, 2, 2, 2, 1]


def test_predictions_are_the_heads_argmax(parts):
    _, _, hidden, head = parts
    assert torch.equal(block_predictions(hidden, head, chunk_slots=4), (hidden @ head.T).argmax(-1))


def test_the_walk_jumps_by_what_was_accepted():
    anchors = torch.tensor([10, 11, 12, 13, 14, 15, 16])
    lengths = torch.tensor([3, 8, 8, 1, 2, 8, 5])
    # 10 +3-> 13 +1-> 14 +2-> 16 +5-> 21, where no draft is judged
    assert walked_acceptance(lengths, anchors) == (11, 4)
    assert walked_acceptance(lengths[:0], anchors[:0]) == (0, 0)
