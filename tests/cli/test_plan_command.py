"""`agilerl plan`: what it prints, that it loads no weights, and its sentences."""

import json
import shlex
from collections.abc import Callable
from math import ceil, floor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from agilerl.cli.forecast import Lengths, Planned, data_sheet, expected_seconds, questions_for, smallest_difference
from agilerl.cli.progress import plan_document
from agilerl.config.manifest import load_manifest
from agilerl.hpo.fitness import Fitness, probability_better
from agilerl.planning.machines import Machine
from agilerl.training.setup import build
from tests.cli.outcome import Outcome
from tests.cli.test_start import started

Agilerl = Callable[..., Outcome]

SEVEN = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}


@pytest.fixture
def seven(tmp_path: Path) -> str:
    """A folder with the config.json of a model of 7.6 billion parameters, and nothing else."""
    Qwen2Config(**SEVEN).save_pretrained(tmp_path / "seven")
    return str(tmp_path / "seven")


def planned(agilerl: Agilerl, *arguments: str) -> dict[str, Any]:
    outcome = agilerl("plan", *arguments, "--json")
    assert outcome.code == 0, outcome.errors
    document: dict[str, Any] = json.loads(outcome.output)
    return document


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan", "--gpu", "h2000"], ["plan", "a.b=1"]])
@pytest.mark.processes
def test_help_and_typing_errors_load_nothing(arguments: list[str], tmp_path: Path) -> None:
    _, _, packages, _ = started(*arguments, cwd=tmp_path)
    assert packages.isdisjoint({"torch", "transformers", "peft"})


def test_a_model_without_weights_is_planned_for(agilerl: Agilerl, seven: str) -> None:
    model = (f"network.pretrained_model_name_or_path={seven}", "selection_strategy.name=tournament")
    found = planned(agilerl, *model, "--gpus", "8", "--gpu", "h200", "--prompt-tokens=300")
    assert found["model"]["parameters"] == 7_615_616_512
    assert found["model"]["linear"] == 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert found["model"]["width"] == 2
    best = found["proposal"]
    assert (best["islands"], best["processes"], best["devices"]) == (4, 2, 8)  # four agents
    assert best["command"].startswith("torchrun --nproc-per-node 8 -m agilerl.cli train ")
    assert "distributed.processes_per_island=2" in best["overrides"]
    assert best["memory_bytes"]["peak"] < 0.8 * 141e9
    assert best["seconds"]["iteration"] == pytest.approx(
        sum(best["seconds"][phase] for phase in ("prefill", "decode", "logprobs", "train", "optimizer"))
    )
    assert all(best["floor_seconds"][phase] <= best["seconds"][phase] for phase in best["floor_seconds"])
    assert found["others"]
    assert found["workload"]["prompt"] == 300


@pytest.mark.parametrize(
    ("overrides", "islands"),
    [
        ((), 1),
        (("selection_strategy.floor=2",), 2),
        (("selection_strategy.name=tournament",), 4),
        (("selection_strategy.name=tournament", "sharing.distillation=0.5"), 1),
    ],
)
def test_no_more_islands_are_proposed_than_the_selection_leaves_agents_for(
    overrides: tuple[str, ...], islands: int, seven: str, agilerl: Agilerl
) -> None:
    arguments = (f"network.pretrained_model_name_or_path={seven}", *overrides)
    found = planned(agilerl, *arguments, "--gpus", "4", "--gpu", "h200", "--prompt-tokens=300")
    layouts = [found["proposal"], *found["others"]]
    assert max(layout["islands"] for layout in layouts) == islands
    config = load_manifest(None, [*arguments, *found["proposal"]["overrides"]])
    for layout in layouts:
        config.check_islands(layout["islands"])
    assert any("4 islands: s" in sentence for sentence in found["refused"]) is (islands < 4)


def test_the_proposed_settings_are_settings_of_a_manifest(agilerl: Agilerl) -> None:
    overrides = planned(agilerl, "--gpu", "l4")["proposal"]["overrides"]
    assert any(o.startswith("training.max_tokens_in_flight=") for o in overrides)
    outcome = agilerl("train", "--dry-run", *overrides)
    assert (outcome.code, outcome.errors) == (0, "")


