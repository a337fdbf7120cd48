"""What vLLM is asked, what its answers mean, and which version of an adapter it is given: no vLLM needed."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agilerl.config.vllm import VLLMConfig, lora_capacity
from agilerl.errors import ConfigError, EngineError
from agilerl.models.adapters import lora_scaling, read_adapter
from agilerl.models.operators import resize
from agilerl.models.slots import AdamWSettings, adamw_step
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.vllm.backend import Generated, SampleRequest, completion_of, request_seed, row_of
from agilerl.rollouts.vllm.engine import AdapterVersions, OffloadedBase
from agilerl.runtime import Runtime
from tests.models.perturbed import perturb
from tests.tiny_models import random_model

REQUEST = GenerationRequest(0, [5, 6, 7], 2, SamplingSettings(max_new_tokens=8, temperature=0.7), key=(1, 2, 3))


def make_runtime(slots: int = 2, rank: int = 4) -> Runtime:
    runtime = Runtime.for_model(random_model(), seed=3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(slots):
        slot = runtime.store.allocate(rank, 2.0)
        runtime.store.load_adapter(slot, random_factors(runtime, rank, generator))
    return runtime


def random_factors(
    runtime: Runtime, rank: int, generator: torch.Generator, size: float = 0.1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (
            torch.randn(rank, layer.in_features, generator=generator) * size,
            torch.randn(layer.out_features, rank, generator=generator) * size,
        )
        for layer in runtime.store.layers
    ]


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"max_num_seq": 4}, "did you mean 'max_num_seqs'"),
        ({"max_lora_rank": 1024}, r"max_lora_rank=1024 .*512"),
        ({"base_url": "localhost:8000"}, "expected the address of a server"),
        ({"base_url": "http://localhost:99999"}, "expected the address of a server"),
        ({"base_url": "http://local host:8000"}, "expected the address of a server"),
        ({"base_url": "http://me:secret@localhost:8000"}, "VLLM_API_KEY"),
        ({"base_url": "http://localhost:8000", "max_lora_rank": 32}, "vllm serve --max-lora-rank"),
        ({"base_url": "http://localhost:8000", "strip_multimodal_towers": True}, "vllm serve --language-model-only"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_wrong_settings_are_sentences(settings: dict[str, object], found: str) -> None:
    with pytest.raises(ConfigError, match=found.replace("(", r"\(")) as error:
        VLLMConfig(**settings)
    assert "secret" not in str(error.value)


def test_a_resolved_copy_means_the_same() -> None:
    config = VLLMConfig(base_url="http://localhost:8000/v1/", server_timeout=5)
    assert config.base_url == "http://localhost:8000"
    assert VLLMConfig(**config.model_dump(mode="json")) == config


def test_ranks_are_rounded_up_to_what_vllm_reserves() -> None:
    assert [lora_capacity(rank) for rank in (1, 8, 9, 64, 65, 300, 512)] == [8, 8, 16, 64, 128, 320, 512]
    with pytest.raises(ConfigError, match="512, found rank 513"):
        lora_capacity(513)


# -- rows and answers -------------------------------------------------------------------------------------------------


def test_a_row_says_all_that_decides_a_sample() -> None:
    settings = SamplingSettings(9, 0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, min_new_tokens=3)
    request = GenerationRequest(None, (5, 6), 1, settings)
    config = VLLMConfig(stop_sequences=["</a>"], presence_penalty=0.5, frequency_penalty=0.25)
    row = row_of(request, 11, adapter=None, room=100, eos=(1, 4), config=config)
    assert row.prompt_ids == [5, 6]
    assert not row.cut_by_context
    assert row.sampling == {
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 11,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [1, 4],
        "stop": ["</a>"],
    }


def test_seeds_belong_to_purpose_key_and_sample() -> None:
    other = GenerationRequest(5, [9], 9, SamplingSettings(1), key=(1, 2, 3))
    exam = GenerationRequest(0, [5], 2, SamplingSettings(1), purpose="exam", key=(1, 2, 3))
    assert request_seed(3, REQUEST, 0) == request_seed(3, other, 0)
    seeds = {request_seed(3, REQUEST, 0), request_seed(3, REQUEST, 1), request_seed(3, exam, 0)}
    seeds.add(request_seed(4, REQUEST, 0))
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("room", "asked", "ended"), [(100, 8, "length"), (4, 4, "context")])
def test_a_limit_is_the_request_s_or_the_context_s(room: int, asked: int, ended: str) -> None:
    row = row_of(REQUEST, 0, adapter=None, room=room, eos=(), config=VLLMConfig())
    assert row.sampling["max_tokens"] == asked
    assert completion_of(Generated([7] * asked, [-0.5] * asked, "length"), row).finish_reason == ended


@pytest.mark.parametrize(
    ("tokens", "reason", "fault"),
    [
        ([7, 1, 9], "length", "1 tokens behind the end token 1"),
        ([7, 1, 9, 1], "stop", "2 tokens behind the end token 1"),
        ([1, 1], "stop", "1 tokens behind the end token 1"),
        ([7, 9], "stop", "one that says it has ended, without one of the end tokens [1, 2]"),
        ([], "stop", "one that says it has ended"),
    ],
)
def test_an_answer_that_does_not_end_as_asked_is_refused(tokens: list[int], reason: str, fault: str) -> None:
    row = SampleRequest([1], {"stop_token_ids": [1, 2]}, None)
    with pytest.raises(EngineError, match=re.escape(fault)):
        completion_of(Generated(tokens, [-0.5] * len(tokens), reason), row)


def test_answers_become_completions() -> None:
    row = SampleRequest([1], {"stop_token_ids": [1]}, None)
    assert completion_of(Generated([7, 1], [-0.5, -0.1], "stop"), row).finish_reason == "stop"
    assert completion_of(Generated([7], [-0.5], "abort"), row).finish_reason == "error"
    texts = SampleRequest([1], {"stop_token_ids": [1], "stop": ["x"]}, None)
    assert completion_of(Generated([7], [-0.5], "stop"), texts).finish_reason == "stop"
    broken = completion_of(Generated([7, 8, 1], [-0.5, math.nan, -0.1], "stop"), row)
    assert (broken.token_ids, broken.finish_reason) == ([7, 8], "error")


# -- versions of adapters ---------------------------------------------------------------------------------------------


@pytest.fixture
def runtime() -> Runtime:
    return make_runtime()


def versions_of(runtime: Runtime, folder: str | None = None) -> AdapterVersions:
    return AdapterVersions(runtime.store, runtime.lora_config, "base", folder)


def step(runtime: Runtime) -> None:
    runtime.store.grad[0].fill_(1.0)
    settings = AdamWSettings(lr=1e-6, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
    adamw_step(runtime.store, [0], [settings], [True])


def reload(runtime: Runtime) -> None:
    factors = runtime.store.adapter(0)
    factors[0][1][0, 0] += 1e-6
    runtime.store.load_adapter(0, factors)


CHANGES: dict[str, Callable[[Runtime], object]] = {
    "an optimizer step": step,
    "loaded weights": reload,
    "noise": lambda runtime: perturb(runtime.store, 0, 0.01, 3, (0,)),
    "another rank": lambda runtime: resize(runtime.store, 0, 8, 3),
    "a new agent in the slot": lambda runtime: (runtime.store.release(0), runtime.store.allocate(4, 2.0)),
    "another scale": lambda runtime: runtime.store.set_rank(0, 4, 1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_an_adapter_gives_it_a_new_name_and_number(
    runtime: Runtime, change: Callable[[Runtime], object]
) -> None:
    versions = versions_of(runtime)
    before = versions.current([0, 1])
    assert versions.current([0, 1]) == before
    change(runtime)
    after = versions.current([0, 1])
    assert after[1] == before[1]
    assert after[0].name != before[0].name
    assert after[0].number > max(v.number for v in before.values())
    assert after[0].folder != before[0].folder


def test_a_version_is_the_adapter_itself(runtime: Runtime) -> None:
    resize(runtime.store, 1, 8, 3)
    versions = versions_of(runtime)
    for slot, version in versions.current([0, 1]).items():
        factors, config = read_adapter(version.folder, runtime.store.layers)
        assert config.r == version.rank == runtime.store.ranks[slot]
        assert lora_scaling(config) == float(runtime.store.scaling[slot])
        for (a, b), (own_a, own_b) in zip(factors, runtime.store.adapter(slot)):
            assert torch.equal(a, own_a)
            assert torch.equal(b, own_b)


def test_equal_adapters_are_one_version_until_they_differ(runtime: Runtime) -> None:
    runtime.store.load_adapter(1, runtime.store.adapter(0))
    versions = versions_of(runtime)
    assert len({v.number for v in versions.current([0, 1]).values()}) == 1
    step(runtime)
    assert len({v.number for v in versions.current([0, 1]).values()}) == 2


def test_old_versions_leave_no_files_and_their_numbers_never_return(runtime: Runtime) -> None:
    versions = versions_of(runtime)
    original, seen = runtime.store.adapter(0), []
    for _ in range(4):
        seen.append(versions.current([0])[0])
        versions.outdated(keep=1)
        step(runtime)
    runtime.store.load_adapter(0, original)
    again = versions.current([0])[0]
    assert again.number not in [v.number for v in seen]
    assert [gone.number for gone in versions.outdated(keep=1)] == [seen[-1].number]
    assert [path.name for path in versions.folder.iterdir()] == [str(again.number)]
    versions.close()
    assert not versions.folder.exists()


def test_a_staging_folder_of_one_s_own_is_kept(runtime: Runtime, tmp_path: Path) -> None:
    versions = versions_of(runtime, str(tmp_path / "staging"))
    (version,) = versions.current([0]).values()
    assert version.folder.parent.parent == tmp_path / "staging"
    versions.close()
    assert list((tmp_path / "staging").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"lora_staging_dir=.* cannot be used"):
        versions_of(runtime, str(tmp_path / "file"))


def test_a_full_disk_is_a_sentence(runtime: Runtime, tmp_path: Path) -> None:
    versions = versions_of(runtime, str(tmp_path))
    versions.folder.rmdir()
    versions.folder.write_text("")  # no folder can be made inside a file
    with pytest.raises(EngineError, match="could not be written"):
        versions.current([0])


# -- the base out of the way ------------------------------------------------------------------------------------------


def test_the_base_comes_back_bit_for_bit_and_keeps_its_ties() -> None:
    model = random_model()
    ids = torch.arange(2, 10)[None]
    with torch.no_grad():
        before = model(ids).logits
    offloaded = OffloadedBase(model)
    for _ in range(2):
        with offloaded.away():
            away = {name: p.data_ptr() for name, p in model.named_parameters()}
            assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert all(p.data_ptr() != away[name] for name, p in model.named_parameters())
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        with torch.no_grad():
            assert torch.equal(model(ids).logits, before)
