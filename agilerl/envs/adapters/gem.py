"""GEM environments (package ``gem-llm``)."""

from typing import Any

from agilerl.envs.adapters.base import AnyText, SealedAdapter
from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.errors import ConfigError
from agilerl.streams import sealed


class GemEnv(SealedAdapter):
    """A GEM environment, without its observation wrappers: the transcript already holds the history.

    What GEM puts into ``info["suffix"]`` (the board, what to answer) is part of the observation. Rewards are those of
    GEM; a malformed answer earns -0.1 in most of its games. Seeds are taken modulo 2 ** 32.
    """

    def __init__(self, inner: Any, max_turns: int | None = None) -> None:
        super().__init__(inner, max_turns)
        self.action_space = AnyText("\\boxed{{}}")

    def begin(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Return the first observation with its suffix."""
        observation, info = self.inner.reset(seed=seed % 2**32)
        return _with_suffix(observation, info), info

    def act(self, action: str) -> StepResult:
        """Return what the game answers, with its suffix."""
        observation, reward, terminated, truncated, info = self.inner.step(action)
        over = terminated or truncated
        return (observation if over else _with_suffix(observation, info)), reward, terminated, truncated, info


_COMPARING = ("gem.envs.game_env", "gem.envs.qa_env")
"""GEM modules whose environments only compare a completion's text and never run it."""
_INSTEAD = {
    "gem.envs.reasoning_gym": "take environment.task=reasoning_gym:{rest}",
    "gem.envs.math_env": "pass its problems as a dataset with the grader accuracy",
    "gem.envs.code_env": "pass its problems as a dataset with the grader sandbox",
}


def make_gem(name: str, **settings: Any) -> TextEnv:
    """Return the GEM environment registered as ``name``, e.g. "game:GuessTheNumber-v0-easy".

    Raises:
        ConfigError: a GEM environment that evaluates completions in this process (code, mathematics, its
            reasoning_gym, terminals).
    """
    import gem
    import gem.envs
    from gem.envs.registration import ENV_REGISTRY

    made_by = ENV_REGISTRY[name].entry_point if name in ENV_REGISTRY else ""
    module = made_by.partition(":")[0] if isinstance(made_by, str) else str(made_by.__module__)
    if module.startswith("gem.") and not module.startswith(_COMPARING):
        instead = _INSTEAD.get(module, "run it in a container, behind an openenv server").format(
            rest=name.partition(":")[2]
        )
        raise ConfigError(
            f"gem:{name} evaluates completions in the training process, where they could run as code; {instead}; "
            f"or, if that is intended, pass the environment itself in Python: gem.make({name!r})"
        )
    with sealed(0):  # some constructors draw random numbers
        return GemEnv(gem.make(name, **settings))


def _with_suffix(observation: str, info: dict[str, Any]) -> str:
    suffix = info.get("suffix", "")
    return f"{observation.rstrip()}\n{suffix}" if suffix else observation
