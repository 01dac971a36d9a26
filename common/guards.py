"""What stops a training run that looks fine and is not: odd hidden states, losses without a number.

A hybrid target behind an engine once delivered zeros only, and the loss still fell. So every step's
hidden states are looked at before they may change a weight: all finite, not all alike, and each
layer's median norm inside a band that the first steps of the run have set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from common.run import UserError

BAND_STEPS = 10  # that set the band
BAND_FACTOR = 3.0  # how far outside of what they showed a median norm may lie
MAX_SKIPPED = 10  # steps in a row without a finite loss; so many end the run


def tap_figures(taps: torch.Tensor, real: torch.Tensor, *, num_layers: int) -> torch.Tensor:
    """What tells whether the hidden states of a forward are sound, (3, L) float64.

    taps (1, S, L*H), real (S,) bool: not padding. Rows: the median norm (the first token of a
    document has one far above, so a mean would depend on how many there are), nan without any
    token; how many norms are not finite; 1 where a layer's norms are all alike.
    """
    norms = torch.stack(
        [
            torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)
            for states in taps[0].chunk(num_layers, dim=-1)
        ]
    )
    sound = norms.isfinite() & real
    median = norms.where(sound, math.nan).nanmedian(dim=1).values
    broken = (real & ~norms.isfinite()).sum(dim=1)
    low = norms.where(sound, math.inf).amin(dim=1)
    alike = (low == norms.where(sound, -math.inf).amax(dim=1)) & (real.sum() > 1)
    return torch.stack([median.double(), broken.double(), alike.double()])


@dataclass
class HiddenStateBand:
    """The range of each layer's median norm in the first steps; kept in checkpoints."""

    steps: int = 0
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def check(self, figures: torch.Tensor, *, layers: Sequence[int]) -> None:
        """Judge the `tap_figures` of all forwards of a step, (F, 3, L); learn while it is open.

        Raises UserError that names the layer.
        """
        medians, broken, alike = figures.unbind(dim=1)
        for index, layer in enumerate(layers):
            if broken[:, index].any():
                self._refuse(layer, f"{int(broken[:, index].sum()):,} of them are not finite")
            if alike[:, index].any():
                self._refuse(layer, "those of a forward are all alike")
        seen = medians[~medians.isnan().any(dim=1)]
        if len(seen) == 0:
            return  # a step of empty packs
        lowest, highest = seen.amin(dim=0).tolist(), seen.amax(dim=0).tolist()
        if self.steps < BAND_STEPS:
            self.low = [min(pair) for pair in zip(self.low or lowest, lowest, strict=True)]
            self.high = [max(pair) for pair in zip(self.high or highest, highest, strict=True)]
            self.steps += 1
        for layer, low, high, *norms in zip(
            layers, self.low, self.high, lowest, highest, strict=True
        ):
            for norm in norms:
                if not low / BAND_FACTOR <= norm <= high * BAND_FACTOR:
                    usual = f"{low:.3g} to {high:.3g}"
                    self._refuse(layer, f"their median norm is {norm:.3g}, at first {usual}")

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
        """Note a step; whether it is one too many in a row.

        That one is not noted: it ends the run before it counts as a step, and a resume takes it
        again.
        """
        if skipped and self.in_a_row + 1 >= MAX_SKIPPED:
            return True
        self.total += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return False


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
