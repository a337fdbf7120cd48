"""Other tasks than the default, other models than the one inside the package, other budgets."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from peft import PeftModel
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agilerl.cli.adapter import subject
from agilerl.config.manifest import load_manifest
from agilerl.envs.answer_format import AnswerFormat, AnswerFormatTask, Format
from agilerl.errors import ConfigError
from agilerl.training.setup import build
from agilerl.training.tasks import task as task_of
from tests.tiny_models import llama, random_model
from tests.training.small_runs import lines, run_here

pytestmark = pytest.mark.model

TINY = ("training.max_steps=48", "training.evo_steps=1", "environment.test_prompts=4", "environment.eval_prompts=4")


def prompts(root: Path) -> list[str]:
    return [row["prompt"] for row in parquet.read_table(root / "completions" / "step_000001.parquet").to_pylist()]


def test_a_dataset_with_parameters(tmp_path: Path) -> None:
    root = run_here(tmp_path / "run", *TINY, "environment.task=reasoning_gym:gcd", "environment.params.max_value=60")
    assert all("Greatest Common Divisor" in prompt for prompt in prompts(root))
    config = json.loads((root / "run.json").read_text())["config"]
    assert config["environment"]["params"] == {"max_value": 60}  # not those of the default's dataset
    assert json.loads((root / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("kind", ["tags", "last_number", "after", "boxed"])
def test_an_answer_format(kind: Format, tmp_path: Path) -> None:
    phrase = ("environment.answer_phrase='It is'",) if kind == "after" else ()
    root = run_here(tmp_path / "run", *TINY, f"environment.answer_format={kind}", *phrase)
    asked = AnswerFormat(kind, "It is")
    rows = parquet.read_table(root / "completions" / "step_000001.parquet").to_pylist()
    for row in rows:  # whole completions are kept, and their answers graded
        right = (asked.find(row["completion"]) or "") == row["answer"]
        assert row["reward"] == right
    assert any(row["reward"] for row in rows) == (kind == "last_number")
    # What follows a run has its setting.
    task = build(subject(root, examined=True).config).task
    assert isinstance(task, AnswerFormatTask)
    assert task.format == (asked if phrase else AnswerFormat(kind))
    (message,) = task.messages(task.row("exam", 0))
    assert message["content"].endswith(task.format.instruction)
    task.close()


def test_an_answer_format_of_a_dataset_with_graders(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(60))
    )
    manifest = tmp_path / "rows.yaml"
    manifest.write_text(
        "environment: {dataset: rows.jsonl, answer_format: after, graders: [{name: accuracy}, {name: task}]}"
    )
    made = task_of(load_manifest(manifest, [*TINY]))
    row = made.row("exam", 0)
    texts = [f"The answer is {row['answer']}.", row["answer"]]
    assert made.grade(texts, [row, row]).scores == {"accuracy": [1.0, 0.0], "task": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["environment.answer_format=box"], "'boxed', found 'box'"),
        (["environment.answer_phrase=It is"], "for answer_format: after, found whole"),
        (["environment.answer_format=after", 'environment.answer_phrase="a\\e[2J"'], "control characters"),
        (["environment.answer_format=tags", "environment.env_type=sft"], "env_type: reasoning, found sft"),
    ],
)
def test_wrong_answer_formats(settings: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        task_of(load_manifest(None, settings))


@pytest.mark.parametrize(
    ("answers", "answer_format", "read"),
    [
        (("billing", "login"), "last_number", "''"),
        (("Mr. Smith", "Mrs. Jones"), "after", "'Mrs?'"),
        (("1.2.3", "4.5.6"), "last_number", "'[36]'"),
        (("12 apples", "3 pears"), "last_number", "'(12|3)'"),
        (("first line\nsecond", "a\nb"), "after", "'(first line|a)'"),
    ],
)
def test_a_format_in_which_right_answers_earn_nothing_is_refused(
    answers: tuple[str, str], answer_format: str, read: str, tmp_path: Path
) -> None:
    rows = ({"question": f"ticket {n}", "answer": answers[n % 2]} for n in range(60))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = tmp_path / "rows.yaml"
    manifest.write_text(f"environment: {{dataset: rows.jsonl, answer_format: {answer_format}}}")
    sentence = f"answer_format={answer_format} does not fit .* is read as {read} and earns 0; so do 8 of 8 rows"
    with pytest.raises(ConfigError, match=sentence):
        task_of(load_manifest(manifest, [*TINY]))
    assert task_of(load_manifest(manifest, [*TINY, "environment.answer_format=tags"])).exam_prompts


def test_a_composite(tmp_path: Path) -> None:
    manifest = tmp_path / "mix.yaml"
    manifest.write_text(
        """
