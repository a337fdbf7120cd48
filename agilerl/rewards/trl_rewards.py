"""The reward functions of TRL by name: those that only read text as they are, those with algebra in a process.

TRL is imported when one of them is made (or, for those with algebra, in their process).
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from agilerl.checks.arguments import Count, Positive, checked
from agilerl.errors import ConfigError, how_to_install
from agilerl.rewards.grader import BaseGrader, Grader, attempt_grader
from agilerl.rewards.isolated import IsolatedGrader

OF_TEXT = ("think_format_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment")
"""Functions that count and compare."""
WITH_ALGEBRA = ("accuracy_reward", "get_cosine_scaled_reward", "reasoning_accuracy_reward")
"""Functions that hand completions to an algebra system, which a short text can keep busy for ever."""


class TrlMathematics(IsolatedGrader):
    """One of TRL's functions with algebra, in a process without privileges, as ``Accuracy`` is.

    The correct answer is the column ``solution``, as in TRL, or else ``answer``.
    """

    # As in Accuracy: an answer depends on nothing but the question.
    remembers = False

    @checked
    def __init__(self, function: str, *, timeout: Positive = 5.0, workers: Count = 1, **params: Any) -> None:
        """Take the name of the function in ``trl.rewards`` and its keywords, or those of ``get_...``.

        Raises ConfigError if TRL or math-verify is not installed, or TRL refuses the keywords.
        """
        if find_spec("math_verify") is None:
            raise ConfigError(f"{function} needs math-verify, which is not installed; run: {how_to_install('math')}")
        trl_function(function, params)
        grader = "agilerl.rewards.trl_rewards:algebra"
        super().__init__(grader, timeout=timeout, workers=workers, name=f"trl.{function}", confined=True)
        self.function = {"function": function, "params": dict(params)}

    def question(self, completion: str, prompt: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is sent to a process: the columns that these functions read, and which function it is."""
        known = {"solution": row.get("solution") or row.get("answer"), "completion_ids": row.get("completion_ids")}
        sent = {key: value for key, value in known.items() if value is not None}
        return {"completion": completion, "prompt": prompt, "row": {**sent, "trl": self.function}}


class _Algebra(BaseGrader):
    """What runs in the process of a ``TrlMathematics``."""

    def open(self) -> None:
        """Import TRL before the process is confined."""
        trl_function("accuracy_reward", {})

    def __call__(self, completion: str, trl: Mapping[str, Any], **row: Any) -> Any:
        """Return what the function ``trl["function"]`` with ``trl["params"]`` says; raises its error."""
        (outcome,) = attempt_grader(trl_function(trl["function"], trl["params"]), [completion], [row])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


algebra = _Algebra()


def trl_function(name: str, params: Mapping[str, Any]) -> Grader:
    """Return a function of ``trl.rewards`` with its keywords; ``get_...`` is called with them and returns it.

    Raises ConfigError if TRL is not installed, has no such function, or refuses the keywords.
    """
    if find_spec("trl") is None:
        raise ConfigError(f"the reward trl.{name} needs TRL, which is not installed; run: pip install trl")
    from trl import rewards

    try:
        function: Any = getattr(rewards, name)
        if name.startswith("get_"):
            return function(**params)  # type: ignore[no-any-return]
    except AttributeError as error:
        raise ConfigError(f"the installed TRL has no reward function {name}; update it: pip install -U trl") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"trl.{name} does not take the parameters {dict(params)}: {error}") from error
    unknown = set(params) - (set(inspect.signature(function).parameters) - _FROM_ROWS)
    if unknown:  # its ``**kwargs`` would swallow them
        raise ConfigError(f"trl.{name} does not take the parameters {sorted(unknown)}; remove them")
    return partial(function, **params)


# Given by the rows or the caller, so no settings.
_FROM_ROWS = {"completions", "completion_ids", "solution", "log_extra", "kwargs"}


def trl_rewards() -> dict[str, Callable[..., Grader]]:
    """Return the constructors of TRL's functions by the names that manifests use, ``trl.accuracy_reward``."""
    of_text = {f"trl.{name}": partial(_of_text, name) for name in OF_TEXT}
    return {**{f"trl.{name}": partial(TrlMathematics, name) for name in WITH_ALGEBRA}, **of_text}


def _of_text(name: str, **params: Any) -> Grader:
    # A function with a name of its own; TRL's stays as it is.
    grader: Any = partial(trl_function(name, params))
    grader.name = f"trl.{name}"
    return grader  # type: ignore[no-any-return]
