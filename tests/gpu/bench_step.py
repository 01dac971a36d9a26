"""A drafter's training step at the true widths, against the planner: time, rate, memory, compiles.

The drafter of Qwen3.6-27B as --plan counts it: 5 layers, hidden 5120, 248,320 words, packs of 4,096
tokens with 512 blocks of 16, random weights and hidden states, AdamW, by the code that trains. The
layers run as the trainer runs them by default, and then compiled, as with --compile. A card that
has no room for five layers measures as many as fit, and the table says so. --tiny tries the
benchmark itself, on a CPU in seconds.

  python -m tests.gpu.bench_step --rounds 8
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common import dist, run
from common.attention import num_compiled_graphs
from common.batches import PackedRows, Step
from common.blocks import dense_mask, layer_masks
from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.drafting import MicroBatch, TargetEnds, accumulate_gradients, micro_batches
from common.feed import ReadyStep
from common.flops import DrafterWork, drafter_work, visible_keys
from common.footprint import StepShape, drafter_memory, taps_bytes
from common.loss import TILE_BYTES
from common.planner import DRAFTER_SHARE, RESERVED_BYTES
from common.setup import build_drafter
from common.target import Taps
from common.training import MAX_GRAD_NORM
from tests.gpu.report import Report, against_goal, device_name, measured_rate

GOAL_SHARE = 0.50  # of the measured rate
WARM_UP = 3
SEED = 0


@dataclass(frozen=True)
class Shape:
    """Of the drafter and of one pack; documents of half a pack each."""

    hidden: int
    intermediate: int
    words: int
    taps: int
    layers: int
    window: int
    tokens: int
    anchors: int
    block: int

    def config(self) -> DrafterConfig:
        return DrafterConfig.for_target(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            vocab_size=self.words,
            num_target_layers=64,
            rms_norm_eps=1e-6,
            rope_theta=1e7,
            max_position_embeddings=262_144,
            eos_token_id=0,
            target_layer_ids=range(1, 1 + self.taps),
            num_layers=self.layers,
            block_size=self.block,
            mask_token_id=9,
            sliding_window=self.window,
        )


TRUE = Shape(5120, 17_408, 248_320, 5, 5, 2048, 4096, 512, 16)
TINY = Shape(256, 384, 512, 3, 2, 48, 256, 32, 8)


@dataclass(frozen=True)
class Parts:
    """What is there before a step begins."""

    shape: Shape
    config: DrafterConfig
    world: dist.World
    drafter: Drafter
    optimizer: torch.optim.Optimizer
    ends: TargetEnds
    attention: str


def make_parts(shape: Shape, world: dist.World) -> Parts:
    """A drafter as the trainer builds it, and an embedding and a head of the target's size."""
    on_cuda, config = world.device.type == "cuda", shape.config()
    dtype = torch.bfloat16 if on_cuda else torch.float32
    args = argparse.Namespace(
        seed=SEED, init_from=None, compile=False, checkpoint_layers=False, learning_rate=1e-4,
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    drafter, optimizer = build_drafter(config, args, world)
    ends = TargetEnds(
        *(
            torch.randn(shape.words, shape.hidden, device=world.device, dtype=dtype) * 0.02
            for _ in range(2)
        )
    )
    attention = "flex" if on_cuda else "sdpa"
    return Parts(shape, config, world, drafter, optimizer, ends, attention)


def ready_step(parts: Parts, lengths: Sequence[int]) -> ReadyStep:
    """A step of one pack: documents of these lengths, all of it supervised, then padding."""
    tokens, used = parts.shape.tokens, sum(lengths)
    generator = np.random.default_rng(SEED)
    ids = np.zeros(tokens, np.int64)
    ids[:used] = generator.integers(parts.shape.words, size=used)
    documents, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int64)
    documents[:used] = np.repeat(np.arange(len(lengths)), lengths)
    positions[:used] = np.concatenate([np.arange(length) for length in lengths])
    lists = tuple(np.split(ids[:used].astype(np.int32), np.cumsum(lengths)[:-1]))
    pack = PackedRows(ids, documents >= 0, documents, positions, lists)
    width = len(parts.config.target_layer_ids) * parts.config.hidden_size
    states = torch.randn(used, width, device=parts.world.device, dtype=torch.bfloat16)
    answer: Future[Taps] = Future()
    answer.set_result(Taps(states, None))
    return ReadyStep(Step((pack,), ((),), None), 0, (pack,), (answer,))  # type: ignore[arg-type]


def batches_of(parts: Parts, ready: ReadyStep, number: int) -> list[MicroBatch]:
    """As the trainer makes them for step `number`, which decides the anchors."""
    return micro_batches(
        ready, parts.config, step=number, seed=SEED, size=1, num_anchors=parts.shape.anchors,
        gamma=7.0, device=parts.world.device,
    )  # fmt: skip


