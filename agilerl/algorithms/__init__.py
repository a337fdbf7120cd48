"""Algorithms: one a file, all on the shared base."""

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.cispo import CISPOConfig
from agilerl.algorithms.config import CosineLRScheduleConfig
from agilerl.algorithms.custom_loss import PolicyLoss
from agilerl.algorithms.dpo import DPO, DPOConfig
from agilerl.algorithms.dppo import DPPOConfig
from agilerl.algorithms.grpo import CISPO, DPPO, FAMILY, GRPO, GSPO, REINFORCE, RLOO, GRPOConfig, MaxRL
from agilerl.algorithms.gspo import GSPOConfig
from agilerl.algorithms.kto import KTO, KTOConfig
from agilerl.algorithms.maxrl import MaxRLConfig
from agilerl.algorithms.ppo import PPO, PPOConfig
from agilerl.algorithms.reinforce import REINFORCEConfig
from agilerl.algorithms.rloo import RLOOConfig
from agilerl.algorithms.sft import SFT, SFTConfig

__all__ = [
    "ALGORITHMS",
    "CISPO",
    "CISPOConfig",
    "DPO",
    "DPPO",
    "DPOConfig",
    "DPPOConfig",
    "MaxRL",
    "MaxRLConfig",
    "GRPO",
    "GSPO",
    "GSPOConfig",
    "CosineLRScheduleConfig",
    "EvolvableAlgorithm",
    "FAMILY",
    "GRPOConfig",
    "KTO",
    "KTOConfig",
    "LLMAlgorithm",
    "LLMPPO",
    "LLMREINFORCE",
    "PPO",
    "PPOConfig",
    "PolicyLoss",
    "REINFORCE",
    "REINFORCEConfig",
    "RLOO",
    "RLOOConfig",
    "SFT",
    "SFTConfig",
]

EvolvableAlgorithm = LLMAlgorithm
"""The documented name of agents that evolution can clone, mutate, save and restore."""
LLMPPO = PPO
"""The documented other name of PPO."""
LLMREINFORCE = REINFORCE
"""The documented other name of REINFORCE."""

ALGORITHMS: dict[str, type[LLMAlgorithm]] = {**FAMILY, **{cls.__name__: cls for cls in (PPO, DPO, KTO, SFT)}}
"""Algorithms by the name that a manifest uses; to add one, pass your class where a name is expected."""
