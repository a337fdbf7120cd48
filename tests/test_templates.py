"""Templates of files: what real ones give stays what transformers gives; what would never end is refused."""

# ruff: noqa: E501

import json
import resource
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from agilerl.models.base import load_tokenizer
from agilerl.templates import SECONDS, TemplateLimitError, _chat_template, apply_chat_template, rendered
from tests.training.small_runs import ROOT, environment

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add 'two' <numbers>.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "null"], "enum": [1, 2]}},
                "required": ["a"],
            },
        },
    }
]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi <b>é</b> \n"}],
    [
        {"role": "system", "content": " s "},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes "},
        {"role": "user", "content": "more"},
    ],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "3"},
        {"role": "assistant", "content": "3"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "hey"}]}],
]

IDIOMS = {
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = ns.last ~ m.role ~ ns.n %}{% endfor %}{{ ns.last }}|{{ ns.n * 2 }}|{{ 7 % 2 }}|{{ 7 // 2 }}",
    "loop variables": "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ loop.first }}"
    "{% if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "filtered loop": "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m.role }}{% else %}none{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "slices": "{{ messages[1:]|length }}{{ messages[::-1][0].role }}{{ 'abcdef'[1:-1] }}{{ bos_token[:2] }}",
    "thinking": "{% for m in messages %}{% if m.content is string and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{{ m.content.rstrip().replace('yes', 'no') }}{% endif %}{% endfor %}",
    "json": "{{ tools|tojson }}{{ tools|tojson(indent=4) }}{{ messages|tojson(ensure_ascii=True) }}"
    "{{ messages[0]|tojson(separators=(',', ':'), sort_keys=true) }}",
    "items": "{% for k, v in messages[0]|items %}{{ k }}={{ v }};{% endfor %}{% for k in messages[0].keys() %}{{ k }}{% endfor %}"
    "{% for k, v in messages[0]|dictsort %}{{ k }}{{ v }}{% endfor %}{{ messages[0].get('x', 'none') }}",
    "macros": "{% macro show(value, depth=0) %}{% if value is mapping %}{% for k, v in value|items %}"
    "{{ '  ' * depth }}{{ k }}:{{ show(v, depth + 1) }}{% endfor %}{% else %}{{ value }}{% endif %}{% endmacro %}"
    "{% for t in tools or [] %}{{ show(t) }}{% endfor %}{% call show('x') %}{% endcall %}",
    "filters": "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='role')|unique|list }}{{ [3, 1, 2]|sort|first }}"
    "{{ 'a-b'|upper|replace('-', '_')|capitalize|trim }}{{ '%s-%03d'|format('x', 7) }}{{ 'a\\nb'|indent(2) }}{{ [1,2]|sum }}",
    "formats": "{{ '%s %d' % ('a', 3) }}{{ '{} {:>5}'.format('a', 'b') }}{{ 3.14159|round(2) }}{{ 'x'|center(7) }}{{ 'a' * 5 }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "set block": "{% set text %}a {{ messages[0].role }}{% endset %}{{ text|trim }}{% filter upper %}b{% endfilter %}",
    "literals": "{{ [1, 'a', none, true] }}{{ {'a': [1], 'b': messages|length} }}{{ (1, 2) }}{{ 1 + 2 ** 3 - -1 }}{{ 5 / 2 }}",
    "raise": "{{ raise_exception('no ' + messages[0].role) }}",
    "undefined": "{{ nothing }}{{ nothing is defined }}{{ messages[0].nothing|default('d') }}{{ nothing.more }}",
    "recursive": "{% for t in [[1, [2, [3]]]] recursive %}({% if t is iterable %}{{ loop(t) }}{% else %}{{ t }}{% endif %}){% endfor %}",
}


def outcome(make: Any) -> str:
    try:
        return str(make())
    except Exception as error:
        return f"raises {type(error).__name__ if not isinstance(error, TemplateError) else str(error)}"


@pytest.mark.parametrize("name", IDIOMS)
def test_the_output_is_that_of_transformers(name: str) -> None:
    for conversation in CONVERSATIONS:
        for tools in (None, TOOLS):
            for prompt in (True, False):
                same(IDIOMS[name], conversation, tools, prompt)


def same(source: str, conversation: list[dict[str, Any]], tools: Any, prompt: bool) -> None:
    settings = {"tools": tools, "add_generation_prompt": prompt, **TOKENS}
    theirs = outcome(lambda: render_jinja_template([conversation], chat_template=source, **settings)[0][0])
    ours = outcome(lambda: rendered(_chat_template(source), messages=conversation, documents=None, **settings))
    assert ours == theirs


