"""Calls are read off the special tokens of a family; whatever else a completion holds, nothing is raised."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.envs.tools import MalformedCall, TextTagParser, ToolCall, parser_for
from agilerl.envs.tools.parsers import PARSERS, TemplateParser
from agilerl.errors import ConfigError
from tests.envs.tools.family_tokenizers import FAMILIES, encoded, hermes, mistral, typed, without_tools
from tutorials.tools import response_templates

ADD = ToolCall("add", {"a": 1, "b": 2})
SUB = ToolCall("sub", {"a": 5})

WRITTEN = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>', [ADD]),
    ("hermes", '<tool_call>\n{"arguments": {"a": 5}, "name": "sub"}\n</tool_call>', [SUB]),
    (
        "hermes",
        'I add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>\n'
        '<tool_call>{"name": "sub", "arguments": {"a": 5}}</tool_call><|im_end|>',
        [ADD, SUB],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
    ("hermes", '<tool_call>{"name": "sub", "arguments": "{\\"a\\": 5}"}</tool_call>', [SUB]),
    ("hermes", "The answer is 3.<|im_end|>", []),
    ("hermes", "</tool_call> 3", []),
    (
        "hermes",
        '<think><tool_call>{"name": "add"}</tool_call></think><tool_call>{"name": "sub", "arguments": {"a": 5}}'
        "</tool_call>",
        [SUB],
    ),
    ("hermes", 'so <tool_call>{"name": "add"}</tool_call></think> 3', []),  # the prompt opened the thinking
    ("hermes", '<think> maybe <tool_call>{"name": "add"}</tool_call>', []),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', [ADD]),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', [ADD]),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', [ADD]),
    ("llama", 'Let me see. <|python_tag|>{"name": "sub", "parameters": {"a": 5}}<|eom_id|>', [SUB]),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}', []),  # cut off: the turn did not end
    ("llama", 'Write {"name": "add", "parameters": {}} to add.<|eot_id|>', []),
    ("llama", '{"name": "Ada", "age": 36}<|eot_id|>', []),
    ("mistral_list", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]</s>', [ADD]),
    (
        "mistral_list",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "sub", "arguments": {"a": 5}}]</s>',
        [ADD, SUB],
    ),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>', [ADD]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]sub[ARGS]{"a": 5}</s>', [ADD, SUB]),
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{"a": 1, "b": 2}</s>',
        [ToolCall("add", {"a": 1, "b": 2}, "abc123XYZ")],
    ),
    ("mistral", '[THINK][TOOL_CALLS]sub[ARGS]{}[/THINK]Sum: [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>', [ADD]),
    ("mistral", "It is 3.</s>", []),
]

MALFORMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "</tool_call>"),
    ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', "</tool_call>"),
    ("hermes", "<tool_call>add(1, 2)</tool_call>", "no JSON"),
    ("hermes", '<tool_call>{"tool": "add"}</tool_call>', '"name"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', '"arguments"'),
    ("hermes", "<tool_call>" + "[" * 50_000 + "</tool_call>", "no JSON"),
    ("llama", "<|python_tag|><|eom_id|>", "Expecting value"),
    ("llama", "<|python_tag|>add.call(a=1)<|eom_id|>", "Expecting value"),
    ("llama", '{"name": "add", "parameters": {"a": 1}<|eot_id|>', "delimiter"),
    ("llama", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}<|eot_id|>', "Extra data"),
    ("llama", "<|python_tag|>" + "[" * 50_000 + "<|eom_id|>", "recursion"),
    ("llama", '<|python_tag|>{"name": "add"}<|eom_id|>', "missing key"),
    ("llama", '<|python_tag|>{"name": 1, "parameters": {}}<|eom_id|>', '"name"'),
    ("mistral", "[TOOL_CALLS] add 1 and 2</s>", "does not match"),
    ("mistral", "[TOOL_CALLS][]</s>", "does not match"),
    ("mistral", "[TOOL_CALLS]add[ARGS]1, 2</s>", "Extra data"),
    ("mistral", "[TOOL_CALLS]add[ARGS][1]</s>", '"arguments"'),
    ("mistral", "[TOOL_CALLS][ARGS]{}</s>", "does not match"),
    ("mistral", "[TOOL_CALLS] add [THINK]so[/THINK] 3</s>", "does not match"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{"a": 5</s>', "delimiter"),
    ("mistral_list", "[TOOL_CALLS] add 1 and 2</s>", "Expecting value"),
    ("mistral_list", '[TOOL_CALLS][{"arguments": {}}]</s>', '"name"'),
]


def parsed(family: str, ids: list[int], tokenizer: object = None) -> list[ToolCall | MalformedCall]:
    tokenizer = tokenizer or FAMILIES[family]()
    return parser_for(tokenizer).parse(ids, tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize(("family", "text", "calls"), WRITTEN)
def test_calls_are_read(family: str, text: str, calls: list[ToolCall]) -> None:
    tokenizer = FAMILIES[family]()
    assert parser_for(tokenizer).family == ("hermes" if family == "hermes" else "template")
    assert parsed(family, encoded(tokenizer, text), tokenizer) == calls


@pytest.mark.parametrize(("family", "text", "said"), MALFORMED)
def test_a_call_that_cannot_be_read_says_what_was_expected(family: str, text: str, said: str) -> None:
    found = parsed(family, encoded(FAMILIES[family](), text))
    problems = [call for call in found if isinstance(call, MalformedCall)]
    assert len(problems) == 1
    assert said in problems[0].problem
    assert problems[0].problem.startswith("expected ")
    assert len(problems[0].problem) < 400


# The bare form of Llama has no token of its own, except the end token that closes it.
@pytest.mark.parametrize(
    ("family", "text"),
    [(family, text) for family, text, _ in WRITTEN if "<|python_tag|>" in text or family != "llama"],
)
def test_tags_typed_as_prose_are_no_call(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    ids = typed(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert parsed(family, ids, tokenizer) == []


def test_a_typed_end_tag_does_not_end_a_call() -> None:
    tokenizer = hermes()
    inside = json.dumps({"name": "say", "arguments": {"text": "</tool_call>"}})
    ids = encoded(tokenizer, "<tool_call>") + typed(tokenizer, inside) + encoded(tokenizer, "</tool_call>")
    assert parsed("hermes", ids, tokenizer) == [ToolCall("say", {"text": "</tool_call>"})]


def test_xml_calls_where_the_template_writes_them() -> None:
    tokenizer = hermes("{{ messages[0].content }}{# <tool_call><function=f> #}")
    arguments = "<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>"
    text = f"<tool_call>\n<function=add>\n{arguments}\n</function>\n</tool_call>"
    assert parser_for(tokenizer).family == "qwen_coder"
    assert parsed("", encoded(tokenizer, text), tokenizer) == [ToolCall("add", {"a": "1", "b": "x\ny"})]
    (problem,) = parsed("", encoded(tokenizer, "<tool_call>{}</tool_call>"), tokenizer)
    assert "<function=name>" in problem.problem


def test_a_response_template_comes_first() -> None:
    tokenizer = hermes()
    calls = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
    fields = {"thinking": {"open": "<think>", "close": "</think>"}, "tool_calls": calls, "content": {}}
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    ids = encoded(tokenizer, '<tool_call>{"name": "sub", "arguments": {"a": 5}}</tool_call><|im_end|>')
    parser = parser_for(tokenizer)
    assert (parser.family, parser.tags) == ("template", ("</tool_call>", "<tool_call>"))
    assert parser.parse(ids, "") == [SUB]
    # What the chat template begins, an open thinking, is a part of the message.
    tokenizer.chat_template += "{%- if add_generation_prompt %}<think>{%- endif %}"
    assert parser_for(tokenizer).parse(ids, "") == []
    assert parser_for(tokenizer).parse(encoded(tokenizer, "so</think>") + ids, "") == [SUB]
    tokenizer.response_template = {"start_anchor": "x", "fields": {"content": {}}}
    assert parser_for(tokenizer).family == "hermes"


@pytest.mark.parametrize(
    "template", [{}, {"fields": {}}, {**response_templates.LLAMA, "field": 1}, {"start_anchor": "("}]
)
def test_a_response_template_that_cannot_be_used_is_refused(template: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected a response template of transformers"):
        TemplateParser(without_tools(), template)


def test_tokenizers_without_a_family_are_refused() -> None:
    with pytest.raises(ConfigError, match='parser="text"'):
        parser_for(without_tools())
    with pytest.raises(ConfigError, match="without </tool_call> and <tool_call>"):
        parser_for(mistral(), "hermes")
    with pytest.raises(ConfigError, match="expected a response template"):
        parser_for(hermes(), "template")
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        parser_for(hermes(), "hermas")


def test_tags_in_the_text_must_be_asked_for() -> None:
    parser = parser_for(without_tools(), "text")
    assert parser.parse([], 'x <tool_call>{"name": "sub", "arguments": {"a": 5}}</tool_call>') == [SUB]
    assert parser.parse([], "no call") == []
    assert isinstance(parser.parse([], "<tool_call>{")[0], MalformedCall)
    short = TextTagParser(begin="[", end="]")
    assert short.parse([], '[{"name": "now"}] and []')[0] == ToolCall("now", {})


TOKENIZERS = {**{name: make() for name, make in FAMILIES.items()}, "qwen_coder": hermes(), "text": mistral()}
FRAGMENTS = [
    '{"name": "add", ',
    '"arguments": {',
    '"parameters": {"a": 1}',
    "}",
    "[",
    "]",
    "add",
    ".call(",
    '"',
    "1e999",
]


@pytest.mark.parametrize("family", sorted(TOKENIZERS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_completion_breaks_a_parser(family: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[family]
    pieces = [[i] for i in range(len(tokenizer))] + [encoded(tokenizer, text) for text in FRAGMENTS]
    special = [[i] for i in tokenizer.get_added_vocab().values()]
    piece = st.one_of(st.sampled_from(pieces), st.sampled_from(special))
    ids = [token for part in data.draw(st.lists(piece, max_size=30)) for token in part]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    for call in parser_for(tokenizer, family if family in PARSERS else "template").parse(ids, text):
        assert isinstance(call, ToolCall | MalformedCall)
        if isinstance(call, ToolCall):
            assert isinstance(call.name, str)
            assert isinstance(call.arguments, dict)
