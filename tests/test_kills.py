"""Trainers that are killed, lose their launcher or their terminal."""

import contextlib
import fcntl
import os
import random
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from tests import forked
from tests.processes import step_of
from tests.soak import soak
from tests.tiny_run import (
    ENVIRONMENT,
    FLAGS,
    TRAINER,
    assert_same_run,
    train,
    training_command,
)

TORCHRUN = (
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
    "--signals-to-handle", "SIGTERM,SIGINT",
)  # fmt: skip


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_change_nothing(tiny, tmp_path, kills):
    _, data, target = tiny
    steps = str(3 * kills + 4)
    flags = ("--save-every", "2", "--epochs", "8", "--max-steps", steps, "--eval-every", "9")
    calm = train(data, target, tmp_path / "calm", *flags)
    assert calm.returncode == 0, calm.stderr
    chance = random.Random(0)
    output, log = tmp_path / "killed", tmp_path / "log.txt"
    command = training_command(data, target, output, *flags)
    for _ in range(kills):
        with log.open("a") as file:
            process = forked.Popen(
                "train_dflash_online", command, env=ENVIRONMENT, stdout=file, stderr=file
            )
        last = step_of(output) + chance.randint(1, 4)
        while step_of(output) < min(last, 3 * kills + 3):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)  # in a step, an evaluation, a checkpoint
        process.kill()
        assert process.wait() == -signal.SIGKILL, log.read_text()
    last = train(data, target, output, *flags)
    assert last.returncode == 0, last.stderr
    assert_same_run(tmp_path / "calm", output, tmp_path)


def start_in_terminal(
    command: list[str], folder: Path, *, ignored: bool
) -> tuple[subprocess.Popen, int]:
    """A process whose output is a terminal of its own, and the terminal's other end.

    It begins with the hangup of that terminal ignored, or not, whatever this process does.
    """
    master, terminal = os.openpty()

    def settle() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=ENVIRONMENT,
        start_new_session=True, cwd=folder, preexec_fn=settle,
    )  # fmt: skip
    os.close(terminal)
    return process, master


@pytest.mark.parametrize(
    ("launcher", "ignored"),
    [
        ((), False),
        pytest.param((), True, marks=pytest.mark.slow),  # as in a shell after trap '' HUP
        pytest.param(TORCHRUN, False, marks=pytest.mark.slow),
    ],
)
def test_a_dropped_connection_ends_no_run(tiny, tmp_path, launcher, ignored):
    _, data, target = tiny
    output = tmp_path / "run"
    command = [sys.executable, *launcher, TRAINER, *training_command(data, target, output)]
    if launcher:
        command = ["nohup", *command]
    process, terminal = start_in_terminal(command, tmp_path, ignored=ignored)
    dropped = threading.Event()
    looking = threading.Thread(target=drain, args=(terminal, dropped))
    looking.start()
    while step_of(output) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    dropped_at = step_of(output)
    dropped.set()  # the kernel sends SIGHUP, and every later write fails
    looking.join()
    assert process.wait(timeout=120) == 0, (output / "train.log").read_text()
    assert step_of(output) > dropped_at and (output / "export/config.json").exists()
    assert "Training" not in (output / "train.log").read_text()  # the table is for a terminal
    assert f"step={step_of(output)}/" in (output / "train.log").read_text()


@pytest.mark.slow
def test_a_killed_launcher_ends_its_workers(tiny, tmp_path):
    _, data, target = tiny
    flags = training_command(data, target, tmp_path / "run", "--epochs", "1000")
    with (tmp_path / "log.txt").open("w") as log:
        launcher = subprocess.Popen(
            [sys.executable, *TORCHRUN, TRAINER, *flags], env=ENVIRONMENT, stdout=log, stderr=log
        )
        while step_of(tmp_path / "run") < 3:
            assert launcher.poll() is None
            time.sleep(0.05)
        task = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        workers = [int(child) for child in task.read_text().split()]
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    log = (tmp_path / "log.txt").read_text()
    assert "the launcher (torchrun) is gone" in log and "Traceback" not in log


@pytest.mark.slow
def test_a_short_soak(tiny, tmp_path):
    _, data, target = tiny
    rows = soak(tmp_path, target, data, (*FLAGS, "--save-every", "5"), steps=60, popen=forked.Popen)
    assert ("metrics, weights, moments, export", "equal to the bit") in rows


def drain(terminal: int, ended: threading.Event) -> None:
    """Read what a terminal shows, as somebody who looks at it; close it in the end."""
    while not ended.is_set():
        if select.select([terminal], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):  # nobody writes there: nohup took its place
                os.read(terminal, 65536)
    os.close(terminal)
