"""Write docs/models.md, what becomes of each architecture of transformers, from benchmarking/results/models.json.

``python docs/generate_models.py [--print]``; `make generated` runs it. `python -m benchmarking.models` makes the JSON.
"""

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarking" / "results" / "models.json", ROOT / "docs" / "models.md"

HEAD = """# Which models

Any causal language model of transformers is either trained right or refused in a sentence before training. No list of
names decides: what a model computes is tried out when it is loaded, and `agilerl probe MODEL` says what was found. This
page is what `python -m benchmarking.models` found on {total} configurations, each a tiny random model of its
architecture: **{right} right, {refused} refused**, {untried} not tried.

Right means: after a little training, the log-probs of sampling, of training (in a batch and alone), of plain
transformers with eager attention, of plain PEFT on what `agilerl export` wrote, and of what `agilerl merge` wrote agree
within 1e-5, with prompts and answers on both sides of windows, chunks and rotations. Where the logits of transformers
itself in fp32 and in fp64 differ so much, they agree within four times that difference:
{rough}.

## Right

Rows in one line have no padding, and what they have in common is computed once; padded rows cost more. Rows may be as
long as the model's context, except where the rotation of all tokens changes with the length of a row (LongRoPE), or
where a window could not be told apart from a longer context.

| rows | architectures |
| --- | --- |
"""
REASONS = {
    "keep a state": "its layers keep a state, no keys and values, so the torch engine cannot decode it; vLLM may",
    "does not take a cache": "its code takes no cache of each row's keys and values; vLLM may decode it",
    "from those of a forward pass": "decoding gives other log-probs than a forward pass; vLLM may decode it",
    "computes its logits in a way": "it computes its logits in a way that is not supported",
    "lets tokens see those that follow": "tokens see those that follow, so it cannot write a text",
    "depends on later tokens": "its long rows depend on later tokens, or on the kernel",
    "Unrecognized configuration class": "transformers loads it only with images",
}
"""What each refusal says, by a part of its sentence."""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page."""
    of = {
        kind: {n: r for n, r in results.items() if r["outcome"] == kind} for kind in ("right", "refused", "not tried")
    }
    right, refused, untried = of.values()
    rough = ", ".join(f"`{name}` {max(r['apart'].values()):.0e}" for name, r in right.items() if "tolerance" in r)
    rough = textwrap.fill(rough, 119, break_on_hyphens=False)
    numbers = {"total": len(results), "right": len(right), "refused": len(refused), "untried": len(untried)}
    rows: dict[str, list[str]] = {}
    for name, r in right.items():
        longest = "" if r["longest row"] == "as configured" else f", of at most {r['longest row']} tokens"
        rows.setdefault(r["rows"] + longest, []).append(name)
    why: dict[str, list[str]] = {}
    for name, r in refused.items():
        [reason] = [reason for part, reason in REASONS.items() if part in r["why"]]
        why.setdefault(reason, []).append(name)
    parts = [HEAD.format(**numbers, rough=rough), _table(rows)]
    parts += ["\n## Refused\n\n| why | architectures |\n| --- | --- |\n", _table(why)]
    parts.append("\n## Not tried\n\nThe code in transformers refuses small numbers, or needs another package: ")
    parts.append(", ".join(f"`{name}`" for name in untried) + "\n")
    return "".join(parts)


def _table(names: Mapping[str, list[str]]) -> str:
    return "".join(f"| {head} | {', '.join(f'`{name}`' for name in listed)} |\n" for head, listed in names.items())


if __name__ == "__main__":
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    if "--print" in sys.argv:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
