"""Draw what a step costs each agent against the number of agents, from the JSON of population.py.

    python benchmarking/plot_population.py [FILE] [--out docs/speed.svg]

Solid: all agents in one batch; dashed: the same agents one at a time. Both axes are logarithmic. Prints the same as
tables.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
mpl.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter  # noqa: E402

from benchmarking.roofline import named  # noqa: E402

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5a9e", "#b8860b", "#555555")


def lines(document: Mapping[str, Any]) -> dict[tuple[str, int], list[tuple[int, float, float]]]:
    """Return for each model and prompt length: agents, seconds of each in one batch, and one at a time."""
    found: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for r in sorted(document["results"], key=lambda r: r["agents"]):
        step, count = r["step"], r["agents"]
        point = (count, step["batched"] / count, step["one_at_a_time"] / count)
        found.setdefault((named(r), r["prompt_tokens"]), []).append(point)
    return found


def costs(document: Mapping[str, Any]) -> str:
    """Return a table of the milliseconds of a step for each agent of a batch, and of a further agent.

    ``further`` is the slope from the fewest agents to the most, ``shared`` what a step of one agent costs beyond it.
    """
    counts = sorted({r["agents"] for r in document["results"]})
    heads = [*(f"N = {n}" for n in counts), "shared", "further"]
    rows = [f"| model | prompt | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for (model, prompt), points in lines(document).items():
        cells = {n: f"{1000 * together:.0f}" for n, together, _ in points}
        (few, first, _), (many, last, _) = points[0], points[-1]
        further = (many * last - few * first) / (many - few)
        shown = [*(cells.get(n, "") for n in counts), f"{1000 * (first - further):.0f}", f"{1000 * further:.0f}"]
        rows.append(f"| {model} | {prompt} | {' | '.join(shown)} |")
    return "\n".join(rows)


def gains(document: Mapping[str, Any]) -> str:
    """Return a table of (one at a time / in one batch): of a step, and of its phases at the largest N."""
    counts = sorted({r["agents"] for r in document["results"]})
    heads = [*(f"N = {n}" for n in counts), *(f"{phase}, N = {counts[-1]}" for phase in ("rollout", "update"))]
    rows = [f"| model | prompt | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for model, prompt in lines(document):
        own = {r["agents"]: r for r in document["results"] if (named(r), r["prompt_tokens"]) == (model, prompt)}
        last = own[counts[-1]]
        found = [*(own[n]["step"]["gain"] for n in counts), last["rollout"]["gain"], last["learn"]["gain"]]
        cells = (f"{middle:.2f} [{low:.2f}-{high:.2f}]" for middle, low, high in found)
        rows.append(f"| {model} | {prompt} | {' | '.join(cells)} |")
    return "\n".join(rows)


def drawn(document: Mapping[str, Any], out: Path) -> None:
    """Write the plot, the same bytes for the same numbers."""
    # Text stays text, and ids depend on nothing but the plot.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agilerl", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    counts = sorted({r["agents"] for r in document["results"]})
    for ((model, prompt), points), colour in zip(lines(document).items(), COLOURS):
        agents = [n for n, _, _ in points]
        name = f"{model}, prompts of {prompt}"
        axes.plot(agents, [1000 * together for _, together, _ in points], "o-", color=colour, label=name)
        axes.plot(agents, [1000 * alone for _, _, alone in points], "--", color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 4)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=40)
    axes.set_xlabel("agents N (solid: in one batch; dashed: one at a time)")
    axes.set_ylabel("CPU milliseconds of a step, for each agent")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "benchmarking" / "results" / "population_cpu.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "speed.svg")
    arguments = parser.parse_args()
    document = json.loads(arguments.file.read_text())
    drawn(document, arguments.out)
    print(f"{costs(document)}\n\n{gains(document)}\n")
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