@pytest.mark.parametrize(
    ("overrides", "then"),
    [
        ((), ""),
        (("algorithm.lr=9e-3",), "; agent 1 starts at 0.001, and is only removed if"),
        (("algorithm.lr=9e-3", "training.pop_size=1"), "; unless you mean that, set algorithm.lr=0.001"),
    ],
    ids=["usual", "founder", "alone"],
)
def test_an_unusual_learning_rate_is_named(overrides: tuple[str, ...], then: str, agilerl: Agilerl) -> None:
    once = ("training.max_steps=64", "environment.data_batch_size_per_gpu=1", "training.evo_steps=1")
    shown = " ".join(agilerl("plan", "--gpu", "l4", *once, *overrides).output.split())
    assert ("rate algorithm.lr=0.009 is 9 times the usual rate of this base, 0.001" + then in shown) is bool(then)
    assert " x 1 prompt x 8 completions, " in shown
    assert "Time of a generation of 1 iteration: " in shown
    assert "preflight none: the run answers fewer than 320 prompts" in shown


def test_prompts_of_a_known_task_are_measured(agilerl: Agilerl) -> None:
    found = planned(agilerl, "--gpu", "l4")
    assert 9 <= found["workload"]["prompt"] <= 10.5
    assert found["workload"]["completion"] == 10
    common = found["workload"]["common"]
    assert found["assumed"][0] == f"10 prompt tokens (mean of the exam), the first {common} shared by all prompts"
    assert 1 <= common < 9
    assert found["proposal"]["devices"] == 1
    assert found["proposal"]["command"].startswith("agilerl train training.max_tokens_in_flight=")


def test_this_machine_is_measured(agilerl: Agilerl) -> None:
    found = planned(agilerl, "--gpu", "cpu")
    assert found["machine"]["source"] == "measured on this machine just now"
    assert 1e9 < found["machine"]["flops"] < 1e13
    assert found["model"]["width"] == 4
    assert "measured" in found["machine"]["costs"]


def test_a_cpu_is_planned_for_in_bf16_as_it_computes(agilerl: Agilerl) -> None:
    found = planned(agilerl, "training.dtype=bfloat16", "--gpu", "cpu")["model"]
    assert (found["width"], found["linear_width"]) == (4, 2)
    quantised = planned(agilerl, "training.dtype=bfloat16", "network.quantization=int8", "--gpu", "cpu")["model"]
    assert (quantised["width"], quantised["linear_width"]) == (2, 1)


def test_what_a_person_reads(agilerl: Agilerl, seven: str) -> None:
    model = (f"network.pretrained_model_name_or_path={seven}", "selection_strategy.floor=2")
    text = agilerl("plan", *model, "--gpus", "2", "--gpu", "h100", "--price", "6.5").output
    flat = " ".join(text.split())
    for words in (
        "7,615,616,512 parameters, 14.2 GiB",
        "NVIDIA H100 SXM data sheet",
        "measured on one H200",
        "islands of 1 process",
        "torchrun --nproc-per-node 2",
        "max_rows_in_flight",
        "Memory of the fullest device",
        ", at a cost of ",
        "exam decode",
        "also fits: 1 island of 2 processes",
        "Not counted: grading",
        "prompts of 256 tokens: assumed",
    ):
        assert words in flat


def test_what_does_not_fit_is_one_sentence(agilerl: Agilerl, tmp_path: Path) -> None:
    large = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192, "dtype": "bfloat16"}
    LlamaConfig(**large, **heads, tie_word_embeddings=False).save_pretrained(tmp_path / "large")
    outcome = agilerl("plan", f"network.pretrained_model_name_or_path={tmp_path / 'large'}", "--gpu", "h100")
    assert (outcome.code, outcome.output) == (2, "")
    assert "does not fit on 1 x h100" in outcome.errors
    assert "of these, the base sharded over them" in outcome.errors
    assert "Traceback" not in outcome.errors


