"""A population on 1, 2 and 4 islands is one and the same: every file that a run leaves, to the byte."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.distributed.topology import Exchange, Topology
from agilerl.errors import ConfigError
from agilerl.processes import Processes
from agilerl.training.setup import build
from tests.distributed.together import Job, run_jobs
from tests.faults.evidence import SHORT, differences, evidence
from tests.faults.pieces import begin, go_on, stop_after, whole
from tests.faults.test_resume_kinds import KINDS, TINY
from tests.training.small_runs import lines

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

FIVE = (
    *("environment.data_batch_size_per_gpu=2", "environment.eval_prompts=6", "environment.test_prompts=4"),
    *("training.pop_size=5", "training.max_steps=240", "training.seed=2", "algorithm.lr=1e-3"),
    *("mutation.rl_hp_selection={lr: {}}", "mutation.rank_range=[2, 16]", "mutation.mutate_elite=true"),
    "mutation.crossover=1.0",
    "mutation.probabilities={arch_mut: 1.0, rl_hp_mut: 0.5, params_mut: 0.5}",
    "selection_strategy={name: tournament, tournament_size: 2, elitism: false}",
)
"""6 iterations of 5 agents in 3 generations, where agents are born, die, move, and their ranks differ."""

FAILING = '''
def picky(completion):
    """Fails on some answers, always on the same."""
    if sum(map(ord, completion)) % 9 == 3:
        raise ValueError("cannot grade this")
    return float("e" in completion) + len(completion) / 100
'''

PICKY = "a grader that fails"
FEW = ("PPO", "truncation", "objectives", "episodes", PICKY)
OTHERS = tuple(name for name in KINDS if name not in (*FEW, "knockout", "halving"))
"""Those that shrink the population to one agent need one island."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("islands")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    return evidence(whole(folder / "one", *FIVE))


def test_agents_move_and_ranks_change_in_this_run(expected: dict[str, str], folder: Path) -> None:
    events = lines(folder / "one" / "lineage.jsonl")
    assert sum(line["event"] == "birth" for line in events) > 7
    assert sum("mate" in line for line in events) > 2
    assert {line["kind"] for line in events if line["event"] == "mutation"} == {"rank", "parameters", "hyperparameters"}


@pytest.fixture(scope="module")
def on_two(expected: dict[str, str], folder: Path) -> Path:
    """The same run on two islands; and one that they leave half-way."""
    overrides = (*SHORT, *FIVE)
    run_jobs(2, Job(folder / "two", overrides), Job(folder / "left", overrides, leave_after=5))
    return folder


@pytest.mark.processes
def test_two_islands_leave_the_same_files(on_two: Path, expected: dict[str, str]) -> None:
    assert differences(evidence(on_two / "two"), expected) == []


@pytest.mark.processes
def test_one_process_goes_on_with_what_two_have_left(on_two: Path, expected: dict[str, str]) -> None:
    copy = Path(shutil.copytree(on_two / "left", on_two / "left_to_one"))
    assert not (copy / "summary.json").exists()
    for _ in go_on(copy):
        pass
    assert differences(evidence(copy), expected) == []


@pytest.mark.processes
def test_four_islands_and_what_they_go_on_with(on_two: Path, expected: dict[str, str], folder: Path) -> None:
    """Four do it all; and go on with what two, and what one has left."""
    overrides = (*SHORT, *FIVE)
    stop_after(begin(folder / "left_by_one", *FIVE), 11)
    run_jobs(
        4,
        Job(folder / "four", overrides),
        Job(folder / "left", overrides, goes_on=True),
        Job(folder / "left_by_one", overrides, goes_on=True),
    )
    for name in ("four", "left", "left_by_one"):
        assert differences(evidence(folder / name), expected) == [], name


@pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
@pytest.mark.processes
def test_every_kind_of_agent_and_source(names: Sequence[str], folder: Path) -> None:
    """PPO with its critic, mixed algorithms, own references, dynamic sampling, data, games, and a grader that fails."""
    grader = folder / "picky.py"
    grader.write_text(FAILING)
    graders = f"environment.graders=[{{name: '{grader}:picky'}}]"
    own = (graders, "training.pop_size=3", "environment.eval_prompts=16")
    kinds = {name: own if name == PICKY else KINDS[name] for name in names}
    jobs = []
    for number, (_, kind) in enumerate(kinds.items()):
        overrides = (*SHORT, *TINY, *kind)
        jobs.append(Job(folder / f"{names[0]}_{number}", overrides, allow_code=True))
    run_jobs(2, *jobs)
    for number, (name, kind) in enumerate(kinds.items()):
        alone = folder / f"{names[0]}_{number}_alone"
        for _ in begin(alone, *TINY, *kind, allow_code=True):
            pass
        found = evidence(folder / f"{names[0]}_{number}")
        assert differences(found, evidence(alone)) == [], name
        assert any(path.startswith("checkpoints/") for path in found), name


@pytest.mark.parametrize("name", ["knockout", "halving"])
def test_a_population_that_shrinks_below_the_islands_is_refused_at_the_start(name: str) -> None:
    two = Topology(peers=Exchange(Processes(size=2)))
    settings = [*SHORT, *TINY, "training.pop_size=4", f"selection_strategy.name={name}"]
    with pytest.raises(ConfigError, match="fewer than the 2 islands"):
        build(load_manifest(None, settings), topology=two)


def test_agents_of_two_islands_share_nothing() -> None:
    two = Topology(peers=Exchange(Processes(size=2)))
    with pytest.raises(ConfigError, match="sharing is for agents of one island, found 2 islands"):
        build(load_manifest(None, [*SHORT, *TINY, "sharing.distillation=0.1"]), topology=two)


@pytest.mark.processes
def test_the_clock_of_one_decides_for_all(folder: Path) -> None:
    """With ``max_seconds`` both stop at the same place: else they would wait for each other for ever."""
    run_jobs(2, Job(folder / "hurried", (*SHORT, *TINY, "training.max_steps=100000", "training.max_seconds=3")))
    metrics = lines(folder / "hurried" / "metrics.jsonl")
    steps = [line["step"] for line in metrics if line["kind"] == "train"]
    assert len(steps) == 2 * max(steps) > 0
    assert (folder / "hurried" / "summary.json").exists()


@pytest.mark.processes
def test_islands_of_two_processes_each(folder: Path) -> None:
    """A table of processes: the agents of an island in two of them, and the islands talk column by column."""
    overrides = (*SHORT, *TINY, "training.pop_size=3", "training.max_steps=96", "mutation.mutate_elite=true")
    jobs = Job(folder / "table", overrides, leave_after=3), Job(folder / "table", overrides, goes_on=True)
    run_jobs(4, *jobs, processes_per_island=2)
    for _ in begin(folder / "no_table", *overrides):
        pass
    found, expected = evidence(folder / "table"), evidence(folder / "no_table")
    assert set(found) == set(expected)
    births = [
        [(line["agent"], line["parent"]) for line in lines(folder / name / "lineage.jsonl") if line["event"] == "birth"]
        for name in ("table", "no_table")
    ]
    assert births[0] == births[1]
