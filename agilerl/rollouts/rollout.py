"""What comes of asking: a report of one collection, the training batch of every agent, and what failed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from agilerl.data import Trajectory
from agilerl.envs.core import Place
from agilerl.errors import EnvError, RewardError, RewardTimeoutError
from agilerl.functional import zero_variance_groups
from agilerl.rollouts.engine import Ask

Outcome = Literal["ok", "nonfinite", "oom", "reward_error", "timeout"]
"""What came of one iteration of one agent. ``nonfinite``: a loss, a gradient or the log-probs of a sample were not, and
an optimizer step was skipped. ``oom``: memory does not even hold one of its rows. ``reward_error``: every grade failed;
``timeout``: for want of time. After the last three the agent did not learn in this iteration."""


@dataclass(frozen=True)
class Failure:
    """A sample without a grade, because something went wrong."""

    request: int
    """Place of what was asked for; one request has several samples."""
    kind: Literal["oom", "reward_error", "timeout"]
    message: str


def failure_of(request: int, error: RewardError) -> Failure:
    """Return the failure of a grader on one sample."""
    return Failure(request, "timeout" if isinstance(error, RewardTimeoutError) else "reward_error", str(error))


def sampling_outcome(samples: int, failures: Sequence[Failure], *, broken: bool) -> Outcome:
    """Return what came of the samples of one agent, before it learns from them.

    Memory that ran out for one sample decides, and log-probs that were not finite in one (``broken``); grades that
    failed do where no sample has one.
    """
    kinds = [failure.kind for failure in failures]
    if "oom" in kinds:
        return "oom"
    if broken:
        return "nonfinite"
    if not kinds or len(kinds) < samples:
        return "ok"
    return "timeout" if set(kinds) == {"timeout"} else "reward_error"


def check_error_rate(samples: int, failures: Sequence[Failure], most: float, *, episodes: bool) -> None:
    """Raise RewardError, or EnvError for episodes, where more than the share ``most`` of the samples failed.

    What memory did not hold is no fault of a grader or an environment and does not count.
    """
    errors = [failure for failure in failures if failure.kind != "oom"]
    if len(errors) <= most * samples:
        return
    count = f"all {samples}" if len(errors) == samples else f"{len(errors)} of {samples}"
    allowed = "" if len(errors) == samples else f", more than training.max_error_rate={most:g} allows"
    if episodes:
        raise EnvError(f"the environment failed in {count} episodes{allowed}; the first: {errors[0].message}")
    raise RewardError(f"grading failed on {count} completions{allowed}; the first time: {errors[0].message}")


def lost_places(failed: Sequence[Mapping[int, str]], size: int, *, episodes: bool) -> set[int]:
    """Return the places of an exam that count for nobody, because somebody's grade (or environment) failed there.

    ``failed`` maps, for each agent, the places where its own failed to the reason. An agent that fails in more than
    half of the exam is at fault itself: it costs nobody else a place. Raises RewardError, or EnvError for episodes,
    where that is everybody, or the others lose more than half of the exam.
    """
    counted = [places for places in failed if len(places) <= size / 2]
    lost = {place for places in counted for place in places}
    if len(lost) > size / 2 or not counted:
        places = {place: error for own in (counted or failed) for place, error in own.items()}
        first = places[min(places)]
        if not episodes:
            raise RewardError(f"grading failed on {len(places)} of {size} answers of the exam; the first time: {first}")
        raise EnvError(f"the environment failed in {len(places)} of {size} exam episodes; the first: {first}")
    return lost


# -- the batches: a report of one collection, and what every agent trains on ------------------------------------------


@dataclass
class CollectReport:
    """Wall seconds of the two halves of a collection, and what went wrong in it."""

    rollout: float = 0.0
    reward: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    """By ask, one for each sample that has no grade because something failed."""


@dataclass
class Rollout:
    """One batch of trajectories of every agent."""

    trajectories: dict[int, list[Trajectory]]
    """All that was sampled, by agent index, groups in prompt order."""
    times: CollectReport = field(default_factory=CollectReport)
    dropped: dict[int, set[int]] = field(default_factory=dict)
    """By index of the agents with dynamic sampling: groups without variance, which are not trained on."""
    skipped: dict[int, int] = field(default_factory=dict)
    """By agent index: training rows that are too long, in whose place another one stands."""
    levels: dict[int, list[int]] = field(default_factory=dict)
    """By agent index: the level of each prompt where the task has a curriculum."""
    samples: dict[int, int] = field(default_factory=dict)
    """By agent index: completions or episodes that were asked for."""
    failures: dict[int, list[Failure]] = field(default_factory=dict)
    """By agent index: those that have no grade because something failed."""
    mark: object = None
    """The population that it is of; None: nothing says so."""

    def batch(self, index: int) -> list[Trajectory]:
        """Return the trajectories that an agent trains on."""
        dropped = self.dropped.get(index, ())
        return [t for t in self.trajectories[index] if t.group not in dropped]

    def outcome(self, index: int) -> Outcome:
        """Return what came of sampling an agent's batch."""
        broken = any(t.finish_reason == "error" for t in self.trajectories[index])
        return sampling_outcome(self.samples.get(index, 0), self.failures.get(index, ()), broken=broken)

    def note(self, report: CollectReport, owners: Sequence[int], asks: Sequence[Ask]) -> None:
        """Take in what a collection took and what failed in it; ``asks[k]`` was of the agent ``owners[k]``."""
        self.times.rollout += report.rollout
        self.times.reward += report.reward
        for owner, ask in zip(owners, asks, strict=True):
            self.samples[owner] = self.samples.get(owner, 0) + ask.samples
            self.note_place(owner, ask.place)
        for failure in report.failures:
            self.failures.setdefault(owners[failure.request], []).append(failure)

    def note_place(self, owner: int, place: Place) -> None:
        """Take in what stood at a training position of an agent."""
        self.skipped[owner] = self.skipped.get(owner, 0) + place.skipped
        levels = self.levels.setdefault(owner, [])
        if place.level is not None:
            levels.append(place.level)

    def check(self, max_error_rate: float, *, episodes: bool) -> None:
        """Raise RewardError, or EnvError for episodes, where more than this share of all samples failed."""
        failures = [failure for own in self.failures.values() for failure in own]
        check_error_rate(sum(self.samples.values()), failures, max_error_rate, episodes=episodes)


def teaches_nothing(group: Sequence[Trajectory]) -> bool:
    """Return whether all completions of a prompt earned the same, or fewer than two have a grade."""
    returns = torch.tensor([t.episode_return for t in group])
    return bool(zero_variance_groups(returns, torch.zeros(len(group), dtype=torch.int64)).all())
