"""Python's wall clock off by the seconds in the file $SHIFTED_CLOCK, from one call to the next.

With this folder on PYTHONPATH a process starts with it. What asks the system itself is not misled:
datetime.now(), which signs S3 requests, since C extensions rely on the real class's layout.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

REAL_TIME = time.time


def shift() -> int:
    """Seconds; 0 while there is no file."""
    try:
        with open(os.environ["SHIFTED_CLOCK"]) as file:
            return int(file.read() or 0)
    except (OSError, KeyError):
        return 0


def shifted_time() -> float:
    return REAL_TIME() + shift()


def split_time(real: Callable[[float], Any], seconds: float | None = None) -> Any:
    return real(shifted_time() if seconds is None else seconds)


time.time = shifted_time
time.time_ns = lambda: int(shifted_time() * 1e9)
# Not functions: logging keeps one as a class attribute, where a function would become a method.
time.gmtime = functools.partial(split_time, time.gmtime)
time.localtime = functools.partial(split_time, time.localtime)
