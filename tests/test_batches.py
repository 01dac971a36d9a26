"""Packing and order: every training row once an epoch, the same for any rank count or restart."""

import dataclasses
import itertools
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from common.batches import (
    Cursor,
    ShardPacking,
    StepStream,
    build_pack,
    held_out_packs,
    pack_rows,
    seeded_generator,
    shard_order,
)
from common.blocks import Pack, legal_anchors
from common.shards import is_held_out


@dataclass
class MemoryShard:
    """Rows in memory with the reader's interface: row r of shard s repeats the number 100 s + r."""

    index: int
    ids: list[str]
    lengths: np.ndarray

    @property
    def first_pairs(self) -> np.ndarray:
        half = self.lengths // 2
        return np.where(self.lengths - half >= 2, half, -1)

    def input_ids(self, row: int) -> np.ndarray:
        return np.full(self.lengths[row], 100 * self.index + row, dtype=np.int32)

    def loss_mask(self, row: int) -> np.ndarray:
        return np.arange(self.lengths[row]) >= self.lengths[row] // 2

    def source(self, row: int) -> str:
        return f"source {row % 2}"


def make_shards(num_shards: int, rows: int) -> list[MemoryShard]:
    generator = np.random.default_rng(7)
    return [
        MemoryShard(
            index=index,
            ids=[f"shard{index}-row{row}" for row in range(rows)],
            lengths=generator.integers(3, 200, size=rows),
        )
        for index in range(num_shards)
    ]


def make_stream(shards: list[MemoryShard], **changes) -> StepStream:
    settings = dict(
        num_shards=len(shards),
        open_shard=lambda index: shards[index],
        prefetch=lambda index: None,
        order_key="plan",
        seed=0,
        epochs=2,
        pack_length=256,
        global_batch=4,
        eval_fraction=0.2,
    )
    return StepStream(**{**settings, **changes})


def rows_of(steps) -> list[str]:
    return [row_id for step in steps for pack in step.row_ids for row_id in pack]


def test_every_training_row_comes_once_an_epoch_and_held_out_rows_never():
    shards = make_shards(3, 40)
    training = {
        row_id
        for shard in shards
        for row_id in shard.ids
        if not is_held_out(row_id, seed=0, fraction=0.2)
    }
    assert 0 < len(training) < 120
    one = rows_of(make_stream(shards, epochs=1).steps(Cursor()))
    assert sorted(one) == sorted(training)
    both = rows_of(make_stream(shards).steps(Cursor()))
    assert sorted(both) == sorted([*training, *training])
    assert both[len(one) :] != one, "the second epoch keeps the first one's order"


def test_resuming_at_any_cursor_gives_the_same_remaining_steps():
    shards = make_shards(3, 25)
    steps = list(make_stream(shards).steps(Cursor()))
    assert len(steps) > 8
    for done in range(len(steps)):
        rest = list(make_stream(shards).steps(steps[done].after))
        assert [step.row_ids for step in rest] == [step.row_ids for step in steps[done + 1 :]]


def test_the_last_step_of_a_shard_is_filled_with_empty_packs():
    shards = make_shards(1, 5)
    steps = list(make_stream(shards, epochs=1, global_batch=64).steps(Cursor()))
    assert len(steps) == 1 and len(steps[0].packs) == 64
    two = list(make_stream(make_shards(2, 5), epochs=1, global_batch=64).steps(Cursor()))
    assert [len(rows_of([step])) > 0 for step in two] == [True, True]
    assert steps[0].packs[-1].token_lists == ()
    assert (steps[0].packs[-1].documents == -1).all()


def test_first_epoch_follows_the_plan_and_later_ones_are_shuffled():
    orders = [shard_order(20, epoch=epoch, seed=1, order_key="p") for epoch in range(3)]
    assert orders[0] == list(range(20))
    assert sorted(orders[1]) == sorted(orders[2]) == orders[0]
    assert orders[1] != orders[2] != orders[0]
    assert orders[1] == shard_order(20, epoch=1, seed=1, order_key="p")
    assert orders[1] != shard_order(20, epoch=1, seed=2, order_key="p")


def test_long_tailed_rows_fill_packs_to_97_percent():
    lengths = np.minimum(4096, np.random.default_rng(0).lognormal(7.2, 0.8, 20_000)).astype(int)
    packs = pack_rows(lengths, pack_length=4096, generator=seeded_generator("x"))
    assert sorted(itertools.chain(*packs)) == list(range(20_000))
    totals = [lengths[pack].sum() for pack in packs]
    assert max(totals) <= 4096
    assert sum(totals) / (4096 * len(packs)) >= 0.97


@pytest.mark.parametrize("rows", [400, 5000])
def test_packs_of_a_long_tailed_shard_are_97_percent_full(rows):
    """Median 1,300 and one row in twenty cut, as in a shard of reasoning."""
    lengths = np.random.default_rng(1).lognormal(np.log(1300), 0.9, rows).astype(int) + 3
    shard = MemoryShard(0, [str(row) for row in range(rows)], lengths)
    told = []
    stream = make_stream(
        [shard], epochs=1, pack_length=4096, eval_fraction=0.005, on_shard=told.append
    )
    steps = list(stream.steps(Cursor()))
    (packing,) = told
    tokens = [pack.num_tokens for step in steps for pack in step.packs if pack.token_lists]
    assert len(tokens) == packing.packs and sum(tokens) == packing.fill * 4096 * len(tokens)
    assert packing.fill >= 0.97 and packing.cut_rows > rows * 0.04


