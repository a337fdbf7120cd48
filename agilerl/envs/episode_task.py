"""Multi-turn episodes: one at the level of tokens, and the task that plays those of a run."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from types import MappingProxyType, TracebackType
from typing import Annotated, Any, ClassVar, Literal, Self

import gymnasium

from agilerl.checks.arguments import Count, Hint, Positive, Seed, Whole, checked, described, reason
from agilerl.data import Completion, EpisodeOutcome, Trajectory
from agilerl.envs.adapters import as_text_env
from agilerl.envs.core import Lengths, Place, Split
from agilerl.envs.prompts import REWRITES, ChatFormat, as_messages
from agilerl.envs.text_env import RETURNED, Observation, TextEnv
from agilerl.errors import ConfigError, EnvError, RewardError
from agilerl.rewards.grader import check_score
from agilerl.rewards.waiting import Threads
from agilerl.safety.custom_code import contained, left, torch_restored
from agilerl.streams import stream
from agilerl.text.contract import contract_of

Truncation = Literal["turns", "context", "environment"]


@dataclass(frozen=True)
class EpisodeLimits:
    """What an episode may use."""

    context_length: int | None
    """Most tokens of prompt and completion together; None for no limit."""
    max_turns: int | None = None
    """Most actions; None for the environment's limit."""
    reserve: int = 1
    """Tokens that must be left for the completion; otherwise the episode is truncated."""
    sliding_window: bool = False
    """If a prompt does not fit, drop the oldest turns instead of truncating the episode."""
    forks: bool = False
    """Accept a chat template that rewrites earlier turns; a new training row begins after each rewrite."""

    @property
    def prompt_length(self) -> int | None:
        """Most tokens of a prompt; None for no limit."""
        return None if self.context_length is None else self.context_length - self.reserve


