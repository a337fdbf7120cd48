"""Write docs/manifest.md from the models that check a manifest: ``python docs/generate_reference.py [--print]``."""

import ast
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agilerl.algorithms import ALGORITHMS
from agilerl.config.run import RunConfig
from agilerl.config.search import SelectionConfig
from agilerl.hpo.parameters import genes_from
from agilerl.hpo.strategies import STRATEGIES

TARGET = Path(__file__).resolve().parent / "manifest.md"

INTRODUCTION = """\
# The manifest

<!-- Written by docs/generate_reference.py; `make generated` writes it again. -->

A run is described by one YAML file. `agilerl train my.yaml` reads it; `agilerl train` alone reads [the package's
own](../agilerl/config/default.yaml). Any setting can be given on the command line, as `key.path=value`, and that wins:

```bash
agilerl train training.pop_size=8 algorithm.beta=0.01 --dry-run
```

* Each line has a key, default, type and bounds, and meaning. The default shows the type of numbers, texts, true and
  false. Without one it is null, which descriptions call None.
* An unknown key is an error that names the nearest known one, a value out of range one that names the range. Both are
  found before anything is loaded or written.
* `environment.task` on the command line drops the file's `environment.params`, which belong to the other task.
* `1e-6`, which is text in YAML, is taken as a number wherever one is expected. `--seed N` is `training.seed=N`.

A run's `run.json` has the whole resolved manifest, defaults included.
"""


_Setting = tuple[str, FieldInfo, str]

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
        if model is SelectionConfig:
            parts += [_strategy(name, strategy) for name, strategy in STRATEGIES.items()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _strategy(name: str, strategy: type[BaseModel]) -> str:
    about = (inspect.getdoc(strategy) or "").partition("\n")[0]
    return "\n\n".join(filter(None, [f"### name: {name}", about.replace("``", "`"), _list(strategy)]))


def _algorithms() -> Iterator[str]:
    """Yield what all algorithms have, what those that sample have, and what each has alone or in another way."""
    rows = {name: dict(_rows(algorithm.Config, genes=True)) for name, algorithm in ALGORITHMS.items()}
    sampling = {name: of_one for name, of_one in rows.items() if "`group_size`" in of_one}
    for_all = _common(rows, lambda count: count == len(rows))
    common = {key: row for key, row in _common(sampling, lambda count: count > 1).items() if key not in for_all}
    yield (
        "## algorithm\n\n`name` and the hyperparameters of that algorithm. What has a range as a gene can evolve: name"
        "\nit in `mutation.rl_hp_selection`, with this range (`lr: {}`) or one of your own. All algorithms have:\n\n"
        f"{_lines(for_all)}\n\nThose that sample have also:\n\n{_lines(common)}"
    )
    described: dict[str, str] = {}
    for name, algorithm in ALGORITHMS.items():
        own, shown = rows[name], {**for_all, **common}
        if name in sampling:
            differs = "Without", [key for key in common if key not in own]
        else:
            differs = "Also, as above,", [key for key in common if own.get(key) == common[key]]
        scope = textwrap.fill(f"{differs[0]} {', '.join(differs[1])}.", 120, break_on_hyphens=False)
        special = {key: row for key, row in own.items() if row != shown.get(key)}
        for key, row in special.items():  # a meaning that stands above is not repeated
            shape, meaning = row.split(". ", 1)
            if (shown if key in shown else described).get(key, "").endswith(f". {meaning}"):
                special[key] = f"{shape}."
        described |= {key: own[key] for key in special}
        special = {key: row for key, row in special.items() if row != f"{shown.get(key, '').split('. ')[0]}."}
        summary = (inspect.getdoc(algorithm) or "").split("\n\n")[0].replace("``", "`")
        parts = f"### name: {name}", summary, scope if differs[1] else "", _lines(special)
        yield "\n\n".join(filter(None, parts))


def _common(rows: Mapping[str, Mapping[str, str]], is_common: Callable[[int], bool]) -> dict[str, str]:
    """Return the commonest row of each setting that enough algorithms have."""
    versions: dict[str, list[str]] = {}
    for of_one in rows.values():
        for key, row in of_one.items():
            versions.setdefault(key, []).append(row)
    return {key: max(listed, key=listed.count) for key, listed in versions.items() if is_common(len(listed))}


def _list(model: type[BaseModel]) -> str:
    return _lines(dict(_rows(model)))


def _lines(rows: dict[str, str]) -> str:
    return "\n".join(f"* {key}: {row}" for key, row in rows.items())


def _rows(model: type[BaseModel], *, genes: bool = False) -> Iterator[tuple[str, str]]:
    """Yield each setting, and its type, default, range and meaning."""
    spans = {name: gene.span() for name, gene in genes_from(model).items()} if genes else {}
    for key, field, description in _leaves(model):
        gene = f"gene {spans[key]}" if key in spans else ""
        head = ", ".join(filter(None, [_default(field), _type(field), gene]))
        yield f"`{key}`", f"{head}. {' '.join(description.split()).replace('``', '`')}"


def _leaves(model: type[BaseModel], prefix: str = "", listed: set[Any] | None = None) -> Iterator[_Setting]:
    """Yield every setting with its path and what is said of it; those of one gene follow ``rl_hp_selection.<name>``.

    A model that several fields have is described where it is first met.
    """
    listed = set() if listed is None else listed
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        inner, is_list = _model(field.annotation), _has_list(field.annotation)
        if inner is None or is_list or inner in listed or field.metadata:  # a validated section has other forms as well
            yield prefix + name, field, _descriptions(model).get(name, "")
        if inner is not None and inner not in listed:
            of_many = "<name>." if get_origin(field.annotation) is dict else ""
            listed.add(inner)
            yield from _leaves(inner, f"{prefix}{name}{'[]' if is_list else ''}.{of_many}", listed)


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
    """Return the type and the bounds; a default shows the type of numbers, texts, true and false."""
    name, default = _name(field.annotation), _default(field)
    kind = name.removesuffix(" or null")
    shown = "" if default.startswith("`") and kind in ("text", "integer", "number", "true or false") else kind
    null = "or null" if default and kind != name else ""
    return " ".join(filter(None, [shown, ", ".join(_bounds(field)), null]))


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
        names = list(dict.fromkeys(_name(a) for a in arguments))
        return " or ".join("a list of these" if name == f"[{names[0]}, ...]" else name for name in names)
    if origin is typing.Annotated:
        return _name(arguments[0])
    if origin is tuple and get_args(annotation)[1:] == (...,):
        return f"list of {_name(get_args(annotation)[0])}"
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
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return [
        f"{shown}{getattr(mark, sign):g}"
        for mark in field.metadata
        for sign, shown in signs.items()
        if getattr(mark, sign, None) is not None
    ]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    value = list(value) if isinstance(value, tuple) else value
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    if "--print" in sys.argv[1:]:
        print(render(), end="")
    else:
        TARGET.write_text(render(), encoding="utf-8")
