"""status.json: where a run stands, for another shell, another machine, or a person at 3 a.m."""

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from common.run import (
    UserError,
    format_duration,
    json_bytes,
    print_table,
    utc_now,
    write_atomic,
)
from common.store import ObjectMissing, Store, open_store

STATUS_FILE = "status.json"
WRITE_EVERY_S = 3.0
MIRROR_EVERY_S = 30.0
STALE_S = 60.0  # without a new status.json a run that was at work is not


class Status:
    """Rewrites status.json every few seconds in a thread, so that training never waits for it.

    A failure to write it is no reason to end a run: the next try may succeed.
    """

    def __init__(self, folder: Path, *, mirror: Store | None = None) -> None:
        self._path, self._mirror = folder / STATUS_FILE, mirror
        self._fields: dict[str, Any] = {
            "host": platform.node(), "last_error": None, "pid": os.getpid(), "started": utc_now(),
        }  # fmt: skip
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._threads = [self._start(self._write, every_s=WRITE_EVERY_S)]
        if mirror is not None:  # a store that does not answer holds the local file up no longer
            self._threads.append(self._start(self._copy, every_s=MIRROR_EVERY_S))

    def update(self, **fields: Any) -> None:
        """Set fields; they are written soon."""
        with self._lock:
            self._fields.update(fields)

    def close(self) -> None:
        """Write the last state and end the threads."""
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=20.0)

    def _start(self, work: Callable[[], None], *, every_s: float) -> threading.Thread:
        def run() -> None:
            while not self._closed.wait(every_s):
                work()
            work()

        thread = threading.Thread(target=run, name="status", daemon=True)
        thread.start()
        return thread

    def _bytes(self) -> bytes:
        with self._lock:
            return json_bytes({**self._fields, "updated": utc_now()})

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            write_atomic(self._path, self._bytes())

    def _copy(self) -> None:
        assert self._mirror is not None
        with contextlib.suppress(OSError, UserError):  # a folder's disk may be full
            self._mirror.write(STATUS_FILE, self._bytes())


def read_status(where: str, *, endpoint_url: str | None = None) -> dict[str, Any]:
    """The fields of the status.json in a run folder, or where --checkpoint-uri copies it.

    Raises UserError when there is none.
    """
    try:
        fields = json.loads(open_store(where, endpoint_url=endpoint_url).read(STATUS_FILE))
        return {**fields, "updated": datetime.fromisoformat(fields["updated"])}
    except (ObjectMissing, ValueError, TypeError, KeyError) as error:
        raise UserError(f"--status {where}: no {STATUS_FILE} there: not a run folder?") from error


def print_status(where: str, *, endpoint_url: str | None = None) -> None:
    """Print where a run stands. Raises UserError when there is no status to read."""
    fields = read_status(where, endpoint_url=endpoint_url)
    age = max(0.0, time.time() - fields["updated"].timestamp())
    state = str(fields.get("state"))
    if age > STALE_S and state not in ("finished", "failed", "stopped"):
        state = f"dead? ({state} was its last word)"
    print_table(
        f"Run {where}",
        [
            ("state", state),
            (
                "heard of",
                f"{format_duration(age)} ago, pid {fields.get('pid')} on {fields.get('host')}",
            ),
            *[(key.replace("_", " "), _shown(key, value)) for key, value in _told(fields).items()],
        ],
    )


def _told(fields: Mapping[str, Any]) -> dict[str, Any]:
    hidden = {"state", "pid", "host", "updated", "started"}
    return {key: value for key, value in fields.items() if key not in hidden and value is not None}


def _shown(key: str, value: Any) -> str:
    if key == "eta_s":
        return format_duration(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
