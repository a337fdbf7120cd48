"""What rows share is computed once: counts of tokens with the widths of real models and the memory of real machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig

from agilerl.algorithms import GRPO, PPO
from agilerl.algorithms.update import learn_together
from agilerl.data import MicroBatch, RolloutBatch, Trajectory, collate, cut, cut_for_training
from agilerl.models.base import BaseModel
from agilerl.models.layers import decoder_layers
from agilerl.planning.footprint import PassSize, pass_size
from agilerl.planning.time import Widths
from agilerl.runtime import Runtime
from tests.tiny_models import PAD, VOCABULARY, llama, random_model

SMOLLM2 = Widths(layers=30, hidden=576, query_width=576, kv_width=192, feed_forward=1536, vocabulary=49152, width=4)
"""Of 135M parameters, in fp32."""
QWEN = {
    0.5e9: Widths(layers=24, hidden=896, query_width=896, kv_width=128, feed_forward=4864, vocabulary=151936, width=2),
    1.5e9: Widths(
        layers=28, hidden=1536, query_width=1536, kv_width=256, feed_forward=8960, vocabulary=151936, width=2
    ),
}
"""Of Qwen2.5, by the number of parameters, in bf16."""
GIB = 2**30
MOST = 1.15
"""Tokens that an optimizer step may compute for each token that its rows do not share."""


def rows_of(
    prompts: int, group: int, length: int, common: int, answer: int = 13, *, seed: int = 0, vocabulary: int = VOCABULARY
) -> RolloutBatch:
    """Return groups of rows with prompts of this length, which have their first tokens in common."""
    g = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, vocabulary, (count,), generator=g).tolist()

    start = tokens(common)
    asked = [start + tokens(length - common) for _ in range(prompts)]
    rewards = torch.rand(prompts * group, generator=g).tolist()
    return collate(
        [
            Trajectory(prompt, tokens(answer), [True] * answer, [-1.0] * answer, [rewards[p * group + k]], group=p)
            for p, prompt in enumerate(asked)
            for k in range(group)
        ],
        PAD,
    )


def runtime_of(**options: Any) -> Runtime:
    small = llama(max_position_embeddings=1024, hidden_size=16, intermediate_size=16, **options)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return Runtime.for_model(random_model(small), lora_config=lora)


def agents_of(runtime: Runtime, count: int, rows: int, group: int) -> list[GRPO]:
    runtime.store.reserve(count + 1)
    settings = {"group_size": group, "batch_size": rows, "beta": 0.01, "max_output_tokens": 13, "lr": 1e-3}
    return [GRPO(runtime=runtime, pad_token_id=PAD, index=i, **settings) for i in range(count)]


@contextmanager
def counted(runtime: Runtime) -> Iterator[dict[bool, int]]:
    """Count the tokens that go through the base, by whether a gradient is wanted."""
    counts = {True: 0, False: 0}

    def count(body: Any, args: Any, kwargs: Any) -> None:
        counts[torch.is_grad_enabled()] += kwargs["input_ids"].numel()

    hook = runtime.base.body.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        hook.remove()


@pytest.mark.model
@pytest.mark.parametrize("agents", [1, 4, 8])
@pytest.mark.parametrize(("group", "length", "common"), [(8, 564, 375), (16, 1000, 700)])
def test_an_update_computes_what_rows_share_once(
    agents: int, group: int, length: int, common: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Widths, "of", lambda base: SMOLLM2)
    monkeypatch.setattr(BaseModel, "weight_bytes", property(lambda base: 135e6 * 4))
    monkeypatch.setattr("agilerl.runtime.available_bytes", lambda device: 24 * GIB)
    runtime, batches = runtime_of(), [rows_of(4, group, length, common, seed=seed) for seed in range(agents)]
    population = agents_of(runtime, agents, 4 * group, group)
    with counted(runtime) as counts:
        learn_together(population, batches)
    distinct = sum(batch.distinct_tokens for batch in batches)
    assert distinct <= counts[True] <= MOST * distinct
    # The log-probs of the reference, the base alone, stay for later rows: those share whole prompts.
    prompts_once = sum(batch.with_prompts_once().distinct_tokens for batch in batches)
    assert prompts_once <= counts[False] <= MOST * prompts_once
    with counted(runtime) as counts:
        population[0].logprobs(batches[0])
    assert batches[0].distinct_tokens <= counts[False] <= MOST * batches[0].distinct_tokens


@pytest.mark.parametrize("parameters", QWEN)
def test_on_a_card_of_80_gib(parameters: float) -> None:
    size = pass_size(QWEN[parameters], base=2 * parameters, memory=80 * GIB, gpu=True, checkpointing=False)
    most = MicroBatch(None, **size._asdict())
    for prompts, group, length, share, answer in product(
        (4, 16), (8, 16), (48, 300, 600, 1000), (0, 0.5, 0.95), (13, 100)
    ):
        batch = rows_of(prompts, group, length, int(share * length), answer)
        cuts, recompute = cut_for_training(batch, torch.arange(len(batch)), most, flat=True)
        assert sum(batch.select(part).distinct_tokens for part in cuts.parts) <= MOST * batch.distinct_tokens
        assert not recompute


def test_a_group_is_whole_where_it_fits_though_less_would_be_enough() -> None:
    batch = rows_of(3, 8, 100, 0, 10)  # groups of 180 tokens
    for whole, expected in ((180, [8, 8, 8]), (359, [8, 8, 8]), (99, [1] * 24), (None, [1] * 24)):
        cuts = cut(batch, torch.arange(24), MicroBatch(None, 64, whole=whole, copied=0.0), flat=True)
        assert [len(part) for part in cuts.parts] == expected
    # What is shared by all keeps groups together as well, unless it is little.
    for common, expected in ((90, [24]), (9, [8, 8, 8])):
        batch = rows_of(3, 8, 700, common, 10)
        cuts = cut(batch, torch.arange(24), MicroBatch(None, 800, whole=5000, copied=0.0), flat=True)
        assert [len(part) for part in cuts.parts] == expected


def test_passes_of_rows_that_share_nothing_have_no_more_than_enough() -> None:
    for enough in (512, 2048):
        batch = rows_of(64, 1, 60, 0, 20)
        cuts = cut(batch, torch.arange(64), MicroBatch(None, enough, whole=2**16), flat=True)
        full = enough // 80
        assert [len(part) for part in cuts.parts] == [full] * (64 // full) + [64 % full] * bool(64 % full)


def test_rows_are_cut_where_the_least_is_computed_again() -> None:
    batch = rows_of(2, 6, 100, 0, 10)
    # 10 rows would fit: the second group is not begun in the first pass, since it would be computed twice.
    cuts = cut(batch, torch.arange(12).flip(0), MicroBatch(None, 260, copied=0.0), flat=True)
    assert sorted(sorted(part.tolist()) for part in cuts.parts) == [list(range(6)), list(range(6, 12))]
    assert cuts.sizes == [160.0, 160.0]


# -- layers that are computed again in the backward pass --------------------------------------------------------------


def sized(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, size: PassSize) -> None:
    monkeypatch.setattr(type(runtime), "pass_size", property(lambda runtime: size))


@pytest.mark.model
def test_layers_are_computed_again_where_that_saves_more_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rows_of(1, 8, 600, 0)
    gradients, computed = [], []
    for whole, recomputed in ((2000, 2000), (650, 2000), (650, 650)):
        runtime = runtime_of()
        sized(runtime, monkeypatch, PassSize(64, whole, recomputed, 2000, 0.0))
        layer, calls = decoder_layers(runtime.base.body)[0], []
        original = type(layer).forward

        def forward(self: Any, *args: Any, original: Any = original, calls: Any = calls, **kwargs: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return original(self, *args, **kwargs)

        (agent,) = agents_of(runtime, 1, 8, 8)
        with monkeypatch.context() as patched, counted(runtime) as counts:
            patched.setattr(type(layer), "forward", forward)
            learn_together([agent], [batch])
        assert "forward" not in vars(layer)  # as it was
        gradients.append(runtime.store.theta[agent.slot].clone())
        computed.append((counts[True], sum(calls) / len(decoder_layers(runtime.base.body))))
    once = -(-batch.distinct_tokens // 16) * 16
    assert computed[0] == (once, 1)
    assert computed[1] == (once, 2)  # each layer forward twice
    assert computed[2][0] > 2 * once
    assert torch.equal(gradients[0], gradients[1])
    assert torch.allclose(gradients[0], gradients[2], atol=1e-5)


@pytest.mark.model
def test_an_agent_with_a_critic_takes_half_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of()
    sized(runtime, monkeypatch, PassSize(64, 1000, 2000, 3000, 0.0))
    runtime.store.reserve(2)
    most = PPO(runtime=runtime, pad_token_id=PAD, batch_size=4, max_output_tokens=8).micro_batch
    assert (most.tokens, most.whole, most.recomputed, most.unsaved) == (64, 500, 1000, 3000)
    (agent,) = agents_of(runtime, 1, 4, 4)
    assert agent.micro_batch.whole == 1000


@pytest.mark.parametrize("answers", [40, 100, 150])
def test_layers_are_not_computed_again_for_little(answers: int) -> None:
    batch = rows_of(1, 8, 100, 0, answers)
    most = MicroBatch(None, 64, whole=500, recomputed=2000, copied=0.0)
    cuts, recompute = cut_for_training(batch, torch.arange(8), most, flat=True)
    assert not recompute
    assert len(cuts.parts) > 1 or answers == 40
