"""--eval-only: how well a checkpoint of ours, or a published drafter, drafts held-out rows.

Trains nothing and touches no run's files: report.json and report.html are all it writes.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import checkpoint, run
from common.batches import Cursor, HeldOut, held_out_packs, seen_shards
from common.breakdown import break_down, rows_of
from common.dist import World
from common.drafter_config import DrafterConfig
from common.evaluate import evaluate
from common.evaluation_report import HTML_FILE, write_report
from common.lifetime import StopRequest
from common.losses import DEFAULT_GAMMA
from common.real_decoding import real_figures, rows_to_decode, whole_drafter
from common.setup import Setup, build_drafter, given_config, prepare
from common.shards import Shard
from common.stepfolders import find_newest
from common.target_files import count_parameters, think_tokens
from common.verdict import Drafts, Evaluation

RUN_DEFAULTS = ("anchor_ratio", "eval_fraction", "eval_rows", "gamma", "pack_length", "seed")
BLOCK_SIZES = (4, 8, 16)  # that a speed-up is told for, as far as the drafter's block goes


def find_checkpoint(args: argparse.Namespace) -> Path | None:
    """The checkpoint to evaluate; None with --init-from. Raises UserError when there is none."""
    if args.init_from is not None:
        return None
    if args.checkpoint is not None:
        return args.checkpoint
    found = find_newest(Path(args.output) / "checkpoints")
    if found is None:
        raise run.UserError(
            f"--output {args.output}: no checkpoint there; give --checkpoint, or --init-from for a "
            "published drafter"
        )
    return found


def run_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint's run was made with, as defaults of this command's flags.

    So the same rows are held out without anybody having to repeat the flags.
    """
    path = find_checkpoint(args)
    if path is None:
        return {}
    settings = checkpoint.read_state(path, flag="--checkpoint")["settings"]
    return {name: settings[name] for name in RUN_DEFAULTS if settings.get(name)}


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a checkpoint with its trainer's state, or a published drafter."""

    path: Path
    state: Mapping[str, Any] | None

    @classmethod
    def find(cls, args: argparse.Namespace) -> "Subject":
        """Raises UserError when there is none, or it is damaged."""
        path = find_checkpoint(args)
        if path is None:
            return cls(args.init_from, None)
        return cls(path, checkpoint.read_state(path, flag="--checkpoint"))

    def config(self, args: argparse.Namespace) -> tuple[str, DrafterConfig] | None:
        """The drafter's shape, and the flag that gives it."""
        if self.state is None:
            return given_config(args)
        config = DrafterConfig.from_json(self.state["settings"]["draft_config"])
        return f"--checkpoint {self.path}", config

    def check_target(self, target: str, embedding_sha256: str) -> None:
        """Raises UserError when the drafter was trained for another target of the same shape."""
        if self.state is None:  # a published drafter's files do not tell
            return
        if self.state["settings"].get("embedding_sha256") != embedding_sha256:
            raise run.UserError(
                f"--target {target}: {self.path} was trained for a target with another embedding"
            )

    def is_of(self, plan_sha256: str) -> bool:
        """Whether it was trained on the data of this plan."""
        return self.state is not None and self.state["settings"]["plan_sha256"] == plan_sha256


def evaluate_only(
    args: argparse.Namespace,
    world: World,
    log: Any,
    stop: StopRequest,
    closing: contextlib.ExitStack,
    *,
    free_flags: Collection[str],
) -> int:
    """Evaluate, write the report, print its figures; every rank calls it."""
    subject = Subject.find(args)
    if world.is_main:
        run.print_settings(log, vars(args))
    if subject.state is not None:
        checkpoint.check_files(subject.path, world, "--checkpoint")
    args.global_batch = world.size * args.micro_batch  # nothing is trained
    setup = prepare(
        args, world, log, stop, closing, free_flags=free_flags, given=subject.config(args)
    )
    subject.check_target(args.target, setup.settings["embedding_sha256"])
    drafter, _ = build_drafter(setup.config, args, world)
    if subject.state is not None:
        checkpoint.load_weights(subject.path, model=drafter)
    held_out = held_out_rows(setup, subject)
    to_decode = rows_to_decode(held_out, args.decode)
    if world.is_main:
        log.info(f"evaluating drafter={subject.path} rows={held_out.rows}")
    result = evaluate_rows(setup, drafter, held_out, sample_controls=False)
    real = None
    if to_decode:
        whole = whole_drafter(setup, drafter)
        if whole is not None:
            log.info(f"decoding rows={len(to_decode)}")
            real = real_figures(setup, whole, to_decode, result.drafts)
    if world.is_main:
        parameters = sum(parameter.numel() for parameter in drafter.parameters())
        report = {
            **make_report(setup, subject, held_out, result, parameters=parameters),
            "real": real,
        }
        write_report(args.output, report)
        if result.ignores_context:
            log.warning(result.verdict)
        print_figures(report, args.output / HTML_FILE)
    world.agree(True)  # the others wait here while the main rank decodes, in no collective
    world.barrier()
    return 0


