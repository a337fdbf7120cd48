"""The hyperparameters of all algorithms, without torch; written by docs/generate_names.py.

`make generated` writes it again after a hyperparameter has changed.
"""

HYPERPARAMETERS = (
    *("lr", "batch_size", "mini_batch_size", "update_epochs", "max_grad_norm", "adam_beta1", "adam_beta2"),
    *("adam_eps", "weight_decay", "router_aux_loss_coef", "micro_batch_size_per_gpu", "max_model_len"),
    *("seed", "group_size", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("max_output_tokens", "min_output_tokens", "reward_weights", "use_separate_reference_adapter"),
    *("ref_sync_steps", "ref_sync_alpha", "beta", "clip_coef", "dual_clip", "delta", "adv_clip_range"),
    *("entropy_coef", "kl_estimator", "kl_placement", "use_kl_advantage_shaping", "kl_clamp_value"),
    *("use_bias_correction_kl", "kl_target", "kl_horizon", "vllm_importance_sampling_correction"),
    *("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_min"),
    *("vllm_importance_sampling_mode", "off_policy_token_mask_bounds"),
    *("off_policy_sequence_mask_threshold", "loss_type", "loss_norm", "importance_sampling_level"),
    *("filter_zero_adv", "adv_filter_eps", "overlong_cache_tokens", "mask_truncated"),
    *("top_entropy_quantile", "adv_norm", "adv_eps", "whiten_advantages", "advantage_granularity"),
    *("turn_advantage_trajectory_fallback", "dynamic_sampling", "max_sampling_rounds", "clip_max"),
    *("clip_min", "divergence", "divergence_limit", "weight_max", "gamma", "advantage_estimator"),
    *("ratio_pooling", "lr_actor", "lr_critic", "vf_coef", "critic_warmup_steps", "vf_clip_coef"),
    *("gae_lambda", "turn_level_clip", "turn_ratio_pooling", "turn_value_reduction", "loss_weights"),
    *("nll_alpha", "label_smoothing", "discopop_tau", "simpo_gamma", "reference_free", "ld_alpha"),
    *("use_weighting", "desirable_weight", "undesirable_weight", "packing"),
)
