"""Odd inputs of evaluation and export: names, rows without a prompt, configs with one thing off."""

import json
import xml.dom.minidom

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import train_dflash_online
from common import dist
from common.batches import HeldOut, PackedRows
from common.drafting import TargetEnds
from common.evaluation_plots import groups_plot
from common.real_decoding import rows_to_decode
from common.run import UserError
from common.setup import load_weights
from common.verdict import Control, Drafts, Evaluation
from common.verify import read_drafter, verify
from tests.forked import run_to_end
from tests.test_evaluate import HIDDEN, TableStates, make_drafter
from tests.test_evaluate import run as run_evaluation
from tests.test_export import WORDS, findings, write
from tests.tiny_models import tiny_target
from tests.tiny_run import ENVIRONMENT, make_target, tokenize, train

# ---- the report


@pytest.mark.parametrize("label", ["$\\foo$", "$5 to $10", "a\x1b[0m", "a\nb", "<b> & --> $"])
def test_any_name_of_a_source_can_stand_in_a_plot(label):
    group = {"label": label, "acceptance_length": 2.0}
    svg = groups_plot([group], title="By source", mean=1.5)
    xml.dom.minidom.parseString(svg)
    if label == "$5 to $10":
        assert b"Oblique" not in svg, "as it stands, not as a formula"


def evaluation(*, everywhere: float, real: float, control: float) -> Evaluation:
    nothing = torch.zeros(0, dtype=torch.int64)
    controls = tuple(Control(name, 9, real, control) for name in ("zeroed", "shifted"))
    return Evaluation(
        1.0, everywhere, everywhere, None, (), (), None, controls,
        Drafts(nothing, nothing, nothing, None),
    )  # fmt: skip


def test_controls_of_too_weak_anchors_say_nothing_whatever_the_others_accept():
    weak = evaluation(everywhere=1.21, real=1.19, control=1.19)
    assert weak.is_weak and weak.context == "unknown" and "1.19 tokens" in weak.verdict
    strong = evaluation(everywhere=1.19, real=1.21, control=1.0)
    assert not strong.is_weak and strong.context == "used"


def test_a_histogram_counts_every_length():
    places = torch.arange(4)
    lengths = torch.tensor([1, 3, 3, 1])
    drafts = Drafts(torch.zeros(4, dtype=torch.int64), places, lengths, None)
    assert drafts.histogram(block_size=4) == [2, 0, 2, 0]


# ---- rows without a prompt


def held_out(*masks: str) -> HeldOut:
    lists = tuple(np.arange(len(mask), dtype=np.int32) for mask in masks)
    mask = np.array([letter == "1" for letter in "".join(masks)])
    places = np.concatenate(lists).astype(np.int64)
    documents = np.repeat(np.arange(len(masks), dtype=np.int32), [len(each) for each in masks])
    return HeldOut((PackedRows(places, mask, documents, places, lists),), (None,) * len(masks))


def test_only_rows_with_a_prompt_are_decoded():
    rows = rows_to_decode(held_out("1111", "0111", "1101", "00011", "011"), 2)
    assert list(rows) == [1, 3]
    assert [mask.tolist() for _, mask in rows.values()] == [
        [False, True, True, True], [False, False, False, True, True]
    ]  # fmt: skip
    assert rows_to_decode(held_out("111"), 0) == {}
    with pytest.raises(UserError, match="--decode 3: none of the 2 held-out rows has a prompt"):
        rows_to_decode(held_out("111", "1101"), 3)


def test_odd_rows_are_evaluated_and_an_export_that_nothing_judged_says_so(tmp_path):
    target, inputs = make_target(tmp_path / "target"), tmp_path / "in"
    inputs.mkdir()
    lines = []
    for number in range(12):
        ids = [5 + number, *range(10, 30)]
        mask = [int(number % 2 == 0), *[1] * 20]  # every other row has no prompt
        row = {"id": f"{number}", "input_ids": ids, "loss_mask": mask, "source": "$\\foo$"}
        lines.append(json.dumps(row))
    (inputs / "0.jsonl").write_text("\n".join(lines))
    data = tokenize(inputs, tmp_path / "data", target)
    result = train(
        data, target, tmp_path / "run", "--max-steps", "1", "--eval-rows", "0", "--global-batch",
        "1", "--epochs", "1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "WARNING train: exported, though no row was held out" in result.stderr
    command = [
        *("--data", data, "--target", target, "--output", tmp_path, "--eval-only", "--init-from"),
        *(tmp_path / "run/export", "--eval-fraction", "1", "--decode", "100"),
        *("--pack-length", "256"),
    ]
    result = run_to_end("train_dflash_online", command, env=ENVIRONMENT, timeout=120)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert report["rows"] == 12 and report["real"]["rows"] == report["real"]["same_text"] == 6
    assert [group["label"] for group in report["groups"]["source"]] == ["$\\foo$"]
    assert "$\\foo$" in (tmp_path / "report.html").read_text()


# ---- exports with one thing off


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny_target(tmp_path_factory.mktemp("target"), num_layers=6))


