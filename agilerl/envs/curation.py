"""From the rows read to the rows used: checked, measured, split without leakage, and all of it counted."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agilerl.envs.core import Message, Split
from agilerl.envs.forms import Form, RowFaultError, Sample
from agilerl.envs.order import LEAST, apportion, fewer
from agilerl.envs.prompts import render_prompt
from agilerl.envs.sources import Rows
from agilerl.errors import EnvError

BadRows = Literal["raise", "drop"]
"""What to do about rows that do not have the form of their dataset."""

_COUNTED = (
    *("read", "train", "exam", "test"),
    *("missing", "not_text", "empty", "alike", "special_tokens", "too_long", "leaking", "unused", "repeated"),
)

Converse = Callable[[Mapping[str, Any], Sample], Sequence[Message]]
"""From a row and its parsed sample to the conversation shown to the model."""


@dataclass(frozen=True)
class Sizes:
    """How many prompts the panels have."""

    exam: int
    test: int


@dataclass(frozen=True)
class Curated:
    """The rows in use; no two splits share a rendered prompt."""

    sides: Mapping[Split, Rows]
    """``train``, ``exam`` and ``test``."""
    counts: Mapping[str, int]
    """``read`` = ``train`` + ``exam`` + ``test`` + ``missing`` + ``not_text`` + ``empty`` + ``alike`` (rows that do not
    have the form of their dataset) + ``special_tokens`` + ``too_long`` + ``leaking`` (the same prompt is in a panel) +
    ``unused`` (from a panel's own dataset, which needs fewer). ``repeated``: training rows that share a prompt with
    another one; they stay."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """A row that can be used."""

    index: int
    part: int
    key: bytes
    """Digest of its rendered prompt."""
    rank: bytes
    """Digest of its conversation: decides which rows a panel takes."""


@dataclass(frozen=True)
class Ruler:
    """The tokenizer and limit that prompts are rendered and measured with."""

    tokenizer: Any = None
    """If None, prompts are compared as conversations, not as tokens, and have no length."""
    max_tokens: int | None = None
    """Most tokens of a prompt."""

    def special_tokens(self) -> tuple[str, ...]:
        """Return the texts that the tokenizer does not read as plain text."""
        if self.tokenizer is None:
            return ()
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple(dict.fromkeys([*self.tokenizer.all_special_tokens, *added]))


def curate(
    sources: Mapping[Split, Rows],
    form: Form,
    sizes: Sizes,
    *,
    converse: Converse,
    ruler: Ruler | None = None,
    bad_rows: BadRows = "raise",
    shrink: bool = False,
) -> Curated:
    """Check all rows, leave out what cannot be used, and fill the panels.

    A panel takes its rows from its own dataset if ``sources`` has one, else from the training rows. Which rows it takes
    depends only on their text, not on their order or a seed: it takes the conversations with the smallest digests, the
    test before the exam, so that other sizes or seeds give nearly the same panels. A panel holds each prompt once.
    Training rows (and rows of the exam's own dataset) whose rendered prompt is in a panel are left out. In a mixture,
    every dataset gives each panel its share by weight.

    Args:
        sources: ``train``, and ``exam`` and ``test`` if they are separate datasets.
        form: which columns are read.
        sizes: number of prompts in each panel.
        converse: turns a row into the conversation shown to the model.
        ruler: renders and measures prompts. Rows are left out if their prompt is too long or their text contains a
            special token of the tokenizer, which would be read e.g. as the end of a message.
        bad_rows: ``raise`` an error at the first malformed row, or ``drop`` such rows.
        shrink: if there are too few prompts, make the panels smaller, so that training keeps half of its rows.

    Raises:
        EnvError: malformed rows, too few prompts for a panel, or none left to train on.
    """
    counts: Counter[str] = Counter()
    fits = {split: _usable(rows, form, converse, ruler or Ruler(), bad_rows, counts) for split, rows in sources.items()}
    try:
        return _divided(sources, fits, sizes, counts)
    except _TooFewError:
        smaller = _fewer(sources, fits, sizes) if shrink else None
        while smaller is not None:
            try:
                return _divided(sources, fits, smaller, counts)
            except _TooFewError:  # splits share prompts, or shares of a mixture were rounded up
                smaller = _less(smaller, sizes)
        raise


class _TooFewError(EnvError):
    """There are fewer distinct prompts than the panels need."""


def _divided(
    sources: Mapping[Split, Rows], fits: Mapping[Split, Sequence[_Fit]], sizes: Sizes, read: Counter[str]
) -> Curated:
    """Fill the panels from the usable rows, and leave to training what shares no prompt with them."""
    counts = Counter(read)
    taken: set[bytes] = set()
    chosen: dict[Split, list[_Fit]] = {}
    splits: tuple[tuple[Split, int], ...] = (("test", sizes.test), ("exam", sizes.exam))
    for split, size in splits:
        own: Split = split if split in sources else "train"
        chosen[split] = panel = _panel(sources[own], fits[own], size, taken, split)
        taken |= {fit.key for fit in panel}
        if own == split:
            used = {fit.index for fit in panel}
            left = [fit.key for fit in fits[split] if fit.index not in used]
            unused = [key for key in left if key not in taken]
            counts.update(leaking=len(left) - len(unused), unused=len(unused))
            taken |= set(unused)  # rows passed as a test set are never trained on
    panels = {fit.index for split in chosen for fit in chosen[split] if split not in sources}
    rest = [fit for fit in fits["train"] if fit.key not in taken]
    counts.update(leaking=len(fits["train"]) - len(rest) - len(panels))
    counts.update(repeated=len(rest) - len({fit.key for fit in rest}))
    sides: dict[Split, Rows] = {"train": sources["train"].select(fit.index for fit in rest)}
    for split in ("exam", "test"):
        sides[split] = sources.get(split, sources["train"]).select(fit.index for fit in chosen[split])
    counts.update({split: len(rows) for split, rows in sides.items()})
    counts = Counter({name: counts[name] for name in _COUNTED})
    empty = [part.name for part in sides["train"].parts if not len(part)]
    if empty:
        raise _TooFewError(
            f"expected rows to train on in {empty[0]}, found none besides the exam ({sizes.exam}) and the test "
            f"({sizes.test}); {_told(counts)}; ask for fewer (eval_prompts, test_prompts), or give more rows"
        )
    return Curated(sides, dict(counts))


def _fewer(sources: Mapping[Split, Rows], fits: Mapping[Split, Sequence[_Fit]], asked: Sizes) -> Sizes | None:
    """Return sizes that may fit: all of a panel's own dataset, and half of the training rows."""
    own = {split: len({fit.key for fit in found}) for split, found in fits.items()}
    exam, test = min(asked.exam, own.get("exam", asked.exam)), min(asked.test, own.get("test", asked.test))
    rows = sources["train"]
    each = [len({fit.key for fit in fits["train"] if fit.part == number}) for number in range(len(rows.parts))]
    whole = sum(rows.weights)
    half = int(min(count * whole / weight for count, weight in zip(each, rows.weights))) // 2
    if "exam" not in sources and "test" not in sources:
        found = fewer(exam, test, half)
        return None if found is None else Sizes(*found)
    shrunk = Sizes(exam if "exam" in sources else min(exam, half), test if "test" in sources else min(test, half))
    return shrunk if _suffices(shrunk, asked) else None


def _less(sizes: Sizes, asked: Sizes) -> Sizes | None:
    """Return sizes that are a tenth smaller, or None if they would be too small."""
    smaller = Sizes(sizes.exam - -(-sizes.exam // 10), sizes.test - -(-sizes.test // 10))
    return smaller if _suffices(smaller, asked) else None


def _suffices(sizes: Sizes, asked: Sizes) -> bool:
    return sizes.exam >= min(asked.exam, LEAST) and sizes.test >= min(asked.test, LEAST)


def check_rows(rows: Rows, form: Form) -> None:
    """Raise EnvError for the first malformed row."""
    for index in range(len(rows)):
        try:
            form.read(rows[index])
        except RowFaultError as fault:
            raise EnvError(f"{rows.where(index)}: {fault}") from fault


def _usable(
    rows: Rows, form: Form, converse: Converse, ruler: Ruler, bad_rows: BadRows, counts: Counter[str]
) -> list[_Fit]:
    """Return the well-formed rows that fit, and count all others."""
    found, first = [], ""
    faults: Counter[str] = Counter()
    special = re.compile("|".join(map(re.escape, ruler.special_tokens())) or r"(?!)")
    for index in range(len(rows)):
        row = rows[index]
        try:
            sample = form.read(row)
        except RowFaultError as fault:
            faults[fault.kind] += 1
            first = first or f"{rows.where(index)}: {fault}"
            continue
        if any(special.search(text) for text in sample.texts()):
            counts["special_tokens"] += 1
            continue
        messages = [*converse(row, sample)]
        rank = _digest(json.dumps(messages).encode())
        key = rank
        if ruler.tokenizer is not None:
            ids = render_prompt(ruler.tokenizer, messages)
            if ruler.max_tokens is not None and len(ids) > ruler.max_tokens:
                counts["too_long"] += 1
                continue
            key = _digest(" ".join(map(str, ids)).encode())
        found.append(_Fit(index, rows.part_of(index), key, rank))
    if faults and bad_rows == "raise":
        others = sum(faults.values()) - 1
        more = f"; {others} more of {len(rows)} rows are malformed ({_told(faults)})" if others else ""
        raise EnvError(f"{first}{more}; fix the file, or leave such rows out with bad_rows: drop")
    counts.update(faults)
    counts["read"] += len(rows)
    if not found:
        raise EnvError(f"expected usable rows in {rows.name}, found none; {_told(counts)}")
    return found


def _panel(rows: Rows, fits: Sequence[_Fit], size: int, taken: Iterable[bytes], split: Split) -> list[_Fit]:
    """Choose rows with distinct prompts, by rank; each part of a mixture gives its share."""
    known, panel = set(taken), list[_Fit]()
    for number, share in enumerate(apportion(rows.weights, size)):
        before = len(panel)
        for fit in sorted((fit for fit in fits if fit.part == number), key=lambda fit: (fit.rank, fit.index)):
            if len(panel) - before == share:
                break
            if fit.key not in known:
                known.add(fit.key)
                panel.append(fit)
        if len(panel) - before < share:
            raise _TooFewError(
                f"expected {share} different prompts for the {split} in {rows.parts[number].name}, found "
                f"{len(panel) - before}; ask for fewer (eval_prompts, test_prompts), or give more rows"
            )
    return panel


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count) or "nothing read"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
