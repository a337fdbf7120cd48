"""Tasks and environments. ``ReasoningGym``, which needs torch, is in ``agilerl.llm_envs``."""

from agilerl.envs.core import Row, Task, score_completions
from agilerl.envs.curriculum import Curriculum
from agilerl.envs.datasets import CuratedTask, DatasetTask
from agilerl.envs.games import GuessTheNumber, Mastermind, TicTacToe
from agilerl.envs.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.prompts import decode_completions, render_prompt
from agilerl.envs.registration import register_environments
from agilerl.envs.sources import mix, read_dataset
from agilerl.envs.split import is_held_out
from agilerl.envs.text_env import TextEnv

__all__ = [
    "ConditionalTarget",
    "ConstantTarget",
    "CuratedTask",
    "Curriculum",
    "DatasetTask",
    "GridNavigation",
    "GuessTheNumber",
    "Mastermind",
    "MultiInputConditional",
    "ReasoningGymTask",
    "Row",
    "Task",
    "TextEnv",
    "TicTacToe",
    "decode_completions",
    "is_held_out",
    "mix",
    "read_dataset",
    "render_prompt",
    "score_completions",
]

register_environments()
