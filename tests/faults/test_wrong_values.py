"""Wrong values, generated from the annotations of all that is public, end in a sentence; and what is taken instead."""

import dataclasses
import importlib
import inspect
import itertools
import math
import os
import pkgutil
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import annotated_types
import numpy as np
import pytest
import torch
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

import agilerl
from agilerl.algorithms import ALGORITHMS
from agilerl.checks.arguments import Having, checked
from agilerl.checks.validation import validated
from agilerl.config.run import RunConfig
from agilerl.config.vllm import VLLMConfig
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError, warn_once
from agilerl.hpo.mutation import Member
from agilerl.training.loops import LoopOptions
from agilerl.training.resolved import resolve
from tests.faults.mistaken import World, manifest, mutations, people
from tests.probes import GridNavigation

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("mistakes"))


VALUES = [
    *(None, "x", "", "a\0b", -1, 0, 1, 0.5, 2**70, math.nan, math.inf, True),
    *([], ["x", 1, None], {}, {"x": object()}, {1: 1}, b"x", object(), int),
]
BOUNDS = {"ge": -1, "gt": -0.0, "le": 1, "lt": 0.0}
"""What is just outside of a bound."""


def parts_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    return typing.get_origin(hint) or hint, typing.get_args(hint)


def marks_of(marks: Sequence[Any]) -> list[Any]:
    """Return the marks of an annotation one by one, also those in a Field."""
    flat = [m for mark in marks for m in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    return [m for mark in flat for m in (mark if isinstance(mark, annotated_types.GroupedMetadata) else [mark])]


def holds(mark: Any, value: Any) -> bool:
    """Return whether a value of the right type has what a mark asks for."""
    if isinstance(mark, Having):
        return not isinstance(value, type) and all(hasattr(value, name) for name in mark.attributes)
    if isinstance(mark, AfterValidator) and mark.func.__name__ == "_not_empty":
        return bool(os.fspath(value).strip()) and "\0" not in os.fspath(value)
    for name, beyond in {"ge": "__lt__", "gt": "__le__", "le": "__gt__", "lt": "__ge__"}.items():
        bound = getattr(mark, name, None)
        if bound is not None and value is not None and getattr(float(value), beyond)(bound):
            return False
    return True


def fits(hint: Any, value: Any) -> bool:
    """Return whether an annotation takes a value, as far as this file's values go."""
    kind, parts = parts_of(hint)
    if kind is Annotated:
        marks = marks_of(parts[1:])
        measured = any(getattr(mark, "allow_inf_nan", False) for mark in marks) and isinstance(value, float)
        return (measured or fits(parts[0], value)) and all(holds(mark, value) for mark in marks)
    if kind in (typing.Union, types.UnionType):
        return any(fits(part, value) for part in parts)
    if kind is Literal:
        return any(value is part or (value == part and type(value) is type(part)) for part in parts)
    if kind is float:
        return type(value) is int or (type(value) is float and math.isfinite(value))
    if kind in (int, bool, str):
        return type(value) is kind
    if kind in (Mapping, dict):
        pairs = itertools.product([parts], value.items()) if parts and isinstance(value, dict) else ()
        return isinstance(value, dict) and all(fits(p[0], k) and fits(p[1], v) for p, (k, v) in pairs)
    if kind is tuple and parts[-1:] != (...,):
        return isinstance(value, list) and len(value) == len(parts) and all(map(fits, parts, value))
    if kind in (Sequence, list, tuple, Collection):
        return isinstance(value, list) and all(fits(parts[0] if parts else Any, item) for item in value)
    if kind is type(None):
        return value is None
    if getattr(kind, "_is_protocol", False):
        return False
    if kind is Callable:
        return callable(value)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def tried(hint: Any) -> Iterator[Any]:
    """Yield values to try for an annotation: any, those next to its bounds, and containers of such."""
    yield from VALUES
    kind, parts = parts_of(hint)
    if kind is Annotated:
        for mark in marks_of(parts[1:]):
            bounds = {step: getattr(mark, name, None) for name, step in BOUNDS.items()}
            yield from (bound + step for step, bound in bounds.items() if bound is not None)
    if kind is Literal:
        yield from parts
    for part in parts if kind not in (Literal, Callable) else ():
        if kind in (Sequence, list, tuple, Collection):
            yield from ([value] for value in tried(part) if part is not ...)
        elif kind in (Mapping, dict):
            yield from ({"x": value} for value in tried(part))
        elif not (kind is Annotated and part is not parts[0]):
            yield from tried(part)


def wrong(hint: Any) -> list[Any]:
    return [value for value in tried(hint) if not fits(hint, value)]


# -- what is public ---------------------------------------------------------------------------------------------------

DOOR = checked(lambda: None).__code__  # type: ignore[attr-defined]
"""The code of every function with ``@checked``."""


@cache
def modules() -> list[Any]:
    loaded = []
    for found in pkgutil.walk_packages(agilerl.__path__, "agilerl."):
        with suppress(ImportError):  # of an extra that is not installed
            loaded += [importlib.import_module(found.name)] if "__main__" not in found.name else []
    return loaded


def functions_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield a function, or the functions of a class, as they are without an object."""
    members = vars(thing).values() if isinstance(thing, type) else [thing]
    for member in members:
        member = getattr(member, "__func__", member)
        if inspect.isfunction(member):
            yield f"{member.__module__}.{member.__qualname__}".removeprefix("agilerl."), member


@cache
def doors() -> dict[str, Any]:
    """Return all functions and methods whose arguments are checked, by name."""
    things = [thing for module in modules() for thing in vars(module).values() if hasattr(thing, "__module__")]
    own = (thing for thing in things if str(thing.__module__).startswith("agilerl"))
    pairs = (pair for thing in own for pair in functions_of(thing))
    return {name: found for name, found in pairs if getattr(found, "__code__", None) is DOOR}


def hints_of(function: Any) -> dict[str, Any]:
    """Return the annotations of a function's arguments, but those of which only type checkers know the names."""
    hints = {}
    for name, parameter in inspect.signature(function).parameters.items():
        one = types.SimpleNamespace(__annotations__={name: function.__annotations__.get(name, Any)})
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            hints |= typing.get_type_hints(one, vars(inspect.getmodule(function)), include_extras=True)
    return hints


def check(call: Callable[..., Any], name: str, values: Sequence[Any]) -> list[str]:
    """Return what is wrong with the answers to wrong values of one argument."""
    failures = []
    for value in values:
        try:
            call(**{name: value})
        except ConfigError as error:
            if name not in str(error):
                failures.append(f"{name}={value!r} is not named: {error}")
        except Exception as error:
            failures.append(f"{name}={value!r}: {type(error).__name__}: {error}")
        else:
            failures.append(f"{name}={value!r} is taken")
    return failures


@pytest.mark.parametrize("door", doors())
def test_a_wrong_argument_is_named(door: str) -> None:
    function = doors()[door]
    # The arguments are checked before the function is called, so that the others may be missing.
    is_method = next(iter(inspect.signature(function).parameters), "") in ("self", "cls")
    holder = [types.SimpleNamespace()] if is_method else []
    failures = [
        failure
        for name, hint in hints_of(function).items()
        for failure in check(lambda **given: function(*holder, **given), name, wrong(hint))
    ]
    assert not failures, "\n".join(failures)


@cache
def records() -> dict[str, type]:
    """Return the dataclasses whose fields are checked, by name."""
    kinds = {kind for module in modules() for kind in vars(module).values() if isinstance(kind, type)}
    setups = {kind: [vars(base).get("__post_init__") for base in kind.__mro__] for kind in kinds}
    return {
        kind.__name__: kind
        for kind in sorted(kinds, key=lambda kind: kind.__name__)
        if dataclasses.is_dataclass(kind) and any("check_fields" in s.__code__.co_names for s in setups[kind] if s)
    }


@pytest.mark.parametrize("name", records())
def test_a_wrong_field_is_named(name: str) -> None:
    kind = records()[name]
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.init and not field.name.startswith("_")]
    missing = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    right = {name: next(value for value in tried(hints[name]) if fits(hints[name], value)) for name in needed}
    failures = [e for f in fields for e in check(lambda **given: kind(**right | given), f.name, wrong(hints[f.name]))]
    assert not failures, "\n".join(failures)


