"""--decode: held-out prompts completed for real, with the drafter and without it."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from common.batches import HeldOut
from common.decode import Decoded, decode_figures, decode_rows, pack_rows_apart
from common.dist import gather_weights
from common.drafter import Drafter
from common.run import UserError
from common.setup import Setup
from common.target import Target
from common.verdict import Drafts
from common.wire import ColocatedHiddenStates


def target_to_decode(setup: Setup) -> Target:
    """The target beside the drafter; with served hidden states it is loaded now, whole."""
    if isinstance(setup.hidden_states, ColocatedHiddenStates):
        return setup.hidden_states.target
    args = setup.args
    return Target.load(
        args.target,
        layers=args.layers,
        dtype=getattr(torch, args.dtype),
        device=setup.world.device,
        final=True,
    )


def rows_to_decode(held_out: HeldOut, count: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """The first `count` held-out rows that have a prompt to begin with, by their number.

    Ready-made ids may be supervised from the first one on. Raises UserError when there is none.
    """
    rows = enumerate(pack_rows_apart(held_out.packs))
    prompted = ((number, (ids, mask)) for number, (ids, mask) in rows if not mask[0])
    found = dict(itertools.islice(prompted, count))
    if count and not found:
        raise UserError(
            f"--decode {count}: none of the {held_out.rows} held-out rows has a prompt, all are "
            "supervised from their first token on"
        )
    return found


def whole_drafter(setup: Setup, sharded: nn.Module) -> Drafter | None:
    """The drafter in one piece, as one rank decodes with it; None on all but the main rank.

    Every rank calls it.
    """
    weights = gather_weights(sharded)
    if not setup.world.is_main:
        return None
    drafter = Drafter(setup.config)
    drafter.load_state_dict(weights)
    return drafter.to(setup.world.device, getattr(torch, setup.args.dtype))


def real_figures(
    setup: Setup,
    drafter: Drafter,
    numbered: Mapping[int, tuple[np.ndarray, np.ndarray]],
    drafts: Drafts,
) -> dict[str, Any]:
    """Figures of the rows of rows_to_decode, greedy and sampled at --temperature.

    One rank alone calls it: ranks that each decoded would part where their GPUs round a near tie
    otherwise. `walked` is the simulated figure of the same rows, which the greedy one equals where
    their text is the target's own greedy text.
    """
    args, target = setup.args, target_to_decode(setup)
    rows = list(numbered.values())

    def decode(drafter: Drafter | None, temperature: float) -> list[Decoded]:
        return list(decode_rows(target, drafter, rows, temperature=temperature, seed=args.seed))

    if setup.world.device.type == "cuda":  # else the first row's time holds that of its kernels
        for warm in (drafter, None):
            next(decode_rows(target, warm, rows[:1], temperature=0.0, seed=args.seed))
    greedy, plain = decode(drafter, 0.0), decode(None, 0.0)
    sampled = decode(drafter, args.temperature)
    walks = drafts.walk(block_size=setup.config.block_size)
    walked = [walks[number] for number in numbered]
    return {
        "rows": len(rows),
        "temperature": args.temperature,
        "greedy": figures_of(greedy),
        "sampled": figures_of(sampled),
        "plain_tokens_per_s": decode_figures(plain).tokens_per_s,
        "walked": sum(tokens for tokens, _ in walked) / max(1, sum(steps for _, steps in walked)),
        "same_text": sum(
            one.tokens == other.tokens for one, other in zip(greedy, plain, strict=True)
        ),
        "own_text": sum(
            list(one.tokens) == ids[mask].tolist()[: len(one.tokens)]
            for one, (ids, mask) in zip(plain, rows, strict=True)
        ),
    }


def figures_of(results: Sequence[Decoded]) -> dict[str, Any]:
    """The figures of decoded rows, as the report's JSON holds them."""
    found = decode_figures(results)
    return {
        "tokens_per_step": found.tokens_per_step,
        "row_mean": found.mean_tokens_per_step,
        "tokens": found.tokens,
        "steps": found.steps,
        "tokens_per_s": found.tokens_per_s,
        "accepted_counts": list(found.accepted_counts),
    }
