"""The rollout engine: right tokens, right log-probs, and the same bits in every batch layout."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoConfig,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
)

from agilerl.config.base_model import SharedOptions
from agilerl.errors import ConfigError, EngineError
from agilerl.rollouts import GenerationRequest, SamplingSettings, torch_engine
from agilerl.rollouts.torch_engine import RowSettings, TorchEngine, draw
from agilerl.runtime import Runtime
from agilerl.sizes import CPU_ROWS
from tests.tiny_models import EOS, VOCABULARY, llama, qwen2, random_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return make_runtime()


def make_runtime(config: object = None, **options: object) -> Runtime:
    runtime = Runtime.for_model(random_model(config), seed=3, **options)
    g = torch.Generator().manual_seed(1)
    for rank in (4, 8, 16):
        slot = runtime.store.allocate(rank, 2.0)
        factors = [
            (torch.randn(rank, s.in_features, generator=g) * 0.1, torch.randn(s.out_features, rank, generator=g) * 0.1)
            for s in runtime.store.layers
        ]
        runtime.store.load_adapter(slot, factors)
    return runtime


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).tolist()


def requests(samples: int = 3, temperature: float = 1.0) -> list[GenerationRequest]:
    settings = SamplingSettings(max_new_tokens=12, temperature=temperature)
    return [
        GenerationRequest(slot, prompt(p, 5 + 3 * p), samples, settings, key=(0 if slot is None else slot + 1, p))
        for slot in (0, 1, 2, None)
        for p in range(4)
    ]


def full_logits(runtime: Runtime, slot: int | None, ids: list[int]) -> torch.Tensor:
    """Plain forward pass without cache, chunking or batching, with the adapter merged by hand."""
    model = random_model(copy.deepcopy(runtime.base.model.config))
    model.set_attn_implementation("eager")
    if slot is not None:
        for shape, (a, b) in zip(runtime.store.layers, runtime.store.adapter(slot)):
            model.get_submodule(shape.name).weight.data += runtime.store.scaling[slot] * (b @ a)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("config", [qwen2(), llama()], ids=["qwen2", "llama"])
def test_greedy_tokens_and_logprobs_are_those_of_the_merged_model(config: object) -> None:
    runtime = make_runtime(config)
    asked = requests(samples=1, temperature=0.0)
    for request, (completion,) in zip(asked, runtime.engine.generate(asked)):
        ids = list(request.prompt_ids)
        for token, logp in zip(completion.token_ids, completion.logprobs):
            logits = full_logits(runtime, request.slot, ids)[-1]
            best = logits.topk(2)
            if best.values[0] - best.values[1] > 1e-3:  # rounding may decide a tie either way
                assert token == int(best.indices[0])
            assert logp == pytest.approx(float(torch.log_softmax(logits, -1)[token]), abs=2e-4)
            ids.append(token)
        stopped = completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == 12


def sizes(*without: str, **more: object) -> dict[str, object]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    known = {name: getattr(qwen2(), name) for name in (*names, "num_key_value_heads", "max_position_embeddings")}
    return {name: value for name, value in {**known, **more}.items() if name not in without}


def greedy(runtime: Runtime, lengths: tuple[int, ...], tokens: int) -> float:
    """Return how far log-probs of greedy completions are from those of plain forwards; checks the tokens."""
    settings = SamplingSettings(tokens, temperature=0.0)
    asked = [GenerationRequest(slot, prompt(n, n), 1, settings) for slot, n in zip((0, 1, None), lengths)]
    apart = 0.0
    for request, (completion,) in zip(asked, runtime.engine.generate(asked)):
        ids = [*request.prompt_ids, *completion.token_ids]
        logits = full_logits(runtime, request.slot, ids)[len(request.prompt_ids) - 1 : -1]
        said = torch.tensor(completion.token_ids)
        best = logits.topk(2).values
        assert torch.equal(logits.argmax(-1)[best[:, 0] - best[:, 1] > 1e-3], said[best[:, 0] - best[:, 1] > 1e-3])
        expected = torch.log_softmax(logits, -1).gather(1, said[:, None])[:, 0]
        apart = max(apart, float((expected - torch.tensor(completion.logprobs)).abs().max()))
    return apart


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [MistralConfig, Phi3Config])
def test_windows_of_every_layer_hold_in_decoding_too(kind: type, attention: str) -> None:
    """Rows grow beyond the window; one prompt is longer than it."""
    config = kind(**sizes(sliding_window=8, pad_token_id=0, eos_token_id=None))
    runtime = make_runtime(config, options=SharedOptions(attn_implementation=attention))
    assert runtime.base.context_length == 128
    assert greedy(runtime, (5, 12, 3), 30) < 2e-4


SOME = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 16}
OF_SOME_LAYERS = {
    "windows": Gemma3TextConfig(**sizes(**SOME)),
    "windows and soft caps": Gemma2Config(**sizes(attn_logit_softcapping=2.0, **SOME)),
    "windows and sinks": GptOssConfig(**sizes(num_local_experts=4, num_experts_per_tok=2, **SOME)),
    "chunks": Llama4TextConfig(
        **sizes(head_dim=16, attention_chunk_size=8, layer_types=["chunked_attention", "full_attention"]),
        intermediate_size_mlp=128,
        num_local_experts=2,
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", OF_SOME_LAYERS)
def test_windows_of_some_layers_hold_and_are_not_the_context(name: str, attention: str) -> None:
    """Rows grow over the edges of windows and chunks; one prompt is longer than them, of one nothing stays in sight."""
    options = SharedOptions(attn_implementation=None if attention == "sdpa" else "eager")
    runtime = make_runtime(OF_SOME_LAYERS[name], options=options)
    assert runtime.base.context_length == 128
    assert runtime.base.flattens == (attention == "sdpa" and name in ("windows", "chunks"))
    assert greedy(runtime, (5, 12, 3), 30) < 2e-4


@pytest.mark.parametrize("name", ["windows", "chunks"])
def test_beyond_windows_an_agent_has_the_bits_that_it_has_alone(name: str) -> None:
    runtime = make_runtime(OF_SOME_LAYERS[name])
    settings = SamplingSettings(20)
    asked = [GenerationRequest(slot, prompt(n, n), 2, settings, key=(n,)) for slot, n in ((0, 3), (1, 12), (None, 21))]
    together = runtime.engine.generate(asked)
    assert [runtime.engine.generate([request])[0] for request in asked] == together


def test_sdpa_is_refused_where_it_leaves_out_a_soft_cap() -> None:
    with pytest.raises(ConfigError, match="leaves out a part of the attention of Gemma2ForCausalLM"):
        make_runtime(OF_SOME_LAYERS["windows and soft caps"], options=SharedOptions(attn_implementation="sdpa"))


@pytest.mark.parametrize("room", [10, 60])
def test_rows_end_where_a_longer_one_would_be_rotated_otherwise(room: int) -> None:
    """LongRoPE rotates all tokens of a row in another way if it is longer than the original context."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0, 8.0, 3.0, 9.0, 20.0, 7.0, 2.0, 5.0]}
    more = {"original_max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": None}
    runtime = make_runtime(Phi3Config(**sizes(rope_parameters=rope, **more)))
    assert runtime.base.context_length == 32
    assert greedy(runtime, (5, 12, 3), room) < 2e-4
    with pytest.raises(EngineError, match="the context holds 32"):
        greedy(runtime, (40,), 3)


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    "config",
    [DiffLlamaConfig(**sizes()), DeepseekV3Config(**sizes(num_key_value_heads=4, **LATENT, **EXPERTS))],
    ids=["other values than those of the cache", "keys made of what the cache holds"],
)
def test_attention_to_other_than_the_cache_is_left_to_the_model(config: object) -> None:
    runtime = make_runtime(config)
    assert not runtime.base.flattens
    assert greedy(runtime, (5, 12, 3), 12) < 2e-4


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            GPTNeoConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                window_size=16,
            ),
            "differ by",
        ),
        (BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4), ""),
        (MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8), "keep a state"),
    ],
    ids=["windows of its own", "positions from the mask", "no attention"],
)
def test_a_base_that_cannot_be_decoded_is_refused_when_it_is_loaded(config: object, reason: str) -> None:
    with pytest.raises(
        EngineError, match=f"{type(config).__name__.removesuffix('Config')}ForCausalLM cannot .*{reason}"
    ):
        make_runtime(config)


