"""The figures of an evaluation, and what they say of the drafter."""

from dataclasses import dataclass

import torch

from common.acceptance import walked_acceptance

IGNORED_SHARE = 0.8  # of the accepted drafts, with hidden states that are no help
MIN_ACCEPTANCE = 1.2  # below it so few drafts are accepted that a share of them says nothing


@dataclass(frozen=True)
class Drafts:
    """The A anchors that were drafted from, on the CPU, in the order of rows and places.

    rows (A,) int64: which of the held-out rows · positions (A,) int64, of the anchors in their rows
    · lengths (A,) int64, acceptance lengths · expected (A,) float32, or None.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    expected: torch.Tensor | None

    def walk(self, *, block_size: int) -> list[tuple[int, int]]:
        """Walked (tokens, target steps) of each row, when blocks are cut at `block_size`."""
        lengths = self.lengths.clamp(max=block_size)
        counts = torch.bincount(self.rows).tolist()
        return [
            walked_acceptance(mine, places)
            for mine, places in zip(
                lengths.split(counts), self.positions.split(counts), strict=True
            )
        ]

    def histogram(self, *, block_size: int) -> list[int]:
        """How many anchors have each acceptance length, 1 to `block_size`."""
        return torch.bincount(self.lengths, minlength=block_size + 1)[1:].tolist()


@dataclass(frozen=True)
class Control:
    """Mean acceptance lengths over the same anchors: with real hidden states, and without."""

    name: str
    anchors: int
    real: float
    control: float

    @property
    def share(self) -> float | None:
        """The control's accepted drafts over the real ones; None without any."""
        return (self.control - 1) / (self.real - 1) if self.real > 1 else None

    @property
    def is_suspicious(self) -> bool:
        share = self.share
        return self.real >= MIN_ACCEPTANCE and share is not None and share >= IGNORED_SHARE


@dataclass(frozen=True)
class Evaluation:
    """Figures over held-out rows; those of slots are a tuple, slot 1 first, None where unknown.

    The loss is cross-entropy with position decay, whatever the drafter is trained with, so that
    runs of different --loss compare. Expected figures and slot_overlap are None when
    the source has no last hidden states of the target.
    """

    loss: float
    acceptance_length: float
    walked_acceptance_length: float
    expected_acceptance_length: float | None
    slot_accuracy: tuple[float | None, ...]
    slot_conditional_accuracy: tuple[float | None, ...]
    slot_overlap: tuple[float | None, ...] | None
    controls: tuple[Control, ...]
    drafts: Drafts

    @property
    def ignores_context(self) -> bool:
        """Whether the drafts are as good without the target's hidden states."""
        return any(control.is_suspicious for control in self.controls)

    @property
    def is_weak(self) -> bool:
        """Whether too few drafts are accepted for the controls to tell anything.

        At the controls' own anchors, which may be fewer than all.
        """
        return any(control.real < MIN_ACCEPTANCE for control in self.controls)

    @property
    def context(self) -> str:
        """Whether the drafter's context is "used", "ignored", or that is "unknown"."""
        return "ignored" if self.ignores_context else "unknown" if self.is_weak else "used"

    @property
    def verdict(self) -> str:
        """What the controls say, in a sentence."""
        for control in self.controls:
            if control.is_suspicious:
                return (
                    f"the drafter ignores its context: with {control.name} hidden states it still "
                    f"reaches {control.share:.0%} of the accepted drafts ({control.control:.2f} "
                    f"against {control.real:.2f} tokens a step)"
                )
        if self.is_weak:
            return (
                f"too few drafts are accepted to tell whether the drafter uses its context "
                f"({min(control.real for control in self.controls):.2f} tokens a step, "
                f"{MIN_ACCEPTANCE} are needed)"
            )
        shares = [f"{control.name} {control.share or 0:.0%}" for control in self.controls]
        return f"the drafter uses its context (accepted drafts left: {', '.join(shares)})"
