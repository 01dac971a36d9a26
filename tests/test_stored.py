"""Hidden states in files: written by stage 2, resumed, and trained on like a server's."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from common import storing
from common.lifetime import file_lock
from common.run import UserError
from common.shards import TokenizedDataset
from common.store import open_store
from common.stored import StoredHiddenStates, StoredPlan
from common.storing import (
    check_room,
    committed_bytes,
    first_rows,
    only_writer,
    settle_stored_plan,
    write_hidden_states,
)
from common.target import Target
from common.wire import ColocatedHiddenStates
from common.workfolder import LOCK_FILE, work_folder
from tests import forked
from tests.tiny_run import train

ROOT = Path(__file__).parent.parent
LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def target(tiny):
    return tiny.target


@pytest.fixture(scope="module")
def data(tiny):
    return tiny.data


@pytest.fixture(scope="module")
def hidden_states(target):
    loaded = Target.load(
        str(target), layers=LAYERS, dtype=torch.float32, device=torch.device("cpu"), final=True
    )
    return ColocatedHiddenStates(loaded, max_tokens_per_request=600)


def extract(*flags):
    return forked.run_to_end("extract_hidden_online", flags, env=os.environ, timeout=120)


def write(target, data, output, *flags):
    return extract(
        "--target", target, "--layers", "0,1,2", "--data", data, "--output", output, *flags
    )


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def open_dataset(data, tmp_path):
    dataset = TokenizedDataset(str(data), cache_dir=tmp_path / "cache")
    return dataset, dataset.wait_for_plan(timeout_s=0)


def test_the_trainer_learns_from_files_as_from_a_target_beside_it(target, data, tmp_path):
    written = write(target, data, tmp_path / "hidden", "--limit", "1000")
    assert written.returncode == 0, written.stderr
    # 3 taps of 64 in bfloat16: said before it starts, and in the table
    assert "384 bytes a token" in written.stderr and "Hidden states written" in written.stdout
    for name in (str(tmp_path / "hidden"), "colocated"):
        flags = ("--hidden-states", name, "--max-steps", "40")  # of one learning rate
        run = train(data, target, tmp_path / name.rpartition("/")[2], *flags)
        assert run.returncode == 0, run.stderr
    losses = [
        [
            entry["loss"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            if "loss" in (entry := json.loads(line))
        ]
        for name in ("hidden", "colocated")
    ]
    assert len(losses[0]) > 2
    # other requests, other low bits, which grow from step to step
    np.testing.assert_allclose(losses[0][:10], losses[1][:10], rtol=1e-4)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.1)
    cut = train(
        data, target, tmp_path / "cut", "--hidden-states", str(tmp_path / "hidden"),
        "--pack-length", "128",
    )  # fmt: skip
    assert cut.returncode == 1 and "holds whole ones; give --pack-length 256" in cut.stderr


def test_the_first_rows_alone_are_trained_on_when_only_they_were_written(target, data, tmp_path):
    assert write(target, data, tmp_path / "hidden", "--limit", "50").returncode == 0
    flags = ("--hidden-states", str(tmp_path / "hidden"), "--epochs", "2")
    run = train(data, target, tmp_path / "run", *flags)
    assert run.returncode == 0, run.stderr
    shards = [line for line in run.stderr.splitlines() if " shard=" in line and " epoch=0 " in line]
    rows = [int(re.search(r" rows=(\d+)", line).group(1)) for line in shards]
    held_out = [int(re.search(r" held_out=(\d+)", line).group(1)) for line in shards]
    assert sum(rows) + sum(held_out) == 50


def test_rows_come_back_to_the_bit_and_others_are_refused(data, hidden_states, tmp_path):
    dataset, plan = open_dataset(data, tmp_path)
    rows = list(first_rows(dataset, 7, timeout_s=0))
    assert len(rows) == 7
    output = open_store(str(tmp_path / "hidden"))
    stored_plan = StoredPlan(hidden_states.description, plan.sha256, 7)
    settle_stored_plan(output, stored_plan)
    counts = []
    write_hidden_states(
        iter(rows), hidden_states, output, stored_plan, folder=tmp_path,
        on_rows=lambda *amounts: counts.append(amounts),
    )  # fmt: skip
    assert counts == [(7, sum(map(len, rows)))]
    reader = StoredHiddenStates(str(tmp_path / "hidden"), cache_dir=tmp_path / "cache")
    assert reader.description.layers == LAYERS
    got = reader.submit([rows[4], rows[1]], final=True).result()
    whole = hidden_states.compute(rows, final=True)
    ends = np.cumsum([0, *map(len, rows)])
    pick = [slice(ends[4], ends[5]), slice(ends[1], ends[2])]
    assert sum(map(len, rows)) <= 600  # one request, so the same bits
    assert torch.equal(got.hidden, torch.cat([whole.hidden[place] for place in pick]))
    assert torch.equal(got.final, torch.cat([whole.final[place] for place in pick]))
    with pytest.raises(UserError, match="first 7 rows"):
        reader.submit([rows[0][:-1]]).result()


def test_progress_is_told_by_the_request_not_only_by_the_file(data, hidden_states, tmp_path):
    dataset, plan = open_dataset(data, tmp_path)
    output = open_store(str(tmp_path / "hidden"))
    stored_plan = StoredPlan(hidden_states.description, plan.sha256, 60)
    settle_stored_plan(output, stored_plan)
    for several in (True, False):  # computed, then found there
        counts = []
        write_hidden_states(
            first_rows(dataset, 60, timeout_s=0), hidden_states, output, stored_plan,
            folder=tmp_path, on_rows=lambda *amounts, to=counts: to.append(amounts),
        )  # fmt: skip
        assert (len(counts) > 1) == several and sum(rows for rows, _ in counts) == 60
    assert len(list((tmp_path / "hidden").glob("*.safetensors"))) == 1


def test_a_killed_writer_goes_on_and_gives_the_same_files(
    data, hidden_states, tmp_path, monkeypatch
):
    monkeypatch.setattr(storing, "FILE_BYTES", 40_000)
    dataset, plan = open_dataset(data, tmp_path)
    stored_plan = StoredPlan(hidden_states.description, plan.sha256, 60)

    def make(output, on_rows):
        store = open_store(str(output))
        settle_stored_plan(store, stored_plan)
        write_hidden_states(
            first_rows(dataset, 60, timeout_s=0), hidden_states, store, stored_plan,
            folder=tmp_path, on_rows=on_rows,
        )  # fmt: skip

    make(tmp_path / "calm", lambda *_: None)
    calm = files_of(tmp_path / "calm")
    assert len([name for name in calm if name.endswith(".safetensors")]) > 3
    done = []

    def stop(*amounts):
        done.append(amounts)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "hidden", stop)
    first = tmp_path / "hidden" / "hidden-00000.safetensors"
    before = first.stat().st_mtime_ns
    with pytest.raises(UserError, match="of 60 rows are written"):
        StoredHiddenStates(str(tmp_path / "hidden"), cache_dir=tmp_path)
    make(tmp_path / "hidden", lambda *_: None)
    assert files_of(tmp_path / "hidden") == calm and first.stat().st_mtime_ns == before
    (tmp_path / "hidden" / "hidden-00001.safetensors").write_bytes(b"else")
    with pytest.raises(UserError, match="hidden-00001.safetensors is not what its record says"):
        StoredHiddenStates(str(tmp_path / "hidden"), cache_dir=tmp_path)


def test_s3_holds_them_too(target, data, tmp_path, moto, monkeypatch):
    bucket = moto.make_bucket("hidden")
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    assert write(target, data, f"{bucket}/h", "--limit", "5").returncode == 0
    dataset, _ = open_dataset(data, tmp_path)
    (row,) = first_rows(dataset, 1, timeout_s=0)
    reader = StoredHiddenStates(f"{bucket}/h", cache_dir=tmp_path / "cache")
    assert reader.submit([row]).result().hidden.shape == (len(row), 3 * 64)


def test_mistakes_are_one_line(target, data, tmp_path, monkeypatch):
    for flags, code, text in [
        (("--data", data, "--output", tmp_path / "h"), 2, "together"),
        (("--data", tmp_path, "--output", tmp_path / "h", "--limit", "3", "--data-timeout", "0"),
         1, "did not appear"),
        (("--data", data, "--output", tmp_path / "h", "--limit", "3", "--max-tokens-per-request",
          "3"), 1, "give --max-tokens-per-request"),
    ]:  # fmt: skip
        result = extract("--target", target, "--layers", "0,1,2", *flags)
        assert result.returncode == code and text in result.stderr.splitlines()[-1], result.stderr
    assert write(target, data, tmp_path / "h", "--limit", "3").returncode == 0
    other = write(target, data, tmp_path / "h", "--limit", "4")
    assert other.returncode == 1
    assert "its num_rows is 3, not 4: name another" in other.stderr.splitlines()[-1]
    with pytest.raises(UserError, match=r"no hidden\.json"):
        StoredHiddenStates(str(tmp_path), cache_dir=tmp_path)
    usage = shutil.disk_usage(tmp_path)
    with pytest.raises(UserError, match="smaller --limit"):
        check_room(str(tmp_path), usage.total * 2, tmp_path)


def test_a_second_writer_is_refused(tmp_path):
    refused = pytest.raises(UserError, match="another process writes there")
    with only_writer(str(tmp_path / "h")), refused, only_writer(str(tmp_path / "h")):
        pass
    with only_writer(str(tmp_path / "h")):
        pass


def test_a_plan_that_is_replaced_meanwhile_ends_the_writing(data, hidden_states, tmp_path):
    """As by a second writer of an S3 prefix, where there is no lock."""
    dataset, plan = open_dataset(data, tmp_path)
    output = open_store(str(tmp_path / "hidden"))
    mine = StoredPlan(hidden_states.description, plan.sha256, 7)
    settle_stored_plan(output, mine)
    output.write("hidden.json", dataclasses.replace(mine, num_rows=8).to_bytes())
    with pytest.raises(UserError, match="its num_rows is 8, not 7"):
        write_hidden_states(
            first_rows(dataset, 7, timeout_s=0), hidden_states, output, mine, folder=tmp_path,
            on_rows=lambda *_: None,
        )  # fmt: skip
    assert not list((tmp_path / "hidden").glob("*.safetensors"))


def test_what_is_written_already_needs_no_room(data, hidden_states, tmp_path):
    dataset, plan = open_dataset(data, tmp_path)
    output = open_store(str(tmp_path / "hidden"))
    mine = StoredPlan(hidden_states.description, plan.sha256, 7)
    assert committed_bytes(output, mine) == 0
    settle_stored_plan(output, mine)
    write_hidden_states(
        first_rows(dataset, 7, timeout_s=0), hidden_states, output, mine, folder=tmp_path,
        on_rows=lambda *_: None,
    )  # fmt: skip
    assert committed_bytes(output, mine) == sum(
        path.stat().st_size for path in (tmp_path / "hidden").glob("*.safetensors")
    )


def test_folders_of_killed_writers_are_removed(tmp_path):
    left = tmp_path / "hidden-left"
    left.mkdir()
    (left / ".lock").touch()
    (left / "hidden-00000.safetensors").touch()
    with work_folder(tmp_path, prefix="hidden-") as folder:
        assert folder.name.startswith("hidden-") and not left.exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="--work-dir"), work_folder(tmp_path / "none"):
        pass


def test_a_folder_is_removed_whose_killed_run_is_survived_by_a_worker_for_a_moment(tmp_path):
    left = tmp_path / "tokenize-left"
    left.mkdir()
    (left / LOCK_FILE).touch()
    with contextlib.ExitStack() as worker:
        worker.enter_context(file_lock(left / LOCK_FILE))
        with work_folder(tmp_path):
            assert left.exists()
            worker.close()
    assert not left.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"description": {}}', b'{"description": 3}'])
def test_a_damaged_plan_is_one_line(tmp_path, content):
    (tmp_path / "hidden.json").write_bytes(content)
    with pytest.raises(UserError, match=r"hidden\.json is damaged") as caught:
        StoredHiddenStates(str(tmp_path), cache_dir=tmp_path)
    assert len(str(caught.value).splitlines()) == 1
