"""The export: a drafter's config.json and model.safetensors, as serving engines load them.

Written aside as .export.partial, read back and checked (common/verify.py), and only then renamed to
export/, as a whole. What fails its check, or a disk that is full, leaves the export before it.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from common.dist import World, gather_weights
from common.drafter_config import CONFIG_FILE, WEIGHTS_FILE, DrafterConfig
from common.run import UserError, format_bytes, json_bytes, write_atomic
from common.speculators import ENDS, is_speculators, speculators_json
from common.stepfolders import REPLACED, put_in_place
from common.target_files import read_config as read_target_config
from common.verify import Check, config_checks, fault, read_shape, verify

FORMATS = ("zlab", "speculators")
DTYPE = torch.bfloat16


def export(
    folder: Path,
    *,
    model: nn.Module,
    config: DrafterConfig,
    world: World,
    layout: str,
    target: str,
    ends: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Publish the drafter as `folder`. Every rank calls it; the main one writes.

    The weights are rounded to bfloat16. `layout` is one of FORMATS; `target` and its embedding and
    head `ends` (V, H) go into a speculators export. Raises UserError on all ranks when it cannot be
    written or fails its check.
    """
    weights = gather_weights(model)
    failure = None
    if world.is_main:
        tensors = {name: tensor.to(DTYPE).contiguous() for name, tensor in weights.items()}
        del weights
        try:
            publish(folder, tensors, config, layout=layout, target=target, ends=ends)
        except UserError as error:
            failure = error
    if world.sum([float(failure is not None)])[0]:
        raise failure or UserError("the main rank could not export the drafter")


def export_config(config: DrafterConfig, *, layout: str, target: str) -> dict[str, Any]:
    """The config.json of an export. Raises UserError where its check finds anything."""
    if layout == "zlab":
        document = config.to_json()
    elif config.draft == "dflash2":
        raise UserError("--export-format speculators has no DFlash 2: take zlab")
    else:
        architectures = read_target_config(target).architectures or []
        document = speculators_json(config, target=target, target_architectures=architectures)
    refuse_findings(config_checks(document), "this drafter could not be exported")
    return document


def exported_layout(folder: Path) -> str | None:
    """Which of FORMATS an export is in; None when there is none."""
    try:
        return FORMATS[is_speculators(json.loads((folder / CONFIG_FILE).read_bytes()))]
    except (OSError, ValueError):
        return None


def publish(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: DrafterConfig,
    *,
    layout: str,
    target: str,
    ends: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write, check and rename; `tensors` are the drafter's own, as they are to be in the file."""
    document = export_config(config, layout=layout, target=target)
    stored = dict(tensors)
    if layout == "speculators":
        # clones: tied ones share memory, which safetensors refuses
        stored |= {
            name: end.detach().to("cpu", DTYPE, copy=True)
            for name, end in zip(ENDS, ends, strict=True)
        }
    partial = folder.with_name(f".{folder.name}.partial")
    replaced = folder.with_name(folder.name + REPLACED)
    try:
        if replaced.exists() and not folder.exists():  # killed between two renames
            replaced.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(stored, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        with (partial / WEIGHTS_FILE).open("rb") as file:
            os.fsync(file.fileno())
        write_atomic(partial / CONFIG_FILE, json_bytes(document))
        # safetensors lets only the owner read, and engines often run as somebody else
        shutil.copymode(partial / CONFIG_FILE, partial / WEIGHTS_FILE)
        refuse_findings([*verify(partial), compare(partial, stored, config)], _kept(folder))
        put_in_place(partial, folder)
    except (OSError, SafetensorError) as error:
        free = format_bytes(shutil.disk_usage(folder.parent).free)
        raise UserError(
            f"cannot write the export ({error}; free in {folder.parent}: {free}); {_kept(folder)}. "
            "The training is saved: make room, and rerun the same command"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _kept(folder: Path) -> str:
    return f"{folder} {'is the one before' if folder.exists() else 'is not there'}"


def compare(folder: Path, tensors: Mapping[str, torch.Tensor], config: DrafterConfig) -> Check:
    """The files against what was trained: the same bits, and the same shape and arithmetic.

    So they draft the same; that the forward of the files is right is for `verify` to say.
    """
    findings = []
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name), tensor):
                findings.append(fault(f"{name} is not as it was trained: write it again"))
    shape = read_shape(folder)
    if odd := [part.name for part in fields(config) if _differs(part.name, shape, config)]:
        findings.append(
            fault(
                f"the files draft otherwise than what was trained: config.json's {', '.join(odd)}"
            )
        )
    return Check("as trained", tuple(findings))


def _differs(name: str, read: DrafterConfig, trained: DrafterConfig) -> bool:
    if name == "sliding_window" and "sliding_attention" not in trained.layer_types:
        return False  # no layer reads it, and the file leaves it out
    return getattr(read, name) != getattr(trained, name)


def refuse_findings(checks: list[Check], what: str) -> None:
    """An export of ours is to be without a fault and without a warning."""
    found = [f"{check.name}: {finding.text}" for check in checks for finding in check.findings]
    if found:
        raise UserError(f"the export fails its check, {what}: {'; '.join(found)}")
