"""Odd hidden states and losses without a number: refused, skipped, said; and the run's status."""

import hashlib
import json
import logging
import resource
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.guards import BAND_STEPS, MAX_SKIPPED, Guards, HiddenStateBand, tap_figures
from common.journal import Journal, read_metrics
from common.run import UserError
from common.setup import load_weights
from common.status import Status, print_status, read_status
from common.store import open_store
from tests import forked
from tests.test_stored import write
from tests.tiny_run import ENVIRONMENT, make_target, train

LAYERS = (3, 7)


def taps_of(*rows):
    """(1, S, 2 * 4): each row is repeated over the columns of one layer each."""
    return torch.tensor([[[a] * 4 + [b] * 4 for a, b in rows]], dtype=torch.bfloat16)


def figures_of(taps, real=None):
    real = torch.ones(taps.shape[1], dtype=torch.bool) if real is None else torch.tensor(real)
    return tap_figures(taps, real, num_layers=2)


def test_the_figures_are_of_real_tokens_alone():
    figures = figures_of(taps_of((1, 2), (3, 2), (3, 2), (float("nan"), 99)), [True] * 3 + [False])
    assert figures.tolist() == [[6, 4], [0, 0], [0, 1]]
    nothing = figures_of(taps_of((0, 0)), [False])
    assert nothing[0].isnan().all() and not nothing[1:].any()


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        (taps_of((1, 2), (2, float("inf"))), "layer 7 .* 1 of them are not finite"),
        (taps_of((float("nan"), 2), (2, 3)), "layer 3 .* not finite"),
        (taps_of((1, 0), (2, 0)), "layer 7 .* all alike"),
        (taps_of((100, 1), (120, 2)), "layer 3 .* median norm is 200"),
        (taps_of((1, 0.01), (2, 0.02)), "layer 7 .* at first 2 to 2"),
    ],
)
def test_states_that_cannot_be_right_are_refused_by_layer(taps, message):
    band, usual = HiddenStateBand(), figures_of(taps_of((1, 1), (2, 2)))
    for _ in range(BAND_STEPS):
        band.check(torch.stack([usual, usual]), layers=LAYERS)
    with pytest.raises(UserError, match=message):  # though one forward of two is as ever
        band.check(torch.stack([usual, figures_of(taps)]), layers=LAYERS)


def test_the_band_is_set_by_the_first_steps_and_kept():
    guards = Guards()
    for scale in (1, 2, *[1] * (BAND_STEPS + 5)):
        figures = figures_of(taps_of((scale, scale), (2 * scale, 3 * scale)))
        guards.band.check(figures[None], layers=LAYERS)
    assert guards.band.steps == BAND_STEPS and str(guards.band) == "2-4,2-4"
    guards.skipped.count(skipped=True)
    assert Guards.from_json(json.loads(json.dumps(guards.to_json()))) == guards
    guards.band.check(figures_of(taps_of((0, 0)), [False])[None], layers=LAYERS)  # empty packs


def test_too_many_skipped_steps_in_a_row_are_noticed():
    skipped = Guards().skipped
    for _ in range(MAX_SKIPPED - 1):
        assert not skipped.count(skipped=True)
    assert not skipped.count(skipped=False)
    assert [skipped.count(skipped=True) for _ in range(MAX_SKIPPED)][-2:] == [False, True]
    assert skipped.total == 2 * (MAX_SKIPPED - 1)  # the last one ends the run: no step was taken
    again = Guards.from_json(
        json.loads(json.dumps({**Guards().to_json(), "skipped": vars(skipped)}))
    )
    assert again.skipped.count(skipped=True) and not again.skipped.count(skipped=False)
    assert again.skipped.total == skipped.total


@pytest.fixture(scope="module")
def parts(tiny):
    return tiny.target, tiny.data


def test_steps_without_a_number_are_skipped_and_ten_end_the_run(parts, tmp_path):
    target, data = parts
    output = tmp_path / "run"
    result = train(data, target, output, "--learning-rate", "1e30", "--warmup-ratio", "0")
    assert result.returncode == 1, result.stderr
    assert "10 steps in a row without a finite loss" in result.stderr.splitlines()[-1]
    losses = [entry["loss"] for entry in read_metrics(output) if "loss" in entry]
    finite = [loss for loss in losses if loss is not None]
    assert len(finite) >= 1 and losses == [*finite, *[None] * (len(losses) - len(finite))]
    rows = json.loads((output / "skipped-rows.json").read_bytes())
    assert rows["step"] == len(finite) + 10 and rows["row_ids"][0][0].startswith("row-")
    status = read_status(str(output))
    assert status["state"] == "failed" and "steps in a row" in status["last_error"]
    shown = forked.run_to_end(
        "train_dflash_online", ["--status", output], env=ENVIRONMENT, timeout=60
    )
    assert shown.returncode == 0 and "failed" in shown.stdout and "skipped" in shown.stdout


