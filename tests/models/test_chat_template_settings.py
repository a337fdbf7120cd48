"""A chat template of one's own, and what templates read by name: they act wherever a prompt is rendered."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from agilerl.cli.progress import print_plan
from agilerl.config.manifest import load_manifest
from agilerl.config.named_files import check_unchanged, digests, named_files
from agilerl.envs.prompts import ChatFormat, render_prompt
from agilerl.errors import CheckpointError, ConfigError
from agilerl.models.base import load_tokenizer
from agilerl.models.tiny import tiny_model_path
from agilerl.runtime import Runtime
from agilerl.text.templates import with_chat_template
from agilerl.training.resolved import resolve
from agilerl.training.setup import build

pytestmark = pytest.mark.model

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}no thoughts "
    "{% endif %}{% endif %}"
)
TINY = ("training.max_steps=48", "training.evo_steps=1", "environment.test_prompts=4", "environment.eval_prompts=4")
ASKED = [{"role": "user", "content": "ab"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    return tmp_path / "own.jinja"


@pytest.mark.parametrize("thinking", [True, False])
def test_they_render_what_transformers_renders(file: Path, thinking: bool) -> None:
    given: dict[str, Any] = {"chat_template_path": file, "chat_template_kwargs": {"enable_thinking": thinking}}
    plain = AutoTokenizer.from_pretrained(tiny_model_path())
    expected = plain.apply_chat_template(
        ASKED, chat_template=TEMPLATE, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )
    ids = render_prompt(load_tokenizer("embedded", **given), ASKED)
    assert ids == expected == render_prompt(Runtime.from_pretrained("embedded", **given).tokenizer, ASKED)
    passed = with_chat_template(plain, file, {"enable_thinking": thinking})
    assert render_prompt(Runtime.from_pretrained("embedded", tokenizer=plain, **given).tokenizer, ASKED) == expected
    assert render_prompt(passed, ASKED) == expected
    assert "[user]ab[assistant]" + "no thoughts " * (not thinking) == plain.decode(ids)
    assert plain.chat_template != TEMPLATE  # the tokenizer that was given is not changed
    between = ChatFormat(passed).between(ASKED, [5], [{"role": "user", "content": "c"}])
    assert passed.decode(between) == "[user]c[assistant]" + "no thoughts " * (not thinking)


def test_they_act_in_a_manifest(file: Path) -> None:
    manifest = file.parent / "run.yaml"
    manifest.write_text("network: {chat_template_path: own.jinja, chat_template_kwargs: {enable_thinking: false}}\n")
    config = load_manifest(manifest, TINY)
    session = build(config)
    row, ids = session.population.examiner.panel("exam")[0]
    assert session.population.tokenizer.decode(ids) == f"[user]{row['question']}[assistant]no thoughts "
    network = resolve(config).document()["network"]
    assert network["chat_template_path"] == str(file)
    assert network["chat_template_kwargs"] == {"enable_thinking": False}
    assert resolve(load_manifest(None, TINY)).document()["network"]["chat_template_path"] is None

    recorded = digests(named_files(config))
    assert list(recorded["data"]) == [str(file)]
    check_unchanged(named_files(config), recorded, file.parent)
    file.write_text(TEMPLATE + " ")
    with pytest.raises(CheckpointError, match="has changed"):
        check_unchanged(named_files(config), recorded, file.parent)


def test_a_manifest_names_templates_of_its_own_folder_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = file.parent / "inner"
    inner.mkdir()
    manifest = inner / "run.yaml"
    manifest.write_text("network: {chat_template_path: ../own.jinja}")
    with pytest.raises(ConfigError, match="folder of the manifest"):
        load_manifest(manifest)
    manifest.write_text("{}")
    monkeypatch.chdir(file.parent)
    assert load_manifest(manifest, ["network.chat_template_path=own.jinja"]).network.chat_template_path == str(file)


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("{% for %}", {}, "not a chat template"),
        (None, {}, "cannot be read"),
        ("x" * (2**20 + 1), {}, "expected at most"),
        (TEMPLATE, {"enable_thoughts": True}, "does not read enable_thoughts"),
        (TEMPLATE, {"messages": []}, "remove it"),
        (TEMPLATE, {"add_generation_prompt": False}, "remove it"),
    ],
)
def test_wrong_ones_are_refused(tmp_path: Path, text: str | None, names: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.jinja"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer("embedded", chat_template_path=path, chat_template_kwargs=names)


def test_names_without_a_template_are_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        with_chat_template(tokenizer, None, {"enable_thinking": False})


def test_the_plan_says_what_pads_and_that_there_is_no_template(tmp_path: Path) -> None:
    def plan(*changes: str) -> str:
        session, console = build(load_manifest(None, [*TINY, *changes])), Console(record=True, width=300)
        print_plan(session, tmp_path / "run", console)
        return console.export_text()

    text = plan()
    assert "its end token" not in text
    assert "no chat template" not in text
    assert "a chat model" not in text
    chat = f"network.pretrained_model_name_or_path={tiny_model_path()}"
    assert "seldom writes the answer alone: answer_format=after" in plan(chat)
    assert "a chat model" not in plan(chat, "environment.answer_format=after")
    bare = tmp_path / "bare"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.chat_template = tokenizer.pad_token = None
    tokenizer.save_pretrained(bare)
    base = Runtime.from_pretrained("embedded").base.model
    with torch.no_grad():
        base.save_pretrained(bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    text = plan(f"network.pretrained_model_name_or_path={bare}")
    assert text.count("no chat template") == 1
    assert text.count("its end token") == 1
