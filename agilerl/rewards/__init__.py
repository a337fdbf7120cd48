"""Rewards: completions are scored by plain functions, or by graders that hold resources such as a model."""

from agilerl.rewards.combine import CombinedGrader
from agilerl.rewards.grader import (
    BaseGrader,
    Grader,
    Grades,
    call_grader,
    check_score,
    exact_match,
    extract_answer,
    grade,
)
from agilerl.rewards.isolated import IsolatedGrader
from agilerl.rewards.judge import JudgeGrader, PairwiseJudgeGrader
from agilerl.rewards.library import (
    LIBRARY,
    Accuracy,
    FormatTags,
    JsonValid,
    Overlong,
    Regex,
    Repetition,
    TokenLength,
    library_grader,
)
from agilerl.rewards.reward_model import RewardModelGrader
from agilerl.rewards.sandbox import SandboxGrader, SandboxResult, run_python
from agilerl.rewards.waiting import ThreadedGrader, WaitingGrader

__all__ = [
    "LIBRARY",
    "Accuracy",
    "BaseGrader",
    "CombinedGrader",
    "FormatTags",
    "Grader",
    "Grades",
    "IsolatedGrader",
    "JsonValid",
    "JudgeGrader",
    "Overlong",
    "PairwiseJudgeGrader",
    "Regex",
    "Repetition",
    "RewardModelGrader",
    "SandboxGrader",
    "SandboxResult",
    "ThreadedGrader",
    "TokenLength",
    "WaitingGrader",
    "call_grader",
    "check_score",
    "exact_match",
    "extract_answer",
    "grade",
    "library_grader",
    "run_python",
]
