"""Chat templates continue conversations; what rewrites earlier turns is noticed."""

import json
from pathlib import Path
from typing import Any

import pytest

from agilerl.envs.prompts import ChatFormat, as_messages
from agilerl.errors import ConfigError
from tests.envs.conftest import TEMPLATE, make_tokenizer

OPENING = [{"role": "user", "content": "go"}]
CUTS_THINKING = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}",
)
THINKS_FIRST = TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
TRIMS = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
MUTE = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] if m['role'] != 'assistant' else '' }}")
KNOWS_TOOLS = "{% if tools %}<system>{{ tools[0]['function']['name'] }}<end>{% endif %}" + TEMPLATE
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}


def text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_the_start_and_the_continuation_are_what_the_template_writes(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    said = [*tokenizer("yes", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    told = [{"role": "user", "content": "more"}]
    start, between = chat.prompt(OPENING), chat.between(OPENING, said, told)
    assert text(tokenizer, start) == "<user>go<end><assistant>"
    assert text(tokenizer, between) == "<user>more<end><assistant>"
    whole = tokenizer.apply_chat_template([*OPENING, {"role": "assistant", "content": "yes"}, *told],
                                          add_generation_prompt=True)["input_ids"]  # fmt: skip
    assert start + said + between == whole


def test_a_completion_that_was_cut_short_gets_its_end_from_the_environment(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    said = tokenizer("yes", add_special_tokens=False)["input_ids"]
    assert text(tokenizer, chat.between(OPENING, said, OPENING)) == "<end><user>go<end><assistant>"


def test_a_turn_that_ended_with_another_special_token_is_not_ended_twice(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<system>"
    system, tool, pad = tokenizer.convert_tokens_to_ids(["<system>", "<user>", "<pad>"])

    def between(last: int) -> str:
        return text(tokenizer, ChatFormat(tokenizer).between(OPENING, [3, last], OPENING))

    assert between(system) == "<user>go<end><assistant>"
    assert between(pad) == "<end><user>go<end><assistant>"  # sampled, and no end
    assert between(tool) == "<end><user>go<end><assistant>"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tool, pad]}))
    tokenizer = type(tokenizer).from_pretrained(tmp_path)
    assert between(pad) == between(tool) == "<user>go<end><assistant>"


def test_several_messages_at_once(tokenizer: Any) -> None:
    told = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    between = ChatFormat(tokenizer).between(OPENING, [tokenizer.eos_token_id], told)
    assert text(tokenizer, between) == "<user>a<end><user>b<end><assistant>"


@pytest.mark.parametrize(
    ("template", "rewrites"),
    [(TEMPLATE, False), (TRIMS, False), (KNOWS_TOOLS, False), (CUTS_THINKING, True), (THINKS_FIRST, True)],
    ids=["plain", "trims", "tools", "cuts thinking", "opens with thinking"],
)
def test_templates_that_rewrite_earlier_turns_are_noticed(template: str, rewrites: bool) -> None:
    assert ChatFormat(make_tokenizer(template)).rewrites_history is rewrites


def test_without_a_template_observations_stand_on_lines_of_their_own(tokenizer_without_template: Any) -> None:
    chat = ChatFormat(tokenizer_without_template)
    assert text(tokenizer_without_template, chat.prompt(OPENING)) == "go"
    assert text(tokenizer_without_template, chat.between(OPENING, [3], OPENING)) == "\ngo\n"
    assert not chat.rewrites_history


def test_the_template_can_be_left_out(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer, apply_chat_template=False)
    assert text(tokenizer, chat.prompt(OPENING)) == "go"


def test_tools_reach_the_prompt_or_are_refused(tokenizer: Any) -> None:
    knowing = make_tokenizer(KNOWS_TOOLS)
    assert text(knowing, ChatFormat(knowing, tools=[TOOL]).prompt(OPENING)).startswith("<system>add<end>")
    with pytest.raises(ConfigError, match="does not show tools"):
        ChatFormat(tokenizer, tools=[TOOL])


def test_a_template_that_hides_the_assistant_is_refused() -> None:
    chat = ChatFormat(make_tokenizer(MUTE))
    with pytest.raises(ConfigError, match=r"chat template.*assistant"):
        chat.between(OPENING, [3], OPENING)


def test_a_template_that_leaves_the_system_out_is_refused() -> None:
    deaf = make_tokenizer(
        TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    )
    with pytest.raises(ConfigError, match="system messages"):
        ChatFormat(deaf).prompt([{"role": "system", "content": "s"}, *OPENING])
    assert ChatFormat(deaf).prompt(OPENING)


@pytest.mark.parametrize("observation", [3, None, [], ["text"], [{"role": "user"}], b"bytes", {"role": "user"}])
def test_an_observation_is_text_or_messages(observation: Any) -> None:
    with pytest.raises(ConfigError, match="list of messages"):
        as_messages(observation)
    assert as_messages("hi") == [{"role": "user", "content": "hi"}]
