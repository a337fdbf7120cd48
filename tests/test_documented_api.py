"""The documented surface: names, parameters and defaults that users of AgileRL know.

Tables, not code: each line is a fact of AgileRL's documentation. Where a default is another one here, ``CHANGED`` has
ours, and docs/comparison.md the reason. That arguments act is in ``tests/surface/test_agents_arguments.py``.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import agilerl
from agilerl import algorithms
from agilerl.algorithms import ALGORITHMS, GRPO, EvolvableAlgorithm, LLMAlgorithm
from agilerl.errors import ConfigError
from agilerl.hpo.mutation import Mutations
from agilerl.runtime import Runtime
from agilerl.sizes import PASS_TOKENS
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = inspect.Parameter.empty

GRPO_DEFAULTS: dict[str, Any] = {
    "model_name": None, "actor_network": None, "model_config": None, "hp_config": None, "index": 0, "batch_size": 16,
    "beta": 0.001, "lr": 5e-7, "clip_coef": 0.2, "max_grad_norm": 0.1, "update_epochs": 1, "group_size": 8,
    "temperature": 1.0, "repetition_penalty": 1.0, "top_p": 0.95, "top_k": 50, "min_p": 0.0,
    "calc_position_embeddings": True, "micro_batch_size_per_gpu": None, "mini_batch_size": None,
    "max_output_tokens": None, "min_output_tokens": 0, "max_model_len": 1024, "hf_generate_chunk_size": None,
    "lora_config": None, "cosine_lr_schedule_config": None, "use_memory_efficient_params": True, "accelerator": None,
    "device": "cpu", "wrap": True, "clone": False, "use_vllm": False, "vllm_config": None, "seed": 42,
    "gradient_checkpointing": True, "torch_compiler": None, "use_liger_loss": False,
    "use_kl_advantage_shaping": False, "adv_norm": "mean_std", "loss_type": "grpo", "importance_sampling_level": None,
    "advantage_granularity": "auto", "turn_advantage_trajectory_fallback": True, "action_granularity": None,
    "use_separate_reference_adapter": True, "whiten_advantages": False, "adv_clip_range": None,
    "filter_zero_adv": False, "adv_filter_eps": 0.0, "reduce_memory_peak": None, "cast_logprobs_to_fp32": True,
    "fused_logprobs_chunk_rows": None, "quantization_config": None, "activation_offload": False,
    "lora_target_scope": None, "fused_loss_chunk_rows": None, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_cap": 2.0, "use_sequence_packing": False,
}  # fmt: skip

CHANGED: dict[str, dict[str, Any]] = {
    "GRPO": {
        "lr": 1e-5, "max_grad_norm": 1.0, "top_p": 1.0, "top_k": 0, "min_output_tokens": None, "device": None,
        "gradient_checkpointing": False, "beta": 0.0,
    },
}  # fmt: skip
REFUSED = {"action_granularity": "turn"}

SIBLINGS: dict[str, dict[str, Any]] = {
    "GSPO": {"group_size": 8, "adv_norm": "mean_std", "lr": 1e-5},
    "CISPO": {"group_size": 8, "loss_norm": "token-mean", "clip_max": 5.0, "clip_min": None},
    "RLOO": {"group_size": 8, "beta": 0.0, "kl_estimator": "k1", "kl_placement": "reward"},
    "MaxRL": {"group_size": 8, "lr": 1e-5},
    "DPPO": {"divergence": "tv", "divergence_limit": 0.2, "weight_max": 20.0},
    "PPO": {
        "lr_actor": 1e-5, "lr_critic": 5e-5, "vf_coef": 0.5, "gamma": 1.0, "gae_lambda": 1.0, "turn_level_clip": True,
        "advantage_granularity": "auto", "turn_ratio_pooling": "sum", "turn_value_reduction": "final_value",
        "whiten_advantages": True, "clip_coef": 0.2, "beta": 0.0,
    },
    "REINFORCE": {"beta": 0.0, "gamma": 1.0, "clip_coef": 0.2, "advantage_estimator": "rebn"},
    "DPO": {"beta": 0.1, "nll_alpha": 0.0, "loss_type": "sigmoid", "lr": 5e-6},
    "KTO": {"beta": 0.1, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "SFT": {"lr": 1e-4},
}  # fmt: skip
ABSENT = {
    "GSPO": {"loss_type"},
    "CISPO": {"loss_type"},
    "MaxRL": {"loss_type", "adv_norm"},
    "DPPO": {"loss_type", "clip_coef", "importance_sampling_level"},
    "PPO": {"adv_norm", "filter_zero_adv", "adv_filter_eps"},
    "REINFORCE": {"adv_norm"},
    "SFT": {"beta"},
}

METHODS: dict[str, dict[str, Any]] = {
    "get_action": {"obs": REQUIRED, "training": True, "repeat_prompts": True},
    "learn": {"experiences": REQUIRED, "turn_ids": None, "sampling_logps": None},
    "test": {"env": REQUIRED, "loop": 1},
    "clone": {"index": None, "wrap": True},
    "population": {"size": REQUIRED, "observation_space": None, "action_space": None},
    "save_checkpoint": {"path": REQUIRED, "lora_only": True, "save_optimizer": True},
    "load_checkpoint": {
        "path": REQUIRED, "load_optimizer": False, "overwrite_reference_adapter": False,
        "overwrite_critic_adapter": True,
    },
    "load": {"path": REQUIRED, "device": "cpu", "accelerator": None},
    "set_reference_policy": {"reference_update_tracker": REQUIRED},
    "use_adapter": {"adapter_name": REQUIRED},
    "select_adapter": {"adapter_name": REQUIRED},
    "get_lr_names": {}, "get_policy": {}, "mutation_hook": {}, "recompile": {}, "wrap_models": {}, "unwrap_models": {},
    "clean_up": {},
    "register_mutation_hook": {"hook": REQUIRED},
    "reinit_optimizers": {"optimizer": None},
    "set_training_mode": {"training": REQUIRED},
    "to_device": {"experiences": REQUIRED},
    "inspect_attributes": {"agent": REQUIRED, "input_args_only": False},
    "copy_attributes": {"agent": REQUIRED, "clone": REQUIRED},
    "evolvable_attributes": {"networks_only": False},
    "preprocess_observation": {"observation": REQUIRED},
    "register_network_group": {"group": REQUIRED},
    "get_state_dim": {"observation_space": REQUIRED},
    "get_action_dim": {"action_space": REQUIRED},
    "update_lr": {"optimizer": REQUIRED, "lr": REQUIRED, "accelerator": None, "scheduler_config": None},
    # Ours: the primitives that training is made of.
    "accumulate": {"batch": REQUIRED, "loss_fn": None},
    "accumulate_tangents": {"batch": REQUIRED, "dloss_dlogp": REQUIRED},
    "optim_step": {},
}  # fmt: skip
ATTRIBUTES = ("index", "mut", "hp_config", "steps", "scores", "fitness")


NAMES: dict[str, tuple[str, ...]] = {
    "agilerl": ("LocalTrainer", "HAS_LLM_DEPENDENCIES", "HAS_VLLM", "HAS_LIGER_KERNEL", "HAS_DEEPSPEED"),
    "agilerl.algorithms": ("LLMPPO", "LLMREINFORCE", "LLMAlgorithm", "EvolvableAlgorithm", *ALGORITHMS),
    "agilerl.algorithms.core.registry": ("RLParameter", "HyperparameterConfig"),
    "agilerl.hpo.tournament": ("TournamentSelection",),
    "agilerl.hpo.mutation": ("Mutations",),
    "agilerl.hpo.multi_frequency": ("MultiFrequencySelection",),
    "agilerl.llm_envs": (
        "ReasoningGym", "PreferenceGym", "SFTGym", "TokenObservationWrapper", "SyncMultiTurnVecEnv", "SearchTool",
        "FormatRewardWrapper",
    ),
    "agilerl.training.llm": (
        "finetune_llm_reasoning", "finetune_llm_preference", "finetune_llm_sft", "finetune_llm_multiturn",
    ),
    "agilerl.utils.utils": (
        "save_llm_checkpoint", "create_population", "run_selection_and_mutation", "aggregate_metrics_across_gpus",
    ),
    "agilerl.utils.algo_utils": ("VLLMConfig", "CosineLRScheduleConfig"),
    "agilerl.utils.llm_utils": ("create_llm_accelerator", "compare_responses", "sample_eval_prompts"),
    "agilerl.utils.ppo_value_head": ("AutoModelForCausalLMWithValueHead",),
    "agilerl.utils.probe_envs_llm": (
        "ConstantTargetEnv", "ConditionalTargetEnv", "MultiInputConditionalEnv", "GridNavigationEnv",
    ),
}  # fmt: skip
MEMBERS: dict[str, tuple[str, ...]] = {
    "agilerl.llm_envs:ReasoningGym": ("reset", "step", "eval_mode", "from_task"),
    "agilerl.llm_envs:PreferenceGym": ("reset", "step", "eval_mode"),
    "agilerl.llm_envs:SFTGym": ("reset", "step", "eval_mode"),
    "agilerl.llm_envs:TokenObservationWrapper": ("reset", "step", "close", "get_episode_data"),
    "agilerl.llm_envs:SyncMultiTurnVecEnv": ("reset", "step", "close", "get_trajectories"),
    "agilerl.llm_envs:SearchTool": ("execute_action", "instruction_string", "search"),
    "agilerl.hpo.tournament:TournamentSelection": ("select",),
    "agilerl.hpo.multi_frequency:MultiFrequencySelection": ("select",),
    "agilerl.hpo.mutation:Mutations": ("mutation",),
    "agilerl:LocalTrainer": ("from_manifest", "train"),
}
"""Methods of documented classes, by import path."""


@pytest.mark.parametrize("module", NAMES)
def test_a_documented_import_works(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("path", MEMBERS)
def test_a_documented_class_has_its_methods(path: str) -> None:
    module, _, name = path.partition(":")
    cls = getattr(importlib.import_module(module), name)
    assert [member for member in MEMBERS[path] if not callable(getattr(cls, member, None))] == []


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def test_classes_aliases_and_inheritance() -> None:
    assert list(ALGORITHMS) == [
        "GRPO",
        "GSPO",
        "CISPO",
        "RLOO",
        "MaxRL",
        "DPPO",
        "REINFORCE",
        "PPO",
        "DPO",
        "KTO",
        "SFT",
    ]
    for name, cls in ALGORITHMS.items():
        assert getattr(algorithms, name) is getattr(agilerl, name) is cls
        assert (cls.__name__, issubclass(cls, LLMAlgorithm), issubclass(cls, EvolvableAlgorithm)) == (name, True, True)
        assert cls.__module__ == f"agilerl.algorithms.{'grpo' if name in algorithms.FAMILY else name.lower()}"
    assert algorithms.LLMPPO is agilerl.LLMPPO is algorithms.PPO
    assert algorithms.LLMREINFORCE is agilerl.LLMREINFORCE is algorithms.REINFORCE


def test_every_public_name_can_be_imported() -> None:
    assert set(agilerl.__all__) <= set(dir(agilerl))
    for module in (agilerl, algorithms):
        assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize("name", [n for n in GRPO_DEFAULTS if n not in ("model_name", "actor_network")])
def test_grpos_documented_argument_is_accepted_and_has_its_default(name: str, runtime: Runtime) -> None:
    default = CHANGED["GRPO"].get(name, GRPO_DEFAULTS[name])
    if name in REFUSED:
        with pytest.raises(ConfigError, match=name):
            GRPO(runtime=runtime, pad_token_id=PAD, **{name: REFUSED[name]})
        return
    assert GRPO.defaults().get(name, default) == default
    GRPO(runtime=runtime, pad_token_id=PAD, **{name: default})
    if name in GRPO.Config.model_fields:
        assert getattr(GRPO(runtime=runtime, pad_token_id=PAD), name) == default


@pytest.mark.parametrize(("algorithm", "name"), [(a, n) for a, names in SIBLINGS.items() for n in names])
def test_a_siblings_argument_has_its_default(algorithm: str, name: str, runtime: Runtime) -> None:
    cls = ALGORITHMS[algorithm]
    assert cls.defaults()[name] == SIBLINGS[algorithm][name]
    assert getattr(cls(runtime=runtime, pad_token_id=PAD), name) == SIBLINGS[algorithm][name]


@pytest.mark.parametrize(("algorithm", "name"), [(a, n) for a, names in ABSENT.items() for n in sorted(names)])
def test_what_an_algorithm_does_not_have_is_refused_by_name(algorithm: str, name: str, runtime: Runtime) -> None:
    cls, value = ALGORITHMS[algorithm], GRPO_DEFAULTS[name]
    assert name not in cls.defaults()
    with pytest.raises(ConfigError, match=name):
        cls(runtime=runtime, pad_token_id=PAD, **{name: value})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_method_has_its_parameters(algorithm: str, method: str) -> None:
    parameters = dict(inspect.signature(getattr(ALGORITHMS[algorithm], method)).parameters)
    parameters.pop("self", None)
    found = {name: p.default for name, p in parameters.items() if name in METHODS[method]}
    assert found == METHODS[method]
    positional = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional[: len(METHODS[method])] == list(METHODS[method])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_agent_has_the_documented_attributes(algorithm: str, runtime: Runtime) -> None:
    agent = ALGORITHMS[algorithm](runtime=runtime, pad_token_id=PAD, index=3)
    assert [hasattr(agent, name) for name in ATTRIBUTES] == [True] * len(ATTRIBUTES)
    assert (agent.index, agent.steps, agent.scores, agent.fitness, agent.hp_config) == (3, 0, [], [], None)
    assert agent.get_lr_names() == (["lr_actor", "lr_critic"] if algorithm == "PPO" else ["lr"])


def test_update_lr_sets_rates_and_returns_a_schedule() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [w]} for w in weights], lr=1.0)
    assert GRPO.update_lr(optimizer, 0.1) == (None, None)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1]
    config = algorithms.CosineLRScheduleConfig(num_epochs=4, warmup_proportion=0.0)
    kept, schedule = GRPO.update_lr(optimizer, (0.2, 0.4), "accelerator", config)
    assert kept == "accelerator"
    rates = []
    for _ in range(4):
        optimizer.step()
        schedule.step()
        rates.append([g["lr"] for g in optimizer.param_groups])
    assert rates[1] == pytest.approx([0.1, 0.2])
    assert rates[3] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_update_lr_of_an_agents_optimizer_is_that_of_the_agent(runtime: Runtime) -> None:
    agent = GRPO(runtime=runtime, pad_token_id=PAD)
    assert agent.update_lr(agent.optimizer, 2e-4, "accelerator") == ("accelerator", None)
    assert (agent.lr, agent.optimizer.param_groups[0]["lr"]) == (2e-4, 2e-4)
    config = algorithms.CosineLRScheduleConfig(num_epochs=4, warmup_proportion=0.5)
    _, schedule = agent.update_lr(agent.optimizer, 3e-4, scheduler_config=config)
    assert schedule.get_last_lr() == [pytest.approx(1e-4)]  # the first of two steps of warm-up
    both = algorithms.PPO(runtime=runtime, pad_token_id=PAD)
    both.update_lr(both.optimizer, (1e-4, 2e-4))
    assert (both.lr_actor, both.lr_critic) == (1e-4, 2e-4)


def test_mutations_by_position_are_in_agilerls_order() -> None:
    made = Mutations(0.2, 0, 0, 0, 0, 0.8, 0.1, None, True, 7, "cpu", None)
    assert (made.mutate_elite, made.rand_seed) == (True, 7)
    with pytest.raises(ConfigError, match="mutation_sd, found -1"):
        Mutations(0.2, 0, 0, 0, 0, 0.8, -1)
    with pytest.raises(ConfigError, match="found 13"):
        Mutations(0.2, 0, 0, 0, 0, 0.8, 0.1, None, True, 7, "cpu", None, 3)
    mixed = Mutations(0.2, 0, 0, 0, 0, 0.8, 0.1, rand_seed=5, genes_per_mutation=2)
    assert (mixed.rand_seed, mixed.genes_per_mutation) == (5, 2)
    with pytest.raises(ConfigError, match=r"parameters=0, found 0\.1; noise .* has gone"):
        Mutations(0.2, 0, 0, 0.1, 0, 0.8)
    with pytest.raises(ConfigError, match="mutation_sd both by position and by name"):
        Mutations(0.2, 0, 0, 0, 0, 0.8, 0.1, mutation_sd=0.2)


def test_every_default_that_is_another_one_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)[`=]", page))
    assert set(CHANGED["GRPO"]) | set(REFUSED) <= named


MACHINERY = {
    *{"lr", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "max_model_len", "seed"},
    *{"group_size", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_output_tokens"},
    "reward_weights",
}
"""Settings of optimizers, sampling and grading, which no loss reads."""


def test_every_setting_of_a_loss_is_in_its_docs() -> None:
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    table = page.split("## The settings of the native losses", 1)[1].split("\n## ", 1)[0]
    settings = {name for cls in ALGORITHMS.values() for name in cls.Config.model_fields}
    named = set(re.findall(r"`(\w+)`", table))
    assert settings - MACHINERY <= named, sorted(settings - MACHINERY - named)


def test_the_size_of_a_pass_is_the_one_in_the_docs() -> None:
    manifest, losses = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("manifest.md", "losses.md"))
    rows = [line for line in manifest.splitlines() if line.startswith("* `micro_batch_size_per_gpu`")]
    rows += [line for line in losses.splitlines() if "`mean_token_accuracy`" in line]
    assert len(rows) >= 2
    assert [row for row in rows if f"at most {PASS_TOKENS:,} tokens" not in row] == []


def test_signatures_show_types_without_the_rules_for_them() -> None:
    public = {name: getattr(agilerl, name) for name in agilerl.__all__}
    shown = {name: str(inspect.signature(thing)) for name, thing in public.items() if callable(thing)}
    # A dataclass has its fields' annotations.
    assert [name for name, signature in shown.items() if "Annotated[" in signature] == [
        "RLParameter",
        "TournamentSelection",
    ]
    assert "model: Optional[str] = None" in shown["train"]