def put(value, *path):
    def change(config):
        *way, last = path
        for key in way:
            config = config[key]
        config[last] = value

    return change


CONFIG_FAULTS = [
    (lambda c: c.pop("use_sliding_window"), "use_sliding_window is missing"),
    (put({"type": "yarn", "factor": 4.0}, "rope_scaling"), "rope_scaling"),
    (put({"rope_theta": 1e4, "type": "yarn"}, "rope_parameters"), "rope_type"),
    (lambda c: (put("yarn", "rope_parameters", "rope_type")(c),
                put({"rope_type": "default"}, "rope_scaling")(c)), "rope_type"),
    (put("1e-6", "rms_norm_eps"), "rms_norm_eps is '1e-6'"),
    (put(None, "rms_norm_eps"), "rms_norm_eps is None"),
    (put([0, 1.5, 4], "dflash_config", "target_layer_ids"), "target_layer_ids"),
    (put(24.0, "sliding_window"), "sliding_window"),
    (put("domino", "dflash_config", "projector_type"), "projector_type"),
    (put(True, "dflash_config", "sample_from_anchor"), "sample_from_anchor"),
    (put({"quant_method": "fp8"}, "quantization_config"), "quantization_config"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), CONFIG_FAULTS)
def test_a_config_by_which_engines_draft_otherwise_is_a_fault(target, tmp_path, change, text):
    folder = write(tmp_path / "e", target)
    config = json.loads((folder / "config.json").read_bytes())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    found = findings(verify(folder))
    assert any(fatal and text in said for _, fatal, said in found), found


def eight_bits(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)


def all_zero(tensors):
    for tensor in tensors.values():
        tensor.zero_()


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [(eight_bits, "dtypes", "fc.weight is F8_E4M3"), (all_zero, "forward", "are 0 whatever")],
)
def test_weights_that_draft_nothing_are_a_fault(target, tmp_path, change, check, text):
    folder = write(tmp_path / "e", target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ((name, fatal, said),) = findings(verify(folder))
    assert (name, fatal) == (check, True) and text in said


@pytest.mark.parametrize(
    ("size", "offsets", "text"),
    [
        (WORDS // 2, torch.arange(WORDS // 2), None),
        (WORDS // 2, torch.arange(WORDS // 2 - 1), "d2t is (63,), not (64,)"),
        (WORDS // 2, torch.full((WORDS // 2,), WORDS), "d2t names words outside"),
        ("x", None, "draft_vocab_size is x"),
    ],
)
def test_a_reduced_vocabulary_is_one_of_the_targets_words(target, tmp_path, size, offsets, text):
    folder = write(tmp_path / "e", target, layout="speculators")
    config = json.loads((folder / "config.json").read_bytes())
    config["draft_vocab_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    if offsets is not None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:size].clone()
        tensors["d2t"] = offsets
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = findings(verify(folder))
    if text is None:
        assert found == []
    else:
        assert any(fatal and text in said for _, fatal, said in found), found


# ---- what goes wrong is named


def test_an_evaluation_without_hidden_states_says_why():
    class Refusing(TableStates):
        def submit(self, documents, *, final=False):
            raise UserError("server 10.0.0.7:8815: 300 tokens are more than it takes")

    ends = TargetEnds(torch.zeros(4, HIDDEN), torch.zeros(4, HIDDEN))
    with dist.start("cpu") as world, pytest.raises(UserError, match="300 tokens are more"):
        run_evaluation(make_drafter(), ends, world, states=Refusing(final=True))


def test_an_evaluation_wants_a_local_output():
    command = ["--data", "d", "--target", "t", "--output", "s3://bucket/run", "--eval-only"]
    with pytest.raises(SystemExit) as caught:
        train_dflash_online.main(command)
    assert caught.value.code == 2


def test_a_folder_of_other_tensors_is_told_in_a_line(target, tmp_path):
    folder = write(tmp_path / "e", target)
    tensors = load_file(folder / "model.safetensors")
    path = folder / "model.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, path)
    drafter = read_drafter(write(tmp_path / "whole", target))
    with pytest.raises(UserError, match=r"fc.weight is missing; .*; and 66 more$") as caught:
        load_weights(drafter, folder)
    assert len(str(caught.value)) < 500 + len(str(folder))
