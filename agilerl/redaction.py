"""Keys and passwords are never written to disk: how they are recognised in settings and command lines."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REDACTED = "***"

_ENDINGS = ("key", "token", "secret", "password", "passwd", "passphrase", "credential", "bearer", "authorization")
_PLURALS = frozenset({"keys", "secrets", "passwords", "credentials"})  # not "tokens": models count those
_NAME = r"""["']?[A-Za-z][\w.-]*["']?"""
_VALUE = r""""[^"]*"|'[^']*'|[^\s,;&}\]"']+"""
_ASSIGNED = re.compile(rf"({_NAME})(\s*[=:]\s*)({_VALUE})")
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def names_a_secret(name: str) -> bool:
    """Return whether a setting of this name holds a secret: ``api_key`` does, ``api_key_env`` or ``max_tokens`` not.

    A setting whose name ends with ``env`` holds the name of an environment variable.
    """
    words = [word.lower() for word in _WORDS.findall(name.rpartition(".")[2])]
    return any(word.endswith(_ENDINGS) or word in _PLURALS for word in words) and words[-1] != "env"


def redacted(command: Sequence[str]) -> list[str]:
    """Return a command line with ``***`` for the value of each setting that holds a secret, also in other values."""
    shown, follows = [], False
    for argument in command:
        option = _OPTION.fullmatch(argument)
        if follows and option is None:
            shown.append(REDACTED)
        else:
            shown.append(_IN_URL.sub(REDACTED, _without_assigned(argument)))
        follows = option is not None and names_a_secret(option[1])
    return shown


def _without_assigned(text: str) -> str:
    whole = re.fullmatch(rf"(-*{_NAME}=)(.+)", text, re.DOTALL)
    if whole is not None and names_a_secret(whole[1].strip("-=\"'")):
        return f"{whole[1]}{REDACTED}"  # up to the end, because a secret may contain any character
    pieces, end, place = [], 0, 0
    while (found := _ASSIGNED.search(text, place)) is not None:
        if names_a_secret(found[1].strip("\"'")):
            pieces += [text[end : found.start(3)], REDACTED]
            place = end = found.end()
        else:
            place = found.end(2)  # the assigned value may itself be an assignment
    return "".join([*pieces, text[end:]])


def secrets_in(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each string in nested settings whose name is that of a secret."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else str(key)
            if isinstance(item, str) and item and names_a_secret(str(key)):
                yield inner
            yield from secrets_in(item, inner)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from secrets_in(item, f"{path}.{number}" if path else str(number))
