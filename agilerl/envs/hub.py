"""Whether the hub answers, asked before its client would spend half a minute on retries."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

__all__ = ["is_out_of_reach"]

PATIENCE = 5.0
"""Seconds to wait for a connection."""


def is_out_of_reach() -> bool:
    """Try to connect to the hub; behind a proxy nothing is tried, and the answer is False."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    url = urlsplit(constants.ENDPOINT)
    if url.scheme in getproxies() or url.hostname is None:
        return False
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), PATIENCE).close()
    except OSError:
        return True
    return False
