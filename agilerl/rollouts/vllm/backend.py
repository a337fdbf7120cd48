"""What a vLLM engine is asked and answers, whether it runs in this process or behind HTTP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agilerl import streams
from agilerl.config.vllm import VLLMConfig
from agilerl.data import Completion
from agilerl.data.batch import FinishReason
from agilerl.errors import EngineError
from agilerl.rollouts.engine import GenerationRequest


@dataclass(frozen=True)
class StagedAdapter:
    """One version of one adapter as a PEFT folder; a version's name and number are never given to another one."""

    name: str
    number: int
    folder: Path
    rank: int


@dataclass(frozen=True)
class SampleRequest:
    """One completion to sample."""

    prompt_ids: list[int]
    sampling: Mapping[str, Any]
    """Fields of ``vllm.SamplingParams``, which are those of the completions API too."""
    adapter: StagedAdapter | None
    """None asks the base model."""
    cut_by_context: bool = False
    """The token limit comes from the context, which has less room than was asked for."""


@dataclass(frozen=True)
class Generated:
    """What vLLM generated for a row."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """``stop``, ``length``, or another reason if vLLM gave up on the row."""


OnGenerated = Callable[[int, Generated], None]
"""Takes the index of a row and its answer."""


def request_seed(seed: int, request: GenerationRequest, sample: int) -> int:
    """Return the seed of a sample: a function of its stream's name alone, below 2**63."""
    rng = streams.stream(seed, request.purpose, *request.key, sample)
    return int(rng.integers(np.iinfo(np.int64).max))


def row_of(
    request: GenerationRequest,
    seed: int,
    *,
    adapter: StagedAdapter | None,
    room: int,
    eos: Sequence[int],
    config: VLLMConfig,
) -> SampleRequest:
    """Return the row of one sample of a request whose prompt leaves ``room`` tokens of context."""
    s = request.sampling
    sampling: dict[str, Any] = {
        "max_tokens": min(s.max_new_tokens, room),
        "min_tokens": min(s.min_new_tokens, room),
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "repetition_penalty": s.repetition_penalty,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "seed": seed,
        "logprobs": 0,  # of the sampled token alone
        # Which tokens end a completion is the trainer's decision, not that of a file beside vLLM's copy of the base.
        "ignore_eos": True,
        "stop_token_ids": list(eos),
    }
    if config.stop_sequences:
        sampling["stop"] = list(config.stop_sequences)
    return SampleRequest(list(request.prompt_ids), sampling, adapter, cut_by_context=s.max_new_tokens > room)


def completion_of(answer: Generated, row: SampleRequest) -> Completion:
    """Return an answer as a completion; one with a log-prob that is not finite ends there, as an error.

    Raises EngineError for an answer that does not end as it was asked to: to train on one would teach another end.
    """
    _check_end(answer, row.sampling)
    finite = np.isfinite(answer.logprobs)
    if not finite.all():
        # argmin of booleans is the place of the first False.
        end = int(np.argmin(finite)) + 1
        return Completion(answer.token_ids[:end], answer.logprobs[:end], "error")
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "context" if row.cut_by_context else "length"}
    return Completion(answer.token_ids, answer.logprobs, reasons.get(answer.finish_reason, "error"))


def _check_end(answer: Generated, asked: Mapping[str, Any]) -> None:
    ids, ends, fault = answer.token_ids, set(asked["stop_token_ids"]), None
    if behind := next((number for number, token in enumerate(ids[:-1], 1) if token in ends), None):
        fault = f"{len(ids) - behind} tokens behind the end token {ids[behind - 1]}"
    elif answer.finish_reason == "stop" and "stop" not in asked and not ends.intersection(ids[-1:]):
        fault = f"one that says it has ended, without one of the end tokens {sorted(ends)}"
    if fault is not None:
        raise EngineError(
            f"vLLM does not end completions as it was asked to: expected an answer up to its end token, found {fault}; "
            "use a supported version of vLLM without plugins"
        )
