"""Every setting of a run, declared once, checked before anything is loaded."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from agilerl import hooks
from agilerl.arguments import checked, nearest, shown
from agilerl.config import Section
from agilerl.config.base_model import NetworkConfig, SharedOptions
from agilerl.config.declared import HYPERPARAMETERS
from agilerl.config.distributed import DistributedConfig
from agilerl.config.environment import EnvironmentConfig, Params
from agilerl.config.vllm import server_url
from agilerl.custom_code import names_code
from agilerl.errors import ConfigError
from agilerl.hpo.strategies import ANNEALED, COST_TOKENS, OBJECTIVE_STRATEGIES, SETTINGS, SHRINKING, LRSchedule
from agilerl.sizes import MAX_ROWS
from agilerl.validation import Needs, grouped, idle, validated

_LARGEST_SEED = 2**63 - 1

Seed = Annotated[int, Field(ge=0, le=_LARGEST_SEED)]

EVO_STEPS = 8
"""Iterations between selections if a manifest gives none; knockout and pulses go by the budget instead."""
_FRONT = 2
_CLONES = Needs(
    "selection_strategy.clones",
    why="{whole.selection_strategy.strategy} makes no mutated clones; name tournament, truncation or multi_frequency",
    off=0,
)
_ALONE = "there is only one agent, so none to learn from; raise training.pop_size"
DEFAULT = "knockout"
"""The strategy if a manifest names none."""
ANNEALING = LRSchedule("linear", decay=0.4)
"""The learning rate's course in runs that end with one agent."""


def _known(name: str, known: Collection[str], kind: str, code: str) -> None:
    if not (name in known or names_code(name)):
        raise ValueError(
            f"expected one of the {kind} {', '.join(known)}, or custom code ({code}), found {shown(name)}; "
            f"{nearest(name, known)}"
        )


def _strategy(name: str | None) -> str | None:
    if name is not None:
        _known(name, SETTINGS, "strategies", "strategy.py:MySelection")
    return name


TRACKERS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("project", "entity", "name", "group", "job_type", "tags", "notes", "mode"),
    "tensorboard": (),
    "trackio": ("project", "name", "group"),
    "mlflow": ("project", "name", "tags", "description"),
}
"""The trackers with the settings that a manifest may give. None of them is an address, a file or a key: a manifest of a
stranger must not choose where the user's key is sent."""


def _by_name(trackers: Any) -> Any:
    """Return trackers with their settings from a name, a list of names, or a mapping in which settings may be empty."""
    if isinstance(trackers, str):
        return {trackers: {}}
    if isinstance(trackers, list) and all(isinstance(name, str) for name in trackers):
        if twice := [name for name in trackers if trackers.count(name) > 1]:
            raise ValueError(f"expected each tracker once, found {shown(twice[0])} twice")
        return {name: {} for name in trackers}
    if isinstance(trackers, Mapping):
        return {name: {} if settings is None else settings for name, settings in trackers.items()}
    raise ValueError(f"expected names of trackers, such as [wandb, tensorboard], found {shown(trackers)}")


