"""s3://bucket/prefix and local folders behind one small interface.

Keys are relative to the store's root, opaque, and sorted by code point. Writes are atomic for
readers: a local file appears by rename, an S3 object by one put or a completed multipart upload.
Checksums are sent only when an operation requires them, so that R2, MinIO, Ceph and the like work.
Body reads are outside botocore's retries, so they are retried here, by range.
"""

import argparse
import contextlib
import glob
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import boto3
import boto3.exceptions
import botocore.exceptions
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from common.run import UserError

READ_ATTEMPTS = 5
PART_BYTES = 16_000_000
PROBE_KEY = ".write-check"
TEMPORARY = ".tmp-"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Entry:
    """One object: its key, size in bytes, and etag (locally the mtime in nanoseconds)."""

    key: str
    size: int
    etag: str


class ObjectMissing(UserError):
    """There is no object of that key."""


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


def add_store_arguments(group: argparse._ArgumentGroup) -> None:
    """The flag that all scripts share for S3."""
    group.add_argument("--endpoint-url", help="S3 endpoint, for R2, MinIO, Ceph [AWS's]")


def open_store(uri: str, *, endpoint_url: str | None = None, max_connections: int = 32) -> Store:
    """A store for s3://bucket/prefix or a local path; nothing is contacted yet."""
    if uri.startswith("s3://"):
        return S3Store(uri, endpoint_url=endpoint_url, max_connections=max_connections)
    if "://" in uri:
        raise UserError(f"{uri}: must be s3://bucket/prefix or a local path")
    return LocalStore(uri)


class LocalStore:
    """A folder."""

    def __init__(self, uri: str) -> None:
        self.uri, self._root = uri, Path(uri)

    def list(self, prefix: str = "") -> list[Entry]:
        if self._root.is_file():
            raise UserError(f"{self.uri}: is a file; give the folder that holds it")
        entries = []
        for folder, _, names in os.walk(self._root, onerror=_unreadable):
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
                    raise UserError(_changed(self.uri, key))
                file.seek(start)
                return file.read() if end is None else file.read(end - start)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{self._root / key}: no such file") from error
        except OSError as error:
            raise UserError(f"{self._root / key}: {error.strerror}") from error

    def write(self, key: str, data: bytes) -> None:
        with self._replacing(self._root / key) as temporary:
            temporary.write_bytes(data)

    def upload(self, key: str, path: Path) -> None:
        with self._replacing(self._root / key) as temporary:
            shutil.copyfile(path, temporary)

    def download(self, key: str, path: Path) -> None:
        try:
            with self._replacing(path) as temporary:
                shutil.copyfile(self._root / key, temporary)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{self._root / key}: no such file") from error

    def delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)

    def check_writable(self) -> None:
        self.write(PROBE_KEY, b"")
        self.delete(PROBE_KEY)

    @contextlib.contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
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
            raise UserError(f"{path}: cannot write it ({error.strerror})") from error
        finally:
            temporary.unlink(missing_ok=True)


