"""What a run shows: a table that never wraps, bars that move, plain lines where there is no terminal."""

import io
import json
import math
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agilerl.cli.output import genes_text, tell_apart
from agilerl.cli.progress import View, _print_answers, describe_sample, log, sparkline, watch
from agilerl.config.manifest import load_manifest
from agilerl.hpo.fitness import Fitness
from agilerl.runs.completions import CompletionRecord, read_completions
from agilerl.runs.stopping import StopRequest
from agilerl.runs.strict_json import read_json
from agilerl.training.events import (
    Event,
    Evolved,
    ExamDone,
    HeldOutTest,
    IterationDone,
    PhaseStarted,
    PreflightDone,
    RunFinished,
    RunStarted,
)
from agilerl.training.run import reopen, train
from agilerl.training.setup import Session, build
from tests.training.small_runs import SMALL, lines

pytestmark = pytest.mark.model


@pytest.fixture
def session() -> Session:
    genes = "mutation.rl_hp_selection={lr: {}, temperature: {}, group_size: {}}"
    return build(load_manifest(None, [*SMALL, genes]))


def console(width: int, *, terminal: bool) -> Console:
    """A console that writes into memory."""
    return Console(
        file=io.StringIO(), width=width, height=60, force_terminal=terminal, markup=False, emoji=False, highlight=False
    )


