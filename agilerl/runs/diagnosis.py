"""Why an agent may not be learning, in words: what its metrics say, and what to change.

Each rule looks at the last iterations of one agent, and says what it saw with its number. It does not know the task:
a symptom is a place to look and not a verdict. Nothing here changes a run.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

from agilerl.checks.arguments import counted

WINDOW = 8
"""Iterations that are looked at: the agent's last ones."""
FEWEST = 3
"""Fewer iterations say nothing."""
FALLEN = 4.0
"""A reward that is this many times smaller than the highest so far has fallen."""
SLOW = 10.0
"""A learning rate this many times below the base's usual one is called low."""
EARLY = 0.25
"""An elite of this first share of the iterations says that the others were no gain."""


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
    """The train lines of one agent, oldest first; its metrics over the last iterations."""

    def __init__(self, lines: Sequence[Mapping[str, Any]], usual_rate: float | None) -> None:
        self.all, self.lines, self.usual_rate = lines, lines[-WINDOW:], usual_rate
        # The highest so far, since annealing lowers it on purpose.
        self.rate = max(_values(lines, "learning_rate"), default=0.0)

    def values(self, name: str) -> list[float]:
        return _values(self.lines, name)

    def mean(self, name: str, *, least: float = -math.inf) -> float | None:
        """Return the mean if there are values enough and it reaches the least."""
        values = self.values(name)
        mean = fmean(values) if len(values) >= FEWEST else None
        return mean if mean is not None and mean >= least else None


