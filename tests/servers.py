"""Two real S3 servers as processes: moto's, strict, and rclone's, which ignores conditions."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

KEY, SECRET = "test-key", "test-secret"
PAGE_KEYS = 200  # of moto's listings, instead of 1,000


@dataclass(frozen=True)
class S3Server:
    endpoint_url: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a child process that uses this server."""
        return {
            **os.environ,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def make_bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return f"s3://{name}"

    def objects(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """The objects under a prefix, by the rest of their keys."""
        client, found = self.client(), {}
        for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", []):
            body = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
            found[entry["Key"].removeprefix(prefix)] = body
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def serving(
    command: list[str],
    port: int,
    *,
    stop_signal: int = signal.SIGKILL,
    environment: dict[str, str] | None = None,
) -> Iterator[S3Server]:
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < deadline, command
            time.sleep(0.05)
        yield S3Server(f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(stop_signal)
        process.wait()


def moto_command(port: int) -> list[str]:
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def rclone_command(port: int, folder: Path) -> list[str]:
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
    return [
        program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}",
        "--vfs-cache-mode", "writes", str(folder),
    ]  # fmt: skip


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    port = free_port()
    environment = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE_KEYS)}
    with serving(moto_command(port), port, environment=environment) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    port = free_port()
    with serving(rclone_command(port, tmp_path_factory.mktemp("rclone")), port) as server:
        yield server