def written(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def shown(events: Iterator[Event], session: Session, width: int = 200, *, terminal: bool = False) -> str:
    """Return what a run shows."""
    screen = console(width, terminal=terminal)
    watch(events, session, screen)
    return written(screen)


def story(session: Session, *, sick: bool = False, result: float = 0.9) -> Iterator[Event]:
    """A made-up run."""
    metrics = {"reward": 0.25, "kl": 0.0123, "entropy": 0.5, "tokens_per_second": 12345.6}
    yield RunStarted(Path("runs/[red]x[/red]"), 2, 1)
    yield PhaseStarted("base test")
    yield PhaseStarted("train")
    yield IterationDone(0, 1, 0.5, {a.index: metrics for a in session.population.agents})
    yield IterationDone(0, 2, 1.0, {a.index: metrics for a in session.population.agents})
    yield PhaseStarted("exam")
    fitness = {a.index: Fitness(0.5 + a.index / 10, 0.03, 9) for a in session.population.agents}
    if sick:
        fitness = {index: Fitness(math.nan, math.nan, 9) for index in fitness}
    yield ExamDone(0, fitness)
    decided = {"panel": "exam", "elite": 0.719, "last": 0.656, "n": 32}
    elite = None if sick else {"index": 2, "step": 2, "hyperparameters": {}, "decided_by": decided}
    test = {"base": {"mean": 0.4, "stderr": 0.02, "n": 9}, "elite": {"mean": result, "stderr": 0.01, "n": 9}}
    yield RunFinished(
        Path("runs/[red]x[/red]"),
        {
            "elite": elite,
            "test": {"base": test["base"]} if sick else test,
            "lineage": [{"agent": 2, "hyperparameters": {"lr": 0.00123456}}],
            "tokens": {"generated": 1000, "trained": 500, "evaluated": 20},
            "generations": 1,
            "seconds": 9.7,
        },
    )


def last_table(text: str) -> list[str]:
    rows = text.splitlines()
    start = max(i for i, row in enumerate(rows) if row.strip().startswith("agent "))
    return rows[start : start + 4]


@pytest.mark.parametrize("width", [60, 80, 100, 140, 220])
def test_one_line_an_agent_at_any_width(width: int, session: Session) -> None:
    header, *rows = last_table(shown(story(session), session, width))
    assert [row.split()[0] for row in rows] == ["0", "1", "2*"]
    assert all(len(row.rstrip()) <= width for row in [header, *rows])
    assert "reward" in header
    assert "0.700 ± 0.030" in rows[2]
    assert ("parent" in header) == (width >= 80)
    if width >= 140:
        assert header.split() == ["agent", "parent", "genes", "reward", "trend", "exam", "event"]
        assert "lr=1e-05, temperature=1, group_size=4" in rows[0]


MARKS = {
    "the best of the last exam": (
        (0.5, 0.6, 0.7),
        2,
        2,
        "after iteration 2, the best of the last exam\n",
    ),
    "others are near": (
        (0.699, 0.6, 0.7),
        2,
        2,
        ", the best of the last exam, whose 9 questions do not tell it apart from agent 0 (P < 0.8 that it is "
        "better)\n",
    ),
    "an earlier agent": ((0.5, 0.6, 0.7), 1, 1, "better than the best of the last exam\n"),
    "the same agent": ((0.5, 0.6, 0.7), 2, 1, "by a second panel of questions it was better than it was at the end\n"),
    "the same agent, by its exams": (
        (0.5, 0.6, 0.7),
        2,
        1,
        ": best exam of the run, 0.719 against 0.656 of the last\n",
    ),
}


@pytest.mark.parametrize("case", MARKS)
def test_the_mark_is_on_the_elite_of_the_result(case: str) -> None:
    means, elite, step, words = MARKS[case]
    session = build(load_manifest(None, [*SMALL, f"selection_strategy.candidates={1 if 'best exam' in words else 3}"]))

    def marked() -> Iterator[Event]:
        for event in story(session):
            if isinstance(event, ExamDone):
                event = replace(event, fitness={i: Fitness(mean, 0.03, 9) for i, mean in enumerate(means)})
            if isinstance(event, RunFinished):
                chosen = {**event.summary["elite"], "index": elite, "step": step}
                event = replace(event, summary={**event.summary, "elite": chosen, "advice": ["it is early"]})
            yield event

    text = shown(marked(), session, 140)
    assert [row.split()[0] for row in last_table(text)[1:]] == [f"{i}*" if i == elite else str(i) for i in range(3)]
    assert words in text.partition("* elite: ")[2]
    assert f"elite (agent {elite} after iteration {step})" in text
    # Although the elite is better than the base.
    assert "About the run as a whole\n  it is early\n" in text
    assert "What may keep agents" not in text


def test_a_terminal_says_at_once_what_a_signal_does(session: Session) -> None:
    stop, screen, seen = StopRequest(), console(100, terminal=True), []

    def signalled() -> Iterator[Event]:
        for event in story(session):
            yield event
            if isinstance(event, PhaseStarted) and event.name == "exam":
                stop.signal = signal.SIGINT
                start = len(written(screen))
                while "SIGINT: will save a checkpoint" not in written(screen)[start:]:  # the table is drawn anew
                    time.sleep(0.01)
                seen.append(True)

    watch(signalled(), session, screen, stop=stop)
    assert seen == [True]
    # The last line of a table without a signal is empty, so that the ^C of a terminal begins no other.
    view = View(session, screen)
    view.show(PhaseStarted("train"))
    assert screen.render_lines(view._draw(), pad=False)[-1] == []


def test_progress_as_lines_of_json(session: Session, tmp_path: Path) -> None:
    told: list[str] = []
    summary = log(train(session, tmp_path / "run", command=["test"]), session, told.append)
    found = [json.loads(line) for line in told]
    assert all(list(line)[:2] == ["time", "event"] for line in found)
    metrics = [line for line in found if line["event"] in ("train", "eval", "evolution", "test")]
    assert [
        {"kind": line["event"], **{k: v for k, v in line.items() if k not in ("time", "event", "progress")}}
        for line in metrics
    ] == lines(tmp_path / "run" / "metrics.jsonl")
    kinds = [line["event"] for line in found if line not in metrics]
    assert kinds[:4] == ["plan", "start", "phase", "phase"]
    assert kinds[-1] == "finish"
    assert found[-1]["elite"] == json.loads((tmp_path / "run" / "summary.json").read_text())["elite"]
    assert summary["status"] == "finished"


def test_columns_without_content_are_left_out(session: Session) -> None:
    events = (e for e in story(session) if not isinstance(e, IterationDone))
    assert "trend" not in last_table(shown(events, session))[0]


def test_plain_lines_where_there_is_no_terminal(session: Session) -> None:
    text = shown(story(session), session, 80)
    assert "\x1b" not in text
    assert "iteration 1 (50%, about 0 s left): reward 0: 0.250, 1: 0.250, 2: 0.250\n" in text
    assert "generation 0: exam 0: 0.500 ± 0.030, 1: 0.600 ± 0.030, 2: 0.700 ± 0.030\n" in text
    assert "Winning lineage  2 (lr=0.00123)\n" in text
    assert "Elite adapter    runs/[red]x[/red]/elite\n" in text
    assert "1 generation, 1,520 tokens, 10 s\n" in text


@pytest.mark.parametrize("result", [0.41, 0.9])
@pytest.mark.parametrize("terminal", [False, True])
def test_what_may_keep_agents_from_learning_is_said_once_and_at_an_end_without_gain(
    terminal: bool, result: float, session: Session
) -> None:
    events = list(story(session, result=result))
    ok, cut = {"reward": 0.5, "completions/clipped_ratio": 0.1}, {"completions/clipped_ratio": 0.9}
    metrics = {0: ok, 1: ok | cut | {"completions/max_length": 16.0}, 2: {**ok, "learning_rate": 1e-5}}
    metrics[1]["reward_errors/mine"] = 39.7
    failed = CompletionRecord(0, 1, 1, 0, 0, "q", "a", "", None, 1, "stop", "it raised KeyError: 1")
    outcomes = dict.fromkeys(metrics, "ok")
    iterations = [IterationDone(0, number, number / 4, metrics, outcomes, [failed]) for number in (1, 2, 3)]
    exam = next(event for event in events if isinstance(event, ExamDone))
    text = shown(iter([*events[:3], *iterations, exam, exam, *events[-1:]]), session, terminal=terminal)
    progress, _, end = text.partition("What may keep agents from learning")
    failing = (
        "agent 1: mine gave no grade to about 40 completions an iteration, for instance because it raised KeyError: "
    )
    for sentence in (failing, "agent 1: 90% of the completions were cut", "agent 2: the learning rate is 1e-05"):
        assert terminal or progress.count(sentence) == 1
        assert end.count(sentence) == (result < 0.5)
    assert ("The elite is better than the base: +0.500 ± 0.022 (one standard error)\n" in text) == (result > 0.5)
    assert ("The elite is not clearly better than the base: +0.010 ± 0.022 (one standard error)\n" in text) == (
        result < 0.5
    )
    assert "agent 0:" not in progress.replace("exam", "") + end


def test_a_loss_is_not_called_a_small_gain(session: Session, tmp_path: Path) -> None:
    assert "The elite is worse than the base: -0.400 ± 0.022" in shown(story(session, result=0.0), session)
    *events, end = story(session)
    assert isinstance(end, RunFinished)
    scores = {"base": [0.0, 1.0, 0.0, 1.0], "elite": [1.0, 1.0, 1.0, 1.0]}
    tests = [
        {"kind": "test", "who": who, "by_question": {"sha256": "0", "scores": each}, "eval/reward_mean": sum(each) / 4}
        for who, each in scores.items()
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in tests))
    text = shown(iter([replace(events[0], out=tmp_path), *events[1:], end]), session)
    assert "The elite is better than the base: +0.500 ± 0.289 (one standard error, paired" in text
    fewer = {**end.summary["test"], "base": {**end.summary["test"]["base"], "n": 8}}
    last = shown(iter([*events, replace(end, summary={**end.summary, "test": fewer})]), session)
    assert "not comparable, because not the same questions got a grade (n)\n" in last
    assert "The elite is" not in last


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_terminal_sees_bars_that_move_and_named_phases(width: int, session: Session) -> None:
    screen = console(width, terminal=True)
    seen = []

    def watched() -> Iterator[Event]:
        for event in story(session):
            before = len(written(screen))
            yield event
            seen.append(written(screen)[before:])
            if isinstance(event, ExamDone):
                frame = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen[-1]).rpartition("run  ")[2]
                assert not re.search("exam +━", frame)

    watch(watched(), session, screen)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(seen))
    for phase in ("base test", "train", "exam"):
        assert phase in text
    assert " 50% of budget     0:00:00 < " in text
    assert "100% of budget     0:00:00 < 0:00:00" in text
    assert re.search(r"\d% of generation 0:00:00 < ", text)
    assert "iteration 1" not in text  # the table says it
    rows = text.replace("\r", "\n").split("\n")
    assert {row[:10].strip() for row in rows if "━" in row} == {"run", "start", "base test", "train", "exam"}
    assert max(map(len, rows)) <= width


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_agent_stays_in_the_table_with_its_trend_and_why_it_left(
    width: int, session: Session, tmp_path: Path
) -> None:
    root = tmp_path / "r"
    text = shown(train(session, root, command=["test"]), session, width, terminal=True)
    ended = text[text.rindex("All agents of the run") :].partition("* elite")[0]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", ended)
    deaths = {line["agent"]: line for line in lines(root / "lineage.jsonl") if line["event"] == "death"}
    births = {line["agent"] for line in lines(root / "lineage.jsonl") if line["event"] == "birth"}
    rows = {int(row.split()[0].strip("*")): row for row in plain.splitlines()[2:] if row.split()}
    assert rows.keys() == births
    assert deaths
    dim = {int(match) for match in re.findall(r"\x1b\[2m *(\d+)", ended)}
    assert dim == deaths.keys()
    for index, death in deaths.items():
        reason = f"left in {death['generation']}: {death['reason'].removeprefix('left: ')}"
        assert reason.startswith(rows[index][rows[index].index("left ") :].rstrip().rstrip("…"))
    assert all(set("▁▂▃▄▅▆▇█") & set(row) for row in rows.values())
    assert max(map(len, plain.splitlines())) <= width


