"""What the manifest's YAML reads, and what it refuses."""

import pytest

from agilerl.config.plain_yaml import parse_yaml
from agilerl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-6", 5e-6),
        ("1e5", 1e5),
        ("+.5E3", 500.0),
        ("-3", -3),
        ("010", 10),
        ("1.", 1.0),
        ("true", True),
        ("~", None),
        ("", None),
        ("# nothing", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'5e-6'", "5e-6"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1_000", "1_000"),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
        ("{a: {b: [c]}}", {"a": {"b": ["c"]}}),
        ("a: |\n  x\n  y\n", {"a": "x\ny\n"}),
        ("a: 1\r\nb: ü\r\n", {"a": 1, "b": "ü"}),
    ],
)
def test_reads(text: str, value: object) -> None:
    found = parse_yaml(text, "it")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"line 3: the key 'a' .* line 1"),
        ("x:\n  a: 1\n  a: 1", r"line 3: the key 'a' .* line 2"),
        ("{a: 1, a: 2}", "the key 'a'"),
        ("1: 2", r"a key .* text, found 1"),
        ("true: 2", r"a key .* text, found true"),
        ("? [a]\n: 2", "text, found a collection"),
        ("a: &x [1]\nb: *x", r"line 2: the alias \*x"),
        ("a: &a [*a]", r"the alias \*a"),
        ("!!python/object/apply:os.system ['true']", "the tag !!python/object/apply:os.system is not supported"),
        ("!!python/name:os.system", "the tag !!python/name:os.system is not supported"),
        ("a: !!str 5", "the tag !!str is not supported"),
        ("!!set {a}", "the tag !!set is not supported"),
        ("[1, 2", "expected ',' or ']'"),
        ("a: b: c", "mapping values are not allowed here"),
        ("\t- a", r"character '\\t'"),
        ("a: '", "unexpected end of stream"),
        ("a: \0", "special characters are not allowed"),
        ("a: 1\n---\nb: 2", "another document"),
        ("1e400", "the number 1e400"),
        ("9" * 5000, r"the number 9{20}\.\.\."),
        ("[" * 30 + "]" * 30, "more than 20 levels of nesting"),
        ("- " * 5000 + "x", "more than 20 levels of nesting"),
        ("[" * 200_000, "more than 20 levels of nesting"),
    ],
)
def test_refuses_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^it .*YAML.*{message}") as caught:
        parse_yaml(text, "it")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_bomb_does_not_go_off() -> None:
    text = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    with pytest.raises(ConfigError, match="line 2: the alias"):
        parse_yaml(text, "it")
