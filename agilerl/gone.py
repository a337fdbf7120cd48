"""What has gone from the product, and what to use instead: whoever still names it gets one sentence."""

GONE: dict[str, str] = {}
"""By name: a manifest's key or section (``sharing``, ``training.x``), a value of one (``strategies=x``), a command
(``agilerl x``) or an option of one (``--x``). Each sentence says what to use instead, and fits behind "has gone:"."""


def instead(name: str) -> str | None:
    """Return what to use instead of something that has gone, or that is inside of it; None for other names."""
    while name:
        if name in GONE:
            return f"{name} has gone: {GONE[name]}"
        name = name.rpartition(".")[0]
    return None
