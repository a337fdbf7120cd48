"""What a dry run says of time, length and exam, from the loaded population."""

import json
from collections.abc import Sequence
from math import ceil, floor

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from agilerl.cli import forecast
from agilerl.cli.forecast import expected_seconds, questions_for, shape_of, smallest_difference, workload
from agilerl.config.manifest import load_manifest
from agilerl.hpo.fitness import Fitness, probability_better
from agilerl.planning.time import Machine
from agilerl.training.setup import Session, build
from tests.cli.outcome import Agilerl
from tests.models.two_agents import make_runtime


def session(*overrides: str) -> Session:
    return build(load_manifest(None, overrides))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU of known rates."""
    monkeypatch.setattr(forecast, "_measured", lambda *_: Machine(5e10, 1e10))


@pytest.mark.parametrize("difference", [0.2, 0.1, 0.05])
def test_an_exam_of_as_many_questions_as_said_sees_the_difference(difference: float) -> None:
    questions = questions_for(difference)
    assert smallest_difference(questions) <= difference < smallest_difference(questions - 1)
    # A panel on which half of the answers differ, by just so much: the exam's own comparison agrees.
    half, alike = questions // 2, [1.0] * (questions - questions // 2)
    sure = []
    for right in (floor(half / 2 + questions * difference / 2), ceil(half / 2 + questions * difference / 2)):
        first = [1.0] * right + [0.0] * (half - right)
        other = [1 - score for score in first]
        sure.append(probability_better(Fitness.from_scores(first + alike), Fitness.from_scores(other + alike)))
    assert sure[0] < 0.955
    assert sure[1] > 0.945


@pytest.mark.model
@pytest.mark.usefixtures("machine")
def test_the_time_of_the_default_run() -> None:
    once, twice = session(), session("training.max_steps=98304")
    assert expected_seconds(once, 10) == pytest.approx(197.44034072107493, rel=1e-12)
    assert 1.5 < (expected_seconds(twice, 10) or 0) / 197.4 < 2.1
    assert expected_seconds(session("training.max_tokens=200000"), 10) == pytest.approx(29.87838664051995, rel=1e-12)
    assert expected_seconds(session("training.max_seconds=1"), 10) == 1


FEW = "environment={task: 'reasoning_gym:gcd', params: {min_numbers: 2, max_numbers: 2, max_value: 15}}"
"""Questions that are too few for the default exam."""


@pytest.mark.model
@pytest.mark.filterwarnings("ignore:gcd has only")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("algorithm.micro_batch_size_per_gpu=9",), {"micro_tokens": 9 * 20, "common": 2, "row_multiple": 16}),
        (("algorithm.beta=0.01", "algorithm.update_epochs=2"), {"reference": True, "epochs": 2}),
        (("training.max_tokens_in_flight=512", "training.max_rows_in_flight=8"), {"max_tokens": 512, "max_rows": 8}),
        (("training.pop_size=3", "network.lora_config.r=4"), {"agents": 3, "rank": 4}),
    ],
)
def test_the_work_follows_the_settings(overrides: Sequence[str], expected: dict[str, object]) -> None:
    found = vars(workload(session(*overrides), 10))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.model
@pytest.mark.filterwarnings("ignore:gcd has only")
def test_a_small_task_is_asked_fewer_questions_than_the_settings_say() -> None:
    few = session("training.max_steps=2048", "training.pop_size=4", FEW)
    assert (
        workload(few, 10).exam_prompts
        == len(few.population.examiner.places("exam"))
        < workload(session(), 10).exam_prompts
    )


@pytest.mark.model
@pytest.mark.usefixtures("machine")
def test_the_time_of_episodes_is_not_known() -> None:
    game = "environment={env_type: multiturn, env_id: agilerl/GuessTheNumber-v0, eval_prompts: 2, test_prompts: 2}"
    assert expected_seconds(session(game), 10) is None


@pytest.mark.model
def test_quantised_bases_are_counted_as_they_lie_in_memory() -> None:
    plain, four, eight = (
        shape_of(session(*overrides).population.runtime)
        for overrides in ((), ("network.quantization_config=nf4",), ("network.quantization_config=int8",))
    )
    assert plain.linear == four.linear == eight.linear == 276_480
    assert plain.linear_bytes == 4 * 276_480
    assert 0.5 <= four.linear_bytes / four.linear < 0.6
    assert 1 <= eight.linear_bytes / eight.linear < 1.1
    rounded = shape_of(session("training.dtype=bfloat16").population.runtime)
    assert (rounded.width, rounded.linear_bytes) == (4, 2 * 276_480)


@pytest.mark.model
def test_a_token_passes_some_of_a_mixtures_experts() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    shape = shape_of(make_runtime(AutoModelForCausalLM.from_config(config)))
    experts = 2 * 8 * 3 * 32 * 16
    assert shape.linear_bytes / 4 - shape.linear == experts * 6 // 8


@pytest.mark.model
def test_a_dry_run_says_the_time_at_rates_that_it_measures(agilerl: Agilerl) -> None:
    text = " ".join(agilerl("train", "--dry-run", "environment.eval_prompts=12").output.split())
    assert "with 12 questions an exam can detect a difference in accuracy of 0.3 or more (95 %)" in text
    assert "(95 %); detecting 0.2 takes 32" in text
    assert "on this device, by rates measured just now; besides grading" in text
    found = json.loads(agilerl("train", "--dry-run", "--json").output)
    assert found["expected_seconds"] > 1
