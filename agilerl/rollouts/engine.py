"""Requests (``Ask`` of a population, ``GenerationRequest`` to an engine), the engine protocol, and their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, get_args

import torch
from pydantic import Field

from agilerl.checks.arguments import Count, NotNegative, Positive, Whole, check_fields, described, reason, shown
from agilerl.data import Completion, Trajectory
from agilerl.data.batch import FinishReason
from agilerl.envs.core import Place, Split
from agilerl.errors import AgileRLError, ConfigError, EngineError, EnvError, RewardError
from agilerl.functional import zero_variance_groups
from agilerl.rewards.grader import TrainerState
from agilerl.safety.custom_code import contained


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn. The defaults sample from the model's own distribution."""

    max_new_tokens: Count
    """Most tokens generated for one completion."""
    temperature: NotNegative = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Whole = 0
    """Only the most likely tokens, so many; 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Positive = 1.0
    min_new_tokens: Whole = 0
    """The end token cannot be drawn before this many tokens."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"SamplingSettings: expected at most max_new_tokens={self.max_new_tokens} for min_new_tokens, found "
                f"{self.min_new_tokens}"
            )

    @property
    def full_support(self) -> bool:
        """True when every token keeps its probability, so that recorded log-probs are the policy's own."""
        return (self.top_p, self.top_k, self.min_p, self.repetition_penalty, self.min_new_tokens) == (1, 0, 0, 1, 0)


@dataclass(frozen=True)
class Ask:
    """Some samples of one place of a task for one agent."""

    slot: int | None
    """Adapter slot; None asks the base model."""
    place: Place
    samples: int
    sampling: Callable[[int], SamplingSettings]
    """From the length of a prompt to how its completion is drawn."""
    context_length: int
    """Most tokens of prompt and completion together."""
    group: int
    split: Split = "train"
    key: tuple[int, ...] = ()
    """Names the random streams of the samples, beside the purpose; those of an episode add turn and sample."""
    reserve: int = 1
    """Tokens that later prompts of an episode must leave for the completion; if they cannot, the episode is cut."""
    weights: Mapping[str, float] | None = None
    """The agent's own weights of all parts of the reward; None: the grader's."""
    state: TrainerState | None = None
    """What graders may ask for as ``trainer_state``."""
    is_trial: bool = False
    """Whether a training question is only tried out, before training."""

    @property
    def purpose(self) -> str:
        """What the samples are for: training, trials and exams never share draws."""
        return self.split if self.split != "train" else "trial" if self.is_trial else "rollout"

    def generation(
        self, prompt_ids: Sequence[int], samples: int, *key: int, **of_conversation: Any
    ) -> "GenerationRequest":
        """Return what the engine is asked for: completions of a prompt, with ``key`` added to the ask's own."""
        sampling, keys = self.sampling(len(prompt_ids)), (*self.key, *key)
        return GenerationRequest(self.slot, prompt_ids, samples, sampling, self.purpose, keys, **of_conversation)


@dataclass
class Conversation:
    """What an engine may keep of one conversation between completions. The caller owns it.

    It belongs to one policy: a slot that learns in between needs a new one.
    """

    slot: int | None = None
    """Adapter slot that computed what is kept."""
    token_ids: Sequence[int] = ()
    """Tokens whose keys and values are kept."""
    kept: Any = None
    """The keys and values, in the engine's own form."""


@dataclass(frozen=True)
class GenerationRequest:
    """Some samples of one prompt for one agent."""

    slot: int | None
    """Adapter slot; None asks the base model."""
    prompt_ids: Sequence[int]
    samples: int
    sampling: SamplingSettings
    purpose: str = "rollout"
    """Names the random stream, so that training and evaluation never share draws."""
    key: tuple[int, ...] = ()
    """Sample s draws from the stream ``(seed, purpose, *key, s)``: which rows share a batch cannot matter."""
    conversation: Conversation | None = field(default=None, compare=False)
    """The conversation that this completion continues, with one sample only. What it kept is not computed again."""
    first_prompt: int | None = field(default=None, compare=False)
    """Tokens before the first completion of a conversation, where activated adapters begin; None: all of the prompt."""


OnCompletion = Callable[[int, int, Completion], None]
"""Takes the number of a request, the number of a sample, and its completion."""


Arrivals = Callable[[], Sequence[GenerationRequest]]
"""Returns the requests that have arrived since it was asked last."""


def of_part(on_completion: OnCompletion | None, places: Sequence[int]) -> OnCompletion | None:
    """Return a callback for a part of the requests; ``places`` are their positions among all requests."""
    if on_completion is None:
        return None
    return lambda request, sample, completion: on_completion(places[request], sample, completion)


