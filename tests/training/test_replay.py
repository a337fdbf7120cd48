"""A schedule that a search found is exported, edited, and trained with: the same values at the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agilerl.cli.app import app
from agilerl.config.manifest import load_manifest
from agilerl.errors import AgileRLError, ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.lineage import birth_record, fitness_record, winning_lineage
from agilerl.hpo.schedule import hyperparameter_schedule, stretched
from agilerl.runs import read_lines
from agilerl.runs.directory import RunDirectory
from agilerl.training.resolved import resolve
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.faults.pieces import go_on, leave_after
from tests.training.small_runs import SIZES, run_here

STEPS = [{"tokens": 0, "value": 1e-3}, {"tokens": 300, "value": 3e-3}, {"tokens": 700, "value": 5e-4}]
FEW = tuple(one for one in SIZES if not one.startswith("training.pop_size"))


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "schedule.yaml"
    path.write_text(yaml.safe_dump({"genes": {"lr": STEPS}, "algorithm": "GRPO", **changes}))
    return path


def rates(root: Path) -> list[tuple[int, float]]:
    """Return the tokens trained on before each iteration that changed the rate, and the rate."""
    return [
        (line["generation"], change["new"])
        for line in read_lines(root / "lineage.jsonl")
        if line["event"] == "mutation"
        for change in line["changes"]
    ]


def test_the_values_change_at_their_tokens_and_the_lineage_says_so(tmp_path: Path) -> None:
    session = build(load_manifest(None, FEW, written(tmp_path)))
    (agent,) = session.population.agents
    assert agent.lr == 1e-3
    seen: list[tuple[int, float]] = []
    learn = session.population.learn

    def noted(rollout: Any) -> Any:
        seen.append((agent.tokens["trained"], agent.lr))
        return learn(rollout)

    session.population.learn = noted  # type: ignore[method-assign]
    for _ in train(session, tmp_path / "run"):
        pass
    assert len({lr for _, lr in seen}) == 3
    for tokens, lr in seen:
        assert lr == [step["value"] for step in STEPS if step["tokens"] <= tokens][-1]
    assert [lr for _, lr in rates(tmp_path / "run")] == [3e-3, 5e-4]
    # The schedule is in the run itself, so resuming needs no file; and it can be exported again.
    whole = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["training"]["replay"]
    assert whole["genes"]["lr"] == STEPS


def test_a_resumed_replay_is_the_same_to_the_bit(tmp_path: Path) -> None:
    settings = (*FEW, "training.checkpoint_steps=1")
    schedule = written(tmp_path)
    for _ in train(build(load_manifest(None, settings, schedule)), tmp_path / "whole"):
        pass
    leave_after(train(build(load_manifest(None, settings, schedule)), tmp_path / "cut"), 7)
    schedule.unlink()
    for _ in go_on(tmp_path / "cut"):
        pass
    for name in ("elite/adapter_model.safetensors", "lineage.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_the_annealing_of_the_run_that_found_it_comes_with_it(tmp_path: Path) -> None:
    linear = {"name": "linear", "decay": 0.4}
    config = load_manifest(None, FEW, written(tmp_path, lr_schedule=linear))
    assert config.lr_schedule.factor(0.8) == pytest.approx(0.5)
    other = load_manifest(None, [*FEW, "training.lr_schedule={name: constant}"], written(tmp_path, lr_schedule=linear))
    assert other.lr_schedule.factor(0.8) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"genes": {"lr": [{"tokens": 5, "value": 1e-3}]}}, "tokens: 0"),
        ({"genes": {"lr": [STEPS[0], STEPS[2], STEPS[1]]}}, "0, 700, 300"),
        ({"genes": {"lr": []}}, "genes.lr"),
        ({"genes": {"learning_rate": STEPS}}, "learning_rate"),
        ({"genes": {"lr": [{"tokens": 0, "value": -1.0}]}}, "from 0 tokens on"),
        ({"genes": {"lr": [{"tokens": 0, "valeu": 1.0}]}}, "valeu"),
        ({"algorithm": "PPO"}, "PPO"),
        ({"unit": "epochs"}, "unit"),
    ],
)
def test_mistakes_in_a_schedule_are_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(load_manifest(None, FEW, written(tmp_path, **changes)))


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "name: none"])
def test_what_is_no_schedule_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="other"):
        load_manifest(None, FEW, path)
    with pytest.raises(ConfigError, match="missing"):
        load_manifest(None, FEW, tmp_path / "missing.yaml")


def test_a_replay_is_for_one_agent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.pop_size=3"):
        load_manifest(None, [*FEW, "training.pop_size=3"], written(tmp_path))


def exam(agent: int, generation: int, mean: float, trained: int) -> dict[str, Any]:
    return fitness_record(agent, generation, generation, Fitness(mean), {"trained": trained})


def test_a_revived_agent_continues_from_its_parents_best_exam() -> None:
    records = [
        birth_record(0, None, 0, 0, {"lr": 4e-3}),
        exam(0, 0, 0.5, 100),
        exam(0, 1, 0.8, 200),
        exam(0, 2, 0.3, 300),
        birth_record(1, 0, 2, 2, {"lr": 1.6e-3}, from_best=True),
        exam(1, 3, 0.4, 300),
        # The one that was revived fell as well, and the same exam comes back, when its agent is long dead.
        birth_record(2, 0, 3, 3, {"lr": 6.4e-4}, from_best=True),
        exam(2, 4, 0.9, 300),
    ]
    assert [(a.agent, a.to_generation, a.to_step) for a in winning_lineage(records, 2)] == [(0, 1, 1), (2, None, None)]
    schedule = hyperparameter_schedule(records, 2)
    assert schedule["genes"]["lr"] == [{"tokens": 0, "value": 4e-3}, {"tokens": 200, "value": 6.4e-4}]
    assert schedule["total_tokens"] == 300
    # Nothing of all that is in one that begins again.
    again = [*records, birth_record(3, 0, 4, 4, {"lr": 1e-4}, untrained=True), exam(3, 5, 0.5, 100)]
    assert [ancestor.agent for ancestor in winning_lineage(again, 3)] == [3]
    assert hyperparameter_schedule(again, 3)["genes"]["lr"] == [{"tokens": 0, "value": 1e-4}]
    longer = stretched(schedule, 600)
    assert longer["genes"]["lr"] == [{"tokens": 0, "value": 4e-3}, {"tokens": 400, "value": 6.4e-4}]
    assert longer["total_tokens"] == 600


def test_the_commands_export_and_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_here(tmp_path / "found", "training.max_steps=384")
    monkeypatch.chdir(tmp_path)
    call = CliRunner().invoke
    done = call(app, ["schedule", str(run), "--extrapolate", "5000"])
    assert done.exit_code == 0, done.output
    assert "5,000" in done.output
    text = Path("schedule.yaml").read_text()
    assert "5000" in text.splitlines()[0]
    found = yaml.safe_load(text)
    assert found["genes"]["lr"][0]["tokens"] == 0
    done = call(app, ["train", *FEW, "--replay", "schedule.yaml", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "1 agent" in done.output
    plain = json.loads(call(app, ["schedule", str(run), "--json"]).stdout)
    assert plain["ancestors"] == hyperparameter_schedule(read_lines(run / "lineage.jsonl"), plain["agent"])["ancestors"]


@pytest.mark.parametrize(
    "arguments", [["schedule", "nowhere"], ["schedule", "."], ["train", "--replay", "nowhere.yaml"]]
)
def test_mistakes_on_the_command_line_have_no_traceback(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, (SystemExit, AgileRLError))


def test_a_run_that_is_not_finished_or_evolved_nothing_has_no_schedule(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "begun", resolve(load_manifest(None, FEW)).document(), 1):
        pass
    done = CliRunner().invoke(app, ["schedule", str(tmp_path / "begun")])
    assert "agilerl resume" in str(done.exception)
