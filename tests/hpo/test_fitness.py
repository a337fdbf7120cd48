"""Ranking, the paired comparison and its honesty under noise."""

import math

import numpy as np
import pytest
from scipy.special import stdtrit

from agilerl.errors import ConfigError
from agilerl.hpo.fitness import (
    Fitness,
    difference_interval,
    paired_difference,
    probability_better,
    ranking,
    reliability,
)


def scored(*scores: float) -> Fitness:
    return Fitness.from_scores(scores)


def test_mean_and_standard_error():
    fitness = scored(0.0, 1.0, 1.0, 1.0)
    assert fitness.mean == 0.75
    # s^2 = (0.5625 + 3 * 0.0625) / 3 = 0.25, s / sqrt(4) = 0.25
    assert fitness.stderr == pytest.approx(0.25)
    assert fitness.to_dict() == {"mean": 0.75, "stderr": pytest.approx(0.25), "n": 4}
    assert (str(fitness), str(Fitness(0.5))) == ("0.750 ± 0.250 (n=4)", "0.500 (n=1)")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_ranks_last(bad):
    broken = scored(1.0, bad)
    assert broken.value == -math.inf
    assert not broken.is_finite
    assert broken.to_dict() == {"mean": None, "stderr": None, "n": 2}
    assert ranking({0: broken, 1: Fitness(-1e9), 2: Fitness(bad)}) == [1, 0, 2]


def test_ties_stand_in_order_of_age_whatever_the_slot_order():
    assert ranking({5: Fitness(1.0), 2: Fitness(1.0), 3: Fitness(2.0), 0: Fitness(1.0)}) == [3, 0, 2, 5]


def test_one_differing_prompt_is_not_enough():
    # d = (1, 0 x 7) and the imaginary (1, -1): mean 0.1, s^2 = (3 - 10 * 0.01) / 9 = 0.3222, t = 0.557, 9 df -> 0.7044.
    assert probability_better(scored(1, 1, 0, 0, 0, 0, 0, 0), scored(0, 1, 0, 0, 0, 0, 0, 0)) == pytest.approx(
        0.7044, abs=2e-4
    )


def test_many_differing_prompts_are():
    # d = 1 x 6, 0 x 10: N = 18, mean 1/3, s^2 = (8 - 18 / 9) / 17 = 0.3529, t = 2.3805, 17 df -> 0.9854.
    better, worse = scored(*[1] * 16), scored(*[0] * 6, *[1] * 10)
    assert probability_better(better, worse) == pytest.approx(0.9854, abs=2e-4)
    assert probability_better(worse, better) == pytest.approx(1 - 0.9854, abs=2e-4)


def test_pairing_sees_what_the_means_alone_cannot():
    # The prompts differ a lot, the agents by a little on each: paired sure, unpaired unsure.
    prompts = np.linspace(0, 1, 64)
    a, b = scored(*prompts + 0.02), scored(*prompts)
    assert probability_better(a, b) > 0.999
    assert probability_better(Fitness(a.mean, a.stderr, 64), Fitness(b.mean, b.stderr, 64)) < 0.75


def test_equal_means_are_ranked_by_the_reward_in_training_and_only_they():
    """A tournament of tied exams handed over its oldest agent, however much better the others had become."""
    fitness = {
        index: Fitness(mean, training=training)
        for index, (mean, training) in enumerate([(0.5, 0.2), (0.5, 0.6), (0.6, 0.1), (0.5, math.nan), (math.nan, 0.9)])
    }
    assert ranking(fitness) == [2, 1, 0, 3, 4]
    assert [Fitness.from_state(one.state()).training for one in fitness.values()][:3] == [0.2, 0.6, 0.1]


def test_ties_and_missing_evidence_are_even():
    assert probability_better(scored(0.3, 0.7), scored(0.3, 0.7)) == 0.5
    assert probability_better(Fitness(0.4), Fitness(0.3)) == 0.5
    assert probability_better(Fitness(math.nan), Fitness(math.nan)) == 0.5
    assert probability_better(Fitness(0.1), Fitness(math.nan)) == 1.0
    assert probability_better(Fitness(math.inf), Fitness(0.1)) == 0.0
    assert probability_better(scored(1, 1, 1, 1), scored(0, 0, 0, 0), trust=0.0) == 0.5


