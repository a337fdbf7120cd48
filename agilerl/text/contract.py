"""What a tokenizer and its chat template put around prompts and answers; found by rendering, never by a model's name.

Sampling, supervised rows, graders and servers all read it here, so that what stops an answer is what was taught.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from agilerl.text.padding import decoded, has_template
from agilerl.text.templates import apply_chat_template, settings_of

MARK, _ASKED, _RULES = (f"agilerl:here-the-{speaker}-spoke" for speaker in ("model", "user", "system"))
_PLACEHOLDERS = {"assistant": MARK, "user": _ASKED, "system": _RULES}
"""What stands for the messages of a role while the text around them is determined."""
_LARGEST_CONFIG = 1 << 20
"""Largest configuration to read, in bytes."""
CLOSED = re.compile(r"\A(?:\s*[<\[](\w+)[>\]].*?[<\[]/\1[>\]])*\s*", re.DOTALL)
"""Pairs of tags, closed again, with what is in them."""
_ENDS, _CONTRACT = "model_ends", "text_contract"
"""Attributes of a tokenizer: the end tokens of the base that it is used with; what was found of it."""


@dataclass(frozen=True)
class TextContract:
    """What surrounds prompts and answers, as token ids and as text."""

    begins: tuple[int, ...]
    """What the tokenizer puts before a text that is no conversation."""
    starts: tuple[int, ...]
    """What prompts begin with: the template's first tokens, as many as ``begins``, at least one; or ``begins``."""
    behind: tuple[int, ...]
    """What it puts behind such a text; a prompt, which is to be continued, does not get it."""
    ends: tuple[int, ...]
    """The tokens that end an answer: those of the model, of the tokenizer and of the chat template."""
    end_texts: tuple[str, ...]
    """The texts of those that no tokenizer makes of several tokens."""
    end: int | None
    """The token that ends an answer in rows to learn from: the template's, else the tokenizer's, else the model's."""
    closing: str
    """What the template writes behind an answer, its end token included; empty if it writes none."""
    opened: str
    """What the generation prompt opens for the model beyond the header of an answer, such as ``<think>``."""
    left_open: str
    """What of it graders read before a completion: no special tokens, and not what it has closed again, such as the
    empty thinking of a model that is not to think."""
    drops_system: bool
    """Whether the template leaves out system messages."""
    joins: bool
    """Whether texts tokenised one by one are the tokens of the whole text: no piece gets a space of its own."""


def contract_of(tokenizer: Any) -> TextContract:
    """Return what a tokenizer puts around prompts and answers; found once for each state of it."""
    # Not getattr, with which an attribute that a tokenizer of transformers lacks costs as much as rendering a message.
    attributes, names = vars(tokenizer), ("chat_template", "bos_token", "eos_token", "name_or_path")
    state = [getattr(tokenizer, name, None) for name in names]
    key = *state, attributes.get(_ENDS), repr(settings_of(tokenizer)["chat_template_kwargs"])
    result = attributes.get(_CONTRACT)
    if result is None or result[0] != key:
        result = key, _read(tokenizer)
        setattr(tokenizer, _CONTRACT, result)
    contract: TextContract = result[1]
    return contract


def with_ends(tokenizer: Any, ends: Sequence[int]) -> Any:
    """Return a tokenizer that knows the end tokens of the base it is used with: a copy, unless it knew them."""
    if set(ends) <= set(contract_of(tokenizer).ends):
        return tokenizer
    changed = copy(tokenizer)
    setattr(changed, _ENDS, tuple(ends))
    return changed


def stated_ends(generation: Any, *configs: Any) -> tuple[Any, ...]:
    """Return the end tokens that a generation configuration states, and a model's configuration or its parts.

    These count where the first states none, and where they have a list: a single one may be its class's default.
    """
    values = [generation, *configs]
    if generation not in (None, []):
        values[1:] = [value for value in configs if isinstance(value, list | tuple)]
    ids = (end for value in values for end in (value if isinstance(value, list | tuple) else [value]))
    return tuple(dict.fromkeys(end for end in ids if end is not None))


