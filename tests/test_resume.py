"""Runs that stopped and go on: what a stop is called, and what a resume may differ from."""

import shutil
from types import SimpleNamespace

import pytest

from common.lifetime import Stopped
from common.run import UserError
from common.telling import print_dry_run
from tests.tiny_run import make_inputs, make_target, tokenize, train


def test_a_mirror_that_lags_behind_an_allowed_change_is_brought_up(tmp_path):
    target, mirror = make_target(tmp_path / "target"), tmp_path / "mirror"
    data = tokenize(make_inputs(tmp_path / "in"), tmp_path / "data", target)
    flags = ("--eval-rows", "0", "--checkpoint-uri", str(mirror))
    run = tmp_path / "run"
    assert train(data, target, run, "--max-steps", "2", *flags).returncode == 0
    shutil.copytree(mirror, tmp_path / "before")
    longer = ("--max-steps", "3", *flags)
    changed = train(data, target, run, *longer, "--allow-change", "max_steps")
    assert changed.returncode == 0, changed.stderr
    shutil.rmtree(mirror)
    shutil.move(tmp_path / "before", mirror)  # as if no upload had worked since
    again = train(data, target, run, *longer)
    assert again.returncode == 0 and "nothing to do" in again.stderr, again.stderr
    assert (mirror / "step-00000003.json").exists()


@pytest.mark.parametrize(
    ("ready", "signum", "raised"),
    [(object(), None, Stopped), (None, 15, Stopped), (None, None, UserError)],
    ids=["another-rank-stopped", "stopped", "end-of-data"],
)
def test_a_dry_run_that_another_rank_was_stopped_in_is_not_at_the_end_of_its_data(
    ready, signum, raised
):
    training = SimpleNamespace(
        stop=SimpleNamespace(signum=signum), world=SimpleNamespace(agree=lambda go: False)
    )
    with pytest.raises(raised):
        print_dry_run(training, SimpleNamespace(next=lambda stop: ready))
