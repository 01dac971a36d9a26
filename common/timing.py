"""Where the time goes: CPU seconds by step, in threads and processes."""

import contextlib
import resource
import threading
import time
from collections.abc import Mapping
from pathlib import Path


class Seconds:
    """Sums of seconds by name that threads may add to at once."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, seconds: Mapping[str, float]) -> None:
        with self._lock:
            for name, amount in seconds.items():
                self._sums[name] = self._sums.get(name, 0.0) + amount

    def sums(self) -> dict[str, float]:
        with self._lock:
            return dict(self._sums)


class Clock:
    """Charges the CPU time since the last charge to a step: this thread's, or all the process's."""

    def __init__(self, *, whole_process: bool = False) -> None:
        self.cpu_s: dict[str, float] = {}
        self._read = time.process_time if whole_process else time.thread_time
        self._last = self._read()

    def charge(self, step: str) -> None:
        now = self._read()
        self.cpu_s[step] = self.cpu_s.get(step, 0.0) + now - self._last
        self._last = now


def children_cpu_s() -> float:
    """CPU seconds, user and system, of the child processes that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def peak_memory_bytes() -> int:
    """The largest resident size that this program ever had, shared pages included.

    From /proc where there is one: rusage counts what a larger parent had before it started us too.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
