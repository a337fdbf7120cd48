"""Tasks and environments. ``ReasoningGym``, which needs torch, is in ``agilerl.llm_envs``."""

from agilerl.envs.core import MultiTurnEnv, Row, Task, score_completions
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.prompts import decode_completions, render_prompt
from agilerl.envs.split import is_held_out

__all__ = [
    "ConditionalTarget",
    "ConstantTarget",
    "DatasetTask",
    "GridNavigation",
    "MultiInputConditional",
    "MultiTurnEnv",
    "ReasoningGymTask",
    "Row",
    "Task",
    "decode_completions",
    "is_held_out",
    "render_prompt",
    "score_completions",
]
