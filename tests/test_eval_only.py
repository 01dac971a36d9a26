"""train_dflash_online.py --eval-only, and what its figures decide about the export."""

import json
import re
import shutil
import subprocess

import pytest
from safetensors.torch import load_file, save_file

import train_dflash_online
from common.run import UserError
from tests.forked import Popen, run_to_end
from tests.tiny_run import (
    ENVIRONMENT,
    comparable,
    tokenize,
    train,
    training_command,
)

SHORT = ("--max-steps", "6", "--save-every", "2")


@pytest.fixture(scope="module")
def parts(tiny):
    return tiny.data, tiny.target


@pytest.fixture(scope="module")
def refused(parts, tmp_path_factory):
    """A run too short to learn from the hidden states, without --force; and its output."""
    output = tmp_path_factory.mktemp("refused") / "run"
    command = training_command(*parts, output, *SHORT)
    command.remove("--force")
    result = run_to_end("train_dflash_online", command, env=ENVIRONMENT, timeout=120)
    return output, result


@pytest.fixture(scope="module")
def forced(parts, refused):
    """The same command again, with --force, in a copy; and its output."""
    run = refused[0].parent / "forced"
    subprocess.run(["cp", "-r", str(refused[0]), str(run)], check=True)
    return run, train(*parts, run, *SHORT)


