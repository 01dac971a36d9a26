"""All checks and benchmarks of one GPU, in under 8 minutes, as one table: `make gpu-checks`.

Each part is a process of its own with a limit of time: one that fails, hangs or loses the GPU does
not stop the others. Ends with 0 when all checks hold, else with 1; goals of speed are only shown.
--tiny tries the parts on a machine without a GPU.

  python -m tests.gpu --output gpu-checks.json
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import run

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 470.0  # for all parts together
AT_ONCE = ("-n", "3", "--dist", "loadfile")  # most of the tests' time is compilers' and imports
MACHINE = """
import json, sys, torch
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    facts |= {"gpu": card.name, "capability": f"sm_{card.major}{card.minor}"}
    facts |= {"memory_bytes": card.total_memory, "gpus": torch.cuda.device_count()}
    facts["shared_memory_bytes"] = getattr(card, "shared_memory_per_block_optin", None)
    facts["works"] = float(torch.ones(2, device="cuda").sum()) == 2.0
    torch.distributed.is_nccl_available() or sys.exit("torch has no NCCL")
json.dump(facts, open(sys.argv[1], "w"))
"""


@dataclass(frozen=True)
class Part:
    """A process that writes to the file appended to its command, and how long it may take."""

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass
class Outcome:
    """How a part ended; `failed` says why, or is None."""

    name: str
    seconds: float
    failed: str | None
    rows: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def parts(*, tiny: bool) -> list[Part]:
    """The benchmarks come first: the tests take what time is left."""
    python = (sys.executable, "-m")
    target = ("--layers", "4", "--documents", "1", "--length", "64", "--rounds", "1")
    step = ("--tiny", "--rounds", "2")
    return [
        Part("machine", (sys.executable, "-c", MACHINE), 60),
        Part(
            "target",
            (*python, "tests.gpu.bench_target", *(target if tiny else ()), "--output"),
            75,
        ),
        Part("step", (*python, "tests.gpu.bench_step", *(step if tiny else ()), "--output"), 190),
        Part(
            "tests",
            (
                *python,
                "pytest",
                "-q",
                *AT_ONCE,
                "-p",
                "tests.gpu.findings",
                "tests/gpu",
                "--findings",
            ),
            300,
        ),
    ]


def run_part(part: Part, output: Path, *, limit_s: float) -> Outcome:
    """Run it in a process group of its own, and end all of that when it is over."""
    began, log = time.monotonic(), output.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*part.command, str(output)], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code, failed = process.wait(max(limit_s, 0.0)), None
        except subprocess.TimeoutExpired:
            failed = f"not done after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failed is None and code:
        failed = f"exit code {code}"
    outcome = Outcome(part.name, time.monotonic() - began, failed)
    try:
        read_findings(outcome, output)
    except (OSError, ValueError):
        outcome.failed = failed or "it wrote no findings"
    if outcome.failed:
        print(f"---- {part.name}: {outcome.failed}", file=sys.stderr)
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
    return outcome


def read_findings(outcome: Outcome, output: Path) -> None:
    """The part's own rows and facts, whatever of them it came to write."""
    if outcome.name == "tests":
        outcome.rows = [tuple(json.loads(line)) for line in output.read_text().splitlines()]
        return
    found = json.loads(output.read_text())
    outcome.rows = [(name, text) for name, text in found.get("rows", ())]
    outcome.rows += [("FAILED", text) for text in found.get("failed", ())]
    outcome.facts = found.get("figures", found)


def speed_rows(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Colocated training of the 27B on this card, from both benchmarks, beside the planner's."""
    target, step = found.get("target", {}), found.get("step", {})
    steps = [step[name] for name in ("plain_step_s", "compiled_step_s") if name in step]
    if not steps or "whole_s" not in target:
        return []
    tokens = step["tokens"]
    measured = tokens / (target["whole_s"] * tokens / 4096 + min(steps))
    planned = tokens / (target["planned_s"] * tokens / 4096 + step["planned_step_s"])
    return [("colocated, a card", f"{measured:,.3g} tokens/s; planner {planned:,.3g}")]


def table(outcomes: Sequence[Outcome]) -> tuple[str, list[tuple[str, str]]]:
    """The title, with the card and the versions, and all rows."""
    found = {outcome.name: outcome.facts for outcome in outcomes}
    machine = found.get("machine", {})
    card = machine.get("gpu") or "no GPU"
    title = (
        f"GPU checks on {card}: torch {version('torch')}, transformers {version('transformers')}"
    )
    rows = []
    for outcome in outcomes:
        text = (
            f"{'FAILED: ' + outcome.failed if outcome.failed else 'done'}, {outcome.seconds:.0f} s"
        )
        rows.append((outcome.name.upper(), text))
        if outcome.name == "machine":
            rows += [(f"  {name}", str(value)) for name, value in outcome.facts.items()]
        rows += [(f"  {name}", text) for name, text in outcome.rows]
    rows += speed_rows(found)
    return title, rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="try the parts, on a CPU if need be")
    parser.add_argument("--output", type=Path, help="all findings, as JSON")
    parser.add_argument("--only", help="parts to run, comma-separated [all]")
    args = parser.parse_args(argv)
    chosen = parts(tiny=args.tiny)
    if args.tiny:
        os.environ.setdefault("GPU_CHECKS_DEVICE", "cpu")
    if args.only is not None:
        names = args.only.split(",")
        if unknown := set(names) - {part.name for part in chosen}:
            parser.error(f"--only: no part is called {', '.join(sorted(unknown))}")
        chosen = [part for part in chosen if part.name in names]
    ends, outcomes = time.monotonic() + DEADLINE_S, []
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            limit_s = min(part.limit_s, ends - time.monotonic())
            outcomes.append(run_part(part, Path(folder, f"{part.name}.out"), limit_s=limit_s))
    title, rows = table(outcomes)
    run.print_table(title, rows)
    failed = any(outcome.failed for outcome in outcomes)
    if args.output is not None:
        found = {"title": title, "ok": not failed, "parts": [vars(each) for each in outcomes]}
        run.write_atomic(args.output, run.json_bytes(found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
