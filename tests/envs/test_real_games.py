"""The games of tutorials/manifests/real, and the page of what runs on a real model have reached."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.envs.episode_task import EpisodeTask
from agilerl.models.base import load_tokenizer
from agilerl.training.tasks import task
from benchmarking.real import MANIFEST, MARK, RUNS, arguments, table
from tutorials.tools.calculator import calculated

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def games() -> ModuleType:
    spec = spec_from_file_location("games", MANIFEST.parent / "games.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(6))
def test_halving_the_range_that_is_named_wins(games: ModuleType, seed: int) -> None:
    env = games.Guess(max_number=9)
    messages, _ = env.reset(seed=seed)
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    told, reward, over = messages[-1]["content"], 0.0, False
    while not over:
        low, high = (int(number) for number in told.split("Guess a number from ")[1].split(". ")[0].split(" to "))
        told, reward, over, _, _ = env.step(f" {(low + high) // 2}.")
    assert reward == 1.0


def test_what_is_no_guess_costs_a_turn(games: ModuleType) -> None:
    env = games.Guess(max_number=9)
    env.reset(seed=0)
    for _ in range(3):
        told, reward, over, _, _ = env.step("I think")
        assert (reward, over) == (0.0, False)
        assert told.startswith("That is not a number from the range. Guess a number from 1 to 9.")
    assert env.step("0")[:3] == ("That is not a number from the range.", 0.0, True)


def test_a_sum_is_computed_with_the_calculator() -> None:
    env = calculated(min_terms=2, max_terms=2, min_digits=2, max_digits=2)
    env.bind(load_tokenizer("embedded"))
    messages, _ = env.reset(seed=3)
    assert [message["content"] for message in messages[1:4]] == ["calc(12 + 34)", "46", "46"]
    assert "12 + 34" in messages[0]["content"]
    expression = messages[-1]["content"].split(": ")[1].removesuffix(" =")
    result, reward, over, _, info = env.step(f"calc({expression})")
    assert (reward, over, info["tool_calls"]) == (0.0, False, 1)
    text = result if isinstance(result, str) else result[0]["content"]
    assert env.step(text)[1:3] == (1.0, True)


@pytest.mark.parametrize("name", RUNS)
def test_each_row_is_a_manifest(name: str) -> None:
    given = arguments(name, 42, "build/smollm2")
    config = load_manifest(MANIFEST, [value for value in given if "=" in value])
    game = config.environment.env_type == "multiturn"
    assert (config.training.max_steps, config.environment.test_prompts) == ((1024, 100) if game else (2048, 200))
    assert ("--allow-code" in given) == game
    if config.environment.env_id is not None:  # a row that no run can begin would be found hours later
        assert isinstance(task(config, allow_code=True), EpisodeTask)


def test_the_page_has_the_table_of_the_results() -> None:
    document = json.loads((ROOT / "benchmarking/results/real_smollm2.json").read_text())
    page = (ROOT / "docs/expected.md").read_text(encoding="utf-8")
    assert page.partition(MARK)[2].strip() == table(document).strip()
    assert all(row["command"].startswith("agilerl train tutorials/manifests/real/") for row in document["rows"])
