"""Acceptance of parts of what was evaluated: by source, thinking or answer, length, position.

Every anchor is in one group of each kind. Arrays have an entry an anchor, in the order of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.batches import PackedRows

LENGTH_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens of a row
POSITION_EDGES = (16, 64, 256, 1024, 4096, 16384)  # generated tokens before an anchor
MAX_SOURCES = 20  # the largest; the rest are one group
THINKING, ANSWER = "thinking", "answer"


@dataclass(frozen=True)
class Group:
    """Anchors of one kind and the means over them; `expected` is None where it was not measured."""

    label: str
    rows: int
    anchors: int
    acceptance_length: float
    expected_acceptance_length: float | None


@dataclass(frozen=True)
class Row:
    """What the anchors of a row are grouped by. input_ids, loss_mask (T,)."""

    source: str | None
    input_ids: np.ndarray
    loss_mask: np.ndarray


def rows_of(packs: Sequence[PackedRows], sources: Sequence[str | None]) -> list[Row]:
    """The rows of `packs`, in order."""
    left, rows = iter(sources), []
    for pack in packs:
        start = 0
        for tokens in pack.token_lists:
            mask = pack.loss_mask[start : start + len(tokens)]
            rows.append(Row(next(left), tokens, mask))
            start += len(tokens)
    return rows


def thinking_end(row: Row, think_tokens: tuple[int, int]) -> int:
    """Where the answer of a row begins: the place after </think>, its length when it never ends.

    `think_tokens` are the ids of <think> and </think>. A row whose prompt has closed the thought,
    or opened none, is all answer.
    """
    opening, closing = think_tokens
    generated = np.flatnonzero(row.loss_mask)
    ends = generated[row.input_ids[generated] == closing]
    if len(ends):
        return int(ends[0]) + 1
    marks = row.input_ids[np.isin(row.input_ids, think_tokens)]
    return len(row.input_ids) if len(marks) and marks[-1] == opening else 0


def break_down(
    rows: Sequence[Row],
    *,
    of_row: np.ndarray,
    positions: np.ndarray,
    lengths: np.ndarray,
    expected: np.ndarray | None,
    think_tokens: tuple[int, int] | None,
) -> dict[str, list[Group]]:
    """Groups by kind; a kind that tells nothing apart (no sources, no thinking) is left out.

    of_row, positions, lengths (A,) int64: an anchor's row, its place there, its acceptance length;
    expected (A,).
    """
    before = np.zeros(len(lengths), np.int64)  # generated tokens
    ends = np.zeros(len(lengths), np.int64)  # of the thinking part
    for number, row in enumerate(rows):
        mine = of_row == number
        counts = np.cumsum(row.loss_mask) - row.loss_mask
        before[mine] = counts[positions[mine]]
        if think_tokens is not None:
            ends[mine] = thinking_end(row, think_tokens)
    kinds = {
        "length": _ranges(np.array([len(row.input_ids) for row in rows])[of_row], LENGTH_EDGES),
        "position": _ranges(before, POSITION_EDGES),
    }
    if think_tokens is not None:
        places = np.where(positions < ends, 0, 1)
        kinds = {"part": ([THINKING, ANSWER], places), **kinds}
    if any(row.source is not None for row in rows):
        kinds = {"source": _sources(rows, of_row), **kinds}
    return {
        kind: _groups(names, places, of_row, lengths, expected)
        for kind, (names, places) in kinds.items()
    }


def _ranges(values: np.ndarray, edges: Sequence[int]) -> tuple[list[str], np.ndarray]:
    """Names of the ranges between edges, and which of them each value is in."""
    lows, highs = (0, *edges), (*edges, None)
    names = [
        f"{low:,}+" if high is None else f"{low:,}-{high - 1:,}"
        for low, high in zip(lows, highs, strict=True)
    ]
    return names, np.searchsorted(edges, values, side="right")


def _sources(rows: Sequence[Row], of_row: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Names of the sources, the one with most rows first, and each anchor's."""
    found = [row.source or "(none)" for row in rows]
    names = sorted(set(found), key=lambda name: (-found.count(name), name))
    if len(names) > MAX_SOURCES:
        names = [*names[: MAX_SOURCES - 1], "(others)"]
    place_of = {name: place for place, name in enumerate(names)}
    places = np.array([place_of.get(name, len(names) - 1) for name in found], np.int64)
    return names, places[of_row]


def _groups(
    names: Sequence[str],
    places: np.ndarray,
    of_row: np.ndarray,
    lengths: np.ndarray,
    expected: np.ndarray | None,
) -> list[Group]:
    groups = []
    for place, name in enumerate(names):
        mine = places == place
        if mine.any():
            groups.append(
                Group(
                    label=name,
                    rows=len(np.unique(of_row[mine])),
                    anchors=int(mine.sum()),
                    acceptance_length=float(lengths[mine].mean()),
                    expected_acceptance_length=(
                        None if expected is None else float(expected[mine].mean(dtype=np.float64))
                    ),
                )
            )
    return groups
