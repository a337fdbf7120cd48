"""Count how a configuration travels: ``python tools/handovers.py [--list] [ROOT]``.

Prints how many functions receive a RunConfig, a Resolved, a Session or a Request as an argument, and how often one is
handed up: by a function of a lower layer, as its result, to a caller in a higher one. The layers are those of
tests/architecture_rules.py. It follows the calls that begin at the commands, as far as names and annotations show.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

from tests.architecture_rules import Module, layer  # noqa: E402

CARRIED = ("RunConfig", "Resolved", "Session", "Request")


class Function(NamedTuple):
    """A function of the package, and how configurations enter and leave it."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    receives: bool
    returns: bool


class Call(NamedTuple):
    """A call from one function of the package to another."""

    caller: str
    callee: str
    line: int


def modules(root: Path) -> dict[str, Module]:
    """Return the modules of a checkout by name."""
    paths = sorted((root / "agilerl").rglob("*.py"))
    names = {}
    for path in paths:
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: Module(name, path.read_text(encoding="utf-8"), frozenset(names)) for name, path in names.items()}


def carries(annotation: ast.expr | None) -> bool:
    """Return whether an annotation names a configuration, alone or among others; a function that takes one does not."""
    if annotation is None:
        return False
    text = ast.unparse(annotation)
    if not any(name in text for name in CARRIED):
        return False
    tree = ast.parse(text.strip("\"'"), mode="eval")
    inside = [node for call in ast.walk(tree) if _is_callable(call) for node in ast.walk(call)]
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in inside)
    return any(name.id in CARRIED for name in names)


def _is_callable(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Callable"


def functions(package: dict[str, Module]) -> dict[str, Function]:
    """Return the functions of the package by their full names."""
    found = {}
    for module in package.values():
        for name, node in module.functions:
            owner = name.rpartition(".")[0].rpartition(".")[2]
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given = any(carries(argument.annotation) for argument in arguments)
            result = carries(node.returns) and owner not in CARRIED  # those make a configuration, or change one
            found[name] = Function(module, node, given, result)
    return found


def calls(package: dict[str, Module], known: dict[str, Function]) -> Iterator[Call]:
    """Yield the calls between functions of the package, followed through imports and re-exports."""

    def home(name: str) -> str:
        owner, _, last = name.rpartition(".")
        other = package[owner].aliases.get(last) if owner in package and name not in known else None
        return name if other is None or other == name else home(other)

    methods: dict[str, list[str]] = {}
    for name in known:
        methods.setdefault(name.rpartition(".")[2], []).append(name)
    for name, function in known.items():
        for node in ast.walk(function.node):
            if not isinstance(node, ast.Call):
                continue
            target = function.module.dotted(node.func)
            target = home(target if "." in target else f"{function.module.name}.{target}")
            if target not in known:  # a method, if only one class has it
                named = methods.get(target.rpartition(".")[2], [])
                target = named[0] if len(named) == 1 and isinstance(node.func, ast.Attribute) else ""
            if target:
                yield Call(name, target, node.lineno)


def handovers(root: Path) -> tuple[list[str], list[Call]]:
    """Return the functions that receive a configuration, and the calls that hand one up, in a checkout."""
    package = modules(root)
    known = functions(package)
    every = list(calls(package, known))
    callees: dict[str, list[str]] = {}
    for call in every:
        callees.setdefault(call.caller, []).append(call.callee)
    reached, waiting = set[str](), [name for name in known if name.startswith(("agilerl.cli.", "agilerl.run."))]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += callees.get(name, [])
    rows = {name: layer(function.module.name) or 0 for name, function in known.items()}
    climbs = [c for c in every if c.caller in reached and known[c.callee].returns and rows[c.callee] < rows[c.caller]]
    return sorted(name for name in reached if known[name].receives), climbs


def main(arguments: list[str]) -> None:
    """Print the two counts, and with ``--list`` what they count."""
    roots = [argument for argument in arguments if not argument.startswith("-")]
    receivers, climbs = handovers(Path(roots[0]).resolve() if roots else HERE)
    print(f"{len(receivers)} functions receive a configuration")
    print(f"{len(climbs)} calls hand one up to a higher layer")
    if "--list" in arguments:
        print("\n".join(receivers))
        print("\n".join(f"{call.caller}:{call.line} <- {call.callee}" for call in climbs))


if __name__ == "__main__":
    main(sys.argv[1:])
