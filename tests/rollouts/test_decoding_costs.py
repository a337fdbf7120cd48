"""What decoding costs, counted in operations: passes through the base, and bytes of keys and values that are copied."""

import gc
import weakref
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.kv_cache import GroupedCache
from agilerl.runtime import Runtime
from agilerl.sizes import padded_length
from tests.tiny_models import qwen2, random_model

pytestmark = pytest.mark.model

WIDTH = 16
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "unique_dim", "_unique2", "masked_select"}
COPIES = {"clone", "copy_", "_to_copy", "index", "index_select", "cat", "repeat"}


class CopiedKeys(TorchDispatchMode):
    """Counts the bytes that operations copy of tensors ``[..., length, WIDTH]``: keys and values of many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        several = isinstance(found, Tensor) and found.dim() > 3 and found.shape[-1] == WIDTH and found.shape[-2] >= 32
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


def generate(runtime: Runtime, length: int, tokens: int, samples: int = 4) -> None:
    slots, settings = range(runtime.store.used), SamplingSettings(tokens)
    asked = [GenerationRequest(slot, [2 + slot] * length, samples, settings, key=(slot,)) for slot in slots]
    runtime.engine.generate(asked)


def copied(runtime: Runtime, length: int, tokens: int, samples: int = 4) -> int:
    with CopiedKeys() as copies:
        generate(runtime, length, tokens, samples)
    return copies.bytes


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_a_step_copies_no_keys_and_values(key_value_heads: int) -> None:
    """A prompt is copied once, however many rows continue it and however many tokens follow."""
    runtime = make_runtime(num_key_value_heads=key_value_heads)
    few, many = copied(runtime, 40, 3), copied(runtime, 40, 11)
    of_a_prompt = runtime.base.num_layers * 2 * key_value_heads * padded_length(40) * WIDTH * 4
    assert few == many == copied(runtime, 40, 3, samples=16) <= of_a_prompt


def test_a_token_of_all_agents_is_one_pass_through_the_base() -> None:
    for agents in (1, 5):
        runtime = make_runtime(agents)
        calls: list[int] = []
        runtime.base.body.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))  # type: ignore[misc]
        generate(runtime, 10, 7)
        assert len(calls) == 7  # the prompts, whose last states give the first token, then six tokens


def test_keys_and_values_are_gone_when_the_completions_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the largest part of a rollout's memory; a cycle would keep them until garbage is collected."""
    made: list[weakref.ref[GroupedCache]] = []

    class Watched(GroupedCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr("agilerl.rollouts.torch_engine.GroupedCache", Watched)
    gc.disable()
    try:
        generate(make_runtime(), 10, 3)
    finally:
        gc.enable()
    assert made
    assert [cache() for cache in made] == [None]


class Waits(TorchDispatchMode):
    """Counts the operations that would make the host wait for a device, or copy something to it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


def operations(runtime: Runtime, tokens: int, mode: type[TorchDispatchMode]) -> int:
    with mode() as counted:
        generate(runtime, 10, tokens)
    return int(counted.count)  # type: ignore[attr-defined]


class Kernels(Waits):
    """Counts the operations that compute or copy something."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.overloadpacket.__name__ not in ("_unsafe_view", "detach")
        return func(*args, **(kwargs or {}))


def test_between_two_looks_nothing_waits_for_the_device() -> None:
    """What is drawn stays on the device; every eighth step is looked at."""
    runtime = make_runtime(3)
    runtime.engine.read_every = 8  # type: ignore[attr-defined]
    generate(runtime, 10, 2)
    assert operations(runtime, 6, Waits) == operations(runtime, 3, Waits)
    more = operations(runtime, 16, Waits) - operations(runtime, 8, Waits)
    assert more == operations(runtime, 24, Waits) - operations(runtime, 16, Waits)
    assert more < 10


def test_a_token_takes_as_many_kernels_for_many_agents_as_for_one() -> None:
    """A layer's: norms, rotation, 7 products with one batched delta each, and attention in two parts."""
    counts = []
    for agents in (1, 6):
        runtime = make_runtime(agents)
        runtime.engine.read_every = 8  # type: ignore[attr-defined]
        counts.append(operations(runtime, 7, Kernels) - operations(runtime, 6, Kernels))
    assert abs(counts[0] - counts[1]) < 5  # rows that fill up a matrix product take some
    assert counts[1] <= 60 * runtime.base.num_layers + 40
