"""Tokenized shards -> the packs of every training step, and the cursor that resumes them.

A *pack* is one row of fixed length for the drafter: documents side by side, then padding. A row
longer than a pack is cut at its end; one without a legal anchor (common/blocks.py) in what is left
is skipped. The packs of a shard, and its steps of `global_batch` packs, are a pure function of
(seed, epoch, plan, shard); the last step of a shard is filled up with empty packs, so training can
start with whatever shard 0 holds. Nothing here depends on time or on the number of ranks, so
(epoch, position, step) is the whole state of the data.
"""

import bisect
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.shards import Shard, is_held_out

PACK_MULTIPLE = 128  # flex attention works in blocks of 128 keys


@dataclass(frozen=True)
class Cursor:
    """The next step to take: epoch, position in that epoch's shard order, step in the shard."""

    epoch: int = 0
    position: int = 0
    step: int = 0


@dataclass(frozen=True)
class PackedRows:
    """One pack of S tokens; padding has document -1, id 0, loss_mask False, position 0.

    input_ids (S,) int64 · loss_mask (S,) bool · documents (S,) int32 · positions (S,) int64, from 0
    in each document · token_lists: the documents alone, int32, the request for hidden states.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    token_lists: tuple[np.ndarray, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.token_lists)


@dataclass(frozen=True)
class Step:
    """The packs of one optimizer step, in the order of the global batch, and the cursor after it.

    row_ids holds the ids of the rows in each pack.
    """

    packs: tuple[PackedRows, ...]
    row_ids: tuple[tuple[str, ...], ...]
    after: Cursor


@dataclass(frozen=True)
class ShardPacking:
    """What became of a shard's rows in an epoch: `rows` of them are in `packs` packs.

    cut_tokens: what the cut_rows lost · fill: tokens in the packs over their room.
    """

    epoch: int
    shard: int
    rows: int
    held_out: int
    cut_rows: int
    cut_tokens: int
    skipped_rows: int
    packs: int
    fill: float


def seeded_generator(*parts: object) -> np.random.Generator:
    """A numpy generator that depends on the parts alone (their text, hashed)."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


def shard_order(num_shards: int, *, epoch: int, seed: int, order_key: str) -> list[int]:
    """The shards of an epoch: plan order first (they may still be written), shuffled later."""
    if epoch == 0:
        return list(range(num_shards))
    generator = seeded_generator("shards", seed, epoch, order_key)
    return [int(index) for index in generator.permutation(num_shards)]


def pack_rows(
    lengths: np.ndarray, *, pack_length: int, generator: np.random.Generator
) -> list[list[int]]:
    """Group row indices into packs of at most `pack_length` tokens: best fit, longest row first.

    The generator breaks ties between equal lengths and orders the packs, so that neither rows nor
    packs keep the order of the file.
    """
    assert (lengths <= pack_length).all(), (max(lengths), pack_length)
    shuffled = generator.permutation(len(lengths))
    by_length = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, pack), sorted: the tightest fit is a bisection
    for row, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        place = bisect.bisect_left(free, (length, -1))
        if place == len(free):
            left, pack = pack_length, len(packs)
            packs.append([])
        else:
            left, pack = free.pop(place)
        packs[pack].append(row)
        bisect.insort(free, (left - length, pack))
    return [packs[index] for index in generator.permutation(len(packs))]


def build_pack(shard: Shard, rows: Sequence[int], *, pack_length: int) -> PackedRows:
    """Lay rows of a shard, cut, side by side in `pack_length` tokens; no rows: all padding."""
    input_ids = np.zeros(pack_length, dtype=np.int64)
    loss_mask = np.zeros(pack_length, dtype=bool)
    documents = np.full(pack_length, -1, dtype=np.int32)
    positions = np.zeros(pack_length, dtype=np.int64)
    token_lists = []
    start = 0
    for number, row in enumerate(rows):
        tokens = shard.input_ids(row)[:pack_length]
        end = start + len(tokens)
        input_ids[start:end] = tokens
        loss_mask[start:end] = shard.loss_mask(row)[:pack_length]
        documents[start:end] = number
        positions[start:end] = np.arange(len(tokens))
        token_lists.append(tokens)
        start = end
    return PackedRows(input_ids, loss_mask, documents, positions, tuple(token_lists))


def _held_out(shard: Shard, *, seed: int, fraction: float) -> np.ndarray:
    """Which rows are kept from training, (rows,) bool."""
    found = (is_held_out(row_id, seed=seed, fraction=fraction) for row_id in shard.ids)
    return np.fromiter(found, bool, len(shard.ids))


def _has_anchor(shard: Shard, *, pack_length: int) -> np.ndarray:
    """Which rows still have a legal anchor when they are cut, (rows,) bool."""
    return (shard.first_pairs >= 0) & (shard.first_pairs + 2 <= pack_length)