def test_long_rows_are_cut_and_rows_without_an_anchor_skipped_and_both_counted():
    # the mask begins at half a row: 510 and more are cut to their prompt, or one token of answer
    lengths = np.array([100, 300, 256, 1, 508, 509, 510, 511, 4000, 2, 3])
    shard = MemoryShard(0, [f"row{row}" for row in range(len(lengths))], lengths)
    told = []
    stream = make_stream([shard], epochs=2, eval_fraction=0.0, global_batch=1, on_shard=told.append)
    steps = list(stream.steps(Cursor()))
    used = {"row0", "row1", "row2", "row4", "row5", "row10"}
    assert sorted(rows_of(steps)) == sorted([*used, *used])
    assert told[0] == ShardPacking(
        epoch=0, shard=0, rows=6, held_out=0, cut_rows=3, cut_tokens=44 + 252 + 253,
        skipped_rows=5, packs=5, fill=(100 + 256 * 4 + 3) / (5 * 256),
    )  # fmt: skip
    assert told[1] == dataclasses.replace(told[0], epoch=1)
    for step in steps:
        (pack,) = step.packs
        legal = legal_anchors(
            Pack(
                *map(
                    torch.from_numpy,
                    (pack.input_ids, pack.loss_mask, pack.documents, pack.positions),
                )
            )
        )
        for number, tokens in enumerate(pack.token_lists):
            mine = pack.documents == number
            assert legal.numpy()[mine].any() and mine.sum() == len(tokens) <= 256
            np.testing.assert_array_equal(pack.input_ids[mine], tokens)
            whole = shard.loss_mask(int(tokens[0]))
            np.testing.assert_array_equal(pack.loss_mask[mine], whole[: len(tokens)])


def test_a_resumed_shard_is_told_of_again():
    shards, told = make_shards(2, 25), []
    steps = list(make_stream(shards).steps(Cursor()))
    stream = make_stream(shards, on_shard=told.append)
    list(stream.steps(steps[1].after))
    assert [(packing.epoch, packing.shard) for packing in told[:2]] == [(0, 0), (0, 1)]
    assert len(told) == 4
    assert all(packing.rows + packing.held_out == 25 for packing in told)


def test_a_shard_is_let_go_before_the_next_one_and_that_one_is_fetched_ahead():
    living, events = weakref.WeakSet(), []

    class Fresh(MemoryShard):
        __hash__ = object.__hash__

    def open_shard(index):
        assert not living
        events.append(("open", index))
        shard = Fresh(**vars(make_shards(3, 25)[index]))
        living.add(shard)
        return shard

    stream = make_stream(
        make_shards(3, 25),
        open_shard=open_shard,
        prefetch=lambda index: events.append(("ahead", index)),
    )
    for step in stream.steps(Cursor()):
        assert step.packs and len(living) == 1
    order = [*range(3), *shard_order(3, epoch=1, seed=0, order_key="plan")]
    assert [index for event, index in events if event == "open"] == order
    assert [index for event, index in events if event == "ahead"] == order[1:]


def test_a_pack_lays_documents_side_by_side_then_padding():
    shard = make_shards(1, 3)[0]
    shard.lengths = np.array([3, 2, 4])
    pack = build_pack(shard, [2, 0], pack_length=128)
    assert pack.documents[:9].tolist() == [0, 0, 0, 0, 1, 1, 1, -1, -1]
    assert pack.positions[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert pack.input_ids[:8].tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
    assert pack.loss_mask[:8].tolist() == [False, False, True, True, False, True, True, False]
    assert [tokens.tolist() for tokens in pack.token_lists] == [[2, 2, 2, 2], [0, 0, 0]]
    assert pack.num_tokens == 7


def test_evaluation_takes_the_first_held_out_rows_in_plan_order():
    shards = make_shards(3, 30)
    held_out = [
        (shard.index, row)
        for shard in shards
        for row, row_id in enumerate(shard.ids)
        if is_held_out(row_id, seed=0, fraction=0.2)
    ]
    found = held_out_packs(shards, seed=0, fraction=0.2, max_rows=9, pack_length=256)
    first = [int(tokens[0]) for pack in found.packs for tokens in pack.token_lists]
    assert found.rows == 9
    assert first == [100 * shard + row for shard, row in held_out[:9]]
    assert list(found.sources) == [f"source {row % 2}" for _, row in held_out[:9]]


def test_held_out_rows_are_cut_too_and_those_without_an_anchor_left_out():
    lengths = np.array([300, 600, 1, 40])
    shard = MemoryShard(0, list("abcd"), lengths)
    found = held_out_packs([shard], seed=0, fraction=1.0, max_rows=9, pack_length=256)
    assert found.rows == 2
    assert [[len(tokens) for tokens in pack.token_lists] for pack in found.packs] == [[256], [40]]
