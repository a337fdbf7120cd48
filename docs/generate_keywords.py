"""Write agilerl/algorithms/keywords.py, by which editors and type checkers know the keywords of each algorithm.

``python docs/generate_keywords.py [--print]``; `make generated` runs it. Hyperparameters are declared once, in the
Configs; no type checker sees through that, so the same is written down here in the form that they understand.
"""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from agilerl.algorithms import ALGORITHMS
from agilerl.algorithms.base import AlgorithmConfig
from agilerl.config.base_model import SharedOptions

TARGET = Path(__file__).resolve().parent.parent / "agilerl" / "algorithms" / "keywords.py"

HEAD = '''\
"""Keywords of ``GRPO(...)`` and the others, for editors and type checkers; written by docs/generate_keywords.py.

`make generated` writes it again after a hyperparameter has changed. ``GRPOKeywords`` has what GRPO takes.
"""

# ruff: noqa: D101

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from agilerl.algorithms.base import AlgorithmConfig
from agilerl.algorithms.config import CosineLRScheduleConfig
from agilerl.algorithms.custom_loss import LossFunction
from agilerl.hpo.parameters import Gene, HyperparameterConfig
from agilerl.runtime import Runtime


class AgentKeywords(TypedDict, total=False):
    """What every agent takes besides its hyperparameters: its own, then the options of the shared base."""

    pad_token_id: int | None
    pad_token: str | None
    model_name: str | None
    actor_network: Any
    runtime: Runtime | None
    lora_config: Any
    device: Any
    accelerator: Any
    cosine_lr_schedule_config: CosineLRScheduleConfig | None
    loss: LossFunction | None
    config: AlgorithmConfig | None
    hp_config: HyperparameterConfig | Mapping[str, Gene] | None
    index: int
    wrap: bool
    clone: bool
    calc_position_embeddings: bool
    reduce_memory_peak: bool | None
    use_liger_loss: bool
    model_config: Any
    fused_loss_chunk_rows: int | None
'''


def render() -> str:
    """Return the text of the module; its layout is ruff's to finish."""
    parts = [HEAD.rstrip("\n")]
    parts += [f"    {name}: {_type(field)}" for name, field in SharedOptions.model_fields.items()]
    shared = _shared()
    for config, fields in shared.items():
        parents = [_name(base) for base in config.__bases__ if base in shared] or ["AgentKeywords"]
        parts += _keywords(_name(config), parents, fields)
    for name, algorithm in ALGORITHMS.items():
        bases = [base for base in algorithm.Config.__bases__ if base in shared]
        inherited = {key: kind for base in algorithm.Config.__mro__ for key, kind in shared.get(base, {}).items()}
        own = {key: kind for key, kind in _types(algorithm.Config).items() if key not in inherited}
        parts += _keywords(f"{name}Keywords", [_name(base) for base in bases], own)
    return "\n".join(parts) + "\n"


def _shared() -> dict[type[BaseModel], dict[str, str]]:
    """Return, of each Config that algorithms share, what all of them take alike: a member may have fixed the rest."""
    found: dict[type[BaseModel], dict[str, str]] = {}
    for algorithm in ALGORITHMS.values():
        for config in reversed(algorithm.Config.__mro__[1:]):
            if not issubclass(config, AlgorithmConfig) or config is AlgorithmConfig:
                continue
            taken = _types(algorithm.Config)
            declared = [name for name in config.__annotations__ if name in config.model_fields]
            before = found.get(config, {name: taken.get(name, "") for name in declared})
            found[config] = {name: kind for name, kind in before.items() if taken.get(name) == kind}
    return found


def _keywords(name: str, parents: list[str], fields: dict[str, str]) -> Iterator[str]:
    yield f"\n\nclass {name}({', '.join(parents)}, total=False):"
    yield from [f"    {key}: {kind}" for key, kind in fields.items()] or ["    pass"]


def _name(config: type[BaseModel]) -> str:
    return config.__name__.replace("Config", "Keywords")


def _types(config: type[BaseModel]) -> dict[str, str]:
    return {name: _type(field) for name, field in config.model_fields.items()}


def _type(field: FieldInfo) -> str:
    # What a validator reads first may be given in other forms.
    is_read = any(isinstance(part, BeforeValidator) for part in field.metadata)
    return ("str" if get_origin(field.annotation) is Literal else "Any") if is_read else _written(field.annotation)


def _written(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (None, type(None)):
        return "None"
    if annotation is ...:
        return "..."
    if origin is types.UnionType or str(origin) == "typing.Union":
        return " | ".join(map(_written, arguments))
    if origin is Literal and len(arguments) > 8:
        return "str"
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return _written(arguments[0])
    if origin is dict:
        return f"Mapping[{', '.join(map(_written, arguments))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_written, arguments))}]"
    return str(annotation.__name__)


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(render())
    else:
        TARGET.write_text(render(), encoding="utf-8")
