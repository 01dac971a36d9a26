"""A few steps of the trainer on one GPU: bf16, compiled flex attention, NCCL, export."""

import train_dflash_online
from tests.test_train_script import comparable
from tests.tiny_run import make_inputs, make_target, tokenize, training_command


def test_a_run_on_cuda_learns_and_exports(tmp_path):
    target = make_target(tmp_path / "target")
    data = tokenize(make_inputs(tmp_path / "in"), tmp_path / "data", target)
    command = training_command(data, target, tmp_path / "run", "--max-steps", "12")
    assert train_dflash_online.main(command) == 0
    losses = [entry["loss"] for entry in comparable(tmp_path / "run") if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "run/export/model.safetensors").exists()