@dataclass
class TrainingRow:
    """Tokens of one training row."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    """Turn of each token, -1 if the environment wrote it."""
    logprobs: list[float] | None = field(default_factory=list)
    """None once a completion came without log-probs."""

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return self.prompt_ids + self.token_ids

    def append(self, ids: Sequence[int], turn: int, logprobs: Sequence[float] | None) -> None:
        """Add what was sampled in a turn; with turn -1, what the environment wrote."""
        self.token_ids += ids
        self.turn_ids += [turn] * len(ids)
        # One unknown log-prob discards all of the row's: a made-up number would enter the loss.
        self.logprobs = None if self.logprobs is None or logprobs is None else [*self.logprobs, *logprobs]

    def trajectory(self, **of_episode: Any) -> Trajectory:
        """Return the row with what all rows of its episode share."""
        return Trajectory(
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids,
            action_mask=[turn >= 0 for turn in self.turn_ids],
            logprobs=self.logprobs,
            turn_ids=self.turn_ids,
            **of_episode,
        )


class Episode:
    """An environment, its conversation so far, and the training rows made of it.

    ``begin`` and ``act`` call the environment; between them :attr:`prompt_ids` is the prompt of the next completion.
    Generated tokens are kept as they were sampled and never rendered or tokenised again.
    """

    def __init__(self, env: TextEnv, chat: ChatFormat, limits: EpisodeLimits) -> None:
        self.env, self.chat, self.limits = env, chat, limits
        self.max_turns = env.max_turns if limits.max_turns is None else min(limits.max_turns, env.max_turns)
        self.done = False
        self.error: str | None = None
        """What went wrong in the environment, or None."""
        self.rewards: list[float] = []
        self.info: dict[str, Any] = {}
        self._rows: list[TrainingRow] = []
        self._turns: list[list[int]] = []
        """For each turn, its completion and what the environment wrote after it."""
        self._messages: list[dict[str, Any]] = []
        self._opening: list[dict[str, Any]] = []
        self._log: list[str] = []
        self._truncated: Truncation | None = None
        self._finish: str = "stop"

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the next completion's prompt."""
        return self._rows[-1].ids

    @property
    def first_prompt(self) -> int:
        """Tokens before the first completion of the row that the next one continues."""
        return len(self._rows[-1].prompt_ids)

    @property
    def outcome(self) -> EpisodeOutcome:
        """How the episode has gone so far."""
        success = self.info.get("success")
        success = None if success is None else bool(success)
        return EpisodeOutcome(turns=len(self._turns), success=success, truncated=self._truncated, error=self.error)

    def begin(self, seed: int) -> None:
        """Reset the environment and render the first prompt; raises as ``act`` and ``ChatFormat.prompt``."""
        self.seed = seed
        observation, self.info = self._check_returned("reset", self.env.reset(seed=seed))
        system = [] if self.env.system_prompt is None else [{"role": "system", "content": self.env.system_prompt}]
        self._opening = system + _read_observation(observation)
        self._messages = list(self._opening)
        self._rows = [TrainingRow(self.chat.prompt(self._opening, max_tokens=self.limits.prompt_length))]

    def act(self, completion: Completion, text: str) -> float:
        """Pass one completion, as tokens and as text, to the environment; return its reward.

        The environment reads the whole answer: before the text what the chat template has opened of it.
        Raises EnvError for a step that is no five-tuple, a reward that is no finite number, or what is not text.
        """
        # There are as many rewards as earlier turns, so their number is that of this one.
        self._rows[-1].append(completion.token_ids, len(self.rewards), completion.logprobs)
        text = ("" if self._messages[-1]["role"] == "assistant" else self.chat.opening) + text
        # A copy: what the environment writes is added to it, and must not reach the completion.
        self._turns.append(list(completion.token_ids))
        self._messages.append({"role": "assistant", "content": text})
        self._log.append(f"> {text}")
        self._finish = completion.finish_reason
        result = self.env.step_ids(text, completion.token_ids)
        observation, reward, terminated, truncated, self.info = self._check_returned("step", result)
        try:
            score = check_score(reward)
        except RewardError:
            score = None
        if score is None:
            raise EnvError(
                f"the reward of {self._name}.step must be a finite number (up to 3.4e38), found {described(reward)}; "
                "return 0.0 for no reward"
            )
        self.rewards.append(score)
        if terminated:
            self.done = True
        elif truncated or len(self.rewards) >= self.max_turns:
            self.stop("environment" if truncated else "turns")
        if not self.done:
            self._continue(_read_observation(observation), completion.token_ids)
        elif isinstance(observation, str) and observation:
            # Only for the log: no completion follows.
            self._log.append(f"< {observation}")
        return score

    def fail(self, error: str) -> None:
        """End the episode without a grade because the environment failed."""
        self.error, self.done = error, True

    def stop(self, reason: Truncation) -> None:
        """Truncate the episode."""
        self._truncated, self.done = reason, True

    def trajectories(self, group: int, number: int) -> list[Trajectory]:
        """Return the training rows: one, or several if the context was rewritten.

        Each row has the rewards of all turns; NaN if the environment failed.
        """
        rewards, outcome = list(self.rewards), self.outcome
        if self.error is not None or not rewards:
            # At least one: without rewards the return would be 0, which is a grade.
            rewards = [float("nan")] * max(len(rewards), 1)
        question = "\n".join(str(m["content"]) for m in self._opening)
        # The policy did not choose to end at the limit of turns, nor where a completion is full.
        finish: Any = "length" if self._truncated in ("turns", "environment") else self._truncated or self._finish
        return [
            row.trajectory(
                rewards=list(rewards),
                group=group,
                finish_reason="error" if self._finish == "error" else finish,
                text="\n".join(self._log),
                row={"question": question, "answer": "", "seed": self.seed},
                episode=number,
                outcome=outcome,
            )
            for row in self._rows
            # A prompt that was never answered has nothing to learn from.
            if row.token_ids
        ]

    def _continue(self, messages: list[dict[str, Any]], completion: Sequence[int]) -> None:
        """Make the prompt of the next turn from the environment's messages."""
        before = self._messages[:-1]
        self._messages += messages
        self._log += [f"< {m['content']}" for m in messages]
        budget = self.limits.prompt_length
        current = self._rows[-1]
        if self.limits.forks:
            # The whole conversation is rendered again, which may change turns that were sampled before.
            prompt = self.chat.prompt(self._messages)
        else:
            if not self.chat.appends(before, messages):
                raise EnvError(REWRITES)
            between = self.chat.between(before, completion, messages)
            self._turns[-1] += between
            prompt = current.ids + between
        if budget is not None and len(prompt) > budget and self.limits.sliding_window and not self.limits.forks:
            prompt = self._window(budget)
        if budget is not None and len(prompt) > budget:
            self.stop("context")
        elif prompt[: len(current.ids)] == current.ids:
            # The context only grew, so the row continues; a window or a rewrite begins another.
            written = prompt[len(current.ids) :]
            current.append(written, -1, [0.0] * len(written))  # masked: these enter no loss
        else:
            self._rows.append(TrainingRow(prompt))

    def _window(self, budget: int) -> list[int]:
        """Return the first prompt and as many of the latest turns as fit the budget, at least one."""
        first = self._rows[0].prompt_ids
        latest: list[int] = []
        for turn in reversed(self._turns):
            # At least the latest turn, even if the prompt is then over its budget, which ends the episode.
            if latest and len(first) + len(turn) + len(latest) > budget:
                break
            latest = turn + latest
        return first + latest

    @property
    def _name(self) -> str:
        """The class name that the environment's author knows, without adapters."""
        return type(getattr(self.env.unwrapped, "inner", self.env.unwrapped)).__name__

    def _check_returned(self, method: str, result: Any) -> Sequence[Any]:
        """Return what ``reset`` or ``step`` returned, its info as a dict; raises EnvError if values are missing."""
        names = RETURNED[method]
        if isinstance(result, tuple) and len(result) == len(names):
            return *result[:-1], dict(result[-1] or {})
        kind = f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, tuple) else "")
        raise EnvError(f"{self._name}.{method} must return ({', '.join(names)}), found {kind} (docs/environments.md)")


