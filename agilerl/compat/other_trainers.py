"""What other trainers call our settings, for the message about an unknown key.

Names as of TRL 1.16, verl 0.9, OpenRLHF 0.9 and Tunix 0.1.7. The same idea is often counted in another unit: then the
entry says so, because a value that is carried over unchanged would be wrong.
"""

from collections.abc import Iterator, Mapping
from typing import Any

LR, GROUP, LENGTH, CLIP = "algorithm.lr", "algorithm.group_size", "algorithm.max_output_tokens", "algorithm.clip_coef"
EPOCHS, MICRO, BETA = "algorithm.update_epochs", "algorithm.micro_batch_size_per_gpu", "algorithm.beta"
MODEL, ROWS, REWARD = "network.pretrained_model_name_or_path", "environment.dataset", "environment.reward"
BATCH = "algorithm.batch_size (completions of one optimizer step, all together)"
PROMPTS = "environment.data_batch_size_per_gpu (prompts of one iteration)"
PROMPT_LENGTH = "algorithm.max_model_len (prompt and completion together)"
BOUNDS = "algorithm.clip_coef=[low, high]"
STEPS = "training.max_steps (completions, all agents together)"
PASSES = f"training.num_epochs (passes of each agent over the rows), or {STEPS}"
EXAMS = "training.evaluation_interval (iterations)"
SAVES = "training.checkpoint_steps (iterations)"
WARMUP = "training.lr_schedule.warmup (share of the run)"
OUT = "--out on the command line"

