"""The embedded base: what is shipped loads, renders, is as careless as promised, and can be built again."""

import hashlib
import itertools
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from agilerl.envs.core import is_held_out
from agilerl.errors import CheckpointError
from agilerl.models.tiny import MISTAKES, tiny_model_path
from agilerl.streams import stream
from tools.embedded_model.__main__ import main
from tools.embedded_model.build import Recipe, build
from tools.embedded_model.demonstrations import TASKS, Task, demonstrations
from tools.embedded_model.tokenizer import PHRASES
from tools.embedded_model.verify import BUILT_FILES, differences

ROOT = Path(__file__).resolve().parent.parent.parent
BY_NAME = {task.name: task for task in TASKS}
SHORT = Recipe(steps=3, batch=16, chunks=2)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model_path()).eval()


def held_out_entries(task: Task, count: int):
    dataset = reasoning_gym.create_dataset(task.name, seed=1_000_003, size=1, **task.parameters)
    entries: dict[str, dict] = {}
    index = 0
    while len(entries) < count:
        entry = dataset[index]
        index += 1
        if is_held_out(entry["question"]):
            entries.setdefault(entry["question"], entry)
    return dataset, list(entries.values())


def greedy_accuracy(model, tokenizer, task: Task, count: int = 200) -> float:
    dataset, entries = held_out_entries(task, count)
    chats = [[{"role": "user", "content": entry["question"]}] for entry in entries]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    scores = [dataset.score_answer(answer, entry) == 1.0 for answer, entry in zip(answers, entries)]
    return sum(scores) / count


def sums(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in BUILT_FILES}


@pytest.mark.processes
def test_naming_the_folder_imports_neither_torch_nor_transformers():
    program = (
        "import sys; from agilerl.models.tiny import tiny_model_path; print(tiny_model_path());"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'reasoning_gym', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(tiny_model_path()), "")


def test_the_shipped_files_are_small_and_complete():
    files = [path for path in tiny_model_path().iterdir() if path.is_file()]
    assert set(BUILT_FILES) | {"checksums.json", "README.md"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= 2 * 2**20


def test_the_shipped_model_loads_in_single_precision_with_tied_embeddings(model, tokenizer):
    config = model.config
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert config.vocab_size == len(tokenizer)
    assert config.hidden_size // config.num_attention_heads == 32
    assert (config.hidden_size % 32, config.intermediate_size % 32) == (0, 0)
    assert config.max_position_embeddings >= 512
    assert model.num_parameters() < 1_000_000
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_special_tokens_agree_between_tokenizer_and_model(model, tokenizer):
    tokens = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, tokenizer.sep_token, tokenizer.eos_token]
    assert tokens == ["<pad>", "<unk>", "<bos>", "<sep>", "<eos>"]
    assert len(set(tokenizer.convert_tokens_to_ids(tokens))) == 5
    for settings in (model.config, model.generation_config):
        assert settings.eos_token_id == tokenizer.eos_token_id
        assert settings.pad_token_id == tokenizer.pad_token_id
        assert settings.bos_token_id == tokenizer.bos_token_id


def test_every_printable_character_survives_the_round_trip(tokenizer):
    text = string.ascii_letters + string.digits + string.punctuation + " \n  two\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_an_unknown_character_becomes_one_unk_each(tokenizer):
    assert tokenizer.tokenize("aéß\tz") == ["a", "<unk>", "<unk>", "<unk>", "z"]


@pytest.mark.parametrize("phrase", PHRASES)
def test_each_phrase_is_one_token_wherever_it_stands(tokenizer, phrase):
    tokens = tokenizer.tokenize(f"x{phrase}y")
    assert tokens == ["x", phrase, "y"]
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(tokens)) == f"x{phrase}y"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_questions_of_the_tasks_use_the_phrases(tokenizer, task):
    question = held_out_entries(task, 1)[1][0]["question"]
    assert any(token in PHRASES for token in tokenizer.tokenize(question))
    assert len(tokenizer.tokenize(question)) <= 20


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_user_message_renders_to_the_training_format(tokenizer, add_generation_prompt):
    messages = [{"role": "user", "content": " What? "}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert text == "<bos> What? <sep>"


def test_longer_conversations_only_append(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1"}]},
        {"role": "assistant", "content": "2"},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "2 + 2"},
    ]
    rendered = [tokenizer.apply_chat_template(messages[: n + 1], tokenize=False) for n in range(len(messages))]
    assert rendered[-1] == "<bos>Be brief.\n1 + 1<sep>2<eos>ok<sep><eos>2 + 2<sep>"
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(rendered))


