"""Why an agent may not be learning, in words: what its metrics say, and what to change.

Each rule looks at the last iterations of one agent, and says what it saw with its number. It does not know the task:
a symptom is a place to look and not a verdict. Nothing here changes a run.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

WINDOW = 8
"""Iterations that are looked at: the agent's last ones."""
FEWEST = 3
"""Fewer iterations say nothing."""
FALLEN = 4.0
"""A reward that is this many times smaller than the highest so far has fallen."""
SLOW = 10.0
"""A learning rate this many times below the base's usual one is called low."""


@dataclass(frozen=True)
class Symptom:
    """Something in an agent's metrics that keeps agents from learning."""

    name: str
    """Short and stable: ``constant reward``, ``equal groups``, ..."""
    found: str
    """What was seen, with its number."""
    remedy: str
    """What to look at or to change."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """Completions that show it: ``question``, ``answer``, ``right`` (the right answer) and ``reward``."""

    def __str__(self) -> str:
        """Return one sentence."""
        return f"{self.found}: {self.remedy}"


class _Window:
    """The mean of each metric over the last iterations."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines = lines[-WINDOW:]

    def values(self, name: str) -> list[float]:
        return _values(self.lines, name)

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return fmean(values) if len(values) >= FEWEST else None

    def is_at_least(self, name: str, limit: float) -> float | None:
        """Return the mean if there is one and it reaches the limit."""
        mean = self.mean(name)
        return mean if mean is not None and mean >= limit else None


