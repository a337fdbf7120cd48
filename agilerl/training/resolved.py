"""The settings of a run, resolved once: the manifest, completed by the algorithm's defaults and ranges.

All later code reads the typed result. It is written to run.json, and restored from there.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from agilerl.algorithms import ALGORITHMS, FAMILY, GRPO, LLMAlgorithm
from agilerl.algorithms.base import AlgorithmConfig
from agilerl.checks.arguments import checked, nearest, shown
from agilerl.checks.validation import grouped, idle, set_values, unknown_key, validated
from agilerl.config.base_model import SharedOptions
from agilerl.config.run import EVO_STEPS, RunConfig
from agilerl.config.search import MutationConfig
from agilerl.config.training import ReplayConfig
from agilerl.errors import ConfigError
from agilerl.hpo.knockout import KnockoutSelection
from agilerl.hpo.mutation import LEARNING_RATES, Mutations
from agilerl.hpo.parameters import Gene, values_of
from agilerl.hpo.selection import Strategy
from agilerl.hpo.spread import EMBEDDED_RATE, USUAL_WITHIN, around, lora_rate
from agilerl.hpo.tournament import TournamentSelection
from agilerl.models.base import EMBEDDED, BaseModel
from agilerl.safety.bounds import compiled_pattern
from agilerl.training.genes import genes_of
from agilerl.training.tasks import own_weights

COMPLETION = 128
"""Most tokens of a completion in a run that bounds neither completions nor the context."""

USUAL = 1
"""Index of the founder that has the usual learning rate of the base where the configuration is far from it."""


def usual_rate(base: BaseModel) -> float:
    """Return the learning rate with which a search on this base begins; its weights may be on the meta device."""
    family = str(base.model.config.get_text_config().model_type)
    return EMBEDDED_RATE if base.name == EMBEDDED else lora_rate(base.hidden_size, family)


@dataclass(frozen=True)
class Resolved:
    """A configuration and everything derived from it without loading a model or a task."""

    config: RunConfig
    """The configuration, with what it left open decided as far as that is possible without a base."""
    algorithms: tuple[type[LLMAlgorithm], ...]
    """The class of ``algorithm.name``; for ``choice[GRPO, CISPO]``, which is a gene, each of them."""
    hyperparameters: AlgorithmConfig
    """Of the first algorithm, with the run's seed unless set; pydantic records which fields were set."""
    genes: Mapping[str, Gene]
    """What evolves: the ranges of ``mutation.rl_hp_selection``, else those that the algorithms declare."""
    mutations: Mutations
    selection: Strategy | None
    """None for custom code until it is loaded (``agilerl.training.setup``)."""

    @property
    def algorithm(self) -> type[LLMAlgorithm]:
        """The algorithm that every agent starts with, or the first of several."""
        return self.algorithms[0]

    @property
    def options(self) -> SharedOptions:
        """How the base is loaded, computed and sampled from."""
        return self.config.network.options

    @property
    def bounds_completions(self) -> bool:
        """Whether completions are as long as they are by default."""
        given = "max_output_tokens" in self.config.algorithm
        return not given and getattr(self.hyperparameters, "max_output_tokens", None) == COMPLETION

    def settled(self, usual: float, rows: int | None = None) -> "Resolved":
        """Return the settings with what the base and the task decide: rate, trusted founder, ``max_steps``.

        In a small budget no exam of the knockout tells a rate that is far too low from one that is right, nor often one
        that is far too high. What is known about the base decides then, not the configuration: a founder at its
        ``usual`` rate is trusted. ``rows`` are those of a pass over the data, for ``num_epochs``; raises ConfigError if
        it is given and there are none.
        """
        training = self.config.training
        started = replace(self, hyperparameters=self._at_rate(usual))
        if started.usual_instead(usual):
            assert isinstance(self.selection, KnockoutSelection), "no other strategy has such a founder"
            started = replace(started, selection=self.selection.seeding(USUAL))
        if training.num_epochs is None:
            return started
        if not rows:
            raise ConfigError(
                f"training.num_epochs={training.num_epochs} counts passes over rows, of which this environment has no "
                "fixed number; set training.max_steps"
            )
        samples = training.num_epochs * rows * training.pop_size * self.hyperparameters.group_size  # type: ignore[attr-defined]
        return started.decided(max_steps=samples)

    def _at_rate(self, usual: float) -> AlgorithmConfig:
        """Return the hyperparameters at the usual rate of the base, if none was given and the search goes by it."""
        # As AgileRL documents the tournament, it begins with the algorithm's own default.
        if self.config.selection_strategy.strategy == "tournament" or self.algorithm.env_type != "reasoning":
            return self.hyperparameters
        replay = self.config.training.replay
        given = {*self.config.algorithm, *(replay.genes if replay else ())}
        missing = [name for name in LEARNING_RATES if name in self.algorithm.Config.model_fields and name not in given]
        # A range that the user gave is kept, even if it excludes the rate.
        rates = {name: min(max(usual, g.min), g.max) if (g := self.genes.get(name)) else usual for name in missing}
        return self.hyperparameters.changed(rates, "algorithm")

    @property
    def without_effect(self) -> list[str]:
        """Sentences about settings that change nothing."""
        reasons = dict[str, str]()
        if "algorithm" not in self.genes:  # agents of other algorithms may use what the first one does not
            reasons = idle(self.hyperparameters, "algorithm", self.config, self.genes)
        return [*self.config.without_effect, *grouped(reasons)]

    def founder_genes(self) -> dict[str, Gene]:
        """Return the ranges in which the first generation starts: a gene's own if the user gave it, else one around."""
        if not self.config.selection_strategy.narrows:
            return dict(self.genes)
        values = values_of(self.hyperparameters, [name for name in self.genes if name != "algorithm"])
        of_user = {name: (gene.min, gene.max, gene.choices) for name, gene in self.config.genes.items()}
        given = {name for name, limits in of_user.items() if limits != (None, None, None)}
        return {
            name: around(gene, values[name]) if name in values and name not in given else gene
            for name, gene in self.genes.items()
        }

    def usual_instead(self, rate: float) -> dict[str, float]:
        """Return learning rates at the one that is usual for the base, for the second founder of a knockout.

        Nothing for those whose configuration is within ``USUAL_WITHIN`` of it, or whose range excludes it.
        """
        t = self.config.training
        spread = t.pop_size > 1 and t.init == "spread" and t.usual_founder
        if not spread or not isinstance(self.selection, KnockoutSelection) or self.algorithm.env_type != "reasoning":
            return {}
        genes = {name: self.genes[name] for name in self._far_from(rate) if name in self.genes}
        return {name: rate for name, gene in genes.items() if gene.min <= rate <= gene.max}

    def _far_from(self, rate: float) -> dict[str, float]:
        """Return the learning rates that are more than ``USUAL_WITHIN`` times above or below a rate."""
        values = {name: getattr(self.hyperparameters, name, None) for name in LEARNING_RATES}
        low, high = rate / USUAL_WITHIN, rate * USUAL_WITHIN
        return {name: value for name, value in values.items() if value and not low <= value <= high}

    def unusual_rates(self, usual: float) -> list[str]:
        """Return a sentence about each learning rate far from the usual one of the base, and what the run does."""
        if self.algorithm.env_type != "reasoning":
            return []
        instead, sentences = self.usual_instead(usual), []
        for name, rate in self._far_from(usual).items():
            then = f"unless you mean that, set algorithm.{name}={usual:.2g}"
            if name in instead:
                then = f"agent {USUAL} starts at {usual:.3g}, and is only removed if another agent is clearly better "
                then += f"in an exam. To use the usual rate, leave algorithm.{name} out"
            sentences.append(f"{_compared(name, rate, usual)}, {usual:.3g}; {then}")
        return sentences

    def rates_to_set(self, usual: float | None, *, gone: bool) -> list[str]:
        """Return a sentence after a run about each such rate; ``gone``: the first agent, which had it, has left."""
        if usual is None:
            return []
        return [
            f"agent 0 with your algorithm.{name}={rate:.3g} left; the usual rate of this base is {usual:.2g}"
            if gone
            else f"{_compared(name, rate, usual)}: set {usual:.2g}"
            for name, rate in self._far_from(usual).items()
            if name in self.config.algorithm
        ]

    def decided(self, **training: Any) -> "Resolved":
        """Return the settings with decisions on what ``training`` leaves open."""
        return replace(self, config=self.config.decided(**training))

    def document(self) -> dict[str, Any]:
        """Return the resolved manifest, defaults included, as plain data; any number of processes can resume it."""
        return _document(self.config, self.algorithms, self.hyperparameters)

    def given(self) -> dict[str, Any]:
        """Return what was set, as plain data, without defaults: an explicit default can mean something else."""
        given = self.config.given
        values = self.hyperparameters.model_dump(mode="json", include=set(given.algorithm))
        sections = given.set_values("json")
        # Not how many processes there were: any number of them can resume the run.
        sections.pop("distributed", None)
        return {**sections, "algorithm": {"name": given.algorithm["name"], **values}}


