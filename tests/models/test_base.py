"""Loading a base model: what is damaged or incomplete is told in a sentence, and never trained on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agilerl.errors import ConfigError, EngineError
from agilerl.models.base import from_model, load_base, load_tokenizer
from agilerl.models.model_config import _repeats_repeats
from tests.tiny_models import llama, qwen2, random_model

pytestmark = pytest.mark.model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model with a head of its own."""
    random_model(llama()).save_pretrained(tmp_path)
    return tmp_path


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def change_config(**changes: object) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one weight is missing": (change_weights(lambda w: w.pop(NORM)), rf"incomplete: {NORM} is missing from"),
    "the head is missing": (change_weights(lambda w: w.pop("lm_head.weight")), r"lm_head\.weight is missing"),
    "a layer too many in the configuration": (
        change_config(num_hidden_layers=3),
        r"incomplete: model\.layers\.2\.input_layernorm\.weight and 8 more are missing",
    ),
    "another shape": (
        change_weights(lambda w: w.update({NORM: torch.ones(7)})),
        rf"do not fit its config\.json: {NORM} has shape \[7\], expected \[64\]",
    ),
    "torn weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:999]),
        "cannot load the model .*: SafetensorError: .*; expected a local folder",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "Error no file named model.safetensors"),
    "a number that is text": (change_config(hidden_size="a"), "Field 'hidden_size' expected int, got str"),
    "heads that do not divide": (change_config(num_attention_heads=7), "not a multiple of the number of attention"),
    "no dictionary": (lambda f: (f / "config.json").write_text("[]"), "cannot load the model"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_told_in_a_sentence(name: str, folder: Path, capfd: pytest.CaptureFixture) -> None:
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(ConfigError, match=message) as error:
        load_base(str(folder))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")  # no report of transformers', no bar


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    change_weights(lambda w: w[NORM][3:4].fill_(float("nan")))(folder)
    with pytest.raises(EngineError, match=rf"not finite: .*{NORM}"):
        load_base(str(folder))


def test_numbers_that_overflow_are_no_damage() -> None:
    model = random_model(llama())
    with torch.no_grad():
        model.lm_head.weight.fill_(1e38)
    with pytest.raises(EngineError, match=r"not finite: .*data type"):
        from_model(model, "here").check_head()


@pytest.mark.parametrize("tied", [True, False])
def test_a_sound_model_loads_and_tied_weights_are_not_missing(tied: bool, tmp_path: Path) -> None:
    model = random_model(qwen2(tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    loaded = load_base(str(tmp_path)).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_tokenizers_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load a tokenizer from .*\w") as error:
        load_tokenizer(str(folder))
    assert not str(error.value).partition("; expected")[0].endswith((":", ","))
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("pattern", [r"(a+)+c", r"(?:(a*)b)*", r"(\w{2,})*", "(a{1,11})+", r"(a+)\1", "(a+){3}*"])
def test_a_repeat_of_repeats_in_a_tokenizer_is_seen(pattern: str) -> None:
    assert _repeats_repeats(pattern)


@pytest.mark.parametrize("pattern", ["[(a+)]+", r"(?:a[+)\]]b)+", "(a{1,3})+", r"\(a+\)+", "(?:[a[b]+]c)*"])
def test_an_expression_without_one_is_not_refused(pattern: str) -> None:
    assert not _repeats_repeats(pattern)
