"""Graders and environments that fail: for one agent it is that agent's trouble, for most of them the run's."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agilerl.data import Trajectory
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.envs.text_env import TextEnv
from agilerl.errors import EnvError, RewardError, RewardTimeoutError
from agilerl.population import Population
from agilerl.rewards.combine import CombinedGrader
from agilerl.rewards.grader import grade
from agilerl.rewards.isolated import IsolatedGrader
from agilerl.rollouts.engine import Failure, Rollout, check_error_rate, lost_places
from agilerl.safety.custom_code import contained
from tests.faults.graders import sleepy
from tests.faults.small_populations import GROUP, PROMPTS, Parity, iterate, make_population, weights
from tests.training.small_runs import ROOT, environment

BATCH = PROMPTS * GROUP


def raises() -> float:
    raise ZeroDivisionError("no denominator")


def hangs() -> float:
    raise TimeoutError("nothing within 1 s")


def says_nothing_finite() -> float:
    return float("inf")


def failing(size: int, fault: Callable[[], float], places: Sequence[int]) -> Population:
    task = Parity()
    task.fault, task.faulty = fault, places
    return make_population(size, task=task)


@pytest.mark.model
@pytest.mark.parametrize(
    ("fault", "outcome"), [(raises, "reward_error"), (hangs, "timeout"), (says_nothing_finite, "reward_error")]
)
def test_one_agent_without_a_grade_skips_the_update(fault: Callable[[], float], outcome: str) -> None:
    healthy = iterate(make_population(3), 2)
    population = failing(3, fault, range(BATCH, 2 * BATCH))
    before = weights(population.agent(1))
    found = iterate(population, 2)
    assert {i: found[i] == healthy[i] for i in range(3)} == {0: True, 1: False, 2: True}
    assert all(float((a - b).abs().max()) == 0 for a, b in zip(before, weights(population.agent(1))))
    assert [agent.outcome for agent in population.agents] == ["ok", outcome, "ok"]
    assert population.agent(1).outcomes[outcome] == 2
    assert found[1].metrics[0]["completions/mean_length"] == healthy[1].metrics[0]["completions/mean_length"]
    assert "reward" not in found[1].metrics[0]
    assert not population.agent(1).sick


@pytest.mark.model
def test_some_failures_are_masked_out_and_no_outcome() -> None:
    population = failing(2, raises, range(BATCH, 2 * BATCH - 3))
    iterate(population, 1)
    assert [agent.outcome for agent in population.agents] == ["ok", "ok"]
    assert population.agent(1).steps == 3


@pytest.mark.model
def test_the_run_stops_where_too_many_fail() -> None:
    most = int(0.5 * 2 * BATCH)
    failing(2, raises, range(most)).rollout()
    with pytest.raises(RewardError, match=f"{most + 1} of {2 * BATCH} .*max_error_rate=0.5.* return 0.0"):
        failing(2, raises, range(most + 1)).rollout()
    with pytest.raises(RewardError, match=f"all {2 * BATCH} .*ZeroDivisionError: no denominator"):
        failing(2, raises, range(2 * BATCH)).rollout()
    patient = failing(2, raises, range(2 * BATCH))
    patient.max_error_rate = 1.0
    iterate(patient, 1)
    assert {agent.outcome for agent in patient.agents} == {"reward_error"}
    strict = failing(2, raises, range(1))
    strict.max_error_rate = 0.0
    with pytest.raises(RewardError, match="1 of"):
        strict.rollout()


@pytest.mark.model
def test_an_exam_that_nobody_can_be_graded_in_stops_the_run() -> None:
    with pytest.raises(RewardError, match="all 24 completions"):
        failing(2, raises, range(24)).evaluate()
    with pytest.raises(RewardError, match="all 12 completions"):
        failing(2, raises, range(12)).evaluate_base()
    population = failing(2, raises, range(12))
    assert {i: f.is_finite for i, f in population.evaluate().items()} == {0: False, 1: True}
    # One agent by itself may be at fault for what it says.
    assert not population.evaluate("test", agents=population.agents[:1])[0].is_finite


@pytest.mark.model
def test_an_exam_leaves_out_the_answers_that_could_not_be_graded() -> None:
    population = failing(2, raises, [0, 13])  # the first answer of one agent, the second of the other
    assert {i: (f.is_finite, f.n) for i, f in population.evaluate().items()} == {0: (True, 10), 1: (True, 10)}
    alone = failing(1, raises, [3]).evaluate_base()
    assert (alone.is_finite, alone.n) == (True, 11)


@pytest.mark.model
def test_a_broken_protocol_is_put_down_to_whose_texts_break_it() -> None:
    def count_odd(prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        scores = [float(sum(ids) % 2) for ids in completion_ids]
        return scores[1:] if "poison" in calls and any(ids in poison for ids in completion_ids) else scores

    calls: list[str] = []
    poison: list[list[int]] = []
    task = GradedTask(Parity(), count_odd)
    healthy = make_population(2, task=task)
    first = healthy.rollout()
    others = [t.token_ids for t in first.trajectories[1]]
    poison += [t.token_ids for t in first.trajectories[0] if t.token_ids not in others][:1]
    assert poison
    calls.append("poison")
    population = make_population(2, task=task)
    rollout = population.rollout()
    assert [rollout.outcome(0), rollout.outcome(1)] == ["reward_error", "ok"]
    assert [t.rewards for t in rollout.trajectories[1]] == [t.rewards for t in first.trajectories[1]]
    assert {f.message for f in rollout.failures[0]} == {
        f"count_odd must return a list of {BATCH} numbers (one for each completion), found {BATCH - 1} of them"
    }


@pytest.mark.model
def test_a_combined_grader_says_which_failed_and_why() -> None:
    def late(completion: str) -> float:
        raise RewardTimeoutError("nothing within 5 s")

    task = GradedTask(Parity(), CombinedGrader({"task": TaskGrader(Parity()), "late": (late, 0.0)}))
    with pytest.raises(RewardError, match=f"all {BATCH} .*late: nothing within 5 s"):
        make_population(1, task=task).rollout()


@pytest.mark.processes
def test_a_worker_that_is_killed_for_its_time_counts_as_a_timeout() -> None:
    with IsolatedGrader(sleepy, timeout=0.2) as grader:
        (found,) = grader(["a prompt"], ["a text"])
    assert isinstance(found, RewardTimeoutError)


class Board(TextEnv):
    """Two turns; breaks where it has a fault."""

    max_turns = 2
    fault: Callable[[], Any] | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.turn = 0
        return "start", {}

    def step(self, action: str) -> Any:
        self.turn += 1
        if self.fault is not None:
            self.fault()
        return "more", 1.0 if len(action) % 2 else 0.0, self.turn == 2, False, {}


class Episodes:
    """Makes boards; those of some places of a batch break when they are used."""

    def __init__(self, fault: Callable[[], Any], places: range, *, at_once: bool = False) -> None:
        self.fault, self.places, self.at_once, self.made = fault, places, at_once, 0

    def __call__(self) -> TextEnv:
        board = Board()
        if self.made in self.places:
            board.fault = self.fault
            if self.at_once:
                board.reset = lambda **options: self.fault()  # type: ignore[method-assign]
        self.made += 1
        return board


@pytest.mark.model
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("fault", "outcome"), [(raises, "reward_error"), (hangs, "timeout")])
def test_environments_that_fail_for_one_agent(fault: Callable[[], Any], outcome: str, at_once: bool) -> None:
    boards = Episodes(fault, range(BATCH, 2 * BATCH), at_once=at_once)
    population = make_population(3, task=EpisodeTask(boards, exam_episodes=4))  # type: ignore[arg-type]
    boards.made = 1  # the first one was made to look at, and is used first
    found = iterate(population, 1)
    healthy = iterate(make_population(3, task=EpisodeTask(Board, exam_episodes=4)), 1)  # type: ignore[arg-type]
    assert {i: found[i] == healthy[i] for i in range(3)} == {0: True, 1: False, 2: True}
    assert [agent.outcome for agent in population.agents] == ["ok", outcome, "ok"]


@pytest.mark.model
def test_environments_that_fail_for_most_stop_the_run() -> None:
    boards = Episodes(raises, range(2 * BATCH), at_once=True)
    population = make_population(3, task=EpisodeTask(boards, exam_episodes=4))  # type: ignore[arg-type]
    boards.made = 1  # the first one was made to look at, and is used first
    with pytest.raises(EnvError, match=f"{2 * BATCH} of {3 * BATCH} episodes.*no denominator"):
        population.rollout()


@pytest.mark.model
def test_one_agent_that_breaks_every_exam_episode_costs_the_others_none() -> None:
    boards = Episodes(raises, range(8, 16))
    population = make_population(3, task=EpisodeTask(boards, exam_episodes=8))  # type: ignore[arg-type]
    boards.made = 1  # the first one was made to look at, and is used first
    fitness = population.evaluate()
    assert {i: (f.is_finite, f.n) for i, f in fitness.items()} == {0: (True, 8), 1: (False, 8), 2: (True, 8)}


# -- the rules, without a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "samples", "broken", "outcome"),
    [
        ([], 4, False, "ok"),
        (["reward_error"] * 3, 4, False, "ok"),
        (["reward_error"] * 4, 4, False, "reward_error"),
        (["timeout"] * 4, 4, False, "timeout"),
        (["timeout", "timeout", "timeout", "reward_error"], 4, False, "reward_error"),
        (["oom"], 4, False, "oom"),
        (["oom"], 4, True, "oom"),
        (["reward_error"] * 4, 4, True, "nonfinite"),
        ([], 0, False, "ok"),
    ],
)
def test_outcome_of_a_batch(kinds: list[Any], samples: int, broken: bool, outcome: str) -> None:
    rows = [Trajectory([1], [2], [True], None, [0.0], finish_reason="error" if broken else "stop")]
    failures = [Failure(0, kind, "why") for kind in kinds]
    assert Rollout({0: rows}, samples={0: samples}, failures={0: failures}).outcome(0) == outcome


def test_memory_is_no_fault_of_a_grader() -> None:
    check_error_rate(4, [Failure(0, "oom", "full")] * 4, 0.0, episodes=False)


def test_the_error_of_the_only_episode_is_told_as_it_is() -> None:
    with pytest.raises(EnvError, match=r"^the agent program raised$"):
        check_error_rate(1, [Failure(0, "reward_error", "the agent program raised")], 0.0, episodes=True)


def test_places_of_an_exam_that_count_for_nobody() -> None:
    assert lost_places([{1: "a"}, {2: "b"}, {}], 4, episodes=True) == {1, 2}
    assert lost_places([{0: "a", 1: "a", 2: "a"}, {2: "b"}], 4, episodes=True) == {2}
    with pytest.raises(EnvError, match=r"3 of 4 exam episodes.*: a"):
        lost_places([{0: "a"}, {1: "b"}, {2: "c"}], 4, episodes=True)
    with pytest.raises(EnvError, match=r"3 of 4 exam episodes.*: a"):
        lost_places([{0: "a", 1: "b", 2: "c"}], 4, episodes=True)
    with pytest.raises(RewardError, match=r"3 of 4 .*exam.*: a"):
        lost_places([{0: "a"}, {1: "b"}, {2: "c"}], 4, episodes=False)


PRINTS = """
import sys
from agilerl.rewards import IsolatedGrader, ThreadedGrader, grade
from tests.faults.graders import loud, talkative, talkative_later

