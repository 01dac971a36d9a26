"""A small sharded model whose checkpoints tests save, in their own process or on ranks.

checkpoint_ranks MODE FOLDER ...: see the functions at the end.
"""

import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it late: once here, not in every forked child
from torch import nn
from torch.distributed.fsdp import fully_shard

from common import checkpoint, dist
from common.mirror import Mirror
from common.run import UserError
from common.store import open_store

LOG = logging.getLogger("checkpoints")


class Training:
    """A model, its optimizer and its checkpoints; each step changes all tensors in place."""

    def __init__(self, world, folder, *, width=32, keep=3, keep_every=None, mirror=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
        self.model[0].register_buffer("seen", torch.zeros(()))
        for module in (*self.model, self.model):
            fully_shard(module, mesh=world.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step, self.width = 0, width
        self.checkpoints = checkpoint.Checkpoints(
            folder, world=world, keep=keep, keep_every=keep_every, mirror=mirror, log=LOG
        )

    def advance(self):
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        self.model(torch.randn(4, self.width, generator=generator)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model[0].seen += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def save(self, **state):
        self.checkpoints.save(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            state={"finished": False, **state},
        )

    def load(self, path):
        checkpoint.load(path, model=self.model, optimizer=self.optimizer)
        self.step = checkpoint.read_state(path)["step"]

    def tensors(self):
        """Everything that a resume needs, whole, by name."""
        found = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for number, parameter in enumerate(self.model.parameters()):
            for name, value in self.optimizer.state[parameter].items():
                found[f"{number}.{name}"] = value.detach().clone()
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in found.items()
        }


def kill_everywhere(folder: str) -> None:
    """Save step 2 after step 1, killed at its 1st, 2nd, ... file operation, until it comes through.

    Prints what was left each time: the newest step, whether it loads as what it was.
    """
    killed = True
    for number in range(1, 200):
        if not killed:
            break
        child = os.fork()
        if child == 0:
            save_and_die(Path(folder, str(number)), number)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0, status
    # Only now, as a process that has trained may not fork.
    with dist.start("cpu") as world:
        fresh, want = Training(world, Path(folder)), {}
        for step in (1, 2):
            fresh.advance()
            want[step] = fresh.tensors()
        for place in sorted(Path(folder).iterdir(), key=lambda place: int(place.name)):
            training = Training(world, place)
            training.load(training.checkpoints.newest())
            found = training.tensors()
            same = all(torch.equal(found[key], value) for key, value in want[training.step].items())
            print(f"step={training.step} same={same}", flush=True)


def save_and_die(place: Path, number: int) -> None:
    with dist.start("cpu") as world:
        training = Training(world, place, keep=1)
        for step in (1, 2):
            training.advance()
            if step == 2:
                kill_at_file_operation(number, place)
            training.save()
            training.checkpoints.wait()
        os._exit(0)


def kill_at_file_operation(number: int, place: Path) -> None:
    """Let SIGKILL end this process at the so-manieth open, rename or removal below `place`."""
    seen = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        removes = event in ("os.remove", "os.rmdir")  # by names relative to an open folder
        writes = event in ("open", "os.rename", "os.mkdir") and str(place) in str(arguments[0])
        if removes or writes:
            seen += 1
        if seen == number and event != "os.kill":
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def full_disk(folder: str) -> None:
    """Save step 1; step 2 under a limit that stands for a full disk, on the last rank; step 3.

    Prints what came of each, and leaves the state of step 3 beside the checkpoints. Python ignores
    SIGXFSZ, so that a write over the limit fails as one on a full disk does.
    """
    with dist.start("cpu") as world:
        training = Training(world, Path(folder), width=256)
        for step in (1, 2, 3):
            training.advance()
            if step == 2 and world.rank == world.size - 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            training.save()
            try:
                training.checkpoints.wait()
                said = "saved"
            except UserError as error:
                said = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            world.barrier()
            if world.is_main:
                print(step, sorted(os.listdir(folder)), said, flush=True)
        state = training.tensors()
        if world.is_main:
            torch.save(state, Path(folder, "want.pt"))


def killed_upload(folder: str, uri: str) -> None:
    """Mirror step 1, and die in the middle of mirroring step 2."""
    store = open_store(uri)
    mirror = Mirror(store, Path(folder), keep=3, keep_every=None, log=LOG)
    with dist.start("cpu") as world:
        training = Training(world, Path(folder), mirror=mirror)
        training.advance()
        training.save()
        training.checkpoints.wait()
        training.advance()
        sys.addaudithook(kill_before_opening(Path(folder, "step-00000002/__0_0.distcp")))
        training.save()
        training.checkpoints.wait()


def kill_before_opening(path: Path) -> Callable[[str, tuple], None]:
    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]) == str(path):
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    mode, *arguments = sys.argv[1:] if argv is None else argv
    modes = {"kill": kill_everywhere, "full": full_disk, "upload": killed_upload}
    modes[mode](*arguments)
    return 0
