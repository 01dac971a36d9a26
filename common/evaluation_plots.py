"""The plots of an evaluation's report, as SVG: from plain figures, the same bytes for the same."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9822b", "#3a8f5c", "#8a8f98"
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "font.size": 10,
    "svg.hashsalt": "dflash",  # ids in the file would be random
}


def histogram_plot(histogram: Sequence[int]) -> bytes:
    """Shares of the acceptance lengths 1 ... B over all anchors."""
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(5.6, 3.2), layout="constrained")
        lengths = range(1, len(histogram) + 1)
        bars = axes.bar(lengths, [100 * count / sum(histogram) for count in histogram], color=BLUE)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, color="#444")
        axes.set(
            xlabel="tokens of a target step", ylabel="% of anchors", title="Acceptance length",
            xticks=list(lengths),
        )  # fmt: skip
        return _svg(figure)


def slots_plot(slots: Mapping[str, Sequence[float | None]]) -> bytes:
    """Accuracy, conditional accuracy and, where it was measured, overlap of each draft slot."""
    shown = (
        ("accuracy", "accuracy", BLUE),
        ("conditional_accuracy", "accuracy, all before right", ORANGE),
        ("overlap", "sum min(p, q)", GREEN),
    )
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(5.6, 3.2), layout="constrained")
        for key, label, color in shown:
            if values := slots.get(key):
                known = [(slot, v) for slot, v in enumerate(values, start=1) if v is not None]
                axes.plot(*zip(*known, strict=True), marker="o", ms=4, color=color, label=label)
        slot_numbers = range(1, len(slots["accuracy"]) + 1)
        axes.set(xlabel="slot of the block", title="Drafts by slot", xticks=list(slot_numbers))
        axes.set_ylim(0, 1.03)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
        return _svg(figure)


def groups_plot(groups: Sequence[Mapping[str, Any]], *, title: str, mean: float) -> bytes:
    """Acceptance length of each group, and the mean over all anchors as a line."""
    labels = [_short(group["label"]) for group in groups]
    lengths = [group["acceptance_length"] for group in groups]
    with pyplot.rc_context(STYLE):
        height = 1.1 + 0.3 * len(groups)
        figure, axes = pyplot.subplots(figsize=(5.6, height), layout="constrained")
        bars = axes.barh(range(len(groups)), lengths, color=BLUE, height=0.65)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8, color="#444")
        axes.axvline(mean, color=GREY, lw=1, ls="--", zorder=0)
        axes.set(title=title, xlabel="tokens of a target step (dashed: all anchors)")
        axes.set_yticks(range(len(groups)), labels, parse_math=False)  # "$" is a mere letter
        axes.set_xlim(0, max(*lengths, mean) * 1.12)
        axes.invert_yaxis()
        return _svg(figure)


def _short(label: str, limit: int = 28) -> str:
    """As a picture can show it: no line ends, nothing that XML forbids."""
    label = "".join(letter if letter.isprintable() else " " for letter in label)
    return label if len(label) <= limit else label[: limit - 3] + "..."


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return buffer.getvalue()
