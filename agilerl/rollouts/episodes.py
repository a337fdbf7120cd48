"""Asks of a multi-turn environment: the episodes of all agents advance together, turn by turn, in one decode batch.

Slow environments step while other episodes of the same turn are still being decoded.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any, Literal

from agilerl.data import Completion, Trajectory
from agilerl.envs.episode_task import Episode, EpisodeTask, Stepping
from agilerl.envs.prompts import decode_completions
from agilerl.errors import EnvError
from agilerl.rollouts.engine import Ask, CollectReport, Conversation, Failure, GenerationRequest, RolloutEngine
from agilerl.sizes import UNIT_ROWS

_SLOW = 1e-3
"""Mean seconds of a step from which on environments step during decoding; faster ones would only be in its way."""


@dataclass
class _Playing:
    """An episode that is being played."""

    ask: Ask
    number: int
    """Position of its ask."""
    sample: int
    episode: Episode
    conversation: Conversation | None = None
    lost: bool = False
    """Its environment timed out or was abandoned and is not used again."""
    failure: Failure | None = None
    """Why it has no grade."""

    def fail(self, kind: Literal["oom", "reward_error", "timeout"], message: str) -> None:
        """End the episode without a grade."""
        self.failure = Failure(self.number, kind, message)
        self.episode.fail(message)


def collect_episodes(
    engine: RolloutEngine, task: EpisodeTask, tokenizer: Any, asks: Sequence[Ask]
) -> tuple[list[list[Trajectory]], CollectReport]:
    """Return the trajectories of each ask, in order, with the seconds of decoding and of the environments.

    A sample is one trajectory, or several if the context was rewritten on the way.
    An episode whose environment raises or does not answer in time ends there and has no grade (NaN): it is masked out
    of training and does not stop the other episodes. The report names each of them. Seconds count as environment time
    only while nothing is decoded.

    Raises:
        EnvError: one seed gave two different first observations.
    """
    report, start, chat = CollectReport(), perf_counter(), task.chat(tokenizer)
    playing = [
        _Playing(ask, number, sample, task.episode(chat, ask.context_length, ask.reserve))
        for number, ask in enumerate(asks)
        for sample in range(ask.samples)
    ]
    # Caches stay from turn to turn for agents with few enough episodes to hold them in memory. Other agents must not
    # matter: kept caches change the last bits of later log-probs.
    of_slot = Counter(p.ask.slot for p in playing)
    for p in playing:
        if of_slot[p.ask.slot] <= UNIT_ROWS:
            p.conversation = Conversation()
    with _TurnStepping(task) as stepping:
        for p in playing:
            stepping.step(p, partial(p.episode.begin, p.ask.place.row["seed"]))
        stepping.finish()
    _check_pure(playing)
    report.reward += perf_counter() - start
    turn, seconds = 0, list[float]()
    while live := [p for p in playing if not p.episode.done]:
        start = perf_counter()
        with _TurnStepping(task) as stepping:
            requests = [_request(p, turn) for p in live]
            early = partial(_act_early, stepping, tokenizer, live)
            generated = engine.generate(requests, early) if stepping.early else engine.generate(requests)
            report.rollout += perf_counter() - start
            start = perf_counter()
            completions = [group[0] for group in generated]
            # The others were reported early, and are stepping already.
            _act(stepping, tokenizer, [(p, c) for p, c in zip(live, completions) if id(p) not in stepping.playing])
            stepping.finish()
        seconds += stepping.seconds
        for p, completion in zip(live, completions):
            if p.episode.done:
                # Keys and values are the largest part of a rollout's memory.
                p.conversation = None
            if completion.finish_reason == "oom":
                p.fail("oom", "memory does not hold a single completion")
        report.reward += perf_counter() - start
        turn += 1
    if seconds:
        # Decides whether environments step early from now on.
        task.step_seconds = fmean(seconds)
    report.failures = [p.failure for p in playing if p.failure is not None]
    for p in playing:
        if not p.lost:
            task.give_back(p.episode.env)
    groups: list[list[Trajectory]] = [[] for _ in asks]
    for p in playing:
        groups[p.number] += p.episode.trajectories(p.ask.group, p.sample)
    return groups, report


def episode_metrics(trajectories: Sequence[Trajectory], episodes: int) -> dict[str, float]:
    """Return metrics of this many episodes, each counted once; one that failed at once has no trajectory."""
    # By episode, because one has several rows if its context was rewritten.
    outcomes = list({(t.group, t.episode): t.outcome for t in trajectories if t.outcome is not None}.values())
    played = [o for o in outcomes if o.error is None]
    judged = [o.success for o in played if o.success is not None]
    metrics = {"env/episodes": float(episodes), "env/errors": float(episodes - len(played))}
    if played:
        metrics["env/turns_mean"] = fmean(o.turns for o in played)
        metrics["env/truncated_rate"] = fmean(o.truncated is not None for o in played)
    if any(o.breaks for o in played):
        metrics["env/history_breaks"] = sum(o.breaks for o in played) / sum(o.turns for o in played)
    if judged:
        metrics["env/success_rate"] = fmean(judged)
    return metrics


class _TurnStepping(Stepping):
    """Lets the environments of one turn work; an episode whose environment fails is over."""

    def __init__(self, task: EpisodeTask) -> None:
        super().__init__(task.step_timeout)
        self.playing: dict[int, _Playing] = {}
        # Without a timeout, environments are called in this thread only.
        self.early = task.step_timeout is not None and task.step_seconds > _SLOW

    def step(self, p: _Playing, call: Callable[[], Any]) -> None:
        """Let the environment of an episode work."""
        self.playing[id(p)] = p
        self.add(call)

    def finish(self) -> None:
        """Wait for all environments."""
        for p, error in zip(self.playing.values(), self.results()):
            if error is not None:
                p.lost = True
                message = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
                p.fail("timeout" if isinstance(error, TimeoutError) else "reward_error", message)


def _act(stepping: _TurnStepping, tokenizer: Any, completions: Sequence[tuple[_Playing, Completion]]) -> None:
    """Let the environments answer completions."""
    whole = [(p, completion) for p, completion in completions if completion.finish_reason != "oom"]
    texts = decode_completions(tokenizer, [completion.token_ids for _, completion in whole])
    for (p, completion), text in zip(whole, texts):
        stepping.step(p, partial(p.episode.act, completion, text))


def _act_early(
    stepping: _TurnStepping, tokenizer: Any, live: Sequence[_Playing], request: int, sample: int, completion: Completion
) -> None:
    """Let the environment of one episode answer, as an engine reports its completion."""
    _act(stepping, tokenizer, [(live[request], completion)])


def _request(p: _Playing, turn: int) -> GenerationRequest:
    """Return the request for the next completion of an episode."""
    # Turn t of sample s has its own random stream, so its draws do not depend on the rest of the batch.
    kept = {"conversation": p.conversation, "first_prompt": p.episode.first_prompt}
    return p.ask.generation(p.episode.prompt_ids, 1, turn, p.sample, **kept)


def _check_pure(playing: Sequence[_Playing]) -> None:
    """Raise EnvError if one seed gave two different first observations: its episodes would not be comparable."""
    first: dict[int, list[int]] = {}
    for p in playing:
        if p.episode.error is not None:
            continue
        known = first.setdefault(id(p.ask), p.episode.prompt_ids)
        if known != p.episode.prompt_ids:
            name, seed = type(p.episode.env.unwrapped).__name__, p.ask.place.row["seed"]
            raise EnvError(
                f"{name}.reset(seed={seed}) gave two different first observations; an episode must be a pure "
                "function of its seed, see agilerl.envs.check.check_env"
            )
