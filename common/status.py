"""status.json: where a run stands, for another shell, another machine, or a person at 3 a.m."""

import json
import os
import platform
import threading
import time
from collections.abc import Mapping
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
from common.store import Store

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
        self._mirrored = -MIRROR_EVERY_S
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def update(self, **fields: Any) -> None:
        """Set fields; they are written soon."""
        with self._lock:
            self._fields.update(fields)

    def close(self) -> None:
        """Write the last state and end the thread."""
        self._closed.set()
        self._thread.join(timeout=20.0)

    def _run(self) -> None:
        while not self._closed.wait(WRITE_EVERY_S):
            self._write()
        self._mirrored = -MIRROR_EVERY_S
        self._write()

    def _write(self) -> None:
        with self._lock:
            data = json_bytes({**self._fields, "updated": utc_now()})
        try:
            write_atomic(self._path, data)
            if self._mirror is not None and time.monotonic() - self._mirrored >= MIRROR_EVERY_S:
                self._mirror.write(STATUS_FILE, data)
                self._mirrored = time.monotonic()
        except (OSError, UserError):
            pass


def read_status(folder: Path) -> dict[str, Any]:
    """The fields of a run folder's status.json. Raises UserError when there is none."""
    path = folder / STATUS_FILE
    try:
        fields = json.loads(path.read_bytes())
        return {**fields, "updated": datetime.fromisoformat(fields["updated"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"--status {folder}: no {STATUS_FILE} there: not a run folder?") from error


def print_status(folder: Path) -> None:
    """Print where a run stands. Raises UserError when the folder holds none."""
    fields = read_status(folder)
    age = max(0.0, time.time() - fields["updated"].timestamp())
    state = str(fields.get("state"))
    if age > STALE_S and state not in ("finished", "failed", "stopped"):
        state = f"dead? ({state} was its last word)"
    print_table(
        f"Run {folder}",
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
