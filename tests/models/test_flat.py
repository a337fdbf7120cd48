"""Rows in one line: the hidden states and gradients of padded rows, without the padding, each prompt computed once."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Llama4TextConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agilerl.algorithms.forward import AgentRows, TokenOutputs, forward
from agilerl.config.base_model import SharedOptions
from agilerl.data import MicroBatch, RolloutBatch, Trajectory, collate, cut
from agilerl.errors import EngineError
from agilerl.models.base import from_model, load_base
from agilerl.models.flat import PaddedRows, flatten, fold_heads
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.runtime import Runtime
from agilerl.sizes import CPU_ROWS
from tests.models.two_agents import with_adapters
from tests.tiny_models import PAD, VOCABULARY, llama, qwen2, random_model


def batch_of(
    seed: int, prompts: Sequence[int], said: Sequence[tuple[int, int]], *, turns: bool = False, common: int = 0
) -> RolloutBatch:
    """Return rows of ``(prompt, tokens)``, the prompts of these lengths; with ``turns`` others speak between.

    The first tokens of all prompts are the same, as many as ``common`` says.
    """
    g = torch.Generator().manual_seed(seed)
    texts = [torch.randint(2, VOCABULARY, (n,), generator=g).tolist() for n in prompts]
    texts = [texts[0][:common] + text[common:] for text in texts]
    rows = []
    for group, count in said:
        tokens = torch.randint(2, VOCABULARY, (count,), generator=g).tolist()
        mask = [not turns or i % 5 < 3 for i in range(count)]
        rows.append(Trajectory(texts[group], tokens, mask, [0.0] * count, [0.0], group=group))
    return collate(rows, PAD)


def two_batches(*, turns: bool = False) -> list[RolloutBatch]:
    """Return the rows of two agents: shared prompts, in part or whole, one too short to count, equal completions."""
    said = [(0, 12), (0, 1), (1, 17), (0, 30), (1, 4), (2, 6), (2, 6), (3, 14), (3, 8)]
    first = batch_of(0, (20, 29, 3, 24), said, turns=turns, common=13)
    first.ids[0, 20:30] = first.ids[3, 20:30]  # two rows that part in the middle of a completion
    second = batch_of(1, (33, 8), [(0, 5), (1, 40), (1, 3), (0, 5), (0, 11)], turns=turns)
    second.ids[3] = second.ids[0]
    return [first, second]


def rows_of(batch: RolloutBatch) -> PaddedRows:
    return PaddedRows(batch.ids, batch.lengths, batch.tree)


def in_fp64(model: Any) -> Any:
    """Return a model that computes in fp64 throughout: transformers takes norms in fp32."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm.__get__(module)
    return model


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def runtime_of(model: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> Runtime:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    runtime = Runtime.for_model(model, lora_config=lora, options=SharedOptions(**options))
    runtime.store.dtype = dtype
    runtime.store._allocate_banks(0)
    return with_adapters(runtime)


def computed(
    runtime: Runtime, parts: Sequence[AgentRows], *, entropy: bool = True
) -> tuple[list[TokenOutputs], Tensor]:
    """Return what a forward pass says, and the gradients of a loss that weighs every token differently."""
    runtime.store.grad.zero_()
    outputs = forward(runtime, parts, entropy=entropy)
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        for value in (output.logp, output.entropy, output.values):
            if value is not None:
                loss = loss + (value * torch.linspace(-1, 1, value.numel()).view(value.shape)).double().sum()
    loss.backward()
    return outputs, runtime.store.grad.clone()


def padded(runtime: Runtime, parts: Sequence[AgentRows]) -> tuple[list[TokenOutputs], Tensor]:
    """Return the same from rows that are padded to one length, one part at a time."""
    before, runtime.base.flattens = runtime.base.flattens, False
    total, outputs = torch.zeros_like(runtime.store.grad), []
    for part in parts:
        found, grad = computed(runtime, [part])
        outputs += found
        total += grad
    runtime.base.flattens = before
    return outputs, total


def parts_of(batches: Sequence[RolloutBatch], *, values: bool = False) -> list[AgentRows]:
    parts = [AgentRows(agent, batch, 1.0 - 0.2 * agent) for agent, batch in enumerate(batches)]
    return [*parts, AgentRows(1, batches[0], 1.0, values=True)] if values else parts


def assert_near(found: Sequence[TokenOutputs], expected: Sequence[TokenOutputs], atol: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("logp", "entropy", "values"):
            value, other = getattr(ours, name), getattr(theirs, name)
            assert (value is None) == (other is None)
            if value is not None:
                torch.testing.assert_close(value, other, atol=atol, rtol=0)


def assert_as_padded(runtime: Runtime, parts: Sequence[AgentRows], outputs: float, gradients: float) -> None:
    """Compare with padded rows: outputs by their largest difference, gradients by a relative norm."""
    found, grad = computed(runtime, parts)
    expected, expected_grad = padded(runtime, parts)
    assert_near(found, expected, outputs)
    assert expected_grad.abs().max() > 1e-3
    assert float((grad - expected_grad).norm() / expected_grad.norm()) < gradients


# -- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("turns", [False, True], ids=["one turn", "several turns"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_outputs_and_gradients_in_fp64_are_those_of_padded_rows(heads: int, checkpointing: bool, turns: bool) -> None:
    config = qwen2(num_key_value_heads=heads)
    runtime = runtime_of(in_fp64(random_model(config)), dtype=torch.float64, gradient_checkpointing=checkpointing)
    assert runtime.base.flattens
    assert_as_padded(runtime, parts_of(two_batches(turns=turns), values=True), 1e-12, 1e-12)


def small(kind: Any, **changes: Any) -> Any:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(qwen2(), name) for name in (*names, "num_key_value_heads", "max_position_embeddings")}
    return kind(**{**sizes, **changes})


ARCHITECTURES = {
    "llama": llama(),
    "mistral": small(MistralConfig, sliding_window=None),
    "gemma": small(GemmaConfig, num_key_value_heads=1, head_dim=16),
    "gemma 3, windows of the whole context": small(Gemma3TextConfig, head_dim=16, sliding_window=64),
    "qwen 3": small(Qwen3Config, head_dim=16),
    "mistral, a window": small(MistralConfig, sliding_window=8),
    "mistral, a window longer than any row that is tried": small(MistralConfig, sliding_window=100),
    "gemma 3, windows of some layers": small(
        Gemma3TextConfig, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "llama 4, chunks of some layers": small(
        Llama4TextConfig,
        head_dim=16,
        attention_chunk_size=8,
        intermediate_size_mlp=128,
        num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "rotations by the longest row": llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "qwen 3, experts": small(
        Qwen3MoeConfig, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


@pytest.mark.model
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_of_every_architecture(name: str) -> None:
    runtime = runtime_of(random_model(ARCHITECTURES[name], scale=0.5))
    assert runtime.base.flattens
    assert_as_padded(runtime, parts_of(two_batches()), 2e-4, 2e-3)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_of_a_quantised_base(kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed; make setup installs it")
    random_model().save_pretrained(tmp_path)
    runtime = runtime_of(load_base(str(tmp_path), options=SharedOptions(quantization_config=kind)).model)
    assert runtime.base.flattens
    assert_as_padded(runtime, parts_of(two_batches()), 2e-3, 2e-2)


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("agent", [0, 1])
def test_the_bits_of_an_agent_are_its_own(agent: int) -> None:
    runtime, parts = runtime_of(random_model()), parts_of(two_batches())
    together, grad = computed(runtime, parts)
    alone, alone_grad = computed(runtime, [parts[agent]])
    assert torch.equal(alone[0].logp, together[agent].logp)  # type: ignore[arg-type]
    assert torch.equal(alone[0].entropy, together[agent].entropy)  # type: ignore[arg-type]
    weights = [torch.linspace(-1, 1, o.logp.numel()).view(o.logp.shape) for o in together]  # type: ignore[union-attr]
    assert weights[0].shape != weights[1].shape  # of rows that no padding makes alike
    assert torch.equal(alone_grad[agent], grad[agent])


@pytest.mark.model
@pytest.mark.parametrize("case", ["wide", "rank 1"])
def test_the_bits_of_an_agent_are_its_own_in_wide_layers_and_with_rank_1(case: str) -> None:
    """Products cut long sums by their number of rows, and have a kernel of its own for a single column."""
    sizes = {"hidden_size": 896, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 14}
    model = random_model(qwen2(**sizes) if case == "wide" else None, scale=0.1 if case == "wide" else 1.0)
    rank = 8 if case == "wide" else 1
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    runtime, g = Runtime.for_model(model, lora_config=lora), torch.Generator().manual_seed(0)
    for _ in range(3):
        shapes = runtime.store.layers
        factors = [
            (torch.randn(rank, s.in_features, generator=g) * 0.1, torch.randn(s.out_features, rank, generator=g) * 0.1)
            for s in shapes
        ]
        runtime.store.load_adapter(runtime.store.allocate(rank, 2.0), factors)
    parts = [AgentRows(slot, batch_of(slot, (12, 9), [(0, 20), (0, 7), (1, 40)]), 1.0) for slot in range(3)]
    together, grad = computed(runtime, parts)
    for slot, part in enumerate(parts):
        # The loss weighs the tokens of each part alike, however many parts there are.
        alone, alone_grad = computed(runtime, [part])
        assert torch.equal(alone[0].logp, together[slot].logp)  # type: ignore[arg-type]
        assert torch.equal(alone_grad[slot], grad[slot])
    with torch.no_grad():
        ids = [parts[slot].batch.ids[0, :12].tolist() for slot in range(3)]
        asked = [GenerationRequest(slot, ids[slot], 4, SamplingSettings(8), key=(slot,)) for slot in range(3)]
        found = runtime.engine.generate(asked)
    assert [group for request in asked for group in runtime.engine.generate([request])] == found


@pytest.mark.model
@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_the_bits_of_a_row_are_those_of_any_cut_in_any_order(seed: int) -> None:
    runtime, batch = runtime_of(random_model()), two_batches(turns=True)[0]
    whole = forward(runtime, [AgentRows(0, batch, 0.7)])[0].logp
    assert whole is not None
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    for rows in order.split(1 + seed):
        part = batch.select(rows)
        found = forward(runtime, [AgentRows(0, part, 0.7)])[0].logp
        assert found is not None
        assert torch.equal(found, whole[rows][:, : found.shape[1]])


@pytest.mark.model
def test_a_broken_agent_reaches_no_other() -> None:
    runtime, parts = runtime_of(random_model()), parts_of(two_batches(), values=True)
    expected, grad = computed(runtime, parts[:1])
    runtime.store.theta[1] = float("nan")
    outputs, found = computed(runtime, parts)
    assert torch.equal(outputs[0].logp, expected[0].logp)  # type: ignore[arg-type]
    assert bool(outputs[1].logp.isnan().any())  # type: ignore[union-attr]
    assert torch.equal(found[0], grad[0])


# -- which tokens see which -------------------------------------------------------------------------------------------

lengths = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=6)


@settings(max_examples=40)
@given(st.lists(lengths, min_size=1, max_size=3), st.lists(st.integers(1, 40), min_size=3, max_size=3), st.booleans())
def test_every_token_sees_its_own_row_up_to_itself(agents: list[Any], prompts: list[int], exact: bool) -> None:
    batches = [batch_of(seed, prompts, said, common=9 * seed) for seed, said in enumerate(agents)]
    rows = flatten(list(map(rows_of, batches)), torch.float64, exact=exact)
    assert len(rows.ids) == len(rows.positions) == sum(rows.parts)
    assert list(rows.parts) == [-(-batch.distinct_tokens // CPU_ROWS) * CPU_ROWS for batch in batches]
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(len(rows.ids), heads, 1, 4, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    found = rows.attend(q, k, v, 0.5)[:, 0]
    for batch, source in zip(batches, rows.sources):
        for row, length in enumerate(batch.lengths.tolist()):
            places = source[row, :length]
            assert torch.equal(rows.ids[places], batch.ids[row, :length])
            assert torch.equal(rows.positions[places], torch.arange(length))
            own = (part[places, :, 0].transpose(0, 1)[None] for part in (q, k, v))
            expected = torch.nn.functional.scaled_dot_product_attention(
                *own, is_causal=True, scale=0.5, enable_gqa=True
            )
            torch.testing.assert_close(found[places], expected[0].transpose(0, 1), atol=1e-12, rtol=0)


def test_folded_heads_attend_as_heads_that_share() -> None:
    """What a GPU computes, here on the CPU."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, length, 8, generator=g) for heads, length in ((6, 5), (2, 9), (2, 9)))
    mask = torch.zeros(3, 1, 5, 9).masked_fill_(torch.rand(3, 1, 5, 9, generator=g) < 0.3, float("-inf"))
    mask[..., 0] = 0
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4, enable_gqa=True)
    torch.testing.assert_close(fold_heads(q, k, v, mask, 0.4), expected)
    torch.testing.assert_close(fold_heads(q, k, v, mask[:1], 0.4)[:1], expected[:1])


def test_calls_of_attention_are_few_where_bits_do_not_count() -> None:
    batches = list(map(rows_of, two_batches()))
    assert len(flatten(batches, torch.float32, exact=True).blocks) > 3
    assert len(flatten(batches, torch.float32, exact=False).blocks) == 3


# -- where it does not apply ------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (qwen2(), {"attn_implementation": "eager"}),
        (small(Gemma2Config, head_dim=16, sliding_window=8), {}),
    ],
    ids=["another kernel", "soft caps"],
)
def test_other_models_keep_their_padding(config: Any, options: Any) -> None:
    runtime = runtime_of(random_model(config), **options)
    assert not runtime.base.flattens
    part = parts_of(two_batches())[0]
    seen = []
    runtime.base.body.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    forward(runtime, [part])
    assert seen == [part.batch.ids.shape]


@pytest.mark.model
def test_attention_that_is_changed_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, part = runtime_of(random_model()), parts_of(two_batches())[0]
    expected, _ = computed(runtime, [part])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
    with pytest.raises(EngineError, match="attn_implementation"):
        forward(runtime, [part])
    monkeypatch.undo()
    runtime.base.model.set_attn_implementation("eager")
    assert not runtime.base.flattens
    assert_near(computed(runtime, [part])[0], expected, 2e-4)


@pytest.mark.model
def test_a_model_whose_layers_mix_neighbours_keeps_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a convolution over tokens: an embedding that adds the one before."""
    model = random_model()
    embed = model.get_input_embeddings()
    own = embed.forward

    def mixed(ids: Tensor) -> Tensor:
        dim = 0 if ids.shape[1] == 1 else 1
        earlier = own(ids).roll(1, dims=dim)
        earlier.select(dim, 0).zero_()
        return own(ids) + earlier

    monkeypatch.setattr(embed, "forward", mixed)
    assert not from_model(model).flattens


# -- micro-batches ----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    lengths, st.lists(st.integers(1, 40), min_size=3, max_size=3), st.integers(1, 3), st.none() | st.integers(1, 400),
    st.none() | st.integers(1, 9), st.booleans(),
)  # fmt: skip
def test_micro_batches_hold_every_row_once_within_the_limits(
    said: Any, prompts: list[int], unit: int, tokens: int | None, most: int | None, flat: bool
) -> None:
    batch = batch_of(3, prompts, said * unit, common=10)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    limit = MicroBatch(None if most is None else most * unit, tokens, unit)
    found = cut(batch, order, limit, flat=flat).parts
    assert sorted(torch.cat(found).tolist()) == list(range(len(batch)))
    units = {tuple(rows) for rows in order.view(-1, unit).tolist()}
    assert {tuple(rows) for part in found for rows in part.view(-1, unit).tolist()} == units
    for part in found:
        assert most is None or len(part) <= most * unit
        rows = batch.select(part)
        cost = rows.distinct_tokens if flat else len(part) * batch.ids.shape[1]
        assert tokens is None or cost <= tokens or len(part) == unit


def test_rows_of_a_unit_with_different_prompts_count_both() -> None:
    batch = batch_of(0, (1, 8), [(0, 1), (0, 1), (0, 1), (0, 1), (1, 1), (0, 1), (0, 1), (0, 1), (1, 1), (0, 1)])
    for part in cut(batch, torch.arange(10).flip(0), MicroBatch(None, 8, 2), flat=True).parts:
        assert len(part) == 2 or batch.select(part).distinct_tokens <= 8


def test_rows_of_one_prompt_stay_together() -> None:
    batch = batch_of(0, (30, 20, 10), [(i % 3, 5) for i in range(12)])
    parts = cut(batch, torch.arange(12), MicroBatch(4), flat=True).parts
    assert [len(set(batch.tree.of[part].tolist())) for part in parts] == [1, 1, 1]


# -- the work that is done --------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_prompt_is_computed_once_and_no_padding_is() -> None:
    runtime = runtime_of(random_model())
    batch = batch_of(0, (40,), [(0, 8)] * 8)
    seen = []
    runtime.base.body.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    forward(runtime, [AgentRows(0, batch, 1.0)])
    assert seen == [-(-(40 + 8 * 8) // CPU_ROWS) * CPU_ROWS]
    assert batch.ids.numel() == 8 * 64


@pytest.mark.model
def test_a_second_runtime_gives_the_base_back_as_it_was() -> None:
    runtime = runtime_of(random_model())
    parts = parts_of(two_batches())
    expected, grad = computed(runtime, parts)
    second = Runtime(runtime.base)
    forward(second, [AgentRows(None, parts[0].batch, 1.0)])
    del second
    gc.collect()
    assert runtime.base.store is runtime.store
    found, again = computed(runtime, parts)
    assert torch.equal(found[0].logp, expected[0].logp)  # type: ignore[arg-type]
    assert torch.equal(again, grad)
