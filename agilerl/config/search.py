"""The search: what mutates, who survives; and the teacher that agents are drawn to."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from agilerl.checks.arguments import shown
from agilerl.checks.validation import Needs
from agilerl.config import Section
from agilerl.config.training import Seed, check_known
from agilerl.config.vllm import server_url
from agilerl.errors import ConfigError
from agilerl.hpo.selection import Strategy
from agilerl.hpo.strategies import STRATEGIES
from agilerl.hpo.tournament import TournamentSelection

_CLONES = Needs(
    "selection_strategy.clones",
    why="{whole.selection_strategy.strategy} makes no mutated clones; name tournament, truncation or multi_frequency",
    off=0,
)
DEFAULT = "knockout"
"""The strategy if a manifest names none."""


def _strategy(name: str | None) -> str | None:
    if name is not None:
        check_known(name, STRATEGIES, "strategies", "strategy.py:MySelection")
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


_OF_TOURNAMENT = ("tournament_size", "elitism")
"""Settings that have always been in every run.json, whatever the strategy."""


class SelectionConfig(Section):
    """Who survives: a strategy with its settings, which its class declares; those of another strategy are refused."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str | None, AfterValidator(_strategy)] = None
    """``knockout``, ``tournament``, ``truncation``, ``multi_frequency``, ``none`` (keep all agents, which is random
    search), or custom code, ``strategy.py:MySelection``. None: ``tournament`` if ``tournament_size`` or ``elitism`` is
    given, else the default."""
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

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the settings, those of every strategy among them."""
        return [*super().names(), *dict.fromkeys(name for cls in STRATEGIES.values() for name in cls.names())]

    _declared: Strategy | None = PrivateAttr(None)

    @property
    def declared(self) -> Strategy | None:
        """The strategy, not yet for a population of some size; None for custom code."""
        return self._declared

    @property
    def strategy(self) -> str:
        """The name of the strategy in force."""
        if self.name is not None:
            return self.name
        return TournamentSelection.name if self.is_set(*_OF_TOURNAMENT) else DEFAULT

    @property
    def tournament(self) -> dict[str, Any]:
        """What was set of the tournament, which runs of other strategies record as well."""
        return {name: value for name in _OF_TOURNAMENT if (value := (self.model_extra or {}).get(name)) is not None}

    def document(self, **of_run: Any) -> dict[str, Any]:
        """Return the strategy with all of its settings, defaults and those ``of_run`` included, without others'."""
        settings = {"params": self.params} if self.declared is None else self.declared.model_dump(mode="json")
        elitism = self.tournament.get("elitism", True)
        common = {"elitism": elitism, "soup": self.soup, "collapse_guard": self.collapse_guard}
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
        cls = STRATEGIES.get(self.strategy)
        names = ["params"] if cls is None else cls.names()
        given = {**(self.model_extra or {}), **({} if self.params is None else {"params": self.params})}
        given = {name: value for name, value in given.items() if value is not None}
        for name in sorted(given.keys() - {*names, *_OF_TOURNAMENT}):
            if name not in self.names():
                wrong: InitErrorDetails = {"type": "extra_forbidden", "loc": (name,), "input": given[name]}
                raise ValidationError.from_exception_data("selection", [wrong])
            known, kind = ", ".join(sorted(names)) or "no other settings", f"selection_strategy.name={self.strategy}"
            raise ValueError(f"{name} is not a setting of {kind}, which has {known}")
        try:
            self._declared = None if cls is None else cls(**{name: given[name] for name in names if name in given})
        except ConfigError as error:
            raise (error.__cause__ or error) from None  # which names the setting
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
