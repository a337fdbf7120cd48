"""The one place that talks to reasoning_gym: builds datasets and contains their side effects.

Where it is not installed, two of its datasets are there all the same (``agilerl.envs.arithmetic``).
"""

import io
import keyword
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import Field, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from agilerl.checks.arguments import Hint, Name, Positive, nearest, shown, taken
from agilerl.config.environment import EnvironmentConfig
from agilerl.config.named_files import FILE_PARAMS, is_packaged
from agilerl.deferred import deferred
from agilerl.envs import arithmetic
from agilerl.errors import ConfigError, how_to_install
from agilerl.safety.bounds import check_file
from agilerl.streams import PROCESS_WIDE, sealed

MANAGED = ("seed", "size")
SPEC_KEYS = ("name", "weight", "config")
GLOBAL_GENERATOR_USERS = frozenset({"codeio", "list_functions", "pool_matrix"})
"""Datasets that draw from Python's or numpy's global generator (found by running all of them; a test repeats it)."""
MOST_BYTES = 64 * 2**20
"""Largest file that a parameter may name."""
EVALUATED = frozenset(
    {"basic_arithmetic", "countdown", "intermediate_integration", "polynomial_equations"}
    | {"polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Datasets that evaluate formulas made from their parameters, or pass names in them to sympy."""
NAME_OR_OPERATOR = re.compile(r"[A-Za-z]\w{0,31}|[-+*/%&|^~<>=]{1,3}", re.ASCII)


def known_tasks() -> list[str]:
    """Return the names of all reasoning_gym datasets, ``composite`` included; of two if it is not installed."""
    return sorted(_registry())


def check_task(e: EnvironmentConfig) -> None:
    """Raise ConfigError for a task or parameter of a run that reasoning_gym does not have; does not import torch."""
    family, _, name = (e.task or "").partition(":")
    if e.env_type != "multiturn" and e.dataset is None and family == "reasoning_gym" and name:
        check_params(name, e.params)


def check_params(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of dataset ``name``, checked; for ``composite`` the nested ones too.

    Raises ConfigError for an unknown task or parameter (with the nearest name), or a value of the wrong type.
    """
    registry, how = _registry(), how_to_install("tasks")
    if name not in registry:
        raise ConfigError(
            f"expected the name of a reasoning_gym task, found {name!r}; {nearest(name, sorted(registry))}"
            + ("" if _has_gym() else f". Without reasoning_gym there are only {' and '.join(registry)}; run: {how}")
        )
    parameters: dict[str, Field[Any]] = {f.name: f for f in fields(registry[name][1]) if f.name not in MANAGED}
    checked = {}
    for key, value in params.items():
        what = f"parameter {key!r} of {name}"
        if key in MANAGED:
            raise ConfigError(f"the {what} is set by the run; remove it")
        if key not in parameters:
            raise ConfigError(f"{name} has no parameter {key!r}; {nearest(key, parameters)}")
        field = parameters[key]
        if isinstance(value, list) and isinstance(field.default, tuple):
            value = tuple(value)  # YAML has no tuples
        elif field.type in (int, float, str, bool):
            # Other types, such as lists, are left to reasoning_gym.
            value = taken(field.type, value, "reasoning_gym", f"the {what}")
        checked[key] = value
        if name in EVALUATED:
            _check_plain(what, value)
        if key in FILE_PARAMS.get(name, ()):
            checked[key] = _file(what, value)
    if name == "composite":
        checked["datasets"] = _check_specs(checked.get("datasets"))
    return checked


def build_dataset(name: str, params: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """Return a dataset of ``size`` problems; raises ConfigError if reasoning_gym refuses the checked parameters."""
    arguments = dict(params)
    if name == "composite":
        arguments["datasets"] = [_library().composite.DatasetSpec(**spec) for spec in params["datasets"]]
    try:
        with quiet():
            create = _library().create_dataset if _has_gym() else arithmetic.create_dataset
            return create(name, seed=seed, size=size, **arguments)
    except Exception as error:  # whatever a foreign constructor raises, the user gets its reason in a sentence
        parameters = ", ".join(f"{k}={v!r}" for k, v in params.items()) or "its defaults"
        reason = str(error) or f"an internal check failed ({type(error).__name__})"
        raise ConfigError(f"reasoning_gym's {name} does not accept {parameters}: {reason}") from error


def curricula() -> list[str]:
    """Return the datasets that reasoning_gym has a curriculum for; raises ConfigError if it is not installed."""
    if not _has_gym():
        raise ConfigError(f"a curriculum is reasoning_gym's, which is not installed; run: {how_to_install('tasks')}")
    return [name for name in known_tasks() if _library().factory.has_curriculum(name)]


def curriculum_attributes(name: str) -> dict[str, int]:
    """Return the attributes of a dataset's curriculum with the highest level of each; empty if it has no curriculum."""
    if name not in curricula():
        return {}
    attributes = _library().factory.create_curriculum(name).attributes
    return {attribute.name: len(attribute.levels) - 1 for attribute in attributes.values()}


def curriculum_params(name: str, level: int, attributes: Sequence[str]) -> dict[str, Any]:
    """Return the parameters that attributes of a dataset's curriculum stand for at a level, or at their highest."""
    if not attributes:
        return {}
    curriculum = _library().factory.create_curriculum(name)
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration()
    # A scalar is one parameter, a range is two.
    about = [vars(curriculum.get_attribute(attribute)) for attribute in attributes]
    names = [name for attribute in about for key, name in attribute.items() if key.endswith("field_name")]
    return {name: getattr(config, name) for name in names}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what third-party code prints and warns about; one thread at a time.

    Standard output and the warning filters are process-wide, so two threads that restore them would interfere.
    """
    # Re-entrant, as the panels are drawn in one quiet() and each of their problems in another.
    with PROCESS_WIDE:
        if isinstance(sys.stdout, _Silence):  # by a caller; setting the filters costs as much as a problem
            yield
            return
        with warnings.catch_warnings(), redirect_stdout(_Silence()):
            warnings.simplefilter("ignore")
            yield


class _Silence(io.StringIO):
    """What third-party code prints to."""


def draw(dataset: Any, index: int, *, name: str, params: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return problem ``index`` of a dataset that ``build_dataset`` made; ``seed`` feeds those that need sealing."""
    names = {spec["name"] for spec in params["datasets"]} if name == "composite" else {name}
    # Sealing takes 0.3 ms, ten times the cost of most problems, so only those that need it pay.
    with nullcontext() if names.isdisjoint(GLOBAL_GENERATOR_USERS) else sealed(seed), quiet():
        row: dict[str, Any] = dataset[index]
    return row


def _registry() -> Mapping[str, tuple[type, type]]:
    registry: Mapping[str, tuple[type, type]] = _library().factory.DATASETS if _has_gym() else arithmetic.DATASETS
    return registry


@cache
def _has_gym() -> bool:
    return find_spec("reasoning_gym") is not None


@cache
def _library() -> Any:
    """Return reasoning_gym, which must be installed.

    cellpylib, which two datasets use and which imports matplotlib, is imported by those. pycosat, which zebra_puzzles
    uses, has to be compiled; without it all the others work.
    """
    with deferred("cellpylib", _cellpylib), deferred("pycosat", _pycosat, required=False):
        import reasoning_gym.composite
        import reasoning_gym.factory
    return reasoning_gym


def _cellpylib() -> Any:
    import cellpylib

    return cellpylib


def _pycosat() -> Any:
    try:
        import pycosat
    except ImportError as error:
        raise ConfigError("zebra_puzzles needs pycosat, which has to be compiled; run: pip install pycosat") from error
    return pycosat


def _check_plain(what: str, value: Any) -> None:
    """Raise ConfigError for anything beyond a name or an operator, since it would be evaluated."""
    for text in [value] if isinstance(value, str) else value if isinstance(value, Iterable) else ():
        # Keywords such as lambda have the form of a name.
        if isinstance(text, str) and (NAME_OR_OPERATOR.fullmatch(text) is None or keyword.iskeyword(text)):
            raise ConfigError(f"expected a name such as x or an operator for the {what}, found {shown(text)}")


def _file(what: str, name: str) -> str:
    """Return a name that reasoning_gym can find; raises ConfigError for all but a plain file of reasonable size."""
    if is_packaged(name):
        return name
    path = Path(name).absolute()
    check_file(path, MOST_BYTES)
    if not path.exists():
        raise ConfigError(f"expected a file, or the name of one packaged with reasoning_gym, for the {what}")
    return str(path)


def _check_specs(specs: Any) -> list[dict[str, Any]]:
    checked = []
    for spec in taken(_Specs, specs or None, "composite", "params.datasets"):
        for key in spec:
            if key not in SPEC_KEYS:
                raise ConfigError(f"a dataset of a composite has no {key!r}; {nearest(str(key), SPEC_KEYS)}")
        name = taken(Name, spec.get("name"), "composite", "the name of a dataset")
        if name == "composite":
            raise ConfigError("a composite cannot hold a composite; list its datasets directly")
        weight = taken(Positive, spec.get("weight", 1.0), "composite", f"the weight of {name}")
        checked.append({"name": name, "weight": float(weight), "config": check_params(name, spec.get("config") or {})})
    return checked


_Specs = Annotated[Sequence[Mapping[str, Any]], Hint("give a list such as [{name: gcd, weight: 1.0, config: {}}]")]