def models_of(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a model of settings and those of its sections, by path."""
    yield path, model
    for name, field in model.model_fields.items():
        kind, parts = parts_of(field.annotation)
        for part in (kind, *parts):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from models_of(part, f"{path}.{name}")


TAKES_MORE = {"dataset", "trackers"}
"""Settings that have short forms."""
MODELS = {
    **dict(models_of(RunConfig, "run")),
    **{name: algorithm.Config for name, algorithm in ALGORITHMS.items()},
    "vllm": VLLMConfig,
}


@pytest.mark.parametrize("path", MODELS)
def test_a_wrong_setting_is_named(path: str) -> None:
    model = MODELS[path]
    failures = []
    for name in model.model_fields.keys() - TAKES_MORE:
        field = model.model_fields[name]
        hint = Annotated[(field.annotation, *field.metadata, None)]
        # No manifest has bytes, 0 is false there, and mappings are sections with settings of their own.
        flag = any(word in str(hint) for word in ("bool", "True", "False"))
        values = [v for v in wrong(hint) if not {dict, bytes} & {type(v), *map(type, v if type(v) is list else ())}]
        values = [value for value in values if not flag or value not in (0, 1)]
        failures += check(lambda **given: validated(model, given), name, values)
    assert not failures, "\n".join(failures)


# -- nothing public without a check -----------------------------------------------------------------------------------

PUBLIC = (
    *("", ".algorithms", ".envs", ".llm_envs", ".rewards", ".envs.tools", ".runs", ".report", ".rollouts"),
    *(".training.train_llm", ".utils.utils", ".utils.llm_utils", ".utils.algo_utils"),
)
UNCHECKED = {
    "ALGORITHMS", "FAMILY", "LIBRARY",  # tables
    "HAS_ARENA_DEPENDENCIES", "HAS_DEEPSPEED", "HAS_LIGER_KERNEL", "HAS_LLM_DEPENDENCIES", "HAS_VLLM",  # flags
    "Task", "TextEnv", "BaseGrader", "WaitingGrader", "RolloutEngine", "ToolCallParser",  # to subclass
    "Grader", "Row",  # types
    "GenerationRequest", "Grades", "SandboxResult", "MalformedCall", "ToolCall", "ToolResult",  # built here
    "RunDirectory", "RunLayout",  # built by create and open, which are checked
    "check_score", "collect_hardware", "collect_versions", "tool_schema",  # of any value, or of none
    # In tests/faults/test_python_mistakes.py: their arguments are keywords, or those of what they call.
    "HyperparameterConfig", "aggregate_metrics_across_gpus", "tournament_selection_and_mutation",
    "finetune_llm_multiturn", "finetune_llm_preference", "finetune_llm_reasoning", "finetune_llm_sft",
}  # fmt: skip
UNBOUNDED = {
    "algorithms.learner.Learner.set_reference_policy: reference_update_tracker",
    "envs.probes.GridNavigationEnv.__init__: step_cost",
    "hpo.mutation.Mutations.mutation: elite",
    "hpo.mutation.Mutations.plan: elite",
    "hpo.mutation.Mutations.plan: generation",
    "hpo.mutation.Mutations.plan: seed",
    "hpo.selection.Strategy.plan: next_index",
    "hpo.selection.latest_fitness: exams",
    "population.Population.agent: index",
    "rewards.judge.JudgeGrader.__init__: high",
    "rewards.judge.JudgeGrader.__init__: low",
    "runs.checkpoints.agent_folder: index",
    "runs.directory.RunDirectory.create: usual_rate",
    "runs.journal._AppendFile.__init__: keep",
    "training.evaluation.evaluate: full",
    "training.trackers.Trackers.__init__: resumed_at",
}
"""Public arguments that may be any number, which their functions look at themselves."""


def test_everything_public_checks_its_arguments() -> None:
    unchecked = set()
    for module in PUBLIC:
        public = importlib.import_module(f"agilerl{module}")
        own = [name for name, thing in vars(public).items() if getattr(thing, "__module__", "") == public.__name__]
        for name in getattr(public, "__all__", [name for name in own if name[0].islower()]):
            thing = getattr(public, name)
            function = thing.__init__ if isinstance(thing, type) else thing
            is_model = isinstance(thing, type) and issubclass(thing, BaseModel)
            if getattr(function, "__code__", None) is not DOOR and not is_model and thing not in records().values():
                unchecked.add(name)
    assert unchecked == UNCHECKED


def test_numbers_have_bounds() -> None:
    plain = (int, float, int | None, float | None)
    named = {f"{door}: {name}": hint for door in doors() for name, hint in hints_of(doors()[door]).items()}
    assert {name for name, hint in named.items() if hint in plain} == UNBOUNDED


def test_an_unknown_keyword_elsewhere_is_pythons_own_type_error(world: World) -> None:
    with pytest.raises(TypeError, match=r"no argument 'prompts_per_stp'; did you mean 'prompts_per_step'\?"):
        people(world, prompts_per_stp=1)
    with pytest.raises(TypeError, match=r"EpisodeTask.*'exam_prompts'.*exam_episodes"):
        EpisodeTask(GridNavigation, exam_prompts=3)


# -- what is taken rather than refused --------------------------------------------------------------------------------


def test_padding_is_no_part_of_a_prompt(world: World) -> None:
    padded = {"input_ids": torch.tensor([[0, 0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    whole, alone = (world.agent.get_action([p], training=False) for p in (padded, world.prompt(5, 6)))
    assert torch.equal(whole.completion_ids[0], alone.completion_ids[0])


def test_prompts_come_as_lists_and_arrays_too(world: World) -> None:
    given = ([5, 6], [[5, 6]], np.array([[5, 6]]), torch.tensor([5, 6], dtype=torch.int32))
    found = [world.agent.get_action({"input_ids": ids}, training=False).completion_ids[0] for ids in given]
    assert all(torch.equal(found[0], other) for other in found)


def test_masks_of_zero_and_one_of_any_type_are_one_update(world: World) -> None:
    masks = (torch.ones(8, 9), torch.ones(8, 9, dtype=torch.int64), torch.ones(8, 9, dtype=torch.bool))
    results = [world.agent.clone().learn(world.learned(masks=[mask])) for mask in masks]
    assert results[0]["mean_loss"] == results[1]["mean_loss"] == results[2]["mean_loss"]


def test_one_factor_of_a_gene_is_enough() -> None:
    config = manifest(mutation={"rl_hp_selection": {"lr": {"min": 1e-5, "max": 1e-2, "shrink_factor": 0.5}}})
    assert resolve(config).genes["lr"].factors == (0.5, 1.2)


def test_more_genes_a_mutation_than_there_are_is_said_once(world: World) -> None:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="genes_per_mutation=50"):
        mutations(genes_per_mutation=50).plan([Member.of(world.agent)], None, 0, 0)
    mutations(genes_per_mutation=50).plan([Member.of(world.agent)], None, 0, 0)


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"wandb_api_key": "key"}, "wb"),
        ({"wandb_kwargs": {"project": "x"}}, "wb"),
        ({"tensorboard_log_dir": "x"}, "tensorboard"),
    ],
)
def test_settings_of_a_tracker_that_was_not_asked_for_are_said(given: dict[str, Any], needed: str) -> None:
    with pytest.warns(UserWarning, match=f"{next(iter(given))} .*{needed}=True"):
        LoopOptions(**given)


def test_a_completion_longer_than_the_context_is_said_once(world: World) -> None:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"max_output_tokens=5000.*128"):
        agent = world.grpo(max_output_tokens=5000)
    assert world.grpo(max_output_tokens=5000).sampling(28).max_new_tokens == agent.context_length - 28
