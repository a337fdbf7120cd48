"""Hyperparameters that all LLM algorithms share, each declared once with its bounds and evolution range."""

import warnings
from functools import cache
from typing import Annotated, Self

from pydantic import Field, model_validator

from agilerl.algorithms.base import AlgorithmConfig
from agilerl.hpo.parameters import Evolve
from agilerl.rollouts import SamplingSettings

__all__ = ["LLMConfig", "RolloutLLMConfig"]


class LLMConfig(AlgorithmConfig):
    """Hyperparameters of every algorithm that trains an adapter."""

    lr: Annotated[float, Field(gt=0), Evolve(1e-6, 1e-2)] = 1e-5
    """Learning rate of AdamW."""
    batch_size: Annotated[int, Field(ge=1), Evolve(8, 512)] = 16
    """Trajectories of one optimizer step."""
    mini_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Overrides ``batch_size`` as the number of trajectories of one optimizer step."""
    update_epochs: Annotated[int, Field(ge=1), Evolve(1, 4)] = 1
    """Passes over the same trajectories."""
    max_grad_norm: Annotated[float | None, Field(gt=0), Evolve(0.05, 5.0)] = 1.0
    """Gradients are scaled down to this L2 norm over the whole adapter; None leaves them."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of AdamW's second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term that keeps AdamW's denominator from zero."""
    weight_decay: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-1)] = 0.0
    """Decoupled weight decay of the adapter."""
    micro_batch_size_per_gpu: Annotated[int | None, Field(ge=1)] = None
    """Trajectories of one forward and backward pass; None fits as many as about 4,096 tokens hold."""
    max_model_len: Annotated[int | None, Field(ge=2)] = 1024
    """Most tokens of prompt and completion together; the model's own context length is a further limit."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of the adapter's start, the samples and the order of mini-batches."""


class RolloutLLMConfig(LLMConfig):
    """Hyperparameters of algorithms that learn from their own samples."""

    group_size: Annotated[int, Field(ge=1), Evolve(2, 32)] = 8
    """Completions sampled for each prompt."""
    temperature: Annotated[float, Field(gt=0), Evolve(0.5, 1.5, scale="linear")] = 1.0
    """Sampling temperature; all log-probs are those of ``logits / temperature``."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the full-vocabulary log-probs of the loss are biased."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k most likely tokens; 0 means all. Biases the log-probs as ``top_p`` does."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens below this share of the most likely token's probability. Biases the log-probs likewise."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of tokens that occurred before. Biases the log-probs likewise."""
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    """Most tokens of a completion; None leaves what ``max_model_len`` leaves."""
    min_output_tokens: Annotated[int | None, Field(ge=0)] = None
    """The end token cannot be drawn before this many tokens. Biases the log-probs likewise."""
    reward_weights: Annotated[dict[str, float], Evolve(0.0, 1.0, scale="linear")] = Field(default_factory=dict)
    """This agent's own weights of parts of the reward, by name, in place of those of the task's ``CombinedGrader``; in
    training alone. The gene of one is called ``reward_weights.<name>`` and needs a task with a fitness grader."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        limit, least = self.max_output_tokens, self.min_output_tokens
        if limit is not None and least is not None and least > limit:
            raise ValueError(f"min_output_tokens={least} is above max_output_tokens={limit}; lower the first")
        return self

    @model_validator(mode="after")
    def _support_is_whole(self) -> Self:
        whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        narrowed = [f"{name}={getattr(self, name)}" for name, off in whole.items() if getattr(self, name) != off]
        if self.min_output_tokens:
            narrowed.append(f"min_output_tokens={self.min_output_tokens}")
        if narrowed:
            _warn_of_bias(", ".join(narrowed))
        return self

    def sampling(self, room: int, *, greedy: bool = False) -> SamplingSettings:
        """Return the sampling settings where the context has room for this many tokens."""
        limit = min(self.max_output_tokens or room, room)
        return SamplingSettings(
            max_new_tokens=limit,
            temperature=0.0 if greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=min(self.min_output_tokens or 0, limit),
        )


@cache  # once a process: a configuration is made anew for every clone and every mutation
def _warn_of_bias(settings: str) -> None:
    warnings.warn(
        f"{settings} changes what completions are drawn from, while the loss takes log-probs over the whole "
        "vocabulary: the update is biased; leave it out for an exact one",
        stacklevel=2,
    )
