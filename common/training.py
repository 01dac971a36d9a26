"""A run under way, and what it does in a step: gradients, update, evaluation, checkpoint."""

import argparse
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common import dist, run
from common.batches import Cursor, HeldOut, held_out_packs, seen_shards
from common.checkpoint import Checkpoints
from common.drafting import StepSums, accumulate_gradients, micro_batches
from common.evaluating import evaluate_rows
from common.feed import ReadyStep
from common.guards import MAX_SKIPPED, Guards
from common.journal import Journal
from common.lifetime import StopRequest
from common.memory import Memory, measure_memory
from common.outcome import Pace
from common.schedule import learning_rate
from common.setup import Setup
from common.status import Status
from common.verdict import Evaluation

MAX_GRAD_NORM = 1.0
SKIPPED_ROWS_FILE = "skipped-rows.json"


@dataclass
class RunState:
    """Where the run stands; `saved` and `evaluated` are the steps at which that was done last.

    former: the settings that the run had before an --allow-change, each time.
    """

    step: int
    cursor: Cursor
    horizon: int
    guards: Guards
    former: list[dict[str, Any]] = field(default_factory=list)
    saved: int = -1
    evaluated: int = -1


@dataclass
class Training:
    """A run under way: what it stands on, what is trained, where it stands, who is told."""

    setup: Setup
    drafter: Any
    optimizer: torch.optim.Optimizer
    state: RunState
    checkpoints: Checkpoints
    stop: StopRequest
    log: Any
    journal: Journal | None  # on the main rank alone, like the status
    status: Status | None
    pace: Pace = field(default_factory=Pace)
    evaluation: Evaluation | None = None  # the last one

    @property
    def args(self) -> argparse.Namespace:
        return self.setup.args

    @property
    def world(self) -> dist.World:
        return self.setup.world

    def tell(self, **fields: Any) -> None:
        if self.status is not None:
            self.status.update(**fields)


def gradients(training: Training, ready: ReadyStep) -> StepSums:
    """Forward and backward of the next step's batch; gradients end up summed over ranks."""
    args, setup = training.args, training.setup
    batches = micro_batches(
        ready,
        setup.config,
        step=training.state.step + 1,
        seed=args.seed,
        size=args.micro_batch,
        num_anchors=setup.num_anchors,
        gamma=args.gamma,
        device=training.world.device,
    )
    return accumulate_gradients(
        training.drafter,
        setup.config,
        setup.ends,
        batches,
        loss_kind=args.loss,
        attention=args.attention,
        world=training.world,
    )


def dry_step(training: Training, ready: ReadyStep) -> Memory:
    """A step at the full shape that changes no weight: what does not fit shows in the beginning."""
    gradients(training, ready)
    training.optimizer.zero_grad()
    moments = sum(
        2 * weight.to_local().numel() * weight.element_size()
        for weight in training.drafter.parameters()
    )
    memory = measure_memory(training.world.device, still_to_come=moments)
    training.log.info(
        f"dry step fits: memory_peak={run.format_bytes(memory.peak)} "
        f"headroom={run.format_bytes(memory.left)}"
    )
    return memory


def train_step(training: Training, ready: ReadyStep, *, data_wait_s: float) -> dict[str, Any]:
    """One optimizer step on the global batch; its line of metrics.

    A loss or gradient that is not finite changes no weight, on all ranks alike. Raises UserError on
    all ranks for hidden states that cannot be right, and when too many steps in a row are skipped.
    """
    began, args, state = time.monotonic(), training.args, training.state
    sums = gradients(training, ready)
    state.guards.band.check(sums.tap_figures, layers=args.layers)
    norm = nn.utils.clip_grad_norm_(training.drafter.parameters(), MAX_GRAD_NORM)
    grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    step = state.step + 1
    rate = learning_rate(
        step, peak=args.learning_rate, warmup_ratio=args.warmup_ratio, horizon=state.horizon
    )
    skipped = not all(map(math.isfinite, (sums.loss, sums.selector_loss, grad_norm)))
    if not skipped:
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        training.optimizer.step()
    training.optimizer.zero_grad()
    note_skipped(training, ready, skipped=skipped)
    compute_s = time.monotonic() - began
    return {
        "step": step,
        "loss": None if skipped else sums.loss,
        "slot_accuracy": sums.correct / max(sums.supervised, 1),
        **selector_metrics(training, sums, skipped=skipped),
        "grad_norm": None if skipped else grad_norm,
        "learning_rate": rate,
        "tokens": sums.tokens,
        "loss_tokens": sums.loss_tokens,
        "anchors": sums.anchors,
        "skipped_steps": state.guards.skipped.total,
        "step_s": data_wait_s + compute_s,
        "data_wait_s": data_wait_s,
        "compute_s": compute_s,
        "tokens_per_s": sums.tokens / (data_wait_s + compute_s),
    }


