"""Checkpoints written beside training: whole or not there, kept by a rule, mirrored, resumed."""

import json
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from common import checkpoint, dist
from common.mirror import Mirror
from common.run import UserError
from common.stepfolders import find_newest, kept_steps, whole_steps
from common.store import LocalStore, open_store
from tests import forked
from tests.checkpoint_ranks import LOG, Training
from tests.tiny_run import ENVIRONMENT


@pytest.fixture
def world():
    with dist.start("cpu") as world:
        yield world


@pytest.fixture
def bucket(moto, monkeypatch, request):
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    return moto.make_bucket(f"b{abs(hash(request.node.nodeid))}")


def run_program(*arguments: str, ranks: int = 0, **environment: str) -> subprocess.CompletedProcess:
    how = dict(env={**ENVIRONMENT, **environment}, timeout=120)
    if not ranks:
        return forked.run_to_end("tests.checkpoint_ranks", arguments, **how)
    return forked.run_ranks("tests.checkpoint_ranks", arguments, ranks=ranks, **how)


def save_steps(training: Training, *steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """Train on to the last of `steps` and save at each; the states at those steps."""
    states = {}
    while training.step < max(steps):
        training.advance()
        if training.step in steps:
            states[training.step] = training.tensors()
            training.save()
    training.checkpoints.wait()
    return states


def assert_loads_as(
    path: Path, world: dist.World, want: dict[str, torch.Tensor], **shape: int
) -> None:
    training = Training(world, path.parent, **shape)
    training.load(path)
    found = training.tensors()
    assert found.keys() == want.keys() and len(found) >= 18
    for key, tensor in want.items():
        assert torch.equal(found[key], tensor), key


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until the gate is opened."""
    opened, save = threading.Event(), checkpoint.dcp.save

    def wait_and_save(*args, **kwargs):
        assert opened.wait(30)
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", wait_and_save)
    return opened


def test_a_checkpoint_holds_the_moment_it_was_asked_for(world, tmp_path, gate):
    training = Training(world, tmp_path)
    training.advance()
    want = training.tensors()
    training.save(cursor=5)
    for _ in range(3):
        training.advance()
    assert not any(torch.equal(want[key], value) for key, value in training.tensors().items())
    assert find_newest(tmp_path) is None
    gate.set()
    training.checkpoints.wait()
    assert training.checkpoints.newest() == tmp_path / "step-00000001"
    assert_loads_as(tmp_path / "step-00000001", world, want)
    state = checkpoint.read_state(tmp_path / "step-00000001")
    files = state.pop("files")
    assert state == {"cursor": 5, "finished": False, "step": 1, "version": 2}
    assert files.keys() == {".metadata", "__0_0.distcp"}
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_one_checkpoint_at_most_is_under_way(world, tmp_path, gate):
    training = Training(world, tmp_path)
    training.advance()
    training.save()
    training.advance()
    second = threading.Thread(target=training.save)
    second.start()
    second.join(0.3)
    assert second.is_alive() and not list(tmp_path.glob("*2*"))
    gate.set()
    second.join(30)
    assert not second.is_alive() and find_newest(tmp_path) is not None
    training.checkpoints.wait()
    assert list(whole_steps(tmp_path)) == [1, 2]


def test_the_state_of_a_saved_step_is_rewritten_in_place(world, tmp_path):
    training = Training(world, tmp_path, keep=1)
    (want,) = save_steps(training, 2).values()
    before = (tmp_path / "step-00000002/__0_0.distcp").stat()
    training.save(finished=True)
    training.checkpoints.wait()
    assert (tmp_path / "step-00000002/__0_0.distcp").stat().st_ino == before.st_ino
    assert checkpoint.read_state(tmp_path / "step-00000002")["finished"]
    other = Training(world, tmp_path, keep=1)  # as after a resume with other settings
    other.advance()
    other.advance()
    other.save(cursor=1)
    other.checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]
    assert checkpoint.read_state(tmp_path / "step-00000002")["cursor"] == 1
    assert_loads_as(tmp_path / "step-00000002", world, want)


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    result = run_program("kill", str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) > 12 and set(lines) == {"step=1 same=True", "step=2 same=True"}
    assert lines == sorted(lines)  # the old one, until the new one is whole


def test_a_checkpoint_being_replaced_still_counts(world, tmp_path):
    training = Training(world, tmp_path)
    states = save_steps(training, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.replaced")  # a kill just then
    assert find_newest(tmp_path) == tmp_path / "step-00000002.replaced"
    assert_loads_as(tmp_path / "step-00000002.replaced", world, states[2])
    save_steps(training, 3, 4, 5)
    assert sorted(path.name for path in tmp_path.glob("step*")) == [
        "step-00000003", "step-00000004", "step-00000005",
    ]  # fmt: skip


def test_a_full_disk_is_a_warning_the_next_save_works_and_one_rank_resumes(world, tmp_path):
    result = run_program("full", str(tmp_path), ranks=2)
    assert result.returncode == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    assert first == "1 ['latest', 'step-00000001'] saved"
    assert second.startswith(
        "2 ['latest', 'step-00000001'] the last checkpoint was not saved: rank 1: File too large."
    )
    assert third == "3 ['latest', 'step-00000001', 'step-00000003'] saved"
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("WARNING")]
    assert f"step=2 not saved: rank 1: File too large (free in {tmp_path}: " in warning
    newest = tmp_path / "step-00000003"
    assert len(list(newest.glob("*.distcp"))) == 2
    assert_loads_as(newest, world, torch.load(tmp_path / "want.pt"), width=256)


def test_a_folder_that_cannot_be_made_is_a_warning_too(world, tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("in the way")
    training = Training(world, tmp_path / "checkpoints")
    with pytest.raises(UserError, match="not saved: .*(Not a directory|File exists)"):
        save_steps(training, 1)
    assert "step=1 not saved" in caplog.text
    (tmp_path / "checkpoints").unlink()
    save_steps(training, 2)
    assert list(whole_steps(tmp_path / "checkpoints")) == [2]


def test_the_newest_and_the_multiples_are_kept(world, tmp_path):
    save_steps(Training(world, tmp_path, keep=2, keep_every=3), 1, 2, 3, 4, 5, 6, 7, 8)
    assert list(whole_steps(tmp_path)) == [3, 6, 7, 8]
    again = Training(world, tmp_path, keep=1)
    again.load(tmp_path / "step-00000006")
    save_steps(again, 7)
    assert list(whole_steps(tmp_path)) == [7, 8]  # 8 is not this run's to judge
    assert kept_steps([], keep=3, keep_every=None) == set()


# ---- the mirror


def open_mirror(uri: str, folder: Path, **rule: int | None) -> Mirror:
    return Mirror(open_store(uri), folder, **{"keep": 3, "keep_every": None, **rule}, log=LOG)


def mirrored(uri: str) -> list[str]:
    return sorted({entry.key.partition("/")[0] for entry in open_store(uri).list()})


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}{end}" for step in steps for end in ("", ".json")]


def test_a_new_machine_resumes_from_the_mirror(world, tmp_path, bucket):
    uri, rule = f"{bucket}/run", {"keep": 2, "keep_every": 3}
    training = Training(
        world, tmp_path / "a", mirror=open_mirror(uri, tmp_path / "a", **rule), **rule
    )
    assert training.checkpoints.newest() is None
    for step in range(1, 6):
        want = save_steps(training, step)[step]
    assert mirrored(uri) == names(3, 4, 5)
    record = json.loads(open_store(uri).read("step-00000005.json"))
    sizes = {file["name"]: file["bytes"] for file in record["files"]}
    assert sizes == {path.name: path.stat().st_size for path in tmp_path.glob("a/*5/*")}
    new = Training(world, tmp_path / "b", mirror=open_mirror(uri, tmp_path / "b"))
    newest = new.checkpoints.newest()
    assert newest == tmp_path / "b/step-00000005"
    assert_loads_as(newest, world, want)
    assert new.checkpoints.mirrored_state() == checkpoint.read_state(newest)


def test_what_does_not_match_its_record_is_not_taken(world, tmp_path, bucket, caplog):
    training = Training(world, tmp_path / "a", mirror=open_mirror(bucket, tmp_path / "a"))
    states = save_steps(training, 1, 2, 3)
    store = open_store(bucket)
    store.write("step-00000003/__0_0.distcp", b"cut")
    store.delete("step-00000002/.metadata")
    new = Training(world, tmp_path / "b", mirror=open_mirror(bucket, tmp_path / "b"))
    newest = new.checkpoints.newest()
    assert newest == tmp_path / "b/step-00000001"
    assert [path.name for path in newest.parent.iterdir()] == ["step-00000001"]
    assert_loads_as(newest, world, states[1])
    assert "step-00000003/__0_0.distcp is not what its record says" in caplog.text
    store.write("step-00000003.json", b"[]")  # no record at all
    store.write("step-00000003/trainer.json", b"{")
    assert new.checkpoints.mirrored_state() is not None
    with caplog.at_level("WARNING"):
        third = Training(world, tmp_path / "d", mirror=open_mirror(bucket, tmp_path / "d"))
        assert third.checkpoints.newest() == tmp_path / "d/step-00000001"
    assert "step-00000003.json cannot be read" in caplog.text
    store.delete("step-00000001/trainer.json")
    with pytest.raises(UserError, match=r"nor is any other whole"):
        Training(
            world, tmp_path / "c", mirror=open_mirror(bucket, tmp_path / "c")
        ).checkpoints.newest()


def test_a_killed_upload_is_not_taken_and_made_up_for(world, tmp_path, bucket, moto):
    result = run_program("upload", str(tmp_path / "a"), bucket, **moto.environment)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert mirrored(bucket) == [*names(1), "step-00000002"]
    new = Training(world, tmp_path / "b", mirror=open_mirror(bucket, tmp_path / "b"))
    assert new.checkpoints.newest() == tmp_path / "b/step-00000001"
    again = Training(world, tmp_path / "a", mirror=open_mirror(bucket, tmp_path / "a"))
    again.load(again.checkpoints.newest())
    assert again.step == 2
    save_steps(again, 3)
    assert mirrored(bucket) == names(1, 2, 3)


def test_a_mirror_that_fails_is_a_warning_and_caught_up_with(world, tmp_path, moto, bucket, caplog):
    uri = bucket + "x"
    training = Training(world, tmp_path, mirror=open_mirror(uri, tmp_path))
    save_steps(training, 1)
    save_steps(training, 2)
    assert caplog.text.count("not up to date") == 2 and bucket[5:] in caplog.text
    with pytest.raises(UserError, match="its last checkpoints are missing .*rerun to copy them"):
        training.checkpoints.finish_mirror()
    moto.make_bucket(uri[5:])
    save_steps(training, 3)
    assert mirrored(uri) == names(1, 2, 3)
    open_store(uri).delete("step-00000002.json")
    training.checkpoints.finish_mirror()
    assert mirrored(uri) == names(1, 2, 3)


def test_another_state_of_a_mirrored_step_takes_its_place(world, tmp_path):
    uri = str(tmp_path / "mirror")
    open_store(uri).check_writable()
    training = Training(world, tmp_path / "a", mirror=open_mirror(uri, tmp_path / "a"))
    save_steps(training, 1)
    training.save(finished=True)
    training.checkpoints.wait()
    new = Training(world, tmp_path / "b", mirror=open_mirror(uri, tmp_path / "b"))
    assert checkpoint.read_state(new.checkpoints.newest())["finished"]


def test_a_checkpoint_is_not_removed_while_it_is_uploaded(world, tmp_path):
    begun, opened = threading.Event(), threading.Event()

    class SlowStore(LocalStore):
        def upload(self, key: str, path: Path) -> None:
            begun.set()
            assert opened.wait(30)
            super().upload(key, path)

    folder = tmp_path / "run"
    store = SlowStore(str(tmp_path / "mirror"))
    store.check_writable()
    mirror = Mirror(store, folder, keep=1, keep_every=None, log=LOG)
    training = Training(world, folder, keep=1, mirror=mirror)
    training.advance()
    training.save()
    assert begun.wait(30)
    for _ in range(2):
        training.advance()
        training.save()  # waits for the one before, not for its upload
    training.checkpoints._finish_writing()
    assert list(whole_steps(folder)) == [1, 3]
    opened.set()
    training.checkpoints.wait()
    assert list(whole_steps(folder)) == [3]
    assert mirrored(store.uri) == names(3)
