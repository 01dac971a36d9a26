"""Held-out loss, slot accuracy and acceptance length of a drafter, from the target's own rows.

Every legal anchor of the held-out rows is drafted from, in passes of a fixed number of anchors, and
each draft is compared with what the target really said (greedy, teacher-forced). Two acceptance
lengths are given, both counting the bonus token: the mean over all anchors, which favours easy
stretches, and the walked one, which starts at the first generated token and jumps by what was
accepted, as serving does.

Two controls draft with hidden states that say nothing, or something else: a drafter that does as
well with them owes nothing to its context, whatever its loss (shifted labels, a mask that shows the
answer, taps of another model).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from common.acceptance import (
    SLOT_SUMS,
    Judged,
    acceptance_lengths,
    expected_lengths,
    judge_drafts,
    shift_by_one,
    slot_shares,
    slot_sums,
)
from common.batches import PackedRows, seeded_generator
from common.blocks import Blocks, Pack, decay_weights, legal_anchors, make_blocks
from common.dist import World
from common.drafter import Drafter
from common.drafter_config import DrafterConfig
from common.drafting import TargetEnds, draft_blocks, padded_taps, tensor_pack
from common.run import UserError
from common.target import Taps
from common.verdict import Control, Drafts, Evaluation
from common.wire import HiddenStates

CHUNK_SLOTS = 512  # whose logits exist at once: 0.5 GB in float32 at 248,320 words
REAL, ZEROED, SHIFTED = "real", "zeroed", "shifted"


@dataclass(frozen=True)
class _Pass:
    """One forward: anchors of a pack, their hidden states as `kind` says; `first` of its kind."""

    pack: int
    kind: str
    anchors: torch.Tensor
    first: int


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    config: DrafterConfig,
    ends: TargetEnds,
    hidden_states: HiddenStates,
    *,
    packs: Sequence[PackedRows],
    num_anchors: int,
    gamma: float,
    temperature: float,
    sample_controls: bool,
    seed: int,
    attention: str,
    world: World,
) -> Evaluation:
    """Evaluate on `packs`; every rank calls it with the same packs and gets the same figures.

    The passes, `num_anchors` anchors of one pack each, are dealt to the ranks in turn; ranks with
    one pass less repeat one without counting it, since a sharded drafter needs all of them. The
    controls draft from all anchors too, or with `sample_controls` from `num_anchors` a pack, drawn
    by `seed`. Raises UserError on all ranks alike when one of them gets no hidden states.
    """
    joined = [tensor_pack([pack], device=world.device) for pack in packs]
    legal = [torch.nonzero(legal_anchors(pack))[:, 0] for pack in joined]
    offsets = [0, *torch.tensor([len(anchors) for anchors in legal]).cumsum(0).tolist()]
    controls = legal
    if sample_controls:
        controls = [_sample(anchors, num_anchors, seed, pack) for pack, anchors in enumerate(legal)]
    passes, chosen = _plan_passes(legal, controls, num_anchors)
    has_final = hidden_states.description.final
    sums = _Sums(
        config.block_size,
        {REAL: offsets[-1], ZEROED: len(chosen), SHIFTED: len(chosen)},
        world.device,
    )
    loaded = _LoadedTaps(hidden_states, packs, ends, final=has_final)
    for turn in range(0, len(passes), world.size):
        counted = turn + world.rank < len(passes)
        here = passes[turn + world.rank] if counted else passes[turn]
        found = loaded.load(here.pack)
        if world.sum([float(not found)])[0]:
            raise loaded.failure or UserError(
                "another rank got no hidden states for the evaluation: is every server there?"
            )
        pack = joined[here.pack]
        blocks = make_blocks(
            pack,
            *_fixed(here.anchors, num_anchors),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
        )
        output = draft_blocks(
            drafter, config, ends, pack=pack, blocks=blocks, taps=loaded.taps(here.kind, pack),
            attention=attention,
        )  # fmt: skip
        judged = judge_drafts(
            output, ends.head, blocks, chunk_slots=CHUNK_SLOTS, temperature=temperature,
            final=loaded.final if here.kind == REAL else None,
            selector=drafter.candidate_selector,
        )  # fmt: skip
        if counted:
            sums.add(here, judged, blocks, gamma=gamma)
    sums.reduce(world)
    return _figures(sums, packs, legal, chosen, has_final=has_final)


def _sample(anchors: torch.Tensor, size: int, seed: int, pack: int) -> torch.Tensor:
    """At most `size` of a pack's anchors, ascending, the same at every evaluation."""
    if len(anchors) <= size:
        return anchors
    drawn = seeded_generator("controls", seed, pack).permutation(len(anchors))[:size]
    drawn.sort()
    return anchors[torch.from_numpy(drawn).to(anchors.device)]


def _plan_passes(
    legal: Sequence[torch.Tensor], controls: Sequence[torch.Tensor], num_anchors: int
) -> tuple[list[_Pass], torch.Tensor]:
    """All passes, pack by pack, and which of all anchors the controls draft from, (C,) int64."""
    passes, chosen, first = [], [], {REAL: 0, ZEROED: 0, SHIFTED: 0}
    for number, (anchors, sample) in enumerate(zip(legal, controls, strict=True)):
        chosen.append(first[REAL] + torch.searchsorted(anchors, sample))
        for kind, mine in ((REAL, anchors), (ZEROED, sample), (SHIFTED, sample)):
            for part in mine.split(num_anchors) if len(mine) else ():
                passes.append(_Pass(number, kind, part, first[kind]))
                first[kind] += len(part)
    return passes, torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64)


