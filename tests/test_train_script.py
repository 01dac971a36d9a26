"""train_dflash_online.py: equal on any split, resumed to the bit, served as colocated."""

import fcntl
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_dflash_online
from common.checkpoint import read_state
from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.losses import LOSSES
from common.run import UserError
from tests import forked
from tests.servers import free_port
from tests.test_extract_script import serving
from tests.tiny_run import (
    ENVIRONMENT,
    TRAINER,
    assert_alike,
    assert_same_run,
    comparable,
    read_checkpoint,
    tokenize,
    train,
    training_command,
)


@pytest.fixture(scope="module")
def parts(tiny):
    return tiny


@pytest.fixture(scope="module")
def calm_run(parts, tmp_path_factory):
    """An undisturbed run of 6 steps with a checkpoint every 2."""
    _, data, target = parts
    output = tmp_path_factory.mktemp("calm") / "run"
    result = train(data, target, output, "--max-steps", "6", "--save-every", "2")
    assert result.returncode == 0, result.stderr
    return output, result


def test_a_run_leaves_what_the_readme_says(calm_run):
    output, result = calm_run
    metrics = comparable(output)
    assert [entry["step"] for entry in metrics if "loss" in entry] == list(range(1, 7))
    assert all(entry["anchors"] > 0 and entry["tokens"] > 0 for entry in metrics if "loss" in entry)
    (evaluation,) = [entry for entry in metrics if entry.get("eval_loss") and entry["step"] == 6]
    assert 1 <= evaluation["eval_walked_acceptance_length"] <= 8
    assert len(evaluation["eval_slot_accuracy"]) == 7
    facts = json.loads((output / "run.json").read_bytes())
    assert facts["counts"] == {"finished": True, "step": 6}
    assert (output / "checkpoints/latest").read_text() == "step-00000006\n"
    assert (output / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert list((output / "tensorboard").iterdir())
    for text in ("acceptance length, walked", "steps", "export"):
        assert text in result.stdout
    assert "INFO train: step=1/6 loss=" in result.stderr


def test_the_export_has_the_engines_names_and_the_trained_weights(calm_run, tmp_path):
    output, _ = calm_run
    config = DrafterConfig.from_json(json.loads((output / "export/config.json").read_bytes()))
    drafter = Drafter(config)
    tensors = load_file(output / "export/model.safetensors")
    assert set(tensors) == {name for name, _ in drafter.named_parameters()}
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    drafter.load_state_dict(tensors)
    trained = read_checkpoint(output, tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, trained[f"model.{name}"].to(torch.bfloat16)), name


def start(command, **outputs):
    return forked.Popen("train_dflash_online", command, env=ENVIRONMENT, **outputs)


def test_a_killed_run_resumes_to_the_bit(parts, calm_run, tmp_path):
    _, data, target = parts
    flags = ("--max-steps", "6", "--save-every", "2")
    command = training_command(data, target, tmp_path / "run", *flags)
    process = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "run/checkpoints/step-00000002")
    process.kill()
    process.wait()
    resumed = train(data, target, tmp_path / "run", *flags)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed=" in resumed.stderr and "step-0000000" in resumed.stderr
    assert_same_run(tmp_path / "run", calm_run[0], tmp_path)
    again = train(data, target, tmp_path / "run", *flags)
    assert again.returncode == 0 and "nothing to do" in again.stderr
    assert_same_run(tmp_path / "run", calm_run[0], tmp_path)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_saves_its_step_and_resumes_to_the_bit(
    parts, calm_run, tmp_path, signum, code
):
    _, data, target = parts
    flags = ("--max-steps", "6", "--save-every", "1000")
    command = training_command(data, target, tmp_path / "run", *flags)
    process = start(command, stderr=subprocess.PIPE)
    for line in process.stderr:
        if " step=3/6 " in line:
            process.send_signal(signal.SIGHUP)  # a dropped connection must change nothing
            process.send_signal(signum)
            break
    process.stderr.read()
    assert process.wait(timeout=60) == code
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 1
    resumed = train(data, target, tmp_path / "run", *flags[:2])
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(tmp_path / "run", calm_run[0], tmp_path)


