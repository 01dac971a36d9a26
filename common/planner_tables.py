"""What --plan prints: the work, the splits of the GPUs, memory, wire and disk."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from common import run
from common.gpus import Gpu
from common.planner import (
    DRAFTER_SHARE,
    RESERVED_BYTES,
    ROW_BYTES,
    STATE_BYTES,
    TARGET_SHARE,
    Data,
    Split,
    Work,
    check_plan_args,
    chosen_count,
    chosen_gpu,
    count_work,
    exchange_bytes,
    plan_splits,
    read_data,
    recommended,
    split_misfit,
    step_shape,
)

COLUMN = 12


def print_plan(args: argparse.Namespace) -> int:
    """Print the plan of a run with these flags; 1 when no split of the GPUs fits, else 0."""
    check_plan_args(args)
    gpu, gpus = chosen_gpu(args.gpu), chosen_count(args)
    data, mask_token_id = (None, 0) if args.data is None else read_data(args)
    work = count_work(
        args,
        document_tokens=None if data is None else data.tokens_per_row,
        mask_token_id=mask_token_id,
    )
    splits = plan_splits(args, work, gpu, gpus)
    best = recommended(splits, gpu)
    run.print_table(
        f"Plan: {Path(args.target).name} on {gpus} x {gpu.title}", work_rows(args, work, data, gpu)
    )
    run.print_table("Splits of the GPUs", split_rows(args, splits, data, gpu))
    run.print_table("Memory per GPU", memory_rows(splits, best, gpu))
    run.print_table("Wire and disk", place_rows(args, work, data, best or splits[0], gpu))
    print(f"\n{verdict(args, splits, best, gpu)}", flush=True)
    return 0 if best is not None else 1


def columns(values: Iterable[object]) -> str:
    """Values right-aligned in columns of COLUMN characters."""
    return " ".join(f"{value!s:>{COLUMN}}" for value in values)


def work_rows(
    args: argparse.Namespace, work: Work, data: Data | None, gpu: Gpu
) -> list[tuple[str, str]]:
    """Parameters and FLOPs, and what the times rest on."""
    target, drafter = work.target, work.drafter(work.anchors)
    forward, total = sum(drafter.forward.values()), drafter.total
    pack, giga, tera = work.pack_tokens, 1e9, 1e12
    rows = [
        ("target's layers in use", f"{run.format_count(target.layers)} parameters"),
        ("embedding, head", f"{run.format_count(target.embedding + target.head)} parameters"),
        (
            "drafter",
            f"{run.format_count(work.drafter_parameters)} parameters in "
            f"{work.config.num_hidden_layers} layers, block {work.config.block_size}, "
            f"taps {','.join(map(str, work.config.target_layer_ids))}",
        ),
        ("target, forward", f"{work.target_per_token / giga:.1f} GFLOP a token"),
        ("drafter, forward", f"{forward / pack / giga:.1f} GFLOP a token"),
        ("drafter, forward and backward", f"{total / pack / giga:.1f} GFLOP a token"),
        (
            f"a pack of {pack:,} tokens",
            f"target {work.target_per_token * pack / tera:.0f} TFLOP, "
            f"drafter with {work.anchors} anchors {total / tera:.0f} TFLOP",
        ),
        (
            "assumed, not measured",
            f"target at {TARGET_SHARE:.0%}, drafter at {DRAFTER_SHARE:.0%} of "
            f"{gpu.tflops:,.0f} TFLOP/s in bf16",
        ),
    ]
    if data is not None:
        how = "counted" if data.is_counted else "guessed from the shards there are"
        rows.append(("an epoch", f"{run.format_count(data.tokens)} tokens, {how}"))
        rows.append(("a row", f"{data.tokens_per_row:,.0f} tokens"))
    return rows


def split_rows(
    args: argparse.Namespace, splits: Sequence[Split], data: Data | None, gpu: Gpu
) -> list[tuple[str, str]]:
    """Each split's speed, hours, memory, and the anchor ratio that would balance it."""
    per = "h/1B tokens" if data is None else "h/epoch"
    heads = ["tokens/s", per, "limit", "train GPU", "serve GPU", "balanced at"]
    if data is not None:
        heads.insert(2, f"h/{args.epochs} epochs")
    rows = [("", columns(heads))]
    for split in splits:
        hours = (1e9 if data is None else data.tokens) / split.tokens_per_s / 3600
        memory = [sum(items.values()) for items in split.memory.values()]
        values = [f"{split.tokens_per_s:,.0f}", f"{hours:,.1f}"]
        if data is not None:
            values.append(f"{hours * args.epochs:,.1f}")
        values += [split.bottleneck, *[run.format_bytes(size) for size in memory]]
        if split.servers:
            values.append(ratio_text(split.balanced_ratio))
        misfit = split_misfit(split, gpu)
        note = "" if misfit is None else f"  does not fit: {misfit}"
        if args.global_batch % (split.trainers * args.micro_batch):
            note += f"  needs a --global-batch that {split.trainers * args.micro_batch} divides"
        rows.append((split.name, columns(values) + note))
    return rows


