"""Asks of a multi-turn environment: the episodes of all agents advance together, turn by turn, in one decode batch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

from agilerl.data import Completion, Trajectory
from agilerl.envs.episode_task import EpisodeTask, call_all
from agilerl.envs.episodes import Episode
from agilerl.envs.prompts import decode_completions
from agilerl.errors import EnvError
from agilerl.rollouts.engine import Ask, Conversation, RolloutEngine
from agilerl.rollouts.failures import Failure
from agilerl.rollouts.rollout import CollectReport
from agilerl.sizes import UNIT_ROWS


@dataclass
class _Playing:
    """An episode that is being played."""

    ask: Ask
    number: int
    """Of the ask, among all of them."""
    sample: int
    episode: Episode
    conversation: Conversation | None = None
    lost: bool = field(default=False)
    """Its environment does not answer any more, or broke off: nobody uses it again."""
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

    A sample is one trajectory, or several where the context was rewritten on the way.
    An episode whose environment raises or does not answer in time ends there and has no grade (NaN): it is masked out
    of training and does not stop the others. The report names each of them.

    Raises:
        EnvError: one seed began in two ways.
    """
    report, start, chat = CollectReport(), perf_counter(), task.chat(tokenizer)
    playing = [
        _Playing(ask, number, sample, task.episode(chat, ask.context_length, ask.reserve))
        for number, ask in enumerate(asks)
        for sample in range(ask.samples)
    ]
    _let_engine_keep(playing)
    _call(task, playing, [partial(p.episode.begin, p.ask.place.row["seed"]) for p in playing])
    _check_pure(playing)
    report.reward += perf_counter() - start
    turn = 0
    while live := [p for p in playing if not p.episode.done]:
        start = perf_counter()
        completions = _complete(engine, live, turn)
        report.rollout += perf_counter() - start
        start = perf_counter()
        texts = decode_completions(tokenizer, [c.token_ids for c in completions])
        acting = [(p, c, text) for p, c, text in zip(live, completions, texts) if c.finish_reason != "oom"]
        _call(task, [p for p, _, _ in acting], [partial(p.episode.act, c, text) for p, c, text in acting])
        for p, completion in zip(live, completions):
            if p.episode.done:
                p.conversation = None
            if completion.finish_reason == "oom":
                p.fail("oom", "memory does not hold a single completion")
        report.reward += perf_counter() - start
        turn += 1
    report.failures = [p.failure for p in playing if p.failure is not None]
    for p in playing:
        if not p.lost:
            task.give_back(p.episode.env)
    groups: list[list[Trajectory]] = [[] for _ in asks]
    for p in playing:
        groups[p.number] += p.episode.trajectories(p.ask.group, p.sample)
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
    # Turn t of sample s draws from a stream of its own, whatever else is in the batch.
    requests = [p.ask.generation(p.episode.prompt_ids, 1, turn, p.sample, conversation=p.conversation) for p in live]
    return [group[0] for group in engine.generate(requests)]


def _let_engine_keep(playing: Sequence[_Playing]) -> None:
    """Let the engine keep the caches of episodes from turn to turn, for agents with few enough to hold them in memory.

    It does not depend on other agents: what was kept decides the last bits of what follows.
    """
    of_slot = Counter(p.ask.slot for p in playing)
    for p in playing:
        if of_slot[p.ask.slot] <= UNIT_ROWS:
            p.conversation = Conversation()


def _check_pure(playing: Sequence[_Playing]) -> None:
    """Raise EnvError where one seed began in two ways: its episodes could not be compared with each other."""
    first: dict[int, list[int]] = {}
    for p in playing:
        if p.episode.error is not None:
            continue
        known = first.setdefault(id(p.ask), p.episode.prompt_ids)
        if known != p.episode.prompt_ids:
            name, seed = type(p.episode.env.unwrapped).__name__, p.ask.place.row["seed"]
            raise EnvError(
                f"{name}.reset(seed={seed}) gave two different first observations; an episode must be a pure "
                "function of its seed, see agilerl check"
            )
