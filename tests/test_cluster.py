"""Shards as Ray tasks, on a real Ray of this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.servers import free_port, serving
from tests.test_tokenize_faults import make_line
from tests.test_tokenize_script import FLAGS, SCRIPT, contents, run_script, tokenize
from tests.tiny_tokenizer import build_tiny_tokenizer

pytest.importorskip("ray", reason="Ray is optional; tests/requirements.txt has it")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(build_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def cluster():
    """A Ray head of its own with two CPUs; the environment in which ray.init() finds it."""
    port, ray = free_port(), str(Path(sys.executable).parent / "ray")
    command = [
        ray, "start", "--head", "--port", str(port), "--node-ip-address", "127.0.0.1",
        "--num-cpus", "2", "--disable-usage-stats", "--include-dashboard", "false", "--block",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # socket paths are short
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_ADDRESS": "auto"}
        with serving(command, port, stop_signal=signal.SIGTERM, environment=environment):
            join = [sys.executable, "-c", "import ray; ray.init(log_to_driver=False)"]
            while subprocess.run(join, env=environment, stderr=subprocess.DEVNULL).returncode:
                time.sleep(0.5)
            yield environment


def tasks_at_work():
    """Processes that are making a shard."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::make_shard"):
                yield int(folder.name)


def test_a_cluster_makes_the_same_bytes_though_a_task_is_killed(cluster, tokenizer, tmp_path):
    source, requests = tmp_path / "in", tmp_path / "requests"
    for folder in (source, requests):
        folder.mkdir()
    for number in range(4):
        rows = (make_line(3000 * number + row, "word " * 150) for row in range(3000))
        (source / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    (requests / "a.jsonl").write_text("{}\n")
    flags = ("--num-shards", "5", "--prompts", requests, "--encoder", "tokenizers")
    command = [
        *SCRIPT, "--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer,
        *FLAGS, *flags, "--executor", "ray",
    ]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), env=cluster, stderr=subprocess.PIPE)
    killed = None
    while killed is None and process.poll() is None:
        killed = next(tasks_at_work(), None)
        time.sleep(0.05)
    assert killed is not None, process.stderr.read()
    os.kill(killed, signal.SIGKILL)
    said = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 0, said
    assert "shards=5/5" in said and "bottleneck=cluster" in said
    tokenize(source, tmp_path / "calm", tokenizer, *flags)
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")


def test_what_a_task_refuses_is_one_line(cluster, tokenizer, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text(make_line(1) + "\n")
    (source / "b.jsonl").write_bytes(b"\x1f\x8bnot really gzip")
    result = run_script(
        "--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer, *FLAGS,
        "--executor", "ray", environment=cluster,
    )  # fmt: skip
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "b.jsonl: cut or damaged gzip file" in result.stderr.strip().splitlines()[-1]


def test_without_ray_it_says_what_to_install(tokenizer, tmp_path):
    blocked = tmp_path / "blocked" / "ray"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('not on this machine')\n")
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text(make_line(1) + "\n")
    result = run_script(
        "--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer,
        "--executor", "ray", environment={**os.environ, "PYTHONPATH": str(blocked.parent)},
    )  # fmt: skip
    assert result.returncode == 1 and "pip install ray" in result.stderr.splitlines()[-1]


def test_an_unreachable_cluster_is_one_line(tokenizer, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text(make_line(1) + "\n")
    address = {"RAY_ADDRESS": f"127.0.0.1:{free_port()}"}
    result = run_script(
        "--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer,
        "--executor", "ray", environment={**os.environ, **address},
    )  # fmt: skip
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "RAY_ADDRESS" in result.stderr.splitlines()[-1]