class S3Store:
    """A bucket, or a prefix in one; the client is made once a process, after any fork."""

    def __init__(self, uri: str, *, endpoint_url: str | None, max_connections: int) -> None:
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise UserError(f"{uri}: must be s3://bucket/prefix")
        self.uri, self._bucket = uri, bucket
        self._prefix = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        self._endpoint_url, self._max_connections = endpoint_url, max_connections
        self._lock, self._client_pid, self._made = threading.Lock(), -1, None

    @property
    def _client(self) -> Any:
        with self._lock:
            if self._client_pid != os.getpid():
                config = Config(
                    retries={"mode": "adaptive", "max_attempts": 8},
                    max_pool_connections=self._max_connections,
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    connect_timeout=10,
                    read_timeout=60,
                )
                session = boto3.session.Session()
                try:
                    self._made = session.client(
                        "s3",
                        endpoint_url=self._endpoint_url,
                        region_name=session.region_name or "us-east-1",
                        config=config,
                    )
                except ValueError as error:
                    raise UserError(
                        f"{self.uri}: {error}; --endpoint-url (or AWS_ENDPOINT_URL) must be such "
                        "as http://host:port"
                    ) from error
                self._client_pid = os.getpid()
            return self._made

    def list(self, prefix: str = "") -> list[Entry]:
        def list_all() -> list[Entry]:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return [
                Entry(found["Key"][len(self._prefix) :], found["Size"], found["ETag"].strip('"'))
                for page in pages
                for found in page.get("Contents", [])
            ]

        return sorted(self._call(list_all), key=lambda entry: entry.key)

    def read(
        self, key: str, start: int = 0, end: int | None = None, *, etag: str | None = None
    ) -> bytes:
        if end is not None and end <= start:
            return b""
        data = bytearray()
        for attempt in range(READ_ATTEMPTS):
            try:
                self._read_into(data, key, start, end, etag)
                return bytes(data)
            except _CutBody:
                time.sleep(min(8.0, 0.2 * 2**attempt))
        raise UserError(
            f"{self.uri}: {key}: the connection broke {READ_ATTEMPTS} times while reading; check "
            "the network and rerun"
        )

    def _read_into(
        self, data: bytearray, key: str, start: int, end: int | None, etag: str | None
    ) -> None:
        """Append what is missing of [start, end) to `data`; _CutBody when the body breaks off."""
        options: dict[str, Any] = {"Bucket": self._bucket, "Key": self._prefix + key}
        first = start + len(data)
        if first or end is not None:
            options["Range"] = f"bytes={first}-{'' if end is None else end - 1}"
        answer = self._call(lambda: self._client.get_object(**options), key)
        if etag is not None and answer["ETag"].strip('"') != etag:
            raise UserError(_changed(self.uri, key))
        expected = len(data) + answer["ContentLength"]
        try:
            for chunk in answer["Body"].iter_chunks(1_000_000):
                data += chunk
        except (botocore.exceptions.BotoCoreError, OSError) as error:
            raise _CutBody from error
        if len(data) < expected:
            raise _CutBody

    def write(self, key: str, data: bytes) -> None:
        options = {"Bucket": self._bucket, "Key": self._prefix + key, "Body": data}
        self._call(lambda: self._client.put_object(**options), key)

    def upload(self, key: str, path: Path) -> None:
        transfer = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4
        )
        self._call(
            lambda: self._client.upload_file(
                str(path), self._bucket, self._prefix + key, Config=transfer
            ),
            key,
        )

    def download(self, key: str, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._call(
                lambda: self._client.download_file(self._bucket, self._prefix + key, str(path)), key
            )
        except OSError as error:
            raise UserError(f"{path}: cannot write it ({error.strerror})") from error

    def delete(self, key: str) -> None:
        self._call(
            lambda: self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key), key
        )

    def check_writable(self) -> None:
        self.write(PROBE_KEY, b"")
        with contextlib.suppress(UserError):  # write-only credentials may not delete
            self.delete(PROBE_KEY)

    def _call(self, call: Callable[[], Result], key: str = "") -> Result:
        """Run one S3 call; its failures become one line with a cure."""
        try:
            return call()
        except botocore.exceptions.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            raise self._failure(code, str(error), key) from error
        except boto3.exceptions.S3UploadFailedError as error:
            raise self._failure("", str(error), key) from error
        except botocore.exceptions.NoCredentialsError as error:
            raise UserError(
                f"{self.uri}: no credentials found; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or a profile"
            ) from error
        except (
            botocore.exceptions.EndpointConnectionError,
            botocore.exceptions.ConnectTimeoutError,
        ) as error:
            raise UserError(
                f"{self.uri}: no answer from {self._client.meta.endpoint_url}; check the network "
                "and --endpoint-url"
            ) from error
        except botocore.exceptions.BotoCoreError as error:
            raise UserError(f"{self.uri}: {error}") from error

    def _failure(self, code: str, text: str, key: str) -> UserError:
        endpoint = self._client.meta.endpoint_url
        where = f"s3://{self._bucket}/{self._prefix}{key}"
        if code == "NoSuchBucket":
            return UserError(f"{self.uri}: no such bucket at {endpoint}; check the name")
        if code in ("NoSuchKey", "404"):
            return ObjectMissing(f"{where}: no such object at {endpoint}")
        if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"):
            return UserError(
                f"{self.uri}: {endpoint} does not take the credentials ({code}); check "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or refresh them"
            )
        if code in ("AccessDenied", "403"):
            return UserError(
                f"{where}: access denied by {endpoint}; the credentials lack this permission "
                "(or the bucket wants a KMS key)"
            )
        return UserError(f"{where}: {text} (endpoint {endpoint})")


class _CutBody(Exception):
    """A body ended before its announced length."""


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


def _changed(uri: str, key: str) -> str:
    return f"{uri}: {key} changed since the plan was made; rerun with --overwrite"
