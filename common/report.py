"""What stage 1 tells while it works and at its end: totals, rates, times, memory."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common import run
from common.assembling import EncodedBlock
from common.pipeline import Flow
from common.timing import children_cpu_s, peak_memory_bytes
from common.workers import WorkerPool


@dataclass
class Totals:
    """Sums over commit records, or over the blocks of a run so far."""

    shards: int = 0
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    no_reasoning: int = 0
    duplicate_ids: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    unverified_history: int = 0  # only of blocks: a record does not tell

    def add(self, record: dict[str, Any]) -> None:
        self.shards += 1
        for name in ("rows", "tokens", "loss_tokens", "cut", "no_reasoning", "duplicate_ids"):
            setattr(self, name, getattr(self, name) + record[name])
        self.rejected.update(record["rejected"])

    def add_block(self, encoded: EncodedBlock) -> None:
        self.rows += encoded.rows
        self.tokens += encoded.tokens
        self.loss_tokens += encoded.loss_tokens
        self.unverified_history += encoded.unverified_history
        self.rejected.update(encoded.rejected)

    @property
    def loss_share(self) -> float:
        return self.loss_tokens / max(1, self.tokens)

    @property
    def reject_rate(self) -> float:
        rejected = sum(self.rejected.values())
        return rejected / max(1, self.rows + rejected)


def progress_fields(
    done: int, count: int, seen: Totals, flow: Flow, elapsed_s: float
) -> dict[str, str]:
    """A progress line's fields, in its order, with units."""
    return {
        "shards": f"{done}/{count}",
        "samples": f"{seen.rows:,}",
        "tokens": run.format_count(seen.tokens),
        "loss": f"{seen.loss_share:.1%}",
        "samples/s": f"{seen.rows / elapsed_s:,.0f}",
        "tokens/s": run.format_count(seen.tokens / elapsed_s),
        "s3_in": f"{run.format_bytes(flow.bytes_in / elapsed_s)}/s",
        "s3_out": f"{run.format_bytes(flow.bytes_out / elapsed_s)}/s",
        "bottleneck": flow.bottleneck,
    }


class StopWatch:
    """Wall and CPU time of start-up and of the work, and where it went."""

    def __init__(self, began: float) -> None:
        self._work, self._cpu = time.monotonic(), time.process_time()
        self._children = children_cpu_s()
        self._startup = {
            "startup_s": self._work - began,
            "startup_cpu_s": self._cpu + self._children,
        }

    def timings(self, flow: Flow, pool: WorkerPool | None) -> dict[str, Any]:
        """Seconds by step, once the workers have ended; peaks of memory."""
        handover_s = pool.handover_cpu_s if pool else 0.0
        parent_s = time.process_time() - self._cpu
        workers_s = children_cpu_s() - self._children
        steps = flow.cpu_s.sums()
        download_s = steps.get("download", 0.0)
        in_workers = sum(steps.values()) - download_s
        steps["hand over"] = handover_s + max(0.0, workers_s - in_workers)
        steps["upload"] = max(0.0, parent_s - download_s - handover_s)
        return {
            **self._startup,
            "work_s": time.monotonic() - self._work,
            "work_cpu_s": parent_s + workers_s,
            "steps_cpu_s": steps,
            "waiting_s": flow.waits_s.sums(),
            "peak_memory_bytes": {
                "parent": peak_memory_bytes(),
                "worker": pool.peak_bytes if pool else 0,
            },
        }


def print_summary(
    totals: Totals, kept: int, seen: Totals, timings: Mapping[str, Any], output: str
) -> None:
    """Sums over all shards asked for, kept ones included; rates over what was done now."""
    rejected, work_s = sum(totals.rejected.values()), timings["work_s"]
    steps, memory = Counter(timings["steps_cpu_s"]), timings["peak_memory_bytes"]
    shares = ", ".join(
        f"{step} {seconds / max(steps.total(), 1e-9):.0%}" for step, seconds in steps.most_common()
    )
    rows: list[tuple[str, Any]] = [
        ("shards", f"{totals.shards - kept} written, {kept} kept"),
        ("samples", f"{totals.rows:,}"),
        ("tokens", run.format_count(totals.tokens)),
        ("loss tokens", f"{totals.loss_share:.1%}"),
        ("cut at max length", f"{totals.cut:,}"),
        ("without reasoning", f"{totals.no_reasoning:,}"),
        ("history thinking unverified", f"{seen.unverified_history:,}"),
        ("duplicate ids", f"{totals.duplicate_ids:,}"),
        ("rejected", f"{rejected:,} ({totals.reject_rate:.2%})"),
        *[(f"  {reason}", f"{count:,}") for reason, count in sorted(totals.rejected.items())],
        ("wall time", f"{run.format_duration(work_s)} after {timings['startup_s']:.1f}s start-up"),
        ("samples/s", f"{seen.rows / work_s:,.0f}"),
        ("tokens/s", run.format_count(seen.tokens / work_s)),
        ("tokens per CPU-second", run.format_count(seen.tokens / max(timings["work_cpu_s"], 1e-9))),
        ("CPU time", shares),
        ("peak memory", f"parent {run.format_bytes(memory['parent'])}, "
         f"largest worker {run.format_bytes(memory['worker'])}"),
        ("output", output),
    ]  # fmt: skip
    run.print_table("Tokenizing", rows)
