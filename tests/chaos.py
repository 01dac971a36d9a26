"""`make chaos`: the demo's chain with faults of every kind while it runs, against a calm run.

Runs stages 1 to 3 twice from the same completions in an S3 server: once undisturbed, and once with
S3 faults, kill -9 of each stage, a damaged cached shard, a full disk and a clock that jumps. The
dataset, and the trainer's metrics, weights, moments and export must be equal to the bit, and
nothing may be left behind. --seed moves the moments; it takes two to four minutes on two cores,
and gives up after ten.
"""

import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import run
from demo.completions import write_completions
from demo.run import EXTRACT_FLAGS, NUM_SHARDS, TOKENIZE_FLAGS, TRAIN_FLAGS, WORK
from demo.target import target_folder
from tests.chaos_faults import (
    NAMESPACE,
    SmallDisk,
    can_mount,
    damage_cached_shard,
    is_mended,
    jumps,
    leftovers,
    open_uploads,
    s3_faults,
    wait_for_end_of_all,
)
from tests.faulty_s3 import faulty
from tests.processes import Processes, wait_for_step
from tests.servers import S3Server, free_port, rclone_command, serving
from tests.tiny_run import ENVIRONMENT, ROOT, assert_same_run

LIMIT_S = 600
BUCKET = "chaos"
SHARE = 0.3  # of S3 requests that meet a fault: few are made, and each kind has to come
STEPS = 60
CHAOS_FLAGS = (
    f"--max-steps {STEPS} --save-every 5 --log-every 1 --eval-every 30 --eval-rows 16 --force"
)
HOUR_S = 3600
# what happens to a trainer when this share of its steps is done, a little earlier or later
DISTURBANCES = (
    (0.07, "server"), (0.17, "damage"), (0.35, "disk"), (0.5, "clock"), (0.6, "trainer"),
    (0.7, "server"), (0.85, "trainer"),
)  # fmt: skip
MARK, INSIDE = "CHAOS_RUN", "CHAOS_NAMESPACE"  # variables of the runs, and of a re-executed self

doing = "preparing"


def now(what: str, log: Any) -> None:
    """Say what is under way, for the log and for the message when time is up."""
    global doing
    doing = what
    log.info(what)


def give_up(*_: object) -> None:
    raise run.UserError(f"not done after {LIMIT_S} s, while {doing}")


@dataclass(frozen=True)
class Chain:
    """The three stages of one of the two runs."""

    name: str
    folder: Path  # of the run's own
    output: Path
    processes: Processes

    @property
    def cache(self) -> Path:
        return self.folder / "cache"


def make_chain(
    name: str,
    folder: Path,
    target: Path,
    output: Path,
    *,
    environment: Mapping[str, str],
    endpoints: tuple[str, str],  # of stage 1 and the trainer
) -> Chain:
    (folder / "tmp").mkdir(parents=True)
    data, address = f"s3://{BUCKET}/{name}/", f"127.0.0.1:{free_port()}"
    server = ["--target", str(target), "--listen", address, *EXTRACT_FLAGS.split()]
    trainer = [
        *("--data", data, "--target", str(target), "--output", str(output)),
        *("--hidden-states", address, "--cache-dir", str(folder / "cache")),
        *("--endpoint-url", endpoints[1], *TRAIN_FLAGS.split(), *CHAOS_FLAGS.split()),
    ]
    tokenizing = [
        *("--input", f"s3://{BUCKET}/completions/", "--output", data, "--tokenizer", str(target)),
        *("--endpoint-url", endpoints[0], *TOKENIZE_FLAGS.split()),
    ]
    commands = {
        "server": ("extract_hidden_online", server),
        "trainer": ("train_dflash_online", trainer),
        "tokenize": ("tokenize_completions", tokenizing),
    }
    own = {
        **ENVIRONMENT, **environment, MARK: str(folder), "TMPDIR": str(folder / "tmp"),
        "SHIFTED_CLOCK": str(folder / "clock"), "PYTHONPATH": str(ROOT / "tests/shifted_clock"),
    }  # fmt: skip
    return Chain(name, folder, output, Processes(commands, folder, environment=own))


