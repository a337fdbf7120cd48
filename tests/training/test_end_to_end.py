"""`agilerl train` at small size, as a process of its own: what it prints, and all that it leaves."""

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.config.run import RunConfig
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.models.tiny import tiny_model_path
from agilerl.training.resolved import resolve
from tests.training.small_runs import FinishedRun, lines

pytestmark = pytest.mark.model

AGENTS, PROMPTS, GROUP, ITERATIONS, EXAM, TEST = 3, 4, 4, 4, 8, 10


@pytest.mark.processes
def test_the_directory_is_complete(finished_run: FinishedRun) -> None:
    assert {p.name for p in finished_run.root.iterdir()} == {
        ".lock",
        "checkpoints",
        "completions",
        "elite",
        "journal.jsonl",
        "lineage.jsonl",
        "metrics.jsonl",
        "report.html",
        "run.json",
        "summary.json",
    }
    assert not list(finished_run.root.rglob("*.tmp"))


@pytest.mark.processes
def test_what_is_printed(finished_run: FinishedRun) -> None:
    assert finished_run.errors == ""
    for expected in (
        "4 prompts x 4 completions = 16 for each agent, 8 an optimizer step",
        "lr in [1e-06, 0.01]",
        "iteration 4 (100%",
        "Held-out test (greedy)",
        "median agent of generation 0 (agent",
        "Winning lineage",
        f"Elite adapter    {Path('run [b]1[/b]') / 'elite'}",
        "2 generations,",
    ):
        assert expected in finished_run.output
    assert "\x1b" not in finished_run.output  # no terminal, no colours


@pytest.mark.processes
def test_run_json_holds_every_setting_and_gives_the_same_run_again(finished_run: FinishedRun) -> None:
    info = json.loads((finished_run.root / "run.json").read_text())
    assert {"schema_version", "config", "config_sha256", "seed", "versions", "started", "command"} <= set(info)
    assert info["seed"] == info["config"]["training"]["seed"] == 42
    assert info["command"][:3] == ["agilerl", "train", "training.pop_size=3"]
    algorithm = info["config"]["algorithm"]
    assert (algorithm["lr"], algorithm["group_size"], algorithm["clip_coef"]) == (1e-5, GROUP, 0.2)
    assert resolve(RunConfig.from_dict(info["config"])).document() == info["config"]


@pytest.mark.processes
def test_metrics_have_the_promised_lines_and_keys(finished_run: FinishedRun) -> None:
    records = lines(finished_run.root / "metrics.jsonl")
    by_kind = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "evolution", "test")}
    assert {k: len(v) for k, v in by_kind.items()} == {"train": 12, "eval": 6, "evolution": 1, "test": 3}
    assert sum(map(len, by_kind.values())) == len(records)
    for record in by_kind["train"]:
        assert {
            "generation", "step", "agent", "reward", "reward_std", "loss", "entropy", "learning_rate", "grad_norm",
            "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
            "frac_reward_zero_std", "clip_ratio/region_mean", "num_tokens", "skipped_steps", "time/rollout",
            "time/reward", "time/update", "step_time", "tokens_per_second", "memory/peak",
        } <= set(record)  # fmt: skip
        assert record["step_time"] >= record["time/rollout"] + record["time/update"]
        assert record["generation"] == (record["step"] - 1) // 2
    assert sorted({r["step"] for r in by_kind["train"]}) == [1, 2, 3, 4]
    elapsed = [r["time/elapsed"] for r in records if r["kind"] in ("train", "eval")]
    assert elapsed == sorted(elapsed)
    assert 0 < elapsed[0] < elapsed[-1] < json.loads((finished_run.root / "summary.json").read_text())["seconds"]
    assert [(r["step"], r["eval/n"]) for r in by_kind["eval"]] == [(2, EXAM)] * 3 + [(4, EXAM)] * 3
    assert [r["who"] for r in by_kind["test"]] == ["base", "median_first_generation", "elite"]
    [evolution] = by_kind["evolution"]
    assert {"evo/fitness/best", "evo/fitness/mean", "evo/fitness/std", "evo/replacements", "evo/diversity"} <= set(
        evolution
    )


@pytest.mark.processes
def test_rates_of_agents_add_up_to_the_tokens_spent(finished_run: FinishedRun) -> None:
    records = [r for r in lines(finished_run.root / "metrics.jsonl") if r["kind"] == "train"]
    spent = sum(r["tokens_per_second"] * r["step_time"] for r in records)
    tokens = json.loads((finished_run.root / "summary.json").read_text())["tokens"]
    assert spent == pytest.approx(tokens["generated"] + tokens["trained"])


