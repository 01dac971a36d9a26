"""Shards as Ray tasks: `--executor ray` on a cluster that exists already.

One task makes one shard on one CPU, with the code of ShardPipeline; placing tasks and doing those
of lost machines again is Ray's work. Nodes need this repository's packages and credentials of their
own for input and output; `common/` and the tokenizer they get from the driver.
"""

import functools
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.assembling import EncodedBlock
from common.chat import ChatTokenizer, EncodeSettings
from common.encoding import Encoder
from common.engines import choose_engine
from common.pipeline import BlockDone, Event, ShardDone, ShardPipeline, StillWaiting
from common.plan import Plan
from common.prompts import Prompts, spool_prompts
from common.run import UserError
from common.store import open_store
from common.timing import Seconds, peak_memory_bytes
from common.workers import Ask

WAIT_S = 1.0
CONNECT_S = 10.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardSpec:
    """What a task needs besides the shard's index; goes to every node once."""

    source: str
    output: str
    store_options: Mapping[str, Any]
    output_options: Mapping[str, Any]
    plan: Plan
    compressed: Mapping[str, str]
    tokenizer_json: bytes
    template: str
    fast_rendering: bool
    engine: str
    encode_settings: EncodeSettings
    all_turns: bool
    prompts: Prompts | None
    download_workers: int


@dataclass(frozen=True)
class ShardReport:
    """A commit record and what it does not tell."""

    record: dict[str, Any]
    unverified_history: int
    cpu_s: dict[str, float]


class RayFlow:
    """The flow of a run whose shards are made by Ray; has what ShardPipeline has for its users."""

    def __init__(self, spec: ShardSpec) -> None:
        self._spec, self.failures = spec, dict[int, str]()
        self.cpu_s, self.waits_s = Seconds(), Seconds()
        self.bytes_in = self.bytes_out = 0

    @property
    def bottleneck(self) -> str:
        return "cluster"

    def events(self, indexes: Sequence[int]) -> Generator[Event, None, None]:
        """Make these shards; what happens on the way. Raises UserError without one."""
        ray = _import_ray()
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        runtime = {"py_modules": [str(Path(__file__).resolve().parent)]}
        try:
            ray.init(ignore_reinit_error=True, runtime_env=runtime, log_to_driver=False)
        except ConnectionError as error:
            raise UserError("--executor ray: no Ray cluster where RAY_ADDRESS says") from error
        try:
            spec = ray.put(self._spec)
            task = ray.remote(num_cpus=1)(make_shard)
            waiting = {task.remote(spec, index): index for index in indexes}
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=WAIT_S)
                if not done:
                    yield StillWaiting()
                for reference in done:
                    yield from self._report(ray, reference, waiting.pop(reference))
        finally:
            ray.shutdown()

    def _report(self, ray: Any, reference: Any, index: int) -> Generator[Event, None, None]:
        try:
            report: ShardReport = ray.get(reference)
        except UserError as error:  # Ray's own wrapper is one too
            self.failures[index] = str(getattr(error, "cause", error))
            return
        except ray.exceptions.RayError as error:
            self.failures[index] = f"Ray gave it up: {type(error).__name__}"
            return
        record, stored = report.record, self._spec.plan.shard_bytes(index)
        self.cpu_s.add(report.cpu_s)
        self.bytes_in += stored
        self.bytes_out += record["bytes"]
        block = EncodedBlock(
            path=Path(),
            lines=0,
            **{name: record[name] for name in ("rows", "tokens", "loss_tokens", "cut")},
            no_reasoning=record["no_reasoning"],
            unverified_history=report.unverified_history,
            rejected=Counter(record["rejected"]),
            cpu_s={},
        )
        yield BlockDone(stored, block)
        yield ShardDone(record)


def make_shard(spec: ShardSpec, index: int) -> ShardReport:
    """Make one shard in this process; the body of a Ray task. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="tokenize-ray-") as folder:
        encoder = _encoder(spec, Path(folder))
        pipeline = ShardPipeline(
            open_store(spec.source, **spec.store_options),
            open_store(spec.output, **spec.store_options, **spec.output_options),
            spec.plan,
            spec.compressed,
            folder=Path(folder),
            pool=OneThread(encoder),
            download_workers=spec.download_workers,
        )
        unverified, record = 0, None
        for event in pipeline.events([index]):
            if isinstance(event, BlockDone):
                unverified += event.encoded.unverified_history
            if isinstance(event, ShardDone):
                record = event.record
    if record is None:
        raise UserError(pipeline.failures[index])
    return ShardReport(record, unverified, pipeline.cpu_s.sums())


class OneThread:
    """A thread with a WorkerPool's interface: a Ray task has one CPU, and must not fork."""

    def __init__(self, handler: Callable[[Any, bytes], Any]) -> None:
        self._handler = handler
        self._thread = ThreadPoolExecutor(1, "encode")
        self.handover_cpu_s, self.idle = 0.0, 0

    @property
    def peak_bytes(self) -> int:
        return peak_memory_bytes()

    def submit(self, call: Callable[[Ask], Result], *, urgent: bool = False) -> Future[Result]:
        return self._thread.submit(call, self._handler)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _encoder(spec: ShardSpec, folder: Path) -> Encoder:
    tokenizer, engine = _tokenizer(spec.tokenizer_json, spec.template, spec.engine)
    if not spec.fast_rendering:
        tokenizer = tokenizer.by_template_alone()
    spool = None
    if spec.prompts is not None:
        spool = folder / "prompts.sqlite"
        store = open_store(spec.prompts.uri, **spec.store_options)
        spool_prompts(store, spec.prompts, spool)
    return Encoder(tokenizer, engine, spec.encode_settings, prompts=spool, all_turns=spec.all_turns)


@functools.lru_cache(maxsize=1)
def _tokenizer(tokenizer_json: bytes, template: str, engine: str) -> tuple[ChatTokenizer, Any]:
    """Loaded once a process: Ray keeps its processes for further tasks."""
    tokenizer = ChatTokenizer(tokenizer_json, template)
    choice = choose_engine(engine, tokenizer.reference, tokenizer_json, lambda text: None)
    return tokenizer, choice


def _check_address(address: str) -> None:
    """Refuse host:port where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return  # none, auto, or a client address, which Ray refuses quickly
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise UserError(
            f"--executor ray: nobody answers at RAY_ADDRESS {address} ({error.strerror or error})"
        ) from error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError("--executor ray: Ray is not installed here; pip install ray") from error
    return ray
