"""Checkpoints that resume to the bit.

A checkpoint is the folder checkpoints/step-00001000: torch.distributed.checkpoint's files (float32
weights and optimizer, one part a rank, loadable on another number of ranks) and trainer.json (step,
data cursor, horizon, health, settings, size and sha256 of each file). It is written under a name
that starts with a dot and renamed when whole, so a folder with the real name is a whole one.
checkpoints/latest holds the newest name.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from common.dist import World
from common.mirror import Mirror
from common.run import UserError, format_bytes, json_bytes, write_atomic
from common.stepfolders import (
    STATE_FILE,
    damaged_file,
    file_facts,
    find_newest,
    is_whole,
    kept_steps,
    partial_path,
    put_in_place,
    remove,
    remove_leftovers,
    step_name,
    whole_steps,
)

STATE_VERSION = 2

# A world of one saves without a process group on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


class Checkpoints:
    """The checkpoints of a run: written beside training, the old ones removed, mirrored.

    Every rank calls save and wait at the same steps. A checkpoint that cannot be written is a
    warning: the ones before stay, and the next save tries again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        keep: int,
        keep_every: int | None,
        mirror: Mirror | None,
        log: Any,
    ) -> None:
        self._folder, self._world, self._log = folder, world, log
        self._keep, self._keep_every, self._mirror = keep, keep_every, mirror
        self._group = world.new_cpu_group()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[str | None] | None = None  # of what went wrong
        self._written: int | None = None  # the last step that this process wrote whole
        self._files: dict[str, Any] = {}  # of it

    def newest(self) -> Path | None:
        """The newest whole checkpoint; None when there is none. Every rank calls it.

        A folder without any, as on a new machine, gets the newest one of the mirror first.
        """
        # the main rank alone reads the gigabytes, and has a mirror
        failure, found = None, self._newest_sound() if self._world.is_main else None
        if self._mirror is not None and found is None:
            try:
                found = self._mirror.download_newest()  # as its record says
            except UserError as error:
                failure = error
        unsound = self._world.is_main and found is None and whole_steps(self._folder)
        if failure is None and unsound:
            failure = UserError(
                f"{self._folder}: none of its checkpoints is as it was written; move them away to "
                "start afresh"
            )
        if not self._world.agree(failure is None):
            raise failure or UserError("the main rank found no checkpoint that is sound")
        self._world.barrier()
        heard = [found]
        if self._group is not None:
            torch.distributed.broadcast_object_list(heard, src=0, group=self._group)
        return heard[0]

    def _newest_sound(self) -> Path | None:
        """The newest whole checkpoint whose files are as they were written."""
        for path in reversed(whole_steps(self._folder).values()):
            odd = damaged_file(path)
            if odd is None:
                return path
            self._log.warning(f"{path}: {odd} is not as it was written; it is passed over")
        return None

    def occupied(self) -> str | None:
        """Which place holds checkpoints already: the folder, or the mirror; None when neither."""
        if find_newest(self._folder) is not None:
            return str(self._folder)
        if self._mirror is not None and self._mirror.steps():
            return self._mirror.uri
        return None

    def later_than(self, step: int) -> str | None:
        """A checkpoint after `step`, in the folder or the mirror; None when there is none."""
        for later, path in whole_steps(self._folder).items():
            if later > step:
                return str(path)
        if self._mirror is not None and any(later > step for later in self._mirror.steps()):
            return f"step {max(self._mirror.steps())} in {self._mirror.uri}"
        return None

    def mirrored_state(self) -> dict[str, Any] | None:
        """The trainer.json of the mirror's newest checkpoint; None when there is none."""
        return None if self._mirror is None else self._mirror.newest_state()

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
    ) -> None:
        """Take a copy of this moment's state and write it in the background.

        Waits for the checkpoint before, so that one copy at most lies in memory.
        """
        self._finish_writing()
        document = {**state, "step": step, "version": STATE_VERSION}
        if step == self._written:  # the weights are there, only what is said about them changes
            self._writing = self._pool.submit(self._rewrite_state, step, document)
            return
        weights, optimizer_state = get_state_dict(model, optimizer)
        copied = copy_to_cpu({"model": weights, "optimizer": optimizer_state})
        self._writing = self._pool.submit(self._write, step, copied, document)

    def wait(self) -> None:
        """Wait until the last checkpoint and its copy in the mirror are done.

        Raises UserError when that checkpoint could not be written.
        """
        failure = self._finish_writing()
        if self._mirror is not None:
            self._mirror.wait()
        if failure is not None:
            raise UserError(
                f"the last checkpoint was not saved: {failure}. Rerun to go on from the one before"
            )

    def finish_mirror(self) -> None:
        """Bring the mirror, if there is one, up to the folder. Raises UserError when it cannot."""
        if self._mirror is None:
            return
        self._mirror.update()
        failure = self._mirror.wait()
        if failure is not None:
            raise UserError(
                f"--checkpoint-uri {self._mirror.uri}: its last checkpoints are missing "
                f"({failure}). All else is done; rerun to copy them"
            )

    def close(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        self._finish_writing()
        self._pool.shutdown()
        if self._mirror is not None:
            self._mirror.wait()

    def _finish_writing(self) -> str | None:
        """Wait for the checkpoint under way; what went wrong with the last one, if anything."""
        return None if self._writing is None else self._writing.result()

    # ---- in the background, on all ranks alike

    def _write(self, step: int, copied: dict[str, Any], document: dict[str, Any]) -> str | None:
        partial = partial_path(self._folder, step)

        def prepare() -> None:
            remove_leftovers(self._folder)
            partial.mkdir(parents=True)

        def commit() -> None:
            self._files = {file.name: file_facts(file) for file in sorted(partial.iterdir())}
            write_atomic(partial / STATE_FILE, with_files(document, self._files))
            put_in_place(partial, self._folder / step_name(step))

        failure = (
            self._on_main(prepare) or self._write_parts(partial, copied) or self._on_main(commit)
        )
        if failure is not None:
            self._give_up(step, failure)
        else:
            self._written = step
            self._follow(step)
        return failure

    def _rewrite_state(self, step: int, document: dict[str, Any]) -> str | None:
        path = self._folder / step_name(step) / STATE_FILE
        failure = self._on_main(lambda: write_atomic(path, with_files(document, self._files)))
        if failure is not None:
            self._give_up(step, failure)
        else:
            self._follow(step)
        return failure

    def _write_parts(self, partial: Path, copied: dict[str, Any]) -> str | None:
        """Write this rank's tensors, and torch's metadata at the end; what went wrong anywhere."""
        try:
            dcp.save(
                copied,
                storage_writer=_Writer(partial),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:  # the same on all ranks
            rank, (cause, _) = next(iter(error.failures.items()))
            return f"rank {rank}: {_one_line(cause)}"
        return None

    def _on_main(self, work: Callable[[], None]) -> str | None:
        """Do it on the main rank; every rank hears what went wrong, if anything."""
        heard: list[str | None] = [None]
        if self._world.is_main:
            try:
                work()
            except OSError as error:
                heard = [_one_line(error)]
        if self._group is not None:
            torch.distributed.broadcast_object_list(heard, src=0, group=self._group)
        return heard[0]

    def _follow(self, step: int) -> None:
        """After a whole checkpoint: it is named, older ones go, the mirror is brought up to it."""
        if not self._world.is_main:
            return
        self._log.info(f"step={step} saved={self._folder / step_name(step)}")
        try:
            write_atomic(self._folder / "latest", f"{step_name(step)}\n".encode())
            self._prune(step)
        except OSError as error:
            self._log.warning(f"{self._folder}: {error}")
        if self._mirror is not None:
            self._mirror.update()

    def _prune(self, newest: int) -> None:
        # Later steps, of a run that went on from here before, are not this run's to judge.
        steps = {step: path for step, path in whole_steps(self._folder).items() if step <= newest}
        kept = kept_steps(steps, keep=self._keep, keep_every=self._keep_every)
        for step in steps.keys() - kept:
            if self._mirror is not None:
                self._mirror.remove(steps[step])
            else:
                remove(steps[step])

    def _give_up(self, step: int, failure: str) -> None:
        if not self._world.is_main:
            return
        shutil.rmtree(partial_path(self._folder, step), ignore_errors=True)
        free = format_bytes(shutil.disk_usage(self._folder.parent).free)
        self._log.warning(
            f"step={step} not saved: {failure} (free in {self._folder}: {free}); the checkpoints "
            "before it stay, the next save tries again"
        )


class _Writer(dcp.FileSystemWriter):
    """torch's, but a full disk is named so, and not "unexpected pos 704 vs 598"."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None


def copy_to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict in CPU memory, sharded tensors still sharded."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copied = stager.stage(state)
    stager.close()
    assert isinstance(copied, dict)  # not a Future: staging is not asynchronous
    return copied


def with_files(document: Mapping[str, Any], files: Mapping[str, Any]) -> bytes:
    """A state.json whose `files` tell each file's size and sha256."""
    return json_bytes({**document, "files": files})


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0]


def read_state(path: Path, flag: str = "--resume") -> dict[str, Any]:
    """The trainer.json of a checkpoint. Raises UserError when it is not a whole one."""
    if not is_whole(path):
        raise UserError(f"{flag} {path}: not a whole checkpoint (no .metadata or {STATE_FILE})")
    try:
        state = json.loads((path / STATE_FILE).read_bytes())
    except ValueError as error:
        raise UserError(f"{flag} {path}: its {STATE_FILE} is damaged") from error
    if state.get("version") != STATE_VERSION:
        raise UserError(
            f"{path}: checkpoint version {state.get('version')}, this trainer reads {STATE_VERSION}"
        )
    return state


def check_files(path: Path, world: World, flag: str) -> None:
    """Raise UserError on all ranks when a checkpoint's files are not as they were written."""
    odd = damaged_file(path) if world.is_main else None  # one rank alone reads the gigabytes
    if world.sum([float(odd is not None)])[0]:
        raise UserError(f"{flag} {path}: {odd or 'a file'} is not as it was written; take another")


def load(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state in place; every rank calls it, on any number of ranks."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)


def load_weights(path: Path, *, model: nn.Module) -> None:
    """Load the weights alone, as `load` does."""
    weights = get_model_state_dict(model)
    dcp.load({"model": weights}, checkpoint_id=path)
    set_model_state_dict(model, weights)