def evaluate_rows(
    setup: Setup, drafter: Any, held_out: HeldOut, *, sample_controls: bool
) -> Evaluation:
    """Evaluate as the run's flags say; the drafter is left in training mode."""
    args = setup.args
    drafter.eval()
    result = evaluate(
        drafter,
        setup.config,
        setup.ends,
        setup.hidden_states,
        packs=held_out.packs,
        num_anchors=setup.num_anchors,
        gamma=args.gamma or DEFAULT_GAMMA,
        temperature=args.temperature,
        sample_controls=sample_controls,
        seed=args.seed,
        attention=args.attention,
        world=setup.world,
    )
    drafter.train()
    return result


def held_out_rows(setup: Setup, subject: Subject) -> HeldOut:
    """The rows to evaluate on. Raises UserError when there are none.

    A checkpoint is judged on the rows that its run's evaluation at that step used, of the shards up
    to its cursor; with other data, and a published drafter, on those of the shards that are
    committed by now, from shard 0 on, which is waited for.
    """
    args, dataset = setup.args, setup.dataset
    opened = 0

    def committed() -> Iterator[Shard]:
        nonlocal opened
        for index in range(dataset.num_shards):
            if dataset.record(index) is None:
                return
            opened += 1
            yield dataset.wait_for_shard(index, timeout_s=args.shard_timeout)

    def first_rows(shards: Iterator[Shard]) -> HeldOut:
        return held_out_packs(
            shards, seed=args.seed, fraction=args.eval_fraction, max_rows=args.eval_rows,
            pack_length=args.pack_length,
        )  # fmt: skip

    if subject.state is not None and subject.is_of(dataset.plan.sha256):
        num_shards = seen_shards(Cursor(**subject.state["cursor"]), dataset.num_shards)
    else:  # ranks may see different ones while stage 1 goes on: the main rank's count is taken
        if setup.world.is_main:
            first_rows(committed())
        num_shards = int(setup.world.sum([float(opened)])[0])
    held_out = first_rows(
        dataset.wait_for_shard(index, timeout_s=args.shard_timeout) for index in range(num_shards)
    )
    if held_out.rows == 0:
        raise run.UserError(
            f"--eval-fraction {args.eval_fraction}: holds no row of {num_shards} shards out that "
            "has two generated tokens in a row; raise it (1: all rows)"
        )
    return held_out


# ---- the report


def make_report(
    setup: Setup, subject: Subject, held_out: HeldOut, result: Evaluation, *, parameters: int
) -> dict[str, Any]:
    """What report.json holds: figures as common/evaluation_report.py shows and defines them.

    Equal inputs give equal reports. What --decode adds, speeds too, is not in here.
    """
    args, drafts, size = setup.args, result.drafts, setup.config.block_size
    rows = rows_of(held_out.packs, held_out.sources)
    thinking = think_tokens(args.target)
    groups = break_down(
        rows,
        of_row=drafts.rows.numpy(),
        positions=drafts.positions.numpy(),
        lengths=drafts.lengths.numpy(),
        expected=None if drafts.expected is None else drafts.expected.numpy(),
        think_tokens=thinking,
    )
    walked = drafts.walk(block_size=size)
    slots: dict[str, Any] = {
        "accuracy": result.slot_accuracy,
        "conditional_accuracy": result.slot_conditional_accuracy,
    }
    if result.slot_overlap is not None:
        slots["overlap"] = result.slot_overlap
    return {
        "version": 1,
        "drafter": {
            "path": str(subject.path),
            "step": None if subject.state is None else subject.state["step"],
            "layers": setup.config.num_hidden_layers,
            "parameters": parameters,
        },
        "target": args.target,
        "data": args.data,
        "seed": args.seed,
        "eval_fraction": args.eval_fraction,
        "block_size": size,
        "rows": held_out.rows,
        "anchors": len(drafts.lengths),
        "loss": result.loss,
        "simulated": {
            "all_anchors": result.acceptance_length,
            "row_mean": row_mean(drafts.lengths, drafts),
            "walked": result.walked_acceptance_length,
            "walked_row_mean": sum(t / s for t, s in walked) / len(walked),
            "walked_tokens": sum(tokens for tokens, _ in walked),
            "walked_steps": sum(steps for _, steps in walked),
        },
        "expected": expected_figures(result, temperature=args.temperature),
        "histogram": drafts.histogram(block_size=size),
        "slots": slots,
        "controls": [
            {**dataclasses.asdict(control), "share": control.share} for control in result.controls
        ],
        "context": result.context,
        "verdict": result.verdict,
        "groups": {
            kind: [dataclasses.asdict(group) for group in found] for kind, found in groups.items()
        },
        "speed": speed_figures(setup, drafts, parameters=parameters),
        "notes": notes(setup, subject, result, has_parts=thinking is not None),
    }


