"""Templates of files: the output is that of transformers, but for the date, and they do not reach Python."""

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agilerl.envs.prompts import render_prompt
from agilerl.errors import ConfigError
from agilerl.models.base import load_tokenizer
from agilerl.text.templates import TemplateBrokenError, apply_chat_template, rendered, with_chat_template


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer("embedded")


@pytest.mark.parametrize("tail", ["yes", "yes ", " yes\n", "a CONTINUE", "ü"])
def test_a_prefill_ends_where_transformers_ends_it(tail: str, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": tail}]
    theirs = tokenizer.apply_chat_template(messages, continue_final_message=True)
    assert render_prompt(tokenizer, messages) == theirs["input_ids"]


def test_templates_get_tools_names_and_special_tokens(tokenizer: Any) -> None:
    source = (
        "{{ bos_token }}{{ tools | tojson }}{{ depth }}{% generation %}{{ messages[0].content }}{% endgeneration %}"
    )
    changed = with_chat_template(tokenizer, source=source, names={"depth": 3})
    text = apply_chat_template(changed, [{"role": "user", "content": "q"}], tools=[{"type": "function"}])
    assert text == tokenizer.bos_token + '[{"type": "function"}]3q'


def test_a_column_may_have_any_name() -> None:
    """Columns of a row become names of a judge's template."""
    template = ImmutableSandboxedEnvironment().from_string("{{ template }}{{ self_ }}")
    assert rendered(template, template="a", self_="b") == "ab"


BROKEN = {
    "python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "python by a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "python by a filter": "{{ messages | attr('__class__') | attr('__mro__') }}",
    "the environment": "{{ strftime_now.__globals__ }}",
    "a change of what it gets": "{{ messages.append(1) }}",
    "a long range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a division by zero": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_reaches_further_is_broken(name: str, tokenizer: Any) -> None:
    tokenizer.chat_template = BROKEN[name]
    try:
        text = apply_chat_template(tokenizer, [{"role": "user", "content": "hi"}])
    except (TemplateError, ValueError, TypeError):
        return
    assert text == "", text  # an attribute that the sandbox hides


def test_no_other_file_is_read(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% include '/etc/passwd' %}"
    with pytest.raises((TemplateError, TypeError)):
        apply_chat_template(tokenizer, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if %}", "{{ 1 / 0 }}"])
def test_what_is_no_template_is_refused_when_it_is_set(source: str, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="is not a chat template"):
        with_chat_template(tokenizer, source=source)


def test_a_failure_on_any_input_has_its_own_type(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(TemplateBrokenError, match="division by zero"):
        apply_chat_template(tokenizer, [{"role": "user", "content": "hi"}])