def unstated_ends(tokenizer: Any) -> list[int]:
    """Return the end tokens that only its chat template writes: neither its files nor the tokenizer name them."""
    stated = {tokenizer.eos_token_id, *_ends_beside(tokenizer)}
    return [end for end in contract_of(tokenizer).ends if end not in stated]


def token_ids(encoded: Any) -> list[int]:
    """Return the ids of a BatchEncoding, or of the plain list of a tokenizer of another kind."""
    return [int(token) for token in (encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)]


def template_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that has all special tokens in it, such as what a chat template has written."""
    return token_ids(tokenizer(text, add_special_tokens=False))


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that is no conversation and may be continued: begun once, and not ended."""
    contract, start = contract_of(tokenizer), getattr(tokenizer, "bos_token", None)
    if start and text.startswith(start):
        return template_ids(tokenizer, text)
    ids, behind = token_ids(tokenizer(text)), list(contract.behind)
    return ids[: -len(behind)] if behind and ids[-len(behind) :] == behind else ids


def text_ids(tokenizer: Any, text: str, before: str = "") -> list[int]:
    """Return the tokens of a text that continues another one, as a model would produce them; no special tokens.

    Where a tokenizer gives each piece a space of its own, the piece is read behind what precedes it.
    """
    if contract_of(tokenizer).joins:
        return template_ids(tokenizer, text)
    # Where both ends of the seam become one token, behind something that becomes none with the text.
    for start in (*([before] if before else []), *"\n:a"):
        first, whole = template_ids(tokenizer, start), template_ids(tokenizer, start + text)
        if whole[: len(first)] == first:
            return whole[len(first) :]
    return template_ids(tokenizer, text)


def named_tokens(tokenizer: Any, ids: Sequence[int], between: str = " ") -> str:
    """Return tokens with their ids, as people read them; "nothing" for none."""
    names = zip(ids, tokenizer.convert_ids_to_tokens(list(ids)))
    return between.join(f"{name or 'unknown to the tokenizer'} ({number})" for number, name in names) or "nothing"


def readings(tokenizer: Any) -> tuple[str, str, bool]:
    """Return how prompts begin and how answers end, in words, and whether there was more than one way to read it.

    Where the tokenizer alone would begin otherwise, the template's way is taken.
    """
    contract = contract_of(tokenizer)
    differs = contract.starts[: len(contract.begins)] != contract.begins
    begin = f"prompts begin with {named_tokens(tokenizer, contract.starts)}"
    if differs:
        begin += f", as the template writes them; a text alone with {named_tokens(tokenizer, contract.begins)}"
    if contract.behind:
        begin += f"; {named_tokens(tokenizer, contract.behind)}, which the tokenizer puts behind a text, is left out"
    if contract.opened.strip():
        begin += f"; they end with {contract.opened!r}, which answers continue"
    end = f"answers end with {named_tokens(tokenizer, contract.ends, ' or ')}"
    if several := len(contract.ends) > 1:
        end += f"; rows teach {named_tokens(tokenizer, [contract.end or 0])}"
    return begin, end, differs or several or bool(contract.behind) or bool(contract.opened.strip())


# -- how it is found ---------------------------------------------------------------------------------------------------


