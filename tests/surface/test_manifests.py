"""Manifests in the form that AgileRL documents: mapped, or answered with one line that says why."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from agilerl.config.manifest import config_of, load_manifest
from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError
from agilerl.training.resolved import resolve
from agilerl.training.setup import build

pytestmark = pytest.mark.model

NETWORK: dict[str, Any] = {
    "pretrained_model_name_or_path": "embedded",
    "max_context_length": 96,
    "lora_config": {
        "lora_r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05,
        "task_type": "CAUSAL_LM",
    },
}  # fmt: skip
MUTATION: dict[str, Any] = {
    "mutation_sd": 0.1,
    "rand_seed": 42,
    "probabilities": {
        "no_mut": 0.1,
        "arch_mut": 0.0,
        "new_layer": 0.0,
        "params_mut": 0.0,
        "act_mut": 0.0,
        "rl_hp_mut": 0.6,
    },
    "rl_hp_selection": {"lr": {"min": 1e-7, "max": 1e-3}},
}
TOURNAMENT = {"tournament_size": 2, "elitism": True}
REASONING: dict[str, Any] = {
    "algorithm": {
        "name": "GRPO", "batch_size": 8, "beta": 0.001, "lr": 5e-6, "clip_coef": 0.2, "group_size": 2,
        "temperature": 0.9, "use_vllm": False, "calc_position_embeddings": True, "reduce_memory_peak": True,
        "quantization": "none", "chunk_rows": 128, "max_output_tokens": 8,
    },
    "environment": {
        "dataset": "rows.jsonl",
        "columns": {"nums": "question", "target": "answer"},
        "reward_file_path": "reward.py",
        "reward_fn_name": "combined",
        "prompt_template": {
            "assistant_2": "Let me see.", "user_1": "Make {answer} of {question}.", "system_0": "You count.",
        },
        "max_reward": 2.0,
        "train_test_split": 0.8,
        "eval_prompts": 4,
        "test_prompts": 4,
    },
    "training": {"max_steps": 64, "evo_steps": 5, "pop_size": 2, "eval_loop": 1, "evaluation_interval": 5},
    "mutation": MUTATION,
    "selection_strategy": TOURNAMENT,
    "network": NETWORK,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [
        {"nums": [n, n + 1], "target": 2 * n + 1, "prompt": f"{n}?", "chosen": str(n), "rejected": "no"}
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def combined(completion, answer, question):\n    return float(len(question))\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(manifest: dict[str, Any], place: Path) -> tuple[RunConfig, list[str]]:
    """Return the configuration of a manifest in a file, and what was said about it."""
    (place / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = load_manifest(place / "manifest.yaml")
    return config, [str(one.message) for one in said]


def test_a_reasoning_manifest_is_ready_to_run(place: Path) -> None:
    config, said = read(REASONING, place)
    assert said[0].startswith("algorithm.use_vllm is called network.use_vllm now")
    assert [one.partition(" ")[0] for one in said[1:]] == [
        "algorithm.reduce_memory_peak",
        "training.eval_loop",
        "environment.max_reward",
        "environment.train_test_split",
    ]
    assert all("no meaning here" in one for one in said[1:])
    session = build(config, allow_code=True)
    (agent, _) = session.population.agents
    assert (agent.rank, agent.context_length, agent.algo) == (8, 96, "GRPO")
    assert agent.lora_config.lora_dropout == 0.05
    assert session.resolved.options.fused_logprobs_chunk_rows == 128
    assert session.resolved.options.quantization_config is None
    place_ = session.population.examiner.places("exam")[0]
    messages = session.task.messages(place_.row)  # type: ignore[union-attr]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert f"of {place_.row['question']}." in messages[1]["content"]
    assert session.task.rewards(["x"], [place_.row]) == [2.0]  # type: ignore[union-attr]
    assert session.config.selection_strategy.strategy == "tournament"


def test_data_manifests_need_no_environment_type(place: Path) -> None:
    algorithm = {"name": "DPO", "batch_size": 8, "beta": 0.1, "use_separate_reference_adapter": True}
    environment = {"dataset": "rows.jsonl", "eval_prompts": 4, "test_prompts": 4, "data_batch_size_per_gpu": 4}
    training = {"num_epochs": 2, "pop_size": 2}
    manifest = {"algorithm": algorithm, "environment": environment, "training": training, "network": NETWORK}
    config, said = read({**manifest, "mutation": MUTATION, "selection_strategy": TOURNAMENT}, place)
    assert (config.environment.env_type, said) == ("preference", [])
    session = build(config)
    rows = session.task.train_size
    assert rows == 32
    assert session.config.training.max_steps == 2 * rows * 2 * 2  # epochs, rows, two answers, two agents
    assert session.planned_iterations == 2 * rows / 4
    assert "max_steps" not in session.resolved.given()["training"]
    sft = {
        "algorithm": {"name": "SFT"},
        "environment": {**environment, "response_column": "rejected"},
        "network": NETWORK,
    }
    config, _ = read(sft, place)
    assert (config.environment.env_type, config.environment.columns) == ("sft", {"completion": "rejected"})
    assert build(config).population.examples(0)[0].text == "no"


def test_epochs_need_rows() -> None:
    with pytest.raises(ConfigError, match="max_steps"):
        build(config_of({"training": {"num_epochs": 1}}))


def test_a_multi_turn_manifest_of_one_agent(place: Path) -> None:
    manifest = {
        "algorithm": {"name": "LLMREINFORCE", "lr": 1e-4, "gamma": 0.99, "action_granularity": "turn"},
        "environment": {"env_type": "multiturn", "env_name": "game:GuessTheNumber-v0-easy", "max_reward": 1.0},
        "training": {"pop_size": 1, "max_steps": 64, "max_wall_seconds": 60},
        "selection_strategy": TOURNAMENT,
        "mutation": {"rl_hp_selection": {"lr": {"min": 1e-5, "max": 1e-3}, "clip_coef": {"min": 0.2, "max": 0.2}}},
    }
    config, said = read(manifest, place)
    assert config.algorithm["name"] == "REINFORCE"
    assert config.algorithm["advantage_granularity"] == "turn"
    assert config.environment.env_id == "gem:game:GuessTheNumber-v0-easy"
    assert (config.training.max_seconds, config.tournament_size) == (60, 1)
    assert [one.partition(" ")[0] for one in said] == [
        "environment.max_reward", "selection_strategy.tournament_size=2", "mutation.rl_hp_selection.clip_coef",
    ]  # fmt: skip
    resolve(config)


def test_ppos_learning_rate_is_both(place: Path) -> None:
    manifest = {"algorithm": {"name": "LLMPPO", "lr": 1e-4, "lr_critic": 2e-4}, "mutation": MUTATION}
    config, _ = read({**manifest, "selection_strategy": TOURNAMENT}, place)
    assert config.algorithm == {"name": "PPO", "lr_actor": 1e-4, "lr_critic": 2e-4}
    assert list(resolve(config).genes) == ["lr_actor", "lr_critic"]
    assert load_manifest(None, ["algorithm={name: PPO, lr: 0.001}"]).algorithm["lr_critic"] == 1e-3


def test_an_entry_point_is_an_environment(place: Path) -> None:
    given = {"entrypoint": "guess.py:Guess", "env_config": {"target": 7}, "max_turns": 3}
    e = read({"environment": given}, place)[0].environment
    assert (e.env_type, e.params, e.max_turns, e.task) == ("multiturn", {"target": 7}, 3, None)
    assert str(e.env_id).endswith("guess.py:Guess")


def test_a_manifest_may_turn_the_search_off(place: Path) -> None:
    config, _ = read({"training": {"hpo": False}, "mutation": MUTATION, "selection_strategy": TOURNAMENT}, place)
    assert (config.selection_strategy.strategy, config.genes) == ("none", {})
    assert read({"training": {"hpo": True}}, place)[0].selection_strategy.strategy == "knockout"
    assert read({"tournament_selection": TOURNAMENT}, place)[0].selection_strategy.strategy == "tournament"


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        ({"network": {"lora_config": {"lora_dropout": 1.5}}}, "lora_dropout"),
        ({"network": {"lora_config": {"task_type": "SEQ_CLS"}}}, "task_type"),
        ({"network": {"lora_config": {"lora_r": 4, "r": 8}}}, "lora_r"),
        ({"algorithm": {"name": "GRPO", "calc_position_embeddings": False}}, "calc_position_embeddings"),
        ({"algorithm": {"name": ["GRPO"]}}, "name"),
        ({"environment": {"reward_file_path": "a.py"}}, "reward_fn_name"),
        ({"environment": {"entrypoint": 3}}, "env_id"),
        ({"environment": {"entrypoint": "a:B", "env_id": "a:C"}}, "entrypoint"),
        ({"environment": {"prompt_template": {"robot_0": "x"}}}, "prompt_template"),
        ({"environment": {"prompt_template": 3}}, "conversation_template"),
        ({"environment": {"env_name": 3, "env_id": "a"}}, "env_name"),
        ({"environment": {"columns": 3, "response_column": "a"}}, "columns"),
        ({"environment": 3}, "environment"),
        ({"algorithm": 3}, "algorithm"),
        ({"network": {"lora_config": 3}}, "lora_config"),
        ({"mutation": {"rl_hp_selection": 3}}, "rl_hp_selection"),
        ({"INIT_HP": {"ALGO": "GRPO"}}, "create_population"),
        ({"training": {"max_wall_seconds": 1, "max_seconds": 2}}, "max_wall_seconds"),
    ],
)
def test_what_cannot_be_meant_has_a_sentence(manifest: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        config_of(manifest)


def test_keys_of_this_package_stay_as_they_are() -> None:
    ours = load_manifest(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_of(resolve(ours).given()).model_dump() == RunConfig.from_dict(resolve(ours).given()).model_dump()


def test_the_size_of_noise_is_read_without_a_word_wherever_it_stands(place: Path) -> None:
    genes = {"rl_hp_selection": {"lr": {"min": 1e-6, "max": 1e-3}}}
    assert read({"mutation": {**genes, "mutation_sd": 0.1}}, place)[1] == []
    for value in ("0.1", "null", "{}"):
        config = config_of({"mutation": genes}, [f"mutation.mutation_sd={value}"])
        assert list(config.mutation.rl_hp_selection) == ["lr"]
