"""What a benchmark found: lines for a table, and figures as JSON for `python -m tests.gpu`."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from common import run
from common.gpus import MEASURED_S, MEASURED_SIZE, matmul_rate


@dataclass
class Report:
    """rows: name and finding · figures: by name with the unit in it · failed: what must not be."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def save(self, output: Path | None) -> None:
        """Write the JSON, also in between: what was found stays when the rest takes too long."""
        if output is not None:
            run.write_atomic(output, run.json_bytes(asdict(self)))

    def finish(self, output: Path | None) -> int:
        """Print the table and write the JSON; 1 when something failed, else 0."""
        run.print_table(self.title, [*self.rows, *(("FAILED", text) for text in self.failed)])
        self.save(output)
        return int(bool(self.failed))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU thread"


def measured_rate(device: torch.device) -> float:
    """FLOP/s of bf16 products here; of small ones on a CPU, where the figure means nothing."""
    if device.type == "cuda":
        return matmul_rate(device, size=MEASURED_SIZE, seconds=MEASURED_S)
    return matmul_rate(device, size=128, seconds=0.02)


def against_goal(share: float, goal: float, device: torch.device) -> str:
    """A share of the measured rate beside its goal, which is one for GPUs."""
    if device.type != "cuda":
        return f"{share:.0%}; no GPU here"
    return f"{share:.0%}, goal {goal:.0%}: {'met' if share >= goal else 'MISSED'}"
