from pathlib import Path

import pytest

import agilerl
from agilerl.envs.prompts import check_tokenizer, decode_completions, render_prompt
from agilerl.errors import ConfigError, EnvError

USER = {"role": "user", "content": "3 + 4 = "}
TINY = Path(agilerl.__path__[0]) / "models" / "tiny"


def text(tokenizer, messages, **options):
    return tokenizer.decode(render_prompt(tokenizer, messages, **options))


def test_prompt_ends_where_the_assistant_begins(tokenizer):
    assert text(tokenizer, [USER]) == "<user>3 + 4 = <end><assistant>"
    system = {"role": "system", "content": "Add."}
    assert text(tokenizer, [system, USER]) == "<system>Add.<end><user>3 + 4 = <end><assistant>"


@pytest.mark.parametrize("prefill", ["The sum", "a\n<think>", "{", "ends with a blank "])
def test_a_last_message_of_the_assistant_is_continued(tokenizer, prefill):
    rendered = text(tokenizer, [USER, {"role": "assistant", "content": prefill}])
    assert rendered == f"<user>3 + 4 = <end><assistant>{prefill}"


def test_an_empty_prefill_is_the_generation_prompt(tokenizer):
    assert render_prompt(tokenizer, [USER, {"role": "assistant", "content": ""}]) == render_prompt(tokenizer, [USER])


def test_without_a_chat_template_the_contents_are_joined(tokenizer_without_template):
    messages = [{"role": "system", "content": "Add."}, USER]
    assert text(tokenizer_without_template, messages) == "Add.\n3 + 4 = "


def test_ids_are_plain_integers(tokenizer, tokenizer_without_template):
    for t in (tokenizer, tokenizer_without_template):
        ids = render_prompt(t, [USER])
        assert type(ids) is list
        assert {type(i) for i in ids} == {int}


def test_prompt_longer_than_the_context(tokenizer):
    count = len(render_prompt(tokenizer, [USER]))
    assert len(render_prompt(tokenizer, [USER], max_tokens=count)) == count
    with pytest.raises(EnvError, match=f"at most {count - 1} tokens, found {count};.*max_model_len"):
        render_prompt(tokenizer, [USER], max_tokens=count - 1)


def test_tokenizer_without_pad_token(tokenizer_without_pad):
    with pytest.raises(ConfigError, match=r"tokenizer\.pad_token = tokenizer\.eos_token"):
        render_prompt(tokenizer_without_pad, [USER])
    with pytest.raises(ConfigError, match="pad token"):
        check_tokenizer(tokenizer_without_pad)


def test_template_without_system_role(tokenizer_without_system_role):
    assert text(tokenizer_without_system_role, [USER]) == "<user>3 + 4 = <end><assistant>"
    with pytest.raises(ConfigError, match="system, user: System role not supported"):
        render_prompt(tokenizer_without_system_role, [{"role": "system", "content": "Add."}, USER])


@pytest.mark.parametrize(
    ("messages", "error", "sentence"),
    [
        ([], EnvError, "at least one message"),
        ([{"role": "assistant", "content": ""}], EnvError, "at least one message"),
        ([{"role": "user"}], ConfigError, "list of messages"),
        ([{"role": "user", "content": None}], ConfigError, "whose content is text, found .*None"),
    ],
)
def test_malformed_messages(tokenizer, messages, error, sentence):
    with pytest.raises(error, match=sentence):
        render_prompt(tokenizer, messages)


def test_an_empty_prompt_is_refused(tokenizer_without_template):
    with pytest.raises(EnvError, match="at least one token"):
        render_prompt(tokenizer_without_template, [{"role": "user", "content": ""}])


def test_decoding_stops_at_the_first_end_or_the_padding(tokenizer):
    ids = tokenizer("7").input_ids
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    junk = tokenizer("junk").input_ids
    said = [ids, [*ids, end, *junk], [*ids, pad, pad], [*ids, pad, *junk, pad], [end], [pad], []]
    # What something follows is not padding: the model sampled that token, and what comes after it.
    assert decode_completions(tokenizer, said) == ["7", "7", "7", "7junk", "", "", ""]


def test_decoding_changes_no_blank(tokenizer):
    odd = " a , b .  don 't \n"
    assert decode_completions(tokenizer, [tokenizer(odd).input_ids]) == [odd]


@pytest.mark.skipif(not (TINY / "tokenizer.json").exists(), reason="the embedded tokenizer has not been built")
def test_the_embedded_tokenizer_renders_and_reads_back():
    from transformers import AutoTokenizer

    tiny = AutoTokenizer.from_pretrained(TINY)
    question = "Spell this word backward (example: sun -> nus): apple"
    ids = render_prompt(tiny, [{"role": "user", "content": question}], max_tokens=64)
    assert question in tiny.decode(ids)
    assert tiny.unk_token_id not in ids
    assert decode_completions(tiny, [[*tiny("elppa", add_special_tokens=False).input_ids, tiny.eos_token_id]]) == [
        "elppa"
    ]
