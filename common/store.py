"""s3://bucket/prefix and local folders behind one small interface.

Keys are relative to the store's root, opaque, and sorted by code point. Writes are atomic for
readers: a local file appears by rename, an S3 object by one put or a completed multipart upload.
Reads have the length that the store tells, or fail. What is S3's own lies in common/s3.py.
"""

import argparse
import contextlib
import errno
import glob
import os
import platform
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from boto3.s3.transfer import TransferConfig

from common.run import UsageError, UserError
from common.s3 import Bucket, CutAnswer, ObjectMissing, changed
from common.s3_reads import read_range

PART_BYTES = 16_000_000
PROBE_KEY = ".write-check"
TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Entry:
    """One object: its key, size in bytes, and etag (locally the mtime in nanoseconds)."""

    key: str
    size: int
    etag: str


class Store(Protocol):
    """Where objects lie. Every method raises UserError with cause and cure in a line or two."""

    uri: str

    def list(self, prefix: str = "") -> list[Entry]:
        """All objects under a prefix, sorted by key; temporary files are left out."""

    def read(
        self, key: str, start: int = 0, end: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """Bytes [start, end) of an object. Raises ObjectMissing, or UserError on another etag."""

    def write(self, key: str, data: bytes) -> None:
        """Put an object, whole or not at all."""

    def upload(self, key: str, path: Path) -> None:
        """Put a file as an object, whole or not at all."""

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a file, which appears when it is whole. Raises ObjectMissing."""

    def delete(self, key: str) -> None:
        """Remove an object; no error when it is not there."""

    def check_writable(self) -> None:
        """Put a small object and remove it again."""


def read_if_there(store: Store, key: str) -> bytes | None:
    """The bytes of an object; None when there is none."""
    try:
        return store.read(key)
    except ObjectMissing:
        return None


def add_store_arguments(group: argparse._ArgumentGroup) -> None:
    """The flag that all scripts share for S3."""
    group.add_argument("--endpoint-url", help="S3 endpoint, for R2, MinIO, Ceph [AWS's]")


def add_store_write_arguments(group: argparse._ArgumentGroup) -> None:
    """The flags of scripts that write to S3, next to those of add_store_arguments."""
    group.add_argument(
        "--sse", choices=("AES256", "aws:kms"), help="server-side encryption [the bucket's own]"
    )
    group.add_argument("--sse-kms-key", help="KMS key id or ARN, with --sse aws:kms [AWS's]")


def open_store(
    uri: str,
    *,
    endpoint_url: str | None = None,
    max_connections: int = 32,
    sse: str | None = None,
    sse_kms_key: str | None = None,
    upload_journal: Path | None = None,
) -> Store:
    """A store for s3://bucket/prefix or a local path; nothing is contacted yet.

    `upload_journal` is a local file that notes multipart uploads, for `abort_left_uploads`.
    """
    if sse_kms_key and sse != "aws:kms":
        raise UsageError("--sse-kms-key: needs --sse aws:kms")
    if uri.startswith("s3://"):
        bucket = Bucket(
            uri,
            endpoint_url=endpoint_url,
            max_connections=max_connections,
            upload_journal=upload_journal,
        )
        options = {"ServerSideEncryption": sse, "SSEKMSKeyId": sse_kms_key}
        return S3Store(bucket, encryption={name: text for name, text in options.items() if text})
    if "://" in uri or re.match(r"[^/]{2,}:/", uri):  # s3:/bucket is a slash short
        raise UsageError(f"{uri}: must be s3://bucket/prefix or a local path")
    if sse:
        raise UsageError(f"--sse {sse}: only for s3://, and {uri} is a local path")
    return LocalStore(uri)


class LocalStore:
    """A folder."""

    def __init__(self, uri: str) -> None:
        self.uri, self._root = uri, Path(uri)

    def list(self, prefix: str = "") -> list[Entry]:
        if self._root.is_file():
            raise UserError(f"{self.uri}: is a file; give the folder that holds it")
        entries, seen = [], set[str]()
        for folder, below, names in os.walk(self._root, onerror=_unreadable, followlinks=True):
            if (real := os.path.realpath(folder)) in seen:  # a link to where we have been
                below.clear()
                continue
            seen.add(real)
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self._root).as_posix()
                if name.startswith(TEMPORARY) or not key.startswith(prefix):
                    continue
                try:
                    key.encode()
                    facts = path.stat()
                except UnicodeEncodeError as error:
                    raise UserError(f"{key!r}: a file name must be UTF-8; rename it") from error
                except OSError as error:
                    _unreadable(error)
                entries.append(Entry(key, facts.st_size, str(facts.st_mtime_ns)))
        return sorted(entries, key=lambda entry: entry.key)

    def read(
        self, key: str, start: int = 0, end: int | None = None, *, etag: str | None = None
    ) -> bytes:
        try:
            with (self._root / key).open("rb") as file:
                if etag is not None and str(os.fstat(file.fileno()).st_mtime_ns) != etag:
                    raise UserError(changed(self.uri, key))
                file.seek(start)
                return file.read() if end is None else file.read(end - start)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{self._root / key}: no such file") from error
        except OSError as error:
            raise UserError(f"{self._root / key}: {error.strerror}") from error

    def write(self, key: str, data: bytes) -> None:
        with replacing(self._root / key) as temporary:
            temporary.write_bytes(data)

    def upload(self, key: str, path: Path) -> None:
        with replacing(self._root / key) as temporary:
            shutil.copyfile(path, temporary)

    def download(self, key: str, path: Path) -> None:
        try:
            with replacing(path) as temporary:
                shutil.copyfile(self._root / key, temporary)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{self._root / key}: no such file") from error

    def delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)

    def check_writable(self) -> None:
        self.write(PROBE_KEY, b"")
        self.delete(PROBE_KEY)


class S3Store:
    """A bucket, or a prefix in one."""

    def __init__(self, bucket: Bucket, *, encryption: dict[str, str]) -> None:
        self.uri, self._bucket, self._encryption = bucket.uri, bucket, encryption

    def list(self, prefix: str = "") -> list[Entry]:
        entries: list[Entry] = []
        start = len(self._bucket.prefix)
        token: str | None = ""
        while token is not None:
            page = self._page(prefix, token)
            entries += [
                Entry(found["Key"][start:], found["Size"], found["ETag"].strip('"'))
                for found in page.get("Contents", [])
            ]
            token = page["NextContinuationToken"] if page["IsTruncated"] else None
        return sorted(entries, key=lambda entry: entry.key)

    def _page(self, prefix: str, token: str) -> dict[str, Any]:
        options = {"Bucket": self._bucket.name, "Prefix": self._bucket.prefix + prefix}
        options |= {"ContinuationToken": token} if token else {}

        def page(client: Any) -> dict[str, Any]:
            answer = client.list_objects_v2(**options)
            # A body cut to nothing would read as a listing without keys.
            if answer.get("IsTruncated") is None or (
                answer["IsTruncated"] and answer.get("NextContinuationToken", token) == token
            ):
                raise CutAnswer
            return answer

        return self._bucket.call(page)

    def read(
        self, key: str, start: int = 0, end: int | None = None, *, etag: str | None = None
    ) -> bytes:
        if end is not None and end <= start:
            return b""
        return read_range(self._bucket, key, start, end, etag=etag).data

    def write(self, key: str, data: bytes) -> None:
        options = {**self._bucket.at(key), "Body": data, **self._encryption}
        self._bucket.call(lambda client: client.put_object(**options), key)

    def upload(self, key: str, path: Path) -> None:
        transfer = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4
        )
        place = self._bucket.at(key)
        self._bucket.call(
            lambda client: client.upload_file(
                str(path), place["Bucket"], place["Key"], self._encryption, Config=transfer
            ),
            key,
        )
        # With expired credentials the first try could not abort its own upload.
        self._bucket.abort_own_uploads(key)

    def download(self, key: str, path: Path) -> None:
        # Not download_file: it takes a cut body without a length for a whole one (s3transfer 0.19).
        first = read_range(self._bucket, key, 0, PART_BYTES)
        with replacing(path) as temporary:
            temporary.write_bytes(first.data)

            def copy_from(start: int) -> None:
                end = min(start + PART_BYTES, first.size)
                part = read_range(self._bucket, key, start, end, etag=first.etag)
                with temporary.open("rb+") as file:
                    file.seek(start)
                    file.write(part.data)

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(copy_from, range(PART_BYTES, first.size, PART_BYTES)))

    def delete(self, key: str) -> None:
        self._bucket.call(lambda client: client.delete_object(**self._bucket.at(key)), key)

    def check_writable(self) -> None:
        self.write(PROBE_KEY, b"")
        with contextlib.suppress(UserError):  # write-only credentials may not delete
            self.delete(PROBE_KEY)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place at the end, whole."""
    # Named after machine and process, so that a rerun removes what a killed run left there and
    # runs side by side keep out of each other's way.
    stem = f"{TEMPORARY}{platform.node()}-"
    temporary = path.with_name(f"{stem}{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(stem)}*-{glob.escape(path.name)}"):
            if not _is_running(left.name[len(stem) :].partition("-")[0]):
                left.unlink(missing_ok=True)
        temporary.touch()
    except OSError as error:
        raise UserError(f"{path.parent}: cannot write there ({error.strerror})") from error
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        cure = "; make room and run it again" if error.errno == errno.ENOSPC else ""
        raise UserError(f"{path}: cannot write it ({error.strerror}){cure}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _unreadable(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot read it ({error.strerror})") from error


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
