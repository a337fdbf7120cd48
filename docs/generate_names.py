"""Write agilerl/config/declared.py: the hyperparameters of all algorithms, for what runs before torch is imported.

``python docs/generate_names.py [--print]``; `make generated` runs it. Hyperparameters are declared once, in the
Configs, which stand beside the algorithms. Importing those takes seconds, and completion in a shell cannot wait.
"""

import sys
import textwrap
from pathlib import Path

from agilerl.algorithms import ALGORITHMS

TARGET = Path(__file__).resolve().parent.parent / "agilerl" / "config" / "declared.py"

HEAD = '''\
"""The hyperparameters of all algorithms, without torch; written by docs/generate_names.py.

`make generated` writes it again after a hyperparameter has changed.
"""

HYPERPARAMETERS = (
'''


def render() -> str:
    """Return the text of the module, lines filled, as ruff leaves them."""
    names = dict.fromkeys(name for algorithm in ALGORITHMS.values() for name in algorithm.Config.model_fields)
    lines = textwrap.wrap(", ".join(f'"{name}"' for name in names), 100)
    return HEAD + "".join(f"    *({line.rstrip(',')}),\n" for line in lines) + ")\n"


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(render())
    else:
        TARGET.write_text(render(), encoding="utf-8")
