"""Whether vLLM computes what the trainer computes: log-probs of a few tokens of every new adapter, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agilerl.errors import EngineError
from agilerl.models.base import BaseModel
from agilerl.models.slots import AdapterStore, Route
from agilerl.rollouts.engine import GenerationRequest, SamplingSettings
from agilerl.rollouts.vllm.backend import Answer

_PROMPT = 32
"""Most tokens of a probe's prompt."""
_TEMPERATURE = 0.8
"""Not 1: a vLLM that reports log-probs of before the temperature is found out too."""


@dataclass(frozen=True)
class Probe:
    """What vLLM said of one adapter."""

    slot: int | None
    """None: the base model."""
    agent: str
    """Whose it is, for the error."""
    prompt_ids: list[int]
    answer: Answer


def probe_request(request: GenerationRequest, tokens: int) -> GenerationRequest:
    """Return a request for ``tokens`` sampled after the beginning of a request's own prompt.

    Sampled, not greedy: likely and unlikely tokens say more than the most likely ones.
    """
    sampling = SamplingSettings(max_new_tokens=tokens, temperature=_TEMPERATURE)
    return GenerationRequest(request.slot, request.prompt_ids[:_PROMPT], 1, sampling, "probe", request.key)


@torch.no_grad()
def trainer_logprobs(
    base: BaseModel,
    store: AdapterStore,
    rows: Sequence[tuple[int | None, Sequence[int], Sequence[int]]],
    temperature: float = 1.0,
) -> list[list[float]]:
    """Return the trainer's log-probs of the tokens of rows (slot, prompt, tokens), from one forward pass."""
    order = sorted(range(len(rows)), key=lambda k: (rows[k][0] is None, k))  # rows without an adapter come last
    whole = [[*rows[k][1], *rows[k][2]] for k in order]
    ids = torch.zeros((len(rows), max(map(len, whole))), dtype=torch.int64)
    for place, tokens in enumerate(whole):
        ids[place, : len(tokens)] = torch.tensor(tokens)
    slots = tuple(slot for k in order if (slot := rows[k][0]) is not None)
    with store.routed(Route(slots, (1,) * len(slots)) if slots else None):
        hidden = base.hidden(ids.to(base.device))
    found: list[list[float]] = [[] for _ in rows]
    for place, k in enumerate(order):
        first, targets = len(rows[k][1]), torch.tensor(list(rows[k][2]), dtype=torch.int64, device=base.device)
        states = hidden[place, first - 1 : first - 1 + len(targets)]
        found[k] = base.logprobs(states, targets, temperature)[0].tolist()
    return found


def check_probes(base: BaseModel, store: AdapterStore, probes: Sequence[Probe], limit: float) -> Mapping[str, float]:
    """Return the mean difference in nats for each agent; raise EngineError for one that is above the limit."""
    rows = [(p.slot, p.prompt_ids, p.answer.token_ids) for p in probes]
    differences = {}
    for probe, own in zip(probes, trainer_logprobs(base, store, rows, _TEMPERATURE)):
        gaps = [abs(mine - theirs) for mine, theirs in zip(own, probe.answer.logprobs, strict=True)]
        mean = differences[probe.agent] = sum(gaps) / len(gaps) if gaps else float("nan")
        if not mean <= limit:  # NaN is above it
            what = "the base model" if probe.slot is None else f"the adapter of {probe.agent}"
            cause = (
                "the base that vLLM has loaded is not the trainer's (name the same folder as "
                "vllm_config.vllm_model_name_or_path, or serve it)"
                if probe.slot is None
                else "vLLM does not apply the adapter as the trainer does (a layer that it cannot adapt, or another "
                "one's weights); adapt fewer layers (lora_config.target_modules), or leave out use_vllm"
            )
            raise EngineError(
                f"vLLM and the trainer disagree about {what}: the log-probs of {len(gaps)} tokens differ by {mean:.3g} "
                f"nats on average, the limit is {limit:g}. Probably {cause}. Where the two compute in different "
                "precision on purpose, raise vllm_config.probe_tolerance"
            )
    return differences
