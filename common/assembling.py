"""Encoded blocks -> a shard and its rejected file.

A shard's bytes depend on its blocks' rows alone, never on how the lines were cut into blocks.
Tasks and results are small, for they are pickled on their way between processes.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.plan import InputRange
from common.shards import ShardWriter
from common.timing import Clock


@dataclass(frozen=True)
class EncodedBlock:
    """An encoded block: where its rows lie (and its rejects, beside them), and what they count."""

    path: Path
    lines: int
    rows: int
    tokens: int
    loss_tokens: int
    cut: int
    no_reasoning: int
    unverified_history: int
    rejected: Counter[str]
    cpu_s: dict[str, float]

    @property
    def rejects_path(self) -> Path:
        return self.path.with_suffix(".rejects")


@dataclass(frozen=True)
class AssembleTask:
    """Make a shard of encoded blocks, in order, each with the input range that it is of."""

    blocks: Sequence[tuple[InputRange, EncodedBlock]]
    arrow: Path
    rejects: Path


def read_rows(block: EncodedBlock) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The rows of an encoded block: id, input_ids (T,) int32, loss_mask (T,) bool."""
    with pa.memory_map(str(block.path)) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            ends = batch["input_ids"].offsets.to_numpy()
            tokens = batch["input_ids"].values.to_numpy()
            mask = batch["loss_mask"].values.to_numpy(zero_copy_only=False)
            for row_id, start, end in zip(batch["id"].to_pylist(), ends, ends[1:], strict=False):
                yield row_id, tokens[start:end], mask[start:end]


def assemble(task: AssembleTask) -> tuple[dict[str, Any], dict[str, float]]:
    """Write a shard and its rejected file from encoded blocks.

    Its part of the commit record, and CPU seconds by step.
    """
    clock = Clock()
    writer = ShardWriter(task.arrow)
    next_line: dict[str, int] = {}
    totals: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    with task.rejects.open("w", encoding="utf-8") as rejects:
        for part, block in task.blocks:
            with pa.memory_map(str(block.path)) as source, pa.ipc.open_stream(source) as stream:
                for batch in stream:
                    writer.add_batch(batch)
            first_line = next_line.get(part.key, 1)
            next_line[part.key] = first_line + block.lines
            if block.rejected:
                for line in block.rejects_path.read_text(encoding="utf-8").splitlines():
                    facts = json.loads(line)
                    facts["line"] = first_line + facts["line"] if part.start == 0 else None
                    rejects.write(json.dumps(facts, ensure_ascii=True) + "\n")
            totals.update(cut=block.cut, no_reasoning=block.no_reasoning)
            rejected.update(block.rejected)
    record = {
        **writer.finish(),
        "rejected": dict(sorted(rejected.items())),
        "cut": totals["cut"],
        "no_reasoning": totals["no_reasoning"],
    }
    clock.charge("arrow")
    return record, clock.cpu_s
