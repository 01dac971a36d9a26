"""pipeline.sh as a person runs it: it serves, trains, passes exit codes on and leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.run import EXTRACT_FLAGS, TRAIN_FLAGS
from tests.servers import free_port
from tests.tiny_run import ENVIRONMENT, ROOT


@pytest.fixture
def chain(tiny, tmp_path):
    """The environment of a small pipeline of two trainers' data and a tiny random target."""
    return {
        **ENVIRONMENT,
        "INPUT": str(tiny.inputs),
        "DATA": str(tmp_path / "data"),
        "TARGET": str(tiny.target),
        "RUN": str(tmp_path / "run"),
        "LISTEN": f"127.0.0.1:{free_port()}",
        "PYTHON": sys.executable,
        "TOKENIZE_FLAGS": "--num-shards 3 --max-length 256 --min-loss-tokens 4",
        "EXTRACT_FLAGS": EXTRACT_FLAGS,
        "TRAIN_FLAGS": TRAIN_FLAGS.replace("--max-steps 250", "--max-steps 4 --force"),
    }


def run_pipeline(environment):
    result = subprocess.run(
        ["bash", str(ROOT / "pipeline.sh")],
        env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert processes_of(environment["RUN"]) == [], "the trap left a process behind"
    return result


def processes_of(text: str) -> list[str]:
    """Command lines that mention `text`, a folder of this test's own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command and int(path.parent.name) != os.getpid():
            found.append(command)
    return found


def test_pipeline_serves_trains_and_ends_with_0(chain):
    result = run_pipeline(chain)
    assert result.returncode == 0, result.stderr
    assert (Path(chain["RUN"]) / "export/model.safetensors").exists()
    assert chain["LISTEN"] in result.stdout


@pytest.mark.slow
def test_colocated_on_two_ranks_survives_a_dropped_connection(chain):
    process = subprocess.Popen(
        ["bash", str(ROOT / "pipeline.sh")],
        env={**chain, "HIDDEN_STATES": "colocated", "TRAINERS": "2"},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    seen = []
    for line in process.stderr:
        seen.append(line)
        if " step=1/" in line:
            os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(timeout=60) == 0, "".join(seen)
    assert (Path(chain["RUN"]) / "export/model.safetensors").exists()
    assert not any("INFO extract" in line for line in seen)
    assert processes_of(chain["RUN"]) == []


@pytest.mark.slow
def test_pipeline_passes_the_exit_code_of_stage_1_on(chain):
    result = run_pipeline({**chain, "INPUT": chain["INPUT"] + "/nothing"})
    assert result.returncode == 1 and "cannot read it" in result.stderr
    result = run_pipeline({**chain, "TOKENIZE_FLAGS": "--tokenize-workers none"})
    assert result.returncode == 2


@pytest.mark.slow
def test_pipeline_passes_a_failed_trainers_code_on(chain):
    result = run_pipeline({**chain, "TRAIN_FLAGS": chain["TRAIN_FLAGS"] + " --layers 0,1"})
    assert result.returncode == 1 and "its layers is" in result.stderr


@pytest.mark.slow
def test_a_failed_trainer_does_not_wait_for_the_tokenizer(chain, tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in tokenize*) exec sleep 9999;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    flags = chain["TRAIN_FLAGS"].replace("--layers 0,1,2", "--layers 0,1,99")
    result = run_pipeline(
        {**chain, "PYTHON": str(python), "HIDDEN_STATES": "colocated", "TRAIN_FLAGS": flags}
    )
    assert result.returncode == 1 and "--layers" in result.stderr


def test_pipeline_takes_no_arguments_and_says_what_it_takes_instead():
    result = subprocess.run(
        ["bash", str(ROOT / "pipeline.sh"), "--help"], capture_output=True, text=True
    )
    assert result.returncode == 2 and "HIDDEN_STATES=" in result.stderr


def test_a_stopped_pipeline_stops_its_parts(chain):
    environment = {
        **chain,
        "TRAIN_FLAGS": TRAIN_FLAGS.replace("--max-steps 250", "--max-steps 9999"),
    }
    process = subprocess.Popen(
        ["bash", str(ROOT / "pipeline.sh")], env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if " step=1/" in line:
            process.terminate()
            break
    process.stderr.read()
    assert process.wait(timeout=60) == 143
    deadline = time.monotonic() + 20
    while processes_of(chain["RUN"]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(chain["RUN"]) == []
    assert list((Path(chain["RUN"]) / "checkpoints").glob("step-*")), "the step was not saved"
