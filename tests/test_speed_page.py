"""``docs/speed.md`` shows what the benchmarks measured: its tables are made of the committed JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarking import peers, plot_population, train_profile

ROOT = Path(__file__).resolve().parent.parent


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarking" / "results" / name).read_text(encoding="utf-8"))
    return found


def tables() -> dict[str, str]:
    population = results("population_cpu.json")
    return {
        "peers": peers.ratio_table([*results("peers_cpu.json")["results"], *results("peers_cpu_30M.json")["results"]]),
        "peers, 135M": peers.ratio_table(results("peers_cpu_135M.json")["results"]),
        "gain": plot_population.gains(population),
        "gain, 135M": plot_population.gains(results("population_cpu_135M.json")),
        "train": train_profile.table(results("train_profile.json")["phases"]),
    }


@pytest.mark.parametrize("name", ["peers", "peers, 135M", "gain", "gain, 135M", "train"])
def test_tables_are_those_of_the_results(name: str) -> None:
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for line in tables()[name].splitlines():
        assert line in page


def test_the_plot_has_a_line_for_each_model_and_length(tmp_path: Path) -> None:
    document = results("population_cpu.json")
    plot_population.drawn(document, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    committed = (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8")
    for model, length in plot_population.lines(document):
        for svg in (drawn, committed):
            assert f"{model}, prompts of {length}" in svg
