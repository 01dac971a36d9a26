"""Local copies of a store's committed files, shared by all processes of a machine.

    FOLDER/.lock                           held for moments, while room is made
    FOLDER/NAME/shard-00007.arrow          as its commit record says; its readers share its lock
    FOLDER/NAME/shard-00007.arrow.lock     held by the one who checks or fetches it; mtime: last use
    FOLDER/NAME/shard-00007.arrow.fetch/   where it arrives, its room taken beforehand

The locks are flock's and die with their processes: a folder of arrival whose lock is free was left
by a killed one. Files of a local store are read where they lie.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.lifetime import file_lock
from common.run import UserError, format_bytes
from common.store import LocalStore, Store

LOCK, ARRIVAL = ".lock", ".fetch"
POLL_S = 0.05
ATTEMPTS = 2  # a file that is wrong twice is wrong in the store


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HeldFile:
    """A file that was checked; no cache removes it while this object lives."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)


@dataclass(frozen=True)
class _Content:
    """What a cache holds: its files with their bytes, least recently used first; bytes to come."""

    files: list[tuple[Path, int]]
    arriving_bytes: int


class FileCache:
    """Keeps up to `limit_bytes` of files, the least recently used leaving first; None: all.

    What is being read stays, even above the limit.
    """

    def __init__(self, folder: Path, *, limit_bytes: int | None) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._checked: set[tuple[object, ...]] = set()

    def open(
        self,
        store: Store,
        record: Mapping[str, Any],
        *,
        name: str,
        on_wait: Callable[[float], None] | None = None,
    ) -> HeldFile:
        """The file of a commit record, fetched when it is missing or damaged.

        `on_wait` is told for how many seconds another process has been at it. Raises UserError when
        the store's is another file than the record says, or the disk is full.
        """
        held = self._find(store, record, name, ahead=False, on_wait=on_wait)
        assert held is not None
        return held

    def fetch_ahead(self, store: Store, record: Mapping[str, Any], *, name: str) -> None:
        """Fetch a file that will be needed, if it fits beside what is being read."""
        self._find(store, record, name, ahead=True, on_wait=None)

    def _find(
        self,
        store: Store,
        record: Mapping[str, Any],
        name: str,
        *,
        ahead: bool,
        on_wait: Callable[[float], None] | None,
    ) -> HeldFile | None:
        if isinstance(store, LocalStore):
            path = Path(store.uri) / record["file"]
            if not path.exists() or not self._is_right(path, record):
                raise UserError(f"{path} is not what its record says: write it again")
            return HeldFile(path)
        path = self._folder / name / record["file"]
        with self._told(record):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(_beside(path, LOCK), on_wait):
                if held := self._hold(path, record):
                    return held
                for _ in range(ATTEMPTS):
                    if not self._make_room(path, record["bytes"], ahead=ahead):
                        return None
                    if held := self._fetch(store, record, path):
                        return held
        raise UserError(f"{store.uri}: {record['file']} is not what its record says")

    def _hold(self, path: Path, record: Mapping[str, Any]) -> HeldFile | None:
        """The file with its lock shared; None when it is not there, or damaged."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        held = HeldFile(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        removed = os.fstat(descriptor).st_nlink == 0  # between open and flock, to make room
        return None if removed or not self._is_right(path, record) else held

    def _is_right(self, path: Path, record: Mapping[str, Any]) -> bool:
        """Whether a file is its record's; an unchanged one is read for it only once."""
        facts = path.stat()
        identity = (facts.st_dev, facts.st_ino, facts.st_mtime_ns, record["sha256"])
        if identity not in self._checked:
            if facts.st_size != record["bytes"] or file_sha256(path) != record["sha256"]:
                return False
            self._checked.add(identity)
        return True

    def _fetch(self, store: Store, record: Mapping[str, Any], path: Path) -> HeldFile | None:
        """The file, fetched; None when it is not what its record says."""
        arrival = _beside(path, ARRIVAL)
        try:
            store.download(record["file"], arrival / path.name)
            if held := self._hold(arrival / path.name, record):
                held.path = held.path.replace(path)  # held before others can remove it
            return held
        finally:
            shutil.rmtree(arrival, ignore_errors=True)

    def _make_room(self, path: Path, size: int, *, ahead: bool) -> bool:
        """Take `size` bytes for a file, whose lock is held; False when it may come later."""
        with _locked(self._folder / LOCK, None):
            shutil.rmtree(_beside(path, ARRIVAL), ignore_errors=True)
            path.unlink(missing_ok=True)  # damaged
            content = self._content()
            needed = size + content.arriving_bytes + sum(bytes_ for _, bytes_ in content.files)
            for file, file_bytes in content.files:
                if self._fits(needed) and self._free_bytes() >= size:
                    break
                needed -= file_bytes if _evict(file) else 0
            if ahead and not self._fits(needed):
                return False
            if self._free_bytes() < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            arrival = _beside(path, ARRIVAL)
            arrival.mkdir()
            with (arrival / path.name).open("wb") as reserved:
                reserved.truncate(size)  # sparse: others count it, the disk does not
        return True

    def _content(self) -> _Content:
        """What is there and on its way; what killed processes left half-way is removed."""
        files, arriving_bytes = [], 0
        for lock in self._folder.glob(f"*/*{LOCK}"):
            path = lock.with_name(lock.name.removesuffix(LOCK))
            arrival = _beside(path, ARRIVAL)
            if arrival.exists():
                with contextlib.suppress(BlockingIOError), file_lock(lock):
                    shutil.rmtree(arrival, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                arriving_bytes += (arrival / path.name).stat().st_size
            with contextlib.suppress(FileNotFoundError):
                files.append((lock.stat().st_mtime_ns, path, path.stat().st_size))
        return _Content([(path, size) for _, path, size in sorted(files)], arriving_bytes)

    def _fits(self, size: int) -> bool:
        return self._limit_bytes is None or size <= self._limit_bytes

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    @contextlib.contextmanager
    def _told(self, record: Mapping[str, Any]) -> Iterator[None]:
        """Says what the disk refused, and the flags that help."""
        try:
            yield
        except (OSError, UserError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            if cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"--cache-dir {self._folder}: the disk is full, no room for {record['file']} "
                    f"({format_bytes(record['bytes'])}); make room, lower --cache-gb, or name "
                    "another --cache-dir"
                ) from error
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"--cache-dir {self._folder}: cannot write there ({error.strerror})"
            ) from error


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[float], None] | None) -> Iterator[None]:
    """Wait for a file's lock and hold it."""
    began = time.monotonic()
    path.touch()
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(file_lock(path))
                break
            except BlockingIOError:
                if on_wait is not None:
                    on_wait(time.monotonic() - began)
                time.sleep(POLL_S)
        yield


def _evict(path: Path) -> bool:
    """Remove a file unless somebody reads it; whether it is gone."""
    try:
        with file_lock(path):
            path.unlink()
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True
