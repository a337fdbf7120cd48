"""The preflight: what it measures, when it stops a run and with what advice, and that it changes no bit of one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agilerl.config.environment import GraderConfig
from agilerl.config.manifest import load_manifest
from agilerl.envs.core import Task, TaskWrapper
from agilerl.errors import ConfigError
from agilerl.population import Population
from agilerl.rewards.grader import Grades
from agilerl.runtime import Runtime
from agilerl.training.events import Event, PreflightDone, RunStarted
from agilerl.training.preflight import (
    MOST,
    QUESTIONS,
    Bases,
    is_due,
    preflight,
    problem,
    session_of_one,
    tried,
    why_none,
)
from agilerl.training.probe import Answer, Group, Probe, probe
from agilerl.training.run import train
from agilerl.training.setup import Session, build
from tests.faults.pieces import go_on
from tests.training.small_runs import TOURNAMENT, less_times, lines

pytestmark = pytest.mark.model

LONG = ("training.max_steps=2560", "environment.eval_prompts=4", "environment.test_prompts=4", "training.pop_size=2")
"""A budget of just 320 questions."""
SHORT = (*LONG[1:], *TOURNAMENT, "training.max_steps=64", "training.evo_steps=1", "algorithm.group_size=4")
SHORT = (*SHORT, "environment.data_batch_size_per_gpu=4", "algorithm.batch_size=8")
SILENT = ("environment.task=reasoning_gym:mini_sudoku",)


@pytest.fixture(scope="module")
def bases() -> Bases:
    return Bases()


@pytest.fixture
def sessions(bases: Bases) -> Iterator[Any]:
    """Return a maker of sessions of one agent on one base."""
    made: list[Session] = []

    def make(*settings: str) -> Session:
        made.append(session_of_one(load_manifest(None, settings), bases))
        return made[-1]

    yield make
    for session in made:
        session.population.agents[0].clean_up()
        session.task.close()


@pytest.fixture
def one(sessions: Any) -> Any:
    """Return a maker of their populations."""

    def make(*settings: str) -> Population:
        return sessions(*settings).population

    return make


def session(*settings: str) -> Session:
    return build(load_manifest(None, [*LONG, *settings]))


def test_it_counts_what_was_sampled(one: Any) -> None:
    population = one()
    found = probe(population, 6, 5)
    assert [len(group.answers) for group in found.groups] == [5] * 6
    rows = [population.task.row("train", place) for place in range(6)]
    assert [group.expected for group in found.groups] == [row["answer"] for row in rows]
    assert all(row["question"] in group.prompt for row, group in zip(rows, found.groups))
    scores = [[float(a.text == row["answer"]) for a in g.answers] for row, g in zip(rows, found.groups)]
    assert scores == [group.scores for group in found.groups]
    assert found.reward == pytest.approx(sum(map(sum, scores)) / 30)
    assert found.differ == pytest.approx(sum(0 < sum(each) < 5 for each in scores) / 6)
    assert 0 < found.differ < 1
    assert found.length == pytest.approx(sum(a.length for a in found.answers) / 30)


def test_answers_of_the_agents_are_those_of_the_base(one: Any) -> None:
    """The adapter of a new agent is zero."""
    population = one()
    agent, asks = population.agents[0], population.trial(0, 4)
    found = probe(population, 4)
    requests = [ask.generation(ask.place.prompt_ids, ask.samples) for ask in asks]
    assert {request.purpose for request in requests} == {"trial"}  # draws that no rollout and no exam has
    completions = population.runtime.complete([replace(request, slot=None) for request in requests])
    lengths = [[len(c.token_ids) for c in group] for group in completions]
    assert agent.slot is not None
    assert [[a.length for a in group.answers] for group in found.groups] == lengths


def test_a_base_is_loaded_once(one: Any, bases: Bases) -> None:
    runtimes: set[Runtime] = {one().runtime, one("environment.task=reasoning_gym:chain_sum").runtime}
    assert len(runtimes) == 1
    assert one("network.lora_config.r=4").runtime not in runtimes


def test_it_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a preflight has the bits of one without."""
    monkeypatch.setattr("agilerl.training.preflight.SHARE", 1)
    roots = {wanted: tmp_path / wanted for wanted in ("stop", "off")}
    for wanted, root in roots.items():
        list(train(build(load_manifest(None, [*SHORT, f"training.preflight={wanted}"])), root))
    kept = {name: less_times(lines(root / "metrics.jsonl")) for name, root in roots.items()}
    assert [line["kind"] for line in kept["stop"]].count("preflight") == 1
    assert [line for line in kept["stop"] if line["kind"] != "preflight"] == kept["off"]
    adapters = [(root / "elite/adapter_model.safetensors").read_bytes() for root in roots.values()]
    assert adapters[0] == adapters[1]


