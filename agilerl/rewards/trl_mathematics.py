"""TRL's functions with algebra, in the process of a ``TrlMathematics``, which imports TRL before it is confined."""

from collections.abc import Mapping
from typing import Any

from agilerl.rewards.grader import attempt_grader
from agilerl.rewards.trl_rewards import trl_function

trl_function("accuracy_reward", {})


def score(completion: str, trl: Mapping[str, Any], **row: Any) -> Any:
    """Return what the function ``trl["function"]`` with ``trl["params"]`` says of one completion; raises its error."""
    (outcome,) = attempt_grader(trl_function(trl["function"], trl["params"]), [completion], [row])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