@pytest.mark.processes
def test_summary_has_what_a_program_reads(finished_run: FinishedRun) -> None:
    summary = json.loads((finished_run.root / "summary.json").read_text())
    assert (summary["status"], summary["generations"], summary["agents"]) == ("finished", 2, AGENTS)
    assert summary["seconds"] > 0
    assert set(summary["tokens"]) == {"generated", "trained", "evaluated"}
    assert all(count > 0 for count in summary["tokens"].values())
    for who in ("base", "elite", "median_first_generation"):
        assert {"mean", "stderr", "n"} <= set(summary["test"][who])
        assert summary["test"][who]["n"] == TEST
    elite = summary["elite"]
    assert elite["adapter"] == "elite"
    assert (finished_run.root / elite["adapter"]).is_dir()
    assert set(elite["hyperparameters"]) == {"lr"}
    born = {r["agent"] for r in lines(finished_run.root / "lineage.jsonl") if r["event"] == "birth"}
    examined = {r["agent"] for r in lines(finished_run.root / "lineage.jsonl") if r["event"] == "fitness"}
    assert set(map(int, summary["fitness"])) == examined <= born
    best = max(f["mean"] for f in summary["fitness"].values())
    assert summary["fitness"][str(elite["index"])]["mean"] == elite["exam"] == best
    assert summary["lineage"][-1]["agent"] == elite["index"]


@pytest.mark.processes
def test_lineage_tells_a_consistent_story(finished_run: FinishedRun) -> None:
    alive: dict[int, dict[str, float]] = {}
    for record in lines(finished_run.root / "lineage.jsonl"):
        agent = record["agent"]
        if record["event"] == "birth":
            assert agent not in alive
            assert record["parent"] is None or record["hyperparameters"] == alive[record["parent"]]
            alive[agent] = record["hyperparameters"]
        elif record["event"] == "mutation":
            for change in record["changes"]:
                assert alive[agent][change["gene"]] == change["old"] != change["new"]
                alive[agent][change["gene"]] = change["new"]
        elif record["event"] == "death":
            del alive[agent]
        else:
            assert agent in alive
    assert len(alive) == AGENTS


@pytest.mark.processes
def test_completions_of_every_iteration_are_kept(finished_run: FinishedRun) -> None:
    files = sorted((finished_run.root / "completions").iterdir())
    assert [f.name for f in files] == [f"step_{step:06d}.parquet" for step in range(1, ITERATIONS + 1)]
    means = {(r["step"], r["agent"]): r["reward"] for r in lines(finished_run.root / "metrics.jsonl") if "reward" in r}
    for file in files:
        rows = parquet.read_table(file).to_pylist()
        assert len(rows) == AGENTS * PROMPTS * GROUP
        assert set(rows[0]) == {
            "generation", "step", "agent", "group", "sample", "prompt", "completion", "answer", "reward", "length",
            "finish_reason",
        }  # fmt: skip
        for agent in {row["agent"] for row in rows}:
            own = [row for row in rows if row["agent"] == agent]
            assert {(row["group"], row["sample"]) for row in own} == {(g, s) for g in range(4) for s in range(4)}
            assert sum(row["reward"] for row in own) / len(own) == pytest.approx(means[own[0]["step"], agent])
            assert all((row["completion"].strip() == row["answer"]) == (row["reward"] == 1) for row in own)


@pytest.mark.processes
def test_checkpoints_fit_their_sums(finished_run: FinishedRun) -> None:
    folders = sorted((finished_run.root / "checkpoints").iterdir())
    assert [f.name for f in folders] == ["000002", "000004"]
    for folder in [*folders, finished_run.root / "elite"]:
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"MANIFEST.json"}
        assert set(manifest) == there
        for name, entry in manifest.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"]
    state = json.loads((folders[-1] / "state.json").read_text())
    clock = json.loads((folders[-1] / "clock.json").read_text())
    assert len(state["agents"]) == AGENTS
    assert (finished_run.root / "metrics.jsonl").stat().st_size > clock["metrics_bytes"] > 0


@pytest.mark.processes
def test_the_elite_is_a_peft_adapter_that_scores_as_the_summary_says(finished_run: FinishedRun) -> None:
    """Plain PEFT and plain greedy generation on the test panel, with nothing of our engine."""
    elite = finished_run.root / "elite"
    tokenizer = AutoTokenizer.from_pretrained(elite)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, elite).eval()
    assert json.loads((elite / "adapter_config.json").read_text())["r"] == 16
    task = ReasoningGymTask("gcd", {"max_value": 60}, exam_prompts=EXAM, test_prompts=TEST)
    scores = []
    for row in (task.row("test", i) for i in range(TEST)):
        ids = tokenizer.apply_chat_template(task.messages(row), add_generation_prompt=True, return_tensors="pt")
        ids = ids["input_ids"] if not isinstance(ids, torch.Tensor) else ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        scores.append(task.reward(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), row))
    summary = json.loads((finished_run.root / "summary.json").read_text())
    assert sum(scores) / TEST == pytest.approx(summary["test"]["elite"]["mean"])
    with torch.no_grad():
        ids = torch.arange(1, 20)[None]
        adapted = model(input_ids=ids).logits
        with model.disable_adapter():
            assert not torch.equal(model(input_ids=ids).logits, adapted)
