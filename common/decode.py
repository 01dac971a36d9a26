"""A speculative decoding loop: what a drafter is worth when the target really verifies its blocks.

Letters: B block size, K = B - 1 drafts of a block, V vocabulary. A step drafts K tokens after the
last one that is settled (the anchor), runs anchor and drafts through the target at once, keeps the
drafts that the target accepts and adds one token of its own (the bonus). Greedy drafts are accepted
while they are the target's argmax. Sampled ones follow the rule of arXiv 2211.17192, Algorithm 1:
draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)), and the first that is not
is replaced by a draw from norm(max(p - q, 0)); so the text is distributed as the target's own,
whatever the drafter. A block's drafts are drawn independently, each from its slot's q; those of a
DFlash 2 one after the other, each from its selector's q over the slot's candidates.

Decoding without a drafter is the same loop with blocks of the anchor alone. In bfloat16 a block's
forward rounds otherwise than one token's, so near ties fall differently there; in float32 greedy
text is the target's own.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import embedding

from common.batches import PackedRows, seeded_generator
from common.dflash2 import CandidateSelector
from common.drafter import ContextCache, Drafter
from common.selection import highest, top_words, walk
from common.target import Target
from common.target_cache import TargetCache


@dataclass(frozen=True)
class Decoded:
    """One completion.

    tokens: the generated ids, an end token included · accepted: of each verify step, the drafts
    that became part of the completion; what came after an end token or over the limit is not
    counted · decode_s: from the first token to the end.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    decode_s: float

    @property
    def steps(self) -> int:
        """Verify steps: forwards of the target after the prompt's."""
        return len(self.accepted)

    @property
    def tokens_per_step(self) -> float:
        """Accepted drafts and the bonus token of a mean verify step; 1 without any step."""
        return _tokens_per_step(self.accepted)


@dataclass(frozen=True)
class DecodeFigures:
    """Figures over several completions, those that ended at once without a step included.

    tokens_per_step: 1 + all accepted drafts / all steps, the walked acceptance length (also called
    tau) · mean_tokens_per_step: mean of the completions' own, over those with a step ·
    tokens_per_s: tokens after the first of each completion, over the time from there on ·
    accepted_counts[k]: steps that accepted k drafts.
    """

    completions: int
    tokens: int
    steps: int
    tokens_per_step: float
    mean_tokens_per_step: float
    tokens_per_s: float
    accepted_counts: tuple[int, ...]


def decode_figures(results: Sequence[Decoded]) -> DecodeFigures:
    """Sum completions up."""
    accepted = [count for result in results for count in result.accepted]
    means = [result.tokens_per_step for result in results if result.steps]
    tokens = sum(len(result.tokens) for result in results)
    seconds = sum(result.decode_s for result in results)
    return DecodeFigures(
        completions=len(results),
        tokens=tokens,
        steps=len(accepted),
        tokens_per_step=_tokens_per_step(accepted),
        mean_tokens_per_step=sum(means) / len(means) if means else 1.0,
        tokens_per_s=(tokens - len(results)) / seconds if seconds else 0.0,
        accepted_counts=tuple(np.bincount(accepted).tolist()) if accepted else (),
    )


def _tokens_per_step(accepted: Sequence[int]) -> float:
    """Divided as walked_acceptance's tokens by its steps are, so that equal figures are equal."""
    return (sum(accepted) + len(accepted)) / len(accepted) if accepted else 1.0


