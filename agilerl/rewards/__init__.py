"""Rewards: what a completion is worth, as plain functions (graders) and the few parts they share."""

from agilerl.rewards.functions import exact_match, extract_answer
from agilerl.rewards.grader import Grader, call_grader, check_score

__all__ = ["Grader", "call_grader", "check_score", "exact_match", "extract_answer"]
