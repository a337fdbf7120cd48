"""What the algorithms declare, by name and without torch; written by docs/generate_names.py.

`make generated` writes it again after a hyperparameter has changed.
"""

from typing import NamedTuple


class Declared(NamedTuple):
    """The names that a manifest may use of one algorithm."""

    env_type: str
    """The ``environment.env_type`` that it learns from, or one of them."""
    hyperparameters: tuple[str, ...]
    genes: tuple[str, ...]
    """Those that may evolve; entries of a mapping as ``field.<name>``."""


FAMILY = (*("GRPO", "CISPO", "DPPO", "GSPO", "MaxRL", "REINFORCE", "RLOO"),)
"""GRPO and its relatives: what ``choice[...]`` may name."""

ALGORITHMS = {
    "GRPO": Declared(
        "reasoning",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "group_size", "temperature", "top_p"),
            *("top_k", "min_p", "repetition_penalty", "max_output_tokens", "min_output_tokens"),
            *("reward_weights", "use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha"),
            *("beta", "clip_coef", "dual_clip", "delta", "adv_clip_range", "entropy_coef"),
            *("kl_estimator", "kl_placement", "use_kl_advantage_shaping", "kl_clamp_value", "kl_target"),
            *("kl_horizon", "vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_mode", "loss_type", "loss_norm", "importance_sampling_level"),
            *("filter_zero_adv", "adv_filter_eps", "overlong_cache_tokens", "mask_truncated"),
            *("top_entropy_quantile", "adv_norm", "adv_eps", "whiten_advantages"),
            *("advantage_granularity", "turn_advantage_trajectory_fallback", "dynamic_sampling"),
            *("max_sampling_rounds", "clip_max", "clip_min"),
        ),
        (
            *("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "group_size"),
            *("temperature", "beta", "clip_coef", "entropy_coef", "clip_max", "reward_weights.<name>"),
        ),
    ),
    "GSPO": Declared(
        "reasoning",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "group_size", "temperature", "top_p"),
            *("top_k", "min_p", "repetition_penalty", "max_output_tokens", "min_output_tokens"),
            *("reward_weights", "use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha"),
            *("beta", "clip_coef", "dual_clip", "delta", "adv_clip_range", "entropy_coef"),
            *("kl_estimator", "kl_placement", "use_kl_advantage_shaping", "kl_clamp_value", "kl_target"),
            *("kl_horizon", "vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_mode", "loss_norm", "importance_sampling_level"),
            *("filter_zero_adv", "adv_filter_eps", "overlong_cache_tokens", "mask_truncated"),
            *("top_entropy_quantile", "adv_norm", "adv_eps", "whiten_advantages"),
            *("advantage_granularity", "turn_advantage_trajectory_fallback", "dynamic_sampling"),
            *("max_sampling_rounds",),
        ),
        (
            *("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "group_size"),
            *("temperature", "beta", "clip_coef", "entropy_coef", "reward_weights.<name>"),
        ),
    ),
    "CISPO": Declared(
        "reasoning",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "group_size", "temperature", "top_p"),
            *("top_k", "min_p", "repetition_penalty", "max_output_tokens", "min_output_tokens"),
            *("reward_weights", "use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha"),
            *("beta", "clip_coef", "adv_clip_range", "entropy_coef", "kl_estimator", "kl_placement"),
            *("use_kl_advantage_shaping", "kl_clamp_value", "kl_target", "kl_horizon"),
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_mode", "loss_norm", "importance_sampling_level"),
            *("filter_zero_adv", "adv_filter_eps", "overlong_cache_tokens", "mask_truncated"),
            *("top_entropy_quantile", "adv_norm", "adv_eps", "whiten_advantages"),
            *("advantage_granularity", "turn_advantage_trajectory_fallback", "dynamic_sampling"),
            *("max_sampling_rounds", "clip_max", "clip_min"),
        ),
        (
            *("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "group_size"),
            *("temperature", "beta", "clip_coef", "entropy_coef", "clip_max", "reward_weights.<name>"),
        ),
    ),
    "RLOO": Declared(
        "reasoning",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "group_size", "temperature", "top_p"),
            *("top_k", "min_p", "repetition_penalty", "max_output_tokens", "min_output_tokens"),
            *("reward_weights", "use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha"),
            *("beta", "clip_coef", "dual_clip", "delta", "adv_clip_range", "entropy_coef"),
            *("kl_estimator", "kl_placement", "use_kl_advantage_shaping", "kl_clamp_value", "kl_target"),
            *("kl_horizon", "vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_mode", "loss_norm", "importance_sampling_level"),
            *("filter_zero_adv", "adv_filter_eps", "overlong_cache_tokens", "mask_truncated"),
            *("top_entropy_quantile", "whiten_advantages", "advantage_granularity"),
            *("turn_advantage_trajectory_fallback", "dynamic_sampling", "max_sampling_rounds"),
        ),
        (
            *("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "group_size"),
            *("temperature", "beta", "clip_coef", "entropy_coef", "reward_weights.<name>"),
        ),
    ),
    "MaxRL": Declared(
        "reasoning",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "group_size", "temperature", "top_p"),
            *("top_k", "min_p", "repetition_penalty", "max_output_tokens", "min_output_tokens"),
            *("reward_weights", "use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha"),
            *("beta", "clip_coef", "dual_clip", "delta", "adv_clip_range", "entropy_coef"),
            *("kl_estimator", "kl_placement", "use_kl_advantage_shaping", "kl_clamp_value", "kl_target"),
            *("kl_horizon", "vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_mode", "loss_norm", "importance_sampling_level"),
            *("filter_zero_adv", "adv_filter_eps", "overlong_cache_tokens", "mask_truncated"),
            *("top_entropy_quantile", "whiten_advantages", "advantage_granularity"),
            *("turn_advantage_trajectory_fallback", "dynamic_sampling", "max_sampling_rounds"),
        ),
        (
            *("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "group_size"),
            *("temperature", "beta", "clip_coef", "entropy_coef", "reward_weights.<name>"),
        ),
    ),
    "DPPO": Declared(
        "reasoning",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "group_size", "temperature", "top_p"),
            *("top_k", "min_p", "repetition_penalty", "max_output_tokens", "min_output_tokens"),
            *("reward_weights", "use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha"),
            *("beta", "adv_clip_range", "entropy_coef", "kl_estimator", "kl_placement"),
            *("use_kl_advantage_shaping", "kl_clamp_value", "kl_target", "kl_horizon"),
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_mode", "loss_norm", "filter_zero_adv", "adv_filter_eps"),
            *("overlong_cache_tokens", "mask_truncated", "top_entropy_quantile", "adv_norm", "adv_eps"),
            *("whiten_advantages", "advantage_granularity", "turn_advantage_trajectory_fallback"),
            *("dynamic_sampling", "max_sampling_rounds", "divergence", "divergence_limit", "weight_max"),
        ),
        (
            *("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "group_size"),
            *("temperature", "beta", "entropy_coef", "divergence_limit", "reward_weights.<name>"),
        ),
    ),
    "REINFORCE": Declared(
        "reasoning",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "group_size", "temperature", "top_p"),
            *("top_k", "min_p", "repetition_penalty", "max_output_tokens", "min_output_tokens"),
            *("reward_weights", "use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha"),
            *("beta", "clip_coef", "dual_clip", "delta", "adv_clip_range", "entropy_coef"),
            *("kl_estimator", "kl_placement", "use_kl_advantage_shaping", "kl_clamp_value", "kl_target"),
            *("kl_horizon", "vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_mode", "loss_norm", "importance_sampling_level"),
            *("filter_zero_adv", "adv_filter_eps", "overlong_cache_tokens", "mask_truncated"),
            *("top_entropy_quantile", "gamma", "advantage_estimator", "advantage_granularity"),
            *("ratio_pooling",),
        ),
        (
            *("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "group_size"),
            *("temperature", "beta", "clip_coef", "entropy_coef", "gamma", "reward_weights.<name>"),
        ),
    ),
    "PPO": Declared(
        "reasoning",
        (
            *("batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "group_size", "temperature", "top_p"),
            *("top_k", "min_p", "repetition_penalty", "max_output_tokens", "min_output_tokens"),
            *("reward_weights", "use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha"),
            *("beta", "clip_coef", "dual_clip", "delta", "adv_clip_range", "entropy_coef"),
            *("kl_estimator", "kl_placement", "use_kl_advantage_shaping", "kl_clamp_value", "kl_target"),
            *("kl_horizon", "vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
            *("vllm_importance_sampling_mode", "lr_actor", "lr_critic", "vf_coef"),
            *("critic_warmup_steps", "vf_clip_coef", "gamma", "gae_lambda", "turn_level_clip"),
            *("turn_ratio_pooling", "advantage_granularity", "turn_value_reduction", "whiten_advantages"),
        ),
        (
            *("batch_size", "update_epochs", "max_grad_norm", "weight_decay", "group_size"),
            *("temperature", "beta", "clip_coef", "entropy_coef", "lr_actor", "lr_critic"),
            *("vf_clip_coef", "gamma", "gae_lambda", "reward_weights.<name>"),
        ),
    ),
    "DPO": Declared(
        "preference",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "max_output_tokens"),
            *("use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha", "beta", "loss_type"),
            *("loss_weights", "nll_alpha", "label_smoothing", "discopop_tau", "simpo_gamma"),
            *("reference_free", "ld_alpha", "use_weighting"),
        ),
        (*("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "beta", "nll_alpha"),),
    ),
    "KTO": Declared(
        "unpaired",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "max_output_tokens"),
            *("use_separate_reference_adapter", "ref_sync_steps", "ref_sync_alpha", "beta", "loss_type"),
            *("desirable_weight", "undesirable_weight"),
        ),
        (
            *("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "beta"),
            *("desirable_weight", "undesirable_weight"),
        ),
    ),
    "SFT": Declared(
        "sft",
        (
            *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1"),
            *("adam_beta2", "adam_eps", "weight_decay", "router_aux_loss_coef"),
            *("micro_batch_size_per_gpu", "max_model_len", "seed", "max_output_tokens", "loss_type"),
            *("packing",),
        ),
        (*("lr", "batch_size", "update_epochs", "max_grad_norm", "weight_decay", "loss_type"),),
    ),
}
