"""Sequence packing: the same log-probs and gradients without the padding, and never two agents in one row."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GemmaConfig, MistralConfig

from agilerl.config.base_model import SharedOptions
from agilerl.errors import ConfigError
from agilerl.models.flat import pack
from agilerl.runtime import Runtime
from tests.models.two_agents import LENGTHS, make_runtime, train_pass
from tests.tiny_models import VOCABULARY, llama, qwen2, random_model


def sliding(**changes: Any) -> MistralConfig:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(qwen2(), name) for name in (*names, "num_key_value_heads", "max_position_embeddings")}
    return MistralConfig(**sizes, sliding_window=8, **changes)


def gemma() -> GemmaConfig:
    sizes = {k: v for k, v in llama().to_dict().items() if k in ("vocab_size", "hidden_size", "intermediate_size")}
    return GemmaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=16)


@pytest.mark.model
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [qwen2(), llama(), sliding(), gemma()], ids=lambda c: c.model_type)
def test_loss_and_gradient_are_those_of_padded_rows(config: Any, attention: Any) -> None:
    runtimes = [
        make_runtime(random_model(config).double(), attn_implementation=attention, use_sequence_packing=packed)
        for packed in (False, True)
    ]
    for runtime in runtimes:
        runtime.base.flattens = False  # SDPA would need no packing
    plain, found = map(train_pass, runtimes)
    assert max(found.distance(plain)) < 1e-6
    assert abs(float((found.loss - plain.loss) / plain.loss)) < 1e-6
    assert plain.grad.abs().sum() > 0


@pytest.mark.model
@pytest.mark.parametrize("agent", [0, 1])
def test_an_agents_packed_bits_do_not_depend_on_the_other(agent: int) -> None:
    runtime = make_runtime(random_model(), use_sequence_packing=True, attn_implementation="eager")
    together, alone = train_pass(runtime), train_pass(runtime, (agent,))
    torch.testing.assert_close(alone.logp[0], together.logp[agent], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(alone.grad[agent], together.grad[agent], atol=1e-4, rtol=1e-5)
    assert not alone.grad[1 - agent].any()


@pytest.mark.model
def test_packing_goes_with_checkpointing() -> None:
    options = {"use_sequence_packing": True, "attn_implementation": "eager"}
    expected = train_pass(make_runtime(random_model(), **options))
    both = make_runtime(random_model(), gradient_checkpointing=True, **options)
    assert train_pass(both).same_bits(expected)


@pytest.mark.model
def test_fewer_tokens_are_computed() -> None:
    seen: list[int] = []
    for on in (False, True):
        runtime = make_runtime(random_model(), use_sequence_packing=on, attn_implementation="eager")
        runtime.base.body.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0].numel()))
        train_pass(runtime)
    assert seen[0] == 7 * 32
    assert LENGTHS == ((31, 9, 17, 12), (5, 26, 8))
    assert seen[-1] == 5 * 31  # [31], [17, 12] and [9] of the first agent's rows; [26, 5] and [8] of the other's


@pytest.mark.model
def test_a_model_that_mixes_packed_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for it is a model that is not told the positions, and so lets every token see all before it."""
    runtime = Runtime.for_model(random_model())
    body = runtime.base.body
    own = body.forward
    monkeypatch.setattr(body, "forward", lambda *args, position_ids=None, **kwargs: own(*args, **kwargs))
    with pytest.raises(ConfigError, match=r"use_sequence_packing=True: .*_implementation='sdpa'"):
        runtime.configure(SharedOptions(use_sequence_packing=True))
    assert not runtime.options.use_sequence_packing
    assert not runtime.base.options.use_sequence_packing


lengths_of_agents = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=4)


@given(lengths_of_agents, st.booleans())
def test_every_token_keeps_its_agent_row_and_position(agents: list[list[int]], whole: bool) -> None:
    lengths = torch.tensor([n for own in agents for n in own])
    width = 12
    ids = torch.randint(2, VOCABULARY, (len(lengths), width), generator=torch.Generator().manual_seed(0))
    packed = pack(ids, lengths, [len(own) for own in agents], whole=whole)
    assert sum(packed.rows) == len(packed.ids)
    assert (packed.rows == (1,) * len(agents)) or not whole
    assert whole or packed.ids.shape[1] <= width
    back, positions = packed.unpack(packed.ids[..., None])[..., 0], packed.unpack(packed.positions[..., None])[..., 0]
    agent_of = torch.repeat_interleave(torch.arange(len(agents)), torch.tensor(packed.rows))
    owner = packed.unpack(agent_of[:, None, None].expand(*packed.ids.shape, 1))[..., 0]
    row = 0
    for agent, own in enumerate(agents):
        for n in own:
            assert torch.equal(back[row, :n], ids[row, :n])
            assert torch.equal(positions[row, :n], torch.arange(n))
            assert bool((owner[row, :n] == agent).all())
            row += 1
    assert len({int(p) for r, n in enumerate(lengths) for p in packed.source[r, :n]}) == int(lengths.sum())