def _compared(name: str, rate: float, usual: float) -> str:
    times = f"{rate / usual:.2g} times" if rate > usual else f"1/{usual / rate:.2g} of"
    return f"algorithm.{name}={rate:.3g} is {times} the usual rate of this base"


@checked
def resolve(config: RunConfig) -> Resolved:
    """Resolve a configuration and check everything that needs neither a model nor this machine.

    Raises ConfigError, naming the key, for an unknown algorithm or hyperparameter, a value out of range, contradictory
    settings, and a gene whose range is empty, exceeds what the algorithm accepts, or excludes the start. A start
    outside a range that was given is moved to its nearer end, with a warning.
    """
    # The knockout goes by the budget, of which more is known once the base is loaded (Scale.generation).
    if config.training.evo_steps is None and not config.selection_strategy.narrows:
        config = config.decided(evo_steps=EVO_STEPS)
    algorithms = _algorithms(config.algorithm["name"], config.environment.env_type)
    starts = list[AlgorithmConfig]()
    genes: dict[str, Gene] = {}
    for algorithm in algorithms:
        # The last result holds for all: a range that an algorithm does not declare is taken from the first.
        start, genes = genes_of(config.genes, config.algorithm, algorithm, _hyperparameters(config, algorithm), genes)
        starts.append(start)
    if len(algorithms) > 1:
        names = tuple(algorithm.__name__ for algorithm in algorithms)
        genes["algorithm"] = Gene("algorithm", "choice", scale="choice", choices=names)
    starts = [_replayed(config.training.replay, config.algorithm["name"], start) for start in starts]
    (low, high), lora = config.mutation.rank_range, config.network.lora_config
    if config.mutation.probabilities.arch_mut > 0 and not low <= lora.r <= high:
        raise ConfigError(
            f"mutation.rank_range=[{low}, {high}] excludes the start, network.lora_config.r={lora.r}; widen the range "
            "or move the start"
        )
    if isinstance(lora.target_modules, str):
        where = "network.lora_config.target_modules (all-linear, a list of names, or a pattern)"
        compiled_pattern(lora.target_modules, where)
    return Resolved(config, algorithms, starts[0], genes, _mutations(config.mutation), _selection(config))


