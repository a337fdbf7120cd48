"""Environments of the package ``openenv``: in this process, or on a server."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel

from agilerl.envs.adapters.base import Adapter
from agilerl.envs.text_env import Begun, StepResult, TextEnv
from agilerl.errors import ConfigError, EnvError

_ANSWER_MIB = 64
# Fields of every observation beside its content.
_NOT_TEXT = ("done", "reward", "metadata")


class OpenEnv(Adapter):
    """An openenv ``Environment``, or a client of one on a server.

    ``action`` turns the text of a completion into the action. Without it, an environment in this process gets an
    instance of the class that its ``step`` is annotated with, made from that class's only text field; a client gets
    ``{"message": text}``. ``observation`` turns what the environment returns into text; by default its only text field.
    ``done`` becomes ``terminated``; a missing reward is 0.
    """

    def __init__(
        self,
        inner: Any,
        max_turns: int | None = None,
        *,
        action: Callable[[str], Any] | None = None,
        observation: Callable[[Any], str] | None = None,
    ) -> None:
        """Wrap ``inner``, one for each TextEnv; raises ConfigError without a turn limit or a known class of actions."""
        from openenv.core import EnvClient, Environment

        super().__init__(inner, max_turns)
        self._remote = not isinstance(inner, Environment)
        # A client is asynchronous; its synchronous wrapper keeps the same connection.
        self.inner = inner.sync() if isinstance(inner, EnvClient) else inner
        self._action = action or ((lambda text: {"message": text}) if self._remote else _action_of(inner))
        self._text = observation or _only_text

    def begin(self, seed: int) -> Begun:
        """Return the first observation as text."""
        return self._read(self.inner.reset(seed=seed))[::4]  # observation and info of the five

    def act(self, action: str) -> StepResult:
        """Return the environment's reply."""
        return self._read(self.inner.step(self._action(action)))

    def _read(self, reply: Any) -> StepResult:
        # A client's reply wraps the observation; an environment in this process returns it with reward and done.
        text = self._text(reply.observation if self._remote else reply)
        return text, float(reply.reward or 0.0), bool(reply.done), False, dict(reply.metadata or {})


def make_openenv(url: str, max_turns: int, **settings: Any) -> TextEnv:
    """Return the environment that an openenv server offers at ``url``, e.g. "http://127.0.0.1:8000"."""
    from openenv.core import GenericEnvClient

    # Settings come from manifests, so they may lower the limit and not raise it.
    megabytes = settings.setdefault("max_message_size_mb", _ANSWER_MIB)
    if not isinstance(megabytes, int | float) or not 0 < megabytes <= _ANSWER_MIB:
        raise ConfigError(f"expected max_message_size_mb of at most {_ANSWER_MIB}, found {megabytes!r}")
    return OpenEnv(GenericEnvClient(base_url=url, **settings), max_turns)


def _action_of(env: Any) -> Callable[[str], Any]:
    """Return a function from text to an action, by the annotation of the environment's ``step``."""
    kind: Any = get_type_hints(type(env).step).get(next(iter(inspect.signature(env.step).parameters)))
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    fields = [name for name, field in kind.model_fields.items() if field.annotation is str] if is_model else []
    if len(fields) != 1:
        raise ConfigError(
            f"expected {type(env).__name__}.step to be annotated with a class that has one text field, found {kind!r} "
            f"with {', '.join(fields) or 'none'}; pass OpenEnv(..., action=lambda text: ...)"
        )
    return lambda text: kind(**{fields[0]: text})


def _only_text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    values: Mapping[str, Any] = observation.model_dump() if isinstance(observation, BaseModel) else observation
    texts = {k: v for k, v in values.items() if k not in _NOT_TEXT and isinstance(v, str)}
    if len(texts) != 1:
        raise EnvError(
            f"expected one text field in the openenv observation, found {', '.join(texts) or 'none'} among "
            f"{', '.join(values)}; pass OpenEnv(..., observation=lambda observation: ...)"
        )
    return next(iter(texts.values()))