def test_a_resumed_run_shows_who_left_before(tmp_path: Path) -> None:
    def table(events: Iterator[Event], session: Session) -> list[str]:
        text = shown(events, session)
        text = text[text.rindex("All agents of the run") :].partition("* elite")[0]
        return [row.partition(" ± ")[0] for row in text.splitlines()[2:]]

    root, whole = tmp_path / "run", build(load_manifest(None, SMALL))
    expected = table(train(whole, tmp_path / "whole", command=["test"]), whole)
    with closing(train(build(load_manifest(None, SMALL)), root, command=["test"])) as events:
        assert any(isinstance(event, IterationDone) and event.iteration == 3 for event in events)  # and no further
    with reopen(root, report=print) as run:
        assert table(run.events, run.session) == expected
    deaths = [line for line in lines(root / "lineage.jsonl") if line["event"] == "death"]
    assert {int(row.split()[0]) for row in expected[-len(deaths) :]} == {death["agent"] for death in deaths}


def test_a_sparkline_has_the_course_of_the_values() -> None:
    assert sparkline([], 0, 1) == ""
    assert sparkline([0.0, math.nan, 0.5, 1.0], 0, 1) == "▁▅█"
    assert sparkline([*[0.0] * 8, *[1.0] * 8], 0, 1) == "▁▁▁▁████"
    assert sparkline([3.0, 3.0], 3, 3) == "▁▁"


