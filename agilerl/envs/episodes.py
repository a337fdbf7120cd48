"""One episode at the level of tokens: what the model sees and generates, as append-only ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agilerl.data import Completion, EpisodeOutcome, Trajectory
from agilerl.envs.prompts import ChatFormat, as_messages
from agilerl.envs.text_env import Observation, TextEnv
from agilerl.errors import ConfigError, EnvError, RewardError
from agilerl.rewards.grader import check_score

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
class _Row:
    """Tokens of one training row."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    """Turn of each token, -1 if the environment wrote it."""
    logprobs: list[float] | None = field(default_factory=list)
    """None once a completion came without log-probs."""

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids

    def say(self, completion: Completion, turn: int) -> None:
        """Append what the agent generated."""
        self._append(completion.token_ids, turn, completion.logprobs)

    def hear(self, ids: Sequence[int]) -> None:
        """Append what the environment wrote."""
        self._append(ids, -1, [0.0] * len(ids))

    def _append(self, ids: Sequence[int], turn: int, logprobs: Sequence[float] | None) -> None:
        self.token_ids += ids
        self.turn_ids += [turn] * len(ids)
        # One unknown log-prob discards all of the row's: a made-up number would enter the loss.
        self.logprobs = None if self.logprobs is None or logprobs is None else [*self.logprobs, *logprobs]


class Episode:
    """An environment, its conversation so far, and the training rows made of it.

    ``begin`` and ``act`` call the environment; between them :attr:`prompt_ids` is the prompt of the next completion.
    Generated tokens are kept as they were sampled and never rendered or tokenised again.
    """

    def __init__(self, env: TextEnv, chat: ChatFormat, limits: EpisodeLimits) -> None:
        self.env, self.chat, self.limits = env, chat, limits
        self.max_turns = env.max_turns if limits.max_turns is None else min(limits.max_turns, env.max_turns)
        self.done = False
        self.rewards: list[float] = []
        self.info: dict[str, Any] = {}
        self._rows: list[_Row] = []
        self._turns: list[list[int]] = []
        """For each turn, its completion and what the environment wrote after it."""
        self._messages: list[dict[str, Any]] = []
        self._opening: list[dict[str, Any]] = []
        self._log: list[str] = []
        self._truncated: Truncation | None = None
        self._error: str | None = None
        self._finish: str = "stop"
        self.seed = 0

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the next completion's prompt."""
        return self._rows[-1].ids

    @property
    def error(self) -> str | None:
        """What went wrong in the environment, or None."""
        return self._error

    @property
    def outcome(self) -> EpisodeOutcome:
        """How the episode has gone so far."""
        success = self.info.get("success")
        return EpisodeOutcome(
            turns=len(self._turns),
            success=None if success is None else bool(success),
            truncated=self._truncated,
            error=self._error,
        )

    def begin(self, seed: int) -> None:
        """Reset the environment and render the first prompt.

        Raises:
            EnvError: a prompt that is empty or over the budget, or an observation that is not text.
            ConfigError: a chat template that refuses the messages.
        """
        self.seed = seed
        begun = self.env.reset(seed=seed)
        if not isinstance(begun, tuple) or len(begun) != 2:
            found = f"a {type(begun).__name__}" + (f" of {len(begun)}" if isinstance(begun, tuple) else "")
            raise EnvError(f"{_name(self.env)}.reset must return (observation, info), found {found}; see agilerl check")
        observation, self.info = begun[0], dict(begun[1] or {})
        system = [] if self.env.system_prompt is None else [{"role": "system", "content": self.env.system_prompt}]
        self._opening = system + _observed(observation)
        self._messages = list(self._opening)
        self._rows = [_Row(self.chat.prompt(self._opening, max_tokens=self.limits.prompt_length))]

    def act(self, completion: Completion, text: str) -> float:
        """Pass one completion, as tokens and as text, to the environment; return its reward.

        Raises:
            EnvError: the environment broke the protocol: the step is not a five-tuple, the reward is not a finite
                number, or the observation is not text.
        """
        turn = len(self.rewards)
        self._rows[-1].say(completion, turn)
        self._turns.append(list(completion.token_ids))
        self._messages.append({"role": "assistant", "content": text})
        self._log.append(f"> {text}")
        self._finish = completion.finish_reason
        observation, reward, terminated, truncated, self.info = _checked(
            self.env.step_ids(text, completion.token_ids), self.env
        )
        self.rewards.append(reward)
        if terminated:
            self.done = True
        elif truncated or len(self.rewards) >= self.max_turns:
            self._cut("environment" if truncated else "turns")
        if self.done:
            if isinstance(observation, str) and observation:
                self._log.append(f"< {observation}")
            return reward
        self._continue(_observed(observation), completion.token_ids)
        return reward

    def fail(self, error: str) -> None:
        """End the episode without a grade because the environment failed."""
        self._error, self.done = error, True

    def stop(self, reason: Truncation) -> None:
        """Truncate the episode from outside."""
        self._cut(reason)

    def trajectories(self, group: int, number: int) -> list[Trajectory]:
        """Return the training rows: one, or several if the context was rewritten.

        Each row has the rewards of all turns; NaN if the environment failed.
        """
        outcome = self.outcome
        rewards = self.rewards or [float("nan")]
        question = "\n".join(str(m["content"]) for m in self._opening)
        finish: Any = "length" if self._truncated in ("turns", "environment") else self._truncated or self._finish
        return [
            Trajectory(
                prompt_ids=row.prompt_ids,
                token_ids=row.token_ids,
                action_mask=[turn >= 0 for turn in row.turn_ids],
                logprobs=row.logprobs,
                rewards=[float("nan")] * len(rewards) if self._error is not None else list(rewards),
                group=group,
                turn_ids=row.turn_ids,
                finish_reason="error" if self._finish == "error" else finish,
                text="\n".join(self._log),
                row={"question": question, "answer": "", "seed": self.seed},
                episode=number,
                outcome=outcome,
            )
            for row in self._rows
            if row.token_ids
        ]

    # -- the next prompt ------------------------------------------------------------------------------------------

    def _continue(self, messages: list[dict[str, Any]], said: Sequence[int]) -> None:
        """Make the prompt of the next turn from the environment's messages."""
        self._messages += messages
        self._log += [f"< {m['content']}" for m in messages]
        between = self.chat.between(self._opening, said, messages)
        self._turns[-1] += between
        budget = self.limits.prompt_length
        current = self._rows[-1]
        prompt = current.ids + between
        if self.limits.forks:
            prompt = self.chat.prompt(self._messages)
        if budget is not None and len(prompt) > budget and self.limits.sliding_window and not self.limits.forks:
            prompt = self._window(budget)
        if budget is not None and len(prompt) > budget:
            self._cut("context")
        elif prompt[: len(current.ids)] == current.ids:
            current.hear(prompt[len(current.ids) :])
        else:
            self._rows.append(_Row(prompt))

    def _window(self, budget: int) -> list[int]:
        """Return the first prompt and as many of the latest turns as fit the budget, at least one."""
        first = self._rows[0].prompt_ids
        kept: list[int] = []
        for turn in reversed(self._turns):
            if kept and len(first) + len(turn) + len(kept) > budget:
                break
            kept = turn + kept
        return first + kept

    def _cut(self, reason: Truncation) -> None:
        self._truncated, self.done = reason, True


def _observed(observation: Observation) -> list[dict[str, Any]]:
    try:
        return as_messages(observation)
    except ConfigError as error:
        raise EnvError(str(error)) from None


def _name(env: TextEnv) -> str:
    """Return the class name that the environment's author knows, without adapters."""
    return type(getattr(env.unwrapped, "inner", env.unwrapped)).__name__


def _checked(result: Any, env: TextEnv) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """Return a step's result with a float reward; raises EnvError if it is not a five-tuple."""
    name = _name(env)
    if not isinstance(result, tuple) or len(result) != 5:
        found = f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, tuple) else "")
        raise EnvError(
            f"{name}.step must return (observation, reward, terminated, truncated, info), found {found}; see "
            "agilerl check"
        )
    observation, reward, terminated, truncated, info = result
    try:
        score = check_score(reward, f"the reward of {name}.step")
    except RewardError as error:
        raise EnvError(str(error).replace(" or None", "").partition("; return None")[0]) from None
    if score is None:
        raise EnvError(f"the reward of {name}.step must be a finite number, found None; return 0.0 for no reward")
    return observation, score, bool(terminated), bool(truncated), dict(info or {})