@pytest.mark.parametrize("layout", ["reversed", "one at a time", "two rows in flight", "small units", "twins"])
def test_layout_changes_no_token(runtime: Runtime, layout: str) -> None:
    asked = requests()
    expected = runtime.engine.generate(asked)
    engine = runtime.engine
    if layout == "reversed":
        found = engine.generate(asked[::-1])[::-1]
    elif layout == "one at a time":
        found = [engine.generate([r])[0] for r in asked]
    elif layout == "twins":
        found = engine.generate([*asked, *asked])[: len(asked)]
    else:
        rows, unit = (2, 256) if layout == "two rows in flight" else (1024, 5)
        engine = type(engine)(runtime.base, runtime.store, seed=3, max_rows=rows, unit_rows=unit)
        found = engine.generate(asked)
    for a, b in zip(expected, found):
        assert [c.token_ids for c in a] == [c.token_ids for c in b]
        assert [c.finish_reason for c in a] == [c.finish_reason for c in b]


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (8, 2), (4, 1), (6, 2)])
def test_an_agent_alone_gets_the_same_log_probs_to_the_bit(heads: int, shared: int) -> None:
    runtime = make_runtime(qwen2(num_attention_heads=heads, num_key_value_heads=shared, head_dim=16))
    asked = requests(samples=5)
    together = runtime.engine.generate(asked)
    for slot in (0, 1, 2, None):
        own = [r for r in asked if r.slot == slot]
        alone = runtime.engine.generate(own)
        both = [c for r, c in zip(asked, together) if r.slot == slot]
        assert [[c.logprobs for c in g] for g in alone] == [[c.logprobs for c in g] for g in both]


