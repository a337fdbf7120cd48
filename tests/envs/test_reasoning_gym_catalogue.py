"""Every dataset that reasoning_gym registers works by name."""

import json
import random
import warnings

import pytest

from agilerl.config.environment import EnvironmentConfig
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.scorers import IN_THIS_PROCESS, SHORTCUTS, shortcuts
from agilerl.envs.upstream import known_tasks, quiet
from benchmarking.degenerate import measured, paying

NO_OWN_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their rows have answer None: any answer that fits the problem is right."""
SLOW = {"futoshiki", "knight_swap", "sokoban", "zebra_puzzles"}
"""0.1 to 0.35 s a problem (measured): one training row each."""


def test_there_are_as_many_as_expected():
    assert len(known_tasks()) == 106


def test_quiet_silences_what_is_inside_and_nothing_else(capsys):
    with quiet():
        print("noise")
        warnings.warn("noise", stacklevel=1)  # an error under this suite's filter
    print("sound")
    assert capsys.readouterr().out == "sound\n"
    with pytest.raises(UserWarning, match="sound"):
        warnings.warn("sound", stacklevel=1)


@pytest.mark.parametrize("name", [name for name in known_tasks() if name != "composite"])
@pytest.mark.processes
def test_every_dataset(name, capfd):
    before = random.getstate()
    count = 1 if name in SLOW else 3
    task, other = (ReasoningGymTask(name, seed=5, exam_prompts=1, test_prompts=0) for _ in range(2))
    rows = [task.row("train", i) for i in range(count)]
    assert [other.row("train", i) for i in reversed(range(count))] == rows[::-1]
    for row in rows:
        assert isinstance(row["question"], str)
        assert row["metadata"]["source_dataset"] == name
        if name in NO_OWN_ANSWER:
            assert row["answer"] is None
        else:
            assert task.reward(row["answer"], row) == 1.0
            assert task.reward(f"So <answer>{row['answer']}</answer>.", row) == 1.0
        shown = repr(row)
        for junk in ("", "zz 1", "{}", "[1]", "[[", "\x00", "((((((((", "1/0", "-", "é × 2"):
            assert task.reward(junk, row) == 0.0
        assert repr(row) == shown
    assert random.getstate() == before
    assert capfd.readouterr().out == ""


INTEGRALS = {"intermediate_integration", "simple_integration"}
"""Seconds for each wrong answer; measured by hand."""


@pytest.mark.parametrize("questions", [10, pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])])
@pytest.mark.processes
def test_what_pays_for_nothing_is_named(questions):
    """Plans name it; with few questions fewer shortcuts stand out."""
    tasks = set(known_tasks()) - INTEGRALS - {"composite"} - (SLOW if questions < 100 else set())
    one = ReasoningGymTask("coin_flip", exam_prompts=1, test_prompts=0)
    one.reward("0.5", one.row("train", 0))  # starts the scorers' process, which all tasks share while this one lives
    found = {name: paying(measured(name, questions), questions) for name in sorted(tasks)}
    found = {name: pays for name, pays in found.items() if pays}
    if questions == 100:  # in a process of their own answers may be given up, so that a busy machine finds fewer
        here = tasks & IN_THIS_PROCESS
        measured_here = {name: found[name] for name in found if name in here}
        assert json.loads(json.dumps(measured_here)) == {n: SHORTCUTS[n] for n in SHORTCUTS if n in here}
    assert found.keys() <= SHORTCUTS.keys()


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("coin_flip", ["0", "0.", "0.6", "nan", "1e400", "1/0", "-0"], lambda row: row["answer"][:9]),
        ("complex_arithmetic", ["nan", "NaN", "nan + nani", "nanj", "1 + nani", "(nan)"], None),
        ("game_of_life_halting", ["0", "x", "True or False", "Yes"], lambda row: row["answer"].lower()),
        ("puzzle24", ["3*8*1*1", "24", "4 + 4 + 8 + 8"], None),
    ],
)
@pytest.mark.processes
def test_scorers_that_paid_for_nothing_do_not(name, wrong, right):
    task = ReasoningGymTask(name, seed=5, exam_prompts=1, test_prompts=0, reward="score")
    for row in (task.row("train", place) for place in range(10)):
        assert {text: task.reward(text, row) for text in wrong} == dict.fromkeys(wrong, task.reward("", row))
        assert task.reward("", row) < 0.02
        assert task.reward(row["answer"] if right is None else right(row), row) == 1.0


def test_plans_name_what_pays():
    def named(task, **keys):
        return list(shortcuts(EnvironmentConfig(task=f"reasoning_gym:{task}", **keys)))

    sentence = "`Yes` earns 0.65 on syllogism (chance 0.48; measured with default parameters)"
    assert named("syllogism") == [sentence]
    assert named("composite", params={"datasets": [{"name": "syllogism"}, {"name": "lcm"}, {"name": "syllogism"}]}) == [
        sentence
    ]
    assert named("word_sorting") == named("lcm") == named("syllogism", graders=[{"name": "accuracy"}]) == []
    assert "earns 0.13" in named("word_sorting", reward="score")[0]