algorithm: {name: GRPO, lr: 1e-4, group_size: 2, batch_size: 8, max_output_tokens: 4}
environment:
  task: reasoning_gym:composite
  params:
    datasets:
      - {name: gcd, weight: 1, config: {max_value: 40}}
      - {name: spell_backward, weight: 2.0}
  data_batch_size_per_gpu: 8
  eval_prompts: 4
  test_prompts: 4
  reward: score
training: {pop_size: 2, max_steps: 32, evo_steps: 1, max_tokens: 1000000, max_seconds: 600}
mutation: {probabilities: {arch_mut: 1, rl_hp_mut: 0}}
selection_strategy: {name: truncation}
network: {lora_config: {r: 4, target_modules: [q_proj, v_proj]}}
"""
    )
    session = build(load_manifest(manifest))
    kinds = {"divisor" in session.task.row("train", i)["question"].lower() for i in range(40)}
    assert kinds == {True, False}
    assert all(shape.name.endswith(("q_proj", "v_proj")) for shape in session.population.runtime.store.layers)
    assert [agent.rank for agent in session.population.agents] == [4, 4]


def test_a_template_and_a_prefill(tmp_path: Path) -> None:
    template = "[{role: user, content: 'Please:{question}'}, {role: assistant, content: 'The'}]"
    session = build(load_manifest(None, [f"environment.conversation_template={template}", *TINY]))
    row, ids = session.population.examiner.panel("exam")[0]
    text = session.population.tokenizer.decode(ids)
    assert f"Please:{row['question']}" in text
    assert text.endswith("The")


def test_the_token_budget_ends_a_run(tmp_path: Path) -> None:
    root = run_here(tmp_path / "run", "training.max_tokens=2000", "training.max_steps=100000")
    summary = json.loads((root / "summary.json").read_text())
    iterations = {r["step"] for r in lines(root / "metrics.jsonl") if r["kind"] == "train"}
    assert summary["iterations"] == len(iterations) < 5
    assert sum(summary["tokens"].values()) >= 2000


# -- a model folder of one's own --------------------------------------------------------------------------------------


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; without a chat template."""
    letters = ["<pad>", "<eos>", "<unk>", *(chr(c) for c in range(32, 127))]
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = character_tokenizer()
    random_model(llama(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def use(folder: Path) -> str:
    return f"network.pretrained_model_name_or_path={folder}"


def test_a_local_model_with_its_own_tokenizer(llama_folder: Path, tmp_path: Path) -> None:
    root = run_here(tmp_path / "run", *TINY, use(llama_folder), "algorithm.max_model_len=120")
    tokenizer = AutoTokenizer.from_pretrained(root / "elite")
    assert len(tokenizer) == 98
    base = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, root / "elite")
    assert model.peft_config["default"].base_model_name_or_path == str(llama_folder)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 40)[None]).logits
    assert torch.isfinite(logits).all()


def without_pad(folder: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def too_small(folder: Path) -> None:
    random_model(llama(vocab_size=20)).save_pretrained(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "unknown architecture": (lambda f: (f / "config.json").write_text('{"model_type": "nonsense"}'), "nonsense"),
    "no tokenizer": (without_tokenizer, "cannot load a tokenizer"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "cannot load a tokenizer"),
    "no pad token": (without_pad, "neither a pad token nor an end token"),
    "more tokens than the model": (too_small, "98 tokens, the model 20"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_folder(name: str, llama_folder: Path, tmp_path: Path) -> None:
    change, message = DAMAGES[name]
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    change(folder)
    with pytest.raises(ConfigError, match=message):
        build(load_manifest(None, [use(folder), *TINY]))


def test_weights_larger_than_the_memory(llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    with open(folder / "more.safetensors", "wb") as file:
        file.truncate(2**43)  # a hole: takes no space
    with pytest.raises(ConfigError, match=r"8,192\.0 GiB .*base"):
        build(load_manifest(None, [use(folder), *TINY]))
