"""The tokenized dataset: plan, Arrow shards, commit records, and the reader that waits for them.

    plan.json            written first: which byte ranges of which inputs make which shard, settings
    shard-00000.arrow    Arrow IPC stream of record batches of 1,024 rows (SCHEMA)
    shard-00000.json     the commit record, put after its shard: a shard exists when this does
    rejected/shard-00000.jsonl     every line that could not be used, with place and reason
    dataset_info.json, state.json  last: `datasets.load_from_disk` then opens the folder

None of these holds a time, a host or a worker count: the same inputs and settings give the same
bytes. An IPC stream cut at a batch boundary reads as a shorter valid one, so readers check the
record's sha256 and row count.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.cache import FileCache, HeldFile, file_sha256
from common.plan import PLAN_FILE, Plan
from common.run import UserError, json_bytes
from common.store import LocalStore, Store, open_store, read_if_there

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("source", pa.string()),  # a row's own source or category, where it has one
    ]
)
BATCH_ROWS = 1024
BATCH_TOKENS = 64_000_000  # list offsets are 32-bit; stay far below their end
LENGTH_EDGES = tuple(2**power for power in range(7, 19))  # 128 ... 262,144 tokens


# ---- names and records


def shard_name(index: int) -> str:
    """shard-00000: the stem of a shard's files."""
    return f"shard-{index:05d}"


def record_key(index: int) -> str:
    """The key of a shard's commit record."""
    return f"{shard_name(index)}.json"


def base_id(row_id: str) -> str:
    """A row's id without the suffixes of its choice (#n) and turn (/n)."""
    for mark in ("/", "#"):
        stem, found, number = row_id.rpartition(mark)
        if found and number.isdigit():
            row_id = stem
    return row_id


