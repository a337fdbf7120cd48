"""Addresses that files name: which of them get a key, and whether the hub answers."""

import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from agilerl.checks.redaction import without_keys
from agilerl.errors import ConfigError

ALLOWED = "AGILERL_ALLOWED_ADDRESSES"
"""Environment variable with the addresses that keys may be sent to, separated by whitespace or commas."""

_HUB_SECONDS = 5.0
"""Seconds to wait for a connection; the hub's client itself would retry for half a minute."""
OPENAI = "https://api.openai.com/v1"
_OF_SERVICES = {"OPENAI_API_KEY": [OPENAI]}
"""Keys of known services, with the addresses that they are for."""


def check_key(where: str, variable: str, address: str, typed: Iterable[str] = (), *, without: str) -> None:
    """Raise ConfigError if a file would send the key in an environment variable to an address that the file names.

    ``typed`` are the addresses that the user has given on the command line; ``without`` says how to send no key.
    """
    if may_have_key(variable, address, typed):
        return
    raise ConfigError(
        f"{where}: a manifest or run directory cannot send the API key in an environment variable ({variable}) to an "
        f"address that it names itself ({_shown(address)}); if you trust that address, allow it: "
        f"{ALLOWED}={_shown(address)}, or name it on the command line; if it needs no key, {without}"
    )


def may_have_key(variable: str, address: str, typed: Iterable[str] = ()) -> bool:
    """Return whether the user allows sending a key to an address, in the environment or on the command line.

    An allowed address covers itself and all paths below it, with the same scheme, host and port.
    """
    target = _parts(address)
    allowed = (_parts(one) for one in (*_allowed(), *typed, *_OF_SERVICES.get(variable, ())))
    # Both paths end with a slash, so that /team covers /team/a and not /teams.
    return target is not None and any(
        one is not None and one[:3] == target[:3] and f"{target[3]}/".startswith(f"{one[3]}/") for one in allowed
    )


def _allowed() -> list[str]:
    return os.environ.get(ALLOWED, "").replace(",", " ").split()


def check_cluster(address: str | None, typed: Iterable[str] = ()) -> None:
    """Raise ConfigError if a file would have this process join a Ray cluster at an address that the file names.

    Messages of such a cluster are pickled: whoever owns it runs code here.
    """
    if address in (None, "auto", "local", os.environ.get("RAY_ADDRESS"), *typed, *_allowed()):
        return
    raise ConfigError(
        f"distributed.address: a manifest cannot name the Ray cluster that is joined ({_shown(str(address))}), because "
        "its owner can run code here; if you trust it, allow it: name it on the command line, in RAY_ADDRESS, or in "
        f"{ALLOWED}"
    )


def addresses_in(value: Any) -> Iterator[str]:
    """Yield the addresses among the values of a setting, at any depth."""
    if isinstance(value, str) and value.lower().startswith(("http://", "https://")):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from addresses_in(item)


def _parts(address: str) -> tuple[str, str, int, str] | None:
    """Return scheme, host, port and path; None for anything but a plain address."""
    try:
        url = urlsplit(address)
        # A port that is no number is a ValueError, a scheme with no port of its own a KeyError.
        port = url.port or {"http": 80, "https": 443}[url.scheme]
    except (ValueError, KeyError):
        return None
    # Anything that parsers of addresses may read differently is not a plain address.
    if not url.hostname or not address.isprintable() or set(address) & set("\\#?@ ") or ".." in url.path:
        return None
    # A final dot names the same host.
    return url.scheme, url.hostname.rstrip("."), port, url.path.rstrip("/")


def _shown(address: str) -> str:
    address = without_keys(address)
    return address if len(address) <= 100 and address.isprintable() else f"{address[:97]!r}..."


def is_out_of_reach() -> bool:
    """Return whether connecting to the hub fails; behind a proxy nothing is tried and the result is False."""
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    url = urlsplit(constants.ENDPOINT)
    # A proxy may reach what a socket of this machine cannot.
    if url.scheme in getproxies() or url.hostname is None:
        return False
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname, port), _HUB_SECONDS).close()
    except OSError:
        return True
    return False
