"""How a long run waits, stops and keeps others out of its folder."""

import contextlib
import fcntl
import math
import os
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from common.run import EXIT_INTERRUPTED, EXIT_TERMINATED, UserError, utc_now


class StopRequest:
    """SIGTERM or Ctrl-C: the loop finishes its step and saves; a second one ends at once."""

    def __init__(self) -> None:
        self.signum: int | None = None
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._receive)
        # nohup ignores it and takes the terminal away; a shell that ignores it leaves the terminal
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or os.isatty(1) or os.isatty(2):
            signal.signal(signal.SIGHUP, _leave_terminal)

    def _receive(self, signum: int, frame: Any) -> None:
        if self.signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return EXIT_INTERRUPTED if self.signum == signal.SIGINT else EXIT_TERMINATED


def _leave_terminal(signum: int, frame: Any) -> None:
    """A dropped connection ends no run: what it would show goes nowhere, its log file goes on."""
    for number in (1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode):  # a terminal, though it is gone already
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


class Stopped(Exception):
    """A stop was requested while waiting, before any step of this process."""


class Waiting:
    """Says every 10 s what is waited for and since when; ends the wait on a stop request."""

    def __init__(self, log: Any, stop: StopRequest | None = None) -> None:
        self._log, self._stop = log, stop

    def for_(self, what: str, *, timeout_s: float, hint: str = "") -> Callable[[float], None]:
        """What to call with the seconds waited so far; `hint` is what to check meanwhile."""
        since, last = utc_now(), -math.inf
        more = f"; {hint}" if hint else ""

        def on_wait(waited_s: float) -> None:
            nonlocal last
            if self._stop is not None and self._stop.signum is not None:
                raise Stopped
            if waited_s < last:  # a new wait: first for a shard's commit, then for its download
                last = -math.inf
            if waited_s - last >= 10:
                last = waited_s
                self._log.info(
                    f"waiting for={what!r} since={since} waited={waited_s:.0f}s of "
                    f"{timeout_s:.0f}s{more}"
                )

        return on_wait


def make_folder(output: Path) -> None:
    """Make the run folder. Raises UserError when nothing can be written there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / ".lock").touch()
    except OSError as error:
        raise UserError(f"--output {output}: cannot write there ({error.strerror})") from error


def refuse_files(output: Path, folders: Iterable[str]) -> None:
    """Raises UserError where something else stands in the place of a folder of a run."""
    for name in folders:
        path = output / name
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is not a folder: move it away, the run writes a folder there")


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a file's lock, and so do processes forked meanwhile. Raises BlockingIOError if taken."""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def run_folder_lock(output: Path, *, is_main: bool) -> Iterator[None]:
    """Hold the run folder: a second trainer there is refused. The lock dies with its process."""
    with contextlib.ExitStack() as held:
        if is_main:
            try:
                held.enter_context(file_lock(output / ".lock"))
            except BlockingIOError as error:
                raise UserError(
                    f"--output {output}: another trainer is at work there; wait for it, or choose "
                    "another folder"
                ) from error
        yield