def _fixed(anchors: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad anchors to `size`, with a mask of the real ones."""
    padded = torch.zeros(size, dtype=anchors.dtype, device=anchors.device)
    padded[: len(anchors)] = anchors
    return padded, torch.arange(size, device=anchors.device) < len(anchors)


class _LoadedTaps:
    """Hidden states of one pack at a time, asked for once for all its passes."""

    def __init__(
        self,
        hidden_states: HiddenStates,
        packs: Sequence[PackedRows],
        ends: TargetEnds,
        *,
        final: bool,
    ) -> None:
        self._hidden_states, self._packs, self._ends = hidden_states, packs, ends
        self._wants_final = final
        self._number: int | None = None
        self._taps: torch.Tensor | None = None
        self.failure: UserError | None = None  # why `load` could not
        self.final: torch.Tensor | None = None  # (S, H)

    def load(self, number: int) -> bool:
        """Have a pack's hidden states at hand; False when no server answers: see `failure`."""
        if self._number == number:
            return True
        pack = self._packs[number]
        try:
            asked = self._hidden_states.submit(pack.token_lists, final=self._wants_final)
            states: Taps = asked.result()
        except UserError as error:
            self.failure = error
            return False
        self._number = number
        self._taps = padded_taps([pack], [states.hidden], self._ends.embedding)
        if states.final is not None:
            self.final = padded_taps([pack], [states.final], self._ends.head)[0]
        return True

    def taps(self, kind: str, pack: Pack) -> torch.Tensor:
        """The taps as a pass of this kind wants them, (1, S, L*H)."""
        assert self._taps is not None
        if kind == ZEROED:
            return torch.zeros_like(self._taps)
        return shift_by_one(self._taps, pack.documents) if kind == SHIFTED else self._taps


class _Sums:
    """What this rank's passes gave, and after `reduce` those of all."""

    def __init__(self, block_size: int, counts: Mapping[str, int], device: torch.device) -> None:
        self.lengths = {
            kind: torch.zeros(count, dtype=torch.int64, device=device)
            for kind, count in counts.items()
        }
        self.expected = torch.zeros(counts[REAL], device=device)
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)  # and the sum of weights
        self.slots = torch.zeros(len(SLOT_SUMS), block_size - 1, dtype=torch.float64, device=device)

    def add(self, here: _Pass, judged: Judged, blocks: Blocks, *, gamma: float) -> None:
        place, real = slice(here.first, here.first + len(here.anchors)), len(here.anchors)
        self.lengths[here.kind][place] = acceptance_lengths(judged.right)[:real]
        if here.kind != REAL:
            return
        weights = decay_weights(blocks, gamma=gamma).view(-1, blocks.block_size)[:, 1:]
        self.loss += torch.stack([(weights * judged.cross_entropy).sum(), weights.sum()])
        self.slots += slot_sums(judged)
        if judged.overlap is not None:
            self.expected[place] = expected_lengths(judged.overlap)[:real]

    def reduce(self, world: World) -> None:
        for tensor in (*self.lengths.values(), self.expected, self.loss, self.slots):
            world.sum_tensor(tensor)


def _figures(
    sums: _Sums,
    packs: Sequence[PackedRows],
    legal: Sequence[torch.Tensor],
    chosen: torch.Tensor,
    *,
    has_final: bool,
) -> Evaluation:
    rows, positions, first = [], [], 0
    for pack, anchors in zip(packs, legal, strict=True):
        places = anchors.cpu()
        rows.append(torch.from_numpy(pack.documents)[places].long() + first)
        positions.append(torch.from_numpy(pack.positions)[places])
        first += len(pack.token_lists)
    drafts = Drafts(
        rows=torch.cat(rows),
        positions=torch.cat(positions),
        lengths=sums.lengths[REAL].cpu(),
        expected=sums.expected.cpu() if has_final else None,
    )
    walked = drafts.walk(block_size=sums.slots.shape[1] + 1)
    shares = slot_shares(sums.slots)
    real = sums.lengths[REAL][chosen]
    return Evaluation(
        loss=float(sums.loss[0] / sums.loss[1].clamp(min=1e-12)),
        acceptance_length=_mean(drafts.lengths),
        walked_acceptance_length=sum(t for t, _ in walked) / max(1, sum(s for _, s in walked)),
        expected_acceptance_length=None if drafts.expected is None else _mean(drafts.expected),
        slot_accuracy=shares["accuracy"],
        slot_conditional_accuracy=shares["conditional_accuracy"],
        slot_overlap=shares["overlap"] if has_final else None,
        controls=tuple(
            Control(kind, len(chosen), _mean(real), _mean(sums.lengths[kind]))
            for kind in (ZEROED, SHIFTED)
        ),
        drafts=drafts,
    )


def _mean(lengths: torch.Tensor) -> float:
    return float(lengths.double().mean())
