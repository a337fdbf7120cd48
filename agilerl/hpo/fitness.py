"""Fitness: the result of an agent's exam, the ranking of agents, and the confidence that one is better than another."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agilerl.checks.arguments import Number, Share, Whole, check_fields, checked, shown
from agilerl.errors import ConfigError

_Z95 = 1.959963984540054
"""Quantile of the normal distribution for 95 %, both sides."""


@dataclass(frozen=True, slots=True)
class Fitness:
    """Result of one agent on the exam; a mean that is not finite counts as minus infinity."""

    mean: Number
    """Mean score over the panel (for several turns: mean episode return)."""
    stderr: Number = math.nan
    """Standard error of ``mean`` over the prompts; NaN when unknown."""
    n: Whole = 1
    """Number of prompts."""
    scores: tuple[Number, ...] = field(default=(), repr=False)
    """Score of each prompt, in panel order, the same panel for every agent; empty when only the mean is known."""
    training: Number = math.nan
    """Mean reward of the agent's samples since the last selection, which decides between equal means; NaN: unknown."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stderr < 0:
            raise ConfigError(f"Fitness: expected a stderr of 0 or more, or NaN, found {self.stderr}")

    def __str__(self) -> str:
        error = "" if math.isnan(self.stderr) else f" ± {self.stderr:.3f}"
        return f"{self.mean:.3f}{error} (n={self.n})"

    @classmethod
    @checked
    def from_scores(cls, scores: Sequence[Number]) -> "Fitness":
        """Build from the scores of the panel: mean, s / sqrt(n) with s the sample standard deviation, and n."""
        values = np.asarray(scores, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise ConfigError(f"A fitness needs the scores of at least one prompt, found shape {values.shape}.")
        n = int(values.size)
        # One answer without a grade leaves no mean: the agent ranks last and is no parent.
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

    @property
    def is_accuracy(self) -> bool:
        """Whether the standard error is that of n scores that are all 0 or 1."""
        if not (0 <= self.mean <= 1 and self.n > 1):
            return False
        spread = self.mean * (1 - self.mean)
        # With s of ddof 0, and of ddof 1 as in from_scores.
        expected = (math.sqrt(spread / self.n), math.sqrt(spread / (self.n - 1)))
        return any(math.isclose(self.stderr, value, rel_tol=0.01, abs_tol=1e-6) for value in expected)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean over n prompts, NaN when unknown.

        For scores that are all 0 or 1 it is Wilson's (1927), which stays within them and has a width even where all are
        alike: (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n). Else mean +- t_{n - 1} stderr.
        """
        mean, n = self.mean, self.n
        if self.is_accuracy:
            middle, half = mean + _Z95**2 / (2 * n), _Z95 * math.sqrt(mean * (1 - mean) / n + _Z95**2 / (4 * n * n))
            scale = 1 + _Z95**2 / n
            return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
        from scipy.special import stdtrit

        return self._around(float(stdtrit(n - 1, 0.975)) * self.stderr if n > 1 else math.nan)

    @property
    def band(self) -> tuple[float, float]:
        """One standard error on either side of the mean, none when it is unknown."""
        return self._around(self.stderr if math.isfinite(self.stderr) else 0.0)

    def _around(self, half: float) -> tuple[float, float]:
        """Return mean +- half, cut to [0, 1] if scores between 0 and 1 can have this mean and standard error.

        Their variance is at most mean (1 - mean) n / (n - 1): Bhatia & Davis, Am. Math. Mon. 107 (2000) 353-357.
        """
        mean, n, low, high = self.mean, self.n, self.mean - half, self.mean + half
        # Scores that are all 0 or 1 reach the bound exactly, but for rounding.
        if n > 1 and 0 <= mean <= 1 and self.stderr * self.stderr * (n - 1) <= mean * (1 - mean) * (1 + 1e-6):
            return max(0.0, low), min(1.0, high)
        return low, high

    def state(self) -> dict[str, Any]:
        """Return all of it as plain data, numbers that are not finite included."""
        values = {"mean": self.mean, "stderr": self.stderr, "n": self.n, "scores": list(self.scores)}
        return values | ({"training": self.training} if math.isfinite(self.training) else {})

    @classmethod
    @checked
    def from_state(cls, values: Mapping[str, Any]) -> "Fitness":
        """Return the fitness that :meth:`state` gave; raises ConfigError for anything else."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"Fitness: expected what state() returned, found {shown(values)}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return mean, stderr and n for a JSON line; numbers that are not finite become None."""
        values = {"mean": self.mean, "stderr": self.stderr, "n": self.n}
        return {name: number if math.isfinite(number) else None for name, number in values.items()}


@checked
def paired_difference(a: Fitness, b: Fitness) -> Fitness:
    """Return the differences a - b over the prompts that both have a score for, as a fitness: mean, stderr and scores.

    Raises ConfigError if the two were not scored on panels of one size.
    """
    if not a.scores or len(a.scores) != len(b.scores):
        raise ConfigError(f"Comparison needs the same exam, found {len(a.scores)} and {len(b.scores)} prompts")
    difference = np.subtract(a.scores, b.scores)
    known = difference[np.isfinite(difference)]
    return Fitness.from_scores(known.tolist()) if known.size else Fitness(math.nan, n=0)


def difference_interval(difference: Fitness) -> tuple[float, float]:
    """Return the 95 % interval of a paired difference, NaN when unknown.

    As in :func:`probability_better` two imaginary prompts are added, one won and one lost by the largest difference (by
    1 if all are ties), so that few prompts that agree do not look certain: mean' +- t_{n + 1} s / sqrt(n + 2). Of
    answers that are right or wrong it is about the interval of Bonett & Price (2012).
    """
    from scipy.special import stdtrit

    if not difference.scores:
        return math.nan, math.nan
    largest = float(np.abs(difference.scores).max()) or 1.0
    values = np.array([*difference.scores, largest, -largest])
    half = float(stdtrit(values.size - 1, 0.975)) * float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()) - half, float(values.mean()) + half


@checked
def ranking(fitness: Mapping[int, Fitness]) -> list[int]:
    """Return the agent indices from best to worst; ties are broken by ``training``, then by age (lower index first).

    A batch of training has many more answers than an exam, but sampled ones to other questions: so it only breaks ties.
    Agents whose fitness is not finite come last.
    """

    def place(index: int) -> tuple[float, float, int]:
        training = fitness[index].training
        return -fitness[index].value, -training if math.isfinite(training) else math.inf, index

    return sorted(fitness, key=place)


@checked
def probability_better(a: Fitness, b: Fitness, trust: Share = 1.0) -> float:
    """Return the probability that agent ``a`` has truly the better mean than ``b``, from the exam that both took.

    Paired t over the prompts: d_i = a_i - b_i, P = T_df(sqrt(trust) * mean(d) / (s / sqrt(N))). Two imaginary prompts,
    one won and one lost by the largest |d_i|, are added first (N = n + 2, df = n + 1): as with a Beta(1, 1) prior, a
    single differing prompt is then not enough to be sure (a plain t-test would give it 84 %).
    ``trust`` in [0, 1] is the share of the differences between agents that is real (see ``reliability``).
    Without scores, and if exams lost different numbers of prompts (a program may fail), the two standard errors
    are used as if independent. No evidence, and any tie, gives 0.5.
    """
    from scipy.special import stdtr  # a quarter of a second, which most uses of this file do not need

    if not (a.is_finite and b.is_finite):
        # Two broken agents are even, and a sound one is certainly better than a broken one.
        return 0.5 if a.is_finite == b.is_finite else float(a.is_finite)
    if not a.scores or len(a.scores) != len(b.scores):
        error = math.hypot(a.stderr, b.stderr)
        if not math.isfinite(error) or a.mean == b.mean:
            return 0.5
        # Two exact means that differ leave no doubt, for which 40 stands.
        statistic = math.sqrt(trust) * (a.mean - b.mean) / error if error > 0 else math.copysign(40, a.mean - b.mean)
        return float(stdtr(max(a.n + b.n - 2, 1), statistic))
    difference = np.subtract(a.scores, b.scores)
    largest = float(np.abs(difference).max())
    if largest == 0:
        return 0.5
    # Divided by the largest, so that the two imaginary prompts are won and lost by 1.
    difference = np.concatenate([difference / largest, (1.0, -1.0)])
    count = difference.size
    statistic = difference.mean() / (difference.std(ddof=1) / math.sqrt(count))
    # Empirical Bayes: a mean d of variance s^2 becomes trust d of variance trust s^2, so d / s becomes
    # sqrt(trust) d / s.
    return float(stdtr(count - 1, math.sqrt(trust) * statistic))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an exam says about one agent being better than another."""

    probability: float
    """The probability of being better."""
    needed: float
    """What that must reach."""

    @property
    def is_enough(self) -> bool:
        """Whether the agent may take the other's place; a tie never is."""
        return self.probability >= self.needed and self.probability > 0.5

    def about_replacing(self, donor: int) -> str:
        """Return the verdict on an agent that a clone of ``donor`` replaces if this is enough."""
        return (
            f"left: agent {donor} is better with {self}"
            if self.is_enough
            else f"kept: {self} that agent {donor} is better"
        )

    def __str__(self) -> str:
        return f"P = {self.probability:.3f} {'>=' if self.is_enough else '<'} {self.needed:.3g}"


@checked
def evidence(a: Fitness, b: Fitness, confidence: Share, among: Sequence[Fitness] | None = None) -> Evidence:
    """Return the evidence that agent ``a`` is better than ``b``; enough has a probability of ``confidence``.

    ``among``: the exams of all agents, whose ``reliability`` then shrinks the difference.
    """
    trust = 1.0 if among is None else reliability(among)
    return Evidence(probability_better(a, b, trust), confidence)


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
        # (agents, prompts), less what is due to the prompt and to the agent.
        residual = table - table.mean(axis=0) - means[:, None] + means.mean()
        n = table.shape[1]
        # The residual mean square over n is the noise in a mean of n prompts, so noise / between is 1 / F.
        noise = float((residual**2).sum() / ((len(finite) - 1) * (n - 1)) / n)
    else:
        noise = float(np.mean([one.stderr**2 for one in finite]))
    return max(0.0, 1.0 - noise / between) if math.isfinite(noise) else 0.0
