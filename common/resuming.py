"""What a training run goes on from, and what may differ from what it was before.

Settings are those of common/setup.py's run_settings: what is trained, not where or how fast.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import checkpoint, dist, run


def find_resume(
    args: argparse.Namespace, checkpoints: checkpoint.Checkpoints, world: dist.World
) -> Path | None:
    """The checkpoint to go on from, by --resume; None to start afresh."""
    if args.resume == "auto":
        return checkpoints.newest()
    if args.resume != "never":
        refuse_later(args, checkpoints)
        checkpoint.check_files(Path(args.resume), world, "--resume")
        return Path(args.resume)
    if where := checkpoints.occupied():
        raise run.UserError(
            f"--resume never: {where} holds checkpoints already; choose another place, or delete it"
        )
    return None


def refuse_later(args: argparse.Namespace, checkpoints: checkpoint.Checkpoints) -> None:
    """Refuse to go back while later checkpoints are there, which the next rerun would take."""
    step = checkpoint.read_state(Path(args.resume))["step"]
    if later := checkpoints.later_than(step):
        raise run.UserError(
            f"--resume {args.resume}: {later} would be taken by the next rerun; move what comes "
            "after it away, or give another --output (and --checkpoint-uri)"
        )


def refuse_changes(
    args: argparse.Namespace, where: Path | str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> set[str]:
    """Compare the settings of a run with this command's; those that --allow-change lets differ."""
    allowed = {name.strip().replace("-", "_") for name in args.allow_change.split(",")} - {""}
    if unknown := allowed - {*old, *new}:
        raise run.UsageError(f"--allow-change: no setting is called {', '.join(sorted(unknown))}")
    differing = {key for key in {*old, *new} if old.get(key) != new.get(key)}
    refused = sorted(differing - allowed)
    cure = f"allow the change: --allow-change {','.join(refused)}"
    if "draft_config" in differing:  # whatever is allowed
        refused = sorted(differing)
        cure = "start anew from its weights with --init-from: a checkpoint fits its own drafter"
    if refused:
        changed = "; ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in refused)
        raise run.UserError(
            f"{where} holds a run with other settings ({changed}).\nUse another place, or {cure}"
        )
    return differing


def former_settings(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings that a run had before these ones, by its checkpoint; none in a fresh run."""
    if old is None:
        return []
    before = old.get("former_settings", [])  # none in checkpoints of earlier versions
    return before if old["settings"] == new else [*before, old["settings"]]


def previous_settings(output: Path, old: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The settings of the run that goes on, or that `output` holds; None when there is none."""
    if old is not None:
        return old["settings"]
    path = output / "run.json"
    try:
        return json.loads(path.read_bytes())["training_settings"] if path.exists() else None
    except (ValueError, KeyError, TypeError) as error:
        raise run.UserError(
            f"{path}: not of a training run, or damaged; choose another --output, or delete it"
        ) from error
