"""The process group of a training run: one code path from a single process to many ranks.

Under torchrun the ranks meet through its store; a process started by hand is a world of one. All
long waiting (shards, servers) happens outside collectives: ranks vote through the store before each
step, so a collective is entered by all of them or by none. A heartbeat through the same store ends
the process with a message when another rank, or the launcher, is gone. This is the one module that
reads torchrun's environment.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.run import EXIT_FAILED, UserError

COLLECTIVE_TIMEOUT = timedelta(hours=2)  # a checkpoint or a first compile may take long; the
HEARTBEAT_EVERY_S = 5.0  # heartbeat, not this timeout, is what notices a lost rank
HEARTBEAT_LOST_S = 40.0
PROBE_LIMIT_S = 60.0
VOTE_POLL_S = 0.002


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    _store: Any
    _rounds: Iterator[int]  # of votes, from 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add numbers up over all ranks, in float64; every rank gets the same sums."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor up over all ranks, in place; returns it."""
        dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])

    def shares(self, folder: Path) -> bool:
        """Whether every rank, on whatever machine, sees what the main rank writes in `folder`."""
        mark = folder / f".seen-by-all-{int(self.sum([time.time_ns() % 1e12 * self.is_main])[0])}"
        if self.is_main:
            mark.touch()
        self.barrier()
        missed = self.sum([float(not mark.exists())])[0]
        if self.is_main:
            mark.unlink()
        return missed == 0

    def new_cpu_group(self) -> dist.ProcessGroup | None:
        """A process group for one background thread; None in a world of one."""
        if self.size == 1:
            return None
        return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def agree(self, go: bool) -> bool:
        """True when every rank votes go, False everywhere when one does not.

        Waits outside any collective. Between two calls of which the first was True the ranks must
        meet in a collective, so that no vote is counted into an earlier round. Raises UserError
        when the store is gone.
        """
        if self.size == 1:
            return go
        try:
            return self._vote(go)
        except dist.DistError as error:
            raise UserError(
                f"rank {self.rank}: the launcher (torchrun) is gone, or the host of the run's store"
            ) from error

    def _vote(self, go: bool) -> bool:
        self._store.add("vote/go" if go else "vote/stop", 1)
        round_number = next(self._rounds)
        while True:
            stops = self._store.add("vote/stop", 0)
            if self._store.add("vote/go", 0) + stops >= round_number * self.size:
                return stops == 0
            time.sleep(VOTE_POLL_S)


@contextlib.contextmanager
def start(device: str) -> Iterator[World]:
    """Join the process group, check that it works, and leave it at the end.

    `device` is "cpu" or "cuda". Raises UserError when the ranks outnumber this machine's GPUs.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    chosen = _own_device(device)
    store = _open_store(rank, size)
    heartbeat = _Heartbeat(store, rank=rank, size=size)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    try:
        mesh = init_device_mesh(chosen.type, (size,))
        world = World(rank, size, chosen, mesh, store, itertools.count(1))
        _probe(world)
        yield world
        heartbeat.leave()
    finally:
        heartbeat.stop()
        dist.destroy_process_group()


def gather_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A sharded module's weights in one piece, on the CPU of the main rank; {} on the others.

    Every rank calls it.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    return weights


def _own_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {local_rank} of this machine has no GPU of its own ({torch.cuda.device_count()} "
            "visible): lower --nproc-per-node, or check CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _open_store(rank: int, size: int) -> Any:
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(
        iter(dist.rendezvous("env://", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT))
    )
    return store


def _probe(world: World) -> None:
    """One small all_reduce with a known sum: it hangs, if it ever does, here and with a cure."""
    cure = "check that all ranks run and reach each other"
    if world.device.type == "cuda":
        cure = (
            "GPUs that hang here (RTX PRO 6000 pairs do, NVIDIA/nccl#1999) work with "
            "NCCL_P2P_DISABLE=1; or turn IOMMU/ACS off"
        )
    timer = threading.Timer(
        PROBE_LIMIT_S,
        _die,
        [f"rank {world.rank}: the first all_reduce took over {PROBE_LIMIT_S:.0f} s; {cure}"],
    )
    timer.daemon = True
    timer.start()
    total = world.sum([world.rank + 1.0])[0]
    timer.cancel()
    want = world.size * (world.size + 1) / 2
    if total != want:
        raise UserError(f"the first all_reduce summed to {total} instead of {want}; {cure}")


class _Heartbeat:
    """Counts up a key of its own every few seconds and watches the keys of the other ranks."""

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._parent = os.getppid()
        self._stopped = threading.Event()
        if size > 1:
            # A connection of its own: the main thread may sit in a blocking call on the other.
            self._store = store.clone()
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """Tell the others that this rank ends because its work is done."""
        if self._size > 1:
            self._store.set(f"left/{self._rank}", "1")

    def stop(self) -> None:
        """End the thread; one that the interpreter's exit caught inside the store would abort."""
        self._stopped.set()
        if self._size > 1:
            self._thread.join()

    def _run(self) -> None:
        seen = {rank: (0, time.monotonic()) for rank in range(self._size) if rank != self._rank}
        while not self._stopped.wait(HEARTBEAT_EVERY_S):
            if os.getppid() != self._parent:
                _die(f"rank {self._rank}: the launcher (torchrun) is gone; ending")
            try:
                self._store.add(f"beat/{self._rank}", 1)
                self._watch(seen)
            except (dist.DistError, RuntimeError):
                if not self._stopped.is_set():
                    _die(f"rank {self._rank}: the run's store is gone (its host died?); ending")

    def _watch(self, seen: dict[int, tuple[int, float]]) -> None:
        now = time.monotonic()
        for rank, (count, when) in list(seen.items()):
            if self._store.check([f"left/{rank}"]):
                del seen[rank]
                continue
            beat = self._store.add(f"beat/{rank}", 0)
            if beat != count:
                seen[rank] = (beat, now)
            elif now - when > HEARTBEAT_LOST_S:
                _die(
                    f"rank {self._rank}: rank {rank} gave no sign of life for "
                    f"{HEARTBEAT_LOST_S:.0f} s; ending. Rerun to resume from the last checkpoint"
                )


def _die(message: str) -> NoReturn:
    """End the process at once: the main thread may be stuck in a collective for hours."""
    os.write(2, f"train_dflash_online.py: error: {message}\n".encode())
    os._exit(EXIT_FAILED)