def _read(tokenizer: Any) -> TextContract:
    begins, behind = _around(tokenizer)
    usual = getattr(tokenizer, "eos_token_id", None)
    stated = *vars(tokenizer).get(_ENDS, ()), *_ends_beside(tokenizer), usual
    ends = dict.fromkeys(token for token in stated if token is not None)
    prompt, followed = _rendered(tokenizer, "user", prompts=True), _rendered(tokenizer, "user", "assistant", "user")
    closings = _closings(tokenizer, prompt, followed)
    # The tokenizer's own, if the template writes none.
    closing, end = closings[0] if closings else ("", usual if usual is not None else next(iter(ends), None))
    ends |= dict.fromkeys(token for token in (end, *(token for _, token in closings)) if token is not None)
    texts = _added(tokenizer, ends) or [text for text in [getattr(tokenizer, "eos_token", None)] if text]
    before, _, _ = prompt.partition(_ASKED)
    starts = template_ids(tokenizer, before + "x")[: max(len(begins), 1)] if before else []
    header, mark, _ = followed.partition(MARK)
    opened = unspecial = prompt[len(header) :] if mark and prompt.startswith(header) else ""
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        unspecial = unspecial.replace(token.content, "") if token.special else unspecial
    ruled = _rendered(tokenizer, "system", "user")
    return TextContract(
        begins=begins,
        starts=tuple(starts) if prompt else begins,
        behind=behind,
        ends=tuple(ends),
        end_texts=tuple(texts),
        end=end,
        closing=closing,
        opened=opened,
        left_open=CLOSED.sub("", unspecial, count=1),
        drops_system=bool(ruled) and _RULES not in ruled,
        joins=decoded(tokenizer, [*template_ids(tokenizer, "a"), *template_ids(tokenizer, "b")]) == "ab",
    )


def _around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what a tokenizer puts before and behind a text."""
    bare, whole = template_ids(tokenizer, "a"), token_ids(tokenizer("a"))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def _rendered(tokenizer: Any, *roles: str, prompts: bool = False) -> str:
    """Return a conversation as the template writes it, ``MARK`` for answers; empty without one or if it refuses it."""
    # Some templates want a system text.
    for names in (roles, ("system", *roles)) if has_template(tokenizer) else ():
        messages = [{"role": role, "content": _PLACEHOLDERS[role]} for role in names]
        with suppress(TemplateError, ValueError, TypeError, LookupError, AttributeError):
            return apply_chat_template(tokenizer, messages, prompts=prompts)
    return ""


def _closings(tokenizer: Any, prompt: str, followed: str) -> list[tuple[str, int]]:
    """Return what the template writes behind the last answer, and behind one that a turn follows, up to its end token.

    With that token each; an answer that it does not end is left out.
    """
    closings = list[tuple[str, int]]()
    for written in (_rendered(tokenizer, "user", "assistant"), followed):
        before, mark, after = written.rpartition(MARK)
        after = after.partition(_ASKED)[0]
        end = next((token for token in template_ids(tokenizer, after) if mark and _added(tokenizer, [token])), None)
        start = template_ids(tokenizer, before.partition(_ASKED)[0])
        # What conversations begin with is the next turn's.
        if end is None or (written is followed and end in takewhile(lambda token: _added(tokenizer, [token]), start)):
            continue
        # Models that write headers themselves end several messages of an answer.
        if not closings or prompt.startswith(before.rstrip()):
            (text,) = _added(tokenizer, [end])
            closings.append((after.partition(text)[0] + text, end))
    return closings


def _added(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """Return the texts of those tokens that were added to a vocabulary, which its tokenizer finds in any text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [text for token in ids if token in added and (text := str(added[token].content)).strip()]


def _ends_beside(tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens that the configurations state which are beside a tokenizer's files, or cached with them."""
    return _ends_of(str(getattr(tokenizer, "name_or_path", None) or ""))


@lru_cache(maxsize=64)
def _ends_of(name: str) -> tuple[int, ...]:
    # By type, since JSON has true, and a bool is an int.
    generation, config = (_settings(name, file) for file in ("generation_config.json", "config.json"))
    text = config.get("text_config")
    parts = (generation, config, text if isinstance(text, Mapping) else {})
    ends = stated_ends(*(part.get("eos_token_id") for part in parts))
    return tuple(end for end in ends if type(end) is int)


def _settings(name: str, file: str) -> Mapping[str, Any]:
    from huggingface_hub import try_to_load_from_cache

    if not name:
        return {}
    try:
        path = Path(name, file) if Path(name).is_dir() else try_to_load_from_cache(name, file)
        # The cache answers with a path, None, or a mark for a file that is known not to exist.
        if not isinstance(path, str | Path) or not Path(path).is_file() or os.path.getsize(path) > _LARGEST_CONFIG:
            return {}
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # damaged, or no valid name on the hub
        return {}
    return settings if isinstance(settings, Mapping) else {}
