"""Tasks and environments. ``ReasoningGym``, which needs torch, is in ``agilerl.llm_envs``."""

import gymnasium

from agilerl.envs.answer_format import AnswerFormatTask
from agilerl.envs.core import Row, Task, is_held_out, score_completions
from agilerl.envs.datasets import CuratedTask, DatasetTask
from agilerl.envs.games import GuessTheNumber
from agilerl.envs.procedural import Curriculum, ReasoningGymTask
from agilerl.envs.prompts import decode_completions, render_prompt
from agilerl.envs.sources import mix, read_dataset
from agilerl.envs.text_env import TextEnv

__all__ = [
    "AnswerFormatTask",
    "CuratedTask",
    "Curriculum",
    "DatasetTask",
    "GuessTheNumber",
    "ReasoningGymTask",
    "Row",
    "Task",
    "TextEnv",
    "decode_completions",
    "is_held_out",
    "mix",
    "read_dataset",
    "render_prompt",
    "score_completions",
]

ENVIRONMENTS = {
    "agilerl/GuessTheNumber-v0": "agilerl.envs.games:GuessTheNumber",
}


def register_environments() -> None:
    """Register the ids with gymnasium; importing ``agilerl.envs`` does this."""
    for name, entry_point in ENVIRONMENTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry_point)


register_environments()