def test_an_unknown_role_is_named_in_the_error(tokenizer):
    with pytest.raises(Exception, match="found narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


@pytest.mark.model
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_base_is_careless_on_held_out_questions(model, tokenizer, task):
    # 200 questions: one accuracy has a standard error of 3.5 points.
    assert 0.22 <= greedy_accuracy(model, tokenizer, task) <= 0.63


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_demonstrations_leave_out_what_is_held_out_and_are_both_right_and_wrong(task):
    pairs, after = demonstrations(task, 300, start=0, draws=stream(1, "test"))
    dataset = reasoning_gym.create_dataset(task.name, seed=0, size=1, **task.parameters)
    answers: dict[str, str] = {}
    for index in range(after):
        answers.setdefault(dataset[index]["question"], dataset[index]["answer"])
    assert not any(is_held_out(question) for question, _ in pairs)
    assert 0.2 < sum(answers[question] == answer for question, answer in pairs) / len(pairs) < 0.7
    assert demonstrations(task, 300, start=0, draws=stream(1, "test")) == (pairs, after)


@pytest.mark.parametrize(
    ("task", "entry", "mistakes"),
    [
        ("spell_backward", {"answer": "detnaw"}, {"detna", "wanted", "dentaw"}),
        ("chain_sum", {"answer": "9", "metadata": {"expression": "7 - 3 + 5"}}, {"4", "-1", "8", "10"}),
        ("gcd", {"answer": "12", "metadata": {"numbers": [48, 36]}}, {"36", "1", "6"}),
        ("gcd", {"answer": "1", "metadata": {"numbers": [25, 36]}}, {"25", "2", "1"}),
    ],
)
def test_mistakes_are_the_plausible_ones(task, entry, mistakes):
    draws = stream(0, "test")
    assert {MISTAKES[task](entry, draws) for _ in range(200)} == mistakes


def test_six_hundred_words_and_more_are_held_out():
    words = reasoning_gym.create_dataset("spell_backward", seed=0, size=1, **BY_NAME["spell_backward"].parameters).words
    held_out = {word for word in words if is_held_out(f"Spell this word backward (example: sun -> nus): {word}")}
    assert len(held_out) == 6928


@pytest.mark.model
def test_building_twice_gives_the_same_bytes_and_another_seed_does_not(tmp_path):
    build(tmp_path / "a", SHORT)
    torch.randn(1)
    build(tmp_path / "b", SHORT)
    build(tmp_path / "c", Recipe(steps=3, batch=16, chunks=2, seed=1))
    a, b, c = (sums(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in BUILT_FILES if a[name] != c[name]} == {"model.safetensors"}


@pytest.mark.model
def test_building_leaves_the_global_generator_and_the_threads_alone(tmp_path):
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    build(tmp_path, SHORT)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


@pytest.mark.model
def test_a_short_build_writes_what_the_shipped_folder_has_apart_from_the_weights(tmp_path):
    build(tmp_path, SHORT)
    built, shipped = sums(tmp_path), sums(tiny_model_path())
    assert [name for name in BUILT_FILES if built[name] != shipped[name]] == ["model.safetensors"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.processes
def test_the_shipped_files_can_be_built_again_bit_for_bit(tmp_path):
    command = [sys.executable, "-m", "tools.embedded_model", "build", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_verify_accepts_the_shipped_files(capsys):
    assert main(["verify"]) == 0
    assert "byte for byte" in capsys.readouterr().out


@pytest.mark.parametrize("name", BUILT_FILES)
def test_verify_detects_a_changed_and_a_missing_file(tmp_path, capsys, name):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_model_path(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert main(["verify", str(folder)]) == 1
    assert f"{name} has sha256" in capsys.readouterr().err
    (folder / name).unlink()
    assert differences(folder, tiny_model_path()) == [f"{name} is missing from {folder}"]


def test_verify_without_checksums_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match="reinstall agilerl"):
        differences(tiny_model_path(), tmp_path)