def test_the_templates_that_trl_ships_give_the_same() -> None:
    """Those of 30 and more families of models."""
    trl = pytest.importorskip("trl", reason="TRL is not installed; make setup installs it")
    from pathlib import Path

    paths = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(paths) > 20
    for path in paths:
        source = path.read_text()
        for conversation in CONVERSATIONS:
            for tools in (None, TOOLS):
                same(source, conversation, tools, True)


@pytest.mark.parametrize("tail", ["yes", "yes ", " yes\n", "a CONTINUE", "ü"])
def test_a_prefill_ends_where_transformers_ends_it(tail: str) -> None:
    tokenizer = load_tokenizer("embedded")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": tail}]
    for tokenize in (True, False):
        theirs = tokenizer.apply_chat_template(messages, tokenize=tokenize, continue_final_message=True)
        ours = apply_chat_template(tokenizer, messages, tokenize=tokenize, continue_final_message=True)
        assert ours == (theirs["input_ids"] if tokenize else theirs)


def test_a_column_may_have_any_name() -> None:
    """Columns of a row become names of a judge's template."""
    assert rendered(_chat_template("{{ template }}{{ self_ }}"), template="a", self_="b") == "ab"


# -- attacks -----------------------------------------------------------------------------------------------------------

R = "range(100000)"
DOUBLED = "{{% set ns = namespace(x={start}, y={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{end}"


def doubled(start: str, step: str, end: str = "{{ ns.x|length }}") -> str:
    return DOUBLED.format(start=start, step=step, end=end)