def pack_rows_apart(packs: Iterable[PackedRows]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The documents of packs, in order: input_ids (T,) int32 and loss_mask (T,) bool."""
    for pack in packs:
        start = 0
        for tokens in pack.token_lists:
            yield tokens, pack.loss_mask[start : start + len(tokens)]
            start += len(tokens)


def prompt_and_length(input_ids: np.ndarray, loss_mask: np.ndarray) -> tuple[np.ndarray, int]:
    """The ids before the first supervised one, and how many supervised ones follow on each other.

    Raises ValueError for a row without either.
    """
    places = np.flatnonzero(loss_mask)
    if not len(places) or places[0] == 0:
        raise ValueError("a row to decode needs a prompt, and a completion after it")
    start = int(places[0])
    holes = np.flatnonzero(~loss_mask[start:])
    return input_ids[:start], int(holes[0]) if len(holes) else len(input_ids) - start


def decode_rows(
    target: Target,
    drafter: Drafter | None,
    rows: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int | None = None,
) -> Iterator[Decoded]:
    """Decode from the prompt of each row (input_ids, loss_mask), one after the other.

    A completion ends with the target's end tokens, at the length of the row's own or at
    `max_new_tokens`. A row's random numbers depend on (seed, its place) alone.
    """
    for number, row in enumerate(rows):
        prompt, length = prompt_and_length(*row)
        generator = torch.Generator(target.device)
        generator.manual_seed(int(seeded_generator("decode", seed, number).integers(2**63)))
        yield decode(
            target,
            drafter,
            prompt,
            max_new_tokens=min(length, max_new_tokens or length),
            eos_token_ids=target.eos_token_ids,
            temperature=temperature,
            generator=generator,
        )


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # compiled layers would be compiled for every length
def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: np.ndarray,
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int],
    temperature: float,
    generator: torch.Generator,
) -> Decoded:
    """Complete a prompt (T,) of token ids; without a drafter token by token.

    The target must have been loaded with `final`, tapped at the drafter's layers; the drafter
    computes in its dtype. Temperature 0 is greedy. The generator is on the target's device.
    """
    cache, context = TargetCache(target, with_taps=drafter is not None), ContextCache()
    ids = torch.from_numpy(prompt.astype(np.int64)).to(target.device)
    logits, taps = cache.extend(ids, num_logits=1)
    draft = Draft(ids[:0], None)
    _, token = verify(draft, logits, temperature=temperature, generator=generator)
    tokens, accepted = [token], []
    prefilled = _now(target.device)
    while len(tokens) < max_new_tokens and tokens[-1] not in eos_token_ids:
        anchor = ids.new_tensor(tokens[-1:])
        if drafter is not None:
            states = _draft_states(drafter, target.embedding, context, taps, anchor)
            if drafter.candidate_selector is None:
                draft = draw(states @ target.head.T, temperature=temperature, generator=generator)
            else:
                draft = draw_walk(
                    drafter.candidate_selector, states, target.head, anchor,
                    temperature=temperature, generator=generator,
                )  # fmt: skip
        logits, taps = cache.try_block(torch.cat([anchor, draft.tokens]))
        count, bonus = verify(draft, logits, temperature=temperature, generator=generator)
        cache.keep(1 + count)
        taps = taps[: 1 + count]
        new = [*draft.tokens[:count].tolist(), bonus][: max_new_tokens - len(tokens)]
        ends = [place for place, token in enumerate(new) if token in eos_token_ids]
        new = new[: ends[0] + 1] if ends else new
        accepted.append(min(count, len(new)))
        tokens += new
    return Decoded(tuple(tokens), tuple(accepted), _now(target.device) - prefilled)


@dataclass(frozen=True)
class Draft:
    """tokens (K,) int64 · probabilities (K, V) float32, what each was drawn from; None: greedy."""

    tokens: torch.Tensor
    probabilities: torch.Tensor | None


def draw(logits: torch.Tensor, *, temperature: float, generator: torch.Generator) -> Draft:
    """Drafts of the slots' logits (K, V), each by itself."""
    if temperature == 0:
        return Draft(logits.argmax(-1), None)
    probabilities = _probabilities(logits, temperature)
    return Draft(torch.multinomial(probabilities, 1, generator=generator)[:, 0], probabilities)


def draw_walk(
    selector: CandidateSelector,
    states: torch.Tensor,
    head: torch.Tensor,
    anchor: torch.Tensor,
    *,
    temperature: float,
    generator: torch.Generator,
) -> Draft:
    """Drafts of the slots' states (K, H), each chosen in the light of the one before.

    anchor (1,) is the token before the first. Temperature 0 takes the highest score of each.
    """
    logits, words = top_words(states, head, top_k=selector.top_k)
    before = torch.cat([anchor.expand(1, selector.top_k), words[:-1]])
    scores = (logits[:, None] + selector(states, before, words))[None]
    if temperature == 0:
        return Draft(walk(scores, words[None], highest)[0], None)
    taken: list[torch.Tensor] = []

    def choose(scores: torch.Tensor) -> torch.Tensor:
        taken.append(_probabilities(scores, temperature))
        return torch.multinomial(taken[-1], 1, generator=generator)[:, 0]

    tokens = walk(scores, words[None], choose)[0]
    probabilities = torch.zeros(len(states), len(head), device=states.device)
    return Draft(tokens, probabilities.scatter_(1, words, torch.cat(taken)))


def verify(
    draft: Draft, logits: torch.Tensor, *, temperature: float, generator: torch.Generator
) -> tuple[int, int]:
    """How many drafts the target accepts, and its own token after them.

    logits (K+1, V) of the target, at the anchor and at each draft; K may be 0.
    """
    if temperature == 0:
        said = logits.argmax(-1)
        count = _leading(said[:-1] == draft.tokens)
        return count, int(said[count])
    wanted = _probabilities(logits, temperature)
    if draft.probabilities is None:  # no drafts at all
        return 0, _sample(wanted[0], generator)
    chosen = draft.tokens[:, None]
    chances = torch.rand(len(chosen), 1, device=logits.device, generator=generator)
    count = _leading(
        (chances * draft.probabilities.gather(1, chosen) < wanted[:-1].gather(1, chosen))[:, 0]
    )
    if count == len(draft.tokens):
        return count, _sample(wanted[count], generator)
    return count, _sample(residual(wanted[count], draft.probabilities[count]), generator)


def residual(wanted: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0) of (V,) probabilities, not normalised: what a rejected draft is replaced by."""
    rest = (wanted - drafted).clamp(min=0)
    return rest if bool(rest.any()) else wanted  # p = q but for rounding


def _leading(right: torch.Tensor) -> int:
    """How many of (K,) bool are True before the first that is not."""
    return int(right.long().cumprod(0).sum())


def _probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.float() / temperature).softmax(-1)


def _sample(weights: torch.Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))


def _draft_states(
    drafter: Drafter,
    table: torch.Tensor,
    context: ContextCache,
    taps: torch.Tensor,
    anchor: torch.Tensor,
) -> torch.Tensor:
    """The drafter's states (K, H) of the slots after the anchor's, which predicts nothing.

    taps (T, L*H) are those of the tokens before the anchor that `context` has not seen.
    """
    config = drafter.config
    ids = anchor.new_full((config.block_size,), config.mask_token_id)
    ids[0] = anchor[0]
    block = embedding(ids, table)[None]
    return drafter.draft(taps.to(table.dtype)[None], block, cache=context)[0, 1:]


def _now(device: torch.device) -> float:
    """Seconds, when all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
