"""The search: what mutates, who survives; and the teacher that agents are drawn to."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from agilerl.checks.arguments import shown
from agilerl.checks.validation import Needs
from agilerl.config import Section
from agilerl.config.training import Seed, check_known
from agilerl.config.vllm import server_url
from agilerl.hpo.strategies import SETTINGS, defaults_of
from agilerl.safety.custom_code import names_code

_CLONES = Needs(
    "selection_strategy.clones",
    why="{whole.selection_strategy.strategy} makes no mutated clones; name tournament, truncation or multi_frequency",
    off=0,
)
DEFAULT = "knockout"
"""The strategy if a manifest names none."""


def _strategy(name: str | None) -> str | None:
    if name is not None:
        check_known(name, SETTINGS, "strategies", "strategy.py:MySelection")
    return name


class ProbabilityConfig(Section):
    """Relative probabilities of the kinds of mutation."""

    no_mut: Annotated[float, Field(ge=0)] = 0.0
    """Leave the agent as it is."""
    arch_mut: Annotated[float, Field(ge=0), _CLONES] = 0.0
    """Double or halve the adapter's rank."""
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
    """Multiply by ``shrink_factor`` or ``grow_factor``, each half of the time, instead of drawing a step. If only
    one is given, the other is 0.8 or 1.2."""
    grow_factor: Annotated[float | None, Field(gt=1)] = None
    """See ``shrink_factor``."""
    monotone: Literal["up", "down"] | None = None
    """Mutations move the value only this way: ``up`` suits a limit on tokens that grows with what an agent can do."""


class MutationConfig(Section):
    """What mutates, how often, how far."""

    probabilities: ProbabilityConfig = Field(default_factory=ProbabilityConfig)
    """Kinds of mutation."""
    rl_hp_selection: dict[str, GeneConfig] = Field(default_factory=dict)
    """The genes: hyperparameters of the algorithm that evolve. Without any in knockout, and without the
    whole section in other selections of several agents: the learning rate, in its declared range."""
    genes_per_mutation: Annotated[int, Field(ge=1), _CLONES] = 1
    """Genes that move in one mutation."""
    rank_range: Annotated[tuple[int, int], Needs("probabilities.arch_mut")] = (4, 64)
    """Smallest and largest adapter rank."""
    mutate_elite: Annotated[bool, _CLONES] = False
    """Let the elite mutate too."""
    rand_seed: Seed | None = None
    """Seed of mutations; None takes ``training.seed``."""


