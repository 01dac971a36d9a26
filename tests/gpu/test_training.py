"""The trainer on one GPU: bf16, compiled flex attention, NCCL; alone, sharded, served, killed.

All runs take the same steps from the same data as one undisturbed run, and must show its losses.
They are processes as from a shell; on a CPU they run in float32, with SDPA and gloo.
"""

import contextlib
import subprocess
import sys
import time

import pytest

from common.journal import read_metrics
from tests.gpu import ON_CUDA
from tests.soak import start
from tests.tiny_run import (
    ENVIRONMENT,
    ROOT,
    TRAINER,
    make_inputs,
    make_target,
    tokenize,
    training_command,
)

STEPS = 12
FLAGS = ("--max-steps", str(STEPS), "--save-every", "4")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
TOLERANCE = 2e-2  # of a loss: bf16 rounds, and the twelve updates build on each other


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    target = make_target(folder / "target")
    return tokenize(make_inputs(folder / "in"), folder / "data", target), target


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    return train(inputs, tmp_path_factory.mktemp("run") / "undisturbed")


def command(inputs, output, *flags, launcher=()):
    return [sys.executable, *launcher, TRAINER, *training_command(*inputs, output, *FLAGS, *flags)]


def train(inputs, output, *flags, launcher=()):
    """Run the trainer to its end; its run folder."""
    done = subprocess.run(
        command(inputs, output, *flags, launcher=launcher), env=ENVIRONMENT, capture_output=True,
        text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def losses(output):
    found = [entry["loss"] for entry in read_metrics(output) if "loss" in entry]
    assert len(found) == STEPS
    return found


def log_of(output):
    return (output / "train.log").read_text()


def assert_same_losses(output, undisturbed, record_property):
    pairs = list(zip(losses(output), losses(undisturbed), strict=True))
    difference = max(abs(one - other) / other for one, other in pairs)
    record_property("figure", f"losses off by {difference:.1e}" if difference else "equal losses")
    assert difference <= TOLERANCE


def test_a_run_learns_exports_and_compiles_once(undisturbed, record_property):
    found, log = losses(undisturbed), log_of(undisturbed)
    record_property("figure", f"loss {found[0]:.2f} to {found[-1]:.2f}")
    assert found[-1] < 0.8 * found[0]
    assert (undisturbed / "export/model.safetensors").exists()
    assert ("attention=flex device=cuda" if ON_CUDA else "attention=sdpa device=cpu") in log
    assert "compiled again" not in log


def test_fsdp2_under_torchrun(inputs, undisturbed, tmp_path, record_property):
    output = train(inputs, tmp_path / "run", launcher=TORCHRUN)
    assert_same_losses(output, undisturbed, record_property)


@contextlib.contextmanager
def server(target):
    """A hidden-state server on the same device; its address."""
    flags = ("--target", str(target), "--layers", "0,1,2", "--listen", "127.0.0.1:0")
    device = "cuda:0" if ON_CUDA else "cpu"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "extract_hidden_online.py"), *flags, "--devices", device],
        env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_served_over_loopback(inputs, undisturbed, tmp_path, record_property):
    with server(inputs[1]) as address:
        assert address.startswith("127.0.0.1:"), "the server did not start; see its stderr"
        output = train(inputs, tmp_path / "run", "--hidden-states", address)
    assert_same_losses(output, undisturbed, record_property)


def test_resume_after_kill_9(inputs, undisturbed, tmp_path, record_property):
    output, log = tmp_path / "run", tmp_path / "log.txt"
    process = start(command(inputs, output), log)
    try:
        while not (output / "checkpoints/latest").exists():
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.005)
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        process.kill()
        process.wait()
    train(inputs, output)
    assert "resumed=None" in log.read_text() and "step-0000" in log_of(output)
    assert_same_losses(output, undisturbed, record_property)


@pytest.mark.parametrize("flag", ["--compile", "--checkpoint-layers"])
def test_another_way_to_the_same_steps(inputs, undisturbed, tmp_path, flag, record_property):
    if flag == "--compile" and not ON_CUDA:
        pytest.skip("the trainer compiles on CUDA only")
    output = train(inputs, tmp_path / "run", flag)
    assert_same_losses(output, undisturbed, record_property)
    assert "compiled again" not in log_of(output)