def test_the_newest_whole_checkpoint_counts(parts, calm_run, tmp_path):
    _, data, target = parts
    flags = ("--max-steps", "6", "--save-every", "2")
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(calm_run[0]), str(run)], check=True)
    (run / "checkpoints/step-00000006/.metadata").unlink()  # as a kill while saving would
    (run / "checkpoints/latest").unlink()
    resumed = train(data, target, run, *flags)
    assert resumed.returncode == 0, resumed.stderr
    assert "step=4 " in resumed.stderr and "step-00000004" in resumed.stderr
    assert_same_run(run, calm_run[0], tmp_path)


def test_a_new_machine_goes_on_from_the_mirror(parts, calm_run, tmp_path):
    _, data, target = parts
    flags = ("--save-every", "2", "--keep", "1", "--checkpoint-uri", str(tmp_path / "mirror"))
    first = train(data, target, tmp_path / "old", "--max-steps", "6", *flags)
    assert first.returncode == 0, first.stderr
    assert (tmp_path / "mirror/step-00000006.json").exists()
    for place in (tmp_path / "old/checkpoints", tmp_path / "mirror"):
        (state,) = place.glob("step-*/trainer.json")
        assert state.parent.name == "step-00000006"
    again = train(data, target, tmp_path / "new", "--max-steps", "6", *flags)
    assert again.returncode == 0 and "resumed=" in again.stderr, again.stderr
    new = read_checkpoint(tmp_path / "new", tmp_path)
    for key, tensor in read_checkpoint(calm_run[0], tmp_path).items():
        assert torch.equal(new[key], tensor), key
    command = training_command(data, target, tmp_path / "third", "--max-steps", "6", *flags)
    with pytest.raises(UserError, match="--resume never: .*mirror holds checkpoints"):
        train_dflash_online.main([*command, "--resume", "never"])
    mine = training_command(data, target, calm_run[0], "--max-steps", "6", *flags)
    state = json.loads((tmp_path / "mirror/step-00000006/trainer.json").read_bytes())
    state["settings"]["seed"] = 9  # a mirror of another run
    (tmp_path / "mirror/step-00000006/trainer.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="mirror holds a run with other settings .seed: 9 -> 0"):
        train_dflash_online.main(mine)


def test_a_last_checkpoint_that_cannot_be_saved_ends_the_run_with_one_line(parts, tmp_path):
    _, data, target = parts
    command = training_command(data, target, tmp_path / "run", "--max-steps", "4")
    process = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (150_000, 150_000))  # a full disk
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1, said
    last = said.splitlines()[-1]
    assert "error: the last checkpoint was not saved: rank 0: File too large" in last
    assert "Traceback" not in said
    assert not list((tmp_path / "run/checkpoints").glob("*step*"))