def test_it_tells_what_it_found(tmp_path: Path) -> None:
    events: list[Event] = []
    running = train(session(), tmp_path / "run")
    for event in running:
        events.append(event)
        if isinstance(event, PreflightDone):
            break
    running.close()
    assert isinstance(events[0], RunStarted)
    told = events[-1]
    assert isinstance(told, PreflightDone)
    assert told.metrics["preflight/questions"] == QUESTIONS
    assert 0 < told.metrics["preflight/groups_differ"] <= 1
    assert (told.problem, told.score in (0.0, 1.0)) == ("", True)
    assert "Greatest Common Divisor" in told.prompt
    (line,) = (line for line in lines(tmp_path / "run/metrics.jsonl") if line["kind"] == "preflight")
    assert {name: line[name] for name in told.metrics} == told.metrics


def test_a_run_without_a_signal_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"all {8 * MOST} answers to {MOST} .*take easier questions.*--force"):
        next(train(session(*SILENT), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_plan_asks_what_is_cheap_and_a_judge_once() -> None:
    planned = session()
    shown = tried(planned)
    assert shown is not None
    assert f"of {8 * QUESTIONS} answers" in shown.shown
    assert shown.problem == ""
    environment = planned.config.environment.model_copy(update={"graders": [GraderConfig(name="judge")]})
    planned.resolved = replace(planned.resolved, config=planned.config.replaced(environment=environment))
    shown = tried(planned)
    assert shown is not None
    assert "of 1 answer" in shown.shown


def test_a_plan_warns_of_answers_that_earn_nothing_or_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = session(*SILENT, "algorithm.max_output_tokens=1")
    monkeypatch.setattr("agilerl.training.preflight.is_due", lambda session: False)  # it does not depend on that
    longest = planned.population.examiner.lengths("exam").row(1, planned.population.examiner.context_length)
    operations = 2 * planned.population.runtime.base.parameters * longest
    monkeypatch.setattr("agilerl.training.preflight.CHEAP", 32.5 * operations)  # two answers to each question
    shown = tried(planned)
    assert shown is not None
    assert "of 32 answers" in shown.shown
    first, second = shown.problem.split("; ")
    assert first == "100% of the answers earn 0, so there is little or nothing to learn from yet (agilerl probe)"
    assert second == "100% of the answers are cut at the limit: raise algorithm.max_output_tokens, now 1"


def test_a_warning_is_enough_if_asked_for(tmp_path: Path) -> None:
    running = train(session(*SILENT, "training.preflight=warn"), tmp_path / "run")
    events = [next(running), next(running)]
    running.close()
    assert isinstance(events[1], PreflightDone)
    assert "has nothing to compare" in events[1].problem


class Rare(TaskWrapper):
    """Of all answers only one earns something."""

    graded = 0

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        self.graded += 1
        return float(self.graded == 20 * 8 + 3)

    def grade(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Grades:
        return Task.grade(self, completions, rows)


def test_one_signal_ends_the_search() -> None:
    """Not the first 16 questions: only the one at place 20 has it."""
    own = session()
    own.population.examiner.task = Rare(own.population.task)  # type: ignore[arg-type]
    found = preflight(own)
    assert found is not None
    assert [place for place, group in enumerate(found.groups) if sum(group.scores)] == [20]
    assert (len(found.groups), found.has_signal, found.start) == (32, True, "slowly")
    assert preflight(own) is found


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ((), True),
        (("training.max_steps=2552",), False),
        (("training.preflight=off",), False),
        (("training.max_tokens=20000",), False),
        (("algorithm.name=SFT",), False),
    ],
)
def test_a_short_run_is_its_own_preflight(settings: tuple[str, ...], due: bool) -> None:
    small = session(*settings)
    assert is_due(small) == due
    by_size = not due and "preflight=off" not in settings[0] and "SFT" not in settings[0]
    assert why_none(small.scale) == "none: the run answers fewer than 320 prompts" * by_size


def test_a_stopped_run_is_resumed_without_one(tmp_path: Path) -> None:
    running = train(session(), tmp_path / "run")
    next(running)
    running.close()
    again = go_on(tmp_path / "run")
    events = [next(again), next(again)]
    again.close()
    assert not any(isinstance(event, PreflightDone) for event in events)


ANSWER = Answer("12", 0.0, 3, "stop")
CUT = Answer("12", 0.0, 10, "length")
NONE = Answer("12", float("nan"), 3, "stop")
RIGHT = Answer("12", 1.0, 3, "stop")


@pytest.mark.parametrize(
    ("answer", "graded", "settings", "advice"),
    [
        (CUT, "12", (), "cut at 10 tokens; raise algorithm.max_output_tokens"),
        (NONE, "12", (), "^4 of 4 answers got no grade, because the grader returned None; return a number for every"),
        (RIGHT, "12", (), r"^all 4 answers to 2 training questions got the same reward \(1\); use harder questions"),
        (
            ANSWER,
            "",
            ("environment.answer_format=tags",),
            "no answer in the format environment.answer_format=tags",
        ),
        (ANSWER, "12", ("environment.answer_format=tags",), "take easier questions.*environment.reward=score"),
        (ANSWER, "12", (), "environment.answer_format=after.*algorithm.group_size"),
        (ANSWER, "12", ("environment.reward=score",), r"stronger base, or more answers"),
    ],
)
def test_the_advice_fits_the_cause(sessions: Any, answer: Answer, graded: str, settings: Any, advice: str) -> None:
    found = Probe([Group("", "5", [answer] * 2, [graded] * 2)] * 2)
    assert not found.has_signal
    sentence = problem(sessions(*settings), found)
    assert re.search(advice, sentence), sentence


@pytest.mark.parametrize(
    ("answers", "fault", "said"),
    [
        ([RIGHT, NONE, NONE], "", "2 of 3 answers got no grade, because the grader returned None; return a number"),
        ([RIGHT, NONE], "'8', because it raised", "1 of 2 answers got no grade, the first, '8', because it raised"),
        ([ANSWER, NONE], "'8', because it raised", "because it raised; the other 1 answer to 1 training question "),
    ],
)
def test_what_got_no_grade_is_said_first(sessions: Any, answers: list[Answer], fault: str, said: str) -> None:
    sentence = problem(sessions(), Probe([Group("", "5", answers, ["12"] * len(answers), fault)]))
    assert said in sentence
    assert "same reward" not in sentence


def test_alike_within_each_question_is_not_alike_throughout(sessions: Any) -> None:
    found = Probe([Group("", "5", [Answer("12", score, 3, "stop")] * 2, ["12"] * 2) for score in (0.0, 1.0)])
    sentence = problem(sessions(), found)
    assert "got the same reward as the others to their question (mean 0.5); use harder" in sentence


def test_an_algorithm_without_groups_compares_all_answers() -> None:
    groups = [Group("", "5", [answer] * 2, ["12"] * 2) for answer in (ANSWER, RIGHT)]
    assert not Probe(groups).has_signal
    assert Probe(groups, by_group=False).has_signal


def test_episodes_have_one_too(one: Any) -> None:
    settings = (
        "environment.env_type=multiturn",
        "environment.env_id=agilerl/GuessTheNumber-v0",
        "environment.max_turns=2",
    )
    found = probe(one(*settings), 2, 3)
    assert [len(group.answers) for group in found.groups] == [3, 3]
    assert found.groups[0].prompt.startswith("seed ")
