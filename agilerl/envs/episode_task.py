"""Where the episodes of a run come from: an environment, its seeds, and its chat format."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Self

import gymnasium

from agilerl.arguments import Count, Positive, Seed, Whole, checked
from agilerl.custom_code import contained, left, torch_restored
from agilerl.data import Completion
from agilerl.envs.adapters import as_text_env
from agilerl.envs.core import Lengths, Place, Split
from agilerl.envs.episodes import Episode, EpisodeLimits
from agilerl.envs.prompts import ChatFormat
from agilerl.envs.text_env import TextEnv
from agilerl.errors import AgileRLError, ConfigError, EnvError
from agilerl.streams import stream

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
        env_factory: Any,
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

        Raises:
            ConfigError: a setting out of range, or an unusable environment.
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
        first = self._made()
        self._idle.append(first)
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
        chat, first, replies = self.chat(tokenizer), [], []
        nothing = Completion([tokenizer.eos_token_id], None, "stop")
        for place in places[:_TRIED]:
            episode = self.episode(chat, context_length, 1)
            (error,) = call_all([partial(episode.begin, place.row["seed"])], self.step_timeout)
            first.append(0 if error is not None else len(episode.prompt_ids))
            if error is None:
                (error,) = call_all([partial(episode.act, nothing, "")], self.step_timeout)
            if error is not None:
                what = str(error) if isinstance(error, AgileRLError) else f"{type(error).__name__}: {error}"
                raise EnvError(f"{self.name} failed in the first turn of an episode: {what}") from error
            replies.append(max(len(episode.prompt_ids) - first[-1] - 1, 0))
            self.give_back(episode.env)
        return Lengths(first, max(replies, default=0), self.max_turns)

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Set up the chat format for this tokenizer; raises as ``chat`` does."""
        self._chat = None
        self.chat(tokenizer)

    def chat(self, tokenizer: Any) -> ChatFormat:
        """Return the environment's chat format for this tokenizer; the last one is cached.

        Raises:
            ConfigError: a chat template that does not suit the environment: it has no system role although there is a
                system prompt, does not show tools although there are tools, or rewrites earlier turns.
        """
        if self._chat is not None and self._chat.tokenizer is tokenizer:
            return self._chat
        env = self.take()
        env.bind(tokenizer)
        chat = ChatFormat(tokenizer, tools=env.tools, apply_chat_template=self.apply_chat_template)
        self.give_back(env)
        if chat.rewrites_history and self.strict and self.max_turns > 1:
            raise ConfigError(
                "the tokenizer's chat template changes earlier turns of the assistant when later ones follow, so a "
                "transcript is not append-only; allow this with strict_chat_template_boundary=False (one training row "
                "for each turn after a change), or write turns without it: apply_chat_template=False"
            )
        self._chat = chat
        return chat

    def episode(self, chat: ChatFormat, context_length: int | None, reserve: int) -> Episode:
        """Return an episode that has not begun; its environment is reserved until it is given back."""
        env = self.take()
        env.bind(chat.tokenizer)
        limits = EpisodeLimits(
            context_length,
            self.max_turns,
            reserve,
            sliding_window=self.sliding_window,
            forks=chat.rewrites_history and not self.strict,
        )
        return Episode(env, chat, limits)

    def take(self) -> TextEnv:
        """Return an idle environment, or a new one."""
        return self._idle.pop() if self._idle else self._made()

    def give_back(self, env: TextEnv) -> None:
        """Return an environment to the pool for the next episode."""
        self._idle.append(env)

    def close(self) -> None:
        """Close the idle environments."""
        while self._idle:
            with contained():
                self._idle.pop().close()

    def _made(self) -> TextEnv:
        if not callable(self.env_factory):
            raise ConfigError(
                f"expected a class or function that makes an environment, found {self.env_factory!r}; for an "
                "environment by name pass partial(make_env, name), with make_env from agilerl.envs.adapters"
            )
        try:
            with contained():
                made = self.env_factory(**self.env_config)
        except ConfigError:
            raise
        except Exception as error:
            name = getattr(self.env_factory, "__name__", repr(self.env_factory))
            raise ConfigError(
                f"{name} could not make an environment of {self.env_config or 'no settings'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        # Environments from outside gymnasium may not declare max_turns.
        return as_text_env(made, None if isinstance(made, gymnasium.Env) else self._wanted_turns)


# -- many environments at once, with a timeout ------------------------------------------------------------------------


_WORKERS = 8
_POLL = 0.05
"""Polling interval in seconds while calls are running."""


def call_all(calls: Sequence[Callable[[], object]], timeout: float | None) -> list[Exception | None]:
    """Make all calls and return what each raised, or None.

    Args:
        calls: functions without arguments that do not share state.
        timeout: seconds for each call, from its own start; None calls them in sequence in this thread. A call that
            takes longer counts as a TimeoutError: its thread is abandoned and its later results are lost.
    """
    with Stepping(timeout) as stepping:
        for call in calls:
            stepping.add(call)
        return stepping.results()


class Stepping:
    """Calls that share no state, made in threads as they are added; the meaning of ``timeout`` is that of ``call_all``.

    Whoever adds a call may do something else until ``results``. Without a timeout nothing is called before that.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.seconds: list[float] = []
        """Those of each call that has ended in time."""
        self._calls: list[Callable[[], object]] = []
        self._next = 0
        self._started: dict[int, float] = {}
        self._done: SimpleQueue[tuple[int, Exception | None, float]] = SimpleQueue()
        self._workers: set[threading.Thread] = set()
        self._abandoned: set[int] = set()
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(torch_restored())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._next = len(self._calls)  # nothing new begins
        if kind is not None and issubclass(kind, Exception):  # Ctrl-C does not wait
            deadline = monotonic() + (self.timeout or 0)
            for worker in list(self._workers):
                worker.join(max(0.0, deadline - monotonic()))
        self._stack.close()

    def add(self, call: Callable[[], object]) -> None:
        """Make a call as soon as one of the threads is free."""
        with self._lock:
            self._calls.append(call)
            if self.timeout is not None and len(self._workers) < _WORKERS:
                self._start_worker()

    def results(self) -> list[Exception | None]:
        """Return what each call raised, or None, in the order of ``add``, when all have ended or run out of time."""
        if self.timeout is None:
            return [self._timed(call)[0] for call in self._calls]
        found: dict[int, Exception | None] = {}
        late = TimeoutError(f"no answer within {self.timeout:g} seconds")
        while len(found) < len(self._calls):
            try:
                number, error, seconds = self._done.get(timeout=min(_POLL, self.timeout))
                # It may have ended too late before anybody looked.
                found.setdefault(number, error if seconds <= self.timeout else late)
            except Empty:
                now = monotonic()
                for number, start in list(self._started.items()):
                    if number not in found and now - start > self.timeout:
                        found[number] = late
                        self._replace(number)
        return [found[number] for number in range(len(self._calls))]

    def _start_worker(self) -> None:
        # A daemon, because a call that never returns must not keep the process from ending.
        worker = threading.Thread(target=self._work, daemon=True)
        self._workers.add(worker)
        worker.start()

    def _replace(self, number: int) -> None:
        """Give up on the thread of a call that hangs."""
        with self._lock:
            self._abandoned.add(number)
            if self._next < len(self._calls):
                self._start_worker()

    def _work(self) -> None:
        number = None
        while True:
            with self._lock:
                if number in self._abandoned or self._next == len(self._calls):
                    self._workers.discard(threading.current_thread())
                    return
                number, self._next = self._next, self._next + 1
                self._started[number] = monotonic()
            self._done.put((number, *self._timed(self._calls[number])))

    def _timed(self, call: Callable[[], object]) -> tuple[Exception | None, float]:
        start = monotonic()
        error = _caught(call)
        seconds = monotonic() - start
        self.seconds.append(seconds)
        return error, seconds


def _caught(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    except SystemExit as error:  # an environment must not end the process
        return left(error)
    return None
