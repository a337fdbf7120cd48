"""Collapsed agents: how they are recognised, kept from being parents, and replaced by clones of the elite."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agilerl.hpo.fitness import Fitness
from agilerl.hpo.selection import Plan

_ERRORS = 4.0
"""How many standard errors apart two means must be before their difference counts."""
_FACTOR = {"entropy": 10.0, "length": 4.0, "reward": 4.0}
"""How many times smaller (or, for a length, larger) than the elite's a mean must be to count as collapsed."""
_LEAST = 3
"""The fewest iterations of both agents that a comparison needs."""
_FEWER = 4
"""How many times fewer groups of a stuck agent differ."""
_CHANCE = 0.01
"""Probability of so few by chance below which an agent is stuck."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Statistics of an agent's own samples, one number per iteration since the last selection."""

    entropy: Sequence[float] = ()
    """Mean entropy of a token, in nats."""
    length: Sequence[float] = ()
    """Mean tokens of a completion."""
    reward: Sequence[float] = ()
    """Mean reward; empty if it cannot be compared between agents, because each weighs its graders differently."""
    reward_before: Sequence[float] = ()
    """Mean rewards of the agent, or of the agent it was cloned from, in the generation before."""
    equal: Sequence[float] = ()
    """Share of the groups whose completions all earned the same, from which nothing is learned."""
    equal_first: Sequence[float] = ()
    """``equal`` in the first iteration of the agent's ancestor, before it had learned anything."""


def collapsed(vitals: Mapping[int, Vitals], elite: int) -> dict[int, str]:
    """Return the agents outside the elite's confidence band, each with the reason in words.

    Only the later half of the iterations since the last selection counts (at least the last three), because an agent
    that collapses starts out healthy. With means m, standard deviations s (ddof 1) and counts n of an agent a and the
    elite e, a statistic is *apart* if ``|m_a - m_e| > 4 sqrt(s_a^2 / n_a + s_e^2 / n_e)``. An agent has collapsed if
    its reward is apart and lower than the elite's, and one of these holds:

    * entropy: apart, and ``10 m_a < m_e``;
    * length: apart, and ``4 m_a < m_e`` or ``m_a > 4 m_e``;
    * reward: ``4 m_a < m_e``, and ``4 m_a <`` the mean of its own rewards in the generation before (in the first
      generation: its first reward). An agent that is merely slow keeps its reward, and rewards below zero have no such
      scale: both are left to selection.

    Numbers that are not finite are left out; with fewer than three no agent is reported. The elite is never reported.
    """
    leader, verdicts = _late(vitals[elite]), dict[int, str]()
    for index, whole in vitals.items():
        late = _late(whole)
        if index == elite or not (_apart(late.reward, leader.reward) and _mean(late.reward) < _mean(leader.reward)):
            continue
        reasons = [
            f"{name} {_mean(ours):.3g}, the elite's {_mean(theirs):.3g}"
            for name, ours, theirs, long in (
                ("entropy", late.entropy, leader.entropy, False),
                ("length", late.length, leader.length, True),
            )
            if _apart(ours, theirs) and _far(ours, theirs, _FACTOR[name], above=long)
        ]
        before = whole.reward_before or whole.reward[:1]
        if _far(late.reward, leader.reward, _FACTOR["reward"]) and _far(late.reward, before, _FACTOR["reward"]):
            reasons.append(f"reward {_mean(late.reward):.3g}, before {_mean(before):.3g}")
        if reasons:
            verdicts[index] = "collapsed: " + "; ".join(reasons)
    return verdicts


