"""The manifest: every setting of a run, declared once, checked before anything is loaded."""

import re
import types
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, model_validator

from agilerl.addresses import addresses_in
from agilerl.arguments import checked
from agilerl.errors import ConfigError
from agilerl.sizes import MAX_ROWS, MAX_TOKENS
from agilerl.training.dataset_paths import locate, locate_within
from agilerl.training.distributed_config import DistributedConfig
from agilerl.training.environment_config import EnvironmentConfig, Section
from agilerl.training.network_config import NetworkConfig
from agilerl.training.own_code import names_code
from agilerl.training.strict_yaml import parse_yaml
from agilerl.validation import nearest, shown, validated

__all__ = [
    "EnvironmentConfig",
    "MutationConfig",
    "NetworkConfig",
    "RunConfig",
    "SelectionConfig",
    "TrainingConfig",
    "load_manifest",
]

_MANIFEST_BYTES = 50_000
_LARGEST_SEED = 2**63 - 1

_OF_DATASETS = ("dataset", "dataset_exam", "dataset_test", "columns")
_REPLACED = {
    "environment.task": ("params", *_OF_DATASETS),
    "environment.env_id": ("task", "params", "curriculum", "reward", *_OF_DATASETS),
    "environment.dataset": ("task", "params", "curriculum", *_OF_DATASETS[1:]),
}
"""What an override on the command line takes out of the file: it belongs to what the file had in that place."""

Seed = Annotated[int, Field(ge=0, le=_LARGEST_SEED)]


def _device(name: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d{1,2})?", name) is None:
        raise ValueError(f"expected cpu, cuda, or cuda with a number such as cuda:1, found {shown(name)}")
    return name


class TrainingConfig(Section):
    """How long, how many, where."""

    pop_size: Annotated[int, Field(ge=1)] = 4
    """Agents of the population."""
    max_steps: Annotated[int, Field(ge=1)] = 32768
    """Completions sampled (or read from data, two a pair) for training, all agents together."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Stop after this many tokens generated, trained on and evaluated."""
    max_seconds: Annotated[float | None, Field(gt=0)] = None
    """Stop after this many seconds, at the end of an iteration."""
    evo_steps: Annotated[int, Field(ge=1)] = 8
    """Iterations (a rollout and an update of every agent) between selections."""
    evaluation_interval: Annotated[int | None, Field(ge=1)] = None
    """Iterations between exams; None examines before each selection only."""
    seed: Seed = 42
    """Seed of everything random in the run."""
    init: Literal["spread", "same"] = "spread"
    """Start the population spread over the genes' ranges, or all alike."""
    eval_max_new_tokens: Annotated[int | None, Field(ge=1)] = None
    """Longest completion of an exam; None takes ``algorithm.max_output_tokens``."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of torch; more than one pays for large base models only."""
    device: Annotated[str, AfterValidator(_device)] = "cpu"
    """``cpu``, ``cuda`` or ``cuda:1``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the base; ``auto``: float32 on a CPU, the checkpoint's own elsewhere."""
    max_tokens_in_flight: Annotated[int, Field(ge=64)] = MAX_TOKENS
    """Tokens of one training forward, all agents together."""
    max_rows_in_flight: Annotated[int, Field(ge=1)] = MAX_ROWS
    """Completions decoded at once, all agents together."""
    log_completions: Annotated[int, Field(ge=0)] = 64
    """Completions of each agent written to ``completions/`` in each iteration."""
    checkpoint_steps: Annotated[int | None, Field(ge=1)] = None
    """Iterations between checkpoints; None saves after each selection only."""
    checkpoint_seconds: Annotated[float | None, Field(gt=0)] = None
    """Save after an iteration when the last checkpoint inside a generation is this old."""
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run stops, with a diagnosis, where more than this share of an iteration's completions (or episodes), all
    agents together, has no grade because the grader (or the environment) failed."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints to keep, besides the best."""


class ProbabilityConfig(Section):
    """Relative probabilities of the kinds of mutation."""

    no_mut: Annotated[float, Field(ge=0)] = 0.0
    """Leave the agent as it is."""
    arch_mut: Annotated[float, Field(ge=0)] = 0.0
    """Double or halve the adapter's rank."""
    new_layer: Annotated[float, Field(ge=0)] = 0.0
    """Must be 0: the base is frozen."""
    params_mut: Annotated[float, Field(ge=0)] = 0.0
    """Add noise to the adapter."""
    act_mut: Annotated[float, Field(ge=0)] = 0.0
    """Must be 0: the base is frozen."""
    rl_hp_mut: Annotated[float, Field(ge=0)] = 1.0
    """Change hyperparameters."""


