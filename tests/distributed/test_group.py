"""A run on 1, 2, 3 and 4 processes is one and the same: every file that it leaves, to the byte."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.training.run import train
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
    "mutation.probabilities={arch_mut: 1.0, rl_hp_mut: 0.5}",
    "selection_strategy={name: tournament, tournament_size: 2, elitism: false}",
)
"""6 iterations of 5 agents in 3 generations, where agents are born and die, and their ranks differ."""
BY_ROWS = "algorithm.micro_batch_size_per_gpu=2"
"""With it, rows that processes divide give the bits of one process."""
SEARCH = (
    *("environment.data_batch_size_per_gpu=2", "environment.eval_prompts=6", "environment.test_prompts=4"),
    *("training.pop_size=4", "training.max_steps=112", "training.evo_steps=2", "training.preflight=off"),
    *("algorithm.group_size=4", "algorithm.batch_size=8", "algorithm.lr=1e-3", "network.lora_config.r=4", BY_ROWS),
)
"""The default search: two iterations of four agents, then of one."""

FAILING = '''
def picky(completion):
    """Fails on some answers, always on the same."""
    if sum(map(ord, completion)) % 9 == 3:
        raise ValueError("cannot grade this")
    return float("e" in completion) + len(completion) / 100
'''

BRINGS_BACK = """
from agilerl.hpo.selection import Birth, Plan


class BringsBack:
    \"\"\"The agent of the best exam so far, in the first place, for the worst one.\"\"\"

    def plan(self, fitness, generation, seed, next_index, standing):
        *stay, worst = sorted(fitness, key=lambda index: (-fitness[index].mean, index))
        birth = Birth(next_index, standing.best.agent, from_best=True)
        return Plan(generation, stay[0], (next_index, *stay), (birth,), (worst,))
"""

EACH_TIME = ("training.evo_steps=1",)
PICKY, BACK = "a grader that fails", "the best exam comes back"
FEW = ("PPO", "DPO", "episodes", "knockout", PICKY, BACK)
OTHERS = tuple(name for name in KINDS if name not in FEW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="module")
def search(folder: Path) -> dict[str, str]:
    for _ in train(build(load_manifest(None, [*SEARCH])), folder / "search"):
        pass
    trained = [line for line in lines(folder / "search" / "metrics.jsonl") if line["kind"] == "train"]
    agents = [len([line for line in trained if line["step"] == step]) for step in (1, 2, 3)]
    assert agents == [4, 4, 1]
    return evidence(folder / "search")


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.processes
def test_the_default_search(size: int, search: dict[str, str], folder: Path) -> None:
    """Whole agents while there are enough, then the rows of the one that is left."""
    run_jobs(size, Job(folder / f"search_{size}", SEARCH))
    assert differences(evidence(folder / f"search_{size}"), search) == []


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    found = evidence(whole(folder / "one", *FIVE))
    events = lines(folder / "one" / "lineage.jsonl")
    assert sum(line["event"] == "birth" for line in events) > 7
    assert {line["kind"] for line in events if line["event"] == "mutation"} == {"rank", "hyperparameters"}
    return found


@pytest.fixture(scope="module")
def on_two(expected: dict[str, str], folder: Path) -> Path:
    """The same run on two processes; and one that they leave half-way."""
    overrides = (*SHORT, *FIVE)
    run_jobs(2, Job(folder / "two", overrides), Job(folder / "left", overrides, leave_after=5))
    return folder


@pytest.mark.processes
def test_two_processes_leave_the_same_files(on_two: Path, expected: dict[str, str]) -> None:
    assert differences(evidence(on_two / "two"), expected) == []


@pytest.mark.processes
def test_one_process_goes_on_with_what_two_have_left(on_two: Path, expected: dict[str, str]) -> None:
    copy = Path(shutil.copytree(on_two / "left", on_two / "left_to_one"))
    assert not (copy / "summary.json").exists()
    for _ in go_on(copy):
        pass
    assert differences(evidence(copy), expected) == []


@pytest.mark.processes
def test_four_processes_and_what_they_go_on_with(on_two: Path, expected: dict[str, str], folder: Path) -> None:
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
    """PPO with its critic, mixed algorithms, own references, dynamic sampling, data, games, and code of users."""
    grader, strategy = folder / "picky.py", folder / "back.py"
    grader.write_text(FAILING)
    strategy.write_text(BRINGS_BACK)
    own = {
        PICKY: (f"environment.graders=[{{name: '{grader}:picky'}}]", "environment.eval_prompts=16"),
        BACK: (
            f"selection_strategy={{name: '{strategy}:BringsBack'}}",
            "training.max_steps=96",
            "training.evo_steps=1",
        ),
    }
    kinds = {name: (*KINDS[name], BY_ROWS) for name in names if name in KINDS}
    kinds |= {name: (*settings, "training.pop_size=3") for name, settings in own.items() if name in names}
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
    if BACK in names:
        events = lines(folder / f"{names[0]}_{names.index(BACK)}" / "lineage.jsonl")
        assert any(line.get("from_best") for line in events if line["event"] == "birth")


@pytest.mark.processes
def test_the_clock_of_one_decides_for_all(folder: Path) -> None:
    """With ``max_seconds`` both stop at the same place: else they would wait for each other for ever."""
    run_jobs(2, Job(folder / "hurried", (*SHORT, *TINY, "training.max_steps=100000", "training.max_seconds=3")))
    metrics = lines(folder / "hurried" / "metrics.jsonl")
    steps = [line["step"] for line in metrics if line["kind"] == "train"]
    assert len(steps) == 2 * max(steps) > 0
    assert (folder / "hurried" / "summary.json").exists()