class StepStream:
    """The steps of a training run from a cursor on, the same on every rank.

    `open_shard(index)` returns a committed shard and may wait for it; `prefetch(index)` is told the
    shard that comes after; `on_shard` is told of each shard before its first step. Held-out rows
    (`is_held_out`) are never in a pack.
    """

    def __init__(
        self,
        *,
        num_shards: int,
        open_shard: Callable[[int], Shard],
        prefetch: Callable[[int], None],
        order_key: str,
        seed: int,
        epochs: int,
        pack_length: int,
        global_batch: int,
        eval_fraction: float,
        on_shard: Callable[[ShardPacking], None] | None = None,
    ) -> None:
        assert pack_length % PACK_MULTIPLE == 0, pack_length
        self._num_shards, self._epochs = num_shards, epochs
        self._open_shard, self._prefetch = open_shard, prefetch
        self._order_key, self._seed = order_key, seed
        self._pack_length, self._global_batch = pack_length, global_batch
        self._eval_fraction, self._on_shard = eval_fraction, on_shard

    def steps(self, cursor: Cursor) -> Iterator[Step]:
        """Steps from `cursor` to the end of the last epoch."""
        visits = self._visits(cursor)
        here = next(visits, None)
        while here is not None:
            after = next(visits, None)
            yield from self._shard_steps(here, None if after is None else self._shard_at(after))
            here = after

    def _visits(self, cursor: Cursor) -> Iterator[Cursor]:
        """Where each shard's steps begin, from `cursor` on."""
        for epoch in range(cursor.epoch, self._epochs):
            for position in range(
                cursor.position if epoch == cursor.epoch else 0, self._num_shards
            ):
                resumed = (epoch, position) == (cursor.epoch, cursor.position)
                yield cursor if resumed else Cursor(epoch, position)

    def _shard_at(self, cursor: Cursor) -> int:
        order = shard_order(
            self._num_shards, epoch=cursor.epoch, seed=self._seed, order_key=self._order_key
        )
        return order[cursor.position]

    def _shard_steps(self, start: Cursor, after: int | None) -> Iterator[Step]:
        """Steps of one shard, which is let go at their end; `after` is the next one."""
        shard = self._open_shard(self._shard_at(start))
        if after is not None:
            self._prefetch(after)
        packs = self._shard_packs(shard, start.epoch)
        for step in range(start.step, -(-len(packs) // self._global_batch)):
            first = step * self._global_batch
            rows = packs[first : first + self._global_batch]
            yield self._step(shard, rows, Cursor(start.epoch, start.position, step + 1))

    def _step(self, shard: Shard, rows: list[list[int]], after: Cursor) -> Step:
        rows = rows + [[]] * (self._global_batch - len(rows))
        return Step(
            packs=tuple(build_pack(shard, pack, pack_length=self._pack_length) for pack in rows),
            row_ids=tuple(tuple(shard.ids[row] for row in pack) for pack in rows),
            after=after,
        )

    def _shard_packs(self, shard: Shard, epoch: int) -> list[list[int]]:
        held_out = _held_out(shard, seed=self._seed, fraction=self._eval_fraction)
        usable = _has_anchor(shard, pack_length=self._pack_length)
        rows = np.flatnonzero(~held_out & usable)
        lengths = np.minimum(shard.lengths, self._pack_length)[rows]
        generator = seeded_generator("rows", self._seed, epoch, self._order_key, shard.index)
        packs = pack_rows(lengths, pack_length=self._pack_length, generator=generator)
        if self._on_shard is not None:
            lost = shard.lengths[rows] - lengths
            self._on_shard(
                ShardPacking(
                    epoch=epoch,
                    shard=shard.index,
                    rows=len(rows),
                    held_out=int(held_out.sum()),
                    cut_rows=int(np.count_nonzero(lost)),
                    cut_tokens=int(lost.sum()),
                    skipped_rows=int(np.count_nonzero(~held_out & ~usable)),
                    packs=len(packs),
                    fill=int(lengths.sum()) / max(1, len(packs) * self._pack_length),
                )
            )
        return [[int(rows[index]) for index in pack] for pack in packs]


@dataclass(frozen=True)
class HeldOut:
    """Rows to evaluate on, in packs; `sources` of the rows in the order of the packs' documents."""

    packs: tuple[PackedRows, ...] = ()
    sources: tuple[str | None, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.sources)


def seen_shards(cursor: Cursor, num_shards: int) -> int:
    """How many shards, in plan order, a run at this cursor may evaluate on."""
    return cursor.position + 1 if cursor.epoch == 0 else num_shards


def held_out_packs(
    shards: Iterable[Shard], *, seed: int, fraction: float, max_rows: int, pack_length: int
) -> HeldOut:
    """The first `max_rows` held-out rows with an anchor, in order, in packs.

    Takes no shard more than it needs, so that `shards` may open them on the way.
    """
    packs: list[PackedRows] = []
    sources: list[str | None] = []
    for shard in shards:
        held_out = _held_out(shard, seed=seed, fraction=fraction)
        usable = _has_anchor(shard, pack_length=pack_length)
        lengths = np.minimum(shard.lengths, pack_length)
        rows = np.flatnonzero(held_out & usable)[: max_rows - len(sources)].tolist()
        sources += [shard.source(row) for row in rows]
        chosen: list[int] = []
        for row in rows:
            if lengths[[*chosen, row]].sum() > pack_length:
                packs.append(build_pack(shard, chosen, pack_length=pack_length))
                chosen = []
            chosen.append(row)
        if chosen:
            packs.append(build_pack(shard, chosen, pack_length=pack_length))
        if len(sources) == max_rows:
            break
    return HeldOut(tuple(packs), tuple(sources))