def _algorithms(written: str, env_type: str) -> tuple[type[LLMAlgorithm], ...]:
    """Return the class that ``algorithm.name`` stands for, or those of ``choice[GRPO, CISPO]``: a gene.

    Raises ConfigError for an unknown name, a choice among algorithms that cannot turn into one another, and an
    environment that offers something else to learn from.
    """
    choice = re.fullmatch(r"\s*choice\[(.*)\]\s*", written)
    names = [written] if choice is None else [name.strip() for name in choice[1].split(",")]
    for name in names:
        if name not in ALGORITHMS:
            raise ConfigError(f"algorithm.name={shown(name)} is unknown; {nearest(name, ALGORITHMS)}")
        if choice is not None and name not in FAMILY:
            raise ConfigError(
                f"algorithm.name={shown(written)}: an agent cannot switch to or from {name}; choose among "
                f"{', '.join(FAMILY)}"
            )
    if choice is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise ConfigError(f"algorithm.name={shown(written)}: a choice needs at least two different algorithms")
    offered = ALGORITHMS[names[0]].env_type
    wanted = [offered, *(["multiturn"] if offered == "reasoning" else [])]
    if env_type not in wanted:
        raise ConfigError(
            f"algorithm.name={names[0]!r} learns from environment.env_type={' or '.join(map(repr, wanted))}, "
            f"found {env_type!r}; change one of the two"
        )
    return tuple(ALGORITHMS[name] for name in names)


def _hyperparameters(config: RunConfig, algorithm: type[LLMAlgorithm]) -> AlgorithmConfig:
    """Return the checked hyperparameters of an algorithm; the default seed is the run's."""
    model = algorithm.Config
    values = {key: value for key, value in config.algorithm.items() if key != "name"}
    for key in values:
        # Those of GRPO pass: an algorithm's own Config says why it does not use one of them.
        if key not in model.model_fields and key not in GRPO.Config.model_fields:
            known = [*model.model_fields, *(f"network.{name}" for name in SharedOptions.model_fields)]
            raise ConfigError(unknown_key(f"algorithm.{key}", nearest(key, known)))
    values.setdefault("seed", config.training.seed)
    # A least length may be above the default limit, and a limit of the context is one.
    bounded = {"max_model_len", "min_output_tokens"} & values.keys()
    if "max_output_tokens" in model.model_fields and not bounded:
        values.setdefault("max_output_tokens", COMPLETION)
    given = values.get("reward_weights", {})
    if "reward_weights" in model.model_fields and isinstance(given, Mapping):
        weights = own_weights(config.environment, given, config.genes)
        values |= {"reward_weights": weights} if weights else {}
    return validated(model, values, "algorithm")


