"""Keywords of ``GRPO(...)`` and the others, for editors and type checkers; written by docs/generate_keywords.py.

`make generated` writes it again after a hyperparameter has changed. ``GRPOKeywords`` has what GRPO takes.
"""

# ruff: noqa: D101

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from agilerl.algorithms.base import AlgorithmConfig
from agilerl.algorithms.config import CosineLRScheduleConfig
from agilerl.algorithms.custom_loss import LossFunction
from agilerl.hpo.parameters import Gene, HyperparameterConfig
from agilerl.runtime import Runtime


class AgentKeywords(TypedDict, total=False):
    """What every agent takes besides its hyperparameters: its own, then the options of the shared base."""

    pad_token_id: int | None
    pad_token: str | None
    model_name: str | None
    actor_network: Any
    runtime: Runtime | None
    lora_config: Any
    device: Any
    accelerator: Any
    cosine_lr_schedule_config: CosineLRScheduleConfig | None
    loss: LossFunction | None
    config: AlgorithmConfig | None
    hp_config: HyperparameterConfig | Mapping[str, Gene] | None
    index: int
    wrap: bool
    clone: bool
    calc_position_embeddings: bool
    reduce_memory_peak: bool | None
    use_liger_loss: bool
    model_config: Any
    fused_loss_chunk_rows: int | None
    quantization_config: Any
    config_overrides: Any
    attn_implementation: Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"] | None
    lora_target_scope: str | None
    gradient_checkpointing: bool
    activation_offload: bool
    torch_compiler: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    use_liger_kernel: bool
    use_sequence_packing: bool
    cast_logprobs_to_fp32: bool
    fused_logprobs_chunk_rows: int | None
    hf_generate_chunk_size: int | None
    stop_sequences: list[str] | None
    use_vllm: bool
    vllm_config: Any
    use_memory_efficient_params: bool


class LLMKeywords(AgentKeywords, total=False):
    batch_size: int
    mini_batch_size: int | None
    update_epochs: int
    max_grad_norm: float | None
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    router_aux_loss_coef: float
    micro_batch_size_per_gpu: int | None
    max_model_len: int | None
    seed: int


class RolloutLLMKeywords(LLMKeywords, total=False):
    group_size: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_output_tokens: int | None
    min_output_tokens: int | None
    reward_weights: Mapping[str, float]


class ReferenceKeywords(AgentKeywords, total=False):
    use_separate_reference_adapter: bool
    ref_sync_steps: int | None
    ref_sync_alpha: float


class SurrogateKeywords(ReferenceKeywords, LLMKeywords, total=False):
    beta: float
    adv_clip_range: float | None
    entropy_coef: float
    kl_estimator: Literal["k1", "k2", "k3", "k3+"]
    kl_placement: Literal["loss", "reward", "advantage"]
    use_kl_advantage_shaping: bool
    kl_clamp_value: float | None
    use_bias_correction_kl: bool
    kl_target: float | None
    kl_horizon: int
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_cap: float
    vllm_importance_sampling_clip_min: float | None
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "seq_truncate", "seq_mask"]
    off_policy_token_mask_bounds: tuple[float, float] | None
    off_policy_sequence_mask_threshold: float | None


class PolicyKeywords(LLMKeywords, total=False):
    loss_norm: str
    filter_zero_adv: bool
    adv_filter_eps: float
    overlong_cache_tokens: int | None
    mask_truncated: bool
    top_entropy_quantile: float


class GroupKeywords(LLMKeywords, total=False):
    whiten_advantages: bool
    advantage_granularity: Literal["auto", "trajectory", "turn"]
    turn_advantage_trajectory_fallback: bool
    dynamic_sampling: bool
    max_sampling_rounds: int


class DataKeywords(LLMKeywords, total=False):
    max_output_tokens: int | None


class GRPOKeywords(GroupKeywords, PolicyKeywords, SurrogateKeywords, RolloutLLMKeywords, total=False):
    lr: float
    clip_coef: float | tuple[float, float]
    dual_clip: float | None
    delta: float | None
    loss_type: Literal["grpo", "gspo", "cispo"]
    importance_sampling_level: Literal["token", "turn", "trajectory"] | None
    adv_norm: Literal["mean_std", "mean_only", "batch_std", "rloo", "mean"]
    adv_eps: float
    clip_max: float
    clip_min: float | None


