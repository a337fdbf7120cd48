"""Names that programs written for AgileRL use around the loops: populations, attributes, helpers, LocalTrainer."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import agilerl
from agilerl import (
    GRPO,
    PPO,
    SFT,
    HyperparameterConfig,
    LocalTrainer,
    Mutations,
    RLParameter,
    Runtime,
    TournamentSelection,
)
from agilerl.algorithms import CosineLRScheduleConfig
from agilerl.envs.check import check_env
from agilerl.errors import ConfigError
from agilerl.llm_envs import PreferenceGym, SFTGym
from agilerl.models.tiny import tiny_model_path
from agilerl.utils.llm_utils import (
    aggregate_metrics_across_gpus,
    compare_responses,
    create_llm_accelerator,
    sample_eval_prompts,
)
from agilerl.utils.ppo_value_head import AutoModelForCausalLMWithValueHead
from agilerl.utils.probe_envs_llm import (
    ConditionalTargetEnv,
    ConstantTargetEnv,
    GridNavigationEnv,
    MultiInputConditionalEnv,
)
from agilerl.utils.utils import create_population, run_selection_and_mutation, tournament_selection_and_mutation
from tests.training.test_trackers import scalars

pytestmark = pytest.mark.model

INIT_HP = {
    "ALGO": "GRPO", "BATCH_SIZE": 16, "BETA": 0.01, "LR": 0.0001, "CLIP_COEF": 0.1, "MAX_GRAD_NORM": 0.5,
    "UPDATE_EPOCHS": 2, "GROUP_SIZE": 4, "TEMPERATURE": 0.9, "MAX_MODEL_LEN": 96, "MAX_OUTPUT_TOKENS": 4,
    "TOURN_SIZE": 2, "ELITISM": True, "POP_SIZE": 2, "EVAL_LOOP": 1, "USE_VLLM": False,
}  # fmt: skip
PAIRS = [{"prompt": f"{n}+{n}?", "chosen": str(2 * n), "rejected": "no"} for n in range(6)]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.from_pretrained("embedded")


def moved(agent: Any) -> Any:
    """Return the agent with an adapter that changes what the model says."""
    store = agent.runtime.store
    store.theta[agent.slot].normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return agent


# -- populations ------------------------------------------------------------------------------------------------------


def test_a_population_of_capital_letters() -> None:
    genes = HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))
    pop = create_population(
        algo="GRPO", net_config=None, INIT_HP=INIT_HP, hp_config=genes, population_size=2, model_name="embedded"
    )
    assert [agent.index for agent in pop] == [0, 1]
    assert pop[0].runtime is pop[1].runtime
    config = pop[0].config.model_dump()
    wanted = {key.lower(): value for key, value in INIT_HP.items() if key.lower() in config}
    assert len(wanted) == 10
    assert {name: config[name] for name in wanted} == wanted


def test_ppo_has_two_learning_rates_of_one(runtime: Runtime) -> None:
    (agent,) = create_population("LLMPPO", None, {"LR": 1e-4}, algo_kwargs={"runtime": runtime})
    assert (type(agent), agent.lr_actor) == (PPO, 1e-4)
    given = {"LR": 1e-4, "LR_ACTOR": 2e-4, "LR_CRITIC": 3e-4}
    (agent,) = create_population("LLMPPO", None, given, algo_kwargs={"runtime": runtime})
    assert (agent.lr_actor, agent.lr_critic) == (2e-4, 3e-4)


def test_adapters_from_capital_letters_and_keys_of_nobody() -> None:
    given = {"LORA_R": 4, "LORA_ALPHA": 8, "LORA_TARGET_MODULES": ["q_proj"], "GAMA": 1}
    with pytest.warns(UserWarning, match="GAMA"):
        (agent,) = create_population("SFT", None, given, model_name="embedded")
    assert (type(agent), agent.rank) == (SFT, 4)
    # Without names of layers, those of the default.
    (agent,) = create_population(
        "SFT", None, {"LORA_R": 4, "LORA_ALPHA": None, "LORA_TARGET_MODULES": []}, model_name="embedded"
    )
    default = agilerl.Runtime.from_pretrained("embedded").lora_config
    config = agent.runtime.lora_config
    assert (agent.rank, config.lora_alpha, config.target_modules) == (4, default.lora_alpha, default.target_modules)
    (agent,) = create_population("SFT", None, {"LORA_ALPHA": 8}, model_name="embedded")
    assert (agent.rank, agent.runtime.lora_config.lora_alpha) == (default.r, 8)
    for arguments in ({"algo": "GRPOO"}, {"algo": "GRPO", "net_config": {"x": 1}}):
        with pytest.raises(ConfigError):
            create_population(**arguments, algo_kwargs={"model_name": "embedded"})  # type: ignore[arg-type]


def test_a_model_with_a_value_head_is_the_plain_model(runtime: Runtime) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(tiny_model_path()), v_head_init_strategy="normal")
    assert AutoModelForCausalLMWithValueHead.from_pretrained(model) is model
    pop = create_population("PPO", None, {}, actor_network=model, tokenizer=runtime.tokenizer)
    assert pop[0].get_policy() is model
    assert pop[0].runtime.tokenizer is runtime.tokenizer


# -- attributes of agents ---------------------------------------------------------------------------------------------


def test_what_programs_read_of_an_agent(runtime: Runtime) -> None:
    agent = PPO(runtime=runtime, lr_actor=1e-4, lr_critic=2e-4, batch_size=8)
    assert (agent.device, agent.algo, agent.use_vllm) == (torch.device("cpu"), "PPO", False)
    assert (agent.accelerator, agent.lr_scheduler, agent.metrics) == (None, None, {})
    assert agent.pretrained_model_name_or_path == runtime.base.source
    assert agent.batch_size_per_process == 8
    assert [group["lr"] for group in agent.optimizer.optimizer.param_groups] == [1e-4, 2e-4]
    assert (agent.registry.hp_config, agent.registry.groups) == (None, ["actor", "critic"])
    course = CosineLRScheduleConfig(num_epochs=4, warmup_proportion=0.5)
    scheduled = GRPO(runtime=runtime, lr=1e-3, cosine_lr_schedule_config=course)
    assert scheduled.lr_scheduler is not None
    assert scheduled.lr_scheduler.get_last_lr() == [scheduled.current_lr] != [1e-3]


def test_metrics_are_those_of_the_last_update(runtime: Runtime) -> None:
    agent = SFT(runtime=runtime)
    found = agent.learn(SFTGym(PAIRS, PAIRS, runtime.tokenizer, response_column="chosen").reset())
    assert agent.metrics["loss"] == found["loss"]


def test_the_generation_config_is_the_agents_own(runtime: Runtime) -> None:
    agent = GRPO(runtime=runtime, temperature=0.7, max_output_tokens=9)
    view = agent.generation_config
    assert (view.temperature, view.max_new_tokens, view.do_sample) == (0.7, 9, True)
    assert (view.pad_token_id, view.eos_token_id) == (agent.pad_token_id, list(runtime.base.eos_token_ids))
    view.temperature = 0.1
    assert (agent.temperature, agent.generation_config.temperature) == (0.1, 0.1)
    with pytest.raises(ConfigError, match="temperature"):
        view.temperature = -1
    with pytest.warns(UserWarning, match="suppress_tokens has no effect"):
        view.suppress_tokens = [3]
    with pytest.warns(UserWarning, match="do_sample has no effect"):
        view.do_sample = False


def test_the_actor_is_the_model_with_the_adapter(runtime: Runtime, tmp_path: Path) -> None:
    agent = moved(GRPO(runtime=runtime, max_output_tokens=5))
    prompt = runtime.tokenizer("12+3", return_tensors="pt")
    plain = agent.actor.eval().base_model(**prompt).logits
    with agent.actor.disable_adapter():
        assert torch.equal(agent.actor(**prompt).logits, plain)
    mine = agent.actor(**prompt).logits
    assert not torch.allclose(mine, plain)
    agent.actor.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(agent.actor.name_or_path, dtype=agent.actor.dtype)
    assert torch.allclose(PeftModel.from_pretrained(base, tmp_path / "adapter")(**prompt).logits, mine, atol=1e-4)
    said = agent.actor.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert torch.equal(said, agent.get_action([dict(prompt)], training=False).completion_ids[0])


# -- own loops, and looking at answers --------------------------------------------------------------------------------


def test_a_loop_of_ones_own_selects_and_mutates(runtime: Runtime, tmp_path: Path) -> None:
    genes = HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))
    pop = [GRPO(runtime=runtime, hp_config=genes, lr=1e-4) for _ in range(2)]
    for agent, fitness in zip(pop, (0.1, 0.9)):
        agent.fitness.append(fitness)
    selection, mutations = TournamentSelection(2, True, 2), Mutations(0, 0, 0, 0, 0, 1)
    with pytest.warns(UserWarning, match="different indices"):
        after = run_selection_and_mutation(
            selection, pop, mutations, "env", elite_path=tmp_path / "elite", save_elite=True
        )
    assert [agent.fitness[-1] for agent in after] == [0.9, 0.9]
    assert sorted(agent.lr == 1e-4 for agent in after) == [False, True]
    assert GRPO.load(tmp_path / "elite", runtime=runtime).lr == 1e-4
    assert run_selection_and_mutation(None, pop, mutations) == pop
    assert len(tournament_selection_and_mutation(after, selection, mutations, "env", language_model=True)) == 2


def test_metrics_of_one_process_are_their_mean() -> None:
    assert aggregate_metrics_across_gpus(None, torch.tensor([1.0, 2.0])) == 1.5
    assert aggregate_metrics_across_gpus(2.0) == 2.0
    assert create_llm_accelerator() is None or torch.cuda.is_available()


def test_answers_are_shown_beside_those_of_the_data(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    gym = PreferenceGym(PAIRS, PAIRS, runtime.tokenizer)
    samples = sample_eval_prompts(gym, n=3)
    assert samples == sample_eval_prompts(gym, n=3) != sample_eval_prompts(gym, n=3, seed=1)
    assert {prompt: (chosen, rejected) for prompt, chosen, rejected in samples}.items() <= {
        row["prompt"]: (row["chosen"], row["rejected"]) for row in PAIRS
    }.items()
    assert len(sample_eval_prompts(gym, n=99)) == len(PAIRS)
    agent = moved(SFT(runtime=runtime))
    found = compare_responses(agent, runtime.tokenizer, samples, max_new_tokens=4)
    assert all(set(one) == {"prompt", "chosen", "rejected", "base model", "agent"} for one in found)
    assert any(one["base model"] != one["agent"] for one in found)
    assert found[0]["prompt"] in capsys.readouterr().out
    alone = compare_responses(agent, runtime.tokenizer, samples, max_new_tokens=4, show_base_model=False)
    assert [one["agent"] for one in alone] == [one["agent"] for one in found]


# -- probe environments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probe", [ConstantTargetEnv, ConditionalTargetEnv, MultiInputConditionalEnv, GridNavigationEnv]
)
def test_nothing_is_wrong_with_a_probe(probe: Any) -> None:
    assert [str(finding) for finding in check_env(probe) if finding.level == "error"] == []


def test_probes_pay_as_documented() -> None:
    env = ConstantTargetEnv(target_digit="4", prompt="7")
    assert env.reset()[0] == "7"
    assert env.step("it is 4")[1:4] == (1.0, True, False)
    for probe, answer in (
        (ConditionalTargetEnv(digits=(2, 5)), lambda seen: int(seen) % 3 + 1),
        (MultiInputConditionalEnv(), lambda seen: (int(seen[0]) + int(seen[1])) % 3 + 1),
    ):
        for seed in range(6):
            seen, info = probe.reset(seed=seed)
            assert info["target"] == str(answer(seen))
            assert probe.step("9")[1] == -1.0
    grid = GridNavigationEnv(grid_size=3, max_turns=2, step_cost=-0.5)
    seen, info = grid.reset(seed=0)
    assert seen == f"{info['position']}{info['target']}"
    assert grid.step("2")[1:3] == (-0.5, False)
    assert grid.step("2")[1:3] == (-1.0, True)
    grid.reset(seed=0)
    toward = "3" if info["target"] > info["position"] else "1"
    assert 1.0 in (grid.step(toward)[1], grid.step(toward)[1] if grid._running else 1.0)


# -- LocalTrainer and the flags ---------------------------------------------------------------------------------------


SMALL: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "GRPO", "lr": 1e-3, "group_size": 4, "batch_size": 16, "max_output_tokens": 4},
    "environment": {
        "task": "reasoning_gym:spell_backward", "eval_prompts": 8, "test_prompts": 8, "data_batch_size_per_gpu": 2,
    },
    "training": {"max_steps": 32, "pop_size": 2},
}  # fmt: skip


def test_a_trainer_runs_resumes_and_hands_over_the_elite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = LocalTrainer(SMALL["algorithm"], SMALL["environment"], {**SMALL["training"], "evo_steps": 1})
    seen: list[Any] = []

    def stop(event: Any) -> None:
        seen.append(event)
        if type(event).__name__ == "ExamDone" and event.iteration == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.train(out=tmp_path / "run", consumers=(stop,), tensorboard=True, tensorboard_log_dir=tmp_path / "logs")
    assert "exam" in capsys.readouterr().out
    again = LocalTrainer("GRPO", "reasoning_gym:gcd", resume_from_checkpoint=tmp_path / "run")
    pop, fitness = again.train(verbose=False, elite_path=tmp_path / "elite")
    assert scalars(tmp_path / "logs" / "run")["population/agents"][0][0] == 1
    assert fitness == [agent.fitness[-1] for agent in pop]
    assert [agent.updates for agent in pop] == [2, 2]
    assert (tmp_path / "run" / "summary.json").exists()
    assert again.session is not None
    assert GRPO.load(tmp_path / "elite", runtime=pop[0].runtime).updates in (1, 2)
    samples = sample_eval_prompts(again.env, n=2)
    assert len(compare_responses(pop[0], again.tokenizer, samples, max_new_tokens=2)) == 2
    fresh = GRPO(runtime=pop[0].runtime)
    fresh.load_weights(tmp_path / "elite")
    saved = GRPO.load(tmp_path / "elite", runtime=pop[0].runtime)
    for (a, b), (c, d) in zip(fresh.runtime.store.adapter(fresh.slot), fresh.runtime.store.adapter(saved.slot)):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    capsys.readouterr()
    warm = LocalTrainer.from_manifest(SMALL, load_weights_from=tmp_path / "elite")
    assert warm.config.network.adapter == str(tmp_path / "elite" / "actor")
    assert LocalTrainer(**SMALL, load_weights_from=tmp_path / "elite").config.network == warm.config.network
    assert capsys.readouterr().out.count("exam") == 0


def test_a_trainer_runs_code_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def grade(completion):\n    return 0.25\n")
    task = {**SMALL["environment"], "graders": [{"name": "mine.py:grade"}]}
    trainer = LocalTrainer(**{**SMALL, "environment": task, "training": {"max_steps": 4, "pop_size": 1}})
    with pytest.raises(ConfigError, match="allow"):
        trainer.train(out="first", verbose=False)
    _, fitness = trainer.train(out="second", verbose=False, allow_code=True)
    assert fitness == [0.25]


def test_the_search_of_a_trainer() -> None:
    def strategy(**sections: Any) -> str:
        return LocalTrainer(**{**SMALL, **sections}).config.selection_strategy.strategy

    assert strategy() == "none"
    assert strategy(hpo=True) == "knockout"
    assert strategy(selection_strategy={"tournament_size": 2, "elitism": True}) == "tournament"
    config = LocalTrainer(
        {"name": "GRPO", "pretrained_model_name_or_path": "embedded"}, "agilerl/GuessTheNumber-v0"
    ).config
    assert (config.environment.env_type, config.environment.env_id) == ("multiturn", "agilerl/GuessTheNumber-v0")


def test_a_trainer_of_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("algorithm: {name: LLMPPO, lr: 0.001}\ntraining: {pop_size: 3, max_wall_seconds: 5}\n")
    trainer = LocalTrainer.from_manifest(str(path))
    config = trainer.config
    assert (trainer.algorithm_spec.name, trainer.algorithm_spec.lr_actor) == ("PPO", 0.001)
    assert config.algorithm == {"name": "PPO", "lr_actor": 0.001, "lr_critic": 0.001}
    assert (config.training.pop_size, config.training.max_seconds) == (3, 5.0)
    assert LocalTrainer.from_manifest(SMALL).config.training.max_steps == 32
    with pytest.raises(ConfigError, match="LocalTrainer"):
        LocalTrainer("GRPO", "reasoning_gym:gcd", accelerator=type("Many", (), {"num_processes": 2})())
    with pytest.raises(ConfigError, match="accelerator"):
        LocalTrainer("GRPO", "reasoning_gym:gcd", accelerator=1)


@pytest.mark.processes
def test_flags_and_names_need_no_library() -> None:
    assert agilerl.HAS_LLM_DEPENDENCIES is True
    assert agilerl.HAS_ARENA_DEPENDENCIES is False
    code = "import agilerl, sys; agilerl.HAS_VLLM, agilerl.LocalTrainer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
