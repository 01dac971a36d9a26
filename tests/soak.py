"""`make soak`: a served run of the demo with servers and trainer killed on the way, to the bit.

Trains twice from the same data: once undisturbed, once with the hidden-state server killed and
started again twice and the trainer killed three times. Metrics, weights, moments and export must be
equal. With --steps 2000, as `make soak` does, it takes about a quarter of an hour on two cores.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import run
from common.journal import read_metrics
from demo.completions import write_completions
from demo.run import EXTRACT_FLAGS, TOKENIZE_FLAGS, TRAIN_FLAGS, WORK
from demo.target import target_folder
from tests.processes import Popen, Processes, script, wait_for_step
from tests.servers import free_port
from tests.tiny_run import ENVIRONMENT, ROOT, assert_same_run

# what dies when this share of the steps is done
DISTURBANCES = (
    (0.15, "server"), (0.3, "trainer"), (0.5, "trainer"), (0.65, "server"), (0.8, "trainer"),
)  # fmt: skip


def run_to_end(
    commands: Mapping[str, tuple[str, Sequence[str]]],
    output: Path,
    *,
    steps: int,
    disturbances: Sequence[tuple[float, str]],
    logs: Path,
    popen: Popen,
) -> float:
    """Run a server and a trainer until the trainer ends, whatever dies on the way; its seconds.

    `commands` are scripts' names and arguments.
    """
    began = time.monotonic()
    with Processes(commands, logs, environment=ENVIRONMENT, popen=popen) as processes:
        for name in commands:
            processes.start(name)
        for share, name in disturbances:
            wait_for_step(processes, output, share * steps)
            processes.restart(name)
        processes.finish("trainer")
    return time.monotonic() - began


def soak(
    folder: Path,
    target: Path,
    data: Path,
    train_flags: Sequence[str],
    *,
    steps: int,
    popen: Popen = script,
) -> list[tuple[str, str]]:
    """Train undisturbed and disturbed, compare to the bit; rows for a table."""
    address = f"127.0.0.1:{free_port()}"
    server = ["--target", str(target), "--listen", address, *EXTRACT_FLAGS.split()]
    seconds = {}
    for name, disturbances in (("calm", ()), ("disturbed", DISTURBANCES)):
        trainer = [
            *("--data", str(data), "--target", str(target)),
            *("--output", str(folder / name), "--hidden-states", address),
            *(*train_flags, "--max-steps", str(steps)),
        ]
        seconds[name] = run_to_end(
            {
                "server": ("extract_hidden_online", server),
                "trainer": ("train_dflash_online", trainer),
            },
            folder / name, steps=steps, disturbances=disturbances, logs=folder, popen=popen,
        )  # fmt: skip
    assert_same_run(folder / "calm", folder / "disturbed", folder)
    loss = read_metrics(folder / "disturbed")[-2]["loss"]
    died = [name for _, name in DISTURBANCES]
    return [
        ("steps", f"{steps:,}, the last one's loss {loss:.4f}"),
        ("servers killed", str(died.count("server"))),
        ("trainers killed", str(died.count("trainer"))),
        ("undisturbed", run.format_duration(seconds["calm"])),
        ("disturbed", run.format_duration(seconds["disturbed"])),
        ("metrics, weights, moments, export", "equal to the bit"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.make_parser(__doc__)
    parser.add_argument("--steps", type=run.positive_int, default=2000)
    args = parser.parse_args(argv)
    log = run.setup_logging("soak", debug=args.debug)
    target = target_folder(WORK, log)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        write_completions(target, folder / "completions", log)
        command = [
            *(sys.executable, str(ROOT / "tokenize_completions.py"), "--tokenizer", str(target)),
            *("--input", str(folder / "completions"), "--output", str(folder / "data")),
            *TOKENIZE_FLAGS.split(),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        flags = TRAIN_FLAGS.split()
        run.print_table("Soak", soak(folder, target, folder / "data", flags, steps=args.steps))
    return 0


if __name__ == "__main__":
    run.exit_with(main)