def test_no_elite_is_said(session: Session) -> None:
    screen = console(80, terminal=False)
    summary = watch(story(session, sick=True), session, screen)
    assert "so there is no elite" in written(screen)
    assert "not finite" in written(screen)
    assert summary["elite"] is None


def test_a_failure_is_said_once_and_counted(session: Session) -> None:
    def failing() -> Iterator[Event]:
        for event in story(session):
            if isinstance(event, IterationDone):
                event = replace(event, outcomes={0: "ok", 1: "nonfinite", 2: "ok"})
            yield event

    text = shown(failing(), session, 140)
    said = "iteration 1: agent 1 nonfinite (a loss or gradient that was not finite: lower algorithm.lr)\n"
    assert text.count(": agent 1 nonfinite") == text.count(said) == 1
    header, *rows = last_table(text)
    assert "failures" in header
    assert ["2 nonfinite" in row for row in rows] == [False, True, False]
    assert "2 nonfinite" in shown(failing(), session, 140, terminal=True)
    assert "failures" not in shown(story(session), session, 140)


def test_the_cursor_comes_back_when_a_run_breaks_off(session: Session) -> None:
    def broken() -> Iterator[Event]:
        yield PhaseStarted("train")
        raise KeyboardInterrupt

    screen = console(80, terminal=True)
    with pytest.raises(KeyboardInterrupt):
        watch(broken(), session, screen)
    assert written(screen).rindex("\x1b[?25h") > written(screen).rindex("\x1b[?25l")


