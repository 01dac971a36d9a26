"""Runs of the scripts in processes that need not import torch again.

They are forked from a server that has, which takes most of the seconds of a short run; all else is
as from a shell: arguments, environment, exit code, output, signals.
"""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, Any

from common import run

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train_dflash_online", "extract_hidden_online"])


class Popen:
    """`python NAME.py ARGV`, with what the tests need of subprocess.Popen; text only."""

    def __init__(
        self, name: str, argv: Sequence[object], *, env: Mapping[str, str],
        stdout: Any = None, stderr: Any = None,
    ) -> None:  # fmt: skip
        self.args = [name, *map(str, argv)]
        with tempfile.TemporaryDirectory() as folder:
            targets = [
                _place(output, Path(folder, str(number)))
                for number, output in ((1, stdout), (2, stderr))
            ]
            self._process = FORKS.Process(target=_be, args=(self.args, dict(env), *targets))
            self._process.start()
            # opening waits until the other end is open, so the names may go afterwards
            self.stdout, self.stderr = (
                open(target) if output is PIPE else None  # noqa: SIM115
                for output, target in zip((stdout, stderr), targets, strict=True)
            )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float) -> tuple[None, str]:
        """(None, what stderr said to the end)."""
        said = self.stderr.read() if self.stderr is not None else ""
        self.wait(timeout)
        return None, said

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_to_end(
    name: str, argv: Sequence[object], *, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """What subprocess.run gives for it, output captured."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Popen(name, argv, env=env, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        texts = [file.seek(0) or file.read() for file in (out, err)]
        return subprocess.CompletedProcess(process.args, code, *texts)


def _place(output: int | IO | None, fifo: Path) -> str | None:
    """Where a process's output goes, as a path to open; None leaves it."""
    if output is None:
        return None
    if output == DEVNULL:
        return os.devnull
    if output == PIPE:
        os.mkfifo(fifo)
        return str(fifo)
    assert not isinstance(output, int)
    return f"/proc/{os.getpid()}/fd/{os.dup(output.fileno())}"  # the file may be closed soon


def _be(args: list[str], env: dict[str, str], stdout: str | None, stderr: str | None) -> None:
    for path, number in ((stdout, 1), (stderr, 2)):
        if path is not None:
            os.dup2(os.open(path, os.O_APPEND | os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(env)
    name, *argv = args
    sys.argv = [f"{name}.py", *argv]
    run.exit_with(importlib.import_module(name).main, skip_teardown=True)