def take_step(parts: Parts, ready: ReadyStep, number: int) -> dict[str, float]:
    """Seconds of an optimizer step: all of it, and the update in it."""
    wait(parts)
    began = time.monotonic()
    batches = batches_of(parts, ready, number)
    accumulate_gradients(
        parts.drafter, parts.config, parts.ends, batches, loss_kind="ce",
        attention=parts.attention, world=parts.world,
    )  # fmt: skip
    wait(parts)
    drafted = time.monotonic()
    nn.utils.clip_grad_norm_(parts.drafter.parameters(), MAX_GRAD_NORM)
    parts.optimizer.step()
    parts.optimizer.zero_grad()
    wait(parts)
    return {"step": time.monotonic() - began, "update": time.monotonic() - drafted}


def wait(parts: Parts) -> None:
    if parts.world.device.type == "cuda":
        torch.cuda.synchronize(parts.world.device)


# ---- what there is to do


def counted_work(parts: Parts, batch: MicroBatch) -> DrafterWork:
    """FLOPs of this very micro-batch: its supervised slots, and the pairs that its masks show."""
    config, blocks = parts.config, batch.blocks
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    visible = {
        kind: float(dense_mask(batch.pack, blocks, sliding_window=window).sum(dtype=torch.int64))
        / len(blocks.input_ids)
        for kind, window in windows.items()
        if kind in config.layer_types
    }
    return drafter_work(
        config,
        tokens=len(batch.pack.input_ids),
        anchors=len(blocks.anchors),
        supervised=int(blocks.supervised.sum()),
        visible=visible,
        teacher=False,
    )


def planned_work(shape: Shape) -> DrafterWork:
    """What --plan counts for such a pack."""
    config = shape.config()
    return drafter_work(
        config,
        tokens=shape.tokens,
        anchors=shape.anchors,
        supervised=shape.anchors * (config.block_size - 1),
        visible=visible_keys(config, shape.tokens / 2),
        teacher=False,
    )


def planned_bytes(shape: Shape, device_type: str) -> float:
    """What --plan counts for a trainer of one GPU that is served: one pack waits beside another."""
    config, width = shape.config(), 2 if device_type == "cuda" else 4
    step = StepShape(
        ranks=1,
        forwards=1,
        tokens=shape.tokens,
        anchors=shape.anchors,
        width=width,
        tile_bytes=TILE_BYTES[device_type],
        teacher=False,
        checkpoint_layers=False,
    )
    ends = 2 * width * shape.words * shape.hidden
    taps = 2 * taps_bytes(config, tokens=shape.tokens, width=width, teacher=False)
    return sum(drafter_memory(config, step).values()) + ends + taps


def fitting(shape: Shape, room: float, device_type: str) -> Shape | None:
    """The shape with as many of its layers as fit into `room` bytes; None if not one does."""
    for layers in range(shape.layers, 0, -1):
        smaller = replace(shape, layers=layers)
        if planned_bytes(smaller, device_type) + RESERVED_BYTES <= room:
            return smaller
    return None


# ---- measuring


def mask_seconds(parts: Parts, ready: ReadyStep, rounds: int) -> tuple[float, float, int]:
    """Seconds to make all masks of a pack: the first time, then; and the bytes held beside."""
    batch = batches_of(parts, ready, 0)[0]
    on_cuda, seconds = parts.world.device.type == "cuda", []
    for turn in range(1 + rounds):
        wait(parts)
        if on_cuda and turn == 1:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_cuda else 0
        began = time.monotonic()
        layer_masks(
            batch.pack, batch.blocks, layer_types=parts.config.layer_types,
            sliding_window=parts.config.sliding_window, attention=parts.attention,
        )  # fmt: skip
        wait(parts)
        seconds.append(time.monotonic() - began)
    beside = torch.cuda.max_memory_allocated() - before if on_cuda else 0
    return seconds[0], statistics.median(seconds[1:]), beside