def test_a_real_run_tells_its_story_in_order(tmp_path: Path) -> None:
    kinds, root, session = [], tmp_path / "run", build(load_manifest(None, SMALL))
    for event in train(session, root, command=["test"]):
        kinds.append(event.name if isinstance(event, PhaseStarted) else type(event).__name__)
        check_it_is_written(event, root)
    assert kinds == [
        "RunStarted", "base test", "HeldOutTest",
        "train", "IterationDone", "IterationDone", "exam", "ExamDone", "HeldOutTest", "Evolved",
        "train", "IterationDone", "IterationDone", "exam", "ExamDone",
        "test", "HeldOutTest", "RunFinished",
    ]  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_who_leaves_is_said_with_the_reason(terminal: bool, session: Session, tmp_path: Path) -> None:
    text = shown(train(session, tmp_path / "run", command=["test"]), session, 250, terminal=terminal)
    deaths = [line for line in lines(tmp_path / "run" / "lineage.jsonl") if line["event"] == "death"]
    assert deaths
    assert re.search(r"generation 0: best \d \(0\.\d{3}\)", text)
    for death in deaths:
        said = re.findall(rf"generation {death['generation']}: left .*", text)
        assert f"{death['agent']} ({death['reason'].removeprefix('left: ')})" in said[0]
    assert f"agilerl lineage {tmp_path / 'run'}" in text


def check_it_is_written(event: Event, root: Path) -> None:
    """The run's writer is the first that an event reaches: nothing that a consumer does can lose it."""
    kinds = {IterationDone: "train", ExamDone: "eval", Evolved: "evolution", HeldOutTest: "test"}
    if type(event) in kinds:
        assert lines(root / "metrics.jsonl")[-1]["kind"] == kinds[type(event)]
    if isinstance(event, IterationDone):
        rows = [asdict(row) for row in event.completions]
        assert all(row.pop("failure") == "" for row in rows)  # which the file does not have
        assert rows == read_completions(root / "completions", event.iteration)
    if isinstance(event, Evolved):
        assert lines(root / "journal.jsonl")[-1]["data"]["kind"] == "evolution"
    if isinstance(event, RunFinished):
        assert event.summary == read_json(root / "summary.json")


def test_genes_in_few_words() -> None:
    assert genes_text({"lr": 0.00123456, "group_size": 8, "loss_norm": "token-mean"}) == (
        "lr=0.00123, group_size=8, loss_norm=token-mean"
    )


@pytest.mark.parametrize("most", [12, 30])
def test_texts_that_would_be_cut_to_the_same_are_told_apart(most: int) -> None:
    begin = "A long story that several questions begin with, "
    texts = ["What is 3?", f"{begin}and one apple more.", f"{begin}and two.", f"{begin}and two.", "x" * 40, "x" * 50]
    found = tell_apart(texts, most)
    assert found[0] == "What is 3?"
    assert found[1].startswith("...one ")
    assert found[2] == found[3] == "...two."
    assert found[4] != found[5]
    assert max(map(len, found)) <= most
    assert tell_apart(texts, 300) == texts


def test_answers_are_shown_without_what_all_questions_share_if_they_are_long() -> None:
    def entry(question: str, base: float | None) -> dict[str, Any]:
        answers = {"base": {"text": "12\n\x1b[2J" + "x" * 60, "score": base}, "elite": {"text": "6", "score": 1.0}}
        return {"question": question, "answer": "6", **answers}

    ask = "What is the greatest of all common divisors of the numbers {} now?"

    console = Console(file=io.StringIO(), width=80)
    _print_answers([entry(ask.format("12, 18"), 0.0), entry(ask.format("30, 6"), None)], console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[:5] for line in lines[3:5]] == [
        ["...12,", "18", "now?", "6", "12"],
        ["...30,", "6", "now?", "6", "12"],
    ]
    assert "... (0)" in lines[3]
    assert lines[4].endswith("... (no grade)  6 (1)")
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]
    nothing = {"text": "", "score": 0.0}
    _print_answers([{"question": "1 + 1", "answer": "2", "base": nothing, "elite": nothing}], console)
    assert console.file.getvalue().split().count("(empty)") == 2  # type: ignore[attr-defined]
    assert describe_sample(PreflightDone({}, "", answer="2"))[1] == ("answer", "2, no grade")
