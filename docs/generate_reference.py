"""Write docs/manifest.md from the models that check a manifest: ``python docs/generate_reference.py [--print]``."""

import ast
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agilerl.algorithms import ALGORITHMS
from agilerl.config.run import RunConfig
from agilerl.hpo.parameters import genes_from

TARGET = Path(__file__).resolve().parent / "manifest.md"

INTRODUCTION = """\
# The manifest

<!-- Written by docs/generate_reference.py; `make generated` writes it again. -->

A run is described by one YAML file. `agilerl train my.yaml` reads it; `agilerl train` alone reads the file at the end
of this page. Settings that are left out have the defaults below. Any setting can be given on the command line as well,
as `key.path=value`, and that wins:

```bash
agilerl train training.pop_size=8 algorithm.beta=0.01 --dry-run
```

* An unknown key is an error that names the nearest known one, a value out of range an error that names the range.
  Both are found before anything is loaded or written; the exit code is 2.
* `environment.task` on the command line drops the file's `environment.params`, which belong to the other task.
* YAML reads `1e-6` as text; it is taken as the number wherever a number is expected.
* `null` below is YAML's; the descriptions, which are those of the Python arguments, call it None.
* `--seed N` is `training.seed=N`.

The whole of a resolved manifest, defaults included, stands in a run's `run.json`.
"""


FIRST = {
    "network": ("pretrained_model_name_or_path", "lora_config.r"),
    "environment": (
        *("task", "params", "dataset", "env_type", "env_id", "graders", "answer_format"),
        *("data_batch_size_per_gpu", "eval_prompts", "test_prompts"),
    ),
    "algorithm": ("lr", "group_size", "batch_size", "max_output_tokens", "temperature", "beta", "update_epochs"),
    "training": (
        *("pop_size", "max_tokens", "max_steps", "max_seconds", "evo_steps", "lr_schedule", "seed", "device"),
        *("checkpoint_seconds", "trackers"),
    ),
    "selection_strategy": ("name",),
}
"""The settings that most runs touch: where to begin among some three hundred."""


def render() -> str:
    """Return the text of docs/manifest.md."""
    first = [f"`{section}.{key}`" for section, keys in FIRST.items() for key in keys]
    text = textwrap.fill(", ".join(first), 120, break_on_hyphens=False)
    parts = [INTRODUCTION, f"## The {len(first)} to know first\n\n{text}"]
    for name, field in RunConfig.model_fields.items():
        if name == "algorithm":
            parts += list(_algorithms())
            continue
        model = _model(field.annotation)
        assert model is not None, name
        parts.append(f"## {name}\n\n{inspect.getdoc(model)}\n\n{_list(model)}")
    default = (resources.files("agilerl.config") / "default.yaml").read_text(encoding="utf-8")
    parts.append(f"## The embedded default\n\n```yaml\n{default.rstrip()}\n```")
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _algorithms() -> Iterator[str]:
    """Yield what most algorithms have, and for each algorithm what it has alone or has another way."""
    rows = {name: dict(_rows(algorithm.Config, genes=True)) for name, algorithm in ALGORITHMS.items()}
    common: dict[str, str] = {}
    for key in dict.fromkeys(key for of_one in rows.values() for key in of_one):
        versions = [of_one[key] for of_one in rows.values() if key in of_one]
        if len(versions) > 1:
            common[key] = max(versions, key=versions.count)
    yield (
        "## algorithm\n\n`name` and the hyperparameters of that algorithm. What *evolves* can be a gene: name it in"
        "\n`mutation.rl_hp_selection`, with this range (`lr: {}`) or one of your own. First what several algorithms"
        f"\nhave, then what each has alone or in another way.\n\n{_lines(common)}"
    )
    for name, algorithm in ALGORITHMS.items():
        shared, missing = ([key for key in common if (key in rows[name]) == has] for has in (True, False))
        lists = ("Of the list above only " if len(shared) < len(missing) else "Without ", min(shared, missing, key=len))
        scope = textwrap.fill(f"{lists[0]}{', '.join(lists[1])}.", 120, break_on_hyphens=False) if missing else ""
        special = _lines({key: row for key, row in rows[name].items() if row != common.get(key)})
        yield "\n\n".join(filter(None, [f"### name: {name}", inspect.getdoc(algorithm), scope, special]))


def _list(model: type[BaseModel]) -> str:
    return _lines(dict(_rows(model)))


def _lines(rows: dict[str, str]) -> str:
    return "\n".join(f"* {key}: {row}" for key, row in rows.items())


def _rows(model: type[BaseModel], *, genes: bool = False) -> Iterator[tuple[str, str]]:
    """Yield each setting, and its type, default, range and meaning."""
    spans = {name: gene.span() for name, gene in genes_from(model).items()} if genes else {}
    for key, field, description in _leaves(model):
        evolves = f", evolves in {spans[key]}" if key in spans else ""
        meaning = " ".join(description.split()).replace("``", "`")
        yield f"`{key}`", f"{_type(field)}; {_default(field)}{evolves}. {meaning}"


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Every setting with its path and what is said of it; those of one gene follow ``rl_hp_selection.<name>``.

    What the entries of a list are is said once, though several lists have the same.
    """
    listed = set()
    for name, field in model.model_fields.items():
        inner, is_list = _model(field.annotation), _has_list(field.annotation)
        if inner is None or is_list or field.metadata:  # what a validator turns into a section has other forms as well
            yield prefix + name, field, _descriptions(model).get(name, "")
        if inner is not None and inner not in listed:
            of_many = "<name>." if get_origin(field.annotation) is dict else ""
            yield from _leaves(inner, f"{prefix}{name}{'[]' if is_list else ''}.{of_many}")
        listed |= {inner} if is_list else set()


@cache
def _descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings under the fields of a model and of its parents.

    Pydantic can read them too (``use_attribute_docstrings``), but does so when a class is made: with every import.
    """
    descriptions = {}
    for part in reversed(model.__mro__):
        if part.__module__.startswith("agilerl."):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
            assert isinstance(tree, ast.ClassDef)
            for field, doc in pairwise(tree.body):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(doc, ast.Expr)
                ):
                    assert isinstance(doc.value, ast.Constant)
                    descriptions[field.target.id] = inspect.cleandoc(str(doc.value.value))
    return descriptions


def _has_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_has_list, get_args(annotation)))


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_model, get_args(annotation)) if found is not None), None)


def _type(field: FieldInfo) -> str:
    return ", ".join([_name(field.annotation), *_bounds(field)])


def _name(annotation: Any) -> str:
    if annotation is ...:
        return "..."
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (None, type(None)):
        return "null"
    if annotation is Any:
        return "any"
    if origin is Literal:
        return "/".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_name(a) for a in arguments))
    if origin is typing.Annotated:
        return _name(arguments[0])
    if origin is tuple:
        return f"[{', '.join(_name(a) for a in arguments)}]"
    if origin is list:
        return f"list of {_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if issubclass(annotation, BaseModel):
        return "mapping"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        annotation.__name__, annotation.__name__
    )


def _bounds(field: FieldInfo) -> list[str]:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return [
        f"{words} {getattr(mark, sign):g}"
        for mark in field.metadata
        for sign, words in signs.items()
        if getattr(mark, sign, None) is not None
    ]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    value = list(value) if isinstance(value, tuple) else value
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    if "--print" in sys.argv[1:]:
        print(render(), end="")
    else:
        TARGET.write_text(render(), encoding="utf-8")
