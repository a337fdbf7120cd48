"""What is asked for: samples of a task by a population (``Ask``), completions by an engine (``GenerationRequest``)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agilerl.data import Completion
from agilerl.envs.core import Place, Split
from agilerl.errors import ConfigError


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn. The defaults sample from the model's own distribution."""

    max_new_tokens: int
    """Most tokens generated for one completion."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    """The end token cannot be drawn before this many tokens."""

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
        }
        for name, (holds, expected) in limits.items():
            if not holds:
                raise ConfigError(f"{name} must be {expected}, found {getattr(self, name)}")

    @property
    def full_support(self) -> bool:
        """True when every token keeps its probability, so that recorded log-probs are the policy's own."""
        return (
            self.top_p == 1.0
            and self.top_k == 0
            and self.min_p == 0.0
            and self.repetition_penalty == 1.0
            and self.min_new_tokens == 0
        )


@dataclass(frozen=True)
class Ask:
    """Some samples of one place of a task for one agent."""

    slot: int | None
    """Adapter slot; None asks the base model."""
    place: Place
    samples: int
    sampling: Callable[[int], SamplingSettings]
    """From the length of a prompt to how its completion is drawn."""
    context_length: int
    """Most tokens of prompt and completion together."""
    group: int
    split: Split = "train"
    key: tuple[int, ...] = ()
    """Names the random streams of the samples, beside the purpose; those of an episode add turn and sample."""
    reserve: int = 1
    """Tokens that later prompts of an episode leave for the completion, or else it is cut."""
    weights: Mapping[str, float] | None = None
    """The agent's own weights of all parts of the reward; None: the grader's."""

    @property
    def purpose(self) -> str:
        """What the samples are for: training and exams never share draws."""
        return "rollout" if self.split == "train" else self.split

    def generation(
        self, prompt_ids: Sequence[int], samples: int, *key: int, conversation: "Conversation | None" = None
    ) -> "GenerationRequest":
        """Return what the engine is asked for: completions of a prompt, with ``key`` added to the ask's own."""
        sampling, keys = self.sampling(len(prompt_ids)), (*self.key, *key)
        return GenerationRequest(self.slot, prompt_ids, samples, sampling, self.purpose, keys, conversation)


@dataclass
class Conversation:
    """What an engine may keep of one conversation from a completion to the next one. It belongs to who leads it.

    It is for one policy: a slot that learns in between needs a new one.
    """

    slot: int | None = None
    """Adapter slot that computed what is kept."""
    token_ids: Sequence[int] = ()
    """Tokens whose keys and values are kept."""
    kept: Any = None
    """These, as the engine has them."""


@dataclass(frozen=True)
class GenerationRequest:
    """Some samples of one prompt for one agent."""

    slot: int | None
    """Adapter slot; None asks the base model."""
    prompt_ids: Sequence[int]
    samples: int
    sampling: SamplingSettings
    purpose: str = "rollout"
    """Names the random stream, so that training and evaluation never share draws."""
    key: tuple[int, ...] = ()
    """Sample s draws from the stream ``(seed, purpose, *key, s)``: which rows share a batch cannot matter."""
    conversation: Conversation | None = field(default=None, compare=False)
    """Of which this is the next completion; with one sample only. What it kept saves computing these tokens again."""


OnCompletion = Callable[[int, int, Completion], None]
"""Takes the place of a request, the number of a sample, and its completion."""


def of_part(on_completion: OnCompletion | None, places: Sequence[int]) -> OnCompletion | None:
    """Return what takes the completions of some of the requests, which have these places among all of them."""
    if on_completion is None:
        return None
    return lambda place, sample, completion: on_completion(places[place], sample, completion)


class RolloutEngine(Protocol):
    """Generates for all agents at once."""

    exact: bool
    """True when the engine computes as the trainer does: recorded log-probs equal the trainer's own up to rounding in
    the base's data type. They serve as old log-probs where that is exact (``BaseModel.decodes_exactly``)."""

    def generate(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each request, in order.

        ``on_completion`` is called, in the thread of the caller, with each completion that ends before the others do:
        at most once for a sample, and with the completion that will be returned. An engine need not call it.
        """
        ...
