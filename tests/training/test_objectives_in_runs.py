"""Runs with several objectives: what the exam measures, what is refused, and where the front is found."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agilerl.cli.output import console_of_lines
from agilerl.cli.progress import print_plan, watch
from agilerl.config.manifest import load_manifest
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.models.tiny import tiny_model_path
from agilerl.population import Population
from agilerl.report import build_report
from agilerl.training.loop import train
from agilerl.training.resolved import resolve
from agilerl.training.saved import recorded
from agilerl.training.setup import build
from tests.training.small_runs import SMALL, lines, run_here

pytestmark = pytest.mark.model

THREE = (
    *("algorithm.lr=3e-3", "algorithm.max_output_tokens=6", "training.pop_size=4", "training.max_steps=384"),
    "mutation={rl_hp_selection: {lr: {min: 1e-4, max: 1e-2}}}",
    "selection_strategy={name: tournament, objectives: [reward, kl, length]}",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with three objectives, and what it printed."""
    root, said = tmp_path_factory.mktemp("objectives") / "run", list[str]()
    session = build(load_manifest(None, [*SMALL, *THREE]))
    console = console_of_lines(said.append, 100, quiet=False)
    print_plan(session, root, console)
    watch(train(session, root), session, console)
    return root, "\n".join(said)


@pytest.fixture(scope="module")
def summary(run: tuple[Path, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run[0] / "summary.json").read_text())
    return found


