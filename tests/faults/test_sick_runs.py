"""A run with one sick agent: what it writes about it, and that it goes on the same after an interruption."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agilerl.algorithms.codec import read_state
from agilerl.cli.progress import watch
from agilerl.config.manifest import load_manifest
from agilerl.errors import CheckpointError
from agilerl.hpo.fitness import Fitness
from agilerl.report.load import load_run
from agilerl.report.page import lineage_table, render
from agilerl.runs.journal import read_lines
from agilerl.runs.strict_json import read_json
from agilerl.training.run import resume, train
from agilerl.training.saved import open_run
from agilerl.training.setup import Session, build
from tests.faults.evidence import SHORT, differences, evidence
from tests.faults.pieces import until
from tests.training.small_runs import TOURNAMENT, lines

pytestmark = pytest.mark.model

SICK = 1


def sick_session(*overrides: str) -> Session:
    """Return a run in which everything that agent 1 learns in its first iteration is not a number."""
    session = build(load_manifest(None, [*SHORT, *overrides]))
    agent = session.population.agent(SICK)
    objective = agent.objective
    agent.objective = lambda *given: objective(*given) * (float("nan") if agent.updates == 0 else 1)  # type: ignore[method-assign]
    return session


def complete(events: Any) -> None:
    for _ in events:
        pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sick") / "run"
    complete(train(sick_session(), root, command=["test"]))
    return root


def test_the_run_says_what_happened(whole: Path) -> None:
    train_lines = [line for line in read_lines(whole / "metrics.jsonl") if line["kind"] == "train"]
    outcomes = {(line["step"], line["agent"]): line["outcome"] for line in train_lines if line["generation"] == 0}
    assert outcomes == {
        **{(step, agent): "ok" for step in (1, 2) for agent in (0, 1, 2)},
        (1, SICK): "nonfinite",
    }
    reason = "loss, gradient or samples were not finite in 2 optimizer steps in a row"
    lineage = list(read_lines(whole / "lineage.jsonl"))
    deaths = {line["agent"]: line["reason"] for line in lineage if line["event"] == "death"}
    assert deaths[SICK] == reason
    journal = [line["data"] for line in lines(whole / "journal.jsonl")]
    (evolution,) = [entry for entry in journal if entry["kind"] == "evolution"]
    assert evolution["sick"] == {str(SICK): reason}
    plan = evolution["plan"]
    child = plan["slots"][1]
    assert {birth["child"]: birth["parent"] for birth in plan["births"]}[child] == plan["elite"] != SICK
    assert child in plan["mutants"]
    assert all(line["agent"] != SICK for line in lineage if line["event"] == "elite")
    kept = read_json(whole / f"checkpoints/000003/agent_{plan['elite']}/agent.json")["counters"]
    assert (kept["outcomes"]["ok"], kept["bad_steps"], kept["sick"]) == (3, 0, "")


def test_a_failure_is_an_event_of_the_iteration_it_happens_in(tmp_path: Path) -> None:
    events = train(sick_session(), tmp_path / "run", command=["test"])
    assert until(events, 1).failed == {SICK: "nonfinite"}
    assert until(events, 2).failed == {}
    events.close()  # type: ignore[attr-defined]


def test_an_interruption_changes_nothing_of_it(whole: Path, tmp_path: Path) -> None:
    events = train(sick_session(), tmp_path / "run", command=["test"])
    until(events, 2)
    events.close()  # type: ignore[attr-defined]
    saved = open_run(tmp_path / "run", report=print)
    assert saved.checkpoint is not None
    assert saved.checkpoint.name == "000001"
    counters = read_json(saved.checkpoint / f"agent_{SICK}/agent.json")["counters"]
    assert counters["bad_steps"] == 2
    complete(resume(build(saved.config, saved.checkpoint), saved.run))
    assert evidence(tmp_path / "run") == evidence(whole)


def test_a_sick_agent_is_not_the_elite_of_the_run_whatever_its_exam_says(tmp_path: Path) -> None:
    session = sick_session("selection_strategy.name=none")
    examine = session.population.evaluate

    def flattering(split: Any = "exam", **options: Any) -> dict[int, Fitness]:
        found = examine(split, **options)
        return {i: Fitness(1.0, 0.0, one.n) if i == SICK and split == "exam" else one for i, one in found.items()}

    session.population.evaluate = flattering  # type: ignore[method-assign]
    events = train(session, tmp_path / "run", command=["test"])
    until(events, 3)
    events.close()  # type: ignore[attr-defined]
    lineage = list(read_lines(tmp_path / "run/lineage.jsonl"))
    exam = {line["agent"]: line["mean"] for line in lineage if line["event"] == "fitness"}
    assert exam[SICK] == 1.0 > max(mean for agent, mean in exam.items() if agent != SICK)
    (elite,) = [line["agent"] for line in lineage if line["event"] == "elite"]
    assert elite != SICK
    state = read_json(tmp_path / "run/checkpoints/000002/state.json")
    assert state["progress"]["best"] == exam[elite] < 1.0


def test_weights_that_are_no_numbers_are_kept_and_gone_on_with_until_the_agent_goes(tmp_path: Path) -> None:
    """Saved and read as they are, so that the interruption changes nothing; in a checkpoint of others it is refused."""
    for name in ("whole", "killed"):
        session = build(load_manifest(None, list(SHORT)))
        events = train(session, tmp_path / name, command=["test"])
        until(events, 1)
        store, slot = session.population.runtime.store, session.population.agent(SICK).slot
        store.theta[slot, :7] = float("nan")
        store.exp_avg[slot, :7] = float("nan")
        if name == "whole":
            complete(events)
        else:
            until(events, 2)
            events.close()  # type: ignore[attr-defined]
    saved = open_run(tmp_path / "killed", report=pytest.fail)
    assert saved.checkpoint is not None
    assert saved.checkpoint.name == "000001"
    assert read_json(saved.checkpoint / "state.json")["not_finite"] == [SICK]
    layers = session.population.runtime.store.layers
    with pytest.raises(CheckpointError, match="not finite"):
        read_state(saved.checkpoint / f"agent_{SICK}", layers)
    with pytest.raises(CheckpointError, match="not finite"):
        session.population.agents[0].load_checkpoint(saved.checkpoint / f"agent_{SICK}")
    complete(resume(build(saved.config, saved.checkpoint), saved.run))
    assert differences(evidence(tmp_path / "killed"), evidence(tmp_path / "whole")) == []
    deaths = [line["agent"] for line in read_lines(tmp_path / "whole/lineage.jsonl") if line["event"] == "death"]
    assert SICK in deaths
    assert read_json(max((tmp_path / "whole/checkpoints").glob("??????")) / "state.json")["not_finite"] == []


def test_where_nobody_is_fit_there_is_no_elite(tmp_path: Path) -> None:
    """Not in what is printed, not in the lineage, not in the report."""
    session = build(load_manifest(None, [*SHORT, "training.pop_size=2", "training.max_steps=128"]))
    examine = session.population.evaluate

    def lost(split: Any = "exam", **options: Any) -> dict[int, Fitness]:
        return {i: Fitness(float("nan"), n=f.n) for i, f in examine(split, **options).items()}

    session.population.evaluate = lost  # type: ignore[method-assign]
    printed = StringIO()
    watch(train(session, tmp_path / "run", command=["test"]), session, Console(file=printed, width=200))
    assert "generation 0: no best agent, because none is fit" in printed.getvalue()
    assert "so there is no elite" in printed.getvalue()
    lineage = list(read_lines(tmp_path / "run/lineage.jsonl"))
    assert [line for line in lineage if line["event"] == "elite"] == []
    assert (tmp_path / "run/report.html").exists()


def test_the_report_shows_outcomes_that_are_not_ok(whole: Path) -> None:
    run = load_run(whole)
    assert run.agents[SICK].trouble == {"nonfinite": [1]}
    assert run.agents[0].trouble == {}
    rows = {row["agent"]: row["steps"] for row in lineage_table(run)}
    assert (rows[SICK], rows[0]) == ("2, 1 nonfinite", str(len(run.agents[0].train)))
    page = render([run])
    assert "2, 1 nonfinite" in page
    assert "outcome nonfinite in 1 iteration, first at iteration 1" in page


@pytest.mark.parametrize("guard", [True, False])
def test_an_agent_that_collapses_makes_room_for_a_mutant_of_the_elite(guard: bool) -> None:
    settings = (*TOURNAMENT, "training.pop_size=3", "environment.data_batch_size_per_gpu=16", "algorithm.batch_size=64")
    session = build(load_manifest(None, settings))
    population = session.population
    for agent, rate in zip(population.agents, (3e-3, 1e-3, 0.3)):
        agent.hp_config = None
        agent.lr = rate
    for _ in range(4):
        population.learn(population.rollout())
    fitness = {0: Fitness(0.7, 0.02, 50), 1: Fitness(0.6, 0.02, 50), 2: Fitness(0.65, 0.02, 50)}
    evolution = population.evolve(
        fitness, session.selection, session.resolved.mutations, generation=0, seed=1, collapse_guard=guard
    )
    if not guard:
        assert evolution.sick == {}
        return
    assert set(evolution.sick) == {2}
    assert evolution.sick[2].startswith("collapsed: ")
    child = evolution.plan.slots[2]
    assert {birth.child: birth.parent for birth in evolution.plan.births}[child] == evolution.plan.elite == 0
    assert 2 in evolution.plan.deaths
