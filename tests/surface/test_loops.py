"""The documented training loops: each argument acts, and the counting is the documented one."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from agilerl import (
    DPO,
    GRPO,
    KTO,
    SFT,
    HyperparameterConfig,
    Mutations,
    ReasoningGymTask,
    RLParameter,
    Runtime,
    TournamentSelection,
)
from agilerl.algorithms import LLMAlgorithm
from agilerl.envs import GuessTheNumber
from agilerl.errors import ConfigError
from agilerl.llm_envs import PreferenceGym, ReasoningGym, SFTGym, TokenObservationWrapper, UnpairedGym
from agilerl.training import llm, loops, train_llm
from agilerl.training.llm import (
    finetune_llm_multiturn,
    finetune_llm_preference,
    finetune_llm_reasoning,
    finetune_llm_sft,
)
from tests.training.test_trackers import rows_of, scalars

pytestmark = pytest.mark.model

ROWS, BATCH = 24, 4
QUIET: dict[str, Any] = {"verbose": False}


def exact(completion: str, answer: str, question: str) -> float:
    return float(completion.strip() == answer)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.from_pretrained("embedded")


@pytest.fixture(scope="module")
def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    task = ReasoningGymTask("spell_backward", {"min_word_len": 3, "max_word_len": 5}, exam_prompts=8)

    def row(split: Any, index: int) -> dict[str, Any]:
        found = task.row(split, index)
        known = {"question": found["question"], "answer": found["answer"]}
        return {**known, "prompt": found["question"], "chosen": found["answer"], "rejected": "no"}

    return [row("train", k) for k in range(ROWS)], [row("exam", k) for k in range(8)]


def questions(runtime: Runtime, rows: Any, grade: Any = exact) -> ReasoningGym:
    template = [{"role": "user", "content": "{question}"}]
    return ReasoningGym(*rows, runtime.tokenizer, grade, template, data_batch_size_per_gpu=BATCH)


def agents(runtime: Runtime, size: int = 2, **settings: Any) -> list[GRPO]:
    genes = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2))
    own = {"lr": 1e-3, "group_size": 4, "batch_size": 16, "max_output_tokens": 6, "beta": 0.0}
    return GRPO.population(size, runtime=runtime, hp_config=genes, init="same", **{**own, **settings})


def search(size: int = 2, **settings: Any) -> dict[str, Any]:
    return {
        "tournament": TournamentSelection(2, True, size),
        "mutation": Mutations(0, 0, 0, 0, 0, 1, **settings),
    }


# -- counting ---------------------------------------------------------------------------------------------------------


def test_max_steps_counts_the_samples_of_all_agents(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime)
    finetune_llm_reasoning(pop, questions(runtime, rows), max_steps=6 * BATCH, **QUIET)
    assert [agent.updates for agent in pop] == [3, 3]
    assert [agent.steps for agent in pop] == [3 * BATCH * 4] * 2


def test_agents_take_the_batches_of_one_environment_in_turns(runtime: Runtime, rows: Any) -> None:
    asked: list[list[str]] = []

    def grade(completions: list[str], question: list[str], **_: Any) -> list[float]:
        asked.append(list(dict.fromkeys(question)))
        return [0.0] * len(completions)

    pop = agents(runtime)
    finetune_llm_reasoning(pop, questions(runtime, rows, grade), max_steps=2 * BATCH, **QUIET)
    assert len(asked[0]) == 2 * BATCH  # one grading call for both agents, no question twice
    asked.clear()
    finetune_llm_reasoning(agents(runtime), env_fn=lambda: questions(runtime, rows, grade), max_steps=8, **QUIET)
    assert len(asked[0]) == BATCH


def test_epochs_are_of_all_agents_together_or_of_each(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime)
    finetune_llm_reasoning(pop, questions(runtime, rows), num_epochs=1, max_steps=1, **QUIET)
    assert pop[0].updates == ROWS / BATCH / 2
    pop = agents(runtime)
    finetune_llm_reasoning(pop, env_fn=lambda: questions(runtime, rows), num_epochs=1, **QUIET)
    assert pop[0].updates == ROWS / BATCH


def test_without_a_budget_a_run_is_one_epoch(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime, 1)
    finetune_llm_reasoning(pop, questions(runtime, rows), **QUIET)
    assert pop[0].updates == ROWS / BATCH


def test_an_epoch_makes_the_policy_the_reference(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime, 1, beta=0.1)
    finetune_llm_reasoning(pop, questions(runtime, rows), num_epochs=1, **QUIET)
    assert (pop[0].reference_tracker, pop[0].reference_slot) == (0, None)
    finetune_llm_reasoning(pop, questions(runtime, rows), max_steps=ROWS + BATCH, **QUIET)
    assert pop[0].reference_tracker == 1
    assert pop[0].reference_slot is not None


def test_evo_steps_counts_iterations(runtime: Runtime, rows: Any) -> None:
    pop, told = agents(runtime), []
    for agent in pop:
        agent.register_mutation_hook(lambda: told.append(0))
    found, _ = finetune_llm_reasoning(
        pop, questions(runtime, rows), max_steps=10 * BATCH, evo_steps=2, evaluation_interval=100, **search(), **QUIET
    )
    # Five iterations: selections after 2 and 4, and none at the end, where nothing would learn from it.
    assert len(told) == 2 * 2
    assert max(agent.index for agent in found) == 3
    assert [len(agent.fitness) for agent in found] == [3, 3]


def test_evaluation_interval_counts_iterations(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime, 1)
    finetune_llm_reasoning(pop, questions(runtime, rows), max_steps=5 * BATCH, evaluation_interval=2, **QUIET)
    assert len(pop[0].fitness) == 3  # after 2, 4, and the end


def test_time_ends_training(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime, 1)
    gym = questions(runtime, rows)
    finetune_llm_reasoning(pop, gym, max_steps=10**6, max_wall_seconds=1e-3, **QUIET)
    assert pop[0].updates == 1


class Endless:
    """A plain environment, whose episodes end with their turns."""

    max_turns = 9

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "1", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "2", float(len(action)), False, False, {}


def test_steps_of_episodes_are_turns_and_init_hp_has_the_batch(runtime: Runtime) -> None:
    pop = agents(runtime, 1, max_output_tokens=3)
    options: dict[str, Any] = {"max_turns": 2, "env_factory": Endless, "eval_loop": 2, **QUIET}
    finetune_llm_multiturn(pop, **options, init_hp={"BATCH_SIZE": 2}, max_steps=17)
    assert (pop[0].updates, pop[0].steps) == (2, 2 * 2 * 4)  # 2 seeds, 4 times each, 2 turns each
    finetune_llm_multiturn(pop, **options, max_steps=33)
    assert (pop[0].updates, pop[0].steps) == (4, 16 + 2 * 16)  # 16 rows of an optimizer step: 4 seeds


# -- what comes back and what is saved --------------------------------------------------------------------------------


def test_fitnesses_are_those_of_the_returned_population(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime, 3, group_size=2)
    gym = questions(runtime, rows)
    found, fitness = finetune_llm_reasoning(pop, gym, max_steps=36, evo_steps=1, **search(3), **QUIET)
    assert fitness == [agent.fitness[-1] for agent in found]
    gym.data_batch_size_per_gpu = 8
    assert fitness == [agent.test(gym).mean() for agent in found]


def test_a_list_of_agents_holds_those_that_are_left(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime, 3, group_size=2)
    before = list(pop)
    found, _ = finetune_llm_reasoning(pop, questions(runtime, rows), max_steps=36, evo_steps=1, **search(3), **QUIET)
    assert pop != before
    assert [agent.slot for agent in pop] == [agent.slot for agent in found]  # one that was replaced would raise
    assert all(mine is agent for mine, agent in zip(pop, found))


def test_the_elite_is_saved_before_it_mutates(runtime: Runtime, rows: Any, tmp_path: Path) -> None:
    pop = agents(runtime)
    path, gym = tmp_path / "elite", questions(runtime, rows)
    lr: list[float] = []
    for agent in pop:  # whichever is the elite
        agent.register_mutation_hook(lambda: lr.append(json.loads((path / "agent.json").read_text())["config"]["lr"]))
    options = {"max_steps": 12, "evo_steps": 1, "elite_path": path, **search(mutate_elite=True), **QUIET}
    found, _ = finetune_llm_reasoning(pop, gym, save_elite=True, **options)
    assert lr[0] == 1e-3
    assert any(agent.lr != 1e-3 for agent in found)
    saved = GRPO.load(path, runtime=runtime)
    assert saved.lr in [agent.lr for agent in found]  # the end has one of its own


def test_elites_are_saved_when_asked_for(runtime: Runtime, rows: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    gym = questions(runtime, rows)
    finetune_llm_reasoning(agents(runtime, 1), gym, max_steps=1, save_elite=False, elite_path="no", **QUIET)
    finetune_llm_reasoning(agents(runtime, 1), gym, max_steps=1, **QUIET)
    assert list(tmp_path.iterdir()) == []
    finetune_llm_reasoning(agents(runtime, 1), gym, max_steps=1, elite_path="alone", **QUIET)
    finetune_llm_reasoning(agents(runtime, 1), gym, max_steps=1, save_elite=True, **QUIET)
    assert (tmp_path / "alone" / "actor").is_dir()
    assert (tmp_path / "saved_checkpoints" / "GRPO" / "actor").is_dir()


def test_checkpoints_are_saved_every_so_many_samples(
    runtime: Runtime, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[int, Any]] = []
    monkeypatch.setattr(loops, "save_llm_checkpoint", lambda agent, path, **_: saved.append((agent.updates, path)))
    options = {"max_steps": 6 * BATCH, "checkpoint_steps": 2 * BATCH, "checkpoint_path": tmp_path, **QUIET}
    finetune_llm_reasoning(agents(runtime, 1), questions(runtime, rows), **options)
    assert saved == [(2, tmp_path), (4, tmp_path), (6, tmp_path), (6, tmp_path)]


def test_accuracy_is_the_share_of_perfect_rewards(runtime: Runtime, rows: Any) -> None:
    pop = agents(runtime, 1)
    finetune_llm_reasoning(pop, questions(runtime, rows), max_steps=4 * BATCH, max_reward=1.0, **QUIET)
    assert pop[0].metrics["accuracy"] == pop[0].metrics["reward"] == pop[0].scores[-1]
    finetune_llm_reasoning(pop, questions(runtime, rows), max_steps=BATCH, max_reward=2.0, **QUIET)
    assert pop[0].metrics["accuracy"] == 0


def test_a_loop_tells_what_happens(runtime: Runtime, rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"max_steps": 12, "evo_steps": 1, **search()}
    finetune_llm_reasoning(agents(runtime), questions(runtime, rows), **options, **QUIET)
    assert capsys.readouterr().out == ""
    finetune_llm_reasoning(agents(runtime), questions(runtime, rows), **options)
    assert "exam" in capsys.readouterr().out


# -- the other loops --------------------------------------------------------------------------------------------------


def test_demonstrations_and_pairs(runtime: Runtime, rows: Any) -> None:
    for cls, gym, loop in (
        (
            SFT,
            SFTGym(*rows, runtime.tokenizer, response_column="answer", data_batch_size_per_gpu=BATCH),
            finetune_llm_sft,
        ),
        (DPO, PreferenceGym(*rows, runtime.tokenizer, data_batch_size_per_gpu=BATCH), finetune_llm_preference),
        (KTO, UnpairedGym(*rows, runtime.tokenizer, data_batch_size_per_gpu=BATCH), finetune_llm_preference),
    ):
        pop: list[LLMAlgorithm] = list(cls.population(2, runtime=runtime, lr=1e-3))
        before = pop[0].test(gym, 2).mean()
        _, fitness = loop(pop, gym, num_epochs=2, **QUIET)
        assert [agent.updates for agent in pop] == [ROWS / BATCH] * 2
        assert fitness[0] > before if cls is SFT else fitness[0] >= before


def test_one_batch_of_a_loop_is_the_agents_own_update(runtime: Runtime, rows: Any) -> None:
    gym = SFTGym(*rows, runtime.tokenizer, response_column="answer", data_batch_size_per_gpu=BATCH)
    alone, looped = SFT(runtime=runtime, lr=1e-3), SFT(runtime=runtime, lr=1e-3)
    alone.learn(gym.reset(reset_dataloaders=True))
    finetune_llm_sft([looped], gym, max_steps=1, **QUIET)
    for own, other in zip(runtime.store.adapter(alone.slot), runtime.store.adapter(looped.slot)):
        assert bool((own[0] == other[0]).all() and (own[1] == other[1]).all())


def test_an_environment_may_come_wrapped(runtime: Runtime) -> None:
    def wrapped() -> TokenObservationWrapper:
        env = GuessTheNumber(max_number=5)
        return TokenObservationWrapper(env, runtime.tokenizer, 2, apply_chat_template=False, max_model_len=64)

    pop = agents(runtime, 1, max_output_tokens=3)
    finetune_llm_multiturn(pop, 2, wrapped, init_hp={"BATCH_SIZE": 1}, max_steps=1, eval_loop=1, **QUIET)
    assert (pop[0].updates, pop[0].steps, pop[0].max_model_len) == (1, 4, 64)


# -- trackers ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_trackers_get_metrics_of_agents_and_the_selection(
    runtime: Runtime, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    key = "0123456789" * 4
    wandb = {"wb": True, "wandb_api_key": key, "wandb_kwargs": {"mode": "offline", "dir": str(tmp_path)}}
    tensorboard = {"tensorboard": True, "tensorboard_log_dir": tmp_path / "logs"}
    pop, budget = agents(runtime), {"max_steps": 4 * BATCH, "evo_steps": 1}
    hp = {"BATCH_SIZE": BATCH}
    finetune_llm_reasoning(
        pop, questions(runtime, rows), init_hp=hp, **search(), **budget, **wandb, **tensorboard, **QUIET
    )
    [folder] = (tmp_path / "logs").iterdir()
    found = scalars(folder)
    assert [step for step, _ in found["population/reward/mean"]] == [1, 2]
    assert [step for step, _ in found["population/replacements"]] == [1]
    assert found[f"agent/{pop[0].index}/reward"][-1] == (2, pytest.approx(pop[0].scores[-1]))
    [file] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    history, config, _ = rows_of(file)
    assert {row["iteration"] for row in history} == {1, 2}
    assert config["BATCH_SIZE"] == BATCH
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


def test_the_loops_of_data_have_trackers_too(
    runtime: Runtime, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pop = SFT.population(2, runtime=runtime, batch_size=4)
    gym = SFTGym(*rows, runtime.tokenizer, response_column="answer", data_batch_size_per_gpu=BATCH)
    finetune_llm_sft(pop, gym, max_steps=2 * BATCH, eval_loop=1, tensorboard=True, **QUIET)
    [folder] = (tmp_path / "tensorboard_logs").iterdir()
    assert [step for step, _ in scalars(folder)["population/loss/mean"]] == [1]


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_said(runtime: Runtime, rows: Any) -> None:
    pop, gym = agents(runtime), questions(runtime, rows)
    for arguments, match in (
        ({"env": object()}, "ReasoningGym"),
        ({"env": gym, **search()}, "evo_steps"),
        ({"env": gym, **search(), "selection_strategy": TournamentSelection(2, True, 2)}, "two names"),
    ):
        with pytest.raises(ConfigError, match=match):
            finetune_llm_reasoning(pop, **arguments)
    with pytest.raises(ConfigError, match="finetune_llm_reasoning"):
        finetune_llm_sft(pop, SFTGym(*rows, runtime.tokenizer, response_column="answer"))
    with pytest.warns(UserWarning, match="no effect"):
        finetune_llm_reasoning(pop, gym, max_steps=1, evo_steps=5, **QUIET)
    endless = ReasoningGym.from_task(ReasoningGymTask("spell_backward", exam_prompts=8), runtime.tokenizer)
    with pytest.raises(ConfigError, match="max_steps"):
        finetune_llm_reasoning(pop, endless)


def test_agents_with_equal_indices_are_numbered(runtime: Runtime, rows: Any) -> None:
    pop = [GRPO(runtime=runtime, group_size=2, max_output_tokens=4) for _ in range(2)]
    with pytest.warns(UserWarning, match="different indices"):
        finetune_llm_reasoning(pop, questions(runtime, rows), max_steps=1, **QUIET)
    assert [agent.index for agent in pop] == [0, 1]


def test_agents_on_copies_of_a_model_are_moved_to_one(rows: Any) -> None:
    pop = [SFT(model_name="embedded", index=index, seed=index) for index in range(2)]
    adapter = pop[1].runtime.store.adapter(pop[1].slot)
    gym = SFTGym(*rows, pop[0].runtime.tokenizer, response_column="answer", data_batch_size_per_gpu=BATCH)
    alone = pop[1].clone()
    with pytest.warns(UserWarning, match="copy of the base"):
        found, _ = finetune_llm_sft(pop, env_fn=lambda: gym, max_steps=1, **QUIET)
    assert found[0] is pop[0]
    assert found[0].runtime is found[1].runtime
    alone.learn(gym.reset(reset_dataloaders=True))
    for own, other, before in zip(
        alone.runtime.store.adapter(alone.slot), found[1].runtime.store.adapter(found[1].slot), adapter
    ):
        assert bool((own[0] == other[0]).all() and (own[1] == other[1]).all())
        assert not bool((own[1] == before[1]).all())


LOOP = {
    "init_hp": None, "save_elite": None, "elite_path": None, "wb": False, "tensorboard": False,
    "tensorboard_log_dir": None, "evo_steps": None, "checkpoint_steps": None, "checkpoint_path": None,
    "selection_strategy": None, "tournament": None, "mutation": None, "wandb_api_key": None, "wandb_kwargs": None,
    "evaluation_interval": 10, "max_reward": None, "verbose": True, "accelerator": None, "max_steps": None,
    "num_epochs": None,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in train_llm.__all__ if name != "save_llm_checkpoint"])
def test_a_loop_has_its_documented_arguments(name: str) -> None:
    loop = getattr(train_llm, name)
    assert loop is getattr(llm, name)
    parameters = inspect.signature(loop).parameters
    expected: dict[str, Any] = dict(LOOP)
    if name == "finetune_llm_multiturn":
        expected |= {"evaluation_interval": 50, "max_steps": 32768, "max_wall_seconds": None}
        assert list(parameters)[:3] == ["pop", "max_turns", "env_factory"]
    else:
        assert list(parameters)[:3] == ["pop", "env", "env_fn"]
    assert {key: parameters[key].default for key in expected} == expected