def selector_metrics(training: Training, sums: StepSums, *, skipped: bool) -> dict[str, Any]:
    """Those of a DFlash 2; its accuracy is with the true token before each slot given."""
    if training.setup.config.draft == "dflash":
        return {}
    return {
        "selector_loss": None if skipped else sums.selector_loss,
        "selector_accuracy": sums.selector_correct / max(sums.supervised, 1),
    }


def note_skipped(training: Training, ready: ReadyStep, *, skipped: bool) -> None:
    """Count steps without a finite loss; after too many in a row, name the rows of the last one."""
    counts, step = training.state.guards.skipped, training.state.step + 1
    too_many = counts.count(skipped=skipped)
    if skipped:
        training.log.warning(f"step={step} skipped: its loss or gradient is not finite")
        training.tell(last_error=f"step {step} was skipped: not finite")
    if not too_many:
        return
    path = training.args.output / SKIPPED_ROWS_FILE
    if training.world.is_main:
        run.write_atomic(path, run.json_bytes({"step": step, "row_ids": ready.step.row_ids}))
    raise run.UserError(
        f"{MAX_SKIPPED} steps in a row without a finite loss; the last one's row ids are in "
        f"{path}. Look at them, or lower --learning-rate"
    )


def evaluate_now(training: Training) -> None:
    """Evaluate on the first held-out rows of the shards up to the cursor, and write it down."""
    args, setup, state = training.args, training.setup, training.state
    seen = seen_shards(state.cursor, setup.dataset.num_shards)
    shards = (
        setup.dataset.wait_for_shard(index, timeout_s=args.shard_timeout) for index in range(seen)
    )
    held_out, failure = HeldOut(), None
    try:
        held_out = held_out_packs(
            shards,
            seed=args.seed,
            fraction=args.eval_fraction,
            max_rows=args.eval_rows,
            pack_length=args.pack_length,
        )
    except run.UserError as error:  # on this rank alone, maybe
        failure = error
    if training.world.sum([float(failure is not None)])[0]:
        raise failure or run.UserError("another rank could not read the held-out rows")
    state.evaluated = state.step
    if held_out.rows == 0:
        return
    training.tell(state="evaluating")
    result = evaluate_rows(setup, training.drafter, held_out, sample_controls=True)
    training.evaluation = result
    training.tell(state="training", acceptance_length=result.walked_acceptance_length)
    if training.journal is not None:
        training.log.info(
            f"step={state.step} eval_loss={result.loss:.4f} "
            f"acceptance={result.acceptance_length:.3f} "
            f"walked_acceptance={result.walked_acceptance_length:.3f} rows={held_out.rows}"
        )
        training.journal.write({"step": state.step, **metrics(result), "eval_rows": held_out.rows})
        training.journal.draw_curves()
        if result.ignores_context:
            training.log.warning(f"step={state.step} {result.verdict}")
    if result.ignores_context:
        training.tell(last_error=f"step {state.step}: {result.verdict}")


def metrics(result: Evaluation) -> dict[str, Any]:
    """The figures of an evaluation that metrics.jsonl keeps."""
    figures: dict[str, Any] = {
        "eval_loss": result.loss,
        "eval_acceptance_length": result.acceptance_length,
        "eval_walked_acceptance_length": result.walked_acceptance_length,
        "eval_slot_accuracy": [value or 0.0 for value in result.slot_accuracy],
        "eval_slot_conditional_accuracy": list(result.slot_conditional_accuracy),
        "eval_histogram": result.drafts.histogram(block_size=len(result.slot_accuracy) + 1),
    }
    if result.expected_acceptance_length is not None:
        figures["eval_expected_acceptance_length"] = result.expected_acceptance_length
    for control in result.controls:
        figures[f"eval_{control.name}_acceptance_length"] = control.control
    return figures


def refuse_export(training: Training) -> None:
    """Raise UserError for a drafter that ignores its context, unless --force lets it through.

    A drafter that is too weak to tell, or that was not evaluated, is exported with a warning.
    """
    result, args = training.evaluation, training.args
    if result is None:
        if training.world.is_main:
            training.log.warning(
                "exported, though no row was held out to tell whether the drafter uses its "
                "context: --eval-only with --eval-fraction tells it"
            )
        return
    if result.ignores_context and not args.force:
        raise run.UserError(
            f"not exported: {result.verdict}. Labels, mask or taps are wrong, or more data is "
            "needed;\nthe checkpoint is kept: rerun with --force to export it all the same"
        )
    if training.world.is_main and (result.ignores_context or result.is_weak):
        training.log.warning(f"exported, though {result.verdict}")


def save_checkpoint(training: Training, *, finished: bool) -> None:
    """Begin to save everything a resume needs in a folder of this step."""
    state = training.state
    training.checkpoints.save(
        state.step,
        model=training.drafter,
        optimizer=training.optimizer,
        state={
            "cursor": vars(state.cursor),
            "finished": finished,
            "former_settings": state.former,
            "guards": state.guards.to_json(),
            "horizon": state.horizon,
            "settings": training.setup.settings,
        },
    )
    state.saved = state.step
