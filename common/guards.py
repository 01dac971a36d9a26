"""What stops a training run that looks fine and is not: odd hidden states, losses without a number.

A hybrid target behind an engine once delivered zeros only, and the loss still fell. So every step's
hidden states are looked at before they may change a weight: all finite, not all alike, and each
layer's mean norm inside a band that the first steps of the run have set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from common.run import UserError

BAND_STEPS = 10  # that set the band
BAND_FACTOR = 3.0  # how far outside of what they showed a mean norm may lie
MAX_SKIPPED = 10  # steps in a row without a finite loss


def tap_figures(taps: torch.Tensor, real: torch.Tensor, *, num_layers: int) -> torch.Tensor:
    """Sums over a forward's tokens that tell whether its hidden states are sound, (3, L) float64.

    taps (1, S, L*H), real (S,) bool: not padding. Rows: the norms, how many of them are not finite,
    and 1 where a layer's norms are not all alike.
    """
    norms = torch.stack(
        [
            torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)
            for states in taps[0].chunk(num_layers, dim=-1)
        ]
    )
    finite = norms.isfinite() | ~real
    inside = norms.where(finite & real, 0.0)
    differ = inside.amax(dim=1) > norms.where(real, math.inf).amin(dim=1)
    return torch.stack([inside.double().sum(dim=1), (~finite).double().sum(dim=1), differ.double()])


@dataclass
class HiddenStateBand:
    """The range of each layer's mean norm over the first steps; kept in checkpoints."""

    steps: int = 0
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def check(self, figures: torch.Tensor, *, tokens: int, layers: Sequence[int]) -> None:
        """Judge a step by its summed `tap_figures`, and learn from it while the band is open.

        Raises UserError that names the layer.
        """
        if tokens == 0:
            return
        means = (figures[0] / tokens).tolist()
        for index, layer in enumerate(layers):
            if figures[1, index]:
                self._refuse(layer, f"{int(figures[1, index]):,} of them are not finite")
            if not figures[2, index]:
                self._refuse(layer, "they are all alike")
        if self.steps < BAND_STEPS:
            self.low = [min(pair) for pair in zip(self.low or means, means, strict=True)]
            self.high = [max(pair) for pair in zip(self.high or means, means, strict=True)]
            self.steps += 1
        for layer, mean, low, high in zip(layers, means, self.low, self.high, strict=True):
            if not low / BAND_FACTOR <= mean <= high * BAND_FACTOR:
                self._refuse(
                    layer,
                    f"their mean norm is {mean:.3g}, in the first steps {low:.3g} to {high:.3g}",
                )

    def _refuse(self, layer: int, what: str) -> None:
        raise UserError(
            f"the hidden states of layer {layer} cannot be right: {what}; check the target and its "
            "server (extract_hidden_online.py --check)"
        )

    def __str__(self) -> str:
        return ",".join(
            f"{low:.3g}-{high:.3g}" for low, high in zip(self.low, self.high, strict=True)
        )


@dataclass
class SkippedSteps:
    """Steps without a finite loss or gradient, which change nothing; kept in checkpoints."""

    total: int = 0
    in_a_row: int = 0

    def count(self, *, skipped: bool) -> bool:
        """Note a step; whether there were too many in a row now."""
        self.total += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return self.in_a_row >= MAX_SKIPPED


@dataclass
class Guards:
    """What a run knows about its own health, beside weights and cursor."""

    band: HiddenStateBand = field(default_factory=HiddenStateBand)
    skipped: SkippedSteps = field(default_factory=SkippedSteps)

    def to_json(self) -> dict[str, Any]:
        return {"band": vars(self.band), "skipped": vars(self.skipped)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Guards":
        return cls(HiddenStateBand(**facts["band"]), SkippedSteps(**facts["skipped"]))
