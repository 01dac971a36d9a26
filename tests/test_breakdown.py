"""Which group every anchor is in, and the means over groups."""

import numpy as np
import pytest

from common.breakdown import MAX_SOURCES, Row, break_down, thinking_end

THINK, END = 90, 91


def make_row(ids, *, prompt, source=None):
    return Row(source, np.array(ids, np.int32), np.arange(len(ids)) >= prompt)


@pytest.mark.parametrize(
    ("ids", "prompt", "want"),
    [
        ([1, THINK, 5, 6, END, 7, 8], 2, 5),  # thinks, then answers
        ([1, THINK, 5, 6, 7], 2, 5),  # cut while it thinks
        ([1, THINK, END, 5, 6], 3, 0),  # an empty thought in the prompt: all answer
        ([1, THINK, 3, END, 4, THINK, 5, 6], 6, 8),  # the history's thought is not its own
        ([1, 2, 3, 4], 1, 0),
    ],
)
def test_the_answer_begins_after_the_generated_end_of_thought(ids, prompt, want):
    assert thinking_end(make_row(ids, prompt=prompt), (THINK, END)) == want


def groups_of(kind, rows, of_row, positions, lengths, **options):
    found = break_down(
        rows,
        of_row=np.array(of_row),
        positions=np.array(positions),
        lengths=np.array(lengths),
        **{"expected": None, "think_tokens": None, **options},
    )
    return {group.label: group for group in found.get(kind, [])}


def test_anchors_are_grouped_by_source_part_length_and_position():
    rows = [
        make_row([1, THINK, *[5] * 30, END, *[6] * 100], prompt=2, source="math"),
        make_row([1, 2, *[7] * 10], prompt=2),
    ]
    anchors = dict(
        of_row=[0, 0, 0, 1], positions=[2, 31, 40, 5], lengths=[4, 2, 3, 1],
        expected=np.array([3.0, 2.0, 1.5, 1.0], np.float32), think_tokens=(THINK, END),
    )  # fmt: skip
    source = groups_of("source", rows, **anchors)
    assert (source["math"].rows, source["math"].anchors) == (1, 3)
    assert source["math"].acceptance_length == 3 and source["(none)"].acceptance_length == 1
    part = groups_of("part", rows, **anchors)
    assert part["thinking"].acceptance_length == 3  # places 2 and 31 of row 0
    assert part["answer"].acceptance_length == 2 and part["answer"].rows == 2
    assert part["thinking"].expected_acceptance_length == pytest.approx(2.5)
    length = groups_of("length", rows, **anchors)
    assert {label: group.anchors for label, group in length.items()} == {"0-127": 1, "128-255": 3}
    position = groups_of("position", rows, **anchors)
    assert {label: group.anchors for label, group in position.items()} == {"0-15": 2, "16-63": 2}


def test_kinds_that_tell_nothing_apart_are_left_out():
    rows = [make_row([1, 2, 3, 4], prompt=1)]
    anchors = dict(of_row=[0, 0], positions=[1, 2], lengths=[2, 1])
    assert not groups_of("source", rows, **anchors) and not groups_of("part", rows, **anchors)
    assert groups_of("length", rows, **anchors)["0-127"].expected_acceptance_length is None


def test_rare_sources_are_one_group():
    rows = [make_row([1, 2, 3], prompt=1, source=f"s{number}") for number in range(50)]
    rows += [make_row([1, 2, 3], prompt=1, source="s49")]
    count = len(rows)
    found = groups_of("source", rows, list(range(count)), [1] * count, [2] * count)
    assert len(found) == MAX_SOURCES and found["s49"].rows == 2
    assert found["(others)"].rows == count - 2 - (MAX_SOURCES - 2)


def test_positions_count_generated_tokens_alone():
    rows = [make_row(range(40), prompt=20)]
    found = groups_of("position", rows, [0, 0, 0], [20, 35, 36], [1, 1, 1])
    assert {label: group.anchors for label, group in found.items()} == {"0-15": 2, "16-63": 1}