def exam_of(adapter: Path, prompts: list[list[int]]) -> tuple[list[float], list[int]]:
    """Return KL (nats a token) and length of each greedy answer, by transformers and PEFT alone."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_path()).double(), adapter)
    model.eval()
    divergences, lengths = [], []
    for prompt in prompts:
        ids = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=6)
        with torch.no_grad():
            policy = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
            with model.disable_adapter():
                reference = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
        kl = (policy.exp() * (policy - reference)).sum(-1)[len(prompt) - 1 : -1]
        divergences.append(float(kl.mean()))
        lengths.append(len(kl))
    return divergences, lengths


def test_kl_and_length_are_those_that_transformers_and_peft_compute(
    run: tuple[Path, str], summary: dict[str, Any]
) -> None:
    panel = build(load_manifest(None, [*SMALL, *THREE])).population.panel("exam")
    prompts = [ids for _, ids in panel]
    assert len(prompts) == 8
    for member in summary["front"]:
        divergences, lengths = exam_of(run[0] / member["adapter"], prompts)
        expected = Fitness.from_scores(divergences)
        found = member["costs"]["kl"]
        assert found["mean"] == pytest.approx(expected.mean, rel=1e-3)
        assert found["stderr"] == pytest.approx(expected.stderr, rel=1e-2)
        assert member["costs"]["length"]["mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert found["mean"] > 1e-5


def test_metrics_lineage_and_summary_agree(run: tuple[Path, str], summary: dict[str, Any]) -> None:
    root = run[0]
    exams = [line for line in lines(root / "metrics.jsonl") if line["kind"] == "eval"]
    told = [line for line in lines(root / "lineage.jsonl") if line["event"] == "fitness"]
    assert len(exams) == len(told) == 3 * 4
    for exam, line in zip(exams, told):
        assert exam["agent"] == line["agent"]
        assert (exam["eval/kl"], exam["eval/length"]) == tuple(line["costs"][n]["mean"] for n in ("kl", "length"))
        assert (exam["eval/kl_stderr"], exam["eval/length_stderr"]) == tuple(
            line["costs"][name]["stderr"] for name in ("kl", "length")
        )
    last = [exam for exam in exams if exam["generation"] == 2]
    # The front, by its definition.
    vectors = {e["agent"]: (e["eval/reward_mean"], -e["eval/kl"], -e["eval/length"]) for e in last}
    front = {
        a for a, v in vectors.items() if not any(w != v and all(x >= y for x, y in zip(w, v)) for w in vectors.values())
    }
    assert {exam["agent"] for exam in last if exam["eval/front"]} == front
    assert [one["agent"] for one in summary["front"]] == sorted(front, key=lambda a: (-vectors[a][0], a))
    evolved, _ = [line for line in lines(root / "metrics.jsonl") if line["kind"] == "evolution"]
    assert evolved["evo/front"] == sum(e["eval/front"] for e in exams if e["generation"] == 0)
    # The elite is the best reward of all exams.
    assert summary["elite"]["exam"] == max(exam["eval/reward_mean"] for exam in exams)
    assert "costs" in summary["test"]["elite"]
    assert "costs" not in summary["test"]["base"]


def test_the_forward_passes_of_the_kl_are_counted() -> None:
    population = build(load_manifest(None, [*SMALL, *THREE])).population
    asked = sum(len(ids) for _, ids in population.panel("exam"))
    spent = []
    for objectives in (("reward",), ("reward", "length"), ("reward", "kl")):
        before = [agent.tokens["evaluated"] for agent in population.agents]
        population.objectives = objectives
        exam = population.evaluate()
        spent.append([agent.tokens["evaluated"] - count for agent, count in zip(population.agents, before)])
        assert {tuple(fitness.costs) for fitness in exam.values()} == {objectives[1:]}
    assert spent[0] == spent[1]
    assert spent[2] == [said + 2 * (asked + said) for said in spent[0]]
    # Before any training agents are their base, to the bit.
    assert {fitness.costs["kl"].scores for fitness in exam.values()} == {(0.0,) * 8}


@pytest.mark.parametrize("objectives", [["kl"], ["reward", "kl", "kl"], ["reward", "length", "speed"], []])
def test_a_population_refuses_other_objectives(objectives: Any) -> None:
    population = build(load_manifest(None, SMALL)).population
    with pytest.raises(ConfigError, match="objectives"):
        Population(population.agents, population.task, objectives=objectives)


def test_the_front_is_printed(run: tuple[Path, str], summary: dict[str, Any]) -> None:
    said = run[1].splitlines()
    assert any(line.split()[:1] == ["objectives"] and "reward, kl, length" in line for line in said)
    place = next(i for i, line in enumerate(said) if line.startswith("Front of the last exam"))
    table = [line.split() for line in said[place + 2 : place + 2 + len(summary["front"])]]
    assert [int(row[0]) for row in table] == [one["agent"] for one in summary["front"]]
    assert f"{run[0]}/checkpoints/000006/agent_N/actor" in run[1]


def test_the_report_shows_the_front(run: tuple[Path, str], summary: dict[str, Any], tmp_path: Path) -> None:
    page = build_report([run[0]], tmp_path / "report.html").read_text(encoding="utf-8")
    block, *_ = re.findall('<script type="application/json" class="figures">(.*?)</script>', page)
    figures = json.loads(block)
    for place, name in enumerate(("kl", "length")):
        figure = figures[f"objective{place}-0"]
        (ring,) = [trace for trace in figure["data"] if trace.get("name") == "front"]
        assert ring["text"] == [str(one["agent"]) for one in summary["front"]]
        assert ring["x"] == pytest.approx([one["costs"][name]["mean"] for one in summary["front"]], rel=1e-4)
        assert ring["y"] == pytest.approx([one["mean"] for one in summary["front"]], rel=1e-4)
    assert 'id="objectives"' in page
    assert all(one["adapter"] in page for one in summary["front"])


def test_a_run_with_one_objective_says_nothing_of_others(tmp_path: Path) -> None:
    root = run_here(tmp_path / "run")
    for file in ("summary.json", "metrics.jsonl", "lineage.jsonl"):
        text = (root / file).read_text(encoding="utf-8")
        assert not any(word in text for word in ('"costs"', "objectives", "eval/kl", "eval/front", '"front"')), file
    state = json.loads(next((root / "checkpoints").glob("*/state.json")).read_text())
    assert all("costs" not in fitness for fitness in state["progress"]["fitness"].values())
    assert 'id="objectives"' not in (root / "report.html").read_text(encoding="utf-8")


def section(**values: Any) -> list[str]:
    return [f"selection_strategy={json.dumps(values)}"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (section(objectives=["reward", "kl"], name="pulses"), "name=pulses .* tournament"),
        (section(objectives=["reward", "kl"], name="multi_frequency"), "name=multi_frequency .* tournament"),
        (section(objectives=["reward", "kl"], floor=1), "floor=1 leaves one"),
        (section(objectives=["reward", "kl"], name="halving", floor=1), "floor=1 leaves one"),
        (section(objectives=["kl", "length"]), "expected reward"),
        (section(objectives=["reward", "kl", "kl"]), "each once"),
        (section(objectives=["reward", "lenght"]), "objectives"),
        (section(objectives=[]), "objectives"),
        ([*section(objectives=["reward", "kl"]), "training.pop_size=1"], "training.pop_size=1"),
    ],
)
def test_what_has_no_front_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_manifest(None, overrides)


@pytest.mark.parametrize("name", ["knockout", "halving"])
def test_a_knockout_leaves_a_front_of_two(name: str) -> None:
    config = load_manifest(None, section(objectives=["reward", "length"], name=name))
    assert config.smallest_population == 2
    resolved = resolve(config)
    assert resolved.selection is not None
    assert vars(resolved.selection)["floor"] == 2
    document = resolved.document()
    assert document["selection_strategy"]["objectives"] == ["reward", "length"]
    again = recorded({"config": document, "given": resolved.given(), "date": "2026-01-01T00:00:00"})
    assert resolve(again).document() == document
    assert vars(resolve(load_manifest(None, section(name=name))).selection)["floor"] == 1
    assert vars(resolve(load_manifest(None, section(name=name, objectives=["reward"]))).selection)["floor"] == 1


def test_a_knockout_with_objectives_runs_to_its_end(tmp_path: Path) -> None:
    root = run_here(
        tmp_path / "run",
        *("training.pop_size=4", "training.evo_steps=1", "training.max_steps=240", "algorithm.lr=1e-3"),
        "selection_strategy={name: knockout, objectives: [reward, kl]}",
    )
    summary = json.loads((root / "summary.json").read_text())
    assert summary["agents"] == 2
    assert {tuple(one["costs"]) for one in summary["front"]} == {("kl",)}


GRADERS = [{"name": "task"}, {"name": "regex", "label": "short", "weight": 0.1, "params": {"pattern": "^.{0,3}$"}}]


def test_weights_that_evolve_are_judged_by_a_fixed_grader(tmp_path: Path) -> None:
    evolving = (
        *(*SMALL, f"environment.graders={json.dumps(GRADERS)}"),
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
