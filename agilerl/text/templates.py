"""Chat templates of models and prompts of judges, rendered by jinja's sandbox, which keeps them from reaching Python.

A template that only takes long or needs memory is interrupted like any other work (docs/security.md).
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from agilerl.errors import ConfigError
from agilerl.safety.bounds import check_file

SOURCE = 2**18
"""Characters of a template in a file."""
ResultT = TypeVar("ResultT")


class TemplateBrokenError(TemplateError):
    """A template that fails on any input: it divides by zero, recurses without end, or tries to reach Python."""


def rendered(template: Template, /, **values: Any) -> str:
    """Render a template.

    Raises:
        TemplateError: the template rejects the values, or fails.
        ValueError, TypeError, LookupError: the values are not what it expects.
    """
    return _called(lambda: template.render(values))


def _called(render: Callable[[], ResultT]) -> ResultT:
    try:
        return render()
    except SecurityError as error:
        raise TemplateBrokenError(str(error)) from error
    except (TemplateError, ValueError, TypeError, LookupError):
        raise
    except Exception as error:  # division by zero, recursion, ...: templates are programs
        raise TemplateBrokenError(f"{type(error).__name__}: {error}") from error


# -- chat templates ----------------------------------------------------------------------------------------------------


_NAMES = "chat_template_kwargs"
"""Attribute of a tokenizer: values for its chat template."""
_SET = "chat_template_set"
"""Attribute of a tokenizer: the chat template that took the place of its own."""
_RESERVED = frozenset(
    "messages tools documents add_generation_prompt continue_final_message tokenize conversation chat_template "  # noqa: SIM905
    "raise_exception strftime_now".split()
)


def with_chat_template(
    tokenizer: Any,
    path: str | os.PathLike[str] | None = None,
    names: Mapping[str, Any] | None = None,
    *,
    source: str | None = None,
) -> Any:
    """Return a copy of a tokenizer with the chat template of a file, or with values that its template gets by name.

    ``source`` is the text of a template, in place of a file. :func:`settings_of` returns what was set.

    Raises:
        ConfigError: a file that is missing, too large, not UTF-8 or no template; no template for the values, one that
            does not read one of them, or values that are set for each conversation.
    """
    if path is not None:
        source = _template_of(Path(path))
    elif source is not None:
        _check_template(source, "chat_template")
    if source is None and not names:
        return tokenizer
    changed = copy(tokenizer)
    if source is not None:
        changed.chat_template = source
        setattr(changed, _SET, source)
    source = getattr(changed, "chat_template", None)
    for name in names or {}:
        key = f"chat_template_kwargs.{name}"
        if name in _RESERVED:
            raise ConfigError(f"{key} is set for each conversation, or is a part of it; remove it")
        if not source:
            raise ConfigError(f"{key}: the tokenizer has no chat template to read it; set chat_template_path")
        if not re.search(rf"\b{re.escape(name)}\b", str(source)):
            raise ConfigError(f"{key}: the chat template does not read {name}, so it would change nothing; remove it")
    if names:
        setattr(changed, _NAMES, {**vars(tokenizer).get(_NAMES, {}), **names})
    return changed


def _template_of(path: Path) -> str:
    path = path.expanduser()
    check_file(path, 4 * SOURCE)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_path={str(path)!r} cannot be read as UTF-8 text: {error}") from error
    _check_template(source, f"chat_template_path={str(path)!r}")
    return source


def _check_template(source: str, where: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        _called(lambda: render_jinja_template([[]], chat_template=source))
    except (TemplateSyntaxError, TemplateBrokenError) as error:
        raise ConfigError(f"{where} is not a chat template: {error}") from error
    except (TemplateError, ValueError, TypeError, LookupError):
        pass  # it wants a message


def settings_of(tokenizer: Any) -> dict[str, Any]:
    """Return what :func:`with_chat_template` has set: the text of the template (None: its own), and the values."""
    changed = getattr(tokenizer, "__dict__", {})  # agents without texts have no tokenizer
    return {"chat_template": changed.get(_SET), "chat_template_kwargs": changed.get(_NAMES, {})}


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    prompts: bool = False,
) -> str:
    """Return the text of ``tokenizer.apply_chat_template`` with the date of the run; ``prompts`` adds the start of an
    answer.

    Raises:
        TemplateError: the template rejects the messages, or fails.
        ValueError, TypeError, LookupError: there is no template, or the messages are not what it expects.
    """
    if not messages:
        raise ValueError("expected at least one message in a conversation, found none")
    # None, not an empty list: Llama 3's templates announce tools unless `tools` is none.
    described, names = [dict(tool) for tool in tools] or None, vars(tokenizer).get(_NAMES, {})
    if _uses_jinja(tokenizer):
        # Before transformers' own, which is the wall clock.
        names = {"strftime_now": strftime_now, "tools": described, **names}
    elif described:  # a tokenizer of another kind may know nothing of tools
        names = {"tools": described, **names}
    render = tokenizer.apply_chat_template
    call = partial(render, list(messages), tokenize=False, add_generation_prompt=prompts, **names)
    return str(_called(call) if _uses_jinja(tokenizer) else call())


def _uses_jinja(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    method = getattr(type(tokenizer), "apply_chat_template", None)
    return method is PreTrainedTokenizerBase.apply_chat_template


# -- the date that chat templates see: one for a whole run, however long it takes and however often it is resumed -----
#
# Templates such as Llama's write today's date into every prompt (``strftime_now``). With the wall clock, a run that is
# resumed on another day, or that lasts past midnight, would silently sample different completions.


_pinned: list[datetime] = []
"""The dates of the runs that this process works on, for all threads; the innermost run comes last."""


@contextmanager
def at_date(date: datetime) -> Iterator[None]:
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
    return now().strftime(form)


def asks_for_date(tokenizer: Any) -> bool:
    """Return whether the output of the chat template depends on the date."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))