class GeneConfig(Section):
    """Range of one hyperparameter; what is left out comes from the algorithm's own declaration."""

    min: float | None = None
    """Smallest value."""
    max: float | None = None
    """Largest value."""
    scale: Literal["log", "linear"] | None = None
    """Whether mutations are factors or differences."""
    choices: list[float | int | str | bool] | None = None
    """The values to choose from, in place of a range."""
    shrink_factor: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Multiply by ``shrink_factor`` or by ``grow_factor``, each half of the time, instead of drawing a step. Of the two
    one alone is enough: the other is 0.8 or 1.2 then."""
    grow_factor: Annotated[float | None, Field(gt=1)] = None
    """See ``shrink_factor``."""


class MutationConfig(Section):
    """What mutates, how often, how far."""

    probabilities: ProbabilityConfig = Field(default_factory=ProbabilityConfig)
    """Kinds of mutation."""
    rl_hp_selection: dict[str, GeneConfig] = Field(default_factory=dict)
    """The genes: hyperparameters of the algorithm that evolve."""
    mutation_sd: Annotated[float, Field(gt=0)] = 0.1
    """Size of adapter noise, relative to the adapter."""
    genes_per_mutation: Annotated[int, Field(ge=1)] = 1
    """Genes that move in one mutation."""
    rank_range: tuple[int, int] = (4, 64)
    """Smallest and largest adapter rank."""
    mutate_elite: bool = False
    """Let the elite mutate too."""
    rand_seed: Seed | None = None
    """Seed of mutations; None takes ``training.seed``."""


class SelectionConfig(Section):
    """Who survives."""

    name: Literal["tournament", "truncation", "none"] = "tournament"
    """Strategy; ``none`` keeps everybody, which is random search."""
    tournament_size: Annotated[int, Field(ge=1)] = 2
    """Agents that compete for one place; where it is not given, at most as many as there are."""
    elitism: bool = True
    """The best agent keeps its place."""
    collapse_guard: bool = True
    """Replace agents whose entropy, length or reward has fallen far outside what the elite's is."""


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
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    """Base model and adapters."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Processes; what a run computes does not depend on them."""

    _typed: tuple[str, ...] = PrivateAttr(())

    @property
    def typed_addresses(self) -> tuple[str, ...]:
        """The addresses that the user gave on the command line; never written down, so no file can claim them."""
        return self._typed

    def typed_with(self, other: "RunConfig | None") -> Self:
        """Return this configuration, with the addresses that were typed for another one."""
        self._typed = self._typed if other is None else other.typed_addresses
        return self

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        size, tournament = self.training.pop_size, self.tournament_size
        if self.selection_strategy.name == "tournament" and tournament > size:
            raise ValueError(
                f"selection_strategy.tournament_size={tournament} is larger than training.pop_size={size}; lower the "
                "first, or raise the second"
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
    def tournament_size(self) -> int:
        """Agents that compete for one place; the default is no more than there are."""
        size, given = self.selection_strategy.tournament_size, self.selection_strategy.model_fields_set
        return size if "tournament_size" in given else min(size, self.training.pop_size)

    @classmethod
    @checked
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Check a manifest; raises ConfigError with a sentence that names the key and the nearest known one."""
        for section, content in values.items():
            if section in cls.model_fields and not isinstance(content, Mapping):
                raise ConfigError(f"{section} must be a mapping of settings, found {shown(content)}")
        return validated(cls, values)


@checked
def load_manifest(path: Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a manifest (None: the embedded default), apply ``key.path=value`` overrides and check everything.

    Raises ConfigError for a file that is missing, too large, empty or no YAML mapping, and for every wrong setting.
    """
    values = _read(path)
    if path is not None:
        locate_within(values.get("environment"), path.parent)
    changed = [_split(override) for override in overrides]
    environment = values.get("environment")
    if isinstance(environment, dict):
        for name in (name for keys, _ in changed for name in _REPLACED.get(".".join(keys), ())):
            environment.pop(name, None)
    for keys, value in changed:
        _put(values, keys, value)
    locate(values.get("environment"))
    config = RunConfig.from_dict(values)
    config._typed = tuple(address for _, value in changed for address in addresses_in(value))
    _refuse_meaningless(config)
    return config


def _refuse_meaningless(config: RunConfig) -> None:
    """Raise ConfigError for settings that change nothing, or cannot be meant.

    Only of a run that is about to begin: one that has begun with them is resumed as it is.
    """
    for number, grader in enumerate(config.environment.graders or ()):
        where, is_code = f"environment.graders.{number}", names_code(grader.name)
        if grader.isolate and not is_code:
            raise ConfigError(f"{where}.isolate is for functions of your own, found {shown(grader.name)}; leave it out")
        if "timeout" in grader.model_fields_set and not grader.isolate:
            raise ConfigError(
                f"{where}.timeout={grader.timeout:g} is the limit of an isolated grader, found isolate=false; "
                + ("set isolate: true, or leave timeout out" if is_code else "give it in params, if the grader has one")
            )
    mutation = config.mutation
    evolving, moved = len(mutation.rl_hp_selection), mutation.genes_per_mutation
    if 0 < evolving < moved:
        raise ConfigError(
            f"mutation.genes_per_mutation={moved} is more than the {evolving} hyperparameters of "
            "mutation.rl_hp_selection; lower it"
        )
    longest = config.algorithm.get("max_output_tokens")
    for key, limit in (
        ("algorithm.max_model_len", config.algorithm.get("max_model_len")),
        ("network.max_context_length", config.network.max_context_length),
    ):
        if isinstance(longest, int) and isinstance(limit, int) and longest > limit:
            raise ConfigError(
                f"algorithm.max_output_tokens={longest} is above {key}={limit}, which holds the prompt as well; "
                "lower the first, or raise the second"
            )


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        text, name = (
            (resources.files("agilerl.training") / "default.yaml").read_text(encoding="utf-8"),
            "the embedded default",
        )
    else:
        name = f"the manifest {shown(str(path))}"
        text = _text(path, name)
    values = parse_yaml(text, name)
    if values is None:
        raise ConfigError(
            f"{name} is empty: expected sections of settings; without a manifest the embedded default is run, and "
            "{} stands for the defaults of every setting"
        )
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must be a mapping of sections, found {shown(values)}")
    return values


def _text(path: Path, name: str) -> str:
    try:
        is_file, size = path.is_file(), path.stat().st_size if path.exists() else 0
        text = path.read_text(encoding="utf-8-sig") if is_file and size <= _MANIFEST_BYTES else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} cannot be read: it is no UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error
    if not is_file:
        raise ConfigError(f"expected a YAML file or key.path=value, found {_kind(path)} at {shown(str(path))}")
    if size > _MANIFEST_BYTES:
        raise ConfigError(f"{name} has {size:,} bytes; expected at most {_MANIFEST_BYTES:,}")
    return text


