"""Weights of the reward as genes of a manifest: a run whose weights evolve, and what a manifest may not ask for."""

import json
from pathlib import Path
from typing import Any

import pytest

from agilerl.cli.output import console_of_lines
from agilerl.cli.progress import print_plan
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError
from agilerl.hpo.parameters import Gene
from agilerl.hpo.schedule import hyperparameter_schedule
from agilerl.training.resolved import resolve
from agilerl.training.setup import build, check
from tests.training.small_runs import SMALL, lines, run_here

GRADERS = [
    {"name": "task"},
    {"name": "length", "weight": 0.1, "params": {"target": 6}, "label": "short"},
    {"name": "regex", "weight": 0.5, "params": {"pattern": "^[a-z]+$"}, "label": "only.letters"},
]
SHORT = "reward_weights.short"


def manifest(
    selection: dict[str, Any] | None = None, weights: Any = None, algorithm: str = "GRPO", **environment: Any
) -> RunConfig:
    chosen = {"graders": GRADERS, "fitness_grader": "task", **environment}
    return RunConfig.from_dict(
        {
            "algorithm": {"name": algorithm, **({} if weights is None else {"reward_weights": weights})},
            "environment": {name: value for name, value in chosen.items() if value is not None},
            "mutation": {"rl_hp_selection": {SHORT: {"max": 0.4}} if selection is None else selection},
        }
    )


def test_a_gene_starts_at_the_weight_of_its_grader() -> None:
    config = manifest({SHORT: {"max": 0.4}, "reward_weights.only.letters": {"min": 0.1, "max": 2, "scale": "log"}})
    assert resolve(config).genes == {
        SHORT: Gene(SHORT, "float", min=0.0, max=0.4, scale="linear"),
        "reward_weights.only.letters": Gene("reward_weights.only.letters", "float", min=0.1, max=2.0, scale="log"),
    }
    assert resolve(config).document()["algorithm"]["reward_weights"] == {"short": 0.1, "only.letters": 0.5}
    again = RunConfig.from_dict(resolve(config).document())
    assert (resolve(again).document(), resolve(again).genes) == (resolve(config).document(), resolve(config).genes)
    check(config)
    given = resolve(manifest(weights={"task": 2, "short": 0.3})).hyperparameters
    assert given.model_dump()["reward_weights"] == {"task": 2.0, "short": 0.3}
    assert resolve(manifest({})).document()["algorithm"]["reward_weights"] == {}
    assert resolve(manifest(algorithm="choice[GRPO, CISPO]")).genes.keys() == {SHORT, "algorithm"}


