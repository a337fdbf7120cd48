"""Write docs/models.md, what becomes of each architecture of transformers, from benchmarking/results/models.json.

``python docs/generate_models.py [--print]``; `make generated` runs it. `python -m benchmarking.models` makes the JSON.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarking" / "results" / "models.json", ROOT / "docs" / "models.md"

HEAD = """# Which models

Any causal language model of transformers is either trained right or refused in a sentence before training. No list of
names decides: what a model computes is tried out when it is loaded. This page is what
`python -m benchmarking.models` found on {total} configurations, each a tiny random model of its architecture:
**{right} right, {refused} refused**, {untried} not tried.

Right means: after training a little, the log-probs of sampling, of training (in a batch and alone), of plain
transformers with eager attention, of plain PEFT on what `agilerl export` wrote, and of what `agilerl merge` wrote agree
within 1e-4; the largest difference of all is {worst}. Prompts and answers lie on both sides of windows, chunks and
rotations. `agilerl probe MODEL` says it for your own.

* **Rows in one line** have no padding, and compute what they have in common once; **padded** ones cost more.
* **Longest row**: of {longest} tokens in the configuration. It is shorter where the rotation of all tokens changes with
  the length of a row (LongRoPE), or where a window could not be told apart from a longer context.
* Models whose layers keep a state (Mamba, gated delta nets, most hybrids) cannot be sampled by the torch engine.

## Right

"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page."""
    of = {
        kind: {n: r for n, r in results.items() if r["outcome"] == kind} for kind in ("right", "refused", "not tried")
    }
    right, refused, untried = of.values()
    worst = max(value for r in right.values() for value in r["apart"].values())
    longest = next(r["longest row"].partition(" of ")[2] for r in right.values() if " of " in r["longest row"])
    numbers = {"total": len(results), "right": len(right), "refused": len(refused), "untried": len(untried)}
    lines = [HEAD.format(**numbers, worst=f"{worst:.0e}", longest=longest)]
    lines.append("| architecture | rows | longest row | largest difference |\n| --- | --- | --- | --- |\n")
    for name, r in right.items():
        lines.append(f"| {name} | {r['rows']} | {r['longest row']} | {max(r['apart'].values()):.0e} |\n")
    lines.append("\n## Refused\n\n| architecture | what is said |\n| --- | --- |\n")
    lines += [f"| {name} | {_cell(r['why'])} |\n" for name, r in refused.items()]
    lines.append("\n## Not tried\n\nThe code in transformers refuses small numbers, or needs another package.\n\n")
    lines.append(", ".join(f"`{name}`" for name in untried) + "\n")
    return "".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    if "--print" in sys.argv:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
