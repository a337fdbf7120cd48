"""Grading, and slow environments, work while other rows decode: with the results that they have when they wait."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from agilerl.data import Completion, Trajectory
from agilerl.envs.answer_format import AnswerFormat, AnswerFormatTask
from agilerl.envs.core import Row, Split, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.errors import EngineError, RewardError
from agilerl.population import Population
from agilerl.rewards import (
    CombinedGrader,
    Grades,
    IsolatedGrader,
    JudgeGrader,
    Repetition,
    SandboxGrader,
    ThreadedGrader,
)
from agilerl.rewards.waiting import waiting_parts
from agilerl.rollouts import GenerationRequest
from agilerl.rollouts.engine import OnCompletion, RolloutEngine
from tests.envs.scripted import Echo
from tests.faults.graders import odd_letters
from tests.faults.small_populations import Parity, iterate, make_population
from tests.rewards.chat_server import ChatServer, chat, serve
from tests.test_multi_turn import make_population as make_players

pytestmark = pytest.mark.model

LONG = 10.0
"""Seconds that nothing here takes, unless it waits for what never comes."""
TOKENS = 24


class Silent:
    """An engine that reports no completion before the last one: everything is graded when it has returned."""

    def __init__(self, inner: RolloutEngine) -> None:
        self.inner, self.exact = inner, inner.exact

    def generate(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        return self.inner.generate(requests)


class Questions(Parity):
    """Rows with different columns, and tests for the sandbox in some of them."""

    def row(self, split: Split, index: int) -> Row:
        row: Row = {
            "question": f"{split} {index}",
            "answer": str(index),
            "tests": ["assert True"] if index % 4 == 1 else None,
        }
        return {**row, "hint": "even"} if index % 2 else row


def population_of(grader: Any, size: int = 2, *, early: bool = True, task: Task | None = None) -> Population:
    task = GradedTask(Questions(), grader) if task is None else task
    population = make_population(size, task=task, max_output_tokens=TOKENS)
    if not early:
        population.runtime.engine = Silent(population.runtime.engine)
    return population


def sampled(population: Population) -> dict[int, list[Trajectory]]:
    return population.rollout().trajectories


@contextmanager
def at_each_pass(population: Population, act: Callable[[], None]) -> Iterator[None]:
    """Act whenever the base is about to compute something."""
    handle = population.runtime.base.body.register_forward_pre_hook(lambda *_: act())
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:  # one that nobody waits for may be on its way out
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


def by_length(body: dict[str, Any], number: int) -> tuple[int, str]:
    """Score by the length of the question; refuse some, so that they fail."""
    text = body["messages"][-1]["content"]
    return (400, "no") if len(text) % 7 == 3 else (200, chat(json.dumps({"score": len(text) % 11})))


def judge(server: ChatServer, **settings: Any) -> JudgeGrader:
    defaults: dict[str, Any] = {"base_url": server.url, "api_key_env": None, "first_wait": 0.0, "attempts": 2}
    template = "{{ prompt }} {{ completion }} {{ hint }}"
    return JudgeGrader("m", template=template, **{**defaults, **settings})


# -- the engine reports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"prompts_at_once": 3}, {"max_rows": 5}])
def test_each_completion_is_reported_once_when_it_ends(settings: dict[str, int]) -> None:
    population = population_of(Repetition())
    engine = population.runtime.engine
    for name, value in settings.items():
        setattr(engine, name, value)
    asks = [ask for agent in population.agents for ask in population._asks(agent, 0, 4)]
    requests = [ask.generation(ask.place.prompt_ids, ask.samples) for ask in asks]
    reported: dict[tuple[int, int], Completion] = {}
    passes: list[int] = []

    def report(place: int, sample: int, completion: Completion) -> None:
        assert (place, sample) not in reported
        reported[place, sample] = completion
        passes.append(count[0])

    count = [0]
    with at_each_pass(population, lambda: count.__setitem__(0, count[0] + 1)):
        groups = engine.generate(requests, report)
    assert {(k, s): c for k, group in enumerate(groups) for s, c in enumerate(group)} == reported
    assert groups == engine.generate(requests)
    # A row ends in the pass of its last token.
    assert len(set(passes)) > 5
    assert passes[0] < count[0] - 5


def test_graders_that_begin_early_read_answers_only_and_are_asked_once() -> None:
    asked: list[str] = []

    def count(completion: str) -> float:
        asked.append(completion)
        return 1.0

    task = AnswerFormatTask(GradedTask(Questions(), ThreadedGrader(count, workers=1)), "after", "a")
    found = [t for each in sampled(population_of(None, task=task)).values() for t in each]
    answers = [AnswerFormat("after", "a").find(t.text) or "" for t in found]
    assert any(answers)
    assert sorted(asked) == sorted(answers)


def test_what_had_ended_before_memory_ran_out_is_neither_decoded_nor_reported_again() -> None:
    population = population_of(Repetition())
    asks = [ask for agent in population.agents for ask in population._asks(agent, 0, 4)]
    requests = [ask.generation(ask.place.prompt_ids, ask.samples) for ask in asks]
    expected = population.runtime.engine.generate(requests)
    reported: dict[tuple[int, int], Completion] = {}
    at_failure: list[int] = []

    def report(place: int, sample: int, completion: Completion) -> None:
        assert (place, sample) not in reported
        reported[place, sample] = completion

    def fail() -> None:
        if len(reported) >= 5 and not at_failure:
            at_failure.append(len(reported))
            raise torch.OutOfMemoryError("CUDA out of memory")

    with at_each_pass(population, fail):
        groups = population.runtime.engine.generate(requests, report)
    assert at_failure[0] < 64
    assert groups == expected
    assert {(k, s): c for k, group in enumerate(groups) for s, c in enumerate(group)} == reported
    assert population.runtime.limits.decode_rows == 32


# -- graders begin early ----------------------------------------------------------------------------------------------


class Decoding:
    """Lets a grader wait until the base has gone on since it was called."""

    def __init__(self) -> None:
        self.asked, self.went_on = threading.Event(), threading.Event()

    def passed(self) -> None:
        if self.asked.is_set():
            self.went_on.set()

    def wait(self) -> None:
        self.asked.set()
        if not self.went_on.wait(LONG):
            raise RewardError("nothing was decoded while this grader waited")


def test_a_grader_works_while_other_rows_decode() -> None:
    decoding = Decoding()

    def patient(completion: str) -> float:
        decoding.wait()
        return float(len(completion))

    population = population_of(ThreadedGrader(patient, workers=2))
    with at_each_pass(population, decoding.passed):
        rollout = population.rollout()
    assert rollout.failures == {}
    assert all(t.rewards == [float(len(t.text))] for own in rollout.trajectories.values() for t in own)


def test_one_grader_of_several_works_early_and_in_exams_too() -> None:
    decoding = Decoding()

    def patient(completion: str) -> float:
        decoding.wait()
        return 1.0

    combined = CombinedGrader({"plain": Repetition(), "slow": ThreadedGrader(patient)})
    task = GradedTask(Questions(), Repetition(), fitness_grader=combined)
    population = population_of(None, task=task)
    population.runtime.engine.prompts_at_once = 5  # greedy rows of one batch may all end together
    population.rollout()
    assert not decoding.asked.is_set()
    with at_each_pass(population, decoding.passed):
        assert all(fitness.is_finite for fitness in population.evaluate().values())
    assert decoding.went_on.is_set()


@pytest.mark.processes
def test_trajectories_and_weights_are_those_of_grading_at_the_end() -> None:
    def awkward(completion: str, answer: str) -> float:
        if len(completion) % 5 == 1:
            raise TimeoutError("too late")
        if len(completion) % 5 == 2:
            raise ValueError(completion)
        return len(completion) / 10

    def seen(server: ChatServer, *, early: bool) -> Any:
        parts = {
            "judge": judge(server),
            "own": TaskGrader(Questions()),
            "code": (SandboxGrader(), 0.5),
            "isolated": (IsolatedGrader(odd_letters, workers=2), 0.25),
            "threads": ThreadedGrader(awkward, workers=3),
        }
        grader = CombinedGrader(parts)
        population = population_of(grader, early=early)
        try:
            rollout = population.rollout()
            whole = iterate(population, 1)
            return rollout.trajectories, rollout.failures, rollout.dropped, whole, population.evaluate()
        finally:
            population.task.close()

    with serve(by_length) as server:
        waited = seen(server, early=False)
        requests, asked = len(server.requests), sorted(map(str, server.requests))
        overlapped = seen(server, early=True)
    assert str(overlapped[0]) == str(waited[0])  # NaN, where a grade is missing, does not equal itself
    assert overlapped[1:3] == waited[1:3]
    assert str(overlapped[3]) == str(waited[3])
    assert str(overlapped[4]) == str(waited[4])
    kinds = {failure.kind for own in overlapped[1].values() for failure in own}
    assert kinds == {"timeout", "reward_error"}
    # No question was asked that would not have been asked at the end, and none twice.
    assert sorted(map(str, server.requests[requests:])) == asked


@pytest.mark.parametrize("workers", [1, 4])
def test_one_thread_keeps_the_order_of_the_rows(workers: int) -> None:
    def texts(*, early: bool) -> tuple[list[str], list[str]]:
        called: list[str] = []

        def remembers(completion: str, question: str) -> float:
            called.append(f"{question} {completion}")
            return float(len(called))

        population = population_of(ThreadedGrader(remembers, workers=workers), early=early)
        rows = [t for own in sampled(population).values() for t in own]
        if workers == 1:
            assert [t.rewards for t in rows] == [[float(n + 1)] for n in range(len(rows))]
        return called, [f"{t.row['question']} {t.text}" for t in rows]

    called, rows = texts(early=True)
    assert sorted(called) == sorted(rows)
    assert (called == rows) is (workers == 1)
    assert workers > 1 or called == texts(early=False)[0]


def test_memory_that_runs_out_costs_no_row_a_second_grade() -> None:
    def result(*, fails: bool) -> tuple[Any, list[str]]:
        called: list[str] = []

        def remembers(completion: str, question: str) -> float:
            called.append(f"{question} {completion}")
            return float(len(completion))

        population = population_of(ThreadedGrader(remembers))
        failed: list[int] = []

        def fail() -> None:
            if fails and called and not failed:
                failed.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory")

        with at_each_pass(population, fail):
            found = sampled(population)
        assert failed == [1] * fails
        return found, sorted(called)

    assert result(fails=True) == result(fails=False)


def test_a_grader_that_fails_everywhere_ends_the_rollout_as_it_does_at_the_end() -> None:
    def broken(completion: str) -> float:
        raise ZeroDivisionError("no denominator")

    messages = []
    for grader, early in ((ThreadedGrader(broken), True), (ThreadedGrader(broken), False), (broken, True)):
        with pytest.raises(RewardError, match="no denominator") as error:
            population_of(grader, early=early).rollout()
        messages.append(str(error.value))
    assert len(set(messages)) == 1


def test_a_grader_that_cannot_be_set_up_fails_when_it_is_called() -> None:
    grader = JudgeGrader("m", base_url="http://127.0.0.1:9/v1", api_key_env="NOBODY_SETS_THIS")
    messages = []
    for early in (True, False):
        with pytest.raises(RewardError, match="NOBODY_SETS_THIS") as error:
            population_of(grader, early=early).rollout()
        messages.append(str(error.value))
    assert messages[0] == messages[1]


class Thinking(JudgeGrader):
    """Shows the judge a part of a completion only."""

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[Any]:
        return super().__call__(prompts, [text[:2] for text in completions], **columns)


class Spaced(GradedTask):
    """Changes the completions before they are graded."""

    def grade(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Grades:
        return super().grade([f" {text}" for text in completions], rows)


def test_who_grades_in_another_way_is_not_asked_what_will_not_count() -> None:
    settings = {"base_url": "http://127.0.0.1:9/v1", "api_key_env": None}
    plain, own = JudgeGrader("m", **settings), Thinking("m", **settings)  # type: ignore[arg-type]
    assert waiting_parts(CombinedGrader({"a": plain, "b": (own, 2.0), "c": len})) == [plain]
    with serve(lambda body, number: (200, chat('{"score": 5}'))) as server:
        grader = judge(server)
        task = Spaced(Questions(), grader)
        rows = [t for own_rows in sampled(population_of(None, task=task)).values() for t in own_rows]
    asked = {body["messages"][-1]["content"] for body in server.requests}
    assert asked == {f"{t.row['question']}  {t.text} {t.row.get('hint', '')}" for t in rows}
    assert len(server.requests) == len(asked)


# -- nothing stays behind ---------------------------------------------------------------------------------------------


def test_an_error_of_the_engine_waits_for_what_is_being_graded() -> None:
    started, calls, ended = threading.Event(), [], []

    def patient(completion: str) -> float:
        calls.append(completion)
        started.set()
        torch.ones(1)  # grades while the error is on its way
        ended.append(completion)
        return 1.0

    population = population_of(ThreadedGrader(patient, workers=2))

    def fail() -> None:
        if started.is_set():
            raise EngineError("the device was lost")

    with pytest.raises(EngineError, match="the device was lost"), at_each_pass(population, fail):
        population.rollout()
    assert calls == ended
    assert len(calls) < 64
    assert waiting_parts(population.task._grader)[0]._threads is None


def test_an_interruption_does_not_wait() -> None:
    started, release = threading.Event(), threading.Event()

    def stuck(completion: str) -> float:
        started.set()
        assert release.wait(LONG)
        return 1.0

    population = population_of(ThreadedGrader(stuck, workers=2))

    def interrupt() -> None:
        if started.is_set():
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), at_each_pass(population, interrupt):
        population.rollout()
    left = set(threading.enumerate()) - before
    assert left
    assert all(thread.daemon for thread in left)
    release.set()
    for thread in left:
        thread.join()
    # The next collection begins afresh.
    assert all(t.rewards == [1.0] for own in sampled(population).values() for t in own)


# -- environments -----------------------------------------------------------------------------------------------------


class Slow(Echo):
    """Waits in each step until the base has gone on."""

    decoding = Decoding()

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.decoding.wait()
        return super().step(action)


def players(env: type[Echo], *, seconds: float, **settings: Any) -> Population:
    task = EpisodeTask(env, exam_episodes=4, test_episodes=0, **settings)
    population = make_players(task, max_output_tokens=TOKENS)
    population.task.step_seconds = seconds  # as if measured
    return population


def test_a_slow_environment_steps_while_other_episodes_decode() -> None:
    Slow.decoding = Decoding()
    population = players(Slow, seconds=1.0)
    with at_each_pass(population, Slow.decoding.passed):
        rollout = population.rollout()
    assert rollout.failures == {}
    assert sampled(players(Echo, seconds=0.0)) == rollout.trajectories


def test_environments_decide_by_their_last_steps_and_only_with_a_timeout() -> None:
    stepped_in: set[threading.Thread] = set()
    reported: list[bool] = []

    class Watched(Echo):
        def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            stepped_in.add(threading.current_thread())
            return super().step(action)

    class Marked(Silent):
        def generate(self, requests: Any, on_completion: Any = None) -> list[list[Completion]]:
            reported.append(on_completion is not None)
            return self.inner.generate(requests, on_completion)

    found = []
    for seconds, settings in ((1.0, {"step_timeout": None}), (0.0, {}), (1.0, {})):
        population = players(Watched, seconds=seconds, **settings)
        population.runtime.engine = Marked(population.runtime.engine)
        found.append(sampled(population))
        assert set(reported) == {bool(seconds) and not settings}
        assert (stepped_in == {threading.current_thread()}) is bool(settings)
        assert 0 < population.task.step_seconds < 0.1  # measured
        stepped_in.clear()
        reported.clear()
    assert found[0] == found[1] == found[2]


def test_an_environment_that_fails_early_costs_its_own_episode_only() -> None:
    class Broken(Echo):
        def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if self.seed % 3 == 0 and self.turn == 1 and len(action) % 2:
                raise ValueError(action)
            return super().step(action)

    found = []
    for seconds in (1.0, 0.0):
        population = players(Broken, seconds=seconds)
        population.max_error_rate = 1.0
        rollout = population.rollout()
        found.append((str(rollout.trajectories), rollout.failures))
    assert found[0] == found[1]
    assert found[0][1]
