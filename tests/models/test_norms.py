"""Our backward pass of RMSNorms: autograd's gradients, in norms that compute as Llama's do, and in no others."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from agilerl.models.layers import configure_norms
from tests.models.two_agents import make_runtime, train_pass
from tests.tiny_models import llama, random_model

pytestmark = pytest.mark.model


def drawn(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norm.weight.data.normal_()
    return norm.to(dtype).requires_grad_(False)


def gradient(norm: nn.Module, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    found = norm(x)
    (grad,) = torch.autograd.grad(found, x, out)
    return found.detach(), grad


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_the_gradient_is_autograd_s(dtype: torch.dtype, close: float) -> None:
    norm = drawn(LlamaRMSNorm(24, 1e-6), dtype)
    x, out = torch.randn(2, 5, 1, 24, dtype=torch.float64).to(dtype)
    expected = gradient(norm, x, out)
    configure_norms(norm, enabled=True)
    assert "forward" in norm.__dict__
    found = gradient(norm, x, out)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=close, rtol=close)


class Doubled(LlamaRMSNorm):
    """Says RMSNorm and is none."""

    def forward(self, x: torch.Tensor) -> Any:
        return 2 * super().forward(x)


DoubledRMSNorm = type("DoubledRMSNorm", (Doubled,), {})


@pytest.mark.parametrize("norm", [Gemma3RMSNorm(24), DoubledRMSNorm(24), nn.LayerNorm(24), LlamaRMSNorm(24)])
def test_other_norms_stay_as_they_are(norm: nn.Module) -> None:
    """Llama's in fp64, too, which computes in fp32 nevertheless."""
    configure_norms(drawn(norm, torch.float64 if type(norm) is LlamaRMSNorm else torch.float32), enabled=True)
    assert "forward" not in norm.__dict__


def test_a_compiled_base_has_its_own_norms_again() -> None:
    norm = drawn(LlamaRMSNorm(24), torch.float32)
    for own in (True, True, False, False):
        configure_norms(norm, enabled=own)
        assert ("forward" in norm.__dict__) == own


def test_the_gradients_of_adapters_do_not_depend_on_it() -> None:
    runtime = make_runtime(random_model(llama()))
    body = runtime.base.body
    assert sum("forward" in module.__dict__ for module in body.modules()) == 2 * runtime.base.num_layers + 1
    ours = train_pass(runtime)
    runtime.store.grad.zero_()
    configure_norms(body, enabled=False)
    theirs = train_pass(runtime)
    assert max(ours.distance(theirs)) < 1e-5
    assert not ours.same_bits(theirs)