def test_choices_of_a_number_may_be_whole() -> None:
    """They become what the hyperparameter is: else an agent that chose one could not be cloned."""
    found = resolve(manifest({SHORT: {"choices": [0, 0.1, 1]}, "temperature": {"choices": [0.5, 1]}})).genes
    assert [type(choice) for gene in found.values() for choice in gene.choices] == [float] * 5
    assert found["temperature"].contains(1.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"fitness_grader": None},
            r"reward_weights\.short: a weight .* environment\.fitness_grader.* task, short",
        ),
        ({"selection": {"reward_weights.shrot": {}}}, r"reward_weights\.shrot: .* 'shrot'; .* 'short'\?"),
        ({"selection": {"reward_weights.": {}}}, r"reward_weights\.: .* ''; known: task, short"),
        ({"selection": {"reward_weights": {}}}, r"'reward_weights\.<name>'\?"),
        ({"selection": {"reward_wieghts.short": {}}}, r"no hyperparameter 'reward_wieghts\.short'"),
        ({"selection": {"lr.short": {}}}, r"lr\.short: .* known: lr"),
        ({"selection": {}, "weights": {"shrot": 1}}, r"algorithm\.reward_weights\.shrot: .*did .* 'short'\?"),
        ({"weights": {"short": "much"}}, r"algorithm\.reward_weights\.short: .* number"),
        ({"weights": {"short": True}}, r"algorithm\.reward_weights\.short: .* found a boolean"),
        ({"weights": {"short": float("nan")}}, r"algorithm\.reward_weights\.short: .* finite number"),
        ({"weights": 3}, r"algorithm\.reward_weights: .* found 3"),
        ({"graders": None, "fitness_grader": None}, r"parts; .* environment\.graders"),
        (
            {"graders": None, "fitness_grader": None, "algorithm": "SFT", "env_type": "sft"},
            r"SFT .* 'reward_weights\.short'",
        ),
    ],
)
def test_what_a_manifest_may_not_ask_for(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(manifest(**settings))


def test_a_weight_outside_its_range_starts_at_the_nearer_end() -> None:
    with pytest.warns(UserWarning, match=r"reward_weights\.short=0\.1.*0\.2"):
        resolved = resolve(manifest({SHORT: {"min": 0.2}}))
    assert resolved.hyperparameters.reward_weights["short"] == 0.2  # type: ignore[attr-defined]


@pytest.mark.model
def test_a_run_whose_weights_evolve(tmp_path: Path) -> None:
    graders = json.dumps(GRADERS)
    root = run_here(
        tmp_path / "run",
        f"environment.graders={graders}",
        "environment.fitness_grader=task",
        f"mutation.rl_hp_selection={{{SHORT}: {{min: 0.05, max: 2.0, scale: log}}}}",
    )
    records, lineage = lines(root / "metrics.jsonl"), lines(root / "lineage.jsonl")
    births = {line["agent"]: line["hyperparameters"] for line in lineage if line["event"] == "birth"}
    assert births[0] == {SHORT: 0.1}
    assert len({values[SHORT] for agent, values in births.items() if agent < 3}) == 3
    mutations = [line for line in lineage if line["event"] == "mutation"]
    assert {change["gene"] for line in mutations for change in line["changes"]} == {SHORT}
    # In every iteration the reward is by the weight that the agent had then.
    changed = {(line["agent"], line["generation"]): line["changes"][0]["new"] for line in mutations}
    mutated = False
    for record in (record for record in records if record["kind"] == "train"):
        agent, generation = record["agent"], record["generation"]
        weight = births[agent][SHORT]
        for earlier in range(generation):
            weight = changed.get((agent, earlier), weight)
        part = {name: record[f"rewards/{name}/mean"] for name in ("task", "short", "only.letters")}
        expected = part["task"] + weight * part["short"] + 0.5 * part["only.letters"]
        assert record["reward"] == pytest.approx(expected, abs=1e-6)
        mutated |= weight != births[agent][SHORT]
    assert mutated, "some agent has trained with a weight that it was not born with"
    exams = [record["eval/reward_mean"] for record in records if record["kind"] == "eval"]
    assert all((8 * mean) % 1 == 0 for mean in exams), "the share of 8 words that are right, whatever the weights"
    summary = json.loads((root / "summary.json").read_text())
    assert summary["elite"]["hyperparameters"].keys() == {SHORT}
    assert json.loads((root / "run.json").read_text())["config"]["algorithm"]["reward_weights"] == {"short": 0.1}
    assert SHORT in (root / "report.html").read_text(encoding="utf-8")
    assert hyperparameter_schedule(lineage, summary["elite"]["index"])["genes"].keys() == {SHORT}


TWO_GRADERS = [{"name": "task"}, {"name": "regex", "label": "short", "weight": 0.1, "params": {"pattern": "^.{0,3}$"}}]


def test_weights_that_evolve_are_judged_by_a_fixed_grader(tmp_path: Path) -> None:
    evolving = (
        *(*SMALL, f"environment.graders={json.dumps(TWO_GRADERS)}"),
        "mutation.rl_hp_selection={reward_weights.short: {min: 0.01, max: 100, scale: log}}",
    )
    with pytest.raises(ConfigError, match=r"needs environment\.fitness_grader"):
        resolve(load_manifest(None, evolving))
    session = build(load_manifest(None, [*evolving, "environment.fitness_grader=task"]))
    population = session.population
    weights = [agent.hyperparameters["reward_weights.short"] for agent in population.agents]
    assert len(set(weights)) == 3
    # The adapters are still at their start: whoever turned a weight up gains nothing by it.
    exam = population.evaluate()
    assert len({fitness.scores for fitness in exam.values()}) == 1
    assert len({tuple(t.rewards[0] for t in own) for own in population.rollout().trajectories.values()}) == 3
    said: list[str] = []
    print_plan(session, tmp_path, console_of_lines(said.append, 200, quiet=False))
    (line,) = [line for line in said if line.split()[:1] == ["fitness"]]
    assert "reward_weights.short" in line
    assert "exact" in line