def ratio_text(ratio: float | None) -> str:
    """An anchor ratio, where there is one."""
    if ratio is None or ratio <= 0:
        return "none"
    return f"{ratio:.3f}" if ratio <= 1 else "above 1"


def memory_rows(splits: Sequence[Split], best: Split | None, gpu: Gpu) -> list[tuple[str, str]]:
    """By item: colocated, and both roles of the fastest served split, one that fits if any does."""
    served = recommended(splits[1:], gpu) or max(
        splits[1:], key=lambda split: split.tokens_per_s, default=None
    )
    shown = [(splits[0].name, splits[0].memory["train"])]
    if served is not None:
        shown += [(f"{role} {served.name[7:]}", items) for role, items in served.memory.items()]
    rows = [("", columns(name for name, _ in shown))]
    for item in splits[0].memory["train"]:
        values = (run.format_bytes(items.get(item, 0)) for _, items in shown)
        rows.append((item, columns(values)))
    rows.append(
        (
            "sum, as a backward begins",
            columns(run.format_bytes(sum(items.values())) for _, items in shown),
        )
    )
    room = run.format_bytes(gpu.memory_bytes - RESERVED_BYTES)
    rows.append(("there is", f"{room} a GPU, with {run.format_bytes(RESERVED_BYTES)} kept back"))
    return rows


def place_rows(
    args: argparse.Namespace, work: Work, data: Data | None, split: Split, gpu: Gpu
) -> list[tuple[str, str]]:
    """What goes over wires, and what lies in host memory and on disk, for the split to take."""
    step = step_shape(args, work, ranks=split.trainers)
    rate, share = split.tokens_per_s, step.forwards * step.tokens
    exchange = exchange_bytes(work, step) * rate / split.trainers
    state = STATE_BYTES * work.drafter_parameters
    shard_bytes = (
        args.cache_gb * 1e9 if data is None else min(data.shard_bytes, args.cache_gb * 1e9)
    )
    rows = [
        ("split", split.name),
        (
            "hidden states",
            f"{run.format_bytes(work.wire_per_token)} a token, served at this rate "
            f"{run.format_bytes(work.wire_per_token * rate)}/s in all",
        ),
        (
            "the trainers' exchange",
            f"{run.format_bytes(exchange)}/s into each, of {gpu.link_gb_per_s:g}GB/s",
        ),
        (
            "host memory of a trainer, served",
            f"{run.format_bytes(args.prefetch * share * work.wire_per_token)} of hidden states",
        ),
        (
            "checkpoints",
            f"{run.format_bytes(state * (args.keep + 1))}: {args.keep} kept and one in the "
            f"writing, {run.format_bytes(state)} each",
        ),
        ("cache of shards", f"up to {run.format_bytes(shard_bytes)}"),
        ("export", run.format_bytes(2 * work.drafter_parameters)),
    ]
    if data is None:
        rows.append(("shards", f"{run.format_bytes(ROW_BYTES * 1e9)} for a billion tokens"))
    return rows


def verdict(args: argparse.Namespace, splits: Sequence[Split], best: Split | None, gpu: Gpu) -> str:
    """One or two lines: what to take, or what to change."""
    if best is None:
        reasons = [f"{split.name} does not fit: {split_misfit(split, gpu)}" for split in splits]
        return "\n".join(reasons)
    text = f"take {best.name}: {best.tokens_per_s:,.0f} tokens/s"
    served = recommended(splits[1:], gpu)
    if best.servers:
        return f"{text}; --anchor-ratio {ratio_text(best.balanced_ratio)} would balance it"
    if served is not None:
        text += (
            f"; {served.name} makes {served.tokens_per_s / best.tokens_per_s:.0%} of it, "
            f"balanced at --anchor-ratio {ratio_text(served.balanced_ratio)}"
        )
    return text
