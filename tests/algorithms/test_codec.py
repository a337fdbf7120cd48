"""An agent as bytes: all of it arrives, and nothing else does."""

import dataclasses
from typing import Any

import pytest
import torch

from agilerl.algorithms.codec import packed, unpacked
from agilerl.algorithms.state import AgentState, CriticState
from agilerl.errors import EngineError


def factors(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(2, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(12)]


def state(**changes: Any) -> AgentState:
    return AgentState(
        algorithm="PPO",
        base="embedded",
        config={"lr": 0.1 + 0.2},
        genes={},
        lora={"r": 2, "lora_alpha": 4, "use_rslora": False},
        pad={"pad_token": "NaN", "pad_token_id": 0},
        schedule=None,
        counters={"index": 3, "fitness": [float("nan"), 0.1], "sick": "", "vitals": {"reward": [1e-300]}},
        optimizer_steps=7.0,
        adapter=factors(0),
        moments={"exp_avg": factors(1), "exp_avg_sq": factors(2)},
        **changes,
    )


def same(first: Any, second: Any) -> bool:
    if dataclasses.is_dataclass(first):
        return type(first) is type(second) and all(
            same(getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first)
        )
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first.nan_to_num(77), second.nan_to_num(77))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    return bool(first == second) or (first != first and second != second)


@pytest.mark.parametrize("kind", ["plain", "reference", "critic", "broken"])
def test_all_of_an_agent_arrives(kind: str) -> None:
    critic = CriticState(factors(4), torch.arange(5.0), {"exp_avg": factors(5)}, {"exp_avg": torch.ones(5)}, 3.0)
    sent = {
        "plain": state(),
        "reference": state(reference=factors(3)),
        "critic": state(critic=critic),
        "broken": state(reference=[(torch.full((2, 3), float("nan")), torch.zeros(4, 2))] * 12),
    }[kind]
    arrived = unpacked(packed(sent))
    assert same(sent, arrived)
    assert packed(arrived) == packed(sent)
    assert not same(sent, unpacked(packed(dataclasses.replace(sent, adapter=factors(9)))))


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\0" * 7 + b"\2{}" + b"x" * 20, (2).to_bytes(8, "big") + b"{}"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(EngineError, match="this version"):
        unpacked(data)
