"""The demo's parts, what its drafter learns, and what it owes to the hidden states."""

import json
import logging
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_dflash_online
from common import setup
from common.chat import ChatTokenizer
from common.journal import read_metrics
from common.rows import Row, parse_line
from common.shards import is_held_out
from common.target import Taps
from common.wire import ColocatedHiddenStates
from demo import tokenizer as demo_tokenizer
from demo.completions import LAYOUTS, NUM_FILES, write_completions
from demo.run import TOKENIZE_FLAGS, TRAIN_FLAGS, WORK
from demo.target import target_folder
from demo.tasks import make_task
from tests.tiny_run import ROOT

LOG = logging.getLogger("test-demo")
FEWER_STEPS = ("--max-steps", "200", "--eval-every", "1000")  # tell a control from a drafter too


@pytest.fixture(scope="module")
def target():
    """The demo's target; trained once, in about a minute, and kept where `make demo` keeps it."""
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


class NoiseForHiddenStates(ColocatedHiddenStates):
    """A source that says nothing about the text: the control of the learning test.

    Zeros would be refused before they are learnt from.
    """

    def compute(self, documents, *, final):
        width = len(self.description.layers) * self.description.hidden_size
        generator = torch.Generator().manual_seed(int(documents[0].sum()))
        noise = torch.randn(sum(map(len, documents)), width, generator=generator)
        return Taps(noise.to(torch.bfloat16), None)


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
    command += FEWER_STEPS
    assert train_dflash_online.main([*command, "--output", str(tmp_path / "real")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(setup, "ColocatedHiddenStates", NoiseForHiddenStates)
        noise = [*command, "--output", str(tmp_path / "noise"), "--force"]
        assert train_dflash_online.main(noise) == 0
    before, after = last_walked_acceptance(tmp_path / "real")
    _, control = last_walked_acceptance(tmp_path / "noise")
    assert after >= 3 * before, (before, after)
    assert control < after / 2, (control, after)
    last = [entry for entry in read_metrics(tmp_path / "real") if "eval_loss" in entry][-1]
    flags = ("--output", str(tmp_path / "real"), "--eval-only", "--decode", "6")
    assert train_dflash_online.main([*command[:4], *flags]) == 0
    real = json.loads((tmp_path / "real/report.json").read_bytes())["real"]
    assert real["rows"] == real["same_text"] == real["own_text"] == 6, real
    assert real["greedy"]["tokens_per_step"] == real["walked"] > 2, real
    for name in ("zeroed", "shifted"):  # far from the share at which an export is refused
        kept = last[f"eval_{name}_acceptance_length"] - 1
        assert kept < 0.3 * (last["eval_acceptance_length"] - 1), (name, last)