class GSPOKeywords(GroupKeywords, PolicyKeywords, SurrogateKeywords, RolloutLLMKeywords, total=False):
    lr: float
    clip_coef: float | tuple[float, float]
    dual_clip: float | None
    delta: float | None
    importance_sampling_level: Literal["token", "turn", "trajectory"] | None
    adv_norm: Literal["mean_std", "mean_only", "batch_std", "rloo", "mean"]
    adv_eps: float


class CISPOKeywords(GroupKeywords, PolicyKeywords, SurrogateKeywords, RolloutLLMKeywords, total=False):
    lr: float
    clip_coef: float | tuple[float, float] | None
    importance_sampling_level: Literal["token", "turn", "trajectory"] | None
    adv_norm: Literal["mean_std", "mean_only", "batch_std", "rloo", "mean"]
    adv_eps: float
    clip_max: float
    clip_min: float | None


class RLOOKeywords(GroupKeywords, PolicyKeywords, SurrogateKeywords, RolloutLLMKeywords, total=False):
    lr: float
    clip_coef: float | tuple[float, float]
    dual_clip: float | None
    delta: float | None
    importance_sampling_level: Literal["token", "turn", "trajectory"] | None


class MaxRLKeywords(GroupKeywords, PolicyKeywords, SurrogateKeywords, RolloutLLMKeywords, total=False):
    lr: float
    clip_coef: float | tuple[float, float]
    dual_clip: float | None
    delta: float | None
    importance_sampling_level: Literal["token", "turn", "trajectory"] | None


class DPPOKeywords(GroupKeywords, PolicyKeywords, SurrogateKeywords, RolloutLLMKeywords, total=False):
    lr: float
    adv_norm: Literal["mean_std", "mean_only", "batch_std", "rloo", "mean"]
    adv_eps: float
    divergence: Literal["tv", "kl"]
    divergence_limit: float
    weight_max: float


class REINFORCEKeywords(PolicyKeywords, SurrogateKeywords, RolloutLLMKeywords, total=False):
    lr: float
    clip_coef: float | tuple[float, float]
    dual_clip: float | None
    delta: float | None
    importance_sampling_level: Literal["token", "turn", "trajectory"] | None
    gamma: float
    advantage_estimator: Literal["rebn", "reinforce++", "reinforce++-baseline"]
    advantage_granularity: Literal["auto", "token", "turn", "trajectory"]
    ratio_pooling: Literal["mean", "sum"]


class PPOKeywords(SurrogateKeywords, RolloutLLMKeywords, total=False):
    clip_coef: float | tuple[float, float]
    dual_clip: float | None
    delta: float | None
    lr_actor: float
    lr_critic: float
    vf_coef: float
    critic_warmup_steps: int
    vf_clip_coef: float | None
    gamma: float
    gae_lambda: float
    turn_level_clip: bool
    turn_ratio_pooling: Literal["sum", "mean"]
    advantage_granularity: Literal["auto", "token", "turn"]
    turn_value_reduction: Literal["final_value", "mean"]
    whiten_advantages: bool


class DPOKeywords(ReferenceKeywords, DataKeywords, total=False):
    lr: float
    beta: float
    loss_type: str | tuple[str, ...]
    loss_weights: tuple[float, ...] | None
    nll_alpha: float
    label_smoothing: float
    discopop_tau: float
    simpo_gamma: float
    reference_free: bool
    ld_alpha: float | None
    use_weighting: bool


class KTOKeywords(ReferenceKeywords, DataKeywords, total=False):
    lr: float
    beta: float
    loss_type: Literal["kto", "apo_zero_unpaired"]
    desirable_weight: float
    undesirable_weight: float


class SFTKeywords(DataKeywords, total=False):
    lr: float
    loss_type: Literal["nll", "dft"]
    packing: bool
