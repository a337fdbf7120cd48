"""Decoding with shared heads: the attention over copied keys and values, without the copies, in any layout."""

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agilerl.models.layers import asking, attend_decoding, using_attention
from tests.tiny_models import qwen2

ROWS = 12


class Layer:
    """As much of an attention layer as the functions read."""

    def __init__(self, groups: int) -> None:
        self.num_key_value_groups = groups


def attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attend as a layer of a model does that is given our mask."""
    marked = asking(mask.clone(), attend_decoding)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query, key, value, marked, scaling=scaling)[0]


def inputs(heads: int, shared: int, width: int, length: int, queries: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and a mask that lets each row see a number of tokens of its own."""
    g = torch.Generator().manual_seed(heads + width)
    query = torch.randn(ROWS, queries, heads, width, generator=g).transpose(1, 2)
    key, value = (torch.randn(ROWS, shared, 96, width, generator=g)[:, :, :length] for _ in range(2))
    seen = torch.arange(length)[None] <= torch.arange(ROWS)[:, None] * 2
    mask = torch.zeros(ROWS, length).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None, None]
    return query, key, value, mask.expand(ROWS, 1, queries, length)


@pytest.mark.parametrize(("heads", "shared", "width"), [(4, 2, 16), (8, 2, 16), (8, 1, 32), (14, 2, 64), (6, 2, 8)])
@torch.no_grad()
def test_the_same_attention_with_the_same_bits_in_any_layout(heads: int, shared: int, width: int) -> None:
    layer = Layer(heads // shared)
    parts = inputs(heads, shared, width, 32)
    found = attend(layer, *parts, scaling=0.3)
    usual = sdpa_attention_forward(layer, *parts, scaling=0.3)[0]
    assert found.shape == usual.shape == (ROWS, 1, heads, width)
    assert torch.allclose(found, usual, atol=1e-5, rtol=1e-5)
    longer = attend(layer, *inputs(heads, shared, width, 96), scaling=0.3)
    assert torch.equal(found, longer)
    for rows in (torch.tensor([5]), torch.arange(ROWS - 1, -1, -1)):
        assert torch.equal(attend(layer, *(part[rows] for part in parts), scaling=0.3), found[rows])


@pytest.mark.parametrize("case", ["a mask of its own", "no mask"])
def test_other_models_of_the_process_attend_as_they_did(case: str) -> None:
    layer = Layer(2)
    query, key, value, mask = inputs(4, 2, 16, 32, queries=32)
    asking(mask.clone(), attend_decoding)
    parts = query, key, value, None if case == "no mask" else mask
    usual = sdpa_attention_forward(layer, *parts, scaling=0.3)[0]
    assert torch.equal(ALL_ATTENTION_FUNCTIONS["sdpa"](layer, *parts, scaling=0.3)[0], usual)


def fail_inside(config: object, inside: str | None) -> None:
    with using_attention(config, "sdpa"):
        assert config._attn_implementation == inside
        raise ZeroDivisionError


@pytest.mark.parametrize(("kind", "inside"), [("eager", "sdpa"), ("flex_attention", "sdpa"), (None, None)])
def test_the_attention_of_training_comes_back(kind: str | None, inside: str | None) -> None:
    config = qwen2(attn_implementation=kind)
    with pytest.raises(ZeroDivisionError):
        fail_inside(config, inside)
    assert config._attn_implementation == kind
