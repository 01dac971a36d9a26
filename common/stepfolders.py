"""The folder of a run's checkpoints: names, which of them are whole, and which are kept.

A checkpoint is the folder step-00001000. Whatever is under way or on its way out has a name that
starts with a dot, so that a kill at any moment leaves whole checkpoints and dotted leftovers.
step-00001000.replaced is a whole one whose place another of the same step takes just then.
"""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.cache import file_sha256

STATE_FILE = "trainer.json"
METADATA_FILE = ".metadata"  # torch's, which it writes after the ranks' files
REPLACED = ".replaced"


def step_name(step: int) -> str:
    """The name of a step's checkpoint folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None when it is none."""
    found = re.fullmatch(r"step-(\d{8,})", name)
    return int(found[1]) if found else None


def is_whole(path: Path) -> bool:
    """True when torch's metadata and the trainer's state are both there."""
    return (path / METADATA_FILE).is_file() and (path / STATE_FILE).is_file()


def file_facts(file: Path) -> dict[str, Any]:
    """Size and sha256 of a checkpoint's file, as trainer.json and a mirror's record keep them."""
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def written_files(path: Path) -> dict[str, dict[str, Any]] | None:
    """What trainer.json says of a checkpoint's other files, by name; None when it is damaged."""
    try:
        return json.loads((path / STATE_FILE).read_bytes())["files"]
    except (ValueError, KeyError, TypeError):
        return None


def damaged_file(path: Path) -> str | None:
    """A file of a checkpoint that is not as it was written; None when all are."""
    files = written_files(path)
    if files is None:
        return STATE_FILE
    for name, facts in files.items():
        file = path / name
        same_size = file.is_file() and file.stat().st_size == facts["bytes"]
        if not same_size or file_facts(file) != facts:
            return name
    return None


def whole_steps(folder: Path) -> dict[int, Path]:
    """The whole checkpoints in `folder`, by step, in order."""
    found = {}
    for path in folder.glob(f"step-*{REPLACED}"):
        step = step_of(path.name.removesuffix(REPLACED))
        if step is not None and is_whole(path):
            found[step] = path
    for path in folder.glob("step-*"):
        step = step_of(path.name)
        if step is not None and is_whole(path):
            found[step] = path
    return dict(sorted(found.items()))


def find_newest(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, whatever `latest` says; None when there is none."""
    return next(reversed(whole_steps(folder).values()), None)


def kept_steps(steps: Iterable[int], *, keep: int, keep_every: int | None) -> set[int]:
    """Which checkpoints to keep: the `keep` newest, and those at multiples of `keep_every`."""
    ordered = sorted(steps)
    always = {step for step in ordered if keep_every is not None and step % keep_every == 0}
    return always | set(ordered[-keep:])


def put_in_place(partial: Path, final: Path) -> None:
    """Give a whole checkpoint its name; an older one of the same name goes, never both."""
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a checkpoint; a kill meanwhile leaves nothing that looks whole."""
    hidden = path.rename(path.with_name(f".{path.name}.removed"))
    shutil.rmtree(hidden, ignore_errors=True)


def partial_path(folder: Path, step: int) -> Path:
    """Where a checkpoint is written until it is whole."""
    return folder / f".{step_name(step)}.partial"


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left under way in `folder`."""
    for path in folder.glob(".step-*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in folder.glob(f"step-*{REPLACED}"):
        if is_whole(path.with_suffix("")):
            shutil.rmtree(path, ignore_errors=True)
