"""What algorithms that learn from data instead of their own samples have in common."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.base import AlgorithmConfig
from agilerl.algorithms.config import LLMConfig
from agilerl.algorithms.experiences import ActionResult, Environment, of_all
from agilerl.arguments import Count, checked
from agilerl.data import RolloutBatch
from agilerl.envs.gyms import DataGym
from agilerl.errors import ConfigError
from agilerl.rollouts import SamplingSettings


class DataConfig(LLMConfig):
    """Hyperparameters of algorithms that learn from data."""

    group_size: ClassVar[int] = 1
    """Rows that one row of the data set becomes."""
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    """Most tokens of a completion when the agent is examined; None leaves what ``max_model_len`` leaves."""


class DataAlgorithm(LLMAlgorithm):
    """An agent that learns from examples: the batches of a data set's environment, or of a task that has answers."""

    Config: ClassVar[type[AlgorithmConfig]] = DataConfig
    config: DataConfig

    def learn(
        self, experiences: Any, turn_ids: Any = None, sampling_logps: Sequence[Tensor | None] | None = None
    ) -> dict[str, float]:
        """Update the adapter from a batch of examples, as the environment's ``reset`` and ``step`` return them.

        Returns the metrics of the update, ``mean_loss`` among them. Raises ConfigError for anything but a batch.
        """
        if not isinstance(experiences, RolloutBatch) or turn_ids is not None or sampling_logps is not None:
            raise ConfigError(
                f"{self.algorithm.name} learns from the batches of its environment, found "
                f"{type(experiences).__name__}; call learn(env.reset()), with a gym from agilerl.llm_envs"
            )
        return self.report(super().learn(experiences))

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an update in the algorithm's own terms; there is no KL."""
        return {name: value for name, value in metrics.items() if name != "mean_kl"}

    def score(self, batch: RolloutBatch) -> Tensor:
        """Return how well the agent does on each example of a held-out batch; higher is better."""
        raise NotImplementedError(f"{type(self).__name__} does not define score, which test needs")

    @checked
    def test(self, env: Environment, loop: Count = 1, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return the scores of ``loop`` batches of the environment's test set; their mean joins ``fitness``.

        NaN does if the agent is ``sick``, whatever its scores: selection then replaces it.
        An environment of prompts (``ReasoningGym``) grades greedy completions instead.
        """
        if not isinstance(env, DataGym):
            return super().test(env, loop, *args, **kwargs)
        found: list[np.ndarray] = []
        with env.eval_mode():
            batch = env.reset()
            for number in range(loop):
                found.append(self.score(batch).double().cpu().numpy())
                self.tokens["evaluated"] += int(batch.lengths.sum())
                batch = env.step() if number + 1 < loop else batch
        scores = of_all(self.runtime.processes, np.concatenate(found))
        self.note_fitness(scores)
        return scores

    def sampling(self, prompt_length: int, *, greedy: bool = False) -> SamplingSettings:
        """Return the sampling settings for a prompt of this length: temperature 1, or greedy."""
        room = self.context_length - prompt_length
        if room < 1:
            raise ConfigError(
                f"a prompt of {prompt_length} tokens leaves no room for a completion: the context holds "
                f"{self.context_length} tokens; shorten the prompt or raise max_model_len={self.config.max_model_len}"
            )
        limit = min(self.config.max_output_tokens or room, room)
        return SamplingSettings(max_new_tokens=limit, temperature=0.0 if greedy else 1.0)

    @checked
    def get_action(
        self, obs: Any, training: bool = True, repeat_prompts: bool = True, *args: Any, **kwargs: Any
    ) -> ActionResult:
        """Sample one completion a prompt, greedily unless ``training``."""
        return super().get_action(obs, training, False, *args, **kwargs)
