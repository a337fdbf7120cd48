"""What was closed, finished, cleaned up or deleted says so in an error of the project, and closing twice is nothing."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agilerl
from agilerl import Population
from agilerl.config.manifest import load_manifest
from agilerl.errors import AgileRLError, CheckpointError, ConfigError, EngineError
from agilerl.models.base import load_tokenizer
from agilerl.rollouts.teacher import TeacherEndpoint
from agilerl.runs.directory import RunDirectory
from agilerl.training.events import IterationDone, RunStarted
from agilerl.training.records import RunWriter
from agilerl.training.run import resume, train
from agilerl.training.saved import open_run
from agilerl.training.setup import Session, build
from agilerl.training.trackers import Trackers
from agilerl.training.trainer import LocalTrainer
from tests.faults.small_populations import make_population
from tests.faults.unfinished import Unfinished, change_json, leave_unfinished
from tests.training.small_runs import SMALL

pytestmark = pytest.mark.model


def test_a_population_takes_no_agent_that_was_cleaned_up() -> None:
    population = make_population(2)
    rollout = population.rollout()
    population.agents[1].clean_up()
    uses: list[Callable[[], Any]] = [
        population.rollout,
        population.evaluate,
        lambda: population.learn(rollout),
        lambda: Population(population.agents, population.task),
    ]
    for use in uses:
        with pytest.raises(EngineError, match="cleaned up"):
            use()


def test_a_closed_teacher() -> None:
    teacher = TeacherEndpoint("http://127.0.0.1:9", "m")
    teacher.close()
    teacher.close()
    with pytest.raises(EngineError, match="closed"):
        teacher.check(load_tokenizer("embedded"))


class Seen:
    finished = 0

    def log(self, values: Mapping[str, Any], step: int) -> None:
        assert not self.finished

    def finish(self) -> None:
        self.finished += 1


def test_finished_trackers() -> None:
    seen = Seen()
    trackers = Trackers([seen], None, {})
    trackers(RunStarted(Path(), 1, 1, {0: {"lr": 1.0}}))
    trackers.finish()
    trackers.finish()
    assert seen.finished == 1
    with pytest.raises(ConfigError, match="finished"):
        trackers(RunStarted(Path(), 1, 1, {0: {"lr": 1.0}}))


def test_a_closed_directory(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"a": 1}, 1)
    writer = RunWriter(run)
    writer.close()
    writer.close()
    run.close()
    run.close()
    uses: list[Callable[[], Any]] = [
        lambda: RunWriter(run),
        lambda: writer.elite(None),  # type: ignore[arg-type]
        lambda: writer.metrics.write({}),
        lambda: writer.journal.append({}),
        lambda: run.finish({}),
    ]
    for use in uses:
        with pytest.raises(CheckpointError, match="closed"):
            use()
    assert not run.elite.exists()


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Unfinished:
    return leave_unfinished(tmp_path_factory.mktemp("unfinished") / "run")


def test_a_session_is_of_one_run(unfinished: Unfinished, tmp_path: Path) -> None:
    """Its agents had learned, and the second run's files said that they were founders."""

    def begin(session: Session, out: Path) -> None:
        with closing(train(session, out, command=["test"])) as events:
            next(event for event in events if isinstance(event, IterationDone))

    with pytest.raises(ConfigError, match="session"):
        begin(unfinished.session, tmp_path / "other")
    root = unfinished.copy(tmp_path / "run")
    run = RunDirectory.open(root)
    with pytest.raises(ConfigError, match="session"):
        next(resume(unfinished.session, run))
    assert not (tmp_path / "other").exists()
    fresh = build(load_manifest(None, [*SMALL, "training.pop_size=2"]))
    with pytest.raises(CheckpointError):
        begin(fresh, root)  # there is a run already, and nothing has begun
    begin(fresh, tmp_path / "third")


def test_a_run_that_cannot_be_resumed_is_given_back(unfinished: Unfinished, tmp_path: Path) -> None:
    root = unfinished.copy(tmp_path / "run")
    for agent in (root / "checkpoints").glob("*/agent_*/agent.json"):
        change_json(agent, lambda values: values["loaded"].update(weights="float32:other"))
    shutil.rmtree(root / "checkpoints" / "000001")
    (root / "checkpoints" / "000002" / "MANIFEST.json").unlink()
    from tests.faults.unfinished import sealed

    sealed(root / "checkpoints" / "000002")
    trainer = LocalTrainer("GRPO", "reasoning_gym:gcd", resume_from_checkpoint=root)
    with pytest.raises(CheckpointError, match="weights"):
        trainer.train(verbose=False)
    open_run(root, report=print).run.close()  # another may have it


def test_a_run_that_was_deleted(unfinished: Unfinished, tmp_path: Path) -> None:
    run = agilerl.Run(unfinished.copy(tmp_path / "run"))
    assert not run.is_finished
    shutil.rmtree(run.path)
    uses: dict[str, Callable[[], Any]] = {
        name: lambda n=name: getattr(run, n)  # type: ignore[misc]
        for name in ("is_finished", "summary", "test", "adapter", "elite", "lineage", "metrics")
    }
    uses |= {"schedule": run.schedule, "report": run.report, "resume": run.resume, "repr": lambda: repr(run)}
    for use in uses.values():
        with pytest.raises(AgileRLError, match=r"no longer exists|nothing"):
            use()
