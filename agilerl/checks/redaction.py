"""Keys and passwords are never written to disk: how they are recognised in settings and command lines."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

REDACTED = "***"

_ENDINGS = ("key", "token", "secret", "password", "passwd", "passphrase", "credential", "bearer", "authorization")
_PLURALS = frozenset({"keys", "secrets", "passwords", "credentials"})  # not "tokens": models count those
_NAME = r"""["']?[A-Za-z][\w.-]*["']?"""
_VALUE = r""""[^"]*"|'[^']*'|[^\s,;&}\]"']+"""
_ASSIGNED = re.compile(rf"({_NAME})(\s*[=:]\s*)({_VALUE})")
_IN_URL = re.compile(r"""(?<=://)([^\s"'/?#]*@)?([^\s"'?#]*)([?#][^\s"']*)?""")
"""Of an address: the user with a password, what says where it is, and query and fragment."""
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
            shown.append(_without_assigned(without_keys(argument)))
        follows = option is not None and names_a_secret(option[1])
    return shown


def _without_assigned(text: str) -> str:
    whole = re.fullmatch(rf"(-*{_NAME}=)(.+)", text, re.DOTALL)
    if whole is not None and names_a_secret(whole[1].strip("-=\"'")):
        return f"{whole[1]}{REDACTED}"  # up to the end, because a secret may contain any character
    pieces, end, start = [], 0, 0
    while (match := _ASSIGNED.search(text, start)) is not None:
        if names_a_secret(match[1].strip("\"'")):
            pieces += [text[end : match.start(3)], REDACTED]
            start = end = match.end()
        else:
            start = match.end(2)  # the assigned value may itself be an assignment
    return "".join([*pieces, text[end:]])


def without_keys(value: Any) -> Any:
    """Return a text with ``***`` for what may be a secret in the addresses in it; the same for all texts in a value."""
    if isinstance(value, str):
        return _IN_URL.sub(_hidden, value) if "://" in value else value
    if isinstance(value, Mapping):
        return {key: without_keys(item) for key, item in value.items()}
    return [without_keys(item) for item in value] if isinstance(value, list) else value


def _hidden(match: re.Match[str]) -> str:
    user, host, rest = match.groups(default="")
    return f"{user and REDACTED + '@'}{host}{rest and rest[0] + REDACTED}"


def secrets_in(value: Any) -> Iterator[str]:
    """Yield the path of each string in nested settings whose name is that of a secret."""
    for path, text in texts_in(value):
        if text and names_a_secret(path.rpartition(".")[2]):
            yield path


def keys_in_addresses(value: Any) -> Iterator[str]:
    """Yield the path of each address in nested settings that has room for a key: a user, a query or a fragment."""
    for path, text in texts_in(value):
        # Of several words it is prose that mentions an address.
        if len(text.split()) == 1 and without_keys(text) != text:
            yield path


def texts_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each of nested settings, "" for what is no text."""
    if isinstance(value, Mapping | list | tuple):
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from texts_in(item, f"{path}.{key}".lstrip("."))
    else:
        yield path, value if isinstance(value, str) else ""