def row_mean(figures: torch.Tensor, drafts: Drafts) -> float:
    """The mean of the rows' own means of a figure (A,) of every anchor."""
    counts = torch.bincount(drafts.rows)
    sums = torch.bincount(drafts.rows, weights=figures.double())
    return float((sums / counts).mean())


def expected_figures(result: Evaluation, *, temperature: float) -> dict[str, Any] | None:
    """The acceptance to expect when sampling; None for an evaluation without it."""
    if result.drafts.expected is None:
        return None
    return {
        "temperature": temperature,
        "all_anchors": result.expected_acceptance_length,
        "row_mean": row_mean(result.drafts.expected, result.drafts),
    }


def speed_figures(setup: Setup, drafts: Drafts, *, parameters: int) -> dict[str, Any] | None:
    """Speed-up and break-even of this drafter's blocks, whole or cut; None without their cost."""
    cost, origin = setup.args.draft_cost, "--draft-cost"
    if cost is None:
        target = count_parameters(setup.args.target)
        if target is None:
            return None
        head = setup.ends.head.numel()
        cost = (parameters + head) / (target + head)
        origin = (
            f"drafter {run.format_count(parameters)} + head {run.format_count(head)} over target "
            f"{run.format_count(target + head)} parameters"
        )
    sizes = sorted({size for size in BLOCK_SIZES if size < setup.config.block_size}
                   | {setup.config.block_size})  # fmt: skip
    return {
        "draft_cost": cost,
        "from": origin,
        "blocks": [block_speed(drafts, size, cost=cost) for size in sizes],
    }


def block_speed(drafts: Drafts, size: int, *, cost: float) -> dict[str, Any]:
    """A block of `size`: its acceptance, what it gains, and what it would need to gain nothing.

    A step of the target and a draft take 1 + cost, and yield the walked acceptance length.
    """
    walked: Sequence[tuple[int, int]] = drafts.walk(block_size=size)
    length = sum(tokens for tokens, _ in walked) / sum(steps for _, steps in walked)
    return {
        "block_size": size,
        "walked": length,
        "all_anchors": float(drafts.lengths.clamp(max=size).double().mean()),
        "speed_up": length / (1 + cost),
        "break_even": 1 + cost,
        "break_even_rate": cost / (size - 1),
    }


def notes(setup: Setup, subject: Subject, result: Evaluation, *, has_parts: bool) -> list[str]:
    """What is missing from the report, or to be known of it."""
    found, args = [], setup.args
    if result.drafts.expected is None:
        found.append(
            "No expected acceptance: the hidden states come without the target's last ones "
            "(extract_hidden_online.py --final gives them)."
        )
    if not has_parts:
        found.append("Thinking and answer are not told apart: the target has no </think> token.")
    if subject.state is not None and subject.is_of(setup.dataset.plan.sha256):
        settings = subject.state["settings"]
        if settings["seed"] != args.seed or settings["eval_fraction"] < args.eval_fraction:
            found.append("Some of these rows were trained on: --seed or --eval-fraction differ.")
    return found


def print_figures(report: Mapping[str, Any], path: Path) -> None:
    """The main figures on stdout."""
    simulated, expected, speed = report["simulated"], report["expected"], report["speed"]
    rows = [
        ("drafter", report["drafter"]["path"]),
        ("rows", f"{report['rows']:,} with {report['anchors']:,} anchors"),
        ("held-out loss", f"{report['loss']:.4f}"),
        ("acceptance length, all anchors", f"{simulated['all_anchors']:.3f}"),
        ("acceptance length, walked", f"{simulated['walked']:.3f} of {report['block_size']}"),
    ]
    if expected is not None:
        rows.append(
            (f"expected at temperature {expected['temperature']:g}",
             f"{expected['all_anchors']:.3f}")
        )  # fmt: skip
    if (real := report["real"]) is not None:
        rows += [
            (f"acceptance length, real, {real['rows']} rows",
             f"greedy {real['greedy']['tokens_per_step']:.3f} (walked {real['walked']:.3f}), "
             f"sampled {real['sampled']['tokens_per_step']:.3f}"),
            ("greedy text as without a drafter",
             f"{real['same_text']} of {real['rows']} rows; as in the data {real['own_text']}"),
        ]  # fmt: skip
    rows.append(("controls", report["verdict"]))
    if speed is not None:
        best = max(speed["blocks"], key=lambda block: block["speed_up"])
        rows.append(
            ("expected speed-up", f"{best['speed_up']:.2f}x, blocks of {best['block_size']}")
        )
    rows += [("note", note) for note in report["notes"]]
    rows.append(("report", str(path)))
    run.print_table("Evaluation", rows)
