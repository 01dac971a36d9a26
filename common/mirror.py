"""Checkpoints copied into a store, so that a run survives the loss of its machine.

    <uri>/step-00001000/__0_0.distcp ...   the files of the checkpoint
    <uri>/step-00001000.json               its commit record, put last: {"version", "files":
                                           [{"name", "bytes", "sha256"}, ...]}

A checkpoint exists here when its record does: it is deleted first, and put last. What is kept
follows the same rule as in the run folder. One run uses a uri at a time.
"""

import contextlib
import json
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.run import UserError, json_bytes
from common.stepfolders import (
    STATE_FILE,
    file_facts,
    is_whole,
    kept_steps,
    partial_path,
    put_in_place,
    remove,
    step_name,
    step_of,
    whole_steps,
    written_files,
)
from common.store import ObjectMissing, Store

RECORD_VERSION = 1


class Mirror:
    """The copies in `store` of the checkpoints in `folder`, made beside training by one process."""

    def __init__(
        self, store: Store, folder: Path, *, keep: int, keep_every: int | None, log: Any
    ) -> None:
        self.uri, self._store, self._folder, self._log = store.uri, store, folder, log
        self._keep, self._keep_every = keep, keep_every
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._update: Future[str | None] | None = None  # of what went wrong
        self._lock = threading.Lock()
        self._held: Path | None = None  # being uploaded, not to be removed meanwhile
        self._unwanted = False  # whether the held one is to be removed afterwards

    def update(self) -> None:
        """Upload what is missing, in the background; what fails is tried again next time."""
        self._update = self._pool.submit(self._upload_missing)

    def wait(self) -> str | None:
        """Wait for the updates so far; what went wrong with the last one, if anything."""
        return None if self._update is None else self._update.result()

    def remove(self, path: Path) -> None:
        """Delete a checkpoint of the folder; one that is being uploaded goes afterwards."""
        with self._lock:
            if path == self._held:
                self._unwanted = True
            else:
                remove(path)

    def steps(self) -> list[int]:
        """The steps of the checkpoints in the store, in order."""
        return _committed(self._keys())

    def newest_state(self) -> dict[str, Any] | None:
        """The trainer.json of the newest checkpoint in the store that has a readable one."""
        for step in reversed(self.steps()):
            with contextlib.suppress(ObjectMissing, ValueError):
                state = json.loads(self._store.read(f"{step_name(step)}/{STATE_FILE}"))
                if isinstance(state, dict):
                    return state
        return None

    def download_newest(self) -> Path | None:
        """Copy the newest checkpoint into the folder; None when the store holds none.

        One that does not match its record is passed over with a warning. Raises UserError when
        none does.
        """
        damages = []
        for step in reversed(self.steps()):
            partial = partial_path(self._folder, step)
            try:
                self._download(step, partial)
            except _Damaged as damage:
                damages.append(str(damage))
                self._log.warning(f"{damage}; taking the one before")
                shutil.rmtree(partial, ignore_errors=True)
                continue
            final = self._folder / step_name(step)
            put_in_place(partial, final)
            return final
        if damages:
            raise UserError(f"{damages[0]}, nor is any other whole: choose another mirror")
        return None

    def _keys(self) -> list[str]:
        return [entry.key for entry in self._store.list("step-")]

    # ---- from the store

    def _download(self, step: int, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        for name, entry in self._recorded_files(step).items():
            key, path = f"{step_name(step)}/{name}", partial / name
            if path.parent != partial:
                raise _Damaged(f"{self.uri}: {name!r} is no file of a checkpoint")
            try:
                self._store.download(key, path)
            except ObjectMissing as error:
                raise _Damaged(str(error)) from error
            if _entry(path, file_facts(path)) != entry:
                raise _Damaged(f"{self.uri}: {key} is not what its record says")

    def _recorded_files(self, step: int) -> dict[str, dict[str, Any]]:
        """The entries of a checkpoint's record, by name."""
        key = f"{step_name(step)}.json"
        try:
            record = json.loads(self._store.read(key))
            version, files = record["version"], {file["name"]: file for file in record["files"]}
        except (ObjectMissing, ValueError, KeyError, TypeError) as error:
            raise _Damaged(f"{self.uri}: {key} cannot be read ({error!r})") from error
        if version != RECORD_VERSION:
            raise UserError(
                f"{self.uri}: {key} has version {version}, this trainer reads {RECORD_VERSION}"
            )
        return files

    # ---- into the store

    def _upload_missing(self) -> str | None:
        try:
            while (found := self._hold_next_missing()) is not None:
                try:
                    self._upload(*found)
                finally:
                    self._let_go()
            self._prune()
        except (UserError, OSError) as error:
            self._log.warning(
                f"--checkpoint-uri {self.uri}: not up to date ({error}); trying again after the "
                "next checkpoint"
            )
            return str(error)
        return None

    def _hold_next_missing(self) -> tuple[int, Path] | None:
        """The newest checkpoint of the folder that belongs into the store and is not there."""
        committed = _committed(self._keys())
        here = whole_steps(self._folder)
        kept = kept_steps({*here, *committed}, keep=self._keep, keep_every=self._keep_every)
        for step in sorted(kept & here.keys(), reverse=True):
            path = here[step]
            if (step not in committed or not self._is_current(step, path)) and self._hold(path):
                return step, path
        return None

    def _hold(self, path: Path) -> bool:
        """Keep a checkpoint from being removed; False when it is gone already."""
        with self._lock:
            if is_whole(path):
                self._held = path
            return self._held is not None

    def _let_go(self) -> None:
        with self._lock:
            if self._held is not None and self._unwanted:
                remove(self._held)
            self._held, self._unwanted = None, False

    def _is_current(self, step: int, path: Path) -> bool:
        """Whether the record is of this checkpoint, not of one of the same step and other state."""
        try:
            state = path / STATE_FILE
            return self._recorded_files(step).get(STATE_FILE) == _entry(state, file_facts(state))
        except (_Damaged, FileNotFoundError):  # removed since the listing
            return False

    def _upload(self, step: int, path: Path) -> None:
        self._store.delete(f"{step_name(step)}.json")
        files: list[Mapping[str, Any]] = []
        written = written_files(path) or {}  # these were read for it when they were saved
        for part in sorted(path.iterdir()):
            # Before the upload: a state rewritten meanwhile then differs from its record, and the
            # update that follows the rewriting makes it good.
            files.append(_entry(part, written.get(part.name) or file_facts(part)))
            self._store.upload(f"{step_name(step)}/{part.name}", part)
        record = {"version": RECORD_VERSION, "files": files}
        self._store.write(f"{step_name(step)}.json", json_bytes(record))
        self._log.info(f"step={step} mirrored={self.uri}")

    def _prune(self) -> None:
        """Delete records that the rule does not keep, then all files without a record."""
        keys = self._keys()
        committed = _committed(keys)
        kept = kept_steps(committed, keep=self._keep, keep_every=self._keep_every)
        for step in committed:
            if step not in kept:
                self._store.delete(f"{step_name(step)}.json")
        for key in keys:
            name, is_file, _ = key.partition("/")
            if is_file and step_of(name) not in kept:
                self._store.delete(key)


class _Damaged(Exception):
    """A checkpoint in the store that does not match its record."""


def _committed(keys: list[str]) -> list[int]:
    """The steps whose records are among the keys."""
    names = (key.removesuffix(".json") for key in keys if key.endswith(".json"))
    return sorted(step for name in names if (step := step_of(name)) is not None)


def _entry(file: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A file in a record."""
    return {"name": file.name, **facts}