def measure(parts: Parts, report: Report, *, way: str, rounds: int, rate: float) -> None:
    """Warm up, take `rounds` steps on packs of the same lengths, then one on other lengths."""
    half, quarter = parts.shape.tokens // 2, parts.shape.tokens // 4
    ready = ready_step(parts, [half, half])
    on_cuda = parts.world.device.type == "cuda"
    work = counted_work(parts, batches_of(parts, ready, WARM_UP)[0]).total
    began = time.monotonic()
    for number in range(WARM_UP):
        take_step(parts, ready, number)
    warm_up_s, graphs = time.monotonic() - began, num_compiled_graphs()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = [take_step(parts, ready, WARM_UP + number) for number in range(rounds)]
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    odd = ready_step(parts, [quarter - 7, half, quarter - 1])
    take_step(parts, odd, WARM_UP + rounds)
    recompiles = num_compiled_graphs() - graphs
    step_s, update_s = (
        statistics.median(times[part] for times in taken) for part in ("step", "update")
    )
    planned = planned_work(parts.shape).total
    share, planned_s = work / step_s / rate, planned / (DRAFTER_SHARE * rate)
    report.rows += [
        (f"{way}: step", f"{step_s:.3g} s, {update_s:.2g} s of it the update; warm-up "
         f"{warm_up_s:.0f} s; planner {planned_s:.3g} s at {DRAFTER_SHARE:.0%}"),
        (f"{way}: work", f"{work / 1e12:.4g} TFLOP counted, planner {planned / 1e12:.4g}"),
        (f"{way}: rate", f"{work / step_s / 1e12:.3g} TFLOP/s, "
         + against_goal(share, GOAL_SHARE, parts.world.device)),
        (f"{way}: recompiles", f"{recompiles} after the warm-up, {graphs} graphs before"),
    ]  # fmt: skip
    report.figures |= {
        f"{way}_step_s": step_s,
        f"{way}_update_s": update_s,
        f"{way}_warm_up_s": warm_up_s,
        f"{way}_tflop": work / 1e12,
        f"{way}_share_of_rate": share,
        f"{way}_recompiles": recompiles,
        "planned_tflop": planned / 1e12,
        "planned_step_s": planned_s,
    }
    if recompiles:
        report.failed.append(f"{way}: {recompiles} graphs were compiled after the warm-up")
    if on_cuda:
        expected = planned_bytes(parts.shape, "cuda")
        report.rows.append(
            (f"{way}: peak memory", f"{run.format_bytes(peak)}, planner "
             f"{run.format_bytes(expected)} ({expected / peak - 1:+.0%})")
        )  # fmt: skip
        report.figures |= {f"{way}_peak_bytes": peak, "planned_bytes": expected}


def attempt(report: Report, way: str, work: Callable[[], None]) -> None:
    """Note what one way of running fails with, so that the others' figures are kept."""
    try:
        work()
    except Exception as error:  # a compiler's or a driver's: anything
        said = str(error).strip().splitlines() or [""]
        report.failed.append(f"{way}: {type(error).__name__}: {said[0][:200]}")


def bench(world: dist.World, wanted: Shape, *, rounds: int, output: Path | None) -> Report:
    """All of it on one device; what is found goes to `output` at once."""
    device = world.device
    report = Report(f"A drafter's step on {device_name(device)}, torch {torch.__version__}")
    room = float("inf") if device.type == "cpu" else float(torch.cuda.mem_get_info(device)[0])
    shape = fitting(wanted, room, device.type)
    if shape is None:
        report.failed.append(
            f"one layer needs {planned_bytes(replace(wanted, layers=1), device.type) / 1e9:.0f} GB "
            f"and {RESERVED_BYTES / 1e9:.0f} kept back; {room / 1e9:.0f} are free"
        )
        return report
    rate = measured_rate(device)
    report.rows += [
        ("drafter", f"{shape.layers} layers, hidden {shape.hidden}, {shape.words:,} words"),
        ("pack", f"{shape.tokens:,} tokens, {shape.anchors} blocks of {shape.block}"),
        ("bf16 products", f"{rate / 1e12:.3g} TFLOP/s, measured"),
    ]
    if shape.layers < wanted.layers:
        need = run.format_bytes(planned_bytes(wanted, device.type))
        report.rows.append(
            ("CUT", f"{wanted.layers} layers need {need}, {run.format_bytes(room)} are free")
        )
    report.figures |= {"tokens": shape.tokens, "layers": shape.layers, "rate_tflops": rate / 1e12}
    parts = make_parts(shape, world)

    def masks() -> None:
        ready = ready_step(parts, [shape.tokens // 2] * 2)
        first_s, later_s, beside = mask_seconds(parts, ready, rounds)
        held = f", {run.format_bytes(beside)} beside" if beside else ""
        text = f"{later_s * 1e3:.2g} ms a pack, first {first_s:.2g} s{held}"
        report.rows.append(("masks", text))
        report.figures |= {"mask_s": later_s, "mask_first_s": first_s, "mask_bytes": beside}

    def compiled() -> None:
        parts.drafter.compile_layers()
        measure(parts, report, way="compiled", rounds=rounds, rate=rate)

    def plain() -> None:
        measure(parts, report, way="plain", rounds=rounds, rate=rate)

    ways = {"masks": masks, "plain": plain}
    if device.type == "cuda":  # a CPU's masks change their shapes
        ways["compiled"] = compiled
    for way, work in ways.items():
        attempt(report, way, work)
        report.save(output)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=run.positive_int, default=8, help="measured steps")
    parser.add_argument("--tiny", action="store_true", help="tiny widths, to try the benchmark")
    parser.add_argument("--output", type=Path, help="the figures, as JSON")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        parser.error("torch sees no CUDA device here: only --tiny runs on a CPU")
    if device == "cpu":
        torch.set_num_threads(1)
    with dist.start(device) as world:
        report = bench(world, TINY if args.tiny else TRUE, rounds=args.rounds, output=args.output)
        return report.finish(args.output)


if __name__ == "__main__":
    sys.exit(main())
