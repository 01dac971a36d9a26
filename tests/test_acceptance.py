"""Acceptance figures against plain Python loops in float64, and by hand."""

import math

import pytest
import torch

from common.acceptance import (
    acceptance_lengths,
    expected_lengths,
    judge_drafts,
    shift_by_one,
    slot_shares,
    slot_sums,
    walked_acceptance,
)
from common.blocks import Pack, make_blocks

HIDDEN, WORDS, SIZE, LENGTH = 12, 30, 5, 32


@pytest.fixture
def pack():
    """Two documents, an unsupervised hole in the first, padding at the end."""
    documents = torch.tensor([0] * 14 + [1] * 10 + [-1] * 8, dtype=torch.int32)
    loss_mask = documents >= 0
    loss_mask[[0, 1, 6, 14]] = False
    generator = torch.Generator().manual_seed(0)
    return Pack(
        input_ids=torch.randint(0, WORDS, (LENGTH,), generator=generator),
        loss_mask=loss_mask,
        documents=documents,
        positions=torch.cat([torch.arange(14), torch.arange(10), torch.zeros(8)]).long(),
    )


@pytest.fixture
def blocks(pack):
    """Blocks over the hole and past each document's end, and a padded one."""
    anchors = torch.tensor([2, 4, 5, 12, 16, 22, 0])
    keep = torch.tensor([True] * 6 + [False])
    return make_blocks(pack, anchors, keep, block_size=SIZE, mask_token_id=1)


def softmax(logits, temperature):
    top = max(logits)
    parts = [math.exp((logit - top) / temperature) for logit in logits]
    return [part / sum(parts) for part in parts]


def dense(row, head):
    return [sum(float(a) * float(b) for a, b in zip(row, word, strict=True)) for word in head]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_slots", [3, 1000])
def test_drafts_are_judged_as_plain_python_does(pack, blocks, chunk_slots, temperature):
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(WORDS, HIDDEN, generator=generator)
    final = torch.randn(LENGTH, HIDDEN, generator=generator)
    # drawn towards their labels, so that some drafts are right and some are not
    hidden = torch.randn(7 * SIZE, HIDDEN, generator=generator) + 0.5 * head[blocks.labels]
    judged = judge_drafts(
        hidden, head, blocks, chunk_slots=chunk_slots, final=final, temperature=temperature
    )
    expected, count = expected_lengths(judged.overlap), 0
    for block, anchor in enumerate(blocks.anchors.tolist()):
        chance, length = 1.0, 1.0
        for slot in range(1, SIZE):
            place, found = anchor + slot, (block, slot - 1)
            counts = (
                bool(blocks.keep[block])
                and bool(pack.loss_mask[place])
                and pack.documents[place] == pack.documents[anchor]
            )
            assert judged.supervised[found] == counts
            if not counts:
                chance = 0.0
                assert not judged.right[found]
                assert judged.cross_entropy[found] == judged.overlap[found] == 0
                continue
            logits, label = dense(hidden[block * SIZE + slot], head), int(pack.input_ids[place])
            q = softmax(logits, temperature)
            p = softmax(dense(final[place - 1], head), temperature)
            overlap = sum(map(min, p, q))
            loss = -math.log(softmax(logits, 1.0)[label])
            assert judged.right[found] == (logits.index(max(logits)) == label)
            assert float(judged.cross_entropy[found]) == pytest.approx(loss, rel=1e-4, abs=1e-5)
            assert float(judged.overlap[found]) == pytest.approx(overlap, rel=1e-4)
            chance *= overlap
            length += chance
            count += 1
        assert float(expected[block]) == pytest.approx(length, rel=1e-4)
    assert count == int(blocks.supervised.sum()) > 10
    assert 3 < judged.right.sum() < count, "neither all right nor all wrong"


def test_without_final_states_there_is_no_overlap(blocks):
    hidden, head = torch.randn(7 * SIZE, HIDDEN), torch.randn(WORDS, HIDDEN)
    judged = judge_drafts(hidden, head, blocks, chunk_slots=8)
    assert judged.overlap is None
    assert slot_shares(slot_sums(judged))["overlap"] == (0.0,) * (SIZE - 1)


def test_slots_are_counted_as_plain_loops_do(blocks):
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(WORDS, HIDDEN, generator=generator)
    hidden = torch.randn(7 * SIZE, HIDDEN, generator=generator) + 0.6 * head[blocks.labels]
    judged = judge_drafts(hidden, head, blocks, chunk_slots=100, final=torch.randn(LENGTH, HIDDEN))
    shares = slot_shares(slot_sums(judged))
    for slot in range(SIZE - 1):
        right = there = right_after_right = reached = 0
        for block in range(7):
            if not judged.supervised[block, slot]:
                continue
            there += 1
            right += int(judged.right[block, slot])
            if all(judged.right[block, before] for before in range(slot)):
                reached += 1
                right_after_right += int(judged.right[block, slot])
        assert shares["accuracy"][slot] == pytest.approx(right / there)
        want = right_after_right / reached if reached else None
        assert shares["conditional_accuracy"][slot] == want
        mean = float(judged.overlap[:, slot].sum()) / there
        assert shares["overlap"][slot] == pytest.approx(mean)
    assert shares["accuracy"] != shares["conditional_accuracy"]


def test_a_slot_that_nothing_reaches_has_no_share():
    assert slot_shares(torch.zeros(5, 2))["accuracy"] == (None, None)


def test_acceptance_counts_leading_right_drafts_and_the_bonus(pack, blocks):
    head = torch.eye(WORDS)
    right = judge_drafts(head[blocks.labels], head, blocks, chunk_slots=4).right
    # anchors 2, 4, 5, 12, 16, 22: drafts after the hole at 6 and past the ends 13, 23 never count
    assert acceptance_lengths(right).tolist() == [4, 2, 1, 2, 5, 2, 1]
    right[4, 1] = False
    assert acceptance_lengths(right).tolist() == [4, 2, 1, 2, 2, 2, 1]


def test_the_walk_jumps_by_what_was_accepted():
    anchors = torch.tensor([10, 11, 12, 13, 14, 15, 16])
    lengths = torch.tensor([3, 8, 8, 1, 2, 8, 5])
    # 10 +3-> 13 +1-> 14 +2-> 16 +5-> 21, where no draft is judged
    assert walked_acceptance(lengths, anchors) == (11, 4)
    assert walked_acceptance(lengths[:0], anchors[:0]) == (0, 0)


def test_shifted_states_come_a_token_late_in_their_own_document(pack):
    taps = torch.arange(1.0, 1 + LENGTH)[None, :, None].expand(1, LENGTH, 3)
    shifted = shift_by_one(taps, pack.documents)[0, :, 0].tolist()
    want = [0.0, *range(1, 14), 0.0, *range(15, 24)]
    assert shifted[:24] == want