def _kind(path: Path) -> str:
    """Return what is at a path that is no plain file."""
    tests = {"a folder": path.is_dir, "a named pipe": path.is_fifo, "a socket": path.is_socket}
    tests |= {"a device": lambda: path.is_char_device() or path.is_block_device()}
    return next((kind for kind, is_one in tests.items() if is_one()), "nothing")


def _split(override: str) -> tuple[list[str], Any]:
    key, separator, text = override.partition("=")
    keys = key.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"expected key.path=value, found {shown(override)}")
    return keys, parse_yaml(text, f"the value of {shown(key)}")


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    model: Any = RunConfig
    for depth, key in enumerate(keys):
        path = ".".join(keys[: depth + 1])
        fields = getattr(model, "model_fields", None)
        if fields is not None and key not in fields:
            raise ConfigError(f"unknown key {shown(path)}; {nearest(key, fields)}")
        model = None if fields is None else _nested(fields[key].annotation)
        if depth < len(keys) - 1:
            if values.get(key) is None:
                values[key] = {}
            if not isinstance(values[key], dict):
                raise ConfigError(f"{path} holds {shown(values[key])}, so it has no key {shown(keys[depth + 1])}")
            values = values[key]
    values[keys[-1]] = value


def _nested(annotation: Any) -> Any:
    """Return the pydantic model inside an annotation, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((n for n in map(_nested, get_args(annotation)) if n is not None), None)
    return None