def stuck(vitals: Vitals, groups: int, share: float = 0.5) -> bool:
    """Return whether an agent can hardly learn any more, ``groups`` being those of an iteration.

    It is stuck if in the last ``share`` of this generation at most a quarter as many groups differed in what their
    completions earned as before any training, and chance explains so few with a probability below one percent. An agent
    that answers everything right is stuck, too; only its exams tell.
    """
    from scipy.special import bdtr  # as slow to import as elsewhere

    start = len(vitals.equal) - math.ceil(share * len(vitals.equal))
    late, first = 1 - _finite(vitals.equal[start:]), 1 - _finite(vitals.equal_first)
    if not (late.size and first.size and _FEWER * late.mean() <= first[0]):
        return False
    # One more group of each kind, as few groups that differ do not prove that all do (Laplace's rule).
    usual = (groups * first[0] + 1) / (groups + 2)
    return bool(bdtr(round(groups * late.sum()), groups * late.size, usual) < _CHANCE)


def lost(vitals: Vitals, groups: int, reward: float) -> bool:
    """Return whether an agent is stuck, and earns no more in training than ``reward``, the mean before any."""
    # Where few groups differed before training, half a generation can prove nothing.
    return _mean(vitals.reward[len(vitals.reward) // 2 :]) <= reward and any(
        stuck(vitals, groups, share) for share in (0.5, 1)
    )


def no_better(exam: Fitness, reward: float) -> bool:
    """Return whether an exam is at most a standard error above ``reward``, the mean before any training."""
    # Of a weak base one right answer of 32 is above the mean, and no sign of life.
    return exam.mean - exam.stderr <= reward


def quarantined(fitness: Mapping[int, Fitness], sick: Collection[int]) -> dict[int, Fitness]:
    """Return fitness as selection sees it: a sick agent's is not finite, so it becomes neither elite nor parent."""
    return {index: Fitness(math.nan, n=one.n) if index in sick else one for index, one in fitness.items()}


def replaced_by_elite(plan: Plan, before: Sequence[int], sick: Collection[int]) -> Plan:
    """Return a plan in which every child that takes the slot of a sick agent is a mutant of the elite.

    ``before`` are the agents in slot order, as the strategy saw them. A plan that keeps a sick agent (no agent is fit
    to be a parent, or the strategy replaces none) or that gives slots up is returned unchanged.
    """
    if plan.elite in sick or len(plan.slots) != len(before):
        return plan
    known = {birth.child for birth in plan.births}
    # A plan keeps the order of slots, so whoever is at the place of a sick agent is its heir.
    heirs = {new for old, new in zip(before, plan.slots) if old in sick and new in known}
    births = tuple(
        replace(birth, parent=plan.elite, hyperparameters_from=None) if birth.child in heirs else birth
        for birth in plan.births
    )
    mutants = tuple(index for index in plan.slots if index in heirs or index in plan.mutants)
    return replace(plan, births=births, mutants=mutants)


def _late(vitals: Vitals) -> Vitals:
    # Counted by the lengths: rewards are left out where agents weigh graders differently.
    size = max(_LEAST, -(-len(vitals.length) // 2))
    return Vitals(vitals.entropy[-size:], vitals.length[-size:], vitals.reward[-size:], vitals.reward_before)


def _finite(values: Sequence[float]) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    return numbers[np.isfinite(numbers)]


def _mean(values: Sequence[float]) -> float:
    numbers = _finite(values)
    return float(numbers.mean()) if numbers.size else math.nan


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    a, b = _finite(ours), _finite(theirs)
    if min(a.size, b.size) < _LEAST:
        return False
    # As Welch does: the two need not vary alike.
    error = math.sqrt(a.var(ddof=1) / a.size + b.var(ddof=1) / b.size)
    return bool(abs(a.mean() - b.mean()) > _ERRORS * error)


def _far(ours: Sequence[float], theirs: Sequence[float], factor: float, *, above: bool = False) -> bool:
    """Return whether our mean is more than ``factor`` times smaller than theirs or, with ``above``, larger."""
    a, b = _mean(ours), _mean(theirs)
    # At 0 and below factors mean nothing. NaN, for an unknown mean, compares as False.
    return (b > 0 and factor * a < b) or (above and 0 < factor * b < a)
