"""What decoding costs, counted in operations: passes through the base, and bytes of keys and values that are copied."""

import gc
import weakref
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.kv_cache import RaggedCache
from agilerl.runtime import Runtime
from tests.tiny_models import qwen2, random_model

pytestmark = pytest.mark.model

WIDTH = 16
COPIES = {"clone", "copy_", "_to_copy", "index", "index_select", "cat", "repeat"}


class CopiedKeys(TorchDispatchMode):
    """Counts the bytes that operations copy of tensors ``[..., length, WIDTH]``: keys and values of several tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        several = isinstance(found, Tensor) and found.dim() > 3 and found.shape[-1] == WIDTH and found.shape[-2] > 1
        if several and func.overloadpacket.__name__ in COPIES:
            self.bytes += found.numel() * found.element_size()
        return found


def make_runtime(agents: int = 1, **changes: Any) -> Runtime:
    """Return a base of 4 query heads on 2 of keys and values, without an end token."""
    config = qwen2(**{"hidden_size": 4 * WIDTH, "eos_token_id": None, "max_position_embeddings": 256, **changes})
    runtime = Runtime.for_model(random_model(config), seed=3)
    runtime.store.reserve(agents)
    for seed in range(agents):
        runtime.store.initialise(runtime.store.allocate(4, 2.0), seed)
    return runtime


def generate(runtime: Runtime, length: int, tokens: int) -> None:
    slots = range(runtime.store.used)
    settings = SamplingSettings(tokens)
    runtime.engine.generate([GenerationRequest(slot, [2 + slot] * length, 4, settings, key=(slot,)) for slot in slots])


def copied(runtime: Runtime, length: int, tokens: int) -> int:
    with CopiedKeys() as copies:
        generate(runtime, length, tokens)
    return copies.bytes


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_a_step_copies_no_keys_and_values(key_value_heads: int) -> None:
    """What is copied (the prompt's cache, to the rows of its group) is copied once, however many tokens follow."""
    runtime = make_runtime(num_key_value_heads=key_value_heads)
    few, many = copied(runtime, 40, 3), copied(runtime, 40, 11)
    assert few == many > 0


def test_a_token_of_all_agents_is_one_pass_through_the_base() -> None:
    for agents in (1, 5):
        runtime = make_runtime(agents)
        calls: list[int] = []
        runtime.base.body.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))  # type: ignore[misc]
        generate(runtime, 10, 7)
        assert len(calls) == 7  # the prompts, whose last states give the first token, then six tokens


def test_keys_and_values_are_gone_when_the_completions_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the largest part of a rollout's memory; a cycle would keep them until garbage is collected."""
    made: list[weakref.ref[RaggedCache]] = []

    class Watched(RaggedCache):
        def __init__(self, num_layers: int) -> None:
            super().__init__(num_layers)
            made.append(weakref.ref(self))

    monkeypatch.setattr("agilerl.rollouts.torch_engine.RaggedCache", Watched)
    gc.disable()
    try:
        generate(make_runtime(), 10, 3)
    finally:
        gc.enable()
    assert made
    assert [cache() for cache in made] == [None]
