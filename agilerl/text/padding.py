"""The pad token of a tokenizer: the one that is given, else its own, else its end token."""

import copy
import inspect
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agilerl.checks.arguments import shown
from agilerl.errors import ConfigError

_log = logging.getLogger(__name__)


def with_padding(tokenizer: Any, name: str, *, pad_token: str | None = None, pad_token_id: int | None = None) -> Any:
    """Return a tokenizer with the given pad token, or else its own, or else its end token (which is logged).

    Padding is never trained on, whatever its token: the masks exclude it. The given tokenizer is not changed. Raises
    ConfigError for a token that it does not have, for two that disagree, and if no token is available.
    """
    if pad_token is not None or pad_token_id is not None:
        wanted = padding_id(tokenizer, pad_token, pad_token_id)
    elif tokenizer.pad_token_id is not None:
        return tokenizer
    elif tokenizer.eos_token_id is not None:
        wanted = tokenizer.eos_token_id
        _say_what_pads(name, tokenizer.eos_token)
    else:
        raise ConfigError(
            f"the tokenizer of {name!r} has neither a pad token nor an end token to pad with; name one of its tokens: "
            "pad_token=... or pad_token_id=... (in a manifest network.pad_token or network.pad_token_id)"
        )
    if wanted != tokenizer.pad_token_id:
        # A copy, because a user's tokenizer is not changed.
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(wanted)
    return tokenizer


def padded(tokenizer: Any) -> Any:
    """Return a user's tokenizer, or ``with_padding`` if it has no pad token; one without any end token as it is."""
    # 0, so that a tokenizer without such an attribute passes for one with a pad token.
    if getattr(tokenizer, "pad_token_id", 0) is not None or getattr(tokenizer, "eos_token_id", None) is None:
        return tokenizer
    return with_padding(tokenizer, str(getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__))


def has_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer writes conversations itself; one of another kind may do so without a template."""
    return bool(getattr(tokenizer, "chat_template", hasattr(tokenizer, "apply_chat_template")))


def decoded(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens, spaces unchanged; options that a tokenizer of another kind lacks are left out."""
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    # By class, so that the cache below keeps no tokenizer alive.
    kind: Any = type(tokenizer)
    return str(tokenizer.decode(ids, **{name: options[name] for name in _known(kind, *options)}))


@lru_cache(maxsize=64)
def _known(kind: Any, *names: str) -> list[str]:
    parameters = inspect.signature(kind.decode).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in names if takes_all or name in parameters]


@lru_cache(maxsize=64)
def _say_what_pads(name: str, end: str) -> None:
    """Log it once, although a base, its agents and environments may come with the same tokenizer."""
    _log.warning(
        "The tokenizer of %r has no pad token: its end token %r is used; pad_token or pad_token_id sets another.",
        name,
        end,
    )


def padding_id(tokenizer: Any, pad_token: str | None, pad_token_id: int | None) -> int:
    """Return the id of a pad token that is given by name, by id or by both.

    Raises ConfigError unless it is one of the tokenizer's tokens, and name and id agree.
    """
    if pad_token_id is not None:
        name = tokenizer.convert_ids_to_tokens(pad_token_id) if 0 <= pad_token_id < len(tokenizer) else None
        if name is None:
            raise ConfigError(
                f"pad_token_id={pad_token_id} is not a token of the tokenizer, which has {len(tokenizer)}; leave it "
                f"out, or use one of them, for instance the end token ({tokenizer.eos_token_id})"
            )
        if pad_token not in (None, name):
            raise ConfigError(f"pad_token_id={pad_token_id} is {name!r}, but pad_token={shown(pad_token)}; give one")
        return pad_token_id
    # The id of a text that is no token is that of unk, which does not lead back to the text.
    number = tokenizer.convert_tokens_to_ids(pad_token)
    if number is None or tokenizer.convert_ids_to_tokens(number) != pad_token:
        raise ConfigError(
            f"pad_token={shown(pad_token)} is not a token of the tokenizer; leave it out, or use one of its tokens, "
            f"for instance the end token {tokenizer.eos_token!r}"
        )
    return int(number)
