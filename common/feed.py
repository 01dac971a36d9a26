"""Steps of data on their way to the drafter: shards read ahead, hidden states asked ahead."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from common.batches import PackedRows, Step
from common.target import Taps
from common.wire import HiddenStates

POLL_S = 0.2


@dataclass(frozen=True)
class ReadyStep:
    """One step with this rank's share of packs, and their hidden states on the way."""

    step: Step
    first: int  # index of this rank's first pack in the global batch
    packs: tuple[PackedRows, ...]
    taps: tuple[Future[Taps], ...]


def ask(hidden_states: HiddenStates, pack: PackedRows, *, final: bool) -> Future[Taps]:
    """Ask for a pack's hidden states, the last ones too with `final`; an empty pack asks nobody."""
    if pack.token_lists:
        return hidden_states.submit(pack.token_lists, final=final)
    have = hidden_states.description
    nothing: Future[Taps] = Future()
    width = len(have.layers) * have.hidden_size
    last = torch.zeros(0, have.hidden_size, dtype=torch.bfloat16) if final else None
    nothing.set_result(Taps(torch.zeros(0, width, dtype=torch.bfloat16), last))
    return nothing


class StepFeed:
    """Reads shards in a thread of its own and asks for hidden states some steps ahead.

    The thread alone waits for shards, so a step whose data is there is never held up by the next.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        hidden_states: HiddenStates,
        *,
        share: int,
        rank: int,
        depth: int,
        final: bool,
    ) -> None:
        """`final`: ask for the target's last hidden states too."""
        self._hidden_states, self._depth, self._final = hidden_states, depth, final
        self._share, self._first = share, share * rank
        self._ready: deque[ReadyStep] = deque()
        self._queue: queue.Queue[Step | BaseException | None] = queue.Queue(maxsize=depth)
        self._ended = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(steps,), daemon=True)
        self._thread.start()

    def next(self, stop: Callable[[], bool]) -> ReadyStep | None:
        """The next step, its hidden states there; None at the end, or once `stop` says so.

        Raises what the shards' thread or the servers raised.
        """
        while not self._ready and not self._ended and not stop():
            self._fill(timeout_s=POLL_S)
        if stop() or not self._ready:
            return None
        step = self._ready[0]
        while len(self._ready) < self._depth and not self._ended and not self._queue.empty():
            self._fill(timeout_s=0.0)
        while wait(step.taps, timeout=POLL_S).not_done:
            if stop():
                return None
        for taps in step.taps:
            taps.result()  # a failure is raised here, outside of any collective
        return self._ready.popleft()

    def _fill(self, *, timeout_s: float) -> None:
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait()
        except queue.Empty:
            return
        if isinstance(item, BaseException):
            raise item
        if item is None:
            self._ended = True
            return
        packs = item.packs[self._first : self._first + self._share]
        taps = tuple(ask(self._hidden_states, pack, final=self._final) for pack in packs)
        self._ready.append(ReadyStep(item, self._first, packs, taps))

    def close(self) -> None:
        """End the reading thread, once it is between two steps."""
        self._closed.set()
        self._thread.join(timeout=10.0)

    def _read(self, steps: Iterator[Step]) -> None:
        try:
            for step in steps:
                if not self._put(step):
                    return
            self._put(None)
        except BaseException as error:  # handed to the main thread, which raises it
            self._put(error)

    def _put(self, item: Step | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False
