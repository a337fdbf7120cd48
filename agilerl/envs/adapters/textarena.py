"""Single-player games of the package ``textarena``."""

from typing import Any

from agilerl.envs.adapters.base import AnyText, SealedAdapter
from agilerl.envs.global_generators import sealed
from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.errors import ConfigError


class TextArenaEnv(SealedAdapter):
    """A game of textarena for one player.

    Its observation wrappers repeat the whole history in each observation; here an observation is what the game has said
    since the last action. Its action wrappers stay. A game pays when it is over; an invalid move ends most games when
    it is the second in a row. ``info`` of the last step is textarena's own.
    """

    def __init__(self, inner: Any, max_turns: int | None = None) -> None:
        """Wrap ``inner``.

        Raises:
            ConfigError: the game is not for one player, or does not say how many turns it has.
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
                f"expected a game of textarena for one player, but {type(self._core).__name__} says: {error}"
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
    """Return the game registered as ``name``, "GuessTheNumber-v0" say; it learns of ``max_turns`` if it has a limit."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if max_turns is not None and name in ENV_REGISTRY and "max_turns" in ENV_REGISTRY[name].kwargs:
        settings["max_turns"] = max_turns
    with sealed(0):  # some constructors draw
        return TextArenaEnv(textarena.make(name, **settings), max_turns)
