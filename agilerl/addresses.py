"""Requests to addresses that files name: which of them get a key, how much of an answer is read, if the hub answers."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agilerl.errors import ConfigError

if TYPE_CHECKING:  # the command reads manifests with this file before its first output
    import httpx2

ALLOWED = "AGILERL_ALLOWED_ADDRESSES"
"""Environment variable with the addresses that keys may be sent to, separated by whitespace or commas."""

_ANSWER_BYTES = 64 * 2**20
_HUB_SECONDS = 5.0
"""Seconds to wait for a connection; the hub's client itself would retry for half a minute."""
_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Compression methods that expand a piece of an answer to at most a thousand times its size."""
OPENAI = "https://api.openai.com/v1"
_OWN = {"OPENAI_API_KEY": OPENAI}
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
    allowed = os.environ.get(ALLOWED, "").replace(",", " ").split()
    own = [_OWN[variable]] if variable in _OWN else []
    target = _parts(address)
    return target is not None and any(_covers(_parts(one), target) for one in (*allowed, *typed, *own))


def check_cluster(address: str | None, typed: Iterable[str] = ()) -> None:
    """Raise ConfigError if a file would have this process join a Ray cluster at an address that the file names.

    Messages of such a cluster are pickled: whoever owns it runs code here.
    """
    allowed = os.environ.get(ALLOWED, "").replace(",", " ").split()
    if address in (None, "auto", "local", os.environ.get("RAY_ADDRESS"), *typed, *allowed):
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


Address = tuple[str, str, int, str]


def _parts(address: str) -> Address | None:
    """Return scheme, host, port and path; None for anything but a plain address."""
    try:
        found = urlsplit(address)
        port = found.port or {"http": 80, "https": 443}[found.scheme]
    except (ValueError, KeyError):
        return None
    # Anything that parsers of addresses may read differently is not a plain address.
    if not found.hostname or not address.isprintable() or set(address) & set("\\#?@ ") or ".." in found.path:
        return None
    return found.scheme, found.hostname.rstrip("."), port, found.path.rstrip("/").removesuffix("/v1")


def _covers(allowed: Address | None, target: Address) -> bool:
    return allowed is not None and allowed[:3] == target[:3] and f"{target[3]}/".startswith(f"{allowed[3]}/")


def _shown(address: str) -> str:
    address = re.sub(r"(?<=://)[^/]*@", "***@", address)  # a password may precede the host
    return address if len(address) <= 100 and address.isprintable() else f"{address[:97]!r}..."


def request(client: "httpx2.Client", method: str, url: Any, *, seconds: float, **arguments: Any) -> "httpx2.Response":
    """Send a request and return the whole answer, of at most 64 MiB, decompressed.

    A client's timeouts limit each wait for data, and a server that sends a byte a minute never exceeds them, be it in
    headers, interim answers, or a compressed text of no length; ``seconds`` limits the whole answer. Raises
    AnswerTooLarge, and whatever the client raises.
    """
    import httpx2

    content = bytearray()
    headers = {"Accept-Encoding": "gzip, deflate", **arguments.pop("headers", {})}
    before = getattr(_DEADLINE, "of_thread", None)
    _DEADLINE.of_thread = time.monotonic() + seconds
    try:
        with client.stream(method, url, headers=headers, extensions={"trace": _bound_stream}, **arguments) as answer:
            if answer.headers.get("Content-Encoding", "").lower() not in _ENCODINGS:
                raise _too_large()("the answer is compressed with a method that was not requested")
            for piece in answer.iter_bytes():
                content += piece
                if len(content) > _ANSWER_BYTES:
                    raise _too_large()(f"the answer has more than {_ANSWER_BYTES >> 20} MiB")
                _seconds_left()
    finally:
        _DEADLINE.of_thread = before
    kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_TRANSFER}
    return httpx2.Response(answer.status_code, headers=kept, content=bytes(content), request=answer.request)


_DEADLINE = threading.local()
"""When the request of a thread has to be answered; a client without an event loop reads in the thread that asks."""


def _seconds_left() -> float:
    """Return the seconds left for the request of this thread; raises the client's timeout if there are none."""
    import httpx2

    deadline = getattr(_DEADLINE, "of_thread", None)
    left = _NO_DEADLINE if deadline is None else deadline - time.monotonic()
    if left <= 0:
        raise httpx2.ReadTimeout("the answer was not complete in time")
    return float(left)


_NO_DEADLINE = 1e6  # a connection that is closed between requests


def _bound_stream(event: str, about: dict[str, Any]) -> None:
    """Let a new connection wait no longer than the request in progress has left; called with what the client does."""
    stream = about.get("return_value")
    if event.endswith(".complete") and hasattr(stream, "start_tls"):
        for name in ("read", "write"):
            setattr(stream, name, partial(_until_deadline, getattr(stream, name)))


def _until_deadline(act: Any, data: Any, timeout: float | None = None) -> Any:
    left = _seconds_left()
    return act(data, timeout=left if timeout is None else min(timeout, left))


@cache
def _too_large() -> type[Exception]:
    """Return the class of an answer that is longer than any that makes sense."""
    import httpx2

    class AnswerTooLarge(httpx2.HTTPError):
        pass

    return AnswerTooLarge


_OF_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")


def is_out_of_reach() -> bool:
    """Return whether connecting to the hub fails; behind a proxy nothing is tried and the result is False."""
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    url = urlsplit(constants.ENDPOINT)
    if url.scheme in getproxies() or url.hostname is None:
        return False
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname, port), _HUB_SECONDS).close()
    except OSError:
        return True
    return False
