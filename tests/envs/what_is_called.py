"""What the code of a reasoning_gym dataset calls, read off the installed sources with ast."""

import ast
import builtins
import inspect
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

EVALUATES = {
    *("eval", "exec", "compile", "__import__", "execfile", "runsource", "getattr"),
    *("parse_expr", "parse_latex", "sympify", "simplify", "S", "lambdify", "literal_eval", "nsimplify", "symbols"),
    *("Fraction", "import_module", "run_module", "run_path", "exec_module", "unsafe_load", "full_load"),
    *("system", "popen", "run", "call", "check_output", "check_call", "Popen", "spawn", "fork", "kill"),
}
"""What runs a text or may, by the last part of its name; Fraction('1e999999999') takes all memory."""
OPENS = {
    *("open", "read_text", "read_bytes", "read_data_file", "get_data_file_path", "Path", "listdir", "glob", "load"),
    *("loadtxt", "genfromtxt", "fromfile", "memmap", "read_csv", "urlopen", "urlretrieve", "connect", "load_data"),
    *("FigletFont", "figlet_format", "load_dataset", "write_text", "write_bytes", "savetxt", "unlink", "rmtree"),
}
"""What opens a file or a connection, or may."""


def calls(dataset: type, *starts: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield all calls that can be reached from methods of a dataset: the last part of the name, and the call.

    Followed are functions, methods and classes of reasoning_gym itself, by name; one that is only handed on counts as
    called. What is neither found nor followed is yielded all the same.
    """
    waiting: list[tuple[Any, type | None]] = [(getattr(dataset, start), dataset) for start in starts]
    seen = set()
    while waiting:
        function, owner = waiting.pop()
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        for node in ast.walk(definitions(code.co_filename).get(code.co_firstlineno, ast.Module([], []))):
            if isinstance(node, ast.Call):
                yield name_of(node.func), node
            if isinstance(node, ast.Name | ast.Attribute):
                waiting += followed(node, function.__globals__, owner)


@cache
def definitions(file: str) -> dict[int, ast.AST]:
    """Return the functions of a file by the line that they begin on; none of what is made while the program runs."""
    if file.startswith("<"):
        return {}
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    found = (n for n in ast.walk(ast.parse(Path(file).read_bytes())) if isinstance(n, functions))
    return {min([n.lineno, *(d.lineno for d in n.decorator_list)]): n for n in found}


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def followed(
    node: ast.Name | ast.Attribute, known: dict[str, Any], owner: type | None
) -> list[tuple[Any, type | None]]:
    if isinstance(node, ast.Name):
        found = known.get(node.id, getattr(builtins, node.id, None))
    elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        found = getattr(owner, node.attr, None)
        return [(inspect.unwrap(found), owner)] if inspect.isroutine(found) else []
    elif isinstance(node.value, ast.Name) and isinstance(known.get(node.value.id), types.ModuleType | type):
        found = getattr(known[node.value.id], node.attr, None)
    else:
        return []
    if not str(getattr(found, "__module__", "")).startswith("reasoning_gym"):
        return []
    if isinstance(found, type):
        functions = (getattr(part, "__func__", part) for part in vars(found).values())
        # From Python 3.12 on an enum has functions of the standard library, from 3.13 on a dataclass.
        return [(part, found) for part in functions if inspect.isfunction(part) and part.__module__ == found.__module__]
    return [(found, None)] if inspect.isfunction(found) else []