def test_quantised_bases_and_mixtures_are_counted_as_they_lie_in_memory(
    agilerl: Agilerl, seven: str, tmp_path: Path
) -> None:
    model = f"network.pretrained_model_name_or_path={seven}"
    four = planned(agilerl, model, "network.quantization=nf4", "--gpu", "h200")["model"]
    assert four["linear_width"] == 0.5625
    assert four["weight_bytes"] < 0.45 * planned(agilerl, model, "--gpu", "h200")["model"]["weight_bytes"]
    Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
    ).save_pretrained(tmp_path / "mixture")
    mixture = f"network.pretrained_model_name_or_path={tmp_path / 'mixture'}"
    found = planned(agilerl, mixture, "network.lora_config.target_modules=[q_proj]", "--gpu", "h200")["model"]
    experts = 2 * 8 * 3 * 32 * 16
    assert found["linear_held"] - found["linear"] == experts * 6 // 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h2000"], ["h2000", "did you mean 'h200'"]),
        (["--gpus", "0", "--gpu", "h200"], ["--gpus"]),
        (["training.popsize=4"], ["popsize", "pop_size"]),
        (["nothing.yaml"], ["nothing.yaml"]),
        (["--prompt-tokens", "2000", "--gpu", "h200"], ["2,000", "context", "--prompt-tokens"]),
        (["network.pretrained_model_name_or_path=/nowhere/at/all", "--gpu", "h200"], ["no model folder"]),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], words: list[str], agilerl: Agilerl) -> None:
    outcome = agilerl("plan", *arguments)
    assert outcome.code == 2
    assert outcome.output == ""
    assert len(outcome.errors.splitlines()) == 1
    for word in words:
        assert word in outcome.errors


def test_a_damaged_config_is_a_sentence(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "no_such_model"}')
    outcome = agilerl("plan", f"network.pretrained_model_name_or_path={tmp_path / 'bad'}", "--gpu", "h200")
    assert outcome.code == 2
    assert "cannot read the shape of the model" in outcome.errors


