"""Checkpointed, offloaded and half-precision layers: the same numbers in less memory."""

from typing import Any

import pytest
import torch

from agilerl.config.base_model import SharedOptions
from agilerl.errors import ConfigError
from agilerl.models.layers import offloaded
from agilerl.runtime import Runtime
from agilerl.sizes import CPU_ROWS
from tests.models.two_agents import LENGTHS, make_runtime, train_pass
from tests.tiny_models import llama, qwen2, random_model

pytestmark = pytest.mark.model


class SavedBytes:
    """Bytes of distinct storages that autograd keeps for the backward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept: list[torch.Tensor] = []
        self.total = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.kept.append(tensor)  # so that no later tensor gets the same address
            self.total += storage.nbytes()
        return tensor


def saved_by(runtime: Runtime) -> int:
    counter = SavedBytes(runtime.base.model)
    with torch.autograd.graph.saved_tensors_hooks(counter, lambda tensor: tensor):
        train_pass(runtime)
    return counter.total


@pytest.mark.parametrize("config", [qwen2(num_hidden_layers=4), llama(num_hidden_layers=4)])
def test_checkpointing_gives_the_same_bits_and_keeps_fewer_bytes(config: Any) -> None:
    plain = make_runtime(random_model(config))
    expected, before = train_pass(plain), saved_by(plain)
    runtime = make_runtime(random_model(config), gradient_checkpointing=True)
    assert train_pass(runtime).same_bits(expected)
    assert expected.grad.abs().sum() > 0
    assert saved_by(runtime) < 0.5 * before


def test_a_checkpointed_layer_is_computed_again_with_the_route_of_its_forward() -> None:
    """The backward pass runs when another route, or none, is in force: the adapters must be those of the forward."""
    expected = train_pass(make_runtime(random_model()))
    runtime = make_runtime(random_model(), gradient_checkpointing=True)
    store = runtime.store
    with store.routed(None):
        assert train_pass(runtime).same_bits(expected)
    for agent in (0, 1):
        alone = train_pass(runtime, (agent,))
        assert torch.equal(alone.grad[agent], expected.grad[agent])
        assert not alone.grad[1 - agent].any()
    assert (store.route, store.batch_rows) == (None, -(-sum(LENGTHS[1]) // CPU_ROWS) * CPU_ROWS)


def test_checkpointing_can_be_switched_off_again() -> None:
    runtime = Runtime.for_model(random_model())
    layer = runtime.base.body.layers[0]
    own = layer.forward
    runtime.configure(SharedOptions(gradient_checkpointing=True))
    assert layer.forward != own
    runtime.configure(SharedOptions(gradient_checkpointing=False))
    assert layer.forward == own


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_activations_give_the_same_bits(checkpointing: bool) -> None:
    """The option acts on a GPU; what it does there is done here with memory that is not pinned."""
    expected = train_pass(make_runtime(random_model()))
    runtime = make_runtime(random_model(), gradient_checkpointing=checkpointing)
    with offloaded(runtime.base.model, pin=False):
        assert train_pass(runtime).same_bits(expected)


def test_offloading_leaves_the_weights_where_they_are() -> None:
    layer, copies = torch.nn.Linear(4, 4), []
    layer.requires_grad_(False)
    x = torch.ones(2, 4, requires_grad=True)
    with offloaded(layer, pin=False):
        out = layer(x).relu()
    node = out.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    for name in ("_saved_mat1", "_saved_mat2"):
        saved = getattr(node, name)
        if saved is not None:
            copies.append(saved.untyped_storage().data_ptr() != layer.weight.untyped_storage().data_ptr())
    assert copies == [False]
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_bf16_base_with_fp32_adapters_agrees_with_fp32(checkpointing: bool) -> None:
    """bf16 has 8 bits of mantissa: 0.4 % a rounding, and a few dozen of them on the way through two layers."""
    config = qwen2(num_hidden_layers=2)
    wide = make_runtime(random_model(config, scale=0.5).to(torch.bfloat16).float())
    half = make_runtime(random_model(config, scale=0.5).to(torch.bfloat16), gradient_checkpointing=checkpointing)
    assert half.base.dtype == torch.bfloat16
    assert half.store.theta.dtype == half.store.grad.dtype == torch.float32
    logp, grad = train_pass(half).distance(train_pass(wide))
    assert 0 < logp < 0.01
    assert 0 < grad < 0.05


def test_a_bf16_base_keeps_the_inputs_of_adapters_in_bf16() -> None:
    wide, half = make_runtime(random_model(qwen2())), make_runtime(random_model(qwen2()).to(torch.bfloat16))
    assert saved_by(half) < 0.75 * saved_by(wide)


def test_a_model_without_layers_that_are_known_is_refused() -> None:
    runtime = Runtime.for_model(random_model())
    runtime.base.body = torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"gradient_checkpointing .*found Identity"):
        runtime.configure(SharedOptions(gradient_checkpointing=True))
    assert not runtime.options.gradient_checkpointing
