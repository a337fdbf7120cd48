"""Write agilerl/config/declared.py: what the algorithms declare, by name, for what runs before torch is imported.

``python docs/generate_names.py [--print]``; `make generated` runs it. Hyperparameters are declared once, in the
Configs, which stand beside the algorithms. Importing those takes seconds, and a typing error should not cost seconds.
"""

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from agilerl.algorithms import ALGORITHMS, GRPO
from agilerl.hpo.parameters import gene_names, genes_from

TARGET = Path(__file__).resolve().parent.parent / "agilerl" / "config" / "declared.py"

HEAD = '''\
"""What the algorithms declare, by name and without torch; written by docs/generate_names.py.

`make generated` writes it again after a hyperparameter has changed.
"""

from typing import NamedTuple


class Declared(NamedTuple):
    """The names that a manifest may use of one algorithm."""

    env_type: str
    """The ``environment.env_type`` that it learns from, or one of them."""
    hyperparameters: tuple[str, ...]
    genes: tuple[str, ...]
    """Those that may evolve; entries of a mapping as ``field.<name>``."""

'''


def render() -> str:
    """Return the text of the module."""
    parts = [
        HEAD,
        f"FAMILY = {_names(GRPO.family())}",
        '"""GRPO and its relatives: what ``choice[...]`` may name."""\n',
    ]
    parts += ["ALGORITHMS = {", *_entries(), "}"]
    return "\n".join(parts) + "\n"


def _entries() -> Iterator[str]:
    for name, algorithm in ALGORITHMS.items():
        dotted = [gene for gene in gene_names(algorithm.Config) if "." in gene]
        yield f'    "{name}": Declared('
        yield f'        "{algorithm.env_type}",'
        yield textwrap.indent(f"{_names(algorithm.Config.model_fields)},", " " * 8)
        yield textwrap.indent(f"{_names([*genes_from(algorithm.Config), *dotted])},", " " * 8)
        yield "    ),"


def _names(names: Iterable[str]) -> str:
    """Return a tuple of names as source, lines filled, as ruff leaves them."""
    lines = textwrap.wrap(", ".join(f'"{name}"' for name in names), 90)
    return "\n".join(
        ["(", *(f"    *({line.rstrip(',')}{',' if line.count(chr(34)) == 2 else ''})," for line in lines), ")"]
    )


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(render())
    else:
        TARGET.write_text(render(), encoding="utf-8")