NAMES: dict[str, dict[str, str]] = {
    "TRL": {
        "learning_rate": LR,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "max_prompt_length": PROMPT_LENGTH,
        "max_length": "algorithm.max_model_len",
        "per_device_train_batch_size": f"{BATCH}, in passes of {MICRO}",
        "gradient_accumulation_steps": f"{BATCH}, in passes of {MICRO}",
        "generation_batch_size": f"{PROMPTS}, times {GROUP}",
        "steps_per_generation": f"{PROMPTS}, times {GROUP}, divided by {BATCH}",
        "num_iterations": EPOCHS,
        "epsilon": CLIP,
        "epsilon_high": BOUNDS,
        "scale_rewards": "algorithm.adv_norm",
        "cpo_alpha": "algorithm.nll_alpha",
        "sync_ref_model": "algorithm.ref_sync_steps (setting it is enough)",
        "ref_model_sync_steps": "algorithm.ref_sync_steps (updates, one an iteration, not optimizer steps)",
        "ref_model_mixup_alpha": "algorithm.ref_sync_alpha",
        "rpo_alpha": "algorithm.nll_alpha",
        "mask_truncated_completions": "algorithm.mask_truncated",
        "num_train_epochs": PASSES,
        "eval_steps": EXAMS,
        "save_steps": SAVES,
        "save_total_limit": "training.keep_checkpoints",
        "output_dir": OUT,
        "lr_scheduler_type": "training.lr_schedule.name",
        "warmup_steps": WARMUP,
        "warmup_ratio": WARMUP,
        "model_name_or_path": MODEL,
        "dataset_name": ROWS,
        "reward_funcs": f"{REWARD}, or several environment.graders",
        "lora_r": "network.lora_config.r",
        "lora_alpha": "network.lora_config.lora_alpha",
        "lora_target_modules": "network.lora_config.target_modules",
        "load_in_4bit": "network.quantization.load_in_4bit",
        "load_in_8bit": "network.quantization.load_in_8bit",
        "bf16": "training.dtype=bfloat16",
        "activation_offloading": "algorithm.activation_offload",
        "padding_free": "algorithm.use_sequence_packing",
        "chat_template_path": "network.chat_template_path",
        "chat_template_kwargs": "network.chat_template_kwargs",
        "generation_kwargs": "algorithm.temperature, top_p and so on, each by its name",
        "vllm_gpu_memory_utilization": "algorithm.vllm_config.gpu_memory_utilization",
        "vllm_server_base_url": "algorithm.vllm_config.base_url",
        "vllm_tensor_parallel_size": "algorithm.vllm_config.tensor_parallel_size",
    },
    "verl": {
        "algorithm.adv_estimator": "algorithm.name",
        "rollout.n": GROUP,
        "optim.lr": LR,
        "model.path": MODEL,
        "data.train_files": ROWS,
        "data.val_files": "environment.dataset_exam",
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": LENGTH,
        "max_response_length": LENGTH,
        "ppo_mini_batch_size": "algorithm.batch_size, which counts completions where verl counts prompts",
        "ppo_micro_batch_size_per_gpu": MICRO,
        "ppo_epochs": EPOCHS,
        "clip_ratio": CLIP,
        "clip_ratio_low": BOUNDS,
        "clip_ratio_high": BOUNDS,
        "clip_ratio_c": "algorithm.dual_clip",
        "kl_loss_coef": BETA,
        "kl_loss_type": "algorithm.kl_estimator",
        "kl_ctrl.kl_coef": f"{BETA}, with algorithm.kl_placement",
        "kl_coef": BETA,
        "entropy_coeff": "algorithm.entropy_coef",
        "loss_agg_mode": "algorithm.loss_norm",
        "norm_adv_by_std_in_grpo": "algorithm.adv_norm",
        "grad_clip": "algorithm.max_grad_norm",
        "lam": "algorithm.gae_lambda",
        "rollout.temperature": "algorithm.temperature",
        "val_kwargs.temperature": "training.eval_temperature (0 is greedy)",
        "val_kwargs.n": "training.eval_samples",
        "rollout.gpu_memory_utilization": "algorithm.vllm_config.gpu_memory_utilization",
        "model.lora_rank": "network.lora_config.r",
        "lora_rank": "network.lora_config.r",
        "trainer.total_epochs": PASSES,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": EXAMS,
        "trainer.save_freq": SAVES,
        "trainer.default_local_dir": OUT,
        "custom_reward_function.path": f"{REWARD}, or environment.graders with --allow-code",
    },
    "OpenRLHF": {
        "n_samples_per_prompt": GROUP,
        "actor_learning_rate": "algorithm.lr (algorithm.lr_actor of PPO)",
        "critic_learning_rate": "algorithm.lr_critic",
        "rollout_batch_size": PROMPTS,
        "train_batch_size": BATCH,
        "micro_train_batch_size": MICRO,
        "generate_max_len": LENGTH,
        "eval_n_samples_per_prompt": "training.eval_samples",
        "prompt_max_len": PROMPT_LENGTH,
        "max_len": "algorithm.max_model_len",
        "init_kl_coef": BETA,
        "eps_clip": CLIP,
        "eps_clip_low_high": BOUNDS,
        "max_epochs": EPOCHS,
        "num_episodes": STEPS,
        "lambd": "algorithm.gae_lambda",
        "advantage_estimator": "algorithm.name",
        "dynamic_filtering": "algorithm.dynamic_sampling",
        "pretrain": MODEL,
        "prompt_data": ROWS,
        "remote_rm_url": "environment.graders",
        "input_key": "environment.columns",
        "label_key": "environment.columns",
        "save_path": OUT,
        "packing_samples": "algorithm.use_sequence_packing",
    },
    "Tunix": {
        "train_micro_batch_size": f"{MICRO}, which counts completions where Tunix counts prompts",
        "epsilon_low": BOUNDS,
        "epsilon_high": BOUNDS,
        "epsilon_c": "algorithm.dual_clip",
        "loss_algo": "algorithm.loss_type",
        "policy_loss_fn": "algorithm.loss_type (a custom function: the keyword loss of an agent)",
        "loss_agg_mode": "algorithm.loss_norm",
        "advantage_estimator": "algorithm.adv_norm (gae: algorithm.name=PPO)",
        "kl_loss_mode": "algorithm.kl_estimator",
        "kl_method": "algorithm.kl_estimator",
        "clip_range_value": "algorithm.vf_clip_coef",
        "actor_optimizer": "algorithm.lr (algorithm.lr_actor of PPO)",
        "critic_optimizer": "algorithm.lr_critic",
        "max_tokens_to_generate": LENGTH,
        "max_generation_steps": LENGTH,
        "eval_every_n_steps": EXAMS,
        "checkpoint_root_directory": OUT,
    },
}
"""By trainer: its name, alone or with the sections around it, and our key with what is different about it."""


def ours(path: str, value: Any = None) -> str | None:
    """Return what another trainer's name is called here, as a sentence without a full stop; None for unknown names.

    ``path`` is a key with its sections, from the outside in. If ``value`` is a section, its keys are looked up.
    """
    differences: dict[str, None] = {}
    for name in _leaves(path, value):
        parts = name.split(".")
        # From the whole path to its last name: the longest that is known decides.
        for suffix in (".".join(parts[start:]) for start in range(len(parts))):
            meanings: dict[str, list[str]] = {}
            for trainer, names in NAMES.items():
                if suffix in names:
                    meanings.setdefault(names[suffix], []).append(f"{trainer}'s")
            differences |= {f"{' and '.join(of)} {suffix} is {text} here": None for text, of in meanings.items()}
            if meanings:
                break
    return "; ".join(differences) or None


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and not any(path.rpartition(".")[2] in names for names in NAMES.values()):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path