def _replayed(schedule: ReplayConfig | None, name: str, start: AlgorithmConfig) -> AlgorithmConfig:
    """Return the hyperparameters that a replayed schedule begins with; raises ConfigError for one that does not fit."""
    if schedule is None:
        return start
    if schedule.algorithm not in (None, name):
        raise ConfigError(
            f"training.replay is a schedule of {shown(schedule.algorithm)}, found algorithm.name={shown(name)}; train "
            "with that algorithm, or remove the entry"
        )
    known = list(type(start).model_fields)
    for gene in schedule.genes:
        if gene.partition(".")[0] not in known or gene in ("seed", "algorithm"):
            raise ConfigError(
                f"training.replay.genes.{gene}: {name} has no such hyperparameter; {nearest(gene, known)}"
            )
    # Every stage is checked. The first one comes last, because the run begins with its values.
    for tokens in sorted({step.tokens for steps in schedule.genes.values() for step in steps}, reverse=True):
        values = schedule.at(tokens)
        try:
            begun = start.changed(values, "algorithm")
        except ConfigError as error:
            raise ConfigError(f"training.replay, from {tokens} tokens on: {error}") from None
    return begun


def _document(config: RunConfig, algorithms: tuple[type[LLMAlgorithm], ...], start: AlgorithmConfig) -> dict[str, Any]:
    values = set_values(start, "json")
    # Algorithms have different defaults, so with several of them defaults are not written out. Neither are they if one
    # setting replaces others, because an explicit default would contradict it.
    if len(algorithms) == 1:
        with suppress(ConfigError):
            whole = start.model_dump(mode="json")
            validated(type(start), whole)
            values = whole
    resolved = config.model_dump(mode="json", exclude={"distributed"})
    resolved["selection_strategy"] = config.selection_strategy.document(
        tournament_size=config.tournament_size, candidates=config.candidates, equal_tokens=config.equal_tokens
    )
    resolved["mutation"]["rl_hp_selection"] = {
        name: gene.model_dump(mode="json") for name, gene in config.genes.items()
    }
    resolved["training"]["lr_schedule"] = config.lr_schedule.model_dump()
    # One of the two decides.
    del resolved["training"]["num_epochs" if config.training.num_epochs is None else "max_steps"]
    return {**resolved, "algorithm": {"name": config.algorithm["name"], **values}}


def document_of(config: RunConfig) -> dict[str, Any]:
    """Return the document without checking the genes: with today's defaults they may exclude the start."""
    algorithms = _algorithms(config.algorithm["name"], config.environment.env_type)
    return _document(config, algorithms, _hyperparameters(config, algorithms[0]))


def _mutations(m: MutationConfig) -> Mutations:
    return Mutations(
        no_mutation=m.probabilities.no_mut,
        architecture=m.probabilities.arch_mut,
        new_layer_prob=0,
        parameters=0,
        activation=0,
        rl_hp=m.probabilities.rl_hp_mut,
        mutate_elite=m.mutate_elite,
        genes_per_mutation=m.genes_per_mutation,
        rank_range=m.rank_range,
    )


def _selection(config: RunConfig) -> Strategy | None:
    """Return the strategy for the population of a run; None for custom code."""
    strategy = config.selection_strategy.declared
    if strategy is None:
        return None
    settings = strategy.set_values()
    if isinstance(strategy, TournamentSelection):
        settings["tournament_size"] = config.tournament_size
    if isinstance(strategy, KnockoutSelection) and not any(name in config.genes for name in LEARNING_RATES):
        # A challenger differs by its learning rate alone.
        settings["pulses"] = {**settings.get("pulses", {}), "factors": ()}
    size: dict[str, Any] = {"population_size": config.training.pop_size}
    try:
        return type(strategy)(**settings, **(size if "population_size" in type(strategy).model_fields else {}))
    except ConfigError as error:
        raise ConfigError(f"selection_strategy: {error}") from error