def test_a_damaged_checkpoint_is_passed_over(parts, calm_run, tmp_path):
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(calm_run[0]), str(run)], check=True)
    (weights,) = (run / "checkpoints/step-00000006").glob("*.distcp")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    resumed = train(parts[1], parts[2], run, "--max-steps", "6", "--save-every", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{weights.name} is not as it was written; it is passed over" in resumed.stderr
    assert "starting step=4" in resumed.stderr
    assert_same_run(run, calm_run[0], tmp_path)
    command = training_command(parts[1], parts[2], run, "--max-steps", "6")
    for weights in (run / "checkpoints").glob("step-*/*.distcp"):
        weights.write_bytes(data)
    newest = str(run / "checkpoints/step-00000006")
    for flags, message in (((), "none of its"), (("--resume", newest), "distcp is not as it was")):
        with pytest.raises(UserError, match=message):
            train_dflash_online.main([*command, *flags])


def test_a_run_may_be_made_longer_but_not_go_back_among_its_checkpoints(parts, calm_run, tmp_path):
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(calm_run[0]), str(run)], check=True)
    flags = ("--save-every", "2", "--allow-change", "max_steps", "--max-steps", "8")
    back = train(
        parts[1], parts[2], run, *flags, "--resume", str(run / "checkpoints/step-00000002")
    )
    assert back.returncode == 1
    assert "would be taken by the next rerun" in back.stderr.splitlines()[-1]
    longer = train(parts[1], parts[2], run, *flags)
    assert longer.returncode == 0, longer.stderr
    assert "starting step=6 horizon=8" in longer.stderr
    before = read_state(run / "checkpoints/step-00000008")["cursor"]
    flags = ("--max-steps", "9", "--pack-length", "384", "--allow-change", "max_steps,pack_length")
    other = train(parts[1], parts[2], run, *flags)
    assert other.returncode == 0, other.stderr
    after = read_state(run / "checkpoints/step-00000009")["cursor"]
    assert before["step"] > 1 and after == {**before, "step": 1}  # its shard is packed anew
    odd = train(parts[1], parts[2], run, "--allow-change", "bogus")
    assert odd.returncode == 2 and "no setting is called bogus" in odd.stderr


def test_served_hidden_states_train_the_same_drafter(parts, calm_run, tmp_path):
    _, data, target = parts
    flags = ("--max-steps", "6", "--save-every", "2")
    with serving(str(target)) as server:
        address = server.stdout.readline().strip()
        result = train(data, target, tmp_path / "run", *flags, "--hidden-states", address)
        assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "run", calm_run[0], tmp_path)


def train_and_kill(parts, output, server, *addresses):
    """Start a run of six steps on servers, and kill one of them after the first step."""
    _, data, target = parts
    flags = ("--max-steps", "6", "--save-every", "2", "--prefetch", "1")
    command = training_command(data, target, output, *flags, "--hidden-states", ",".join(addresses))
    trainer = start(command, stderr=subprocess.PIPE)
    for line in trainer.stderr:
        if " step=1/" in line:
            server.kill()
            server.wait()
            return trainer
    raise AssertionError("no step came")


def test_a_killed_server_of_two_changes_nothing(parts, calm_run, tmp_path):
    target = str(parts[2])
    with serving(target) as one, serving(target) as two:
        addresses = [server.stdout.readline().strip() for server in (one, two)]
        trainer = train_and_kill(parts, tmp_path / "run", one, *addresses)
        said = trainer.communicate(timeout=120)[1]
        assert trainer.returncode == 0, said
    assert_same_run(tmp_path / "run", calm_run[0], tmp_path)


def test_the_only_server_may_be_killed_and_come_back(parts, calm_run, tmp_path):
    target = str(parts[2])
    with serving(target) as server:
        address = server.stdout.readline().strip()
        trainer = train_and_kill(parts, tmp_path / "run", server, address)
    with serving(target, port=int(address.rpartition(":")[2])):
        said = trainer.communicate(timeout=120)[1]
        assert trainer.returncode == 0, said
    assert_same_run(tmp_path / "run", calm_run[0], tmp_path)


