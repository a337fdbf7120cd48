"""Draw what a step costs each agent against the number of agents, from the JSON of population.py.

    python benchmarking/plot_population.py [FILE] [--out docs/speed.svg]

Solid: all agents in one batch; dashed: the same agents one at a time. Both axes are logarithmic.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5a9e", "#b8860b", "#555555")


def lines(document: Mapping[str, Any]) -> dict[tuple[str, int], list[tuple[int, float, float]]]:
    """Return for each model and prompt length: agents, seconds of each in one batch, and one at a time."""
    found: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for r in sorted(document["results"], key=lambda r: r["agents"]):
        step, count = r["step"], r["agents"]
        point = (count, step["batched"] / count, step["one_at_a_time"] / count)
        found.setdefault((f"{r['model']} ({r['parameters'] / 1e6:.2f}M)", r["prompt_tokens"]), []).append(point)
    return found


def drawn(document: Mapping[str, Any], out: Path) -> None:
    """Write the plot, the same bytes for the same numbers."""
    # Text stays text, and ids depend on nothing but the plot.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agilerl", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    counts = sorted({r["agents"] for r in document["results"]})
    for ((model, prompt), points), colour in zip(lines(document).items(), COLOURS):
        agents = [n for n, _, _ in points]
        name = f"{model}, prompts of {prompt}"
        axes.plot(agents, [together for _, together, _ in points], "o-", color=colour, label=name)
        axes.plot(agents, [alone for _, _, alone in points], "--", color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_xlabel("agents N (solid: in one batch; dashed: one at a time)")
    axes.set_ylabel("CPU seconds of a step for each agent")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "benchmarking" / "results" / "population_cpu.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "speed.svg")
    arguments = parser.parse_args()
    drawn(json.loads(arguments.file.read_text()), arguments.out)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
