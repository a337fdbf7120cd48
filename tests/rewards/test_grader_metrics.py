"""Graders in training: what they are given, what is logged, what exams measure."""

from collections.abc import Mapping
from typing import Any

import pytest

from agilerl.algorithms import GRPO
from agilerl.data import Trajectory
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.errors import RewardError
from agilerl.models.base import load_tokenizer
from agilerl.population import Population
from agilerl.rewards import BaseGrader, CombinedGrader, Overlong
from agilerl.rollouts.collect import grader_metrics
from agilerl.runtime import Runtime
from tests.probes import ConstantTarget
from tests.tiny_models import qwen2, random_model


def row(reward: float, failed: tuple[str, ...] = (), **scores: float | None) -> Trajectory:
    return Trajectory([1], [2], [True], [0.0], [reward], scores=scores, failed=failed)


def test_metrics_are_over_what_applies_and_failures_are_counted():
    nan = float("nan")
    rows = [row(1.0, a=1.0, b=None), row(nan, ("b",), a=0.0, b=None), row(3.0, a=2.0, b=None)]
    assert grader_metrics(rows) == {
        "rewards/a/mean": 1.0,
        "rewards/a/std": 1.0,
        "reward_errors/a": 0.0,
        "reward_errors/b": 1.0,
    }
    assert grader_metrics([row(1.0)]) == {}


class Seen(BaseGrader):
    """Fails on even numbers of calls' places; remembers what it was given."""

    name = "seen"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def open(self) -> None:
        self.log.append("open")

    def release(self) -> None:
        self.log.append("release")

    def __call__(self, completions: list[str], **columns: list[Any]) -> list[float | Exception]:
        self.rows += [{key: column[n] for key, column in columns.items()} for n in range(len(completions))]
        return [ValueError("every other") if n % 2 else 0.25 for n in range(len(completions))]


def population_on(task: Any) -> Population:
    tokenizer = load_tokenizer("embedded")
    config = qwen2(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    runtime = Runtime.for_model(random_model(config, scale=0.5), tokenizer=tokenizer, seed=1)
    agents = GRPO.population(2, runtime=runtime, group_size=4, batch_size=16, beta=0.0, max_output_tokens=3)
    return Population(agents, task, prompts_per_step=4, eval_max_new_tokens=2)


@pytest.mark.model
def test_a_population_logs_every_grader_and_examines_by_the_fitness_grader():
    probe, seen = ConstantTarget(), Seen()
    grader = CombinedGrader([(TaskGrader(probe), 2.0), (seen, 0.5), (Overlong(3, 2), 0.1)])
    task = GradedTask(probe, grader, fitness_grader=TaskGrader(probe))
    population = population_on(task)
    rollout = population.rollout()
    metrics = population.learn(rollout)
    for index, trajectories in rollout.trajectories.items():
        own = metrics[index]
        assert own["reward_errors/seen"] == 8.0
        assert own["reward_errors/reward"] == own["reward_errors/overlong"] == 0.0
        assert (own["rewards/seen/mean"], own["rewards/seen/std"]) == (0.25, 0.0)
        lengths = [-min(1.0, (len(t.token_ids) - 1) / 2) for t in trajectories]
        assert own["rewards/overlong/mean"] == pytest.approx(sum(lengths) / len(lengths))
        for number, t in enumerate(trajectories):
            assert set(t.scores) == {"reward", "seen", "overlong"}
            expected = 2.0 * t.scores["reward"] + 0.125 + 0.1 * t.scores["overlong"]
            assert t.rewards == pytest.approx([float("nan") if number % 2 else expected], nan_ok=True)
    graded = [t.rewards[0] for t in rollout.trajectories[0][::2]]
    assert metrics[0]["reward"] == pytest.approx(sum(graded) / len(graded), abs=1e-6), "no score of 0 for a failure"
    given = seen.rows[0]
    first = rollout.trajectories[0][0]
    assert given["completion_ids"] == first.token_ids
    assert given["question"] == given["prompts"] == first.row["question"]

    calls = len(seen.rows)
    exam = population.evaluate()[0]
    assert len(seen.rows) == calls, "the exam asks the fitness grader alone"
    assert exam.is_finite
    assert set(exam.scores) <= {0.0, 1.0}


@pytest.mark.model
def test_a_task_without_parts_logs_its_one_grader():
    population = population_on(ConstantTarget())
    metrics = population.learn(population.rollout())[0]
    assert metrics["rewards/reward/mean"] == pytest.approx(metrics["reward"], abs=1e-6)
    assert metrics["rewards/reward/std"] == pytest.approx(metrics["reward_std"], abs=1e-6)
    assert metrics["reward_errors/reward"] == 0.0


QUESTIONS = [{"question": str(n), "answer": str(n)} for n in range(4)]


def right_or_refuse(completion: str, answer: str, question: str) -> float:
    if completion == "?":
        raise ValueError("cannot read it")
    return float(completion == answer)


def test_a_dataset_task_masks_what_its_reward_function_fails_on():
    task = DatasetTask(QUESTIONS, QUESTIONS, reward_fn=right_or_refuse)
    grades = task.grade(["0", "?", "1"], QUESTIONS[:3])
    assert grades.rewards == task.rewards(["0", "?", "1"], QUESTIONS[:3]) == [1.0, None, 0.0]
    assert grades.errors == {"right_or_refuse": 1}
    with pytest.raises(RewardError, match="failed on all 2 completions"):
        task.grade(["?", "?"], QUESTIONS[:2])


def test_tasks_set_their_graders_up_and_close_them():
    ours = Seen()
    for task in (
        DatasetTask(QUESTIONS, QUESTIONS, reward_fn=ours),
        GradedTask(ConstantTarget(), ours),
        GradedTask(ConstantTarget(), right_or_refuse, fitness_grader=CombinedGrader([ours])),
    ):
        ours.log.clear()
        task.prepare()
        assert ours.log == ["open"]
        task.close()
        assert ours.log == ["open", "release"]


def test_a_graded_task_is_its_task_otherwise():
    probe = ConstantTarget()
    task = GradedTask(probe, lambda completion: 0.5)
    assert task.row("train", 3) == probe.row("train", 3)
    assert (task.name, task.exam_prompts, task.test_prompts) == (probe.name, 10, 10)
    assert task.messages(probe.row("exam", 1)) == probe.messages(probe.row("exam", 1))
    assert task.reward("3", probe.row("exam", 1)) == 0.5
    assert task.grade_exam(["3"], [probe.row("exam", 1)]).rewards == [0.5], "without a fitness grader: as in training"


def test_the_row_reaches_the_tasks_own_reward():
    class Metadata(ConstantTarget):
        def reward(self, completion: str, row: Mapping[str, Any]) -> float:
            return float(row["metadata"]["n"])

    task = Metadata()
    grader = CombinedGrader([TaskGrader(task)])
    assert grader.grade(["x"], [{"question": "1", "answer": "1", "metadata": {"n": 7}}]).rewards == [7.0]
