"""What a training run tells: metrics.jsonl, tensorboard/ and curves.png in the run folder.

metrics.jsonl holds one JSON object a line: every step (step, loss, slot_accuracy, grad_norm,
learning_rate, tokens, loss_tokens, anchors, skipped_steps, time, *_s, *_per_s; loss and grad_norm
are null where the step was skipped) and every evaluation (step, eval_loss,
eval_acceptance_length, eval_walked_acceptance_length, eval_zeroed_acceptance_length,
eval_shifted_acceptance_length, eval_slot_accuracy, eval_slot_conditional_accuracy,
eval_histogram, eval_rows, time; with --final hidden states eval_expected_acceptance_length). Keys
that end in _s or _per_s and `time` are the only ones that differ between equal runs.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from torch.utils.tensorboard import SummaryWriter

from common.run import UserError, utc_now, write_atomic

REPORTERS = ("wandb", "trackio")
METRICS_FILE = "metrics.jsonl"


class Journal:
    """Appends to the run folder's metrics.

    On a resume, what came after the checkpoint of `resume_step` is cut first: later steps, and the
    evaluation at that step, which is made again.
    """

    def __init__(
        self, folder: Path, *, resume_step: int, report_to: str, settings: Mapping[str, Any]
    ) -> None:
        self._folder, self._warned, self._drawn = folder, False, False
        self._reporter = open_reporter(report_to, folder, settings)
        self._path = folder / METRICS_FILE
        kept = [
            entry
            for entry in read_metrics(folder)
            if entry["step"] < resume_step or (entry["step"] == resume_step and "loss" in entry)
        ]
        write_atomic(self._path, b"".join(_line(entry) for entry in kept))
        walked = [e["eval_walked_acceptance_length"] for e in kept if "eval_loss" in e]
        self.acceptance_length = walked[-1] if walked else 1.0  # the last one measured, walked
        self._file = self._path.open("ab")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one entry, with the time added; readers see whole lines.

        A full disk is a warning: what could not be written is tried again with the next entry.
        """
        entry, self._drawn = {**entry, "time": utc_now()}, False
        self.acceptance_length = entry.get("eval_walked_acceptance_length", self.acceptance_length)
        scalars = {
            key: value
            for key, value in entry.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        with self._forgiving():
            self._file.write(_line(entry))
            self._file.flush()
        with self._forgiving():
            for key, value in scalars.items():
                self._board.add_scalar(key, value, entry["step"])
        if self._reporter is not None:
            with self._forgiving():
                self._reporter.log(scalars, step=entry["step"])

    def draw_curves(self) -> None:
        """Write curves.png anew from all metrics so far, when it lacks some of them."""
        if not self._drawn:
            with self._forgiving():
                draw_curves(read_metrics(self._folder), self._folder / "curves.png")
                self._drawn = True

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a reporter may raise anything
            if not self._warned:
                reason = getattr(error, "strerror", None) or repr(error)
                logging.getLogger(__name__).warning(
                    f"{self._folder}: cannot write metrics and curves, or report them ({reason})"
                )
            self._warned = True

    def close(self) -> None:
        for part in (self._file, self._board):
            with self._forgiving():
                part.close()
        if self._reporter is not None:
            with self._forgiving():
                self._reporter.finish()


def open_reporter(name: str, folder: Path, settings: Mapping[str, Any]) -> Any:
    """wandb or trackio, which take the same calls; None for "none".

    A resumed run goes on under its name. Raises UserError when the package is missing, or does not
    start.
    """
    if name == "none":
        return None
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"--report-to {name}: pip install {name} first ({error})") from error
    own = {}
    if name == "wandb":  # an id that no other folder of this name has
        place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
        own = {"id": f"{folder.name}-{place}", "dir": str(folder)}
    settings = dict(settings)
    try:
        package.init(project="dflash", name=folder.name, config=settings, resume="allow", **own)
    except Exception as error:  # no login, no network, a service that is down
        raise UserError(f"--report-to {name}: {error}") from error
    return package


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run folder's metrics.jsonl, oldest first.

    Lines that a crash has cut or blanked are left out.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    entries = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def draw_curves(metrics: list[dict[str, Any]], path: Path) -> None:
    """Plot the loss and the held-out acceptance length over steps, side by side."""
    steps = [entry for entry in metrics if "loss" in entry]
    evaluations = [entry for entry in metrics if "eval_loss" in entry]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot([e["step"] for e in steps], [e["loss"] for e in steps], lw=0.8, label="training")
    left.plot(
        [e["step"] for e in evaluations],
        [e["eval_loss"] for e in evaluations],
        marker="o",
        label="held-out rows",
    )
    left.set(xlabel="step", ylabel="loss (weighted cross-entropy)", title="Loss")
    for key, label, style in (
        ("eval_acceptance_length", "mean over all anchors", "-"),
        ("eval_walked_acceptance_length", "walked, as in serving", "-"),
        ("eval_zeroed_acceptance_length", "control: hidden states zeroed", ":"),
        ("eval_shifted_acceptance_length", "control: hidden states shifted", ":"),
    ):
        points = [
            (e["step"], e.get(key, math.nan)) for e in evaluations
        ]  # older ones lack controls
        right.plot(*zip(*points, strict=True), marker="o", ls=style, label=label)
    right.set(
        xlabel="step", ylabel="tokens per target step", title="Acceptance length on held-out rows"
    )
    right.set_ylim(bottom=0.0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines and len(axes.lines[0].get_xdata()):
            axes.legend()
    temporary = path.with_name(f".{path.name}")
    try:
        figure.savefig(temporary, dpi=120, format="png")
        temporary.replace(path)
    finally:
        pyplot.close(figure)
        temporary.unlink(missing_ok=True)


def _line(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(entry, sort_keys=True) + "\n").encode()
