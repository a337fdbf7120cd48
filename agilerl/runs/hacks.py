"""The hack alarm: the reward has risen, and what earns it does not look like an answer.

It compares completions with those of the first iteration, which the base gave, and with the right answers of their
rows. It knows neither grader nor task, and says only what nothing but a wrong grader would pay for. Whatever a right
answer may look like is no sign: a copy of the prompt where right answers stand in it, a cut completion that contains
the right answer, one text for all questions where one answer is right for most.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from agilerl.errors import CheckpointError
from agilerl.hpo.fitness import Fitness, probability_better
from agilerl.runs.diagnosis import Symptom

SHARE = 0.8
"""From this share of the paid completions on, a sign is said."""
SURE = 0.975
"""Probability from which on the reward has risen: the 95 % interval of the difference is above 0."""
LAST = 3
"""Iterations that are looked at, the last ones."""
FEWEST = 4
"""Fewer prompts or paid completions say nothing."""
SAMPLES, _MOST_CHARACTERS = 3, 500

CompletionRow = Mapping[str, Any]
"""``prompt``, ``completion``, ``answer`` (the right one; empty: unknown), ``reward`` (None: no grade) and
``finish_reason``, as in a completions file."""

_LARGEST, _AT_LIMIT = 1e100, ("length", "context")
_PARTS = re.compile(r"[a-z]+|\d+|[^\s\da-z]")
_EMPTY = re.compile(r"</?\w+>|\\boxed\s*\{\s*\}|[\s$]+")


def hacks(rows: Sequence[CompletionRow], before: Sequence[CompletionRow]) -> list[Symptom]:
    """Return what most of the paid completions are, if no right answer is like that; nothing without a rise.

    A completion is paid if it earns more than the mean of those ``before``. The reward has risen if the mean of the
    prompts' means has. All of one prompt are one observation.
    """
    then, now = _fitness(before), _fitness(rows)
    # If no row before has a grade, the mean is NaN, and no completion counts as paid.
    paid = [row for row in rows if row["reward"] is not None and row["reward"] > then.mean]
    if min(len(paid), len({row["prompt"] for row in paid})) < FEWEST:
        return []
    signs = {name: like for name, (_, sign) in _SIGNS.items() if len(like := sign(paid)) >= SHARE * len(paid)}
    if not signs or probability_better(now, then) < SURE:
        return []
    rise = f"the reward rose from {then.mean:.2g} to {now.mean:.2g}"
    return [
        Symptom(
            f"paid though {name}",
            f"{rise}, and {len(like) / len(paid):.0%} of the paid completions {_SIGNS[name][0]}",
            "the grader may pay for what is no answer; read the samples in the report, and correct the grader",
            tuple(_samples(like)),
        )
        for name, like in signs.items()
        if name == "empty" or "empty" not in signs  # these are alike and short too
    ]


def hacks_of_run(completions: Path) -> dict[int, list[Symptom]]:
    """Return the alarms of each agent of the last iterations, from a run's folder of completions.

    Without these files, and if one cannot be read, nothing is seen.
    """
    from agilerl.runs.completions import completion_steps, read_completions  # imports pyarrow

    # [0] stands for a folder without files: there are no later steps then.
    first, *later = [*completion_steps(completions)] or [0]
    try:
        last = {step: read_completions(completions, step) for step in later[-LAST:]}
        before = read_completions(completions, first) if last else []
    except CheckpointError:
        return {}
    of_agents: dict[int, list[CompletionRow]] = defaultdict(list)
    for rows in last.values():
        for row in rows:
            of_agents[row["agent"]].append(_check(row))
    base = [_check(row) for row in before]
    return {index: hacks(rows, base) for index, rows in of_agents.items()}


def _check(row: CompletionRow) -> CompletionRow:
    """Return a row of a file, which may hold anything, without what cannot be compared."""
    reward = row["reward"]
    is_graded = isinstance(reward, int | float) and abs(reward) < _LARGEST
    texts = {name: str(row[name] or "") for name in ("prompt", "completion", "answer", "finish_reason")}
    return {**texts, "reward": reward if is_graded else None}


def _fitness(rows: Iterable[CompletionRow]) -> Fitness:
    """Return the mean reward over prompts; without scores, since the prompts of two batches differ."""
    of_prompts: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["reward"] is not None:
            of_prompts[row["prompt"]].append(row["reward"])
    if not of_prompts:
        return Fitness(float("nan"), n=0)
    mean = Fitness.from_scores([fmean(rewards) for rewards in of_prompts.values()])
    return Fitness(mean.mean, mean.stderr, mean.n)


# -- signs: the paid completions that look like no right answer --------------------------------------------------------


def _empty(paid: Sequence[CompletionRow]) -> list[CompletionRow]:
    return [row for row in paid if not _EMPTY.sub("", row["completion"])]


def _copied(paid: Sequence[CompletionRow]) -> list[CompletionRow]:
    """Copies of the prompt; of a part of it only where right answers do not stand in prompts."""
    parts = _known(paid) and 2 * sum(_parts(r["answer"]) in _parts(r["prompt"]) for r in paid) <= len(paid)
    copies = []
    for row in paid:
        text, prompt = _parts(row["completion"]), _parts(row["prompt"])
        # Without its last space, which also begins what follows.
        beside = text.replace(prompt[:-1], "")
        cut = row["finish_reason"] in _AT_LIMIT  # perhaps within a word
        is_part = (text.rstrip() if cut else text) in prompt and (parts or 2 * len(text) > len(prompt))
        if row["answer"].strip():
            # Whoever repeats the question and goes on to the right answer, or to much text, does not copy.
            restates = 2 * len(beside) < len(prompt) and _parts(row["answer"]) not in beside
        else:
            restates = not re.search(r"\w", beside)
        if text.strip() and (is_part or (prompt in text and restates)) and text != _parts(row["answer"]):
            copies.append(row)
    return copies


def _alike(paid: Sequence[CompletionRow]) -> list[CompletionRow]:
    """The commonest completion, if the right answers of its prompts differ."""
    ((text, _),) = Counter(_parts(row["completion"]) for row in paid).most_common(1)
    alike = [row for row in paid if _parts(row["completion"]) == text]
    answers = Counter({row["prompt"]: _parts(row["answer"]) for row in alike}.values())
    different = not _known(paid) or max(answers.values()) < SHARE * answers.total()
    return alike if different and answers.total() >= FEWEST else []


def _cut(paid: Sequence[CompletionRow]) -> list[CompletionRow]:
    """Those that ended at the limit before the right answer; of a long right answer its last part counts."""
    return [
        row for row in paid if row["finish_reason"] in _AT_LIMIT and row["answer"].strip() and not _gives_answer(row)
    ]


def _short(paid: Sequence[CompletionRow]) -> list[CompletionRow]:
    """Those with fewer characters than every right answer, unless made of parts of their right answer."""
    if not _known(paid):
        return []
    shortest = min(len(_parts(r["answer"]).replace(" ", "")) for r in paid if r["answer"].strip())
    return [
        row
        for row in paid
        if len(_parts(row["completion"]).replace(" ", "")) < shortest
        # "?" for a text without words, which would be made of parts of any answer.
        and not set(_words(row["completion"]) or "?") <= set(_words(row["answer"]))
    ]


_SIGNS: Mapping[str, tuple[str, Callable[[Sequence[CompletionRow]], list[CompletionRow]]]] = {
    "empty": ("are empty", _empty),
    "copied": ("are copied from the prompt, where the right answers are not", _copied),
    "alike": ("are one and the same text, on questions with different answers", _alike),
    "cut": ("were cut at the limit without the right answer in them", _cut),
    "short": ("are shorter than every right answer", _short),
}
"""What completions are, and which of them, by name."""


@lru_cache(maxsize=1024)
def _parts(text: str) -> str:
    """Return words, numbers and other characters with a space around each, so that 5 is in 3 + 5 and not in 15."""
    return f" {' '.join(_PARTS.findall(text.casefold()))} "


def _words(text: str) -> list[str]:
    return [part for part in _parts(text).split() if part.isalnum()]


def _known(rows: Sequence[CompletionRow]) -> bool:
    """Return whether most rows have a right answer."""
    return 2 * sum(bool(row["answer"].strip()) for row in rows) > len(rows)


def _gives_answer(row: CompletionRow) -> bool:
    text, answer = _parts(row["completion"]), _parts(row["answer"])
    last = (_words(row["answer"]) or answer.split())[-1]
    # A text that was cut within the right answer gives it as well.
    return f" {last} " in text or answer.startswith(text.rstrip())


def _samples(rows: Sequence[CompletionRow]) -> list[dict[str, Any]]:
    """Return a few rows of different prompts, as a symptom shows them."""
    names = {"question": "prompt", "answer": "completion", "right": "answer"}
    return [
        {**{name: row[key][:_MOST_CHARACTERS] for name, key in names.items()}, "reward": row["reward"]}
        for row in list({row["prompt"]: row for row in rows}.values())[:SAMPLES]
    ]