def sharing_off(runtime: Runtime) -> Runtime:
    """Let every row have its keys and values in one piece, as with bases of which we do not compute attention."""
    runtime.base.flattens = False
    return runtime


@pytest.mark.parametrize(("heads", "shared", "tokens"), [(4, 4, 12), (4, 1, 12), (4, 2, 75)])
def test_a_prompt_shared_by_its_rows_gives_what_copies_of_it_do(heads: int, shared: int, tokens: int) -> None:
    config = qwen2(num_attention_heads=heads, num_key_value_heads=shared, eos_token_id=EOS if tokens == 12 else None)
    runtimes = [make_runtime(config) for _ in range(2)]
    asked = [replace(r, sampling=SamplingSettings(tokens)) for r in requests()]
    found, expected = (runtime.engine.generate(asked) for runtime in (runtimes[0], sharing_off(runtimes[1])))
    for a, b in zip(found, expected):
        assert [c.token_ids for c in a] == [c.token_ids for c in b]
        assert [c.finish_reason for c in a] == [c.finish_reason for c in b]
        assert [c.logprobs for c in a] == [pytest.approx(c.logprobs, abs=1e-5) for c in b]


def test_prompts_are_prefilled_as_memory_allows(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    """However they are cut, an agent's rows are those that it has alone, to the bit."""
    start = [5, 9, 3, 7, 11, 2, 8, 6, 4, 12]
    asked = [
        replace(r, prompt_ids=[*start, k + 2, *r.prompt_ids], key=(*r.key, k))
        for k in range(6)
        for r in requests(samples=2)
    ]
    prefills: list[list[int]] = []
    compute = torch_engine._Decoder._prompts

    def counted(decoder: torch_engine._Decoder, numbers: Any, slots: Any, per_unit: Any, line: Any) -> Any:
        hidden, places = compute(decoder, numbers, slots, per_unit, line)
        prefills.append([len(hidden), len(numbers)])
        return hidden, places

    monkeypatch.setattr(torch_engine._Decoder, "_prompts", counted)
    expected = runtime.engine.generate(asked)
    assert [prompts for _, prompts in prefills] == [72, 24]  # of agents, and of the base
    for most in (1000, 150, 64, 1):
        prefills.clear()
        engine = TorchEngine(runtime.base, runtime.store, seed=3)
        engine.prefill_tokens = most
        for slot in (0, None):
            together = [group for r, group in zip(asked, engine.generate(asked)) if r.slot == slot]
            alone = engine.generate([r for r in asked if r.slot == slot])
            assert [[c.logprobs for c in g] for g in together] == [[c.logprobs for c in g] for g in alone]
            for group, before in zip(together, (group for r, group in zip(asked, expected) if r.slot == slot)):
                for c, other in zip(group, before):
                    assert c.token_ids == other.token_ids
                    assert c.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        # Each agent's line is padded.
        assert all(tokens <= most + 3 * CPU_ROWS or prompts == 1 for tokens, prompts in prefills)
        assert sum(prompts for _, prompts in prefills) == 2 * 96 + 2 * 24


@pytest.mark.parametrize("flat", [True, False])
def test_waiting_rows_enter_as_others_leave(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, flat: bool) -> None:
    """An agent's rows are those that it has alone, to the bit, at whatever time they enter."""
    runtime = runtime if flat else sharing_off(runtime)
    asked = [replace(r, key=(*r.key, k)) for k in range(4) for r in requests(samples=2)]
    alone = [runtime.engine.generate([r for r in asked if r.slot == slot]) for slot in (0, 1, 2, None)]
    blocks: list[list[int]] = []
    step = torch_engine._Decoder._step

    def counted(decoder: torch_engine._Decoder) -> None:
        blocks.append([len(block) for block in decoder.blocks])
        step(decoder)

    monkeypatch.setattr(torch_engine._Decoder, "_step", counted)
    engine = TorchEngine(runtime.base, runtime.store, seed=3, max_rows=64)
    together = engine.generate(asked)
    for slot, expected in zip((0, 1, 2, None), alone):
        found = [group for request, group in zip(asked, together) if request.slot == slot]
        assert [[c.token_ids for c in g] for g in found] == [[c.token_ids for c in g] for g in expected]
        assert [[c.logprobs for c in g] for g in found] == [[c.logprobs for c in g] for g in expected]
    assert max(sum(counts) for counts in blocks) <= 64
    assert any(len(counts) > 1 for counts in blocks) == flat


def test_looking_seldom_changes_nothing(runtime: Runtime) -> None:
    asked = [replace(r, sampling=replace(r.sampling, repetition_penalty=1.3)) for r in requests()]
    expected = runtime.engine.generate(asked)
    engine = TorchEngine(runtime.base, runtime.store, seed=3)
    for engine.read_every in (3, 8, 100):
        for a, b in zip(expected, engine.generate(asked)):
            assert [(c.token_ids, c.finish_reason) for c in a] == [(c.token_ids, c.finish_reason) for c in b]


def test_looking_seldom_ends_rows_at_the_end_of_the_context() -> None:
    runtime = make_runtime(qwen2(max_position_embeddings=16, eos_token_id=None))
    runtime.engine.read_every = 8
    short, long = (GenerationRequest(0, prompt(1, n), 2, SamplingSettings(40), key=(n,)) for n in (3, 14))
    found = runtime.engine.generate([short, long])
    assert [(len(c.token_ids), c.finish_reason) for c in (*found[0], *found[1])] == [(13, "context")] * 2 + [
        (2, "context")
    ] * 2


def test_samples_follow_the_distribution(runtime: Runtime) -> None:
    settings = SamplingSettings(max_new_tokens=1, temperature=1.3)
    ids = prompt(9, 6)
    (group,) = runtime.engine.generate([GenerationRequest(1, ids, 4000, settings)])
    counts = np.bincount([c.token_ids[0] for c in group], minlength=VOCABULARY)
    expected = torch.softmax(full_logits(runtime, 1, ids)[-1].double() / 1.3, -1).numpy() * 4000
    kept = expected > 5
    # Chi-square with k degrees of freedom has mean k and variance 2k; five standard deviations never happen.
    statistic = float((((counts - expected) ** 2) / expected)[kept].sum())
    assert abs(statistic - kept.sum()) < 5 * (2 * kept.sum()) ** 0.5
    logp = torch.log_softmax(full_logits(runtime, 1, ids)[-1] / 1.3, -1)
    for completion in group[:20]:
        assert completion.logprobs[0] == pytest.approx(float(logp[completion.token_ids[0]]), abs=1e-4)


def test_streams_are_keyed_by_purpose_and_key(runtime: Runtime) -> None:
    settings = SamplingSettings(max_new_tokens=8)

    def tokens(**changes: object) -> list[list[int]]:
        request = GenerationRequest(0, prompt(1, 6), 4, settings, **changes)  # type: ignore[arg-type]
        return [c.token_ids for c in runtime.engine.generate([request])[0]]

    assert tokens(key=(1,)) == tokens(key=(1,))
    assert tokens(key=(1,)) != tokens(key=(2,))
    assert tokens(key=(1,)) != tokens(key=(1,), purpose="exam")
    samples = tokens(key=(1,))
    assert len({tuple(s) for s in samples}) > 1


def test_a_nan_adapter_ends_its_own_rows_only(runtime: Runtime) -> None:
    healthy = make_runtime()
    sick = make_runtime()
    sick.store.theta[1].fill_(float("nan"))
    asked = requests()
    for request, a, b in zip(asked, healthy.engine.generate(asked), sick.engine.generate(asked)):
        if request.slot == 1:
            assert all(c.finish_reason == "error" for c in b)
        else:
            assert [(c.token_ids, c.logprobs) for c in a] == [(c.token_ids, c.logprobs) for c in b]


def test_context_limit_ends_a_completion_and_an_overlong_prompt_is_refused() -> None:
    runtime = make_runtime(qwen2(max_position_embeddings=16, eos_token_id=None))
    settings = SamplingSettings(max_new_tokens=12)
    (group,) = runtime.engine.generate([GenerationRequest(0, prompt(0, 10), 2, settings)])
    assert {c.finish_reason for c in group} == {"context"}
    assert {len(c.token_ids) for c in group} == {6}
    with pytest.raises(EngineError, match=r"16 tokens .*holds 16"):
        runtime.engine.generate([GenerationRequest(0, prompt(0, 16), 1, settings)])
    with pytest.raises(EngineError, match="prompt of 0 tokens"):
        runtime.engine.generate([GenerationRequest(0, [], 1, settings)])


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most max_new_tokens=.* for min_new_tokens"):
        SamplingSettings(12, min_new_tokens=20)


LOGITS = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))


