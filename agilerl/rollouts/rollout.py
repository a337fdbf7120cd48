"""What comes of asking: a report of one collection, and the training batch of every agent of a population."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from agilerl.data import Trajectory
from agilerl.envs.core import Place
from agilerl.functional import zero_variance_groups
from agilerl.rollouts.engine import Ask
from agilerl.rollouts.failures import Failure, Outcome, check_error_rate, sampling_outcome


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
