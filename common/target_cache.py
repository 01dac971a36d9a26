"""A target's state after some tokens of one sequence, which can give up the last ones again.

Keys and values of attention are cut off at their end. A recurrent state (Gated DeltaNet and its
like) has no end to cut at, and what transformers' `crop` leaves of it is wrong without a word: such
layers are copied before tokens that may be given up, put back, and the kept tokens run once more.
That costs a forward of a few tokens for each rejected block, which engines that keep the state
after every token do not pay. The cache's layers say which they are, so no model is named here.
"""

import copy
from typing import Any, NamedTuple

import torch

from common.target import Target


class Extension(NamedTuple):
    """logits (num_logits, V) of the last tokens · taps (T, L*H) bfloat16 of all, without
    `with_taps` (0, L*H)."""

    logits: torch.Tensor
    taps: torch.Tensor


class TargetCache:
    """One sequence of a target that was loaded with `final`, empty at first."""

    def __init__(self, target: Target, *, with_taps: bool) -> None:
        self._target, self._with_taps = target, with_taps
        self._cache = target.new_cache()
        self._revocable: torch.Tensor | None = None  # the tokens that `keep` decides on
        self._saved: dict[int, Any] = {}  # the recurrent layers before them

    def extend(self, ids: torch.Tensor, *, num_logits: int) -> Extension:
        """Run (T,) int64 ids that follow the ones before."""
        assert self._revocable is None, "what was tried last is neither kept nor given up"
        return self._extend(ids, num_logits=num_logits, with_taps=self._with_taps)

    def try_block(self, ids: torch.Tensor) -> Extension:
        """Run (T,) ids, with the logits of all; `keep` must then say how many of them stay.

        Something must have been run before: the layers of an empty cache do not yet know their
        kind.
        """
        self._saved = {}
        layers = self._cache.layers if len(ids) > 1 else []  # the first one always stays
        for index, layer in enumerate(layers):
            if not layer.is_croppable:
                self._saved[index] = copy.deepcopy(layer)
            elif hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()  # a sliding window that forgets cannot be cut
        extension = self.extend(ids, num_logits=len(ids))
        self._revocable = ids
        return extension

    def keep(self, count: int) -> None:
        """Give up all but the first `count` tokens of the block that was tried, at least one."""
        ids, saved = self._revocable, self._saved
        assert ids is not None and 0 < count <= len(ids), (count, ids)
        self._revocable, self._saved = None, {}
        if len(ids) == 1:
            return
        again = bool(saved) and count < len(ids)
        self._crop(len(ids) if again else len(ids) - count)
        if again:
            for index, layer in saved.items():
                self._cache.layers[index] = layer
            self._extend(ids[:count], num_logits=1, with_taps=False)
            self._crop(0)

    def _extend(self, ids: torch.Tensor, *, num_logits: int, with_taps: bool) -> Extension:
        target = self._target
        taps = torch.empty(  # rounded as HiddenStates hands them out
            len(ids) if with_taps else 0,
            len(target.layers) * target.hidden_size,
            dtype=torch.bfloat16,
            device=target.device,
        )
        logits = target.extend(
            ids, self._cache, num_logits=num_logits, hidden=taps if with_taps else None
        )
        return Extension(logits, taps)

    def _crop(self, count: int) -> None:
        """Drop the last `count` tokens of layers that can; 0 trims recorded ones to their window.

        transformers takes the count as a negative number.
        """
        layers: list[Any] = self._cache.layers
        for layer in layers:
            if layer.is_croppable:
                layer.crop(-count)