def evaluate(parts, output, *flags):
    data, target = parts
    command = ["--data", str(data), "--target", str(target), "--output", str(output)]
    result = run_to_end(
        "train_dflash_online", [*command, "--eval-only", *map(str, flags)],
        env=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads((output / "report.json").read_bytes()), result


def test_a_drafter_that_ignores_its_context_is_exported_only_by_force(refused, forced):
    output, result = refused
    assert result.returncode == 1
    text = "\n".join(result.stderr.splitlines()[-2:])
    assert "not exported: the drafter ignores its context" in text and "--force" in text
    assert "WARNING train: step=6 the drafter ignores its context" in result.stderr
    status = json.loads((output / "status.json").read_bytes())
    assert status["state"] == "failed" and "ignores its context" in status["last_error"]
    assert (output / "checkpoints/step-00000006/trainer.json").exists()
    assert not (output / "export").exists()
    run, result = forced
    assert result.returncode == 0, result.stderr
    assert "WARNING train: exported, though the drafter ignores its context" in result.stderr
    assert "ignores its context" in result.stdout, "the summary says so too"
    assert (run / "export/config.json").exists()


def test_a_checkpoint_is_judged_as_its_run_judged_it(parts, refused):
    output, _ = refused
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    report, result = evaluate(parts, output)
    changed = {path.name for path in output.rglob("*") if path.is_file()} - {
        path.name for path in before
    }
    assert changed == {"report.json", "report.html"}
    assert all(path.read_bytes() == data for path, data in before.items())
    (entry,) = [e for e in comparable(output) if "eval_loss" in e and e["step"] == 6]
    assert report["drafter"]["step"] == 6 and report["rows"] == entry["eval_rows"]
    assert report["loss"] == entry["eval_loss"]
    assert report["simulated"]["all_anchors"] == entry["eval_acceptance_length"]
    assert report["simulated"]["walked"] == entry["eval_walked_acceptance_length"]
    assert report["slots"]["accuracy"] == entry["eval_slot_accuracy"]
    assert report["context"] == "ignored" and report["expected"]["all_anchors"] > 1
    page = (output / "report.html").read_text()
    assert "http" not in page.replace("http://www.w3.org", "")
    for figure in ("all_anchors", "walked"):
        assert f"{report['simulated'][figure]:.3f}" in page
        assert f"{report['simulated'][figure]:.3f}" in result.stdout


def test_figures_hang_together(parts, refused, tmp_path):
    report, _ = evaluate(
        parts, tmp_path, "--checkpoint", refused[0] / "checkpoints/step-00000004",
        "--draft-cost", "0.25", "--temperature", "0.5", "--decode", "3",
    )  # fmt: skip
    assert report["drafter"]["step"] == 4
    histogram, anchors = report["histogram"], report["anchors"]
    assert len(histogram) == report["block_size"] == 8 and sum(histogram) == anchors
    mean = sum(length * count for length, count in enumerate(histogram, start=1)) / anchors
    assert mean == pytest.approx(report["simulated"]["all_anchors"])
    real = report["real"]
    assert real["rows"] == real["same_text"] == 3 and real["temperature"] == 0.5
    for kind in ("greedy", "sampled"):
        assert 1 <= real[kind]["tokens_per_step"] <= 8 and real[kind]["tokens"] > 3
        assert sum(real[kind]["accepted_counts"]) == real[kind]["steps"] > 0
    walked = report["simulated"]
    assert walked["walked"] == walked["walked_tokens"] / walked["walked_steps"]
    for kind in ("part", "length", "position"):
        groups = report["groups"][kind]
        assert sum(group["anchors"] for group in groups) == anchors
        weighted = sum(group["anchors"] * group["acceptance_length"] for group in groups)
        assert weighted / anchors == pytest.approx(mean)
    assert {group["label"] for group in report["groups"]["part"]} == {"thinking", "answer"}
    four, eight = report["speed"]["blocks"]
    cut = sum(min(length, 4) * count for length, count in enumerate(histogram, start=1)) / anchors
    assert four["block_size"] == 4 and four["all_anchors"] == pytest.approx(cut)
    assert eight["speed_up"] == pytest.approx(walked["walked"] / 1.25)
    assert eight["break_even"] == 1.25 and eight["break_even_rate"] == pytest.approx(0.25 / 7)
    assert report["expected"]["temperature"] == 0.5


def test_a_signal_ends_it_at_once_and_leaves_no_report(parts, refused, tmp_path):
    data, target = parts
    command = ["--data", data, "--target", target, "--output", tmp_path / "new", "--eval-only"]
    command += ["--checkpoint", refused[0] / "checkpoints/step-00000004", "--decode", "100"]
    process = Popen(
        "train_dflash_online", command, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    for line in process.stderr:
        if " evaluating drafter=" in line:
            process.terminate()
            break
    said = process.stderr.read()
    assert process.wait(timeout=30) == 143
    assert said.splitlines()[-1] == "train_dflash_online.py: terminated", said
    assert "Traceback" not in said and not list((tmp_path / "new").glob("report*"))


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(parts, refused, tmp_path):
    (checkpoint,) = refused[0].glob("checkpoints/step-00000006")
    one, _ = evaluate(parts, tmp_path / "one", "--checkpoint", checkpoint, "--decode", "2")
    # as a run's flags, which the checkpoint's own take the place of
    flags = ("--eval-only", "--checkpoint", str(checkpoint), "--decode", "2")
    result = train(*parts, tmp_path / "two", *flags, ranks=2)
    assert result.returncode == 0, result.stderr
    two = json.loads((tmp_path / "two/report.json").read_bytes())
    assert two.pop("loss") == pytest.approx(one.pop("loss"), rel=1e-6)
    overlaps = (report["slots"].pop("overlap") for report in (two, one))
    assert next(overlaps) == pytest.approx(next(overlaps), rel=1e-6)
    for report in (two, one):
        report.pop("groups"), report.pop("expected")
        real = report["real"]
        speeds = [real.pop("plain_tokens_per_s")]
        speeds += [real[kind].pop("tokens_per_s") for kind in ("greedy", "sampled")]
        assert min(speeds) > 0
    assert two == one


def test_a_published_drafter_is_judged_before_any_training(tiny, forced, tmp_path):
    target, (run, _) = tiny.target, forced
    first = tokenize(tiny.inputs, tmp_path / "data", target, "--shards", "0:1")
    report, result = evaluate(
        (first, target), tmp_path / "new", "--init-from", run / "export",
        "--eval-fraction", "1", "--pack-length", "256",
    )  # fmt: skip
    assert "waiting" not in result.stderr, "shard 0 is there, and the others are not waited for"
    assert report["rows"] == json.loads((first / "shard-00000.json").read_bytes())["rows"] > 0
    assert report["drafter"]["step"] is None and not report["notes"]
    written = {path.name for path in (tmp_path / "new").iterdir() if path.name[0] != "."}
    assert written == {"report.html", "report.json"}


def test_mistakes_are_told(parts, refused, tmp_path, capsys):
    data, target = parts
    step = str(refused[0] / "checkpoints/step-00000006")
    cases = [
        (("--checkpoint", step), 2, "--checkpoint: only with --eval-only"),
        (("--eval-only", "--checkpoint", step, "--init-from", "x"), 2, "not beside --init-from"),
        (("--eval-only", "--checkpoint", step, "--eval-rows", "0"), 2, "--eval-rows 0"),
        (("--eval-only", "--dry-run"), 2, "not allowed with"),
        (("--eval-only",), 1, "no checkpoint there; give --checkpoint, or --init-from"),
        (("--eval-only", "--checkpoint", str(tmp_path)), 1, "--checkpoint .*: not a whole"),
        (("--eval-only", "--checkpoint", step, "--eval-fraction", "0"), 1, "--eval-fraction 0"),
        (("--eval-only", "--checkpoint", step, "--block-size", "4"), 1, "block_size is 8, not 4"),
        (("--eval-only", "--init-from", str(tmp_path)), 1, "--init-from .*: cannot read"),
    ]
    for flags, code, message in cases:
        command = ["--data", str(data), "--target", str(target), "--output", str(tmp_path / "run")]
        with pytest.raises((UserError, SystemExit)) as caught:
            train_dflash_online.main([*command, *flags])
        error = caught.value
        found = error.exit_code if isinstance(error, UserError) else error.code
        text = str(error) if isinstance(error, UserError) else capsys.readouterr().err
        assert found == code, (flags, text)
        assert re.search(message, text), (flags, text)


def test_a_target_of_the_same_shape_is_told_from_the_trained_one(parts, refused, tmp_path):
    data, target = parts
    other = tmp_path / "other"
    shutil.copytree(target, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    command = ["--data", str(data), "--target", str(other), "--output", str(refused[0])]
    with pytest.raises(UserError, match="was trained for a target with another embedding"):
        train_dflash_online.main([*command, "--eval-only"])
