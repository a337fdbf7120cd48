"""Any reasoning_gym dataset as a single-turn task: endless training problems, fixed exam and test panels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

from agilerl.checks.arguments import Count, Name, Seed, Whole, check_fields, checked, nearest
from agilerl.envs.core import Row, Split, Task, fit_panels, is_held_out, warn_of_fewer
from agilerl.envs.scorers import Scorers
from agilerl.envs.upstream import (
    build_dataset,
    check_params,
    curricula,
    curriculum_attributes,
    curriculum_params,
    draw,
    quiet,
)
from agilerl.errors import ConfigError, EnvError
from agilerl.rewards.grader import Columns, extract_answer
from agilerl.streams import stream


@dataclass
class _Drawn:
    """Distinct questions for panels, in the order of the draws."""

    rows: dict[str, Row] = field(default_factory=dict)
    draws: int = 0
    latest: int = 0
    """Draws up to the latest question."""
    failures: int = 0


KEPT_DATASETS = 4


@lru_cache(maxsize=KEPT_DATASETS)
def _drawn(name: str, params: str, seed: int, holdout: str) -> _Drawn:
    """Return what has been drawn for the panels of such tasks in this process, to which more may be added."""
    # Few distinct questions take many draws (gcd: 40,000, half a second), and a command asks for the same ones twice.
    return _Drawn()


# -- training that gets harder: reasoning_gym's curricula -------------------------------------------------------------


@dataclass(frozen=True)
class Curriculum:
    """Levels of ``prompts_per_level`` training positions each, counted from 0; the last one never ends.

    At level 2 every attribute of a dataset, such as the number of terms, is at level 2 of reasoning_gym's curriculum;
    an attribute with fewer levels stays at its last. Most attributes are ranges: they grow, and keep the easier values.
    Each dataset of a ``composite`` has its own curriculum; one without a curriculum keeps its parameters. Parameters
    set by the task (or by the ``config`` in a composite) are not changed by any level.
    """

    prompts_per_level: Count = 512
    """Training positions of one level, 1 or more. Every agent counts its own prompts."""
    max_level: Count | None = None
    """The last level, 1 or more; None is the highest that reasoning_gym has."""
    attributes: Sequence[str] | None = None
    """Names of the attributes that rise; the others keep the task's parameters. None means all."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a number out of range or invalid names."""
        check_fields(self)
        if self.attributes is not None and not self.attributes:
            raise ConfigError(f"Curriculum: expected at least one name for attributes, found {self.attributes!r}")

    def levels(self, name: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the parameters of a dataset at each level; ``params`` are the task's, already checked.

        Raises ConfigError for a dataset without a curriculum, an attribute or level that it does not have, or task
        parameters that leave nothing to change.
        """
        members = {s["name"]: s["config"] for s in params["datasets"]} if name == "composite" else {name: params}
        attributes_of = {member: curriculum_attributes(member) for member in members}
        if not any(attributes_of.values()):
            names = ", ".join(members)
            raise ConfigError(
                f"expected a dataset that reasoning_gym has a curriculum for, found {names}; "
                f"{nearest(names, curricula())}; use one of those, or remove the curriculum"
            )
        every = sorted({attribute for attributes in attributes_of.values() for attribute in attributes})
        for wanted in self.attributes or ():
            if wanted not in every:
                raise ConfigError(f"the curriculum of {name} has no attribute {wanted!r}; {nearest(wanted, every)}")
        chosen = every if self.attributes is None else self.attributes
        rising = {member: [a for a in attributes if a in chosen] for member, attributes in attributes_of.items()}
        last = max(attributes_of[member][attribute] for member, names in rising.items() for attribute in names)
        if self.max_level is not None and self.max_level > last:
            raise ConfigError(
                f"expected max_level to be at most {last}, the last level for {name}, found {self.max_level}"
            )
        highest = last if self.max_level is None else self.max_level
        levels = [_set_level(level, name, params, rising) for level in range(highest + 1)]
        if all(level == levels[0] for level in levels):
            raised = sorted({param for member in rising for param in curriculum_params(member, 0, rising[member])})
            raise ConfigError(
                f"the curriculum of {name} changes nothing up to level {highest}: what it raises ({', '.join(raised)}) "
                "is fixed by params or does not change; remove these from params, or choose other attributes or a "
                "higher max_level"
            )
        return levels


def _set_level(level: int, name: str, params: Mapping[str, Any], rising: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    def raised(member: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
        return {**curriculum_params(member, level, rising[member]), **fixed}

    if name != "composite":
        return raised(name, params)
    specs = [{**spec, "config": raised(spec["name"], spec["config"])} for spec in params["datasets"]]
    return {**params, "datasets": specs}


# -- the task: endless training problems, fixed exam and test panels --------------------------------------------------


CHUNK = 1000
"""Problems of one reasoning_gym dataset object; some build a table of this size, so it must not be huge."""
MOST_ATTEMPTS = 512
"""Redraws of one training problem before giving up."""
PATIENCE = 2000
"""Draws without a new panel question (or 20 per question found, if that is more) before a task counts as exhausted."""


class ReasoningGymTask(Task):
    """One reasoning_gym dataset, or a weighted mixture of them.

    Training problem ``position`` depends on ``(seed, position)`` alone. Exam and test are fixed panels of distinct
    questions that training never shows; by default all their questions come from the reserved fifth of all questions
    (``agilerl.envs.core.is_held_out``) and all training questions from the rest. So no run with any seed trains on an
    exam, and a base model trained under the same rule has not seen one either. The panels are drawn on first use
    (``prepare`` draws them at once) with five draws per panel question, which takes minutes for the few generators that
    need 0.1 s or more per problem (knight_swap, sokoban, futoshiki). One dataset is not deterministic: 5 in 1000 of
    codeio's problems are programs that read the clock, an address or the system's entropy.

    With a curriculum, the level of a training problem also depends on its position alone. Exam and test are questions
    of the last level from the start, so that every exam of a run measures the same; held-out questions stay out of all
    levels. ``levels`` has the parameters of each, and rows have a column ``level``.
    """

    @checked
    def __init__(
        self,
        name: Name,
        params: Mapping[str, Any] | None = None,
        *,
        seed: Seed = 42,
        exam_prompts: Count = 128,
        test_prompts: Whole = 400,
        reward: Literal["exact", "score"] = "exact",
        holdout: Literal["reserved", "any"] = "reserved",
        curriculum: Curriculum | None = None,
        shrink_panels: bool = False,
    ) -> None:
        """Check all settings and draw one problem.

        Args:
            name: name of a dataset, with or without the prefix ``reasoning_gym:``; ``composite`` mixes several.
            params: its parameters; for ``composite`` ``{"datasets": [{"name", "weight", "config"}, ...]}``.
            seed: 0 or more; determines the problems and the panels.
            exam_prompts: size of the exam, 1 or more.
            test_prompts: size of the test, 0 or more.
            reward: ``exact``: 1.0 if the dataset's score is exactly 1.0, else 0.0; ``score``: the score itself.
            holdout: ``reserved``: as above; ``any``, for tasks with few distinct questions: panels of any questions,
                which training then avoids one by one, so training depends on the panel sizes too.
            shrink_panels: if the task has too few distinct questions for the panels, make them smaller with a warning
                instead of raising EnvError; with ``any``, at least half of all questions are left for training.
            curriculum: levels of training; it changes only parameters that ``params`` does not set.

        Raises:
            ConfigError: an unknown task, parameter or setting, a value out of range, or a curriculum that the dataset
                does not have or that it refuses at one of its levels.
            EnvError: the dataset cannot produce a problem with these parameters.
        """
        self.name = name.removeprefix("reasoning_gym:")
        self.params = check_params(self.name, params or {})
        self.seed, self.reward_kind, self.holdout = seed, reward, holdout
        self.grader = reward
        self.exam_prompts, self.test_prompts = exam_prompts, test_prompts
        self.shrink_panels = shrink_panels
        self._datasets: dict[tuple[str, int, int], Any] = {}
        self._panel: dict[str, Row] = {}
        """The rows of the exam and then of the test, by question; empty until they are drawn."""
        self.curriculum = curriculum
        self.levels = [self.params] if curriculum is None else curriculum.levels(self.name, self.params)
        self._last = len(self.levels) - 1
        # Some scorers read the parameters (decimal_arithmetic its precision), so each level has its own scorer.
        datasets = [self._dataset("panel", 0, level) for level in range(len(self.levels))]
        self._scorers = Scorers(self.name, self.levels, datasets)
        # Parameters that the constructor accepts may still fail at the first problem.
        self._draw("panel", 0, self._last)

    def __repr__(self) -> str:
        params = "".join(f", {key}={value!r}" for key, value in self.params.items())
        levels = "" if self.curriculum is None else f", {self.curriculum}"
        return f"ReasoningGymTask({self.name!r}{params}, seed={self.seed}, reward={self.reward_kind!r}{levels})"

    def row(self, split: Split, index: int) -> Row:
        """Return reasoning_gym's ``question``, ``answer`` (None in five datasets) and ``metadata``."""
        self.check_index(split, index)
        if split == "train":
            row, level = self._train_row(index), self.level(index)
        else:
            self._draw_panel()
            self.check_index(split, index)  # the panels may be smaller now
            number = index if split == "exam" else self.exam_prompts + index
            row, level = list(self._panel.values())[number], self._last
        return dict(row) if self.curriculum is None else {**row, "level": level}

    def level(self, position: int) -> int | None:
        """Return the level of the curriculum at a training position; None without a curriculum."""
        return None if self.curriculum is None else min(position // self.curriculum.prompts_per_level, self._last)

    def reads_completions(self) -> bool:
        """Return True: the score is of the answer."""
        return True

    def reward(self, completion: str, row: Columns) -> float | None:
        """Score the completion: the text between the last answer tags, or all of it, stripped.

        The exact reward compares with ``==``, so spell_backward's rounding bug (6, 7, 9 or 10 letters with trailing
        junk score 0.9999999999999999) earns nothing. An answer is wrong (0.0) if the scorer cannot read it (it raises),
        if it would run as a program inside the scorer, or if it takes more than 5 s of processor time or 2 GiB. Scorers
        that evaluate answers run in an unprivileged process (``agilerl.envs.scorers``), started on demand.

        Raises:
            RewardError: the scorer cannot read even the problem's correct answer, or its process cannot start.
        """
        level = 0 if self.curriculum is None else row.get("level", self._last)
        score = self._scorers.score(extract_answer(completion), row, level)
        return score if self.reward_kind == "score" else float(score == 1.0)

    def close(self) -> None:
        """Release the scorers' process, if any; it is restarted on demand."""
        self._scorers.close()

    def prepare(self) -> None:
        """Draw both panels, and the first problem of each level of a curriculum.

        Raises:
            EnvError: the task has too few distinct questions (the message says how many were found), or a level has no
                problem.
        """
        self._draw_panel()
        if self.curriculum is not None:
            for level in range(len(self.levels)):
                self._train_row(level * self.curriculum.prompts_per_level)

    def _of_level(self, level: int) -> str:
        where = f" (level {level} of its curriculum, which other attributes, params or a lower max_level can avoid)"
        return "" if self.curriculum is None else where

    def _train_row(self, position: int) -> Row:
        level = self.level(position) or 0
        if self.holdout == "any":
            # Training avoids the panels' questions one by one, so these must be known first.
            self._draw_panel()
        failure = "every question drawn belongs to the exam or test panel; lower eval_prompts and test_prompts"
        for purpose, number in self._candidates(position):
            try:
                row = self._draw(purpose, number, level)
            except EnvError as error:
                failure = str(error)
                continue
            question = row["question"]
            if not (is_held_out(question) if self.holdout == "reserved" else question in self._panel):
                return row
        raise EnvError(
            f"found no training problem {position} of {self.name}{self._of_level(level)} in {MOST_ATTEMPTS} draws: "
            f"{failure}"
        )

    def _candidates(self, position: int) -> Iterator[tuple[str, int]]:
        """Yield the draws for one training position: its own first, then random ones from its chunk's second pool."""
        yield "train", position
        # Not the problem of another position, which would then be trained on twice.
        first = position // CHUNK * CHUNK
        for offset in stream(self.seed, "task/retry", position).integers(CHUNK, size=MOST_ATTEMPTS):
            yield "retry", first + int(offset)

    def _draw_panel(self) -> None:
        """Draw the exam and the test unless they are drawn; smaller ones, if allowed, where there are too few."""
        if self._panel:
            return
        asked = (self.exam_prompts, self.test_prompts)
        drawn = _drawn(self.name, repr(self.levels[self._last]), self.seed, self.holdout)
        rows = drawn.rows
        with quiet():
            # With n of N questions known, a new one takes N / (N - n) draws: 20 n without any means that few are left.
            while len(rows) < sum(asked) and drawn.draws - drawn.latest < max(PATIENCE, 20 * len(rows)):
                drawn.draws += 1
                try:
                    row = self._draw("panel", drawn.draws - 1, self._last)
                except EnvError:
                    drawn.failures += 1
                    # A problem may fail now and then; so many failures mean that these parameters give none.
                    if drawn.failures >= MOST_ATTEMPTS:
                        raise
                    continue
                question = row["question"]
                if question not in rows and (self.holdout == "any" or is_held_out(question)):
                    rows[question], drawn.latest = row, drawn.draws
        sizes = asked
        if len(rows) < sum(asked):
            kind = "distinct questions" if self.holdout == "any" else "distinct questions in its reserved fifth"
            # The reserved fifth is lost to training in any case; of all questions, half stays there.
            available = len(rows) if self.holdout == "reserved" else len(rows) // 2
            smaller = fit_panels(*asked, available) if self.shrink_panels else None
            if smaller is None:
                other = "" if self.holdout == "any" else ", or set holdout to 'any', for panels of any questions"
                raise EnvError(
                    f"expected {asked[0]} exam and {asked[1]} test questions from {self.name}, but with these "
                    f"parameters it has only {len(rows)} {kind} ({drawn.draws} draws); ask for fewer (eval_prompts, "
                    f"test_prompts), give shrink_panels=True as runs do, widen its params{other}"
                )
            warn_of_fewer(self.name, asked, smaller, f"{len(rows)} {kind}")
            sizes = smaller
        self.exam_prompts, self.test_prompts = sizes
        # The draws are shared with other tasks, which may have needed more of them.
        self._panel = {question: dict(row) for question, row in islice(rows.items(), sum(sizes))}

    def _draw(self, purpose: str, number: int, level: int) -> Row:
        (chunk, index), params = divmod(number, CHUNK), self.levels[level]
        dataset = self._dataset(purpose, chunk, level)
        try:
            # A sealed dataset is seeded as reasoning_gym seeds the generators of its own.
            return draw(dataset, index, name=self.name, params=params, seed=dataset.seed + index)
        except Exception as error:
            # A failed dataset may have changed its state (word_ladder shrinks), so it is never used again.
            self._datasets.pop((purpose, chunk, level), None)
            where = f"with {params}{self._of_level(level)}"
            raise EnvError(f"reasoning_gym's {self.name} produced no problem {where}: {error!r}") from error

    def _dataset(self, purpose: str, chunk: int, level: int) -> Any:
        key = (purpose, chunk, level)
        if key not in self._datasets:
            while len(self._datasets) >= KEPT_DATASETS:
                # The oldest one: a dict keeps the order of insertion.
                del self._datasets[next(iter(self._datasets))]
            seed = int(stream(self.seed, f"task/{purpose}", chunk).integers(2**31))
            try:
                self._datasets[key] = build_dataset(self.name, self.levels[level], seed=seed, size=CHUNK)
            except ConfigError as error:
                raise ConfigError(f"{error}{self._of_level(level)}") from error
        return self._datasets[key]
