"""How long a run is, how many agents it has, where it runs and what follows it: the section ``training``."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from agilerl.checks.arguments import nearest, shown
from agilerl.config import Section
from agilerl.config.environment import Params
from agilerl.gone import instead
from agilerl.hpo.strategies import LRSchedule
from agilerl.safety.custom_code import names_code
from agilerl.sizes import MAX_ROWS

_LARGEST_SEED = 2**63 - 1

Seed = Annotated[int, Field(ge=0, le=_LARGEST_SEED)]


def check_known(name: str, known: Collection[str], kind: str, code: str) -> None:
    """Raise ValueError unless a name is among the known ones of a ``kind``, or that of custom code as in ``code``."""
    if not (name in known or names_code(name)):
        raise ValueError(
            instead(f"{kind}={name}")
            or f"expected one of the {kind} {', '.join(known)}, or custom code ({code}), found {shown(name)}; "
            f"{nearest(name, known)}"
        )


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
        check_known(name, TRACKERS, "trackers", "tracker.py:MyTracker")
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
    lr_schedule: LRSchedule | None = None
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
    """Agents of the population. Unless it is set, a knockout starts with fewer if an iteration of each would take
    more than a tenth of the budget: one, or two with ``usual_founder``."""
    max_steps: Annotated[int, Field(ge=1)] = 32768
    """Completions sampled (or read from data, two a pair) for training, all agents together."""
    num_epochs: Annotated[int | None, Field(ge=1)] = None
    """Passes of every agent over the training rows of ``environment.dataset``, in place of ``max_steps``."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Stop after this many tokens generated, trained on and evaluated: at the end of the iteration that reaches it, to
    which the last exam is added."""
    max_seconds: Annotated[float | None, Field(gt=0)] = None
    """Stop after this many seconds, at the end of an iteration."""
    evo_steps: Annotated[int | None, Field(ge=1)] = None
    """Iterations (a rollout and an update of every agent) between selections. None: 8; for the knockout a 32nd of
    what one agent could do in the budget, more where exams would cost over a tenth, fewer for more than four
    founders."""
    evaluation_interval: Annotated[int | None, Field(ge=1)] = None
    """Iterations between exams; None examines before each selection only."""
    seed: Seed = 42
    """Seed of everything random in the run."""
    lr_schedule: Annotated[LRSchedule | None, BeforeValidator(_named)] = None
    """Course of the learning rate, or its name alone; None: constant, and for the knockout linear over the last
    40 %."""
    replay: ReplayConfig | None = None
    """A schedule of hyperparameters for a run of one agent (``agilerl train --replay FILE``)."""
    init: Literal["spread", "same"] = "spread"
    """Start the population spread over the genes' ranges, or all alike."""
    usual_founder: bool = True
    """Knockout: if the learning rate is more than twice or less than half the usual one of the base, agent 1 starts
    with that, and stays in doubt."""
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
    """Data type of the base; ``auto``: float32 on a CPU, the checkpoint's own elsewhere. On a CPU ``bfloat16`` is
    for weights and products of linear layers alone; faster with AVX512-BF16 or AMX."""
    max_tokens_in_flight: Annotated[int | None, Field(ge=64)] = None
    """Tokens of one training forward, all agents together; one agent's micro-batch is not divided for it. None chooses
    by the base's size and the device's memory."""
    max_rows_in_flight: Annotated[int, Field(ge=1)] = MAX_ROWS
    """Completions decoded at once, all agents together."""
    log_completions: Annotated[int, Field(ge=0)] = 64
    """Completions of each agent written to ``completions/`` in each iteration."""
    checkpoint_steps: Annotated[int | None, Field(ge=1)] = None
    """Iterations between checkpoints; None saves after each selection only."""
    checkpoint_seconds: Annotated[float | None, Field(gt=0)] = None
    """Save after an iteration when the last checkpoint inside a generation is this old."""
    preflight: Literal["stop", "warn", "off"] = "stop"
    """Before the first update the agents answer 16 to 64 training questions, a group of times each. If no rewards
    differ there is nothing to learn: ``stop`` ends the run with what to change, ``warn`` says so, ``off`` asks
    nothing. Runs of fewer than 320 prompts have none."""
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run stops, with a diagnosis, if more than this share of an iteration's completions or episodes has no
    grade because the grader or the environment failed."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints to keep, besides the best."""
    trackers: Annotated[dict[str, Params], BeforeValidator(_by_name), AfterValidator(_trackers)] = Field(
        default_factory=dict
    )
    """Where metrics are sent as well: ``wandb``, ``tensorboard``, ``trackio``, ``mlflow``, or custom code,
    ``tracker.py:MyTracker``. A list of names, or a mapping of names to settings."""