def test_exams_that_lost_different_prompts_are_compared_as_independent_ones():
    one, other = scored(1, 0, 1), scored(1, 0, 0, 0)
    without = probability_better(Fitness(one.mean, one.stderr, one.n), Fitness(other.mean, other.stderr, other.n))
    assert probability_better(one, other) == without
    assert 0.5 < without < 1
    with pytest.raises(ConfigError, match="same exam"):
        paired_difference(one, other)


def test_reliability_by_hand():
    # Means 1 and 2, variance between 0.5. Residuals +-0.5 on all four cells: 1.0 / ((2 - 1) (2 - 1)) / 2 = 0.5.
    assert reliability([scored(1.0, 1.0), scored(1.0, 3.0)]) == 0.0
    # Means 1 and 3, variance 2; residuals +-0.5 again: 1 - 0.5 / 2.
    assert reliability([scored(1.0, 1.0), scored(2.0, 4.0)]) == pytest.approx(0.75)
    # Without scores: 1 - mean(0.1^2, 0.3^2) / 0.5.
    assert reliability([Fitness(1.0, 0.1, 8), Fitness(2.0, 0.3, 8)]) == pytest.approx(0.9)


def test_reliability_without_evidence_is_zero():
    assert reliability([Fitness(1.0), Fitness(2.0)]) == 0.0
    assert reliability([scored(1, 2)]) == 0.0
    assert reliability([scored(1, 2), scored(1, 2)]) == 0.0
    assert reliability([scored(1, 2), scored(math.nan, 2)]) == 0.0


def test_probability_is_calibrated_when_the_prior_is():
    # Differences drawn from the prior that `trust` stands for: among claims of 80-90 %, 80-90 % are true.
    rng = np.random.default_rng(0)
    spread, noise, n = 0.05, 0.05, 64
    trust = spread**2 / (spread**2 + noise**2)
    truths, claims = [], []
    for _ in range(3000):
        means = rng.normal(0, spread, 2)
        a, b = (scored(*(mean + rng.normal(0, noise * math.sqrt(n), n))) for mean in means)
        truths.append(means[0] > means[1])
        claims.append(probability_better(a, b, trust))
    claimed = np.array(claims)
    inside = (claimed > 0.8) & (claimed < 0.9)
    assert inside.sum() > 200
    assert 0.78 < np.mean(np.array(truths)[inside]) < 0.93


@pytest.mark.parametrize(
    ("scores", "low", "high"),
    [
        ([1.0] * 11 + [0.75], None, 1.0),  # several answers to a question are graded in parts
        ([0.0] * 11 + [0.25], 0.0, None),
        ([1.5, 0.5] * 6, None, None),  # not shares: the same mean needs rewards above 1
    ],
)
def test_an_interval_of_shares_stays_between_0_and_1(scores, low, high):
    fitness = Fitness.from_scores(scores)
    half = stdtrit(len(scores) - 1, 0.975) * fitness.stderr
    expected = (fitness.mean - half if low is None else low, fitness.mean + half if high is None else high)
    assert fitness.interval == pytest.approx(expected)
    assert low is None or fitness.mean - half < 0
    assert high is None or fitness.mean + half > 1


@pytest.mark.parametrize(
    ("scores", "low", "high"),
    [
        ([1.0] * 3 + [0.0] * 12, -0.0953, 0.4482),  # three wins of fifteen do not prove a gain
        ([0.0] * 15, -0.1818, 0.1818),  # nor do ties prove that there is none
        ([1.0] * 40 + [-1.0] * 10 + [0.0] * 50, 0.1657, 0.4225),
    ],
)
def test_the_interval_of_a_paired_difference(scores: list[float], low: float, high: float) -> None:
    assert difference_interval(Fitness.from_scores(scores)) == pytest.approx((low, high), abs=1e-3)
    flipped = difference_interval(Fitness.from_scores([-score for score in scores]))
    assert flipped == pytest.approx((-high, -low), abs=1e-3)


def test_the_interval_of_no_difference_is_unknown() -> None:
    assert np.isnan(difference_interval(Fitness(float("nan"), n=0))).all()
