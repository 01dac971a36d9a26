"""How a training run went, for the table at its end: what it reached and what held it up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.journal import read_metrics

BUSY_ENOUGH = 0.9  # a drafter that computes this share of the time is the bottleneck itself


@dataclass
class Pace:
    """Seconds of this process's steps, and of waiting for their hidden states and shards."""

    step_s: float = 0.0
    data_wait_s: float = 0.0
    steps: int = 0

    def add(self, entry: Mapping[str, Any]) -> None:
        self.steps += 1
        self.step_s += entry["step_s"]
        self.data_wait_s += entry["data_wait_s"]

    @property
    def mean_s(self) -> float:
        """Of a step; 0 before the first."""
        return self.step_s / max(1, self.steps)

    @property
    def idle(self) -> float:
        """The share of the time in which the drafter waited."""
        return self.data_wait_s / self.step_s if self.step_s else 0.0


def bottleneck(pace: Pace, *, colocated: bool) -> str:
    """What the run waited for, in words, and what would help."""
    idle = pace.idle
    if colocated:
        return f"target {idle:.0%} of each step, drafter {1 - idle:.0%}, one after the other"
    if idle > 1 - BUSY_ENOUGH:
        return f"target: drafter idle {idle:.0%}; move a GPU to the target or raise --anchor-ratio"
    return (
        f"drafter: idle {idle:.0%}; where servers are idle, move a GPU to the drafter or lower "
        "--anchor-ratio"
    )


def held_out_rows(output: Path) -> list[tuple[str, str]]:
    """The table's rows on the held-out rows: the first evaluation against the last."""
    evaluations = [entry for entry in read_metrics(output) if "eval_loss" in entry]
    before = next((e for e in evaluations if e["step"] == 0), None)
    after = next((e for e in reversed(evaluations) if e["step"] > 0), None)

    def before_after(key: str) -> str:
        return f"{_figure(before, key)} -> {_figure(after, key)}"

    return [
        ("held-out loss", before_after("eval_loss")),
        ("acceptance length, all anchors", before_after("eval_acceptance_length")),
        ("acceptance length, walked", before_after("eval_walked_acceptance_length")),
        ("accuracy of slots 1, 2, ...", _slots(after["eval_slot_accuracy"] if after else ())),
    ]


def _figure(entry: Mapping[str, Any] | None, key: str) -> str:
    return "-" if entry is None else f"{entry[key]:.3f} ({entry['eval_rows']} rows)"


def _slots(accuracy: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in accuracy) or "-"
