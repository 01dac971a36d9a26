"""Processes of a test run that are killed and started again, each with a log of all its lives."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from common.journal import read_metrics
from tests.tiny_run import ROOT

TAIL = 3000  # characters of a log that a failure shows

Popen = Callable[..., Any]  # as subprocess.Popen, but of a script's name and its arguments


def script(name: str, argv: Sequence[str], **options: Any) -> subprocess.Popen:
    """`python NAME.py ARGV`"""
    return subprocess.Popen([sys.executable, str(ROOT / f"{name}.py"), *argv], **options)


class Processes:
    """Scripts with arguments, by name; what still runs at the end of the `with` is killed."""

    def __init__(
        self,
        commands: Mapping[str, tuple[str, Sequence[str]]],
        logs: Path,
        *,
        environment: Mapping[str, str],
        popen: Popen = script,
    ) -> None:
        self._commands, self._logs, self._environment = commands, logs, environment
        self._popen = popen
        self._running: dict[str, Any] = {}

    def start(self, name: str) -> None:
        with (self._logs / f"{name}.txt").open("ab") as file:
            self._running[name] = self._popen(
                *self._commands[name], env=self._environment, stdout=file, stderr=file
            )

    def kill(self, name: str) -> None:
        """Kill it in the middle of its work. Raises AssertionError when it had ended."""
        assert self._running[name].poll() is None, f"{name} had ended: {self.log(name)[-TAIL:]}"
        self._running[name].kill()
        self._running[name].wait()

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.txt").read_text(errors="replace")

    def wait_until(self, happened: Callable[[], bool], *, alive: str) -> None:
        """Look until it happened. Raises AssertionError when the process `alive` ends before."""
        while not happened():
            ended = self._running[alive].poll() is not None
            assert not ended or happened(), self.log(alive)[-TAIL:]
            time.sleep(0.05)

    def wait(self, name: str) -> int:
        """The exit code."""
        return self._running[name].wait()

    def finish(self, name: str) -> None:
        """Wait for its end. Raises AssertionError on a failure."""
        assert self.wait(name) == 0, self.log(name)[-TAIL:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def step_of(output: Path) -> int:
    """The newest step of a run's metrics, which a resume cuts back to its checkpoint."""
    metrics = read_metrics(output)
    return metrics[-1]["step"] if metrics else 0


def wait_for_step(processes: Processes, output: Path, step: float) -> None:
    """Until the process "trainer" has come to a step."""
    processes.wait_until(lambda: step_of(output) >= step, alive="trainer")