class PulseConfig(Section):
    """Later rounds of a knockout, once one agent is left."""

    every: Annotated[int, Field(ge=1)] = 3
    """Generations from one fork into challengers to the next."""
    factors: list[Annotated[float, Field(gt=0)]] = Field(default_factory=lambda: [3.0])
    """One challenger each: its learning rates are the agent's times this. An empty list forks none."""
    challenge: Annotated[float, Field(ge=0.5, le=1)] = 0.8
    """Probability of being better, by the paired exam, with which a challenger takes over."""
    until: Annotated[float, Field(ge=0, le=1)] = 0.45
    """Share of the budget after which there are no more challengers."""
    guard: Annotated[float, Field(ge=0.5, le=1)] = 0.99
    """Bring the best exam's agent back if it is better than the present one with this probability; 1 never does."""
    guard_factor: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Factor on its learning rates then."""


class SelectionConfig(Section):
    """Who survives. Omitted settings have the strategy's own default; settings of another strategy are refused."""

    name: Annotated[str | None, AfterValidator(_strategy)] = None
    """``knockout``, ``tournament``, ``truncation``, ``multi_frequency``, ``none`` (keep all agents, which is random
    search), or custom code, ``strategy.py:MySelection``. None: ``tournament`` if ``tournament_size`` or ``elitism`` is
    given, else the default."""
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
    """Knockout: generations from one halving to the next (1)."""
    floor: Annotated[int | None, Field(ge=1)] = None
    """Knockout: agents that are left in the end (1)."""
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
    """Knockout: later rounds."""
    params: dict[str, Any] | None = None
    """Custom code: keywords of its class."""
    candidates: Annotated[int | None, Field(ge=1, le=16)] = None
    """Best exams whose agents take a second panel at the end, with the best agent of the last exam, which is the
    elite unless another is better on the panel with a probability of 0.8. 1: the elite is the best exam's agent.
    None: 3 for knockout on tasks that make questions, else 1."""
    soup: Annotated[float | None, Field(ge=0.5, lt=1)] = None
    """Let the mean of the candidates' deltas take the second panel too, and make it the elite if it is better than
    the chosen candidate with this probability. None: no soup."""
    equal_tokens: bool | None = None
    """Compare agents after equally many tokens, not iterations. None: in knockout, if a gene costs tokens
    (``group_size``, ``update_epochs``, ``max_output_tokens``)."""
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
        return {name: value for name, value in given.items() if value is not None}

    def document(self, **of_run: Any) -> dict[str, Any]:
        """Return the strategy with all of its settings, defaults and those ``of_run`` included, without others'."""
        if names_code(self.strategy):
            settings: dict[str, Any] = {"params": self.params}
        else:
            settings = {**defaults_of(self.strategy), **self.settings}
            if "pulses" in settings:
                settings["pulses"] = (self.pulses or PulseConfig()).model_dump(mode="json")
        common = self.model_dump(include={"elitism", "soup", "collapse_guard"})
        return {**settings, "name": self.strategy, **common, **of_run}

    @property
    def clones(self) -> bool:
        """Whether it makes clones that mutate."""
        return self.strategy not in ("knockout", "none")

    @property
    def narrows(self) -> bool:
        """Whether it ends with one agent, which anneals, and whose best exams take a second panel: the knockout."""
        return self.strategy == "knockout"

    @model_validator(mode="after")
    def _fits_the_strategy(self) -> Self:
        settings = {"params"} if names_code(self.strategy) else set(SETTINGS[self.strategy])
        # tournament_size and elitism have always been in every run.json, whatever the strategy.
        foreign = (
            self.model_fields_set
            - settings
            - {"name", "collapse_guard", "candidates", "soup", "equal_tokens", "tournament_size", "elitism"}
        )
        for name in sorted(foreign):
            if getattr(self, name) is not None:
                known = ", ".join(sorted(settings)) or "no other settings"
                kind = f"selection_strategy.name={self.strategy}"
                raise ValueError(f"{name} is not a setting of {kind}, which has {known}")
        return self


TEACHER_KEY = "TEACHER_API_KEY"
"""Environment variable with the key of an endpoint that teaches."""


def _absolute(path: Any) -> Any:
    if isinstance(path, str) and (not path.strip() or "\0" in path):
        raise ValueError(f"expected a path, found {shown(path)}")
    return str(Path(path).expanduser().absolute()) if isinstance(path, str | Path) else path


class TeacherConfig(Section):
    """A teacher that agents are drawn to while they train (on-policy distillation); none by default."""

    weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of KL(agent || teacher) on each agent's own completions; 0: none."""
    adapter: Annotated[str | None, BeforeValidator(_absolute)] = None
    """Folder of the adapter that teaches: a PEFT folder, an agent of a checkpoint, or the elite of a run with the same
    base."""
    url: Annotated[str | None, AfterValidator(server_url)] = None
    """Address of an OpenAI-compatible endpoint whose model teaches, instead of a folder: any model with the base's
    tokenizer. A key, from ``TEACHER_API_KEY``, is sent only if you allow it."""
    model: Annotated[str | None, Field(min_length=1)] = None
    """The model's name at ``url``."""
    api: Annotated[Literal["prompt_logprobs", "echo"], Needs("url")] = "prompt_logprobs"
    """How log-probs of given tokens are asked for: by vLLM's ``prompt_logprobs``, or ``echo`` with ``logprobs``."""
    timeout: Annotated[float, Field(gt=0), Needs("url")] = 120.0
    """Seconds for one answer of the endpoint."""

    @model_validator(mode="after")
    def _teaches(self) -> Self:
        if self.url is not None and self.adapter is not None:
            raise ValueError("teacher.adapter and teacher.url are two teachers; remove one of them")
        if (self.url is None) != (self.model is None):
            raise ValueError("teacher.url and teacher.model go together; set both or neither")
        named = self.adapter or self.url
        if named is not None and self.weight == 0:
            key = "adapter" if self.url is None else "url"
            raise ValueError(f"teacher.{key}={shown(named)} has no effect: teacher.weight is 0; set it")
        if named is None and self.weight > 0:
            raise ValueError(
                f"teacher.weight={self.weight:g} has no teacher (the elite of the last selection no longer is one, as "
                "that cost accuracy); set teacher.adapter, or teacher.url and teacher.model"
            )
        return self

    def __bool__(self) -> bool:
        return self.weight > 0