def train_on_two_nodes(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Two launchers that meet as those of two machines would: exit codes and stderr."""
    rendezvous = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [*(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
             *("--rdzv-backend=c10d", "--rdzv-id=two-nodes", rendezvous, TRAINER), *command],
            env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        )
        for command in commands
    ]  # fmt: skip
    said = [node.communicate(timeout=240)[1] for node in nodes]
    return [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]


@pytest.mark.parametrize("split", ["1 rank x 4 packs", "2 nodes x 2 packs"])
def test_the_split_over_ranks_and_micro_batches_changes_nothing(parts, calm_run, tmp_path, split):
    _, data, target = parts
    flags = ("--max-steps", "6", "--micro-batch", split.split()[3])
    if split.startswith("1"):
        result = train(data, target, tmp_path / "run", *flags)
        assert result.returncode == 0, result.stderr
    else:
        command = training_command(data, target, tmp_path / "run", *flags)
        for code, said in train_on_two_nodes([command, command]):
            assert code == 0, said
    assert_alike(calm_run[0], tmp_path / "run", rel=1e-4, abs=1e-5)
    first = [entry for entry in comparable(tmp_path / "run") if "loss" in entry][0]
    want = [entry for entry in comparable(calm_run[0]) if "loss" in entry][0]
    assert first["loss"] == pytest.approx(want["loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_nodes_that_share_no_run_folder_are_refused(parts, tmp_path):
    _, data, target = parts
    apart = [training_command(data, target, tmp_path / name) for name in ("one", "other")]
    for code, said in train_on_two_nodes(apart):
        assert code == 1 and "must be one folder that the machines of all ranks share" in said


def test_gradients_are_equal_on_any_split(parts, tmp_path):
    """Two ranks on gloo, or other micro-batches: the same losses and gradients to 1e-5."""
    _, _, target = parts
    found = {}
    for ranks, sizes in ((1, ("1", "4")), (2, ("1", "2"))):
        output = tmp_path / f"{ranks}"
        result = forked.run_ranks(
            "tests.gradients", ["dflash", target, output, *sizes], ranks=ranks, env=ENVIRONMENT,
            timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        for kind, size in itertools.product(LOSSES, sizes):
            found[kind, ranks, int(size)] = load_file(f"{output}-{kind}-{size}.safetensors")
    assert len(found) == 4 * len(LOSSES)
    for (kind, *split), tensors in found.items():
        want = found[kind, 1, 1]
        assert all(gradient.abs().max() > 0 for gradient in want.values())
        for name, tensor in want.items():
            torch.testing.assert_close(
                tensors[name], tensor, atol=1e-5, rtol=1e-5, msg=f"{kind} {split} {name}"
            )


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "ce"])
def test_every_loss_trains(parts, calm_run, tmp_path, kind):
    _, data, target = parts
    flags = ("--max-steps", "4", "--loss", kind)
    result = train(data, target, tmp_path / "run", *flags)
    assert result.returncode == 0, result.stderr
    losses = [entry["loss"] for entry in comparable(tmp_path / "run") if "loss" in entry]
    assert losses[-1] < losses[0] and len(losses) == 4
    assert losses[0] != comparable(calm_run[0])[0]["loss"]
    settings = json.loads((tmp_path / "run/run.json").read_bytes())["training_settings"]
    assert (settings["loss"], settings["gamma"]) == (kind, 4.0)


def test_a_loss_with_a_teacher_asks_its_server_for_the_last_states(parts, tmp_path):
    _, data, target = parts
    flags = ("--max-steps", "2", "--loss", "kd")
    assert train(data, target, tmp_path / "beside", *flags).returncode == 0
    for output, server_flags in (("served", ["--final"]), ("refused", [])):
        with serving(str(target), *server_flags) as server:
            address = server.stdout.readline().strip()
            result = train(data, target, tmp_path / output, *flags, "--hidden-states", address)
            if server_flags:
                assert result.returncode == 0, result.stderr
                assert_same_run(tmp_path / "served", tmp_path / "beside", tmp_path)
            else:
                assert result.returncode == 1
                last = result.stderr.splitlines()[-1]
                assert "--loss kd" in last and address in last and "--final" in last


def test_the_position_decay_follows_the_loss_unless_it_is_given():
    flags = ["--data", "x", "--target", "x", "--output", "x"]
    for more, want in (
        ((), 7.0),
        (("--loss", "kd"), 7.0),
        (("--loss", "dpace"), 0.0),
        (("--loss", "dpace", "--gamma", "4"), 4.0),
        (("--gamma", "0"), 0.0),
    ):
        assert train_dflash_online.parse_args([*flags, *more]).gamma == want


def test_one_ranks_checkpoint_resumes_on_two(parts, calm_run, tmp_path):
    _, data, target = parts
    flags = ("--max-steps", "6", "--save-every", "2")
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(calm_run[0]), str(run)], check=True)
    subprocess.run(["rm", "-r", str(run / "checkpoints/step-00000006")], check=True)
    assert train(data, target, run, *flags, ranks=2).returncode == 0
    assert_alike(calm_run[0], run, rel=1e-4, abs=1e-5)


def test_training_starts_with_the_first_shard_and_waits_for_the_others(parts, calm_run, tmp_path):
    inputs, _, target = parts
    command = [
                *training_command(tmp_path / "data", target, tmp_path / "run", "--max-steps", "6",
                          "--save-every", "2"),
    ]  # fmt: skip
    process = start(command, stderr=subprocess.PIPE)
    seen = []

    def tokenize_shards(part: str) -> None:
        tokenize(inputs, tmp_path / "data", target, "--shards", part)

    for line in process.stderr:
        seen.append(line)
        if "waiting for='plan.json'" in line:
            threading.Thread(target=tokenize_shards, args=("0:1",)).start()
        if " step=1/6 " in line:  # the others appear only because shard 0 was trained on
            threading.Thread(target=tokenize_shards, args=("1:3",)).start()
    assert process.wait(timeout=60) == 0, "".join(seen)
    assert any("waiting for='shard 1'" in text for text in seen)
    assert_same_run(tmp_path / "run", calm_run[0], tmp_path)


def test_long_rows_from_s3_are_cut_and_each_shard_has_its_line(parts, moto, tmp_path, monkeypatch):
    _, _, target = parts
    for name, value in moto.environment.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
        monkeypatch.setenv(name, value)
    (tmp_path / "in").mkdir()
    lines = []
    for row in range(24):
        content = " ".join(str(number) for number in range(10 + 5 * row))
        messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": content}]
        lines.append(json.dumps({"id": f"row-{row}", "messages": messages}))
    (tmp_path / "in/0.jsonl").write_text("\n".join(lines) + "\n")
    data = moto.make_bucket("long-rows")
    tokenize(tmp_path / "in", data, target, "--num-shards", "2")
    result = train(
        data, target, tmp_path / "run", "--pack-length", "128", "--epochs", "2", "--cache-gb", "0.1"
    )
    assert result.returncode == 0, result.stderr
    said = [line.partition("train: ")[2] for line in result.stderr.splitlines()]
    packed = [line for line in said if line.startswith("epoch=")]
    assert len(packed) == 4, "two shards, twice"
    assert all("cut_rows=" in line and "fill=" in line for line in packed)
    assert any("cut_rows=0" not in line for line in packed)
    assert len(list((tmp_path / "run/cache").rglob("*.arrow"))) == 2


def test_other_settings_in_the_same_folder_are_refused(parts, calm_run, tmp_path):
    _, data, target = parts
    before = sorted(path.name for path in calm_run[0].rglob("*"))
    for flag, value in (
        ("--seed", "1"),
        ("--anchor-ratio", "0.3"),
        ("--eval-rows", "9"),
        ("--learning-rate", "1e-3"),
        ("--loss", "dpace"),
    ):
        name = flag.removeprefix("--").replace("-", "_")
        command = training_command(data, target, calm_run[0], "--max-steps", "6", flag, value)
        with pytest.raises(UserError, match=f"{name}: .* -> .*") as refused:
            train_dflash_online.main(command)
        assert "--allow-change" in str(refused.value)
    assert sorted(path.name for path in calm_run[0].rglob("*")) == before
    allowed = train(data, target, calm_run[0], "--max-steps", "6", "--eval-rows", "9",
                    "--allow-change", "eval-rows")  # fmt: skip
    assert allowed.returncode == 0 and "nothing to do" in allowed.stderr
    never = train(data, target, calm_run[0], "--max-steps", "6", "--resume", "never")
    assert never.returncode == 1 and "--resume never" in never.stderr


def test_a_second_trainer_in_the_same_folder_is_refused(parts, tmp_path):
    _, data, target = parts
    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another trainer"):
            train_dflash_online.main(training_command(data, target, tmp_path / "run"))


def test_servers_that_stay_away_end_the_run_with_its_steps_saved(parts, tmp_path):
    _, data, target = parts
    with serving(str(target)) as server:
        address = server.stdout.readline().strip()
        command = training_command(
            data, target, tmp_path / "run", "--epochs", "1000", "--hidden-states", address,
            "--server-timeout", "2", "--prefetch", "1",
        )  # fmt: skip
        trainer = start(command, stderr=subprocess.PIPE)
        for line in trainer.stderr:
            if " step=2/" in line:
                server.kill()
                break
        rest = trainer.stderr.read()
    assert trainer.wait(timeout=60) == 1
    assert "no hidden-state server for 2 s" in rest.splitlines()[-1] and address in rest
    assert "Traceback" not in rest
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 1


def test_mistakes_are_one_or_two_lines(parts, tmp_path, capsys, monkeypatch):
    inputs, data, target = parts
    dead = f"127.0.0.1:{free_port()}"
    (tmp_path / "void").mkdir()
    none = tokenize(inputs, tmp_path / "none", target, "--mask-token", "none")
    cases = [
        (data, target, ("--output", "s3://bucket/run"), 2, "--output"),
        (data, target, ("--pack-length", "300"), 2, "--pack-length"),
        (data, target, ("--block-size", "1"), 2, "--block-size"),
        (data, target, ("--attention", "flex"), 2, "--attention"),
        (data, target, ("--global-batch", "3", "--micro-batch", "2"), 2, "--global-batch"),
        (data, target, ("--layers", "0,3"), 2, "--layers"),
        (data, target, ("--resume", str(tmp_path / "void")), 1, "--resume"),
        (data, target, ("--draft-config", str(tmp_path / "void/x")), 1, "--draft-config"),
        (data, tmp_path / "void", (), 1, "--target"),
        (none, target, (), 1, "--mask-token"),
        (data, target, ("--eval-fraction", "1"), 1, "--eval-fraction"),
        (data, target, ("--eval-fraction", "1", "--dry-run"), 1, "--dry-run"),
        (tmp_path / "void", target, ("--shard-timeout", "0.1"), 1, "plan.json"),
        (data, target, ("--hidden-states", dead, "--server-timeout", "1"), 1, dead),
        ("s3://x/y", target, ("--endpoint-url", f"http://{dead}"), 1, "--endpoint-url"),
    ]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    for number, (data_, target_, flags, code, message) in enumerate(cases):
        command = training_command(data_, target_, tmp_path / f"run{number}", *flags)
        with pytest.raises((UserError, SystemExit)) as caught:
            train_dflash_online.main(command)
        error = caught.value
        found = error.exit_code if isinstance(error, UserError) else error.code
        text = str(error) if isinstance(error, UserError) else capsys.readouterr().err
        assert found == code, (flags, text)
        assert message in text.splitlines()[-1] and len(str(error).splitlines()) <= 2, (flags, text)
    wrong = train(data, target, tmp_path / "run", "--pack-length", "300")
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) <= 2, wrong.stderr
    result = train(tmp_path / "void", target, tmp_path / "run", "--shard-timeout", "0.1")
    assert result.returncode == 1
    assert "plan.json did not appear" in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_lost_rank_ends_the_others_with_its_number(parts, tmp_path):
    _, data, target = parts
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(TRAINER, *training_command(data, target, tmp_path / "run", "--epochs", "1000")),
    ]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if " step=5/" in line:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            ranks = {int(environment_of(child)["RANK"]): int(child) for child in children}
            os.kill(ranks[1], signal.SIGSTOP)
            break
    began = time.monotonic()
    rest = process.stderr.read()
    process.wait(timeout=90)
    assert time.monotonic() - began < 75
    assert "rank 1 gave no sign of life" in rest


def environment_of(pid: str) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