def _values(lines: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Return a metric's finite values; a file may hold anything."""
    values = (line.get(name) for line in lines)
    # NaN fails the comparison as well.
    return [float(v) for v in values if isinstance(v, int | float) and abs(v) < 1e300]


def _peak(lines: Sequence[Mapping[str, Any]], name: str) -> int:
    """Return where a metric is highest, first."""
    return max(range(len(lines)), key=lambda k: max(_values([lines[k]], name), default=-math.inf))


def _evidence(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines that the rules look at, oldest first: :func:`symptoms` of these are those of all lines."""
    # Of a curriculum's levels any would do: it only matters that there is one.
    peaks = {_peak(lines, name) for name in ("reward", "learning_rate", "curriculum/level")}
    return [line for k, line in enumerate(lines) if k < WINDOW or k >= len(lines) - WINDOW or k in peaks]


def symptoms(lines: Sequence[Mapping[str, Any]], usual_rate: float | None = None) -> list[Symptom]:
    """Return what the train lines of one agent (``metrics.jsonl``, oldest first) say, the most telling first.

    ``usual_rate``: the learning rate that is known to suit the base; None: that rule is left out.
    """
    window = _Window(lines, usual_rate)
    if len(window.lines) < FEWEST:
        return []
    seen = [Symptom(name, sentence, remedy) for name, (rule, remedy) in _RULES.items() if (sentence := rule(window))]
    # What else is seen follows from it, or from the grader.
    if any(symptom.name == "fallen reward" for symptom in seen):
        return [symptom for symptom in seen if symptom.name in ("failing grader", "fallen reward")]
    return seen


# -- the rules: each returns what it saw, with its number; "" for nothing ---------------------------------------------


def _failing_grader(window: _Window) -> str:
    counts = {
        name.removeprefix("reward_errors/"): mean
        for name in window.lines[-1]
        if name.startswith("reward_errors/") and (mean := window.mean(name, least=1)) is not None
    }
    worst = max(counts, key=lambda name: counts[name], default="")
    error = next((f", for instance because {why}" for line in window.lines if (why := line.get("reward_error"))), "")
    if (episodes := window.mean("env/errors", least=1)) is not None:
        return f"about {counted(round(episodes), 'episode')} an iteration failed{error}"
    number = counted(round(counts.get(worst, 0)), "completion")
    return f"{worst} gave no grade to about {number} an iteration{error}" if counts else ""


def _fallen_reward(window: _Window) -> str:
    best = window.all[_peak(window.all, "reward")]
    highest, spread = _values([best], "reward"), _values([best], "reward_std")
    rewards = window.values("reward")
    # A curriculum makes the questions harder: a reward that falls is no sign then.
    harder = any("curriculum/level" in line for line in window.all)
    if harder or not highest or not spread or len(rewards) < FEWEST:
        return ""
    now = median(rewards[-FEWEST:])
    # Rare successes come and go: only a reward that was a good part of its own spread can be said to have fallen.
    if highest[0] <= 0 or highest[0] < spread[0] / 3 or now * FALLEN > highest[0]:
        return ""
    usual = window.usual_rate
    usual_rate = f", and {usual:.2g} is usual for this base" if usual and window.rate > usual else ""
    return f"the reward fell from {highest[0]:.2g} to {now:.2g}; the learning rate was {window.rate:.2g}{usual_rate}"


def _cut_answers(window: _Window) -> str:
    share, longest = window.mean("completions/clipped_ratio", least=0.5), window.mean("completions/max_length")
    if share is None or longest is None:
        return ""
    return f"{share:.0%} of the completions were cut at the limit of {longest:.0f} tokens"


def _constant_reward(window: _Window) -> str:
    spread, reward = window.values("reward_std"), window.values("reward")
    # Not 0: the mean and the spread of equal rewards, such as 0.1, carry rounding.
    if min(len(spread), len(reward)) < FEWEST or max(spread) > 1e-9 or max(reward) - min(reward) > 1e-9:
        return ""
    every, earned = f"of the last {len(spread)} iterations", f"earned {reward[-1]:.3g}"
    if ungraded := window.mean("completions/ungraded", least=0.005):
        none = "" if _failing_grader(window) else " (the grader returned None, where a wrong answer needs 0.0)"
        return f"{ungraded:.0%} of the completions {every} got no grade{none}, and all others {earned}"
    if reward[-1] <= 0:
        return f"every completion {every} {earned}, so no answer is right, or the grader misses them"
    return f"every completion {every} {earned}, so the task is solved, or the grader cannot tell answers apart"


def _equal_groups(window: _Window) -> str:
    share = window.mean("frac_reward_zero_std", least=0.9)
    if share is None or _constant_reward(window):
        return ""
    return f"in {share:.0%} of the groups all completions earned the same"


def _no_gradient(window: _Window) -> str:
    # An update from which every row was left out has no norm.
    # Of equal groups it is 0, too, and rightly so.
    updates = [
        {"grad_norm": 0.0, **line}
        for line in window.lines
        if "loss" in line and line.get("outcome", "ok") == "ok" and line.get("frac_reward_zero_std", 0) < 1
    ]
    norms, spread = _values(updates, "grad_norm"), window.mean("reward_std")
    if len(norms) < FEWEST or max(norms) > 1e-9 or spread is None or spread <= 1e-9:
        return ""
    return "rewards differ, but the gradient is 0"


def _clipped_updates(window: _Window) -> str:
    # Only a ratio that has moved the way of its advantage is clipped, as about half of them do, and none of the first
    # step of a batch: with two steps a batch, a quarter is all that there can be.
    share = window.mean("clip_ratio/region_mean", least=0.25)
    return "" if share is None else f"{share:.0%} of the tokens were clipped, where 50% would be nearly all that can be"


def _no_exploration(window: _Window) -> str:
    entropy, spread = window.mean("entropy"), window.mean("reward_std")
    # A reward of 1 throughout: nothing is left to explore.
    if entropy is None or spread is None or entropy >= 0.005 or window.mean("reward") == 1.0:
        return ""
    return f"entropy is {entropy:.2g}: completions of a question are nearly always the same"


def _low_rate(window: _Window) -> str:
    rate, usual = window.rate, window.usual_rate
    # Exactly ten times below counts, in spite of rounding.
    if usual is None or rate <= 0 or rate * SLOW > usual * (1 + 1e-9) or _rises(window):
        return ""
    return f"the learning rate is {rate:.2g}, and {usual:.2g} is usual for this base"


def _rises(window: _Window) -> bool:
    """Return whether the reward of the last iterations is above that of the first, by two standard errors."""
    first, last = _values(window.all[:WINDOW], "reward"), window.values("reward")
    if min(len(first), len(last)) < FEWEST or len(window.all) < 2 * FEWEST:
        return False
    # The standard error of a difference of two means: their variances add up. A variance may be more than floats hold.
    error = math.hypot(*(pstdev(values) / len(values) ** 0.5 for values in (first, last)))
    return bool(fmean(last) - fmean(first) > 2 * error)


_RULES: Mapping[str, tuple[Callable[[_Window], str], str]] = {
    "failing grader": (
        _failing_grader,
        "nothing is learned from these (their reward is empty in the report); fix the grader (a dry run tries it), "
        "or the environment",
    ),
    "fallen reward": (
        _fallen_reward,
        "usually the steps are too large and the policy is broken: lower algorithm.lr, and if it evolves the "
        "upper end of its range (mutation.rl_hp_selection.lr)",
    ),
    "cut answers": (
        _cut_answers,
        "an answer after the limit is never graded; raise algorithm.max_output_tokens, or reward shorter answers",
    ),
    "constant reward": (
        _constant_reward,
        "nothing can be learned from equal rewards; read some completions in the report, try the grader (agilerl "
        "check), or choose questions that are sometimes answered right",
    ),
    "equal groups": (
        _equal_groups,
        "they carry no signal; raise algorithm.group_size or temperature, or choose questions that are sometimes "
        "answered right (environment.curriculum, algorithm.dynamic_sampling)",
    ),
    "no gradient": (
        _no_gradient,
        "the loss leaves out every token: with algorithm.mask_truncated because all completions were cut; a custom "
        "loss may be detached, or mask them",
    ),
    "clipped updates": (
        _clipped_updates,
        "the policy leaves the region that one batch can teach; lower algorithm.lr or update_epochs, or take fewer "
        "steps a batch (algorithm.batch_size)",
    ),
    "no exploration": (_no_exploration, "lower algorithm.lr, or raise temperature, beta or entropy_coef"),
    "low learning rate": (
        _low_rate,
        "if the reward does not rise, raise algorithm.lr, or let evolution try higher ones",
    ),
}
"""Each rule with what to do about what it sees, the most telling first."""


class Observer:
    """Collects the train lines of agents during a run, as much of each as the rules look at."""

    def __init__(self, usual_rate: float | None) -> None:
        self.usual_rate = usual_rate
        self._lines: dict[int, list[Mapping[str, Any]]] = {}

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take the train lines of an iteration."""
        for line in lines:
            self._lines[line["agent"]] = _evidence([*self._lines.get(line["agent"], ()), line])

    def symptoms(self, agents: Iterable[int]) -> dict[int, list[Symptom]]:
        """Return what is known of these agents."""
        return {index: symptoms(self._lines.get(index, ()), self.usual_rate) for index in agents}


def name_agents(seen: Mapping[int, Iterable[Symptom]]) -> dict[str, Symptom]:
    """Return the symptom of the first agent that has it by a sentence that names all of these agents."""
    by_name: dict[str, list[tuple[int, Symptom]]] = {}
    for index, each in seen.items():
        for symptom in each:
            by_name.setdefault(symptom.name, []).append((index, symptom))
    return {
        f"agent{'s' * (len(having) > 1)} {', '.join(str(index) for index, _ in having)}: {having[0][1]}": having[0][1]
        for having in by_name.values()
    }


def count_failed_grades(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return a sentence about the episodes or grades that failed, by the train lines of a run; "" if none did."""
    counts, episodes, error = Counter[str](), Counter[str](), ""
    for line in lines:
        counts.update({n.partition("/")[2]: line[n] for n in line if n.startswith("reward_errors/")})
        episodes.update({name: line[name] for name in line if name in ("env/errors", "env/episodes")})
        error = error or (f", the first because {reason}" if (reason := line.get("reward_error")) else "")
    if failed := round(episodes["env/errors"]):
        total = round(episodes["env/episodes"])  # 0 in runs of earlier versions
        sized = f"{failed} of {total:,} episodes" if total else counted(failed, "episode")
        return f"{sized} failed{error}"
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return f"{name} gave no grade to {counted(round(count), 'completion')} of the run{error}" if count else ""


def early_elite(elite: Mapping[str, Any], iterations: int) -> list[str]:
    """Return a sentence if the elite of a run is an agent as it was long before the end; an empty list if not."""
    step, decided = elite["step"], elite["decided_by"]
    if step > EARLY * iterations:
        return []
    panel = "on the second panel" if decided["panel"] == "second" else "in its exam"
    seen = (
        f"the elite is agent {elite['index']} as it was after iteration {step} of {iterations}, since later training "
        f"brought nothing better: {panel} it had {decided['elite']:.3f}, the best at the end {decided['last']:.3f} "
        f"({decided['n']} questions)"
    )
    remedy = (
        "the learning rate may be too high (lower algorithm.lr), the reward in training may not be what the exam "
        "measures, or the exam may be too small to see a gain (raise environment.eval_prompts)"
    )
    return [f"{seen}: {remedy}"]


def advice(summary: Mapping[str, Any]) -> dict[str, Symptom]:
    """Return what the summary of a run says of the run as a whole, in the form of :func:`name_agents`."""
    elite = summary.get("elite") or {}
    texts = [elite.get("constant_answer"), summary.get("failed_grades"), *summary.get("advice", ())]
    return {text: Symptom("of the run", text, "") for text in texts if text}
