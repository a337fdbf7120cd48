"""Calls are read off the special tokens of a family; whatever else a completion holds, nothing is raised."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.envs.tools import MalformedCall, TextTagParser, ToolCall, parser_for
from agilerl.envs.tools.parsers import PARSERS, TemplateParser
from agilerl.errors import ConfigError
from tests.envs.tools.family_tokenizers import FAMILIES, HERMES, encoded, hermes, mistral, typed, without_tools
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


def xml(**parameters: str) -> str:
    return "".join(f"<parameter={key}>{value}</parameter>" for key, value in parameters.items())


CODED: dict[str, tuple[str, list[ToolCall | None]]] = {  # None: a malformed call
    "two functions in one tag": (
        f"<tool_call><function=f>{xml(a='1')}</function>\n<function=g>{xml(b='2')}</function></tool_call>",
        [ToolCall("f", {"a": "1"}), ToolCall("g", {"b": "2"})],
    ),
    "a value with the closing marks": (
        "<tool_call><function=f><parameter=a>x </parameter> y </function> z</parameter></function></tool_call>",
        [ToolCall("f", {"a": "x </parameter> y </function> z"})],
    ),
    "a value with the closing tag": (
        f"<tool_call><function=f>{xml(a='x </tool_call> y')}</function></tool_call> so",
        [ToolCall("f", {"a": "x </tool_call> y"})],
    ),
    "a value with an opening mark": (
        f"<tool_call><function=f>{xml(a='<parameter=b> y')}</function></tool_call>",
        [ToolCall("f", {"a": "<parameter=b> y"})],
    ),
    "no parameters": ("<tool_call><function=f></function></tool_call>", [ToolCall("f", {})]),
    "text before the function": (f"<tool_call>So: <function=f>{xml(a='1')}</function></tool_call>", [None]),
    "text behind the function": (f"<tool_call><function=f>{xml(a='1')}</function> so</tool_call>", [None]),
    "text between parameters": (
        f"<tool_call><function=f>{xml(a='1')} and {xml(b='2')}</function></tool_call>",
        [None],
    ),
    "text before parameters": (f"<tool_call><function=f>so {xml(a='1')}</function></tool_call>", [None]),
    "a parameter that is not closed": ("<tool_call><function=f><parameter=a>1</function></tool_call>", [None]),
    "a parameter twice": (f"<tool_call><function=f>{xml(a='1')}{xml(a='2')}</function></tool_call>", [None]),
    "a function that is not closed": (f"<tool_call><function=f>{xml(a='1')}</tool_call>", [None]),
    "the second one is not closed": (
        f"<tool_call><function=f>{xml(a='1')}</function><function=g></tool_call>",
        [ToolCall("f", {"a": "1"}), None],
    ),
    "a tag that is not closed": (f"<tool_call><function=f>{xml(a='1')}</function>", [None]),
    "a tag that is not opened": (f"<function=f>{xml(a='1')}</function></tool_call>", [None]),
    "no tags": (f"I call <function=f>{xml(a='1')}</function>", [None]),
    "no tags behind a call": (
        f"<tool_call><function=f></function></tool_call><function=g>{xml(a='1')}</function>",
        [ToolCall("f", {}), None],
    ),
    "a call and a thought": (
        "<tool_call><function=f></function></tool_call><think>so</think> done",
        [ToolCall("f", {})],
    ),
}
CODER = "{{ messages[0].content }}{# <tool_call><function=f> #}"


@pytest.mark.parametrize("name", CODED)
def test_nothing_of_an_xml_call_is_lost(name: str) -> None:
    text, expected = CODED[name]
    tokenizer = hermes(CODER)
    found = parsed("", encoded(tokenizer, text), tokenizer)
    assert [call if isinstance(call, ToolCall) else None for call in found] == expected


NOW = '{"name": "now"}'
TAGGED: dict[str, tuple[str, list[ToolCall | None]]] = {
    "two calls in one tag": (f"<tool_call>{NOW}{NOW}</tool_call>", [None]),
    "a list of calls": (f"<tool_call>[{NOW}]</tool_call>", [None]),
    "a value with the closing tag": (
        '<tool_call>{"name": "say", "arguments": {"text": "a </tool_call> b"}}</tool_call>',
        [ToolCall("say", {"text": "a </tool_call> b"})],
    ),
    "a value with both tags": (
        '<tool_call>{"name": "say", "arguments": {"text": "<tool_call></tool_call>"}}</tool_call>',
        [None, None],
    ),
    "text between two calls": (
        f"<tool_call>{NOW}</tool_call> and <tool_call>{NOW}</tool_call>",
        [ToolCall("now", {})] * 2,
    ),
    "the second is not opened": (f"<tool_call>{NOW}</tool_call>{NOW}</tool_call>", [ToolCall("now", {}), None]),
    "the second is not closed": (f"<tool_call>{NOW}</tool_call><tool_call>{NOW}", [ToolCall("now", {}), None]),
    "the only one is not opened": (f"{NOW}</tool_call>", [None]),
    "a call that another text closes": ("</tool_call> 3", []),
    "a key twice": ('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', [None]),
    "a name twice": ('<tool_call>{"name": "f", "name": "g"}</tool_call>', [None]),
    "arguments twice": ('<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>', [None]),
    "arguments beside the name": ('<tool_call>{"name": "f", "a": 1}</tool_call>', [None]),
    "before a thought": (f"<tool_call>{NOW}</tool_call><think>so</think>done", [ToolCall("now", {})]),
    "between thoughts": (f"<think>a</think><tool_call>{NOW}</tool_call><think>b", [ToolCall("now", {})]),
    "in a thought that the prompt began": (f"<tool_call>{NOW}</tool_call></think>done", []),
}


@pytest.mark.parametrize("family", ["hermes", "text"])
@pytest.mark.parametrize("name", TAGGED)
def test_nothing_of_a_tagged_call_is_lost(name: str, family: str) -> None:
    text, expected = TAGGED[name]
    if family == "text" and "<think>" not in text and "</think>" in text:
        expected = [ToolCall("now", {})]  # in the text thinking is text
    tokenizer = hermes()
    found = parser_for(tokenizer, family).parse(encoded(tokenizer, text), text)
    assert [call if isinstance(call, ToolCall) else None for call in found] == expected


def test_what_the_prompt_has_opened_is_thinking_as_well() -> None:
    tokenizer = hermes(HERMES + "{%- if add_generation_prompt %}<think>{%- endif %}")
    call = f"<tool_call>{NOW}</tool_call>"
    for text, calls in ((f"maybe {call}", 0), (f"so</think>{call}", 1), (f"{call}</think>{call}", 1)):
        assert len(parsed("", encoded(tokenizer, text), tokenizer)) == calls, text


def templated(content: str, arguments: dict[str, object], text: str) -> list[ToolCall | None]:
    tokenizer = hermes()
    calls = {
        "open_pattern": r"<tool_call>(?P<name>\w+):",
        "close": "</tool_call>",
        "repeats": True,
        "content": content,
        "content_args": arguments,
        "transform": {"name": "{name}", "arguments": "{content}"},
    }
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": {"tool_calls": calls, "content": {}}}
    found = TemplateParser(tokenizer, template).parse(encoded(tokenizer, text), "")
    return [call if isinstance(call, ToolCall) else None for call in found]


XML = {"tag_pattern": r"<p=(?P<key>\w+)>(?P<value>.*?)</p>"}


@pytest.mark.parametrize(
    ("content", "settings", "body", "arguments"),
    [
        ("xml-inline", XML, "<p=a>1</p>\n<p=b>2</p>", {"a": "1", "b": "2"}),
        ("xml-inline", XML, "<p=a>1</p> and <p=b>2</p>", None),
        ("xml-inline", XML, "<p=a>x </p> y</p>", None),
        ("xml-inline", XML, "<p=a>1</p><p=b>2", None),
        ("xml-inline", XML, "<p=a>1</p><p=a>2</p>", None),
        ("xml-inline", {**XML, "merge_duplicates": True}, "<p=a>1</p><p=a>2</p>", {"a": ["1", "2"]}),
        ("kv-lines", {}, "a: 1\n\nb: 2", {"a": "1", "b": "2"}),
        ("kv-lines", {}, "a: 1\nso\nb: 2", None),
        ("kv-lines", {}, "a: 1\na: 2", None),
        ("json", {}, '{"a": 1}', {"a": 1}),
        ("json", {}, '{"a": 1, "a": 2}', None),
    ],
)
def test_nothing_of_a_templates_call_is_lost(
    content: str, settings: dict[str, object], body: str, arguments: dict[str, object] | None
) -> None:
    text = f"So <tool_call>f:{body}</tool_call><tool_call>g:</tool_call>"
    if content == "json":
        text = text.replace("g:", "g:{}")
    expected = [None] if arguments is None else [ToolCall("f", arguments), ToolCall("g", {})]
    assert templated(content, settings, text) == expected


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
