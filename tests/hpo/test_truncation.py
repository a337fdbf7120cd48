"""Truncation selection replaces on evidence, not on noise."""

import math
import re

import numpy as np
import pytest

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.selection import TruncationSelection


def exam(mean, seed, n=64, noise=0.3):
    return Fitness.from_scores(mean + noise * np.random.default_rng(seed).standard_normal(n))


def test_a_clearly_worse_quarter_copies_the_best_quarter():
    fitness = {i: exam(0.1 * i, i) for i in range(8)}
    plan = TruncationSelection().plan(fitness, 0, 0, 8)
    assert plan.deaths == (0, 1)
    assert {birth.parent for birth in plan.births} <= {6, 7}
    assert plan.slots == (8, 9, 2, 3, 4, 5, 6, 7)
    assert plan.mutants == (8, 9)


def test_all_donors_are_used():
    fitness = {i: exam(0.1 * i, i) for i in range(8)}
    births = [b for seed in range(50) for b in TruncationSelection().plan(fitness, 0, seed, 8).births]
    assert 30 < sum(birth.parent == 7 for birth in births) < 70


@pytest.mark.parametrize("confidence", [0.5, 0.8])
def test_ties_keep(confidence):
    fitness = {i: Fitness.from_scores([0.0, 1.0, 0.5]) for i in range(4)}
    plan = TruncationSelection(confidence=confidence).plan(fitness, 0, 0, 4)
    assert plan.births == ()


def test_the_gate_closes_on_weak_evidence():
    # Three equal agents, one a prompt behind: the best and the worst differ, but not by more than chance.
    scores = [[1, 1, 0, 0, 1, 0, 1, 0], [1, 1, 0, 0, 1, 0, 1, 0], [1, 1, 0, 0, 1, 0, 0, 1], [1, 1, 0, 0, 1, 0, 0, 0]]
    fitness = {i: Fitness.from_scores(row) for i, row in enumerate(scores)}
    kept = TruncationSelection().plan(fitness, 0, 0, 4)
    assert kept.births == ()
    assert re.fullmatch(r"kept: P = 0\.\d{3} < 0\.8 that agent 0 is better", kept.verdicts[3])
    # The same means from forty times the prompts are evidence.
    fitness = {i: Fitness.from_scores(row * 40) for i, row in enumerate(scores)}
    replaced = TruncationSelection().plan(fitness, 0, 0, 4)
    assert replaced.deaths == (3,)
    assert re.fullmatch(r"left: agent 0 is better with P = [01]\.\d{3} >= 0\.8", replaced.verdicts[3])


def test_every_broken_agent_is_replaced():
    fitness = {i: Fitness(math.nan) if i < 3 else exam(0.5, 9) for i in range(4)}
    plan = TruncationSelection().plan(fitness, 0, 0, 4)
    assert plan.deaths == (0, 1, 2)
    assert {birth.parent for birth in plan.births} == {3}


def test_one_agent_alone_stays():
    assert TruncationSelection().plan({0: exam(0.5, 0)}, 0, 0, 1).slots == (0,)
