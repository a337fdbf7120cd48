"""Fitness: the result of an agent's exam, the ranking of agents, and the confidence that one is better than another."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import stdtr

from agilerl.arguments import Number, Share, checked
from agilerl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fitness:
    """Result of one agent on the exam; a mean that is not finite counts as minus infinity."""

    mean: float
    """Mean score over the panel (for several turns: mean episode return)."""
    stderr: float = math.nan
    """Standard error of ``mean`` over the prompts; NaN when unknown."""
    n: int = 1
    """Number of prompts."""
    scores: tuple[float, ...] = field(default=(), repr=False)
    """Score of each prompt, in panel order, the same panel for every agent; empty when only the mean is known."""

    @classmethod
    @checked
    def from_scores(cls, scores: Sequence[Number]) -> "Fitness":
        """Build from the scores of the panel: mean, s / sqrt(n) with s the sample standard deviation, and n."""
        values = np.asarray(scores, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise ConfigError(f"A fitness needs the scores of at least one prompt, found shape {values.shape}.")
        n = int(values.size)
        if not np.isfinite(values).all():
            return cls(math.nan, math.nan, n, tuple(values.tolist()))
        stderr = float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
        return cls(float(values.mean()), stderr, n, tuple(values.tolist()))

    @property
    def is_finite(self) -> bool:
        """Whether the agent may be ranked among the others and may be a parent."""
        return math.isfinite(self.mean)

    @property
    def value(self) -> float:
        """The number that agents are ranked by: the mean, or minus infinity when it is not finite."""
        return self.mean if self.is_finite else -math.inf

    def state(self) -> dict[str, Any]:
        """Return all of it as plain data, numbers that are not finite included."""
        return {"mean": self.mean, "stderr": self.stderr, "n": self.n, "scores": list(self.scores)}

    @classmethod
    def from_state(cls, values: Mapping[str, Any]) -> "Fitness":
        """Return the fitness that :meth:`state` gave."""
        return cls(values["mean"], values["stderr"], values["n"], tuple(values["scores"]))

    def to_dict(self) -> dict[str, Any]:
        """Return mean, stderr and n for a JSON line; numbers that are not finite become None."""
        return {
            "mean": self.mean if self.is_finite else None,
            "stderr": self.stderr if math.isfinite(self.stderr) else None,
            "n": self.n,
        }


@checked
def ranking(fitness: Mapping[int, Fitness]) -> list[int]:
    """Return the agent indices from best to worst; ties are broken by age (lower index first)."""
    return sorted(fitness, key=lambda index: (-fitness[index].value, index))


@checked
def probability_better(a: Fitness, b: Fitness, trust: Share = 1.0) -> float:
    """Return the probability that agent ``a`` is truly better than agent ``b``, from the exam that both took.

    Paired t over the prompts: d_i = a_i - b_i, P = T_df(sqrt(trust) * mean(d) / (s / sqrt(N))). Two imaginary prompts,
    one won and one lost by the largest |d_i|, are added first (N = n + 2, df = n + 1): as with a Beta(1, 1) prior, a
    single differing prompt is then not enough to be sure (a plain t-test would give it 84 %).
    ``trust`` in [0, 1] is the share of the differences between agents that is real (see ``reliability``).
    Without scores the two standard errors are used as if independent. No evidence, and any tie, gives 0.5.
    Raises ConfigError if the two were scored on panels of different sizes.
    """
    if not (a.is_finite and b.is_finite):
        return 0.5 if a.is_finite == b.is_finite else float(a.is_finite)
    if not (a.scores and b.scores):
        error = math.hypot(a.stderr, b.stderr)
        if not math.isfinite(error) or a.mean == b.mean:
            return 0.5
        statistic = math.sqrt(trust) * (a.mean - b.mean) / error if error > 0 else math.copysign(40, a.mean - b.mean)
        return float(stdtr(max(a.n + b.n - 2, 1), statistic))
    if len(a.scores) != len(b.scores):
        raise ConfigError(
            f"Paired comparison needs the same exam for both agents, found {len(a.scores)} and {len(b.scores)} prompts."
        )
    difference = np.subtract(a.scores, b.scores)
    largest = float(np.abs(difference).max())
    if largest == 0:
        return 0.5
    difference = np.concatenate([difference / largest, (1.0, -1.0)])
    count = difference.size
    statistic = difference.mean() / (difference.std(ddof=1) / math.sqrt(count))
    return float(stdtr(count - 1, math.sqrt(trust) * statistic))


@checked
def reliability(fitness: Sequence[Fitness]) -> float:
    """Return the share of the observed variance between agents that is not exam noise, in [0, 1].

    max(0, 1 - 1/F) with F the agents' mean square over the residual mean square of the agents x prompts table (without
    scores: the variance of the means over the mean squared standard error). The best and the worst of many equal agents
    always look different; shrinking by this share (empirical Bayes) keeps a comparison of the two from being fooled.
    Fewer than two finite agents, or unknown errors, give 0.
    """
    finite = [one for one in fitness if one.is_finite]
    if len(finite) < 2:
        return 0.0
    means = np.array([one.mean for one in finite])
    between = float(means.var(ddof=1))
    if between == 0:
        return 0.0
    lengths = {len(one.scores) for one in finite}
    if len(lengths) == 1 and min(lengths) > 1:
        table = np.array([one.scores for one in finite])
        residual = table - table.mean(axis=0) - means[:, None] + means.mean()
        n = table.shape[1]
        noise = float((residual**2).sum() / ((len(finite) - 1) * (n - 1)) / n)
    else:
        noise = float(np.mean([one.stderr**2 for one in finite]))
    return max(0.0, 1.0 - noise / between) if math.isfinite(noise) else 0.0


def non_dominated_fronts(objectives: Mapping[int, Sequence[float]]) -> list[list[int]]:
    """Return the agents in fronts, best first: no agent is dominated by another in its front or in a later one.

    ``objectives`` maps an agent to its vector, every entry to be maximised (reward, -KL, -length). A vector dominates
    another if no entry is lower and at least one is higher. Entries that are not finite count as minus infinity.
    """
    points = {index: np.where(np.isfinite(vector), vector, -np.inf) for index, vector in sorted(objectives.items())}
    if len({point.shape for point in points.values()}) > 1:
        raise ConfigError("Multi-objective fitness needs vectors of one length for all agents.")
    left = set(points)
    fronts: list[list[int]] = []
    while left:
        front = [a for a in sorted(left) if not any(_dominates(points[b], points[a]) for b in left)]
        fronts.append(front)
        left.difference_update(front)
    return fronts


def _dominates(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a >= b).all() and (a > b).any())