def test_zeros_for_hidden_states_end_the_run_before_they_change_a_weight(parts, tmp_path):
    target, data = parts
    hidden = tmp_path / "hidden"
    assert write(target, data, hidden, "--limit", "1000").returncode == 0
    (path,) = hidden.glob("*.safetensors")
    tensors = load_file(path)
    tensors["hidden"][:, 64:128] = 0
    save_file(tensors, path)
    record = json.loads((hidden / "hidden-00000.json").read_bytes())
    record["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (hidden / "hidden-00000.json").write_text(json.dumps(record))
    result = train(data, target, tmp_path / "run", "--hidden-states", str(hidden))
    assert result.returncode == 1
    assert "hidden states of layer 1 cannot be right" in result.stderr.splitlines()[-1]
    assert [e for e in read_metrics(tmp_path / "run") if "loss" in e] == []


def test_a_dry_run_tells_memory_and_time_and_leaves_the_folder_free(parts, tmp_path):
    target, data = parts
    result = train(data, target, tmp_path / "run", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "memory left" in result.stdout and "forward and backward" in result.stdout
    assert (
        not (tmp_path / "run/run.json").exists() and not (tmp_path / "run/metrics.jsonl").exists()
    )


def test_training_goes_on_from_a_published_drafter(parts, tmp_path):
    target, data = parts
    first = train(data, target, tmp_path / "first", "--max-steps", "40")
    assert first.returncode == 0, first.stderr
    published = tmp_path / "first/export"
    result = train(
        data, target, tmp_path / "run", "--init-from", str(published), "--max-steps", "2"
    )
    assert result.returncode == 0, result.stderr
    fresh, published_loss = (read_metrics(tmp_path / n)[0]["loss"] for n in ("first", "run"))
    assert published_loss < 0.7 * fresh  # of the same batch, at step 1
    assert "self-check" in first.stderr and "hidden_state_norms=" in first.stderr
    tensors = load_file(published / "model.safetensors")
    config = DrafterConfig.from_json(json.loads((published / "config.json").read_bytes()))
    drafter = Drafter(config)
    load_weights(drafter, published)
    for name, weight in drafter.named_parameters():
        assert torch.equal(weight, tensors[name].float()), name
    tensors["else"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :8].contiguous()
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(UserError, match=r"norm\.weight is missing; else is unknown; fc\.weight is"):
        load_weights(drafter, published)


def test_another_tokenizer_is_refused(parts, tmp_path):
    target, data = parts
    other = make_target(tmp_path / "target")
    changed = (other / "tokenizer.json").read_bytes() + b"\n"
    (other / "tokenizer.json").write_bytes(changed)
    result = train(data, other, tmp_path / "run")
    assert result.returncode == 1
    assert "another tokenizer.json" in result.stderr.splitlines()[-1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # tensorboard's
def test_a_full_disk_is_a_warning_and_what_it_refused_is_written_later(
    tmp_path, caplog, monkeypatch
):
    journal = Journal(tmp_path, resume_step=0, report_to="none", settings={})
    journal.write({"step": 1, "loss": 2.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with monkeypatch.context() as patch:  # over before pytest takes its own handlers away
        # the limit would hold for the files behind other handlers too
        patch.setattr(logging.getLogger(), "handlers", [caplog.handler])
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # as a full disk: EFBIG
        try:
            for step in (2, 3):
                journal.write({"step": step, "loss": 2.0})
            journal.draw_curves()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.write({"step": 4, "loss": 2.0})
    journal.close()
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert sum("cannot write metrics" in line for line in caplog.messages) == 1
    assert not list(tmp_path.glob(".*png*"))


class FailingReporter:
    """A package as wandb is one, whose service is down after the start."""

    @staticmethod
    def init(**given):
        pass

    @staticmethod
    def log(scalars, *, step):
        raise ConnectionError("no route")

    finish = staticmethod(dict)


def test_a_reporter_that_fails_ends_no_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", FailingReporter)
    journal = Journal(tmp_path, resume_step=0, report_to="trackio", settings={})
    for step in (1, 2):
        journal.write({"step": step, "loss": 2.0})
    journal.close()
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2]
    assert sum("no route" in line for line in caplog.messages) == 1


def test_the_status_is_rewritten_and_mirrored(tmp_path, capsys):
    mirror = open_store(str(tmp_path / "mirror"))
    status = Status(tmp_path, mirror=mirror)
    status.update(state="training", step=7, eta_s=90.0)
    deadline = time.monotonic() + 20
    while not (tmp_path / "status.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert read_status(str(tmp_path))["step"] == 7
    status.update(step=8)
    status.close()
    assert read_status(str(tmp_path))["step"] == 8
    assert read_status(str(tmp_path / "mirror"))["step"] == 8
    assert json.loads((tmp_path / "mirror/status.json").read_bytes())["step"] == 8
    print_status(str(tmp_path))
    assert "1m30s" in capsys.readouterr().out
    fields = json.loads((tmp_path / "status.json").read_bytes())
    (tmp_path / "status.json").write_text(json.dumps({**fields, "updated": "2026-01-02T03:04:05Z"}))
    print_status(str(tmp_path))
    assert "dead?" in capsys.readouterr().out
    with pytest.raises(UserError, match="not a run folder"):
        read_status(str(tmp_path / "mirror/void"))