def _values(lines: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Return a metric's finite values; a file may hold anything."""
    found = (line.get(name) for line in lines)
    return [float(v) for v in found if isinstance(v, int | float) and abs(v) < 1e300]


def symptoms(lines: Sequence[Mapping[str, Any]], usual_rate: float | None = None) -> list[Symptom]:
    """Return what the train lines of one agent (``metrics.jsonl``, oldest first) say, the most telling first.

    ``usual_rate``: the learning rate that is known to suit the base; None: that rule is left out.
    """
    window = _Window(lines)
    if len(window.lines) < FEWEST:
        return []
    if fall := _fallen_reward(window, lines, usual_rate):  # what else is seen follows from it, or from the grader
        return [symptom for symptom in (_failing_grader(window), fall) if symptom]
    rules: tuple[Callable[[], Symptom | None], ...] = (
        lambda: _failing_grader(window),
        lambda: _cut_answers(window),
        lambda: _constant_reward(window),
        lambda: _equal_groups(window),
        lambda: _no_gradient(window),
        lambda: _clipped_updates(window),
        lambda: _no_exploration(window),
        lambda: _low_rate(window, lines, usual_rate),
    )
    return [symptom for rule in rules if (symptom := rule()) is not None]


def _fallen_reward(window: _Window, lines: Sequence[Mapping[str, Any]], usual: float | None) -> Symptom | None:
    best = max(lines, key=lambda line: max(_values([line], "reward"), default=-math.inf))
    highest, spread = _values([best], "reward"), _values([best], "reward_std")
    rewards = window.values("reward")
    harder = any("curriculum/level" in line for line in lines)
    if harder or not highest or not spread or len(rewards) < FEWEST:
        return None
    now = median(rewards[-FEWEST:])
    # Rare successes come and go: only a reward that was a good part of its own spread can be said to have fallen.
    if highest[0] <= 0 or highest[0] < spread[0] / 3 or now * FALLEN > highest[0]:
        return None
    rate = max(_values(lines, "learning_rate"), default=0.0)
    known = f", and {usual:.2g} is usual for this base" if usual and rate > usual else ""
    return Symptom(
        "fallen reward",
        f"the reward fell from {highest[0]:.2g} to {now:.2g}; the learning rate was {rate:.2g}{known}",
        "usually the steps are too large and the policy is broken: lower algorithm.lr, or the upper end of its range "
        "(mutation.rl_hp_selection.lr)",
    )


def _failing_grader(window: _Window) -> Symptom | None:
    counts = {
        name.removeprefix("reward_errors/"): mean
        for name in window.lines[-1]
        if name.startswith("reward_errors/") and (mean := window.is_at_least(name, 1)) is not None
    }
    if not counts:
        return None
    worst = max(counts, key=lambda name: counts[name])
    return Symptom(
        "failing grader",
        f"{worst} gave no grade to {counts[worst]:.3g} completions an iteration",
        "nothing is learned from these (their reward is empty in the report); try the grader with agilerl check",
    )


def _constant_reward(window: _Window) -> Symptom | None:
    spread, reward = window.values("reward_std"), window.values("reward")
    if min(len(spread), len(reward)) < FEWEST or max(spread) > 1e-9 or max(reward) - min(reward) > 1e-9:
        return None
    return Symptom(
        "constant reward",
        f"every completion of the last {len(spread)} iterations earned {reward[-1]:.3g}",
        "nothing can be learned from equal rewards; read some completions in the report. If they are right, the task "
        "is solved, or the grader misses them (agilerl check); else begin with easier questions, or with SFT",
    )


def _equal_groups(window: _Window) -> Symptom | None:
    share = window.is_at_least("frac_reward_zero_std", 0.9)
    if share is None or _constant_reward(window) is not None:
        return None
    return Symptom(
        "equal groups",
        f"in {share:.0%} of the groups all completions earned the same",
        "these teach nothing; raise algorithm.group_size or temperature, or choose questions that are sometimes "
        "answered right (environment.curriculum, algorithm.dynamic_sampling)",
    )


def _cut_answers(window: _Window) -> Symptom | None:
    share = window.is_at_least("completions/clipped_ratio", 0.5)
    longest = window.mean("completions/max_length")
    if share is None or longest is None:
        return None
    return Symptom(
        "cut answers",
        f"{share:.0%} of the completions were cut at the limit of {longest:.0f} tokens",
        "an answer after the limit is never graded; raise algorithm.max_output_tokens, or reward shorter answers",
    )


def _no_gradient(window: _Window) -> Symptom | None:
    # An update from which every row was left out has no norm.
    updates = [
        {"grad_norm": 0.0, **line} for line in window.lines if "loss" in line and line.get("outcome", "ok") == "ok"
    ]
    norms, spread = _values(updates, "grad_norm"), window.mean("reward_std")
    if len(norms) < FEWEST or max(norms) > 1e-9 or spread is None or spread <= 1e-9:
        return None
    return Symptom(
        "no gradient",
        "rewards differ, but the gradient is 0",
        "the loss leaves out every token: with algorithm.mask_truncated because all completions were cut; a custom "
        "loss may be detached, or mask them",
    )


def _clipped_updates(window: _Window) -> Symptom | None:
    # Only a ratio that has moved the way of its advantage is clipped, as about half of them do, and none of the first
    # step of a batch: with two steps a batch, a quarter is all that there can be.
    share = window.is_at_least("clip_ratio/region_mean", 0.25)
    if share is None:
        return None
    return Symptom(
        "clipped updates",
        f"{share:.0%} of the tokens were clipped, where 50% would be nearly all that can be",
        "the policy leaves the region that one batch can teach; lower algorithm.lr or update_epochs, or take fewer "
        "steps a batch (algorithm.batch_size)",
    )


def _no_exploration(window: _Window) -> Symptom | None:
    entropy, spread = window.mean("entropy"), window.mean("reward_std")
    if entropy is None or spread is None or entropy >= 0.005 or window.mean("reward") == 1.0:
        return None
    return Symptom(
        "no exploration",
        f"entropy is {entropy:.2g}: completions of a question are nearly always the same",
        "lower algorithm.lr, or raise temperature, beta or entropy_coef",
    )


def _low_rate(window: _Window, lines: Sequence[Mapping[str, Any]], usual: float | None) -> Symptom | None:
    # The highest so far, since annealing lowers it on purpose.
    rate = max(_values(lines, "learning_rate"), default=0.0)
    if usual is None or rate <= 0 or rate * SLOW > usual * (1 + 1e-9) or _rises(window, lines):
        return None
    return Symptom(
        "low learning rate",
        f"the learning rate is {rate:.2g}, and {usual:.2g} is usual for this base",
        "if the reward does not rise, raise algorithm.lr, or let evolution try higher ones",
    )


def _rises(window: _Window, lines: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the reward of the last iterations is above that of the first, by two standard errors."""
    first, last = _Window(lines[:WINDOW]).values("reward"), window.values("reward")
    if min(len(first), len(last)) < FEWEST or len(lines) < 2 * FEWEST:
        return False
    error = (pstdev(first) ** 2 / len(first) + pstdev(last) ** 2 / len(last)) ** 0.5
    return bool(fmean(last) - fmean(first) > 2 * error)


class Observer:
    """Collects the train lines of agents while a run goes on, as much of each as the rules look at."""

    def __init__(self, usual_rate: float | None) -> None:
        self.usual_rate = usual_rate
        self._first: dict[int, list[Mapping[str, Any]]] = {}
        self._last: dict[int, deque[Mapping[str, Any]]] = {}

    def add(self, metrics: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the metrics of an iteration, by agent."""
        for index, line in metrics.items():
            first = self._first.setdefault(index, [])
            (first if len(first) < WINDOW else self._last.setdefault(index, deque(maxlen=WINDOW))).append(line)

    def symptoms(self, agents: Iterable[int]) -> dict[int, list[Symptom]]:
        """Return what is known of these agents."""
        known = {index: [*self._first.get(index, ()), *self._last.get(index, ())] for index in agents}
        return {index: symptoms(lines, self.usual_rate) for index, lines in known.items()}


def told(found: Mapping[int, Iterable[Symptom]]) -> dict[str, Symptom]:
    """Return the symptom of the first agent that has it by a sentence that names all of these agents."""
    by_name: dict[str, list[tuple[int, Symptom]]] = {}
    for index, each in found.items():
        for symptom in each:
            by_name.setdefault(symptom.name, []).append((index, symptom))
    return {
        f"agent{'s' * (len(having) > 1)} {', '.join(str(index) for index, _ in having)}: {having[0][1]}": having[0][1]
        for having in by_name.values()
    }