def is_held_out(row_id: str, *, seed: int, fraction: float) -> bool:
    """Whether a row is kept from training: sha256 of seed and base id falls under `fraction`."""
    digest = hashlib.sha256(f"{seed}:{base_id(row_id)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def row_batch(
    ids: Sequence[str],
    lengths: np.ndarray,
    tokens: np.ndarray,
    mask: np.ndarray,
    sources: Sequence[str | None],
) -> pa.RecordBatch:
    """Rows as a record batch of SCHEMA: lengths (rows,), tokens (T,) int32, mask (T,) bool."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), type=pa.int32())
    columns = [
        pa.array(ids, type=pa.string()),
        pa.ListArray.from_arrays(offsets, pa.array(tokens, type=pa.int32())),
        pa.ListArray.from_arrays(offsets, pa.array(mask, type=pa.bool_())),
        pa.array(sources, type=pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class ShardWriter:
    """Writes one shard file; `finish` closes it and returns its part of the commit record.

    The file's bytes depend on the rows alone, not on the batches in which they come.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, SCHEMA)
        self._pending: list[tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[Any]]] = []
        self._pending_rows = self._pending_tokens = 0
        self._ids: set[str] = set()
        self._counts = {"rows": 0, "tokens": 0, "loss_tokens": 0, "duplicate_ids": 0}
        self._histogram = np.zeros(len(LENGTH_EDGES) + 1, np.int64)

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a record batch of SCHEMA."""
        ids, sources = batch["id"].to_pylist(), batch["source"].to_pylist()
        ends = batch["input_ids"].offsets.to_numpy().astype(np.int64)
        tokens = batch["input_ids"].values.to_numpy()
        mask = batch["loss_mask"].values.to_numpy(zero_copy_only=False)
        self._count(ids, np.diff(ends), mask)
        start = 0
        while start < len(ids):
            room = ends[start] + BATCH_TOKENS - self._pending_tokens
            fit = int(np.searchsorted(ends, room, side="right")) - 1 - start
            if fit < 1 and self._pending:
                self._flush()
                continue
            stop = min(len(ids), start + max(1, fit), start + BATCH_ROWS - self._pending_rows)
            values = slice(ends[start], ends[stop])
            lengths = np.diff(ends[start : stop + 1])
            self._pending.append(
                (ids[start:stop], lengths, tokens[values], mask[values], sources[start:stop])
            )
            self._pending_rows += stop - start
            self._pending_tokens += int(lengths.sum())
            if self._pending_rows == BATCH_ROWS:
                self._flush()
            start = stop

    def _count(self, ids: list[str], lengths: np.ndarray, mask: np.ndarray) -> None:
        self._counts["rows"] += len(ids)
        self._counts["tokens"] += len(mask)
        self._counts["loss_tokens"] += int(np.count_nonzero(mask))
        before = len(self._ids)
        self._ids.update(ids)
        self._counts["duplicate_ids"] += len(ids) - (len(self._ids) - before)
        places = np.searchsorted(LENGTH_EDGES, lengths, side="left")
        self._histogram += np.bincount(places, minlength=len(self._histogram))

    def finish(self) -> dict[str, Any]:
        """Close the file: counts, lengths histogram, bytes and sha256."""
        self._flush()
        self._stream.close()
        self._file.close()
        return {
            **self._counts,
            "bytes": self._path.stat().st_size,
            "lengths": {"edges": list(LENGTH_EDGES), "counts": self._histogram.tolist()},
            "sha256": file_sha256(self._path),
        }

    def _flush(self) -> None:
        if not self._pending:
            return
        ids, lengths, tokens, masks, sources = zip(*self._pending, strict=True)
        self._stream.write_batch(
            row_batch(
                list(itertools.chain(*ids)),
                np.concatenate(lengths),
                np.concatenate(tokens),
                np.concatenate(masks),
                list(itertools.chain(*sources)),
            )
        )
        self._pending, self._pending_rows, self._pending_tokens = [], 0, 0


def closing_files(records: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """dataset_info.json and state.json, which make the folder one that load_from_disk opens."""
    fingerprint = hashlib.sha256("".join(r["sha256"] for r in records).encode()).hexdigest()[:16]
    number = {"dtype": "int32", "_type": "Value"}
    features = {
        "id": {"dtype": "string", "_type": "Value"},
        "input_ids": {"feature": number, "_type": "List"},
        "loss_mask": {"feature": {"dtype": "bool", "_type": "Value"}, "_type": "List"},
        "source": {"dtype": "string", "_type": "Value"},
    }
    state: dict[str, Any] = {
        "_data_files": [{"filename": record["file"]} for record in records],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    return {"dataset_info.json": json_bytes(info), "state.json": json_bytes(state)}


# ---- reader


class Shard:
    """The rows of one committed shard, memory-mapped; batches are never joined."""

    def __init__(self, index: int, file: HeldFile, record: Mapping[str, Any]) -> None:
        self.index, self.record, self._file = index, record, file
        with pa.memory_map(str(file.path)) as source, pa.ipc.open_stream(source) as stream:
            self._batches = list(stream)
        self._starts = np.cumsum([0, *[batch.num_rows for batch in self._batches]])
        self.ids: list[str] = [i for batch in self._batches for i in batch["id"].to_pylist()]
        counts = [np.diff(batch["input_ids"].offsets.to_numpy()) for batch in self._batches]
        self.lengths = np.concatenate([np.zeros(0, np.int32), *counts])  # (rows,), tokens
        if len(self.ids) != record["rows"]:
            raise UserError(f"{file.path}: {len(self.ids)} rows, its record says {record['rows']}")

    def __len__(self) -> int:
        return len(self.ids)

    def keep_first(self, rows: int) -> None:
        """Leave the rows after the first `rows` out."""
        self.ids, self.lengths = self.ids[:rows], self.lengths[:rows]

    @functools.cached_property
    def first_pairs(self) -> np.ndarray:
        """Of each row, where two supervised tokens first follow each other; -1: nowhere. (rows,)"""
        found = [_first_pairs(batch["loss_mask"]) for batch in self._batches]
        return np.concatenate([np.zeros(0, np.int64), *found])[: len(self)]

    def input_ids(self, row: int) -> np.ndarray:
        """The token ids of a row, (T,) int32."""
        return self._values("input_ids", row).to_numpy()

    def loss_mask(self, row: int) -> np.ndarray:
        """Which tokens of a row the target generated, (T,) bool."""
        return self._values("loss_mask", row).to_numpy(zero_copy_only=False)

    def source(self, row: int) -> str | None:
        """A row's own source or category; None where it has none."""
        values, local = self._column("source", row)
        return values[local].as_py()

    def _values(self, column: str, row: int) -> pa.Array:
        lists, local = self._column(column, row)
        start, end = lists.offsets[local].as_py(), lists.offsets[local + 1].as_py()
        return lists.values[start:end]

    def _column(self, column: str, row: int) -> tuple[pa.Array, int]:
        """The column of the batch that holds a row, and the row's place in it."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._batches[number][column], row - int(self._starts[number])


def _first_pairs(masks: pa.ListArray) -> np.ndarray:
    offsets = masks.offsets.to_numpy()
    mask = masks.values.to_numpy(zero_copy_only=False)
    pair = np.zeros(len(mask) + 1, bool)
    pair[1:-1] = mask[:-1] & mask[1:]
    pair[offsets] = False  # a row's first token follows none of its own
    places = np.append(np.flatnonzero(pair) - 1, len(mask))
    first = places[np.searchsorted(places, offsets[:-1])]
    return np.where(first < offsets[1:], first - offsets[:-1], -1)


class TokenizedDataset:
    """Stage 1's output while it is still being written: waits for the plan and for shards.

    Shards of an s3:// dataset are copied to `cache_dir` (common/cache.py), which keeps about
    `cache_bytes` of them; a local one is read in place. A shard is open as long as its user has it.
    """

    def __init__(
        self,
        uri: str,
        *,
        cache_dir: Path,
        cache_bytes: int | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        self._store: Store = open_store(uri, endpoint_url=endpoint_url)
        self._cache = FileCache(cache_dir / "shards", limit_bytes=cache_bytes)
        self._cache_bytes = cache_bytes
        self._records: dict[int, dict[str, Any]] = {}
        self._kept: list[int] | None = None  # rows of each shard, when only the first are wanted
        self._shards: weakref.WeakValueDictionary[int, Shard] = weakref.WeakValueDictionary()

    def wait_for_plan(
        self,
        *,
        timeout_s: float,
        poll_s: float = 1.0,
        on_wait: Callable[[float], None] | None = None,
    ) -> Plan:
        """The plan, when it is there. Raises UserError after `timeout_s`."""
        data = _wait(
            lambda: self._read(PLAN_FILE), f"{self._store.uri}: {PLAN_FILE}", timeout_s, poll_s,
            on_wait,
        )  # fmt: skip
        self.plan = Plan.from_bytes(data)
        return self.plan

    @property
    def num_shards(self) -> int:
        return len(self.plan.shards if self._kept is None else self._kept)

    def keep_first(self, rows: int, *, timeout_s: float) -> int:
        """Leave all rows after the first `rows` out, whose shards are waited for; their tokens."""
        kept: list[int] = []
        tokens = 0
        while rows > 0 and len(kept) < len(self.plan.shards):
            lengths = self.wait_for_shard(len(kept), timeout_s=timeout_s).lengths[:rows]
            kept.append(len(lengths))
            rows, tokens = rows - len(lengths), tokens + int(lengths.sum())
        self._kept = kept
        self._shards.clear()
        return tokens

    def record(self, index: int) -> dict[str, Any] | None:
        """A shard's commit record; None while it has none. Raises UserError for another plan's."""
        if index in self._records:
            return self._records[index]
        data = self._read(record_key(index))
        if data is None:
            return None
        try:
            record = json.loads(data)
            same_plan = record["plan_sha256"] == self.plan.sha256
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._store.uri}: {record_key(index)} is no commit record; delete it and run "
                "tokenize_completions.py again"
            ) from error
        if not same_plan:
            raise UserError(
                f"{self._store.uri}: {record_key(index)} belongs to another plan; the dataset was "
                "replaced under this run"
            )
        self._records[index] = record
        return record

    def wait_for_shard(
        self,
        index: int,
        *,
        timeout_s: float,
        poll_s: float = 1.0,
        on_wait: Callable[[float], None] | None = None,
    ) -> Shard:
        """A committed shard, checked against its record. Raises UserError after `timeout_s`."""
        if (shard := self._shards.get(index)) is not None:
            return shard
        record = _wait(
            lambda: self.record(index), f"{self._store.uri}: {shard_name(index)}", timeout_s,
            poll_s, on_wait,
        )  # fmt: skip
        if index == 0:
            self._check_limit(record)
        file = self._cache.open(self._store, record, name=self._name, on_wait=on_wait)
        shard = self._shards.setdefault(index, Shard(index, file, record))
        if self._kept is not None:
            shard.keep_first(self._kept[index])
        return shard

    def prefetch(self, index: int) -> None:
        """Fetch and check a shard's file in the background, when it is committed already."""
        threading.Thread(target=self._prefetch, args=(index,), daemon=True).start()

    def _prefetch(self, index: int) -> None:
        # Whoever needs the shard meets the failure again, and reports it.
        with contextlib.suppress(UserError):
            record = self.record(index)
            if record is not None:
                self._cache.fetch_ahead(self._store, record, name=self._name)

    @property
    def _name(self) -> str:
        return self.plan.sha256[:16]

    def _check_limit(self, first: Mapping[str, Any]) -> None:
        """Refuse a cache for less than two shards, going by the bytes of the first one."""
        planned = [self.plan.shard_bytes(index) for index in range(self.num_shards)]
        if self._cache_bytes is None or isinstance(self._store, LocalStore) or not planned[0]:
            return
        largest = max(planned) * first["bytes"] / planned[0]
        needed = largest * min(2, self.num_shards)
        if needed > self._cache_bytes:
            raise UserError(
                f"--cache-gb {self._cache_bytes / 1e9:g}: a shard of {self._store.uri} has about "
                f"{largest / 1e9:.2g} GB, and two must fit, one in use and the next one; give "
                f"--cache-gb {1.1 * needed / 1e9:.2g} or more"
            )

    def _read(self, key: str) -> bytes | None:
        return read_if_there(self._store, key)


def _wait(
    look: Callable[[], Any],
    what: str,
    timeout_s: float,
    poll_s: float,
    on_wait: Callable[[float], None] | None,
) -> Any:
    began = time.monotonic()
    while (found := look()) is None:
        waited = time.monotonic() - began
        if waited >= timeout_s:
            raise UserError(f"{what} did not appear within {timeout_s:.0f} s; is stage 1 running?")
        if on_wait is not None:
            on_wait(waited)
        time.sleep(poll_s)
    return found