graders = {{"call": talkative, "await": talkative_later, "error": loud, "threads": ThreadedGrader(talkative)}}
grader = graders.get("{0}") or IsolatedGrader(talkative)
for _ in range(5):
    grade(grader, ["x"] * 20, [{{}}] * 20)
    print("progress")
print(type(sys.stdout).__name__)
"""


@pytest.mark.processes
@pytest.mark.parametrize("way", ["call", "await", "error", "threads", "isolated"])
def test_what_graders_print_is_bounded(way: str) -> None:
    """They print 6 MiB; the rest of the program prints as before."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTS.format(way)], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1000:]
    written = done.stdout + done.stderr
    assert 2**20 <= len(written) < 2**20 + 1000
    assert written.count("graders have printed 1,048,576 characters; what else") == 1
    assert done.stdout.count("progress") == 5
    assert done.stdout.endswith("progress\nTextIOWrapper\n")


class Outcome(BaseException):
    """What test frameworks raise."""


@pytest.mark.parametrize("kind", [GeneratorExit, asyncio.CancelledError, Outcome, SystemExit])
def test_what_is_no_exception_is_a_failure_of_one_completion(kind: type[BaseException]) -> None:
    def single(completion: str) -> float:
        if completion == "bad":
            raise kind("of mine")
        return 1.0

    async def later(completion: str) -> float:
        return single(completion)

    for grader in (single, later, lambda completions: [single(text) for text in completions]):
        grades = grade(grader, ["good", "bad", "good"], [{"question": "q", "answer": "a"}] * 3)
        assert grades.rewards == [1.0, None, 1.0]
        assert f"{kind.__name__}: of mine" in str(grades.reasons[1])
    with pytest.raises(RuntimeError, match=kind.__name__), contained():
        raise kind("of mine")


def test_ctrl_c_in_a_grader_stops_the_run() -> None:
    def interrupted(completion: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade(interrupted, ["a"], [{"question": "q", "answer": "a"}])
