"""vLLM itself, on a CPU: one engine for all tests of a process, because it starts in half a minute."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from agilerl.config.vllm import VLLMConfig, installed_vllm
from agilerl.rollouts import RolloutEngine
from agilerl.rollouts.vllm.colocated import ColocatedVLLM
from agilerl.rollouts.vllm.engine import VLLMEngine
from agilerl.runtime import Runtime

RANKS = (4, 8, 16)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vLLM is not installed here; make test-vllm makes an environment that has it")
    for item in items:
        if item.path.parent.name == "with_vllm":
            item.add_marker(pytest.mark.vllm)
            if installed_vllm() is None:
                item.add_marker(missing)


def random_factors(runtime: Runtime, slot: int, seed: int, size: float = 0.1) -> list:
    generator, rank = torch.Generator().manual_seed(seed), runtime.store.ranks[slot]
    return [
        (
            torch.randn(rank, layer.in_features, generator=generator) * size,
            torch.randn(layer.out_features, rank, generator=generator) * size,
        )
        for layer in runtime.store.layers
    ]


def runtime_with_adapters(ranks: tuple[int, ...] = RANKS) -> Runtime:
    runtime = Runtime.from_pretrained("embedded", seed=3)
    for number, rank in enumerate(ranks):
        slot = runtime.store.allocate(rank, 2.0)
        runtime.store.load_adapter(slot, random_factors(runtime, slot, number))
    return runtime


@dataclass
class World:
    """A runtime with adapters, and vLLM beside it."""

    runtime: Runtime
    own: RolloutEngine
    backend: ColocatedVLLM

    def engine(self, **settings: object) -> VLLMEngine:
        """Return an engine with settings of its own around the one vLLM."""
        runtime = self.runtime
        return VLLMEngine(
            runtime.base,
            runtime.store,
            VLLMConfig(**settings),
            seed=3,
            lora_config=runtime.lora_config,
            tokenizer=runtime.tokenizer,
            own=self.own,
            backend=self.backend,
        )


@pytest.fixture(scope="session")
def vllm() -> Iterator[ColocatedVLLM]:
    """Return vLLM with the embedded model; it has a tokenizer, which it needs for texts that end a completion."""
    runtime = Runtime.from_pretrained("embedded", seed=3)
    backend = ColocatedVLLM(runtime.base, VLLMConfig(stop_sequences=["none"]), runtime.tokenizer)
    backend.start(4, 16, None)
    yield backend
    backend.close()


@pytest.fixture
def world(vllm: ColocatedVLLM) -> World:
    runtime = runtime_with_adapters()
    return World(runtime, runtime.engine, vllm)