def _trackers(trackers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for name, settings in trackers.items():
        _known(name, TRACKERS, "trackers", "tracker.py:MyTracker")
        for setting in settings:
            if setting not in TRACKERS.get(name, (setting,)):  # custom code takes any
                known = ", ".join(TRACKERS[name]) or "none"
                raise ValueError(f"{name} has no setting {shown(setting)} in a manifest; it has {known}")
    return trackers


def _device(name: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d{1,2})?", name) is None:
        raise ValueError(f"expected cpu, cuda, or cuda with a number such as cuda:1, found {shown(name)}")
    return name


def _named(value: Any) -> Any:
    """Let a name stand for a section that has it alone."""
    return {"name": value} if isinstance(value, str) else value


class LRScheduleConfig(Section):
    """The course of every agent's learning rate over the run: a factor on it, by the share of the budget spent."""

    name: Literal["constant", "linear", "cosine"]
    """How it decays."""
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the budget in which the factor rises from 0 to 1."""
    decay: Annotated[float, Field(ge=0, le=1), Needs("name", ("linear", "cosine"))] = 1.0
    """Last share of the budget, in which it falls to ``end``; 1 is all that the warm-up leaves."""
    end: Annotated[float, Field(ge=0, le=1), Needs("name", ("linear", "cosine"))] = 0.0
    """Factor at the end."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        self.schedule()
        return self

    def schedule(self) -> LRSchedule:
        """Return the schedule; raises ConfigError if warm-up and decay overlap."""
        return LRSchedule(self.name, self.warmup, self.decay, self.end)


class ReplayStep(Section):
    """One step of a schedule."""

    tokens: Annotated[int, Field(ge=0)]
    """The value holds once the agent has trained on this many tokens."""
    value: float | int | str | bool
    """The hyperparameter's value."""


class ReplayConfig(Section):
    """A schedule of hyperparameters that one agent trains with, as ``agilerl schedule`` writes it."""

    genes: dict[str, Annotated[list[ReplayStep], Field(min_length=1)]]
    """By hyperparameter: its values, the first from 0 tokens on, the last one beyond the end."""
    algorithm: str | None = None
    """The algorithm that it was found with; None: any."""
    lr_schedule: LRScheduleConfig | None = None
    """The run's course of the learning rate, unless ``training.lr_schedule`` gives another."""

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> Self:
        for name, steps in self.genes.items():
            places = [step.tokens for step in steps]
            if places[0] != 0 or places != sorted(set(places)):
                raise ValueError(f"the steps of {name} begin at tokens: 0 and rise, found {places[:8]}")
        return self

    def at(self, tokens: int) -> dict[str, Any]:
        """Return the values that hold once this many tokens were trained on."""
        return {name: [step.value for step in steps if step.tokens <= tokens][-1] for name, steps in self.genes.items()}


class TrainingConfig(Section):
    """How long, how many, where."""

    pop_size: Annotated[int, Field(ge=1)] = 4
    """Agents of the population."""
    max_steps: Annotated[int, Field(ge=1)] = 32768
    """Completions sampled (or read from data, two a pair) for training, all agents together."""
    num_epochs: Annotated[int | None, Field(ge=1)] = None
    """Passes of every agent over the training rows of ``environment.dataset``, in place of ``max_steps``."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Stop after this many tokens generated, trained on and evaluated: at the end of the iteration that reaches it, to
    which the last exam is added."""
    max_seconds: Annotated[float | None, Field(gt=0)] = None
    """Stop after this many seconds, at the end of an iteration."""
    price_per_hour: Annotated[float | None, Field(gt=0)] = None
    """What an hour of all machines that the run uses costs, in any currency; plans and reports then say what the run
    costs."""
    evo_steps: Annotated[int | None, Field(ge=1)] = None
    """Iterations (a rollout and an update of every agent) between selections. None: 8, and for knockout and pulses so
    many that one agent alone would have 32 generations in the whole budget, but fewer where exams would cost much.
    While a knockout has more than four founders, they share the iterations of three: 8 have three eighths of them. If
    it is None, they also have at most a fifth of the budget before their first exam."""
    evaluation_interval: Annotated[int | None, Field(ge=1)] = None
    """Iterations between exams; None examines before each selection only."""
    seed: Seed = 42
    """Seed of everything random in the run."""
    lr_schedule: Annotated[LRScheduleConfig | None, BeforeValidator(_named)] = None
    """Course of the learning rate, or its name alone; None: constant, and for knockout and pulses linear over the last
    40 %."""
    replay: ReplayConfig | None = None
    """A schedule of hyperparameters for a run of one agent (``agilerl train --replay FILE``)."""
    init: Literal["spread", "same"] = "spread"
    """Start the population spread over the genes' ranges, or all alike."""
    usual_founder: bool = True
    """Knockout: if the learning rate is over three times above or below the usual one of the base, agent 1 starts with
    that, and stays in doubt."""
    eval_max_new_tokens: Annotated[int | None, Field(ge=1)] = None
    """Longest completion of an exam; None takes ``algorithm.max_output_tokens``."""
    eval_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of exams and tests; 0 is greedy. Above it, all agents draw by the same numbers in every exam."""
    eval_samples: Annotated[int, Field(ge=1)] = 1
    """Completions of each question in exams and tests, whose mean is its score; several need ``eval_temperature``."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of torch; more than one pays for large base models only."""
    device: Annotated[str, AfterValidator(_device)] = "cpu"
    """``cpu``, ``cuda`` or ``cuda:1``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the base; ``auto``: float32 on a CPU, the checkpoint's own elsewhere. ``bfloat16`` on a CPU is that
    of the weights and products of linear layers, all else is float32; faster if the CPU has AVX512-BF16 or AMX."""
    max_tokens_in_flight: Annotated[int | None, Field(ge=64)] = None
    """Tokens of one training forward, all agents together. None chooses by the base's size and the device's memory."""
    max_rows_in_flight: Annotated[int, Field(ge=1)] = MAX_ROWS
    """Completions decoded at once, all agents together."""
    log_completions: Annotated[int, Field(ge=0)] = 64
    """Completions of each agent written to ``completions/`` in each iteration."""
    checkpoint_steps: Annotated[int | None, Field(ge=1)] = None
    """Iterations between checkpoints; None saves after each selection only."""
    checkpoint_seconds: Annotated[float | None, Field(gt=0)] = None
    """Save after an iteration when the last checkpoint inside a generation is this old."""
    preflight: Literal["stop", "warn", "off"] = "stop"
    """Before the first update the agents answer training questions, 16 to 64 each a group of times. If no answers
    differ in their reward there is nothing to learn: ``stop`` ends the run with what to change, ``warn`` says so and
    continues, ``off`` asks nothing. Short runs, of fewer than 320 questions, have no preflight."""
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run stops, with a diagnosis, if more than this share of an iteration's completions (or episodes), all
    agents together, has no grade because the grader (or the environment) failed."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints to keep, besides the best."""
    trackers: Annotated[dict[str, Params], BeforeValidator(_by_name), AfterValidator(_trackers)] = Field(
        default_factory=dict
    )
    """Where metrics are sent as well: ``wandb``, ``tensorboard``, ``trackio``, ``mlflow``, or custom code,
    ``tracker.py:MyTracker``. A list of names, or a mapping of names to settings."""


class ProbabilityConfig(Section):
    """Relative probabilities of the kinds of mutation."""

    no_mut: Annotated[float, Field(ge=0)] = 0.0
    """Leave the agent as it is."""
    arch_mut: Annotated[float, Field(ge=0), _CLONES] = 0.0
    """Double or halve the adapter's rank."""
    new_layer: Annotated[float, Field(ge=0)] = 0.0
    """Must be 0: the base is frozen."""
    params_mut: Annotated[float, Field(ge=0), _CLONES] = 0.0
    """Add noise to the adapter."""
    act_mut: Annotated[float, Field(ge=0)] = 0.0
    """Must be 0: the base is frozen."""
    rl_hp_mut: Annotated[float, Field(ge=0), _CLONES] = 1.0
    """Change hyperparameters."""


class GeneConfig(Section):
    """Range of one hyperparameter; what is left out comes from the algorithm's own declaration."""

    min: float | None = None
    """Smallest value. An agent whose own value lies outside ``min`` and ``max`` starts at the nearer end."""
    max: float | None = None
    """Largest value."""
    scale: Literal["log", "linear"] | None = None
    """Whether mutations are factors or differences; None: as declared, and differences if ``min`` is 0, which factors
    never reach."""
    choices: list[float | int | str | bool] | None = None
    """The values to choose from, instead of a range."""
    shrink_factor: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Multiply by ``shrink_factor`` or by ``grow_factor``, each half of the time, instead of drawing a step. Of the two
    one alone is enough: the other is 0.8 or 1.2 then."""
    grow_factor: Annotated[float | None, Field(gt=1)] = None
    """See ``shrink_factor``."""
    monotone: Literal["up", "down"] | None = None
    """Mutations move the value only this way, and it stays where the range ends: ``up`` suits a limit on tokens that
    grows with what an agent can do."""


class MutationConfig(Section):
    """What mutates, how often, how far."""

    probabilities: ProbabilityConfig = Field(default_factory=ProbabilityConfig)
    """Kinds of mutation."""
    rl_hp_selection: dict[str, GeneConfig] = Field(default_factory=dict)
    """The genes: hyperparameters of the algorithm that evolve. Without any in knockout and pulses, and without the
    whole section in other selections of several agents: the learning rate, in its declared range."""
    mutation_sd: Annotated[float, Field(gt=0), Needs("probabilities.params_mut")] = 0.03
    """Size of adapter noise, relative to the adapter."""
    genes_per_mutation: Annotated[int, Field(ge=1), _CLONES] = 1
    """Genes that move in one mutation."""
    rank_range: Annotated[tuple[int, int], Needs("probabilities.arch_mut")] = (4, 64)
    """Smallest and largest adapter rank."""
    crossover: Annotated[float, Field(ge=0, le=1), _CLONES] = 0.0
    """Share of the clones of a selection that get a second parent: their adapter is the mean of both."""
    mutate_elite: Annotated[bool, _CLONES] = False
    """Let the elite mutate too."""
    rand_seed: Seed | None = None
    """Seed of mutations; None takes ``training.seed``."""


class PulseConfig(Section):
    """Later rounds of a knockout, once one agent is left, and the whole of ``name: pulses``."""

    every: Annotated[int, Field(ge=1)] = 3
    """Generations from one fork into challengers to the next."""
    factors: list[Annotated[float, Field(gt=0)]] = Field(default_factory=lambda: [3.0])
    """One challenger each: its learning rates are the agent's times this. An empty list forks none."""
    challenge: Annotated[float, Field(ge=0.5, le=1)] = 0.8
    """Probability of being better, by the paired exam, with which a challenger takes over."""
    until: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Share of the budget after which there are no more challengers."""
    guard: Annotated[float, Field(ge=0.5, le=1)] = 0.99
    """Bring the best exam's agent back if it is better than the present one with this probability; 1 never does."""
    guard_factor: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Factor on its learning rates then."""


class SelectionConfig(Section):
    """Who survives. Omitted settings have the strategy's own default; settings of another strategy are refused."""

    name: Annotated[str | None, AfterValidator(_strategy)] = None
    """``knockout``, ``pulses``, ``tournament``, ``truncation``, ``halving``, ``multi_frequency``, ``none`` (keep all
    agents, which is random search), or custom code, ``strategy.py:MySelection``. None: ``tournament`` if
    ``tournament_size`` or ``elitism`` is given, else the default."""
    tournament_size: Annotated[int, Field(ge=1)] = 2
    """Tournament: agents that compete for one place; if not given, at most as many as there are."""
    elitism: bool = True
    """Tournament: the best agent keeps its place."""
    gate: Annotated[float | None, Field(ge=0.5, lt=1)] = None
    """Tournament: replace an agent only by one that is better with this probability; None always replaces."""
    fraction: Annotated[float | None, Field(gt=0, le=0.5)] = None
    """Truncation: share of the agents that is replaced by copies of as many best ones (0.25)."""
    confidence: Annotated[float | None, Field(ge=0.5, le=1)] = None
    """Probability of being better from which on a copy replaces an agent (truncation, 0.8), or an agent displaces the
    user's configuration (knockout, 0.8)."""
    period: Annotated[int | None, Field(ge=1)] = None
    """Knockout and halving: generations from one halving to the next (1)."""
    floor: Annotated[int | None, Field(ge=1)] = None
    """Knockout and halving: agents that are left in the end (1)."""
    between: Literal["none", "truncation"] | None = None
    """Halving: what happens between two halvings (none)."""
    n_subpopulations: Annotated[int | None, Field(ge=1)] = None
    """Multi-frequency: parts of the population (2)."""
    evolution_frequency_ratios: list[Annotated[int, Field(ge=1)]] | None = None
    """Multi-frequency: each part's generations between selections (1, 4, 16, ...)."""
    n_winners: Annotated[int | None, Field(ge=1)] = None
    """Multi-frequency: agents of a part that are copied (a quarter, at least one)."""
    n_survivors: Annotated[int | None, Field(ge=0)] = None
    """Multi-frequency: agents of a part that stay (the rest)."""
    n_open_for_migration: Annotated[int | None, Field(ge=0)] = None
    """Multi-frequency: agents of a part that better ones of other parts replace (a quarter)."""
    n_losers: Annotated[int | None, Field(ge=1)] = None
    """Multi-frequency: agents of a part that copies of winners replace (a quarter, at least one)."""
    pulses: PulseConfig | None = None
    """Knockout and pulses: later rounds."""
    params: dict[str, Any] | None = None
    """Custom code: keywords of its class."""
    objectives: Annotated[list[Literal["reward", "kl", "length"]], Field(min_length=1)] | None = None
    """What the exam measures and selection compares, by Pareto dominance: ``reward``, to be raised, with ``kl`` (to the
    reference, nats a token) and ``length`` (tokens a completion), to be lowered. For knockout and halving, which then
    keep two agents unless ``floor`` says more, tournament, truncation, none and custom code. None: the reward."""
    candidates: Annotated[int | None, Field(ge=1, le=16)] = None
    """Best exams whose agents take a second panel at the end, as large as the exam, with the best agent of the last
    one. That agent is the elite, unless the panel shows another to be better with a probability of 0.8. 1: the elite is
    the best exam's agent. None: 3 for knockout and pulses on tasks that make questions, else 1."""
    soup: Annotated[float | None, Field(ge=0.5, lt=1)] = None
    """Let the soup of the candidates, the mean of their adapters' deltas, take the second panel as well, and make it
    the elite if it is better than the chosen candidate with this probability. None: no soup."""
    equal_tokens: bool | None = None
    """Compare agents after equally many tokens, not iterations: those that spend more skip iterations. None: in
    knockout and pulses, if a gene is among those that cost tokens (``group_size``, ``update_epochs``,
    ``max_output_tokens``)."""
    collapse_guard: bool = True
    """Replace agents whose entropy, length or reward has fallen far outside what the elite's is."""

    @property
    def strategy(self) -> str:
        """The strategy in force."""
        if self.name is not None:
            return self.name
        return "tournament" if self.model_fields_set & {"tournament_size", "elitism"} else DEFAULT

    @property
    def settings(self) -> dict[str, Any]:
        """What was set of the strategy's own settings."""
        names = {"params"} if names_code(self.strategy) else SETTINGS[self.strategy]
        given = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        if self.pulses is not None and "pulses" in given:
            given["pulses"] = self.pulses.model_dump(exclude_unset=True)
        if "floor" in names:
            given["floor"] = self.least
        return {name: value for name, value in given.items() if value is not None}

    @property
    def has_costs(self) -> bool:
        """Whether the exam has other objectives than the reward."""
        return len(self.objectives or ()) > 1

    @property
    def clones(self) -> bool:
        """Whether it makes clones that mutate."""
        if self.strategy == "halving":
            return self.between == "truncation"
        return self.strategy not in (*ANNEALED, "none")

    @property
    def least(self) -> int | None:
        """Agents that knockout and halving leave: those of a front if there are several objectives."""
        return _FRONT if self.floor is None and self.has_costs else self.floor

    @model_validator(mode="after")
    def _fits_the_strategy(self) -> Self:
        settings = {"params"} if names_code(self.strategy) else set(SETTINGS[self.strategy])
        if self.strategy == "halving" and self.between != "truncation":
            settings -= {"fraction", "confidence"}
        # Both have always been in the run.json of every run, whatever its strategy.
        foreign = (
            self.model_fields_set
            - settings
            - {"name", "collapse_guard", "candidates", "soup", "equal_tokens", "tournament_size", "elitism"}
            - {"objectives"}
        )
        for name in sorted(foreign):
            if getattr(self, name) is not None:
                known = ", ".join(sorted(settings)) or "no other settings"
                kind = f"selection_strategy.name={self.strategy}"
                raise ValueError(f"{name} is not a setting of {kind}, which has {known}")
        return self

    @model_validator(mode="after")
    def _has_a_front(self) -> Self:
        given = self.objectives or ["reward"]
        if "reward" not in given or len(set(given)) < len(given):
            raise ValueError(f"objectives: expected reward and others, each once, found {shown(given)}")
        if not self.has_costs:
            return self
        if not names_code(self.strategy) and self.strategy not in OBJECTIVE_STRATEGIES:
            raise ValueError(
                f"objectives={shown(given)}: selection_strategy.name={self.strategy} compares agents by one number; "
                f"name one of {', '.join(OBJECTIVE_STRATEGIES)}, or leave objectives out"
            )
        if self.floor == 1:
            raise ValueError(
                f"objectives={shown(given)}: selection_strategy.floor=1 leaves one agent, which is not a front; set "
                "floor to 2 or more, or name a strategy that keeps all agents (tournament, truncation)"
            )
        return self


TEACHER_KEY = "TEACHER_API_KEY"
"""Environment variable with the key of an endpoint that teaches."""


def _absolute(path: Any) -> Any:
    if isinstance(path, str) and (not path.strip() or "\0" in path):
        raise ValueError(f"expected a path, found {shown(path)}")
    return str(Path(path).expanduser().absolute()) if isinstance(path, str | Path) else path


class SharingConfig(Section):
    """What agents learn from each other while they train; nothing by default."""

    distillation: Annotated[float, Field(ge=0), Needs("has_teacher", why=_ALONE)] = 0.0
    """Weight of KL(agent || teacher) on each agent's own completions; 0: none."""
    teacher: Annotated[str | None, BeforeValidator(_absolute)] = None
    """Folder of the adapter that teaches: a PEFT folder, an agent of a checkpoint, or the elite of a run with the same
    base. None: the elite of the last selection."""
    teacher_url: Annotated[str | None, AfterValidator(server_url)] = None
    """Address of an OpenAI-compatible endpoint whose model teaches, instead of a folder: any model with the base's
    tokenizer. A key is read from ``TEACHER_API_KEY`` and only sent if you allow it, as vLLM's."""
    teacher_model: Annotated[str | None, Field(min_length=1)] = None
    """The model's name at ``teacher_url``."""
    teacher_api: Annotated[Literal["prompt_logprobs", "echo"], Needs("teacher_url")] = "prompt_logprobs"
    """How log-probs of given tokens are asked for: by vLLM's ``prompt_logprobs``, or ``echo`` with ``logprobs``."""
    teacher_timeout: Annotated[float, Field(gt=0), Needs("teacher_url")] = 120.0
    """Seconds for one answer of the endpoint."""
    experience: Annotated[int, Field(ge=0), Needs("has_others", why=_ALONE)] = 0
    """Completions of other agents that an agent learns from besides its own, for each prompt."""
    experience_for: Annotated[Literal["flat", "all"], Needs("experience")] = "flat"
    """Prompts that get them: those whose own completions all earned the same, or all."""
    experience_cap: Annotated[float, Field(gt=0), Needs("experience")] = 2.0
    """Upper limit of the importance weight of such a completion."""

    @model_validator(mode="after")
    def _teaches(self) -> Self:
        if self.teacher is not None and self.distillation == 0:
            raise ValueError(f"sharing.teacher={self.teacher!r} has no effect: sharing.distillation is 0; set it")
        if self.teacher_url is not None and self.distillation == 0:
            raise ValueError("sharing.teacher_url has no effect: sharing.distillation is 0; set it")
        if self.teacher_url is not None and self.teacher is not None:
            raise ValueError("sharing.teacher and sharing.teacher_url are two teachers; remove one of them")
        if (self.teacher_url is None) != (self.teacher_model is None):
            raise ValueError("sharing.teacher_url and sharing.teacher_model go together; set both or neither")
        return self

    def __bool__(self) -> bool:
        return self.distillation > 0 or self.experience > 0

    @property
    def elite_teaches(self) -> bool:
        """Whether agents are drawn to the elite of the last selection."""
        return self.distillation > 0 and self.teacher is None and self.teacher_url is None


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
    sharing: SharingConfig = Field(default_factory=SharingConfig)
    """What agents learn from each other."""
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

    def typed_with(self, other: "RunConfig | None") -> Self:
        """Return this configuration, with the addresses that were typed for another one."""
        self._typed = self._typed if other is None else other.typed_addresses
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
        least = self.selection_strategy.least or 1
        if self.selection_strategy.has_costs and self.selection_strategy.strategy in SHRINKING and least > size:
            raise ValueError(
                f"selection_strategy.objectives keeps a front of {least} agents, found training.pop_size={size}; raise "
                "pop_size, or leave objectives out"
            )
        if self.training.replay is not None and (size != 1 or self.selection_strategy.strategy != "none"):
            raise ValueError(
                f"training.replay is for one agent that nothing selects, found training.pop_size={size} and "
                f"selection_strategy.name={self.selection_strategy.strategy}; set pop_size: 1 and name: none"
            )
        if self.training.evo_steps is None and self.selection_strategy.strategy not in ANNEALED:
            self.training = self.training.model_copy(update={"evo_steps": EVO_STEPS})
            self.training.model_fields_set.discard("evo_steps")
        if self.selection_strategy.soup is not None and self.candidates < 2:
            raise ValueError(
                f"selection_strategy.soup={self.selection_strategy.soup:g} is made of the candidates, found "
                f"{self.candidates}; set selection_strategy.candidates=3, or leave soup out"
            )
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

        If none is named, the learning rate in knockout and pulses, and with another selection of several agents if
        there is no section ``mutation`` at all.
        """
        strategy = self.selection_strategy.strategy
        selects = strategy != "none" and self.training.pop_size > 1 and "mutation" not in self.model_fields_set
        if "rl_hp_selection" in self.mutation.model_fields_set or not (strategy in ANNEALED or selects):
            return self.mutation.rl_hp_selection
        names = ("lr_actor", "lr_critic") if self.algorithm["name"] == "PPO" else ("lr",)
        return {name: GeneConfig() for name in names}

    @property
    def equal_tokens(self) -> bool:
        """Whether agents are compared after equally many tokens."""
        given = self.selection_strategy.equal_tokens
        costly = any(name in self.genes for name in COST_TOKENS)
        return given if given is not None else costly and self.selection_strategy.strategy in ANNEALED

    @property
    def smallest_population(self) -> int:
        """Agents that selection may leave."""
        section, size = self.selection_strategy, self.training.pop_size
        return min(section.least or 1, size) if section.strategy in SHRINKING else size

    @property
    def candidates(self) -> int:
        """Best exams whose agents take the second panel; 1 if there is none."""
        given = self.selection_strategy.candidates
        if given is not None:
            return given
        return 3 if self.selection_strategy.strategy in ANNEALED and self.environment.dataset is None else 1

    @property
    def kept_exams(self) -> int:
        """Best exams whose agents are kept with their scores, for selection or a second panel; 0: none."""
        strategy = self.selection_strategy.strategy
        return self.candidates if self.candidates > 1 or strategy in ANNEALED or names_code(strategy) else 0

    @property
    def second_panel(self) -> int:
        """Questions of the panel that chooses among candidates; they follow those of the test."""
        return self.environment.exam_panel if self.candidates > 1 else 0

    @property
    def largest_rank(self) -> int:
        """Largest rank that mutation may give an adapter."""
        start, mutation = self.network.lora_config.r, self.mutation
        return max(start, mutation.rank_range[1]) if mutation.probabilities.arch_mut > 0 else start

    def replaced(self, **sections: Section) -> Self:
        """Return a copy with other sections, which are taken as they are."""
        return self.model_copy(update=sections)

    @property
    def has_others(self) -> bool:
        """Whether an agent has others to learn from."""
        return self.training.pop_size > 1

    @property
    def has_teacher(self) -> bool:
        """Whether there is a policy to draw agents to."""
        return self.has_others or not self.sharing.elite_teaches

    @property
    def without_effect(self) -> list[str]:
        """Sentences about settings that change nothing, those of ``algorithm`` excepted."""
        sentences = [*self._replaced, *grouped(idle(self, "", self, evolving=self.genes))]
        strategy = self.selection_strategy.strategy
        if strategy in ANNEALED and not set(self.genes) & {"lr", "lr_actor", "lr_critic"}:
            sentences.append(f"{strategy}: challengers differ by their learning rate, not a gene here: there are none")
        return sentences

    @property
    def lr_schedule(self) -> LRSchedule:
        """The course of the learning rate over the run."""
        given = self.training.lr_schedule
        if given is None and self.training.replay is not None:
            given = self.training.replay.lr_schedule
        if given is not None:
            return given.schedule()
        return ANNEALING if self.selection_strategy.strategy in ANNEALED else LRSchedule()

    @property
    def tournament_size(self) -> int:
        """Agents that compete for one place; by default at most as many as there are."""
        size, given = self.selection_strategy.tournament_size, self.selection_strategy.model_fields_set
        return size if "tournament_size" in given else min(size, self.training.pop_size)

    @classmethod
    @checked
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Check a manifest; raises ConfigError with a sentence that names the key and the nearest known one."""
        for section, content in values.items():
            if section not in cls.model_fields:
                raise ConfigError(f"unknown key {shown(section)}; {unknown_section(section, content)}")
            if not isinstance(content, Mapping):
                raise ConfigError(f"{section} must be a mapping of settings, found {shown(content)}")
        return validated(cls, values)


def addresses_of(name: str) -> list[str]:
    """Return ``section.name`` for each section that has a setting of this name."""
    sections = {
        section: [*HYPERPARAMETERS, *SharedOptions.model_fields]
        if section == "algorithm"
        else getattr(field.annotation, "model_fields", ())
        for section, field in RunConfig.model_fields.items()
    }
    return [f"{section}.{name}" for section, names in sections.items() if name in names]


def unknown_section(key: str, value: Any = None) -> str:
    """Return a hint for a key that does not begin with a section: where it belongs, or the nearest section."""
    places = " or ".join(map(repr, addresses_of(key)))
    hints = [f"did you mean {places}?" if places else None, hooks.hint(key, value)]
    return " ".join(filter(None, hints)) or nearest(key.partition(".")[0], RunConfig.model_fields)


def default_out(e: EnvironmentConfig) -> Path:
    """Return ``runs/<task>-<time>``, with a number if another run took that name in the same second."""
    what = e.env_id or (Path(e.dataset[0].path).stem if e.dataset else e.task or "")
    task = "".join(c if c.isalnum() or c in "_-" else "_" for c in what.rpartition(":")[2])
    name = f"{task[:60]}-{datetime.now():%Y%m%d-%H%M%S}"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
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
