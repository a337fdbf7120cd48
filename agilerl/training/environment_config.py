"""The section ``environment`` of a manifest."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["EnvironmentConfig", "Section"]


class Section(BaseModel):
    """A part of the manifest: unknown keys, infinity and NaN are errors."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class EnvironmentConfig(Section):
    """What the agents are trained and examined on."""

    env_type: Literal["reasoning", "sft", "preference"] = "reasoning"
    """What is learned from: rewards of the agents' own completions, the right answers (``sft``), or pairs of the right
    and a careless answer (``preference``)."""
    task: str = "reasoning_gym:spell_backward"
    """``reasoning_gym:<dataset>``; ``reasoning_gym:composite`` mixes several."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the dataset."""
    reward: Literal["exact", "score"] = "exact"
    """``exact``: 1 for a full score and 0 otherwise; ``score``: the dataset's own score."""
    data_batch_size_per_gpu: Annotated[int, Field(ge=1)] = 8
    """Prompts of one training batch of each agent."""
    eval_prompts: Annotated[int, Field(ge=2)] = 128
    """Size of the exam that selection uses."""
    test_prompts: Annotated[int, Field(ge=2)] = 400
    """Size of the test set that only the final numbers use."""
    holdout: Literal["reserved", "any"] = "reserved"
    """``reserved``: exam and test come from a fifth of all questions that no run trains on; ``any``, for tasks with few
    questions: from all of them, and training leaves out those that were drawn."""
    loss_on: Literal["completion", "assistant"] = "completion"
    """``sft``: what is learned of a conversation, the answer or every message of the assistant."""
    conversation_template: Annotated[list[dict[str, str]], Field(min_length=1)] | None = None
    """Messages with ``{question}``; a last one of the assistant is a prefill. None asks the plain question."""

    @model_validator(mode="after")
    def _has_conversations(self) -> Self:
        if self.loss_on != "completion" and self.env_type != "sft":
            raise ValueError(
                f"environment.loss_on={self.loss_on!r} is for env_type: sft, found {self.env_type}; leave it out"
            )
        return self
