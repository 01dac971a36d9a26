"""Checkpoints that resume to the bit, and the export that serving engines load.

A checkpoint is the folder checkpoints/step-00001000: torch.distributed.checkpoint's files (float32
weights and optimizer, one part a rank, loadable on another number of ranks) and trainer.json (step,
data cursor, horizon, health, settings). It is written under a name that starts with a dot and
renamed when whole, so a folder with the real name is a whole one. checkpoints/latest holds the
newest name.

The export is config.json and model.safetensors with the bare names of z-lab's drafters.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as safetensors_bytes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from common.dist import World
from common.drafter import DrafterConfig
from common.run import UserError, json_bytes, write_atomic

STATE_FILE = "trainer.json"
STATE_VERSION = 2


def save(
    folder: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    world: World,
) -> Path:
    """Write checkpoints/step-NNNNNNNN under `folder`, whole or not at all; every rank calls it."""
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    if world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=partial)
    if world.is_main:
        document = {**state, "step": step, "version": STATE_VERSION}
        write_atomic(partial / STATE_FILE, json_bytes(document))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        write_atomic(folder / "latest", f"{final.name}\n".encode())
    world.barrier()
    return final


def find_newest(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, whatever `latest` says; None when there is none."""
    whole = [path for path in folder.glob("step-*") if is_whole(path)]
    return max(whole, default=None)


def is_whole(path: Path) -> bool:
    """True when torch's metadata, which is written last, and the trainer's state are both there."""
    return (path / ".metadata").is_file() and (path / STATE_FILE).is_file()


def read_state(path: Path) -> dict[str, Any]:
    """The trainer.json of a checkpoint. Raises UserError when it is not a whole one."""
    if not is_whole(path):
        raise UserError(f"--resume {path}: not a whole checkpoint (no .metadata or {STATE_FILE})")
    state = json.loads((path / STATE_FILE).read_bytes())
    if state.get("version") != STATE_VERSION:
        raise UserError(
            f"{path}: checkpoint version {state.get('version')}, this trainer reads {STATE_VERSION}"
        )
    return state


def load(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state in place; every rank calls it, on any number of ranks."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)


def export(
    folder: Path,
    *,
    model: nn.Module,
    config: DrafterConfig,
    world: World,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json and model.safetensors for z-lab's class, vLLM and SGLang.

    Every rank calls it; the main one writes. The weights are rounded to `dtype`.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    if world.is_main:
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
        write_atomic(
            folder / "model.safetensors", safetensors_bytes(tensors, metadata={"format": "pt"})
        )
        write_atomic(folder / "config.json", json_bytes(config.to_json()))
    world.barrier()
