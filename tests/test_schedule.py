"""The learning rate is a function of the step alone; the horizon of what shard 0 says."""

import pytest

from common.run import UserError
from common.schedule import learning_rate, training_horizon


def rate(step):
    return learning_rate(step, peak=1.0, warmup_ratio=0.1, horizon=100)


def test_it_warms_up_falls_as_a_cosine_and_stays_at_its_floor():
    assert [rate(step) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert rate(55) == pytest.approx(0.55)
    rates = [rate(step) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert rate(100) == rate(101) == rate(5000) == pytest.approx(0.1)


def test_the_horizon_is_laid_over_all_planned_bytes():
    facts = dict(
        epochs=3, planned_bytes=10_000, first_shard_bytes=100, first_shard_tokens=40,
        tokens_per_step=1000,
    )  # fmt: skip
    assert training_horizon(max_steps=None, **facts) == 12
    assert training_horizon(max_steps=7, **facts) == 7
    with pytest.raises(UserError, match="--max-steps"):
        training_horizon(max_steps=None, **{**facts, "first_shard_tokens": 0})
