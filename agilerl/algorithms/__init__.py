"""Algorithms: one a file, all on the shared base."""

from agilerl.algorithms.base import EvolvableAlgorithm
from agilerl.algorithms.cispo import CISPO, CISPOConfig
from agilerl.algorithms.grpo import GRPO, GRPOConfig
from agilerl.algorithms.gspo import GSPO, GSPOConfig
from agilerl.algorithms.llm import LLMAlgorithm
from agilerl.algorithms.ppo import PPO, PPOConfig
from agilerl.algorithms.reinforce import REINFORCE, REINFORCEConfig
from agilerl.algorithms.rloo import RLOO, RLOOConfig
from agilerl.algorithms.schedules import CosineLRScheduleConfig

__all__ = [
    "ALGORITHMS",
    "CISPO",
    "CISPOConfig",
    "GRPO",
    "GSPO",
    "GSPOConfig",
    "CosineLRScheduleConfig",
    "EvolvableAlgorithm",
    "GRPOConfig",
    "LLMAlgorithm",
    "LLMPPO",
    "LLMREINFORCE",
    "PPO",
    "PPOConfig",
    "REINFORCE",
    "REINFORCEConfig",
    "RLOO",
    "RLOOConfig",
]

LLMPPO = PPO
"""The documented other name of PPO."""
LLMREINFORCE = REINFORCE
"""The documented other name of REINFORCE."""

ALGORITHMS: dict[str, type[LLMAlgorithm]] = {
    "GRPO": GRPO,
    "GSPO": GSPO,
    "CISPO": CISPO,
    "RLOO": RLOO,
    "REINFORCE": REINFORCE,
    "PPO": PPO,
}
"""Algorithms by the name that a manifest uses; to add one, pass your class where a name is expected."""