def drawn(uniform: float, **changes: object) -> int:
    settings = RowSettings.of([SamplingSettings(max_new_tokens=8, **changes)], torch.device("cpu"))  # type: ignore[arg-type]
    seen = torch.tensor([[True, False, False, False]])
    token, _ = draw(LOGITS, torch.tensor([uniform], dtype=torch.float64), settings, eos=torch.tensor([3]), seen=seen)
    return int(token)


@pytest.mark.parametrize(
    ("uniform", "changes", "token"),
    [
        (0.0, {}, 0),
        (0.39, {}, 0),
        (0.41, {}, 1),
        (0.95, {}, 3),
        (1 - 1e-12, {}, 3),
        (0.95, {"top_k": 2}, 1),  # 0.95 of .4/.7, .3/.7
        (0.5, {"top_k": 1}, 0),
        (0.99, {"top_p": 0.75}, 2),  # .4 + .3 < .75, so the third stays, the fourth goes
        (0.99, {"top_p": 0.6}, 1),
        (0.99, {"top_p": 0.01}, 0),  # the most likely token always stays
        (0.99, {"min_p": 0.6}, 1),  # .3 >= .6 * .4 > .2
        (0.99, {"min_new_tokens": 1}, 2),  # the end token 3 is blocked
        (0.35, {"repetition_penalty": 2.0}, 1),  # log .4 doubled is log .16: .16/.76 = .21
    ],
)
def test_truncations_keep_the_support_they_promise(uniform: float, changes: dict, token: int) -> None:
    assert drawn(uniform, **changes) == token


def test_a_row_without_truncation_draws_the_same_beside_one_with_it() -> None:
    """The rare token comes first, so the smallest number draws it."""
    plain, cut = SamplingSettings(1), SamplingSettings(1, top_p=0.9)
    logits, uniforms = torch.tensor([[0.0, 60.0], [0.0, 60.0]]), torch.zeros(2, dtype=torch.float64)
    alone, _ = draw(logits[:1], uniforms[:1], RowSettings.of([plain], torch.device("cpu")))
    both, _ = draw(logits, uniforms, RowSettings.of([plain, cut], torch.device("cpu")))
    assert alone.tolist() == [0]
    assert both.tolist() == [0, 1]


def test_log_probs_of_a_truncated_draw_are_over_the_whole_vocabulary() -> None:
    settings = RowSettings.of([SamplingSettings(max_new_tokens=8, top_k=1)], torch.device("cpu"))
    _, logp = draw(LOGITS, torch.tensor([0.5], dtype=torch.float64), settings)
    assert float(logp) == pytest.approx(np.log(0.4), abs=1e-6)
