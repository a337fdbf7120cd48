"""From seeds to trajectories: the episodes of all agents advance together, turn by turn, in one decode batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

from agilerl.data import Completion, Trajectory
from agilerl.envs.conversation import ChatFormat
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.episodes import Episode
from agilerl.envs.prompts import decode_completions
from agilerl.errors import EnvError
from agilerl.rollouts.collect import CollectReport
from agilerl.rollouts.engine import GenerationRequest, RolloutEngine, SamplingSettings
from agilerl.rollouts.failures import Failure
from agilerl.rollouts.stepping import call_all

__all__ = ["EpisodeRequest", "collect_episodes", "episode_metrics"]


@dataclass(frozen=True)
class EpisodeRequest:
    """Some episodes of one seed for one agent."""

    slot: int | None
    """Adapter slot; None asks the base model."""
    seed: int
    samples: int
    sampling: Callable[[int], SamplingSettings]
    """From the length of a prompt to how its completion is drawn."""
    context_length: int
    reserve: int
    """Tokens that a prompt leaves for the completion."""
    group: int
    purpose: str = "rollout"
    key: tuple[int, ...] = ()
    """Turn t of sample s draws from a stream of its own, named by ``(purpose, *key, t, s)``."""


@dataclass
class _Playing:
    """An episode that is being played."""

    request: EpisodeRequest
    place: int
    """Of the request, among all of them."""
    sample: int
    episode: Episode
    lost: bool = field(default=False)
    """Its environment does not answer any more, or broke off: nobody uses it again."""
    failure: Failure | None = None
    """Why it has no grade."""

    def fail(self, kind: Literal["oom", "reward_error", "timeout"], message: str) -> None:
        """End the episode without a grade."""
        self.failure = Failure(self.place, kind, message)
        self.episode.fail(message)


def collect_episodes(
    engine: RolloutEngine, task: EpisodeTask, chat: ChatFormat, requests: Sequence[EpisodeRequest]
) -> tuple[list[list[Trajectory]], CollectReport]:
    """Return the trajectories of each request, in order, with the seconds of decoding and of the environments.

    An episode whose environment raises or does not answer in time ends there and has no grade (NaN): it is masked out
    of training and does not stop the others. The report names each of them.

    Raises:
        EnvError: one seed began in two ways.
    """
    report, start = CollectReport(), perf_counter()
    playing = [
        _Playing(request, place, sample, task.episode(chat, request.context_length, request.reserve))
        for place, request in enumerate(requests)
        for sample in range(request.samples)
    ]
    _call(task, playing, [partial(p.episode.begin, p.request.seed) for p in playing])
    _check_pure(playing)
    report.reward += perf_counter() - start
    turn = 0
    while live := [p for p in playing if not p.episode.done]:
        start = perf_counter()
        completions = _complete(engine, live, turn)
        report.rollout += perf_counter() - start
        start = perf_counter()
        texts = decode_completions(chat.tokenizer, [c.token_ids for c in completions])
        acting = [(p, c, text) for p, c, text in zip(live, completions, texts) if c.finish_reason != "oom"]
        _call(task, [p for p, _, _ in acting], [partial(p.episode.act, c, text) for p, c, text in acting])
        for p, completion in zip(live, completions):
            if completion.finish_reason == "oom":
                p.fail("oom", "memory does not hold a single completion")
        report.reward += perf_counter() - start
        turn += 1
    report.failures = [p.failure for p in playing if p.failure is not None]
    for p in playing:
        if not p.lost:
            task.give_back(p.episode.env)
    groups: list[list[Trajectory]] = [[] for _ in requests]
    for p in playing:
        groups[p.place] += p.episode.trajectories(p.request.group, p.sample)
    return groups, report


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return how the episodes of these trajectories went, each counted once; nothing for single-turn ones."""
    outcomes = list({(t.group, t.episode): t.outcome for t in trajectories if t.outcome is not None}.values())
    if not outcomes:
        return {}
    played = [o for o in outcomes if o.error is None]
    judged = [o.success for o in played if o.success is not None]
    metrics = {"env/errors": float(len(outcomes) - len(played))}
    if played:
        metrics["env/turns_mean"] = sum(o.turns for o in played) / len(played)
        metrics["env/truncated_rate"] = sum(o.truncated is not None for o in played) / len(played)
    if judged:
        metrics["env/success_rate"] = sum(judged) / len(judged)
    return metrics


def _call(task: EpisodeTask, playing: Sequence[_Playing], calls: Sequence[Callable[[], Any]]) -> None:
    """Let the environments work; an episode whose environment fails is over."""
    for p, error in zip(playing, call_all(calls, task.step_timeout)):
        if error is not None:
            p.lost = True
            message = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
            p.fail("timeout" if isinstance(error, TimeoutError) else "reward_error", message)


def _complete(engine: RolloutEngine, live: Sequence[_Playing], turn: int) -> list[Completion]:
    """Return the next completion of every episode, all of them decoded together."""
    generation: list[GenerationRequest] = []
    for p in live:
        r, prompt = p.request, p.episode.prompt_ids
        key = (*r.key, turn, p.sample)
        generation.append(GenerationRequest(r.slot, prompt, 1, r.sampling(len(prompt)), r.purpose, key))
    return [group[0] for group in engine.generate(generation)]


def _check_pure(playing: Sequence[_Playing]) -> None:
    """Raise EnvError where one seed began in two ways: its episodes could not be compared with each other."""
    first: dict[int, list[int]] = {}
    for p in playing:
        if p.episode.error is not None:
            continue
        known = first.setdefault(id(p.request), p.episode.prompt_ids)
        if known != p.episode.prompt_ids:
            raise EnvError(
                f"{type(p.episode.env.unwrapped).__name__}.reset(seed={p.request.seed}) gave two different first "
                "observations; an episode must be a pure function of its seed, see agilerl check"
            )