def run_chain(chain: Chain, disturb: Callable[[Chain], None]) -> float:
    """All three stages to the end; the seconds that it took."""
    began = time.monotonic()
    with chain.processes as processes:
        for name in ("server", "trainer"):
            processes.start(name)
        processes.wait_until(lambda: " INFO train: " in processes.log("trainer"), alive="trainer")
        processes.start("tokenize")
        disturb(chain)
        processes.finish("tokenize")
        processes.finish("trainer")
        processes.kill("server")
        wait_for_end_of_all(MARK, str(chain.folder))
    return time.monotonic() - began


# ---- the disturbed run


class Chaos:
    """Disturbs a chain at moments drawn from a seed, and notes what came of it, as table rows."""

    def __init__(self, server: S3Server, disk: SmallDisk, chance: random.Random, log: Any) -> None:
        self._server, self._disk, self._chance, self._log = server, disk, chance, log
        self.damaged: list[Path] = []

    def disturb(self, chain: Chain) -> None:
        self._disturb_tokenizing(chain)
        for share, kind in DISTURBANCES:
            step = share * STEPS + self._chance.randint(-1, 1)
            wait_for_step(chain.processes, chain.output, step)
            time.sleep(0.3 * self._chance.random())  # in a step, an evaluation, a checkpoint
            now(f"disturbed run: {kind} at step {step:.0f} or later", self._log)
            if kind in ("server", "trainer"):
                chain.processes.restart(kind)
            elif kind == "damage":
                chain.processes.kill("trainer")
                self.damaged.append(damage_cached_shard(chain.cache, self._chance))
                chain.processes.start("trainer")
            elif kind == "disk" and self._disk.is_mounted:
                self._fill_disk(chain)
            elif kind == "clock":
                self._set_clock(chain, -HOUR_S)

    def _disturb_tokenizing(self, chain: Chain) -> None:
        """Two kills on the way, and the clock moves in the last of the three lives."""
        for shards in (1, 1 + NUM_SHARDS // 2):
            self._wait_for_shards(chain, shards)
            now(f"disturbed run: kill stage 1 after {shards} shards or more", self._log)
            chain.processes.restart("tokenize")
        said = len(chain.processes.log("tokenize"))
        chain.processes.wait_until(
            lambda: len(chain.processes.log("tokenize")) > said, alive="tokenize"
        )
        self._set_clock(chain, HOUR_S)

    def _wait_for_shards(self, chain: Chain, count: int) -> None:
        def are_there() -> bool:
            names = self._server.objects(BUCKET, f"{chain.name}/shard-")
            return sum(name.endswith(".json") for name in names) >= count

        chain.processes.wait_until(are_there, alive="tokenize")

    def _set_clock(self, chain: Chain, seconds: int) -> None:
        (chain.folder / "clock").write_text(str(seconds))

    def _fill_disk(self, chain: Chain) -> None:
        """Until a checkpoint could not be written."""
        told = chain.processes.log("trainer").count(" not saved: ")
        self._disk.fill()
        chain.processes.wait_until(
            lambda: chain.processes.log("trainer").count(" not saved: ") > told, alive="trainer"
        )
        self._disk.make_room()


def survived(chain: Chain, chaos: Chaos, disk: SmallDisk, logs: Mapping[str, Path]) -> list[Any]:
    """Rows on each fault. Raises AssertionError for one that did not come, or left no trace."""
    trainer, tokenizing = (chain.processes.log(name) for name in ("trainer", "tokenize"))
    resumed = re.findall(r"starting step=(\d+) .* resumed=\S*step-", trainer)
    kept = re.findall(r"(\d+) kept", tokenizing)
    kills = [kind for _, kind in DISTURBANCES if kind in ("trainer", "damage")]
    assert len(resumed) == len(kills) and kept, (resumed, kept)
    moved = jumps(tokenizing), jumps(trainer)
    assert moved[0] >= 1 and moved[1] >= 2, f"the clock did not move: {moved}"
    return [
        *s3_faults(logs),
        ("stage 1 killed", f"2 times; the last life kept {kept[-1]} of {NUM_SHARDS} shards"),
        ("hidden-state server killed", "2 times; its requests were asked again"),
        ("trainer killed", f"{len(kills)} times; went on from steps {', '.join(resumed)}"),
        ("cached shard damaged", f"{chaos.damaged[0].name}; fetched again"),
        (
            "disk full to the last byte",
            f"{trainer.count(' not saved: ')} not saved of the checkpoints; later ones were"
            if disk.is_mounted
            else "NOT DONE: nothing can be mounted here (unshare -rm)",
        ),
        (
            "clock",
            "+1 h in stage 1 and the trainer, -2 h in the trainer; S3 signatures kept the time",
        ),
    ]


def compare(server: S3Server, calm: Chain, chain: Chain, folder: Path) -> list[tuple[str, str]]:
    """Rows on what is equal. Raises AssertionError where something differs or is left behind."""
    datasets = []
    for name in (calm.name, chain.name):
        objects = server.objects(BUCKET, f"{name}/")
        datasets.append({k: v for k, v in objects.items() if not k.startswith("runs/")})
    assert datasets[0].keys() == datasets[1].keys(), datasets[0].keys() ^ datasets[1].keys()
    differing = [key for key in datasets[0] if datasets[0][key] != datasets[1][key]]
    assert not differing, f"other bytes: {differing}"
    assert_same_run(calm.output, chain.output, folder)
    for one in (calm, chain):
        left = [*leftovers(one.cache, one.output), *(one.folder / "tmp").iterdir()]
        assert not left, f"left behind: {left}"
    assert not open_uploads(server, BUCKET), open_uploads(server, BUCKET)
    return [
        ("dataset", f"{len(datasets[0])} objects equal to the bit, plan and rejects included"),
        ("metrics, weights, moments, export", "equal to the bit"),
        ("processes, temporary files, uploads left", "none"),
    ]


def chaos_run(seed: int, target: Path, folder: Path, log: Any) -> list[tuple[str, str]]:
    write_completions(target, folder / "completions", log)
    (folder / "s3").mkdir()
    port, disk = free_port(), SmallDisk(folder / "disk")
    stages = ("stage 1", "trainer")
    logs = {name: folder / f"{name.replace(' ', '-')}-s3.jsonl" for name in stages}
    with contextlib.ExitStack() as closing:
        closing.callback(disk.close)
        server = closing.enter_context(serving(rclone_command(port, folder / "s3"), port))
        server.make_bucket(BUCKET)
        for path in (folder / "completions").iterdir():
            server.client().upload_file(str(path), BUCKET, f"completions/{path.name}")
        proxies = [
            closing.enter_context(faulty(server, seed=seed, share=SHARE, log=logs[name]))
            for name in stages
        ]
        calm = make_chain(
            "calm", folder / "calm", target, folder / "calm/run",
            environment=server.environment, endpoints=(server.endpoint_url, server.endpoint_url),
        )  # fmt: skip
        now("undisturbed run", log)
        calm_s = run_chain(calm, lambda chain: None)
        disturbed = make_chain(
            "disturbed", folder / "disturbed", target, disk.folder / "run",
            environment=server.environment, endpoints=(proxies[0], proxies[1]),
        )  # fmt: skip
        now("disturbed run", log)
        chaos = Chaos(server, disk, random.Random(seed), log)
        disturbed_s = run_chain(disturbed, chaos.disturb)
        now("comparing", log)
        assert all(is_mended(path, calm.cache) for path in chaos.damaged)
        return [
            ("seed", str(seed)),
            *survived(disturbed, chaos, disk, logs),
            *compare(server, calm, disturbed, folder),
            ("undisturbed", run.format_duration(calm_s)),
            ("disturbed", run.format_duration(disturbed_s)),
        ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.make_parser(__doc__)
    parser.add_argument("--seed", type=run.non_negative_int, default=0, help="of the moments")
    args = parser.parse_args(argv)
    if INSIDE not in os.environ and can_mount():
        again = [*NAMESPACE, sys.executable, "-m", "tests.chaos", *(argv or sys.argv[1:])]
        os.execvpe(again[0], again, {**os.environ, INSIDE: "1"})
    run.raise_on_signals()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    log = run.setup_logging("chaos", debug=args.debug)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        target = target_folder(WORK, log)
        rows = chaos_run(args.seed, target, Path(name), log)
    run.print_table("Chaos", rows)
    return 0


if __name__ == "__main__":
    run.exit_with(main)
