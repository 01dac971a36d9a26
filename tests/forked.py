"""Runs of the scripts in processes that need not import torch again.

They are forked from a server that has, which takes most of the seconds of a short run; all else is
as from a shell: arguments, environment, exit code, output, signals.
"""

import contextlib
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

from torch.distributed import TCPStore

from common import run

FORKS = multiprocessing.get_context("forkserver")
LATE = ["pandas", "tests.tiny_models"]  # what the scripts import when they need it, and its models
FORKS.set_forkserver_preload(["train_dflash_online", "extract_hidden_online", *LATE])


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
    return _run_all(name, argv, [env], timeout)


def run_ranks(
    name: str, argv: Sequence[object], *, ranks: int, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """The same on some ranks, which meet as torchrun's do, in a store that is not theirs.

    Nobody ends the others when one fails. The exit code is the first that is not 0; the outputs
    follow one another.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    environments = [
        {**env, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]
    return _run_all(name, argv, environments, timeout)


def _run_all(
    name: str, argv: Sequence[object], environments: Sequence[Mapping[str, str]], timeout: float
) -> subprocess.CompletedProcess:
    with contextlib.ExitStack() as opened:
        outputs, errors, processes = [], [], []
        for env in environments:
            for files in (outputs, errors):
                files.append(opened.enter_context(tempfile.TemporaryFile("w+")))
            processes.append(Popen(name, argv, env=env, stdout=outputs[-1], stderr=errors[-1]))
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [
            "".join(file.seek(0) or file.read() for file in files) for files in (outputs, errors)
        ]
        code = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess(processes[0].args, code, *texts)


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