ATTACKS = {
    "letters": "{{ 'a' * 3000000000 }}",
    "letters, the other way": "{{ 3000000000 * 'a' }}",
    "letters, computed": "{% set n = 3000000000 %}{{ messages[0].content * n }}",
    "two loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    "two loops with a test": f"{{% for a in {R} %}}{{% for b in {R} if b < 0 %}}{{% endfor %}}{{% endfor %}}",
    "a long range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "a loop of lists": f"{{% for a in {R} %}}{{% set x = {R}|list %}}{{% endfor %}}",
    "a loop of sorting": f"{{% for a in {R} %}}{{% set x = {R}|sort %}}{{% endfor %}}",
    "powers": "{{ 10 ** (10 ** 10) }}",
    "squares": doubled("2", "{% set ns.x = ns.x * ns.x %}", "{{ ns.x % 7 }}"),
    "doubled with ~": doubled("'ab'", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubled with +": doubled("'ab'", "{% set ns.x = ns.x + ns.x %}"),
    "doubled in a block": doubled("'ab'", "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}"),
    "a list doubled": doubled("[1]", "{% set ns.x = ns.x + ns.x %}"),
    "laughter as text": doubled("['a']", "{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x }}"),
    "laughter compared": doubled(
        "['a']", "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}", "{{ ns.x == ns.y }}"
    ),
    "laughter of mappings": doubled("{}", "{% set ns.x = dict(a=ns.x, b=ns.x) %}", "{{ ns.x|tojson }}"),
    "laughter as a key": doubled("()", "{% set ns.x = (ns.x, ns.x) %}", "{{ {ns.x: 1} }}"),
    "laughter of namespaces": doubled("1", "{% set ns.x = namespace(a=ns.x, b=ns.x) %}", "{{ ns.x }}"),
    "laughter by a method": doubled("1", "{% set ns.x = {}.fromkeys([1, 2, 3], ns.x) %}", "{{ ns.x }}"),
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "center": "{{ 'a'|center(3000000000) }}",
    "center, a method": "{{ 'a'.center(3000000000) }}",
    "zfill": "{{ 'a'.zfill(3000000000) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(100000000) }}",
    "a wide format": "{{ '%3000000000d' % 1 }}",
    "a computed width": "{{ '%*d' % (3000000000, 1) }}",
    "a wide format, filter": "{{ '%3000000000d'|format(1) }}",
    "a wide format, method": "{{ '{:3000000000}'.format(1) }}",
    "a nested width": "{{ '{:{}}'.format(1, 3000000000) }}",
    "a wide format, mapping": "{{ '{a:3000000000}'.format_map({'a': 1}) }}",
    "many fields": "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "many fields, method": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace, filter": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "join": "{{ ('a' * 100000).join(range(100000)|map('string')|list) }}",
    "join, filter": "{{ range(100000)|join('a' * 100000) }}",
    "join of one text": "{% set s = 'x' * 1000000 %}{{ ([s] * 100000)|join }}",
    "one text, many times": "{% set s = 'x' * 1000000 %}{{ [s] * 100000 }}",
    "one text, many times, JSON": "{% set s = 'x' * 1000000 %}{{ ([s] * 100000)|tojson }}",
    "indent": "{{ ('a\\n' * 10000)|indent(100000) }}",
    "indent of JSON": "{{ [[1]]|tojson(indent=1000000000) }}",
    "separators of JSON": "{{ range(1000)|list|tojson(separators=('x' * 1000000, ':')) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "wordwrap": "{{ ('a b ' * 10000)|wordwrap(1, wrapstring='x' * 100000) }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "sum": "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "bytes": "{{ (1).to_bytes(3000000000, 'big') }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "two recursions": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "callers": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "output": f"{{% set s = 'x' * 1000000 %}}{{% for i in {R} %}}{{{{ s }}}}{{% endfor %}}",
    "output of text": f"{{% for i in {R} %}}" + "y" * 100_000 + "{% endfor %}",
    "thrown away": f"{{% set s = 'x' * 1000000 %}}{{% for i in {R} %}}{{% set t %}}{{{{ s }}}}{{% endset %}}{{% endfor %}}",
    "slices": "{% set s = 'x' * 8000000 %}{% set ns = namespace(l=[]) %}{% for i in range(1000) %}"
    "{% set ns.l = ns.l + [s[i:]] %}{% endfor %}",
    "a chain of filters": f"{{{{ {R}|map('replace', '0', 'x' * 100000)|join }}}}",
    "a filter in map": "{{ range(1000)|map('string')|map('center', 100000)|join }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "signs": "{{ " + "-" * 50_000 + "1 }}",
    "a long sum": "{{ 1" + "+1" * 50_000 + " }}",
    "deep conditions": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "deep loops": "{% for a in 'b' %}" * 60 + "{% endfor %}" * 60,
    "a long source": "{# " + "x" * 300_000 + " #}",
    "a division by zero": "{{ 1 / 0 }}",
    "python": "{{ ''.__class__.__mro__ }}",
    "another file": "{% include '/etc/passwd' %}",
}

ALSO_OUT_OF_TIME = {"a loop of sorting", "two loops with a test", "two recursions", "callers"}
"""Have a second, where "a loop of lists" has all the time of a rendering, and "two loops" all its steps."""

PROGRAM = """
import json, resource, sys, time
from jinja2 import TemplateError
from agilerl.templates import _chat_template, rendered
from agilerl import templates
space = 1500 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (space, space))
resource.setrlimit(resource.RLIMIT_CPU, (200, 200))
for line in sys.stdin:
    name, source, templates.SECONDS = json.loads(line)
    start = time.process_time()
    try:
        said = "gives " + rendered(_chat_template(source), messages=[{"role": "user", "content": "hi"}])[:50]
    except BaseException as error:
        typed = isinstance(error, (TemplateError, TypeError, ValueError))
        said = ("refused " if typed else "raises ") + type(error).__name__
    print(json.dumps([name, said, time.process_time() - start]), flush=True)
"""


@cache
def executed() -> dict[str, tuple[str, float]]:
    """Render every attack in one process, which has limits."""
    lines = [[name, source, 1.0 if name in ALSO_OUT_OF_TIME else SECONDS] for name, source in ATTACKS.items()]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment(),
        input=text,
        capture_output=True,
        text=True,
        timeout=400,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (said, seconds) for name, said, seconds in found}


@pytest.mark.model
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.processes
def test_a_template_without_bounds_is_refused(name: str) -> None:
    assert name in executed(), "the process did not survive it"
    said, seconds = executed()[name]
    assert said.startswith("refused "), said
    assert seconds < 12


def test_a_long_conversation_is_within_the_bounds() -> None:
    turns = [{"role": role, "content": "word " * 300} for _ in range(300) for role in ("user", "assistant")]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    for source in (IDIOMS["namespace"], IDIOMS["loop variables"], IDIOMS["thinking"], IDIOMS["items"]):
        rendered(_chat_template(source), messages=turns, tools=TOOLS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 2


def test_bounds_are_those_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agilerl.templates.STEPS", 2000)
    template = _chat_template("{% for a in range(100) %}{{ a }}{% endfor %}")
    for _ in range(20):
        rendered(template)
    with pytest.raises(TemplateLimitError):
        rendered(_chat_template("{% for a in range(2000) %}{{ a }}{% endfor %}"))
    assert rendered(_chat_template("{{ 'a' * 3 }}")) == "aaa"
