"""The date that chat templates see: one for a whole run, however long it takes and however often it is resumed.

Templates such as Llama's write today's date into every prompt (``strftime_now``). With the wall clock, a run that is
resumed on another day, or that lasts past midnight, would silently sample different completions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

_LONGEST_FORMAT = 1000
_pinned: list[datetime] = []
"""The dates of the runs that this process works on, for all threads; the innermost run comes last."""


@contextmanager
def pinned(date: datetime) -> Iterator[None]:
    """Set the date that chat templates see while the context is open."""
    _pinned.append(date)
    try:
        yield
    finally:
        _pinned.reverse()  # two runs that take turns may end in either order
        _pinned.remove(date)
        _pinned.reverse()


def now() -> datetime:
    """Return the date of the run, local time; without a run, the current date."""
    return _pinned[-1] if _pinned else datetime.now()


def strftime_now(form: str) -> str:
    """Return the date in the format that a chat template asks for."""
    if len(form) > _LONGEST_FORMAT:
        raise ValueError(f"a chat template asks for the date in a format of {len(form)} characters")
    return now().strftime(form)


def asks_for_date(tokenizer: Any) -> bool:
    """Return whether the output of the chat template depends on the date."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))
