"""Single-player games of the package ``textarena``."""

from typing import Any

from agilerl.envs.adapters.base import AnyText, SealedAdapter
from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.errors import ConfigError
from agilerl.streams import sealed


class TextArenaEnv(SealedAdapter):
    """A single-player textarena game.

    Its observation wrappers, which repeat the whole history each time, are dropped: an observation is what the game has
    said since the last action. Its action wrappers stay. A game pays when it is over; most games end at the second
    invalid move in a row. ``info`` of the last step is that of textarena.
    """

    def __init__(self, inner: Any, max_turns: int | None = None) -> None:
        """Wrap ``inner``.

        Raises:
            ConfigError: the game is not for one player, or does not declare its number of turns.
        """
        from textarena import Wrapper

        core = inner
        while isinstance(core, Wrapper):
            core = core.env
        self._core = core
        super().__init__(core, max_turns if max_turns is not None else getattr(core, "max_turns", None))
        self.inner = inner
        self.action_space = AnyText("[{}]")

    def begin(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Return the game's prompt."""
        try:
            self.inner.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ConfigError(
                f"expected a single-player textarena game, but {type(self._core).__name__} says: {error}"
            ) from error
        return self._heard(), {}

    def act(self, action: str) -> StepResult:
        """Return what the game has said since."""
        done, info = self.inner.step(action=action)
        heard = self._heard()
        if not done:
            return heard, 0.0, False, False, dict(info)
        rewards, about = self._core.close()
        return heard, float(rewards[0]), True, False, dict(about[0])

    def close(self) -> None:
        """Nothing to release: textarena's ``close`` only reads the rewards."""

    def _heard(self) -> str:
        _, messages = self._core.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender < 0).strip()


def make_textarena(name: str, max_turns: int | None = None, **settings: Any) -> TextEnv:
    """Return the game registered as ``name``, e.g. "GuessTheNumber-v0"; passes ``max_turns`` on if it has a limit."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if max_turns is not None and name in ENV_REGISTRY and "max_turns" in ENV_REGISTRY[name].kwargs:
        settings["max_turns"] = max_turns
    with sealed(0):  # some constructors draw random numbers
        return TextArenaEnv(textarena.make(name, **settings), max_turns)
