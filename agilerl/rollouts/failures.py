"""What goes wrong with single samples: one agent's trouble is its own, and everybody's trouble ends the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agilerl.errors import EnvError, RewardError, RewardTimeoutError

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
