"""The settings of a run as a whole, checked before anything is loaded."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from difflib import get_close_matches
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PrivateAttr, model_validator

from agilerl import hooks
from agilerl.checks.arguments import checked, nearest, shown
from agilerl.checks.validation import grouped, idle, validated
from agilerl.config import Section
from agilerl.config.base_model import NetworkConfig
from agilerl.config.declared import HYPERPARAMETERS
from agilerl.config.distributed import DistributedConfig
from agilerl.config.environment import EnvironmentConfig
from agilerl.config.search import GeneConfig, MutationConfig, SelectionConfig, TeacherConfig
from agilerl.config.training import TrainingConfig
from agilerl.errors import ConfigError
from agilerl.gone import instead
from agilerl.hpo.knockout import KnockoutSelection
from agilerl.hpo.strategies import COST_TOKENS, LRSchedule
from agilerl.safety.custom_code import names_code

EVO_STEPS = 8
"""Iterations between selections if a manifest gives none; the knockout goes by the budget instead."""
ANNEALING = LRSchedule(name="linear", decay=0.4)
"""The learning rate's course in runs that end with one agent."""


class RunConfig(Section):
    """A whole run. ``algorithm`` holds ``name`` and the algorithm's hyperparameters."""

    algorithm: dict[str, Any] = Field(default_factory=lambda: {"name": "GRPO"})
    """Name and hyperparameters."""
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    """Task and exams."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """Length, population, machine."""
    mutation: MutationConfig = Field(default_factory=MutationConfig)
    """Mutation operators and genes."""
    selection_strategy: SelectionConfig = Field(default_factory=SelectionConfig)
    """Selection."""
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    """A policy that agents are drawn to."""
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    """Base model and adapters."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Processes; what a run computes does not depend on them."""

    _typed: tuple[str, ...] = PrivateAttr(())
    _replaced: tuple[str, ...] = PrivateAttr(())
    """Sentences about overrides that later ones replaced."""

    @property
    def typed_addresses(self) -> tuple[str, ...]:
        """The addresses that the user gave on the command line; never written down, so no file can claim them."""
        return self._typed

    def typed_with(self, addresses: tuple[str, ...]) -> Self:
        """Return this configuration, with the addresses that the user typed for it."""
        self._typed = addresses
        return self

    @model_validator(mode="after")
    def _exams_agree(self) -> Self:
        training = self.training
        if training.eval_samples > 1 and training.eval_temperature == 0:
            raise ValueError(
                f"training.eval_samples={training.eval_samples} greedy completions would be equal; set "
                "training.eval_temperature above 0, or leave eval_samples out"
            )
        if training.eval_samples > 1 and self.environment.env_type == "multiturn":
            raise ValueError("training.eval_samples is for questions, found env_type: multiturn; leave it out")
        return self

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        size, tournament = self.training.pop_size, self.tournament_size
        if self.selection_strategy.strategy == "tournament" and tournament > size:
            raise ValueError(
                f"selection_strategy.tournament_size={tournament} is above training.pop_size={size}; lower it, or "
                "raise pop_size"
            )
        if self.training.replay is not None and (size != 1 or self.selection_strategy.strategy != "none"):
            raise ValueError(
                f"training.replay is for one agent that nothing selects, found training.pop_size={size} and "
                f"selection_strategy.name={self.selection_strategy.strategy}; set pop_size: 1 and name: none"
            )
        if self.selection_strategy.soup is not None and self.candidates < 2:
            raise ValueError(
                f"selection_strategy.soup={self.selection_strategy.soup:g} is made of the candidates, found "
                f"{self.candidates}; set selection_strategy.candidates=3, or leave soup out"
            )
        # The section is a plain mapping, whose values pydantic does not check.
        if "name" not in self.algorithm:
            self.algorithm = {"name": "GRPO", **self.algorithm}
        if not isinstance(self.algorithm["name"], str):
            raise ValueError(f"algorithm.name must be the name of an algorithm, found {shown(self.algorithm['name'])}")
        return self

    _date: datetime | None = PrivateAttr(default=None)

    @property
    def date(self) -> datetime | None:
        """What chat templates take for the present, local time; None: the moment when the run is set up."""
        return self._date

    def dated(self, date: datetime | None) -> Self:
        """Return a copy of another date, which is that of one run and no setting of a manifest."""
        copy = self.model_copy()
        copy._date = date
        return copy

    @property
    def genes(self) -> dict[str, GeneConfig]:
        """The hyperparameters that evolve.

        If none is named, the learning rate in a knockout, and with another selection of several agents if
        there is no section ``mutation`` at all.
        """
        strategy = self.selection_strategy.strategy
        selects = strategy != "none" and self.training.pop_size > 1 and not self.is_set("mutation")
        if self.mutation.is_set("rl_hp_selection") or not (self.selection_strategy.narrows or selects):
            return self.mutation.rl_hp_selection
        # PPO has no rate of that name, but one for its actor and one for its critic.
        names = ("lr_actor", "lr_critic") if self.algorithm["name"] == "PPO" else ("lr",)
        return {name: GeneConfig() for name in names}

    @property
    def equal_tokens(self) -> bool:
        """Whether agents are compared after equally many tokens."""
        given = self.selection_strategy.equal_tokens
        costly = any(name in self.genes for name in COST_TOKENS)
        return given if given is not None else costly and self.selection_strategy.narrows

    @property
    def smallest_population(self) -> int:
        """Agents that selection may leave."""
        strategy, size = self.selection_strategy.declared, self.training.pop_size
        return min(strategy.floor, size) if isinstance(strategy, KnockoutSelection) else size

    @property
    def candidates(self) -> int:
        """Best exams whose agents take the second panel; 1 if there is none."""
        given = self.selection_strategy.candidates
        if given is not None:
            return given
        # Of a dataset, another panel would take rows from training.
        return 3 if self.selection_strategy.narrows and self.environment.dataset is None else 1

    @property
    def kept_exams(self) -> int:
        """Best exams whose agents are kept with their scores, for selection or a second panel; 0: none."""
        strategy = self.selection_strategy
        # Custom code may bring an earlier agent back, as pulses may.
        kept = self.candidates > 1 or strategy.narrows or names_code(strategy.strategy)
        return self.candidates if kept else 0

    @property
    def restarts(self) -> bool:
        """Whether agents that have collapsed before the first exam that counts begin again."""
        strategy = self.selection_strategy
        # Exams by another grader cannot be compared with the rewards before training.
        alike = self.environment.fitness_grader is None
        return strategy.collapse_guard and strategy.narrows and self.kept_exams > 0 and alike

    @property
    def second_panel(self) -> int:
        """Questions of the panel that chooses among candidates; they follow those of the test."""
        return self.environment.exam_panel if self.candidates > 1 else 0

    @property
    def largest_rank(self) -> int:
        """Largest rank that mutation may give an adapter."""
        start, mutation = self.network.lora_config.r, self.mutation
        return max(start, mutation.rank_range[1]) if mutation.probabilities.arch_mut > 0 else start

    _given: "RunConfig | None" = PrivateAttr(None)

    @property
    def given(self) -> "RunConfig":
        """The settings as they were given, before what was left open was decided."""
        return self._given or self

    def decided(self, **training: Any) -> Self:
        """Return a copy with decisions on what ``training`` left open."""
        return self.replaced(training=self.training.model_copy(update=training)).made_of(self.given)

    def made_of(self, given: "RunConfig") -> Self:
        """Return a copy of which other settings are what was given."""
        copy = self.model_copy()
        copy._given = given
        return copy

    def replaced(self, **sections: Section) -> Self:
        """Return a copy with other sections, which are taken as they are."""
        return self.model_copy(update=sections)

    @property
    def without_effect(self) -> list[str]:
        """Sentences about settings that change nothing, those of ``algorithm`` excepted."""
        sentences = [*self._replaced, *grouped(idle(self, "", self, evolving=self.genes))]
        if self.selection_strategy.narrows and not set(self.genes) & {"lr", "lr_actor", "lr_critic"}:
            sentences.append("knockout: challengers differ by their learning rate, not a gene here: there are none")
        return sentences

    @property
    def lr_schedule(self) -> LRSchedule:
        """The course of the learning rate over the run."""
        given = self.training.lr_schedule
        if given is None and self.training.replay is not None:
            given = self.training.replay.lr_schedule
        if given is not None:
            return given
        return ANNEALING if self.selection_strategy.narrows else LRSchedule()

    @property
    def tournament_size(self) -> int:
        """Agents that compete for one place; by default at most as many as there are."""
        given = self.selection_strategy.tournament.get("tournament_size")
        return min(2, self.training.pop_size) if given is None else given

    @classmethod
    @checked
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Check a manifest; raises ConfigError with a sentence that names the key and the nearest known one."""
        values, sentences = hooks.rename(values)
        for sentence in sentences:
            warnings.warn(sentence, stacklevel=3)
        for section, content in values.items():
            if section not in cls.model_fields:
                raise ConfigError(unknown_section(section))
            if not isinstance(content, Mapping):
                raise ConfigError(f"{section} must be a mapping of settings, found {shown(content)}")
        return validated(cls, values)


def addresses_of(name: str, *, nearly: bool = False) -> list[str]:
    """Return ``section.name`` for each section that has a setting of this name, or ``nearly`` of this name."""
    sections = {
        section: HYPERPARAMETERS if section == "algorithm" else field.annotation.names()  # type: ignore[union-attr]
        for section, field in RunConfig.model_fields.items()
    }
    known = [each for names in sections.values() for each in names]
    wanted = get_close_matches(name, known, n=1, cutoff=0.8) if nearly else [name]
    return [f"{section}.{each}" for section, names in sections.items() for each in wanted if each in names]


def unknown_section(key: str) -> str:
    """Return what is wrong with a key that does not begin with a section: it has gone, or belongs elsewhere."""
    first = key.partition(".")[0]
    places = " or ".join(map(repr, addresses_of(key) or addresses_of(key, nearly=True)))
    hint = f"did you mean {places}?" if places else nearest(first, RunConfig.model_fields)
    return instead(key) or f"unknown key {shown(first)}; {hint}"


def default_out(e: EnvironmentConfig) -> Path:
    """Return ``runs/<task>-<time>``, with a number if another run took that name in the same second."""
    what = e.env_id or (Path(e.dataset[0].path).stem if e.dataset else e.task or "")
    task = "".join(c if c.isalnum() or c in "_-" else "_" for c in what.rpartition(":")[2])
    name = f"{task[:60]}-{datetime.now():%Y%m%d-%H%M%S}"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    # lexists: a link that leads nowhere takes the name as well.
    return next(path for path in map(Path("runs").joinpath, names) if not os.path.lexists(path))


@contextmanager
def place_of_run(environment: EnvironmentConfig, out: Path | None) -> Iterator[Path]:
    """Yield ``out``, or else a directory of its own for the run, which is removed at the end if it is still empty.

    The directory is made at once: of several runs that start in the same second each has another.
    """
    if out is not None:
        yield out
        return
    while True:
        root = default_out(environment)
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # the run itself says what is wrong with the place
            yield root
            return
        break
    try:
        yield root
    finally:
        with suppress(OSError):
            os.removedirs(root)  # only what is empty
