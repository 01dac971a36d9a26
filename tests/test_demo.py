"""The demo's parts, what its drafter learns and what it owes to hidden states, and pipeline.sh."""

import json
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_dflash_online
from common.chat import ChatTokenizer
from common.journal import read_metrics
from common.rows import Row, parse_line
from common.shards import is_held_out
from common.target import Taps
from common.wire import ColocatedHiddenStates
from demo import tokenizer as demo_tokenizer
from demo.completions import LAYOUTS, NUM_FILES, write_completions
from demo.run import EXTRACT_FLAGS, TOKENIZE_FLAGS, TRAIN_FLAGS, WORK
from demo.target import target_folder
from demo.tasks import make_task
from tests.servers import free_port
from tests.tiny_run import ENVIRONMENT, ROOT, make_inputs, make_target

LOG = logging.getLogger("test-demo")


@pytest.fixture(scope="module")
def target():
    """The demo's target; trained once, in about a minute, and kept as `make demo` keeps it."""
    torch.set_num_threads(1)
    return target_folder(WORK, LOG)


@pytest.fixture(scope="module")
def completions(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "completions"
    assert write_completions(target, folder, LOG) >= 300
    return folder


def test_unknown_characters_are_tokens_not_gaps(tmp_path):
    demo_tokenizer.build(tmp_path)
    chat = ChatTokenizer.load(str(tmp_path))
    assert chat.vocab_size <= demo_tokenizer.VOCAB_SIZE
    text = "<|im_start|>user\nab 12.<|im_end|>\n<think>\n</think>"
    assert chat.decode(chat.encode(text)) == text
    assert len(chat.encode("aéb")) == 3


def test_the_three_layouts_hold_the_same_row():
    task = make_task(random.Random(0))
    rows = []
    for layout in LAYOUTS:
        record = layout("x", task, "a thought", "an answer", "stop")
        (row,) = parse_line(json.dumps(record).encode(), fallback_id="y")
        assert isinstance(row, Row) and row.id == "x" and row.finished
        rows.append(row)
    assert {json.dumps(row.prompt) for row in rows} == {
        json.dumps([{"role": "user", "content": task.question}])
    }


def test_the_completions_are_files_as_people_have_them(completions):
    names = sorted(path.name for path in completions.iterdir())
    assert len(names) == NUM_FILES >= 12
    assert sum(name.endswith(".gz") for name in names) == 1


def test_shard_0_holds_a_held_out_row_and_a_training_row(completions, target, tmp_path):
    tokenize_demo(completions, tmp_path / "data", target, "--shards", "0:1")
    record = json.loads((tmp_path / "data/shard-00000.json").read_bytes())
    lines = (completions / "part-00.jsonl").read_text().splitlines()[: record["rows"]]
    ids = [json.loads(line)["custom_id"] for line in lines]
    assert 0 < sum(is_held_out(row_id, seed=0, fraction=0.1) for row_id in ids) < len(ids)


def tokenize_demo(completions, data, target, *flags):
    command = [
        *(sys.executable, str(ROOT / "tokenize_completions.py"), "--input", str(completions)),
        *("--output", str(data), "--tokenizer", str(target), *TOKENIZE_FLAGS.split(), *flags),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return data


class ZeroedHiddenStates(ColocatedHiddenStates):
    """A source that says nothing about the text: the control of the learning test."""

    def compute(self, documents, *, final):
        taps = super().compute(documents, final=final)
        return Taps(torch.zeros_like(taps.hidden), taps.final)


def last_walked_acceptance(output: Path) -> tuple[float, float]:
    """Walked acceptance on held-out rows at step 0 and at the end."""
    evaluations = [entry for entry in read_metrics(output) if "eval_loss" in entry]
    assert evaluations[0]["step"] == 0 and evaluations[-1]["eval_rows"] > 30
    return tuple(e["eval_walked_acceptance_length"] for e in (evaluations[0], evaluations[-1]))


def test_the_drafter_learns_and_owes_it_to_the_hidden_states(
    completions, target, tmp_path, monkeypatch
):
    data = tokenize_demo(completions, tmp_path / "data", target)
    command = ["--data", str(data), "--target", str(target), *TRAIN_FLAGS.split()]
    assert train_dflash_online.main([*command, "--output", str(tmp_path / "real")]) == 0
    monkeypatch.setattr(train_dflash_online, "ColocatedHiddenStates", ZeroedHiddenStates)
    assert train_dflash_online.main([*command, "--output", str(tmp_path / "zeroed")]) == 0
    before, after = last_walked_acceptance(tmp_path / "real")
    _, control = last_walked_acceptance(tmp_path / "zeroed")
    assert after >= 3 * before, (before, after)
    assert control < after / 2, (control, after)


# ---- pipeline.sh


@pytest.fixture
def chain(tmp_path):
    """The environment of a small pipeline of two trainers' data and a tiny random target."""
    target = make_target(tmp_path / "target")
    return {
        **ENVIRONMENT,
        "INPUT": str(make_inputs(tmp_path / "in")),
        "DATA": str(tmp_path / "data"),
        "TARGET": str(target),
        "RUN": str(tmp_path / "run"),
        "LISTEN": f"127.0.0.1:{free_port()}",
        "PYTHON": sys.executable,
        "TOKENIZE_FLAGS": "--num-shards 3 --max-length 256 --min-loss-tokens 4",
        "EXTRACT_FLAGS": EXTRACT_FLAGS,
        "TRAIN_FLAGS": TRAIN_FLAGS.replace("--max-steps 250", "--max-steps 4"),
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


def test_pipeline_colocated_on_two_ranks(chain):
    result = run_pipeline({**chain, "HIDDEN_STATES": "colocated", "TRAINERS": "2"})
    assert result.returncode == 0, result.stderr
    assert (Path(chain["RUN"]) / "export/model.safetensors").exists()
    assert "INFO extract" not in result.stderr


def test_pipeline_passes_the_exit_code_of_stage_1_on(chain):
    result = run_pipeline({**chain, "INPUT": chain["INPUT"] + "/nothing"})
    assert result.returncode == 1 and "no .jsonl" in result.stderr
    result = run_pipeline({**chain, "TOKENIZE_FLAGS": "--workers none"})
    assert result.returncode == 2


def test_pipeline_passes_a_failed_trainers_code_on(chain):
    result = run_pipeline({**chain, "TRAIN_FLAGS": chain["TRAIN_FLAGS"] + " --layers 0,1"})
    assert result.returncode == 1 and "its layers is" in result.stderr


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
