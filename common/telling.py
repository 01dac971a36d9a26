"""What a person sees of a training run: step by step, of a dry run, and at the end."""

import time
from collections.abc import Mapping
from typing import Any

from common import run
from common.attention import num_compiled_graphs
from common.batches import ShardPacking
from common.feed import StepFeed
from common.lifetime import Stopped
from common.memory import Memory
from common.outcome import bottleneck, held_out_rows
from common.training import Training, dry_step, gradients

NOT_YET = "at the end of the run: the same command goes on from here"
SELF_CHECK_STEP = 3  # of this process: caches are full, kernels are compiled


class StepProgress:
    """Tells of every step: metrics, bar, log lines, status, and once whether all looks sound."""

    def __init__(self, training: Training) -> None:
        self._training, self.steps = training, 0
        self.memory: Memory | None = None
        self._graphs = 0
        self._bar = None
        if training.journal is not None:
            self._bar = run.Progress(training.log, total=training.state.horizon, unit="step")
            self._bar.start_at(training.state.step)

    def tell(self, entry: Mapping[str, Any]) -> None:
        training = self._training
        self.steps += 1
        if self.steps > 1:  # the first one connects, compiles and fills caches
            training.pace.add(entry)
        if training.journal is None or self._bar is None:
            return
        training.journal.write(entry)
        state, args = training.state, training.args
        loss = "-" if entry["loss"] is None else f"{entry['loss']:.3f}"
        fields = {
            "loss": loss,
            "acceptance": f"{training.journal.acceptance_length:.2f}",
            "tokens/s": run.format_count(entry["tokens_per_s"]),
            "data_wait": f"{entry['data_wait_s'] / entry['step_s']:.0%}",
        }
        self._bar.update(1, **fields)
        training.tell(
            state="training",
            step=state.step,
            horizon=state.horizon,
            loss=entry["loss"],
            tokens_per_s=run.format_count(entry["tokens_per_s"]),
            eta_s=max(0, state.horizon - state.step) * (training.pace.mean_s or entry["step_s"]),
            bottleneck=bottleneck(training.pace, colocated=training.setup.is_colocated),
            skipped_steps=entry["skipped_steps"] or None,
        )
        if state.step == 1 or state.step % args.log_every == 0:
            training.log.info(step_line(entry, state.horizon))
        if self.steps == SELF_CHECK_STEP:
            training.log.info(self._self_check(entry))
        if training.world.device.type == "cuda":
            self._watch_compiler()

    def _watch_compiler(self) -> None:
        """Shapes never change, so nothing is compiled once every kind of forward has run."""
        graphs, state = num_compiled_graphs(), self._training.state
        warm = self.steps > SELF_CHECK_STEP and state.evaluated != state.step - 1
        if warm and graphs > self._graphs:
            self._training.log.warning(f"step={state.step} compiled again: {graphs} graphs now")
        self._graphs = graphs

    def _self_check(self, entry: Mapping[str, Any]) -> str:
        training = self._training
        assert self.memory is not None
        return "self-check " + run.format_fields(
            {
                "attention": training.args.attention,
                "device": training.world.device.type,
                "hidden_state_norms": training.state.guards.band,
                "loss_tokens": f"{entry['loss_tokens'] / max(entry['tokens'], 1):.1%}",
                "tokens/s": run.format_count(entry["tokens_per_s"]),
                "headroom": run.format_bytes(self.memory.left),
            }
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def step_line(entry: Mapping[str, Any], horizon: int) -> str:
    """One greppable line about a step."""
    skipped = entry["loss"] is None
    return run.format_fields(
        {
            "step": f"{entry['step']}/{horizon}",
            "loss": "skipped" if skipped else f"{entry['loss']:.4f}",
            "slot_accuracy": f"{entry['slot_accuracy']:.3f}",
            "grad_norm": "skipped" if skipped else f"{entry['grad_norm']:.3f}",
            "lr": f"{entry['learning_rate']:.2e}",
            "tokens/s": run.format_count(entry["tokens_per_s"]),
            "step_s": f"{entry['step_s']:.2f}",
            "data_wait_s": f"{entry['data_wait_s']:.2f}",
        }
    )


def shard_line(packing: ShardPacking) -> str:
    """One greppable line about what became of a shard's rows."""
    return run.format_fields({**vars(packing), "fill": f"{packing.fill:.1%}"})


def print_dry_run(training: Training, feed: StepFeed) -> None:
    """One step on the first batch, which changes nothing: the memory and the time it takes."""
    ready = feed.next(lambda: training.stop.signum is not None)
    if not training.world.agree(ready is not None):
        if training.stop.signum is not None or ready is not None:  # or another rank was stopped
            raise Stopped
        raise run.UserError("--dry-run: no step is left to take: the data is at its end")
    assert ready is not None
    memory = dry_step(training, ready)  # compiles and fills caches
    began = time.monotonic()
    sums = gradients(training, ready)
    seconds = time.monotonic() - began
    training.optimizer.zero_grad()
    if training.world.is_main:
        run.print_table(
            "Dry run: one step, no weight changed",
            [
                ("loss", f"{sums.loss:.3f}"),
                ("tokens a step", f"{sums.tokens:,}"),
                ("memory", run.format_bytes(memory.peak)),
                ("memory left", run.format_bytes(memory.left)),
                ("forward and backward", run.format_duration(seconds)),
                ("steps planned", f"{training.state.horizon:,}"),
                ("all of them", run.format_duration(seconds * training.state.horizon)),
            ],
        )


def print_summary(training: Training, *, finished: bool, wall_s: float) -> None:
    """What was trained, how well it drafts now, what held it up, and where it lies."""
    args, state = training.args, training.state
    parameters = sum(parameter.numel() for parameter in training.drafter.parameters())
    run.print_table(
        "Training",
        [
            ("target", args.target),
            ("drafter parameters", run.format_count(parameters)),
            ("steps", f"{state.step:,}"),
            ("steps skipped", f"{state.guards.skipped.total:,}"),
            *held_out_rows(args.output),
            *([("controls", training.evaluation.verdict)] if training.evaluation else []),
            ("bottleneck", bottleneck(training.pace, colocated=training.setup.is_colocated)),
            ("export", args.output / "export" if finished else NOT_YET),
            ("curves", args.output / "curves.png"),
            ("wall time", run.format_duration(wall_s)),
        ],
    )
