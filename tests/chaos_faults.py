"""What `make chaos` does to a run, and how it looks for what a run leaves behind."""

import collections
import contextlib
import datetime
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import botocore.exceptions

from common.cache import file_sha256
from tests.faulty_s3 import KINDS, requests_of
from tests.servers import S3Server

DISK_BYTES = 32_000_000
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")  # mounts that end with a process
LEFTOVER = re.compile(r"\.tmp|\.part|\.fetch$|\.removed$|\.replaced$|write-check")
ENDING_S = 10.0  # within which orphaned workers see that they are
JUMP_S = 1800.0


class SmallDisk:
    """A file system of its own in memory; a plain folder where nothing can be mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
        self.is_mounted = subprocess.run(mount, capture_output=True).returncode == 0

    def fill(self) -> None:
        """Leave no byte free."""
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1_000_000)):
                pass

    def make_room(self) -> None:
        self._ballast.unlink()

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def can_mount() -> bool:
    """Whether a process may have mounts of its own here."""
    found = shutil.which(NAMESPACE[0])
    mount = ["mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(found) and subprocess.run([*NAMESPACE, *mount], capture_output=True).returncode == 0


def damage_cached_shard(cache: Path, chance: random.Random) -> Path:
    """Overwrite bytes in the middle of one, not of one that is being fetched; its path."""
    found = (path for path in cache.rglob("shard-*.arrow") if path.parent.suffix != ".fetch")
    path = chance.choice(sorted(found))
    with path.open("rb+") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damaged by chance")
    return path


def is_mended(damaged: Path, healthy: Path) -> bool:
    """Whether a cached shard is again the one that another run cached."""
    return file_sha256(damaged) == file_sha256(next(healthy.rglob(damaged.name)))


def s3_faults(logs: Mapping[str, Path]) -> list[tuple[str, str]]:
    """Rows on how often each proxy did what.

    Raises AssertionError when a proxy did nothing, or a kind was met at none of them.
    """
    rows, met = [], set()
    for name, log in logs.items():
        counts = collections.Counter(request["fault"] for request in requests_of(log))
        total = counts.total()
        del counts[""]
        assert counts, f"{name}: no fault in {total} requests"
        met |= counts.keys()
        kinds = ", ".join(f"{kind} {counts[kind]}" for kind in KINDS)
        rows.append((f"S3 faults, {name}", f"{counts.total()} of {total} requests: {kinds}"))
    assert met >= set(KINDS), f"{', '.join(set(KINDS) - met)} never met"
    return rows


def jumps(log: str) -> int:
    """How often the clock of a log's lines jumped, by half an hour or more."""
    stamps = re.findall(r"^(\d{4}-\S+Z) ", log, re.MULTILINE)
    times = [datetime.datetime.fromisoformat(stamp).timestamp() for stamp in stamps]
    return sum(
        abs(after - before) > JUMP_S for before, after in zip(times, times[1:], strict=False)
    )


# ---- afterwards


def processes_with(name: str, value: str) -> Iterator[str]:
    """The command lines of the processes in whose environment a variable has this value."""
    wanted = f"{name}={value}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) != os.getpid() and wanted in (path / "environ").read_bytes().split(
                b"\0"
            ):
                yield (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def wait_for_end_of_all(name: str, value: str) -> None:
    """Raises AssertionError when processes of that environment go on."""
    deadline = time.monotonic() + ENDING_S
    while left := list(processes_with(name, value)):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def leftovers(*folders: Path) -> list[Path]:
    """Files and folders whose names say that they were to go."""
    found = (path for folder in folders for path in folder.rglob("*"))
    return [path for path in found if LEFTOVER.search(path.name)]


def open_uploads(server: S3Server, bucket: str) -> list[str]:
    """The keys of a bucket's multipart uploads under way."""
    try:
        answer = server.client().list_multipart_uploads(Bucket=bucket)
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchUpload":  # rclone's word for: never had any
            raise
        return []
    return [upload["Key"] for upload in answer.get("Uploads", [])]