class RolloutEngine(Protocol):
    """Generates for all agents at once."""

    exact: bool
    """True when the engine computes as the trainer does: recorded log-probs equal the trainer's own up to rounding in
    the base's data type. They serve as old log-probs where that is exact (``BaseModel.decodes_exactly``)."""

    def generate(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each request, in order.

        ``on_completion`` is called, in the thread of the caller, with each completion that ends before the others do:
        at most once for a sample, and with the completion that will be returned. An engine need not call it.
        """
        ...


class CustomEngine:
    """An engine of a user, whose answers are checked: what is wrong there would be learned from."""

    def __init__(self, engine: RolloutEngine, vocabulary_size: int) -> None:
        self.engine, self.vocabulary_size, self.exact = engine, vocabulary_size, engine.exact

    def generate(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each request; raises EngineError if the engine breaks its protocol."""
        with contained():
            groups = self.engine.generate(requests, on_completion)
        name = type(self.engine).__name__
        if not isinstance(groups, list | tuple) or len(groups) != len(requests):
            raise EngineError(f"{name}.generate: expected a list of {len(requests)} groups, found {described(groups)}")
        for number, (request, group) in enumerate(zip(requests, groups)):
            where = f"{name}.generate: the group of request {number}"
            if not isinstance(group, list | tuple) or len(group) != request.samples:
                raise EngineError(f"{where}: expected {request.samples} completions, found {described(group)}")
            for completion in group:
                self._check(completion, where, request.sampling.max_new_tokens)
        return [list(group) for group in groups]

    def _check(self, completion: Any, where: str, longest: int) -> None:
        if not isinstance(completion, Completion) or completion.finish_reason not in get_args(FinishReason):
            raise EngineError(f"{where}: expected agilerl.data.Completion objects, found {described(completion)}")
        ids, logprobs = completion.token_ids, completion.logprobs
        # Not isinstance, which takes True for a token id.
        if not all(type(token) is int and 0 <= token < self.vocabulary_size for token in ids) or len(ids) > longest:
            raise EngineError(
                f"{where}: expected at most {longest} token ids from 0 to {self.vocabulary_size - 1}, found "
                f"{shown(list(ids)[:20])}"
            )
        if not ids and completion.finish_reason != "oom":
            raise EngineError(f"{where}: expected a token in each completion, found none; use the finish_reason 'oom'")
        if logprobs is not None and len(logprobs) != len(ids):
            raise EngineError(f"{where}: expected {len(ids)} logprobs, one for each token, found {len(logprobs)}")
        if logprobs is None and self.exact:
            raise EngineError(f"{where}: an engine with exact=True gives logprobs, found none; set exact to False")


def custom_engine(given: Any, runtime: Any) -> CustomEngine:
    """Return a user's engine, checked; ``given`` may be a function of the runtime that makes it.

    Raises ConfigError for anything without a method ``generate`` and a boolean ``exact``, and if the function fails.
    """
    engine = given
    if callable(given) and not hasattr(given, "generate"):
        try:
            with contained():
                engine = given(runtime)
        except AgileRLError:
            raise
        except Exception as error:
            raise ConfigError(
                f"Runtime(engine=...): {described(given)} could not make an engine: {reason(error)}"
            ) from error
    if not callable(getattr(engine, "generate", None)) or not isinstance(getattr(engine, "exact", None), bool):
        raise ConfigError(
            "Runtime(engine=...): expected an object with generate(requests, on_completion=None) and exact (True or "
            f"False), or a function of the runtime that returns one, found {described(engine)}"
        )
    return CustomEngine(engine, runtime.base.vocabulary_size)


# -- failures: those of one agent are its own, and those of all agents end the run ------------------------------------


Outcome = Literal["ok", "nonfinite", "oom", "reward_error", "timeout"]
"""How an iteration of one agent ended. ``nonfinite``: a loss, a gradient or the log-probs of a sample were not, and an
optimizer step was skipped. ``oom``: memory does not even hold one of its rows. ``reward_error``: every grade failed;
``timeout``: every grade timed out. After the last three the agent did not learn in this iteration."""


@dataclass(frozen=True)
class Failure:
    """A sample without a grade, because something went wrong."""

    request: int
    """Place of what was asked for; one request has several samples."""
    kind: Literal["oom", "reward_error", "timeout"]
    message: str


def check_error_rate(samples: int, failures: Sequence[Failure], most: float, *, episodes: bool) -> None:
    """Raise RewardError, or EnvError for episodes, if more than the share ``most`` of the samples failed.

    Samples that ran out of memory do not count: neither a grader nor an environment caused that.
    """
    errors = [failure for failure in failures if failure.kind != "oom"]
    if len(errors) <= most * samples:
        return
    if samples == 1:
        raise (EnvError if episodes else RewardError)(errors[0].message)
    count = f"all {samples}" if len(errors) == samples else f"{len(errors)} of {samples}"
    allowed = "" if len(errors) == samples else f", more than training.max_error_rate={most:g} allows"
    if episodes:
        raise EnvError(f"{count} episodes failed{allowed}; the first: {errors[0].message}")
    raise RewardError(f"grading failed on {count} completions{allowed}; {_first_time(errors[0].message)}")


def _first_time(message: str) -> str:
    advice = "; if a wrong answer raised it, return 0.0 for such answers" * (" raised " in message)
    return f"the first time: {message}{advice}"


def lost_places(failed: Sequence[Mapping[int, str]], size: int, *, episodes: bool) -> set[int]:
    """Return the places of an exam that count for no agent, because grading (or the environment) failed there for one.

    ``failed`` has, for each agent, its failed places with the reason. An agent that fails in more than half of the exam
    is assumed to be the cause itself: its failures cost other agents no place. Raises RewardError, or EnvError for
    episodes, if that holds for all agents, or if the others lose more than half of the exam.
    """
    counted = [places for places in failed if len(places) <= size / 2]
    lost = {row for places in counted for row in places}
    if len(lost) > size / 2 or not counted:
        # Without an agent that counts, all have failed in most places: the message is about all of them.
        errors = {row: error for places in (counted or failed) for row, error in places.items()}
        first = errors[min(errors)]
        if not episodes:
            raise RewardError(f"grading failed on {len(errors)} of {size} answers of the exam; {_first_time(first)}")
        raise EnvError(f"{len(errors)} of {size} exam episodes failed; the first: {first}")
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
    """By agent index: training rows that were too long and were replaced by another one."""
    levels: dict[int, list[int]] = field(default_factory=dict)
    """By agent index: the level of each prompt, if the task has a curriculum."""
    samples: dict[int, int] = field(default_factory=dict)
    """By agent index: completions or episodes that were asked for."""
    failures: dict[int, list[Failure]] = field(default_factory=dict)
    """By agent index: those that have no grade because something failed."""
    mark: object = None
    """Identifies the population that sampled it; None if unknown."""

    def batch(self, index: int) -> list[Trajectory]:
        """Return the trajectories that an agent trains on."""
        dropped = self.dropped.get(index, ())
        return [t for t in self.trajectories[index] if t.group not in dropped]

    def outcome(self, index: int) -> Outcome:
        """Return the outcome of sampling an agent's batch, before it learns from it.

        One sample without memory decides, then one whose log-probs are not finite. Failed grades decide only if no
        sample has a grade.
        """
        kinds = [failure.kind for failure in self.failures.get(index, ())]
        if "oom" in kinds:
            return "oom"
        if any(t.finish_reason == "error" for t in self.trajectories[index]):
            return "nonfinite"
        if not kinds or len(kinds) < self.samples.get(index, 0):
            return "ok"
        return "timeout" if set(kinds) == {"timeout"} else "reward_error"

    def note(self, report: CollectReport, owners: Sequence[int], asks: Sequence[Ask]) -> None:
        """Add the times and failures of a collection; ``asks[k]`` belongs to the agent ``owners[k]``."""
        self.times.rollout += report.rollout
        self.times.reward += report.reward
        for owner, ask in zip(owners, asks, strict=True):
            self.samples[owner] = self.samples.get(owner, 0) + ask.samples
            self.note_place(owner, ask.place)
        for failure in report.failures:
            self.failures.setdefault(owners[failure.request], []).append(failure)

    def note_place(self, owner: int, place: Place) -> None:
        """Count the rows that a training position of an agent skipped, and note its level."""
        self.skipped[owner] = self.skipped.get(owner, 0) + place.skipped
        levels = self.levels.setdefault(owner, [])
        if place.level is not None:
            levels.append(place.level)

    def check(self, max_error_rate: float, *, episodes: bool) -> None:
        """Raise RewardError, or EnvError for episodes, if more than this share of all samples failed."""
        failures = [failure for of_agent in self.failures.values() for failure in of_agent]
        check_error_rate(sum(self.samples.values()), failures, max_error_rate, episodes=episodes)


def teaches_nothing(group: Sequence[Trajectory]) -> bool:
    """Return whether all completions of a prompt earned the same, or fewer than two have a grade."""
    returns = torch.tensor([t.episode_return for t in group])
    return bool(zero_variance_groups(returns, torch.zeros(len(group), dtype=torch.int64)).all())
