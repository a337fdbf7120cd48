"""A reward model made from a config, run for real."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from agilerl.errors import ConfigError, RewardError
from agilerl.models.base import load_tokenizer
from agilerl.rewards import RewardModelGrader, call_grader
from agilerl.rewards.grader import attempt_grader
from tests.tiny_models import llama

pytestmark = pytest.mark.model

ROWS = [{"question": question} for question in ("1+1?", "what is the longest of all these?", "b", "b")]
TEXTS = ["2", "this one, I would say", "", "a b c d e f g"]


def make_model(folder: Path, *, labels: int = 1, pad: bool = True, template: bool = True, positions: int = 128) -> Path:
    tokenizer = load_tokenizer("embedded")
    if not template:
        tokenizer.chat_template = None
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
    config = llama(**sizes, num_labels=labels, pad_token_id=tokenizer.pad_token_id)
    if not pad:
        config.pad_token_id = tokenizer.pad_token = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 if p.dim() == 1 else 8.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reward_model"))


def by_hand(folder: Path, prompt: str, completion: str) -> float:
    tokenizer = load_tokenizer("embedded")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])


def test_scores_are_the_models_own_on_the_templated_conversation(folder):
    with RewardModelGrader(str(folder), batch_size=3) as grader:
        scores = call_grader(grader, TEXTS, ROWS)
    expected = [by_hand(folder, row["question"], text) for row, text in zip(ROWS, TEXTS)]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == 4, "the scores tell the completions apart"


def test_without_template_or_pad_token(tmp_path):
    plain = make_model(tmp_path / "plain", template=False, pad=False)
    scores = call_grader(RewardModelGrader(str(plain), batch_size=8), TEXTS, ROWS)
    tokenizer = load_tokenizer("embedded")
    model = AutoModelForSequenceClassification.from_pretrained(plain, dtype=torch.float32).eval()
    for row, text, score in zip(ROWS, TEXTS, scores):
        ids = tokenizer(row["question"] + text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert score == pytest.approx(float(model(input_ids=ids).logits[0, 0]), abs=1e-5)


def test_too_long_is_a_failure_of_that_completion(folder):
    outcomes = attempt_grader(RewardModelGrader(str(folder)), ["2", "x " * 500], ROWS[:2])
    assert isinstance(outcomes[0], float)
    assert isinstance(outcomes[1], RewardError)
    assert "expected at most 128 tokens of prompt and completion" in str(outcomes[1])


def test_one_of_several_outputs(tmp_path):
    several = str(make_model(tmp_path / "several", labels=3))
    with pytest.raises(ConfigError, match=r"3 outputs: .*label .*0 to 2"):
        RewardModelGrader(several).setup()
    with pytest.raises(ConfigError, match="has 3 outputs"):
        RewardModelGrader(several, label=3).setup()
    scores = [call_grader(RewardModelGrader(several, label=n), ["2"], ROWS[:1])[0] for n in range(3)]
    assert len(set(scores)) == 3


def test_only_safetensors(tmp_path):
    pickled = make_model(tmp_path / "pickled")
    weights = AutoModelForSequenceClassification.from_pretrained(pickled).state_dict()
    torch.save(weights, pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"reward model .*pickled"):
        RewardModelGrader(str(pickled)).setup()
