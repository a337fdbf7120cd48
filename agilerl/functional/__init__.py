"""Pure functions on tensors, of which every algorithm is composed: credit, ratios, objectives, KL, aggregation.

Token tensors are ``[B, L]`` with a bool mask ``[B, L]``. The content of a masked position never reaches a value or a
gradient, not even if it is NaN. fp32 and fp64 both work; log-probs are natural logarithms.
"""

# A name that is imported as itself is one that the package exports.
from agilerl.functional.advantages import AdvantageNorm as AdvantageNorm
from agilerl.functional.advantages import broadcast_rows as broadcast_rows
from agilerl.functional.advantages import broadcast_turns as broadcast_turns
from agilerl.functional.advantages import discounted_returns as discounted_returns
from agilerl.functional.advantages import distillation_advantages as distillation_advantages
from agilerl.functional.advantages import gae as gae
from agilerl.functional.advantages import group_advantages as group_advantages
from agilerl.functional.advantages import informative_groups as informative_groups
from agilerl.functional.advantages import nonzero_advantage_rows as nonzero_advantage_rows
from agilerl.functional.advantages import overlong_penalty as overlong_penalty
from agilerl.functional.advantages import place_rewards as place_rewards
from agilerl.functional.advantages import pool_turn_values as pool_turn_values
from agilerl.functional.advantages import rebn as rebn
from agilerl.functional.advantages import reinforce_plus_plus as reinforce_plus_plus
from agilerl.functional.advantages import reinforce_plus_plus_baseline as reinforce_plus_plus_baseline
from agilerl.functional.advantages import turn_advantages as turn_advantages
from agilerl.functional.advantages import zero_variance_groups as zero_variance_groups
from agilerl.functional.logprobs import linear_collision_entropy as linear_collision_entropy
from agilerl.functional.logprobs import linear_logprobs as linear_logprobs
from agilerl.functional.logprobs import token_entropy as token_entropy
from agilerl.functional.logprobs import token_logprobs as token_logprobs
from agilerl.functional.masks import fill_masked as fill_masked
from agilerl.functional.masks import masked_mean as masked_mean
from agilerl.functional.masks import masked_sum as masked_sum
from agilerl.functional.masks import masked_whiten as masked_whiten
from agilerl.functional.masks import top_entropy_mask as top_entropy_mask
from agilerl.functional.objectives import LOSS_NORM_ALIASES as LOSS_NORM_ALIASES
from agilerl.functional.objectives import Divergence as Divergence
from agilerl.functional.objectives import KLEstimator as KLEstimator
from agilerl.functional.objectives import LossNorm as LossNorm
from agilerl.functional.objectives import MismatchMode as MismatchMode
from agilerl.functional.objectives import PoolingLevel as PoolingLevel
from agilerl.functional.objectives import adaptive_kl_coefficient as adaptive_kl_coefficient
from agilerl.functional.objectives import aggregate as aggregate
from agilerl.functional.objectives import aggregate_rows as aggregate_rows
from agilerl.functional.objectives import cispo as cispo
from agilerl.functional.objectives import clip_regions as clip_regions
from agilerl.functional.objectives import clipped_surrogate as clipped_surrogate
from agilerl.functional.objectives import dft as dft
from agilerl.functional.objectives import divergence_region as divergence_region
from agilerl.functional.objectives import dppo as dppo
from agilerl.functional.objectives import explained_variance as explained_variance
from agilerl.functional.objectives import importance_ratio as importance_ratio
from agilerl.functional.objectives import kl_estimate as kl_estimate
from agilerl.functional.objectives import kl_shaped_advantages as kl_shaped_advantages
from agilerl.functional.objectives import log_ratio as log_ratio
from agilerl.functional.objectives import mismatch_weights as mismatch_weights
from agilerl.functional.objectives import normaliser as normaliser
from agilerl.functional.objectives import off_policy_tokens as off_policy_tokens
from agilerl.functional.objectives import pool_log_ratio as pool_log_ratio
from agilerl.functional.objectives import reinforce as reinforce
from agilerl.functional.objectives import router_balance_loss as router_balance_loss
from agilerl.functional.objectives import sft as sft
from agilerl.functional.objectives import value_clip_region as value_clip_region
from agilerl.functional.objectives import value_loss as value_loss
from agilerl.functional.preference import PREFERENCE_LOSSES as PREFERENCE_LOSSES
from agilerl.functional.preference import PreferenceOptions as PreferenceOptions
from agilerl.functional.preference import PreferenceScores as PreferenceScores
from agilerl.functional.preference import preference_loss as preference_loss
from agilerl.functional.preference import preference_metrics as preference_metrics
from agilerl.functional.preference import preference_scores as preference_scores
from agilerl.functional.preference import reference_point as reference_point
from agilerl.functional.preference import unpaired_loss as unpaired_loss
from agilerl.functional.preference import unpaired_margins as unpaired_margins
from agilerl.functional.reduce import MetricReducer as MetricReducer
from agilerl.functional.reduce import Reduction as Reduction
from agilerl.functional.reduce import Statistic as Statistic
