"""What is refused of vLLM before anything is trained: too little context, layouts that cannot start."""

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.config.vllm import VLLMConfig
from agilerl.errors import ConfigError
from agilerl.rollouts.vllm import colocated
from agilerl.training.resolved import resolve
from agilerl.training.sampling import check_room, check_sampling
from agilerl.training.setup import build
from tests.training.small_runs import SMALL


def config(*overrides: str) -> RunConfig:
    return load_manifest(None, [*SMALL, *overrides])


@pytest.mark.model
def test_a_context_that_would_cut_completions_is_refused_with_both_numbers() -> None:
    population = build(config("algorithm.max_output_tokens=9", "training.eval_max_new_tokens=7")).population
    exam = max(max(population.examiner.lengths(split).prompts) for split in ("exam", "test"))
    task, tokenizer, limit = population.task, population.tokenizer, population.examiner.context_length
    train = max(len(task.place_at("train", k, tokenizer, limit).prompt_ids) for k in range(256))
    need = max(exam + 7, train + 9)
    check_room(population, VLLMConfig(), need)
    with pytest.raises(ConfigError, match=rf"{need - 1} tokens .*together {need};"):
        check_room(population, VLLMConfig(), need - 1)
    with pytest.raises(ConfigError, match="--max-model-len"):
        check_room(population, VLLMConfig(base_url="http://localhost:1"), need - 1)

    population.examiner.eval_max_new_tokens = 100
    with pytest.raises(ConfigError, match=f"100 tokens, together {exam + 100};"):
        check_room(population, VLLMConfig(), need)
    check_room(population, VLLMConfig(exams="torch"), train + 9)  # exams are not sampled by vLLM then


@pytest.mark.model
@pytest.mark.parametrize("where", ["", ", base_url: 'http://localhost:1'"])
def test_settings_are_refused_before_vllm_is_started(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is neither a vLLM nor a server: a start would be another error.
    monkeypatch.setattr(colocated, "installed_vllm", lambda: ("vllm", "0.32.0"))
    settings = f"network.vllm_config={{max_model_len: 12{where}}}"
    with pytest.raises(ConfigError, match=r"12 tokens \(max_model_len\)"):
        build(config("network.use_vllm=true", settings))


def test_no_process_of_several_spreads_its_vllm_over_the_others_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "installed_vllm", lambda: ("vllm", "0.32.0"))
    wanted = config("network.use_vllm=true", "network.vllm_config={tensor_parallel_size: 2}")
    wanted = wanted.model_copy(update={"training": wanted.training.model_copy(update={"device": "cuda"})})
    check_sampling(wanted, resolve(wanted).options)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 in 2 processes"):
        check_sampling(wanted, resolve(wanted).options, processes=2)
