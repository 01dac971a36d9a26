"""How long a run is, and its learning rate: pure functions of what is known from the start."""

import math

from common.run import UserError

LEARNING_RATE_FLOOR = 0.1  # of the peak; the cosine ends here and stays


def training_horizon(
    *,
    max_steps: int | None,
    epochs: int,
    planned_bytes: int,
    first_shard_bytes: int,
    first_shard_tokens: int,
    tokens_per_step: int,
) -> int:
    """The steps that the learning rate is laid over: `max_steps`, or a guess from shard 0.

    epochs x planned bytes x tokens per byte of shard 0 / tokens per step: the same guess whenever
    it is made. Raises UserError when shard 0 holds no tokens.
    """
    if max_steps is not None:
        return max_steps
    if first_shard_tokens == 0:
        raise UserError("shard 0 holds no tokens to guess the run's length from: give --max-steps")
    tokens = epochs * planned_bytes * first_shard_tokens / first_shard_bytes
    return math.ceil(tokens / tokens_per_step)


def known_horizon(*, max_steps: int | None, epochs: int, tokens: int, tokens_per_step: int) -> int:
    """The same for data whose tokens have been counted."""
    return max_steps or math.ceil(epochs * tokens / tokens_per_step)


def learning_rate(step: int, *, peak: float, warmup_ratio: float, horizon: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak, where it stays; steps count from 1."""
    warmup = max(1, round(warmup_ratio * horizon))
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, horizon - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (LEARNING_RATE_FLOOR + (1 - LEARNING_RATE_FLOOR) * cosine)
