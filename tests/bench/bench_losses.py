"""What raises acceptance on the demo: losses, anchors, layers, taps, DFlash 2; at equal steps.

  python -m tests.bench.bench_losses [--steps 250] [--seeds 3]     or `make bench-losses`

Trains the demo's drafter once for each row of the table and seed, a minute or so each on a core,
seed by seed, so that an early table has every row. Figures are simulated acceptance on held-out
rows (greedy, teacher-forced): over all anchors, and walked as in serving. A seed also draws the
held-out rows, so the spread between seeds holds theirs; the last column compares rows of the same
seed. Read it with care: the target has 0.2 M parameters and speaks in five templates.

Fixed anchors, which the trainer does not offer, come from tests/bench/fixed_anchors.py.

Finished cells are kept in .demo/bench-losses/cells.json and not made again: remove it after a
change that trains another drafter.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import run
from common.journal import read_metrics
from demo.completions import write_completions
from demo.run import TOKENIZE_FLAGS, TRAIN_FLAGS, WORK
from demo.target import target_folder
from tests.tiny_run import ENVIRONMENT, ROOT, TRAINER

FOLDER = WORK / "bench-losses"
BASE, FIXED = "ce, gamma 4", "ce, fixed anchors"
# what each row changes in the demo's flags, where a later one wins
ROWS = {
    BASE: "",
    "ce, no decay": "--gamma 0",
    "dpace": "--loss dpace --gamma 0",
    "dpace, gamma 4": "--loss dpace",
    "kd, gamma 4": "--loss kd",
    "tv, gamma 4": "--loss tv",
    "ce+tv, gamma 4": "--loss ce+tv",
    "ce, half the anchors": "--anchor-ratio 0.0625",
    "ce, twice the anchors": "--anchor-ratio 0.25",
    FIXED: "",
    "ce, one layer slides over 32": "--sliding-window 32",
    "ce, 2 taps of 3": "--layers 0,2",
    "ce, DFlash 2": "--draft dflash2",
}
FIGURES = ("eval_acceptance_length", "eval_walked_acceptance_length")


def tokenized(target: Path, log: Any) -> Path:
    """The demo's completions as a dataset, made once for a target."""
    data = FOLDER / f"data-{target.name}"
    if not (data / "state.json").exists():
        write_completions(target, FOLDER / "completions", log)
        command = [
            *(sys.executable, str(ROOT / "tokenize_completions.py"), "--tokenizer", str(target)),
            *("--input", str(FOLDER / "completions"), "--output", str(data), "--overwrite"),
            *TOKENIZE_FLAGS.split(),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return data


def train_cell(
    trainer: Sequence[str], data: Path, target: Path, flags: Sequence[str], log: Any
) -> dict[str, float]:
    """Train one drafter; its FIGURES at the end. Raises UserError when the trainer fails."""
    output = FOLDER / "run"
    shutil.rmtree(output, ignore_errors=True)
    command = [
        *(sys.executable, *trainer, "--data", str(data), "--target", str(target)),
        *("--output", str(output), *flags),
    ]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    if result.returncode:
        raise run.UserError(f"{' '.join(command)} failed: {result.stderr[-2000:]}")
    last = [entry for entry in read_metrics(output) if "eval_loss" in entry][-1]
    log.info(run.format_fields({"flags": repr(" ".join(flags[-8:])), **_figures(last)}))
    return _figures(last)


def _figures(entry: dict[str, Any]) -> dict[str, float]:
    return {name: entry[name] for name in FIGURES}


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean and standard deviation between seeds."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def table_row(cells: Sequence[dict[str, float]], base: Sequence[dict[str, float]]) -> str:
    """All anchors, walked, and walked against the base seed by seed."""
    of_all, walked = ([cell[name] for cell in cells] for name in FIGURES)
    gains = [cell[FIGURES[1]] - other[FIGURES[1]] for cell, other in zip(cells, base, strict=True)]
    return (
        f"{mean_and_spread(of_all)} all anchors; {mean_and_spread(walked)} walked; "
        f"{statistics.mean(gains):+.2f} ({min(gains):+.2f} to {max(gains):+.2f})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.make_parser(__doc__)
    parser.add_argument("--steps", type=run.positive_int, default=250)
    parser.add_argument("--seeds", type=run.positive_int, default=3, help="how many")
    args = parser.parse_args(argv)
    log = run.setup_logging("bench-losses", debug=args.debug)
    target = target_folder(WORK, log)
    data, kept = tokenized(target, log), FOLDER / "cells.json"
    known = json.loads(kept.read_bytes()) if kept.exists() else {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    for seed in range(args.seeds):
        for name, changes in ROWS.items():
            steps = str(args.steps)
            flags = [
                *(*TRAIN_FLAGS.split(), "--max-steps", steps, "--eval-every", steps),
                *("--save-every", steps, "--seed", str(seed), *changes.split()),
            ]
            trainer = ["-m", "tests.bench.fixed_anchors"] if name == FIXED else [TRAINER]
            key = " ".join([*trainer[1:], target.name, *flags])
            if key not in known:
                known[key] = train_cell(trainer, data, target, flags, log)
                run.write_atomic(kept, run.json_bytes(known))
            found[name].append(known[key])
    title = (
        f"A TINY MODEL ON A CPU: the demo's drafter, blocks of 8, {args.steps} steps, {args.seeds} "
        f"seeds; acceptance of 8 at most, ± between seeds; last: walked against {BASE}, by seed"
    )
    run.print_table(title, [(name, table_row(found[name], found[BASE])) for name in ROWS])
    return 0


if __name__ == "__main__":
    run.exit_with(main)
