"""``agilerl lineage``: who lived, who left and why, for people and for programs."""

import json
from pathlib import Path
from typing import Any

import pytest

from agilerl.hpo.lineage import birth_record
from agilerl.report.load import load_run
from agilerl.report.page import lineage_table
from agilerl.runs import JsonLines, read_lines
from tests.cli.outcome import Agilerl
from tests.report.synthetic_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_run(tmp_path_factory.mktemp("lineage") / "mine", generations=4)
    return root


@pytest.fixture(scope="module")
def lines(run: Path) -> list[dict[str, Any]]:
    return list(read_lines(run / "lineage.jsonl"))


def test_every_agent_has_a_row_that_says_why_it_left(run: Path, lines: list[dict[str, Any]], agilerl: Agilerl) -> None:
    found, elite = agilerl("lineage", str(run)), load_run(run).summary["elite"]["index"]
    assert found.code == 0, found.errors
    rows = {int(row.split()[0].rstrip("*")): row for row in found.output.splitlines() if row[:5].strip(" *").isdigit()}
    assert list(rows) == [line["agent"] for line in lines if line["event"] == "birth"]
    deaths = {line["agent"]: line for line in lines if line["event"] == "death"}
    assert deaths
    for agent, row in rows.items():
        why = deaths[agent]["reason"] if agent in deaths else "elite: best exam" if agent == elite else "-  "
        assert why in row
    life = json.loads(agilerl("lineage", str(run), "--agent", str(elite), "--json").output)
    assert life["elite"] == life["events"][-1]["sentence"] == "elite: best exam; test: elite 0.900, base 0.367"


def test_reasons_are_readable_in_80_columns(run: Path, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = agilerl("lineage", str(run)).output.splitlines()
    agents = [number for number, row in enumerate(rows) if row[:5].strip(" *").isdigit()]
    assert max(later - sooner for sooner, later in zip(agents, [*agents[1:], len(rows) - 1])) <= 4
    assert max(map(len, rows)) <= 80


def test_a_life_is_told_in_order(run: Path, lines: list[dict[str, Any]], agilerl: Agilerl) -> None:
    death = next(line for line in lines if line["event"] == "death" and line["reason"] == "fitness is not finite")
    index = death["agent"]
    life = json.loads(agilerl("lineage", str(run), "--agent", str(index), "--json").output)
    own = [line for line in lines if line["agent"] == index]
    assert (life["agent"], life["left"], life["reason"]) == (index, death["generation"], death["reason"])
    assert [exam["generation"] for exam in life["exams"]] == [x["generation"] for x in own if x["event"] == "fitness"]
    assert [exam["mean"] for exam in life["exams"]] == ["NaN"] * len(life["exams"])  # strict JSON
    assert {exam["place"] for exam in life["exams"]} == {4}  # of four: what is not finite ranks last
    assert [symptom["name"] for symptom in life["symptoms"]] == ["clipped updates"]
    told = [event["sentence"] for event in life["events"]]
    assert told[0] == "founder of the population"
    assert "not finite, place 4 of 4" in told[1]
    assert told[-1] == f"left: {death['reason']}"
    text = agilerl("lineage", str(run), "--agent", str(index)).output
    assert text.startswith(f"Agent {index} trained for")
    assert len([row for row in text.splitlines() if row.startswith("generation ")]) == len(told)
    assert "of the tokens were clipped" in text


def test_all_lives_as_json(run: Path, lines: list[dict[str, Any]], agilerl: Agilerl) -> None:
    lives = json.loads(agilerl("lineage", str(run), "--json").output)
    births = [line for line in lines if line["event"] == "birth"]
    assert [(life["agent"], life["parent"]) for life in lives] == [(line["agent"], line["parent"]) for line in births]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--agent", "77"], "found 77; its agents are 0, 1, "),
        (["--agent", "x"], "--agent"),
        (["--agents", "3"], "--agent"),
    ],
)
def test_what_is_refused(arguments: list[str], said: str, run: Path, agilerl: Agilerl) -> None:
    found = agilerl("lineage", str(run), *arguments)
    assert (found.code, found.output) == (2, "")
    assert said in found.errors


@pytest.mark.parametrize("arguments", [(), ("--agent", "0")])
def test_a_run_that_has_not_finished_says_so(arguments: tuple[str, ...], tmp_path: Path, agilerl: Agilerl) -> None:
    root = make_run(tmp_path / "mine", finished=False)
    told = agilerl("lineage", str(root), *arguments).output
    assert "stayed to the end" not in told
    assert told.endswith(f"it was stopped. To continue: agilerl resume {root}\n")


def test_an_agent_that_has_not_trained_is_called_that(tmp_path: Path, agilerl: Agilerl) -> None:
    root = make_run(tmp_path / "mine", finished=False)
    with JsonLines(root / "lineage.jsonl") as lineage:
        lineage.write(birth_record(99, 0, 9, 50, {"lr": 0.1}))
    row = next(row for row in agilerl("lineage", str(root)).output.splitlines() if row.startswith("   99"))
    assert row.split()[2:4] == ["0", "-"]
    assert "has not trained yet" in row
    told = agilerl("lineage", str(root), "--agent", "99").output
    assert told.startswith("Agent 99 has not trained yet and is in the population.")
    run = load_run(root)
    assert lineage_table(run)[-1]["fitness"] == "has not trained yet"
    run.agents[99].died = 9
    assert lineage_table(run)[-1]["fitness"] == "never trained"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, agilerl: Agilerl) -> None:
    assert agilerl("lineage", str(tmp_path)).code == 2
