"""The YAML that a manifest may hold: plain data and nothing else."""

import math
import re
from typing import Any

import yaml

from agilerl.errors import ConfigError

_DEPTH = 20
_DIGITS = 100
_SCALARS = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
}
"""YAML 1.2's core schema in decimal: ``1e-5`` is a number, ``010`` is ten, and ``no``, ``1:30`` and dates are text."""


def parse_yaml(text: str, where: str) -> Any:
    """Return what a YAML text holds: None, bool, int, float, str, and lists and dicts of these.

    Raises ConfigError, with ``where`` and the line, for broken YAML, a key given twice or that is not text, an alias,
    a tag, a number too large for a float, and nesting beyond 20 levels.
    """
    try:
        loader = _PlainLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text.strip() else ""
        raise ConfigError(f"{where} cannot be read as YAML{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} cannot be read as YAML: {' '.join(str(error).split())}") from None


class _PlainLoader(yaml.SafeLoader):
    """Reads what PyYAML's safe loader reads, less aliases, tags and surprises."""

    # Empty: without its resolver, even the merge key << is only text.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML reads it under this name)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases (a few lines of them unfold into gigabytes), tags, and nesting that no manifest needs."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self._refuse(event, f"the alias *{event.anchor} is not supported; write the value out, or quote the text")
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, f"the tag {tag} is not supported; leave it out, or quote the text")
        if self._level >= _DEPTH:
            self._refuse(event, f"found more than {_DEPTH} levels of nesting")
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice, of which PyYAML would keep the last in silence."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
                self._refuse(key, f"a key must be text, found {shown}; quote it")
            if key.value in lines:
                first = lines[key.value] + 1
                self._refuse(key, f"the key {key.value!r} is given twice, first in line {first}; keep one of the two")
            lines[key.value] = key.start_mark.line
        return super().construct_mapping(node, deep)

    def number(self, node: yaml.ScalarNode) -> int | float:
        """Return an int or a finite float."""
        # Python refuses to convert thousands of digits, and takes quadratic time for fewer.
        if node.tag.endswith("int") and len(node.value) <= _DIGITS:
            return int(node.value)
        value = float(node.value)
        if not math.isfinite(value) or node.tag.endswith("int"):
            self._refuse(node, f"the number {node.value[:20]}{'...' * (len(node.value) > 20)} is too large")
        return value

    def _refuse(self, node: Any, problem: str) -> None:
        raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)


for _name, _pattern in _SCALARS.items():
    # None: for texts with any first character, and for the empty one, which is null.
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern.pattern})$"), None)
for _name in ("int", "float"):
    _PlainLoader.add_constructor(f"tag:yaml.org,2002:{_name}", _PlainLoader.number)
