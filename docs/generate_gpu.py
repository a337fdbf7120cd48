"""Write the measured part of docs/gpu.md from benchmarking/results/gpu-*.json.

``python docs/generate_gpu.py [--print]``; `make generated` runs it. The JSON are what benchmarking/gpu.sh leaves as
OUT/gpu.json; without any, the page says that nothing was measured.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- written by docs/generate_gpu.py -->\n", "<!-- end of what was written -->\n"
NOTHING = "**Nothing has been measured on a GPU yet**, by these benchmarks or any other.\n"
PHASES = ("prefill", "decode", "logprobs", "train", "optimizer")

Document = Mapping[str, Any]


def results() -> list[Document]:
    """Return what was measured, one document for each device and date."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarking" / "results").glob("gpu-*.json"))]


def rows(document: Document, part: str, *, has: str = "", **names: Any) -> list[dict[str, Any]]:
    """Return the rows of a part that have a value of this name, and these values."""
    own = next((p["rows"] for p in document["parts"] if p["part"] == part), [])
    return [row for row in own if (not has or has in row) and all(row.get(n) == v for n, v in names.items())]


def _of_agents(document: Document) -> float | None:
    step = {row["agents"]: row for row in rows(document, "step", has="tokens_per_second", model="0.5B")}
    return step[8]["tokens_per_second"] / step[1]["tokens_per_second"] if {1, 8} <= set(step) else None


def _mfu(document: Document) -> float | None:
    found = [r for r in rows(document, "train", has="mfu") if r["prompt_tokens"] + r["completion_tokens"] == 1024]
    return max((row["mfu"] for row in found if row["mfu"] is not None), default=None)


def _kept(document: Document) -> float | None:
    found = rows(document, "decode", has="kept_with_adapters")
    return max(found, key=lambda row: row["rows"])["kept_with_adapters"] if found else None


def _of_vllm(document: Document) -> float | None:
    found = [row["arms"]["vLLM"] for row in rows(document, "engines", has="arms") if "vLLM" in row["arms"]]
    return 1 / found[-1]["ratio_to_torch_engine"][0] if found else None


def _syncs(document: Document) -> float | None:
    found = rows(document, "decode", has="a_token")
    return found[0]["a_token"] if found else None


def _plan(document: Document) -> float | None:
    found = [row["predicted_over_measured"] for row in rows(document, "step", has="predicted_over_measured")]
    return max(found, key=lambda ratio: max(ratio, 1 / ratio)) if found else None


TARGETS: tuple[tuple[str, str, Callable[[Document], float | None], Callable[[float], bool]], ...] = (
    ("tokens a second of 8 agents, 0.5B, against one", "at least 3", _of_agents, lambda x: x >= 3),
    ("MFU of training, rows of 1,024 tokens", "at least 0.25", _mfu, lambda x: x >= 0.25),
    ("decoding with 8 adapters, against none", "at least 0.75", _kept, lambda x: x >= 0.75),
    ("decoding, against vLLM", "at least 0.5", _of_vllm, lambda x: x >= 0.5),
    ("host syncs for each decoded token", "below 1", _syncs, lambda x: x < 1),
    ("predicted / measured of a step, the worst", "0.7 to 1.3", _plan, lambda x: 0.7 <= x <= 1.3),
)
"""What is measured, what is wanted, where the number is, and whether it is enough."""


def table(names: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    return "\n".join([_line(names), _line(["---"] * len(names)), *(_line(line) for line in lines)]) + "\n"


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def targets(documents: Sequence[Document]) -> str:
    """Return the targets, with what each document has for them."""
    lines = []
    for what, wanted, number, holds in TARGETS:
        found = [number(document) for document in documents]
        shown = ["not measured" if x is None else f"{x:.2f}, {'held' if holds(x) else 'missed'}" for x in found]
        lines.append((what, wanted, *(shown or ["not measured"])))
    return table(("what", "target", *([d["device"]["name"] for d in documents] or ["measured"])), lines)


def steps(document: Document) -> str:
    """Return the table of steps: time, rates, memory, the fraction of the limit of each phase."""
    lines = [
        (
            row["model"],
            row["agents"],
            f"{row['step_seconds']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['decode_tokens_per_second']:,.0f}",
            f"{row['memory']['peak'] / 2**30:.1f}",
            " ".join(f"{row['phases'][p]['fraction_of_limit']:.2f}" for p in PHASES),
            f"{row['predicted_over_measured']:.2f}",
        )
        for row in sorted(rows(document, "step", has="step_seconds"), key=lambda r: (r["model"], r["agents"]))
    ]
    names = ("model", "agents", "s", "tokens/s", "decoded tokens/s", "peak GiB")
    return table((*names, f"of the limit: {', '.join(PHASES)}", "predicted / s"), lines)


def render(documents: Sequence[Document]) -> str:
    """Return the measured part of the page."""
    parts = [targets(documents)] if documents else [NOTHING, targets(documents)]
    for document in documents:
        device, versions = document["device"], document["versions"]
        wanted = ("torch", "transformers", "peft", "vllm")
        used = ", ".join(f"{name} {versions[name]}" for name in wanted if name in versions)
        parts += [
            f"## {device['name']}\n",
            f"Commit {document['commit'][:9] or 'unknown'}, {document['date'][:10]}, {used}, "
            f"{document['seconds']:.0f} s in all: `{' '.join(document['command'])}`\n",
            " ".join(f"{p['part']}: {p['status']}." for p in document["parts"] if p["status"] != "done") + "\n",
            steps(document),
        ]
    return "\n".join(parts)


def page(documents: Sequence[Document]) -> str:
    """Return the page with its measured part written again."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + render(documents) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(page(results()))
    else:
        PAGE.write_text(page(results()), encoding="utf-8")