def test_no_weights_are_read_or_made(agilerl: Agilerl, seven: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        if tensor.device.type != "meta":
            made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    planned(agilerl, f"network.pretrained_model_name_or_path={seven}", "--gpu", "h200")
    assert max(made, default=0) < 10**6


ALONE = (
    *("training.pop_size=1", "selection_strategy.name=none", "algorithm.batch_size=4096"),
    "environment.data_batch_size_per_gpu=512",
)


@pytest.mark.parametrize(
    ("overrides", "is_named"),
    [
        ((), False),  # an agent's step is smaller than the micro-batch that it takes by itself
        (("algorithm.micro_batch_size_per_gpu=9",), True),  # not the one that was given
        (ALONE, False),  # a large one, which is also what it takes by itself
    ],
)
def test_the_proposed_micro_batch_is_the_planned_one(
    agilerl: Agilerl, overrides: tuple[str, ...], is_named: bool
) -> None:
    found = planned(agilerl, "--gpu", "l4", *overrides)
    load = found["workload"]
    assert load["micro_tokens"] >= 2048
    expected = load["micro_tokens"] // ceil(load["prompt"] + load["completion"])
    assert micro_batches(found["proposal"]["overrides"]) == [expected] * is_named


def test_a_micro_batch_that_does_not_fit_is_not_left_to_the_agents(agilerl: Agilerl, seven: str) -> None:
    lengths = ("--prompt-tokens", "300", "--completion-tokens", "600", "training.pop_size=1")
    found = planned(
        agilerl, f"network.pretrained_model_name_or_path={seven}", "--gpu", "l4", *lengths, "training.pop_size=1"
    )
    assert found["workload"]["max_tokens"] != found["workload"]["pass_tokens"]
    assert micro_batches(found["proposal"]["overrides"]) == [found["workload"]["max_tokens"] // 900]


def micro_batches(overrides: list[str]) -> list[int]:
    return [int(o.partition("=")[2]) for o in overrides if o.startswith("algorithm.micro_batch_size_per_gpu=")]


def test_twelve_questions_cannot_see_twenty_points(agilerl: Agilerl) -> None:
    text = " ".join(agilerl("plan", "--gpu", "l4", "environment.eval_prompts=12").output.split())
    assert "with 12 questions an exam can detect a difference in accuracy of 0.3 or more (95 %)" in text
    assert "(95 %); detecting 0.2 takes 32" in text


@pytest.mark.parametrize("difference", [0.2, 0.1, 0.05])
def test_an_exam_of_as_many_questions_as_said_sees_the_difference(difference: float) -> None:
    questions = questions_for(difference)
    assert smallest_difference(questions) <= difference < smallest_difference(questions - 1)
    # A panel on which half of the answers differ, by just so much: the exam's own comparison agrees.
    half, alike = questions // 2, [1.0] * (questions - questions // 2)
    sure = []
    for right in (floor(half / 2 + questions * difference / 2), ceil(half / 2 + questions * difference / 2)):
        first = [1.0] * right + [0.0] * (half - right)
        other = [1 - score for score in first]
        sure.append(probability_better(Fitness.from_scores(first + alike), Fitness.from_scores(other + alike)))
    assert sure[0] < 0.955
    assert sure[1] > 0.945


def test_the_time_of_a_run_is_that_of_its_generations_and_tests(agilerl: Agilerl) -> None:
    once, twice = (planned(agilerl, "--gpu", "l4", f"training.max_steps={n * 49152}") for n in (1, 2))
    generation = once["proposal"]["seconds"]["generation"]
    assert 48 / once["workload"]["iterations"] * generation < once["run"]["seconds"] < 60 * generation
    assert 1.5 < twice["run"]["seconds"] / once["run"]["seconds"] < 2.1
    text = agilerl("plan", "--gpu", "l4", "--price", "7200", "training.max_seconds=1").output
    assert "Time of the whole run, if started as above: about 1 s, at a cost of 2.00\n" in text


def test_an_agent_program_appears_and_the_command_allows_its_code(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("raise SystemExit('planning runs no code')\n")
    (tmp_path / "my.yaml").write_text("environment: {agent: 'agent.py:agent', task: 'reasoning_gym:spell_backward'}\n")
    found = planned(agilerl, "my.yaml", "--gpu", "l4")
    assert found["run"]["agent_program"].endswith("agent.py:agent")
    assert found["proposal"]["command"].endswith(" --allow-code")
    assert "the agent program writes them" in found["assumed"][0]
    # The path, which may be long, is cut to the width.
    lines = " ".join(agilerl("plan", "my.yaml", "--gpu", "l4").output.split())
    assert "each answer counts as one call of it" in lines
    assert "\nagent " in agilerl("plan", "my.yaml", "--gpu", "l4").output
    assert "--allow-code" not in planned(agilerl, "--gpu", "l4")["proposal"]["command"]


FEW = "environment={task: 'reasoning_gym:gcd', params: {min_numbers: 2, max_numbers: 2, max_value: 15}}"
"""Questions that are too few for the default exam."""


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.max_steps=2048",),
        ("environment.eval_prompts=40",),
        ("training.max_steps=64", "training.pop_size=4"),
        ("training.max_steps=2048", "training.pop_size=4", FEW),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:gcd has only")
def test_a_plan_has_the_generations_and_exams_of_the_run(
    agilerl: Agilerl, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = build(load_manifest(None, overrides))
    found = planned(agilerl, "--gpu", "l4", *overrides)
    load, length = found["workload"], plan_document(session, Path("run"))["length"]
    assert (load["iterations"], load["exam_prompts"]) == (
        session.generation_steps,
        len(session.population.places("exam")),
    )
    assert found["length"] == {name: length[name] for name in found["length"]}
    # The time of a dry run counts what all prompts begin with, too.
    counted = list[Lengths]()
    cpu = Machine(name="cpu", flops=1e11, bandwidth=1e10, memory=2**34, link=1e10)
    monkeypatch.setattr("agilerl.cli.forecast._measured", lambda **_: cpu)
    monkeypatch.setattr("agilerl.cli.forecast.whole_run", lambda _, rows, __: counted.append(rows) or 1.0)
    assert expected_seconds(Planned(session.resolved), session.population, 10) == 1
    assert counted[0].common == load["common"] > 0
    assert counted[0].test == length["test_prompts"]


def test_a_shell_reads_the_command_as_it_was_typed(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "it's $mine.yaml").write_text("environment: {task: 'reasoning_gym:spell_backward'}\n")
    typed = [
        "it's $mine.yaml",
        "environment.conversation_template=[{role: user, content: '{question}'}]",
        "algorithm.lr=0.001",
    ]
    command = planned(agilerl, *typed, "--gpu", "l4")["proposal"]["command"]
    assert shlex.split(command)[: 2 + len(typed)] == ["agilerl", "train", *typed]
    assert " algorithm.lr=0.001 " in command


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("NVIDIA B200", "b200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        # Others have other rates:
        *((other, "") for other in ("NVIDIA L40", "NVIDIA A10G", "NVIDIA A100-SXM-64GB", "NVIDIA A100 80GB PCIe")),
        *((other, "") for other in ("NVIDIA H100 NVL", "NVIDIA H100 64GB HBM2", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")),
        *((other, "") for other in ("NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA GeForce RTX 4090", "")),
    ],
)
def test_a_gpu_is_known_by_the_words_of_its_name(device: str, kind: str) -> None:
    assert data_sheet(device) == kind