def _read_observation(observation: Observation) -> list[dict[str, Any]]:
    try:
        return as_messages(observation)
    except ConfigError as error:
        raise EnvError(str(error)) from None


Factory = Annotated[
    Callable[..., Any],
    Hint("for an environment by name pass partial(make_env, name), with make_env from agilerl.envs.adapters"),
]
_SPLITS: tuple[Split, ...] = ("train", "exam", "test")
_TRIED = 8
"""Episodes of a split begun before training, to measure prompt lengths."""


class EpisodeTask:
    """A multi-turn environment as something to train on: endless training seeds, fixed exam and test seeds.

    Seeds of the three splits never coincide: they have the remainders 0, 1 and 2 modulo 3. So an environment should
    seed a generator and do no arithmetic on the seed. Whether different seeds give different episodes is up to the
    environment: one with few episodes shows the same ones in training and in the exam.
    """

    grader = "return"
    """The name of the reward in the metrics: the sum over the turns of an episode."""
    multi_turn: ClassVar[bool] = True
    counts: Mapping[str, int] = MappingProxyType({})
    """Counts of rows left out: always empty."""

    @checked
    def __init__(
        self,
        env_factory: Factory,
        env_config: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        max_turns: Count | None = None,
        exam_episodes: Count = 128,
        test_episodes: Whole = 400,
        seed: Seed = 42,
        apply_chat_template: bool = True,
        strict_chat_template_boundary: bool = True,
        enable_sliding_window: bool = False,
        step_timeout: Positive | None = 60.0,
    ) -> None:
        """Make one environment, to check that this works.

        Args:
            env_factory: returns a new environment: a TextEnv, or anything that ``as_text_env`` turns into one.
            env_config: keyword arguments of ``env_factory``.
            name: its name in logs; by default the environment's class name.
            max_turns: most actions of an episode, at most the environment's limit; None is that limit.
            exam_episodes: episodes that measure fitness, 1 or more.
            test_episodes: episodes of the final test, 0 or more.
            seed: decides all seeds of episodes.
            apply_chat_template: if False, observations are written as they are, each on separate lines.
            strict_chat_template_boundary: refuse a chat template that rewrites earlier turns (e.g. removes thinking);
                False accepts it, with a separate training row for each turn after a rewritten one.
            enable_sliding_window: if the context is full, drop the oldest turns instead of cutting the episode.
            step_timeout: seconds for one call of an environment; None waits forever.
        """
        if enable_sliding_window and not strict_chat_template_boundary:
            raise ConfigError(
                "enable_sliding_window=True and strict_chat_template_boundary=False both decide what a later turn sees "
                "of the earlier ones; use one of them"
            )
        self.env_factory, self.env_config = env_factory, dict(env_config or {})
        self.exam_prompts, self.test_prompts, self.seed = exam_episodes, test_episodes, seed
        self.apply_chat_template, self.strict = apply_chat_template, strict_chat_template_boundary
        self.sliding_window, self.step_timeout = enable_sliding_window, step_timeout
        self.step_seconds = 0.0
        """Mean seconds of a step in the latest episodes; slow environments step while other completions are decoded."""
        self._idle: list[TextEnv] = []
        self._chat: ChatFormat | None = None
        self._wanted_turns = max_turns
        first = self.take()
        self.give_back(first)
        self.name = name or type(first.unwrapped).__name__
        self.max_turns = first.max_turns if max_turns is None else min(max_turns, first.max_turns)

    def __repr__(self) -> str:
        return f"EpisodeTask({self.name!r}, max_turns={self.max_turns}, seed={self.seed})"

    def panel_size(self, split: Split) -> int:
        """Return how many episodes ``exam`` or ``test`` has."""
        return self.exam_prompts if split == "exam" else self.test_prompts

    def episode_seed(self, split: Split, index: int) -> int:
        """Return the seed of an episode: below 2**31, different in each split."""
        if split not in _SPLITS:
            raise EnvError(f"expected the split train, exam or test, found {split!r}")
        if index < 0 or (split != "train" and index >= self.panel_size(split)):
            raise EnvError(f"{self.name} has no episode {index} in its {split} split")
        draw = int(stream(self.seed, f"episode/{split}", index).integers(2**31 // len(_SPLITS)))
        return draw * len(_SPLITS) + _SPLITS.index(split)

    def place_at(self, split: Split, index: int, tokenizer: Any, context_length: int) -> Place:
        """Return the episode at a place; if its prompt is too long, the episode gets no grade."""
        return Place({"seed": self.episode_seed(split, index)})

    def lengths(self, places: Sequence[Place], tokenizer: Any, context_length: int) -> Lengths:
        """Return the lengths of the first few episodes' first prompts, and of the replies to an empty action.

        Raises EnvError for an environment that fails at this.
        """
        first, replies = [], []
        nothing = Completion([contract_of(tokenizer).end or 0], None, "stop")
        for question in places[:_TRIED]:
            episode, sizes = self.episode(self.chat(tokenizer), context_length, 1), []
            for call in (partial(episode.begin, question.row["seed"]), partial(episode.act, nothing, "")):
                with Stepping(self.step_timeout) as stepping:
                    stepping.add(call)
                    (error,) = stepping.results()
                if error is not None:
                    raise EnvError(f"{self.name} failed in the first turn of an episode: {reason(error)}") from error
                sizes.append(len(episode.prompt_ids))
            first.append(sizes[0])
            replies.append(max(sizes[1] - sizes[0] - 1, 0))  # less the completion, an end token
            self.give_back(episode.env)
        return Lengths(first, max(replies, default=0), self.max_turns)

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Set up the chat format for this tokenizer; raises as ``chat`` does."""
        self._chat = None
        self.chat(tokenizer)

    def chat(self, tokenizer: Any) -> ChatFormat:
        """Return the environment's chat format for this tokenizer; the last one is cached.

        Raises ConfigError for a chat template that does not show the tools that there are, or rewrites earlier turns.
        """
        if self._chat is not None and self._chat.tokenizer is tokenizer:
            return self._chat
        env = self.take()
        env.bind(tokenizer)
        chat = ChatFormat(
            tokenizer,
            tools=env.tools,
            apply_chat_template=self.apply_chat_template,
            system=env.system_prompt is not None,
        )
        self.give_back(env)
        if chat.rewrites_history and self.strict and self.max_turns > 1:
            raise ConfigError(REWRITES)
        self._chat = chat
        return chat

    def episode(self, chat: ChatFormat, context_length: int | None, reserve: int) -> Episode:
        """Return an episode that has not begun; its environment is reserved until it is given back."""
        env = self.take()
        env.bind(chat.tokenizer)
        forks = chat.rewrites_history and not self.strict
        return Episode(env, chat, EpisodeLimits(context_length, self.max_turns, reserve, self.sliding_window, forks))

    def take(self) -> TextEnv:
        """Return an idle environment, or a new one."""
        if self._idle:
            return self._idle.pop()
        try:
            with contained():
                env = self.env_factory(**self.env_config)
        except ConfigError:
            raise
        except Exception as error:
            name = getattr(self.env_factory, "__name__", repr(self.env_factory))
            raise ConfigError(
                f"{name} could not make an environment of {self.env_config or 'no settings'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        # Environments from outside gymnasium may not declare max_turns.
        return as_text_env(env, None if isinstance(env, gymnasium.Env) else self._wanted_turns)

    def give_back(self, env: TextEnv) -> None:
        """Return an environment to the pool for the next episode."""
        self._idle.append(env)

    def close(self) -> None:
        """Close the idle environments."""
        while self._idle:
            with contained():
                self._idle.pop().close()


_WORKERS = 8
_POLL = 0.05
"""Polling interval in seconds while calls are running."""


class Stepping:
    """Calls that share no state, made in threads as they are added; meanwhile the caller may do something else.

    ``timeout``: seconds for each call, from its own start. A call that takes longer counts as a TimeoutError: its
    thread is abandoned and its later results are lost. With None, ``results`` makes the calls in its own thread.
    """

    def __init__(self, timeout: float | None, workers: int = _WORKERS) -> None:
        self.timeout = timeout
        self.seconds: list[float] = []
        """Those of each call that has ended."""
        self._threads = Threads(workers)
        self._calls: list[Callable[[], object]] = []
        self._outcomes: list[Future[tuple[Exception | None, float]]] = []
        self._started: dict[int, float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # Around all calls and not each: they overlap, and most of torch's settings are the process's.
        self._stack.enter_context(torch_restored())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        failed = kind is not None and issubclass(kind, Exception)  # Ctrl-C does not wait
        # results() has waited for all that it waits for; after an error, calls that still run get their time.
        self._threads.end((self.timeout or 0.0) if failed else 0.0)
        self._stack.close()

    def add(self, call: Callable[[], object]) -> None:
        """Make a call as soon as one of the threads is free."""
        self._calls.append(call)
        if self.timeout is not None:
            self._outcomes.append(self._threads.submit(self._time, len(self._calls) - 1))

    def results(self) -> list[Exception | None]:
        """Return what each call raised, or None, in the order of ``add``, when all have ended or run out of time."""
        if (timeout := self.timeout) is None:
            return [self._time(number)[0] for number in range(len(self._calls))]
        hanging: set[int] = set()
        while running := {n: call for n, call in enumerate(self._outcomes) if n not in hanging and not call.done()}:
            # In short waits, since any call may run out of time while the others are waited for.
            wait(running.values(), _POLL)
            now = monotonic()
            for number, outcome in running.items():
                if not outcome.done() and now - self._started.get(number, now) > timeout:
                    hanging.add(number)
                    self._threads.add()  # in place of the one that hangs
        ended = [(None, inf) if n in hanging else outcome.result() for n, outcome in enumerate(self._outcomes)]
        # A call may also have ended too late before anybody looked.
        late = TimeoutError(f"no answer within {timeout:g} seconds")
        return [error if seconds <= timeout else late for error, seconds in ended]

    def _time(self, number: int) -> tuple[Exception | None, float]:
        start, caught = monotonic(), None
        self._started[number] = start
        try:
            self._calls[number]()
        except Exception as error:
            caught = error
        except BaseException as error:  # an environment must not end the process
            caught = left(error)
        seconds = monotonic() - start
        self.seconds.append(seconds)
        return caught, seconds
