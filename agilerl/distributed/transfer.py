"""An agent on its way to another process: its state as bytes and back. Tensors and JSON: nothing in it can run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import safetensors.torch
from torch import Tensor

from agilerl.algorithms.state import AgentState, CriticState
from agilerl.errors import EngineError

__all__ = ["packed", "unpacked"]

_HEADER = 8
"""Bytes that say how long the JSON is; what follows it is safetensors."""
_TENSORS = ("adapter", "moments", "reference", "critic")
Factors = list[tuple[Tensor, Tensor]]


def packed(state: AgentState) -> bytes:
    """Return a state as bytes: the same state gives the same bytes, and :func:`unpacked` gives the same state."""
    plain: dict[str, Any] = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in _TENSORS}
    tensors = dict(_named("adapter", state.adapter))
    for moment, factors in state.moments.items():
        tensors |= dict(_named(f"moments.{moment}", factors))
    if state.reference is not None:
        tensors |= dict(_named("reference", state.reference))
    critic = state.critic
    if critic is not None:
        plain["critic_steps"] = critic.optimizer_steps
        tensors |= {**dict(_named("critic", critic.adapter)), "head": critic.head}
        for moment, factors in critic.moments.items():
            tensors |= dict(_named(f"critic_moments.{moment}", factors))
        tensors |= {f"head_moments.{moment}": tensor for moment, tensor in critic.head_moments.items()}
    text = json.dumps(plain).encode()
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    weights: bytes = safetensors.torch.save(copies)
    return len(text).to_bytes(_HEADER, "big") + text + weights


def unpacked(data: bytes) -> AgentState:
    """Return the state that :func:`packed` made bytes of; its tensors are on the CPU.

    Raises EngineError for other bytes.
    """
    end = _HEADER + int.from_bytes(data[:_HEADER], "big")
    try:
        plain: dict[str, Any] = json.loads(data[_HEADER:end])
        tensors = safetensors.torch.load(data[end:])
        steps = plain.pop("critic_steps", None)
        state = AgentState(**plain, adapter=_factors("adapter", tensors), moments=_moments("moments", tensors))
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise EngineError(f"what another process sent is no agent of this version of agilerl: {error}") from error
    state.reference = _factors("reference", tensors) or None
    if steps is not None:
        state.critic = CriticState(
            adapter=_factors("critic", tensors),
            head=tensors["head"],
            moments=_moments("critic_moments", tensors),
            head_moments={n.partition(".")[2]: t for n, t in tensors.items() if n.startswith("head_moments.")},
            optimizer_steps=steps,
        )
    return state


def _named(prefix: str, factors: Factors) -> Iterator[tuple[str, Tensor]]:
    for layer, (a, b) in enumerate(factors):
        yield f"{prefix}.{layer}.A", a
        yield f"{prefix}.{layer}.B", b


def _factors(prefix: str, tensors: Mapping[str, Tensor]) -> Factors:
    count = sum(name.startswith(f"{prefix}.") and name.endswith(".A") for name in tensors)
    return [(tensors[f"{prefix}.{layer}.A"], tensors[f"{prefix}.{layer}.B"]) for layer in range(count)]


def _moments(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    names = dict.fromkeys(name.split(".")[1] for name in tensors if name.startswith(f"{prefix}."))
    return {name: _factors(f"{prefix}.{name}", tensors) for name in sorted(names)}
