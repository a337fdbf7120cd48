"""Runs that learn from data: manifests, a small run of each kind, an adapter to start from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import ALGORITHMS
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.envs import core
from agilerl.errors import CheckpointError, ConfigError, EnvError
from agilerl.runs.journal import read_lines
from agilerl.training.events import RunFinished
from agilerl.training.run import train
from agilerl.training.setup import Session, build, check

pytestmark = pytest.mark.model

MANIFESTS = sorted((Path(__file__).parent.parent / "tutorials" / "manifests").glob("*.yaml"))
NAMES = {name.lower() for name in ALGORITHMS}


def config(name: str, env_type: str, **sections: dict[str, Any]) -> RunConfig:
    """A run of two agents and two generations."""
    values: dict[str, dict[str, Any]] = {
        "algorithm": {"name": name, "lr": 3e-3, "batch_size": 8, "max_output_tokens": 8},
        "environment": {
            "env_type": env_type,
            "task": "reasoning_gym:spell_backward",
            "params": {"min_word_len": 3, "max_word_len": 4},
            "data_batch_size_per_gpu": 8,
            "eval_prompts": 8,
            "test_prompts": 8,
        },
        "training": {"pop_size": 2, "max_steps": 10**6, "evo_steps": 2, "max_seconds": 3600},
        "mutation": {"rl_hp_selection": {"lr": {"min": 1e-4, "max": 1e-2}}},
        "selection_strategy": {"name": "tournament"},
        "network": {"lora_config": {"r": 4, "lora_alpha": 8}},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return RunConfig.from_dict(values)


def run(session: Session, out: Path) -> dict[str, Any]:
    return [dict(e.summary) for e in train(session, out) if isinstance(e, RunFinished)][0]  # noqa: RUF015


def test_there_is_a_manifest_for_every_algorithm() -> None:
    assert {p.stem for p in MANIFESTS} >= NAMES


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_manifests_are_valid(path: Path) -> None:
    manifest = load_manifest(path)
    check(manifest)
    if path.stem in NAMES:
        assert manifest.algorithm["name"].lower() == path.stem
    assert f"agilerl train tutorials/manifests/{path.name}" in path.read_text()


@pytest.mark.parametrize(
    ("name", "env_type", "environment", "message"),
    [
        ("SFT", "reasoning", {}, r"algorithm.name='SFT' .* environment.env_type='sft', found 'reasoning'"),
        ("SFT", "preference", {}, "env_type='sft', found 'preference'"),
        ("DPO", "sft", {}, "env_type='preference', found 'sft'"),
        ("KTO", "preference", {}, "env_type='unpaired', found 'preference'"),
        ("GRPO", "sft", {}, "env_type='reasoning'.*, found 'sft'"),
        ("DPO", "preference", {"loss_on": "assistant"}, r"loss_on='assistant' .* env_type: sft, found preference"),
    ],
)
def test_algorithm_and_environment_must_fit(name: str, env_type: str, environment: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(name, env_type, environment=environment))


@pytest.mark.parametrize(
    ("name", "env_type", "rows"), [("SFT", "sft", 16), ("DPO", "preference", 32), ("KTO", "unpaired", 16)]
)
def test_a_small_run_from_data(tmp_path: Path, name: str, env_type: str, rows: int) -> None:
    session = build(config(name, env_type, training={"max_steps": rows * 4}))
    assert session.samples_per_iteration == rows
    summary = run(session, tmp_path / "run")
    assert summary["iterations"] == 4
    assert summary["tokens"]["generated"] == 0
    assert summary["tokens"]["trained"] > 0
    assert {"base", "elite", "median_first_generation"} <= set(summary["test"])
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == 8
    own = {
        "SFT": {"perplexity", "mean_token_accuracy"},
        "DPO": {"rewards/margins", "rewards/accuracies"},
        "KTO": {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "reference_point"},
    }[name]
    for line in lines:
        assert own | {"loss", "entropy", "grad_norm", "learning_rate", "num_tokens"} <= set(line)
        assert not {"reward", "reward_std", "frac_reward_zero_std", "kl"} & set(line)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert not list((tmp_path / "run" / "completions").glob("*.parquet"))
    assert "lacks the completions" not in (tmp_path / "run" / "report.html").read_text()


def test_preferences_are_right_against_the_demonstrators_mistakes() -> None:
    session = build(config("DPO", "preference"))
    kinds = set()
    for position in range(60):
        row = session.task.row("train", position)
        chosen, rejected = session.population.examples(position)
        assert (chosen.text, rejected.text) == (row["answer"], row["rejected"])
        assert session.task.reward(rejected.text, row) == 0.0
        mistakes = {chosen.text[:-1]: "short", chosen.text[::-1]: "forward"}
        kinds.add(mistakes.get(rejected.text, "other"))
    assert {"short", "forward"} <= kinds


def test_an_adapter_is_where_everybody_starts_and_what_they_are_compared_with(tmp_path: Path) -> None:
    first = run(build(config("SFT", "sft", training={"max_steps": 64})), tmp_path / "sft")
    elite = str(tmp_path / "sft" / "elite")
    session = build(config("DPO", "preference", network={"adapter": elite}, training={"max_steps": 32}))
    population = session.population
    assert population.evaluate("test")[0].mean == first["test"]["elite"]["mean"]
    metrics = population.learn(population.draw())
    assert all(values["rewards/margins"] == pytest.approx(0.0, abs=1e-6) for values in metrics.values())
    assert all(agent.reference_slot is not None for agent in population.agents)
    with torch.no_grad():
        assert not torch.equal(population.runtime.store.theta[0], population.runtime.store.theta[1])
    with pytest.raises(ConfigError, match=r"rank 4 and scale 2, .*rank 8 and scale 2"):
        build(config("DPO", "preference", network={"adapter": elite, "lora_config": {"r": 8, "lora_alpha": 16}}))
    with pytest.raises(CheckpointError, match="no PEFT adapter at"):
        build(config("SFT", "sft", network={"adapter": str(tmp_path / "nowhere")}))


def test_answers_that_do_not_fit_stop_the_run_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of this task, a row far away is a quarter of the time of a small run.
    monkeypatch.setattr(core, "_MOST_SKIPPED", 8)
    with pytest.raises(EnvError, match=r"none of 8 .*at most 9 tokens"):
        build(config("SFT", "sft", algorithm={"max_model_len": 9}))
