"""Multi-turn environments at the level of tokens, stepped by hand: the two classes documented by AgileRL."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agilerl.checks.arguments import Count, Tokenizer, Whole, checked
from agilerl.data import Completion, RolloutBatch, Trajectory, collate
from agilerl.data.checks import one_row
from agilerl.envs.adapters import as_text_env
from agilerl.envs.episode_task import Episode, EpisodeTask
from agilerl.envs.prompts import ChatFormat, completion_length, decode_completions, end_token_ids
from agilerl.errors import EnvError
from agilerl.safety.custom_code import reported
from agilerl.text.padding import decoded, padded

Prompt = dict[str, Any]
"""``input_ids`` and ``attention_mask`` [1, P] int64, and ``text``."""
_EXAM_SEED = 2**31
"""Seed of the first exam episode; training counts from 0 and never reaches it."""


class TokenObservationWrapper:
    """One environment whose observations are prompts and whose actions are token ids.

    Generated tokens stay as sampled; environment tokens are masked out of training. ``Population`` plays whole
    populations in one batch and needs no wrapper; this one is for custom loops.
    """

    @checked
    def __init__(
        self,
        env: Any,
        tokenizer: Tokenizer,
        max_turns: Count,
        pad_id: Whole | None = None,
        apply_chat_template: bool = True,
        max_model_len: Count | None = None,
        *,
        max_output_tokens: Count | None = None,
        enable_sliding_window: bool = False,
        strict_chat_template_boundary: bool = True,
        eos_token_ids: Collection[int] | None = None,
    ) -> None:
        """Wrap an environment.

        Args:
            env: a TextEnv, or anything that ``as_text_env`` turns into one.
            tokenizer: Hugging Face tokenizer; without a pad token its end token pads.
            max_turns: most actions of an episode, 1 or more.
            pad_id: padding token; by default the tokenizer's.
            apply_chat_template: if False, observations are written as they are.
            max_model_len: most tokens of prompt and completion together; None for no limit.
            max_output_tokens: tokens reserved for the completion.
            enable_sliding_window: if the context is full, drop the oldest turns instead of truncating the episode.
            strict_chat_template_boundary: refuse a chat template that rewrites earlier turns.
            eos_token_ids: tokens that end a completion; by default those of the tokenizer and of the generation
                configuration next to its files.

        Raises:
            ConfigError: a setting out of range, or a chat template that does not suit the environment.
        """
        tokenizer = padded(tokenizer)
        self.settings: dict[str, Any] = {
            "apply_chat_template": apply_chat_template,
            "strict_chat_template_boundary": strict_chat_template_boundary,
            "enable_sliding_window": enable_sliding_window,
        }
        """How observations become prompts, as arguments of ``EpisodeTask``."""
        self._task = EpisodeTask(lambda: env, max_turns=max_turns, **self.settings)
        self.env, self.tokenizer, self.max_turns = env, tokenizer, max_turns
        self.max_model_len = max_model_len
        self.pad_id = tokenizer.pad_token_id if pad_id is None else pad_id
        self._ends = end_token_ids(tokenizer) if eos_token_ids is None else frozenset(eos_token_ids)
        self._chat: ChatFormat = self._task.chat(tokenizer)
        # At least one token is reserved: a prompt that fills the context cannot be answered.
        self._context = (max_model_len, 1 if max_output_tokens is None else max_output_tokens)
        self._episode: Episode | None = None
        self._drawn = 0
        self._closed = False

    @checked
    def reset(self, seed: Whole | None = None) -> tuple[Prompt, dict[str, Any]]:
        """Begin the episode of ``seed`` (by default a new one each time); return the first prompt and info.

        Raises:
            EnvError: a prompt that is empty or over the budget, or an observation that is not text.
        """
        self._check_open()
        if self._episode is not None:
            # There is one environment, which the next episode takes again.
            self._task.give_back(self._episode.env)
        if seed is None:
            seed, self._drawn = self._drawn, self._drawn + 1
        self._episode = self._task.episode(self._chat, *self._context)
        self._episode.begin(seed)
        return self._prompt(self._episode), dict(self._episode.info)

    @checked
    def step(
        self, completion_ids: Any, sampling_logps: Tensor | None = None, action_mask: Tensor | None = None
    ) -> tuple[Prompt, float, bool, bool, dict[str, Any]]:
        """Take a completion ``[1, P + L]``, prompt included; return the next prompt (empty at the end) and the rest.

        ``sampling_logps`` [n] are the log-probs of the sampled tokens, and ``action_mask`` [1, P + L - 1] marks them;
        ``get_action`` returns both. Either gives the completion's length; without them it ends at its first end token,
        or else before the trailing padding. Without ``sampling_logps`` the update computes the log-probs that it needs.

        Raises:
            EnvError: no episode is running, ids that do not begin with the prompt, log-probs or a mask that do not
                match the ids, or a broken environment.
        """
        episode = self._running()
        prompt, ids = episode.prompt_ids, one_row(completion_ids, "step(completion_ids=...)")
        if ids[: len(prompt)] != prompt:
            raise EnvError(
                f"expected ids that begin with the {len(prompt)} tokens of the prompt, found others; pass whole "
                "sequences, prompt and completion"
            )
        logps = None if sampling_logps is None else torch.as_tensor(sampling_logps).reshape(-1).tolist()
        sampled = self._sampled(ids[len(prompt) :], logps, _marked(action_mask, len(prompt), len(ids)))
        (text,) = decode_completions(self.tokenizer, [sampled])
        reward = episode.act(Completion(sampled, logps, "stop" if sampled[-1] in self._ends else "length"), text)
        cut = episode.outcome.truncated is not None
        info = {**episode.info, "truncated_by": episode.outcome.truncated} if cut else dict(episode.info)
        return self._prompt(episode) if not episode.done else {}, reward, episode.done and not cut, cut, info

    def get_episode_data(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the episode so far: ids ``[1, T]``, action mask and turn ids ``[1, T-1]``, turn rewards ``[1, K]``.

        Raises:
            EnvError: nothing has been played, or the context was rewritten, which gives several rows: use
                :meth:`trajectories` then.
        """
        rows = self.trajectories()
        if len(rows) != 1:
            raise EnvError(
                f"expected an episode of one training row, found {len(rows)}; use env.trajectories() and collate them"
            )
        batch = collate(rows, self.pad_id)
        length = int(batch.lengths[0])
        return batch.ids[:, :length], batch.action_mask[:, : length - 1], batch.turn_ids[:, : length - 1], batch.rewards

    def trajectories(self, group: int = 0, number: int = 0) -> list[Trajectory]:
        """Return the training rows of the episode so far, with a group and a number within it."""
        if self._episode is None:
            raise EnvError("expected reset() first: no episode has begun")
        return self._episode.trajectories(group, number)

    def examine(self, agent: Any, episodes: int) -> np.ndarray:
        """Return the returns of that many greedy episodes, from seeds that training never reaches."""
        return SyncMultiTurnVecEnv(lambda: self, 1, 1).examine(agent, episodes)

    def close(self) -> None:
        """Close the environment; ``reset`` and ``step`` raise EnvError afterwards. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._episode is not None:
            self._episode.env.close()
        self._task.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EnvError("this environment was closed; wrap a new one")

    def _running(self) -> Episode:
        self._check_open()
        if self._episode is None or self._episode.done:
            raise EnvError("expected reset() before step(): no episode is running")
        return self._episode

    def _prompt(self, episode: Episode) -> Prompt:
        ids = torch.tensor([episode.prompt_ids], dtype=torch.int64)
        text = decoded(self.tokenizer, episode.prompt_ids)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "text": text}

    def _sampled(self, tail: list[int], logps: list[float] | None, marked: int | None) -> list[int]:
        """Return the tokens after the prompt that were sampled."""
        if logps is not None and marked is not None and len(logps) != marked:
            raise EnvError(f"expected a log-prob for each of {marked} sampled tokens, found {len(logps)}")
        known = marked if logps is None else len(logps)
        length = completion_length(tail, ends=self._ends, pad=self.pad_id, sampled=known)
        if not length:
            raise EnvError("expected a completion of at least one token, found none")
        # More of the end token follows: it pads as well, and a cut cannot be told from an end.
        if known is None and tail[length - 1 :][:2] == [self.pad_id] * 2:
            _warn_of_padding()
        return tail[:length]


def _marked(action_mask: Tensor | None, prompt: int, length: int) -> int | None:
    """Return how many tokens a mask ``[1, length - 1]`` marks after a prompt; None without a mask."""
    if action_mask is None:
        return None
    mask = torch.as_tensor(action_mask).reshape(-1).bool()
    count = int(mask.sum())
    # Position t is about token t + 1, so the first token after the prompt has the position of the prompt's last one.
    if len(mask) != length - 1 or not bool(mask[prompt - 1 : prompt - 1 + count].all()):
        raise EnvError(
            f"expected an action mask of {length - 1} places that marks the tokens after the {prompt} prompt tokens, "
            f"without gaps, found {len(mask)} places of which {count} are marked; pass the mask from get_action"
        )
    return count


@cache  # once a process
def _warn_of_padding() -> None:
    warnings.warn(
        "the pad token also ends completions, so without log-probs or an action mask a completion truncated by its "
        "length looks like one that ended, and counts as ended. Pass step(..., sampling_logps) or "
        "step(..., action_mask=...)",
        stacklevel=2,
    )


class SyncMultiTurnVecEnv:
    """``batch_size`` episodes, each played ``group_size`` times from the same seed, all stepped together."""

    @checked
    def __init__(
        self,
        env_factory: Callable[..., Any],
        batch_size: Count,
        group_size: Count,
        env_config: Mapping[str, Any] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Make ``batch_size * group_size`` wrapped environments.

        Environments that come without a wrapper get one with this ``tokenizer``.

        Raises:
            ConfigError: a size below 1, a factory that fails, or one that returns no wrapper if there is no tokenizer.
        """
        self.batch_size, self.group_size = batch_size, group_size
        with reported(f"env_factory could not make an environment with {dict(env_config or {}) or 'no settings'}"):
            envs = [env_factory(**(env_config or {})) for _ in range(batch_size * group_size)]
        self.envs = [
            env
            if isinstance(env, TokenObservationWrapper)
            else TokenObservationWrapper(env, tokenizer, as_text_env(env).max_turns)
            for env in envs
        ]
        self._prompts: list[Prompt] = []
        self._drawn = 0

    @checked
    def reset(self, seed: Whole | None = None) -> list[Prompt]:
        """Begin all episodes; group ``b`` shares the seed ``seed + b``. The default is new seeds each time."""
        if seed is None:
            seed, self._drawn = self._drawn, self._drawn + self.batch_size
        self._prompts = [env.reset(seed + number // self.group_size)[0] for number, env in enumerate(self.envs)]
        return list(self._prompts)

    @checked
    def step(
        self,
        completion_ids: Sequence[Tensor],
        sampling_logps: Sequence[Tensor | None] | None = None,
        action_masks: Sequence[Tensor | None] | None = None,
    ) -> list[Prompt] | None:
        """Take one completion ``[1, P + L]`` for each running episode, in order; return the next prompts.

        ``sampling_logps`` and ``action_masks`` are those of ``get_action``; see :meth:`TokenObservationWrapper.step`.
        Returns None when all episodes are over. Raises EnvError if the number of completions, log-probs or masks
        differs.
        """
        running = [number for number, prompt in enumerate(self._prompts) if prompt]
        given = {"completions": completion_ids, "log-probs": sampling_logps, "action masks": action_masks}
        for what, values in given.items():
            if values is not None and len(values) != len(running):
                raise EnvError(f"expected {what} for the {len(running)} running episodes, found {len(values)}")
        nothing = [None] * len(running)
        rows = zip(running, completion_ids, sampling_logps or nothing, action_masks or nothing, strict=True)
        for number, ids, logps, mask in rows:
            self._prompts[number] = self.envs[number].step(ids, logps, mask)[0]
        return [prompt for prompt in self._prompts if prompt] or None

    def get_trajectories(
        self,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], int, list[Tensor | None] | None]:
        """Return lists by episode of ids, action masks, turn ids, turn rewards; the number of turns; sampled log-probs.

        An episode's log-probs are None if any of its steps had none; the whole list is None if no episode has any.
        """
        ids, masks, turn_ids, rewards = map(list, zip(*(env.get_episode_data() for env in self.envs)))
        logps = [
            None if t.logprobs is None else torch.tensor([p for p, action in zip(t.logprobs, t.action_mask) if action])
            for env in self.envs
            for t in env.trajectories()
        ]
        known = any(values is not None for values in logps)
        return ids, masks, turn_ids, rewards, sum(r.shape[1] for r in rewards), logps if known else None

    def batch(self) -> RolloutBatch:
        """Return all episodes as one batch, which ``agent.learn`` takes; a group shares one seed."""
        rows = [
            row for number, env in enumerate(self.envs) for row in env.trajectories(*divmod(number, self.group_size))
        ]
        return collate(rows, self.envs[0].pad_id)

    def returns(self) -> list[float]:
        """Return the sum of each episode's rewards."""
        # Each row of an episode has the rewards of all its turns, so the first one will do.
        return [env.trajectories()[0].episode_return for env in self.envs]

    def examine(self, agent: Any, batches: int) -> np.ndarray:
        """Return the returns of that many batches of greedy episodes, from seeds that training never reaches."""
        returns: list[float] = []
        for number in range(batches):
            prompts: list[Prompt] | None = self.reset(_EXAM_SEED + number * self.batch_size)
            while prompts is not None:
                action = agent.get_action(prompts, training=False)
                agent.tokens["evaluated"] += sum(int(mask.sum()) for mask in action.action_masks)
                prompts = self.step(action.completion_ids)
            returns += self.returns()
        return np.array(returns)

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()
