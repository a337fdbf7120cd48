"""Compare what docs/comparison.md says of AgileRL's defaults with its packages: ``python docs/check_sources.py``.

Needs the package index. Nothing is installed or imported: wheels are downloaded, and their source is parsed.
"""

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
SOURCES = DOCS / "comparison.md"
FILES = {"GRPO": "grpo", "PPO": "ppo_llm", "REINFORCE": "reinforce_llm", "DPO": "dpo", "SFT": "sft"}
"""Where AgileRL has the algorithms of the table."""


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading, or after a line that begins like it."""
    table = text[text.index(heading) :].split("\n| --- ", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]


def sources() -> dict[tuple[str, str], tuple[str, str, str]]:
    """Return when each version of each project was released and read, and where."""
    text = SOURCES.read_text(encoding="utf-8")
    return {(project, version): (day, read, where) for project, version, day, read, where in rows(text, "## Sources")}


def defaults() -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return, by algorithm and argument, the defaults of the versions of AgileRL in the table, and those here."""
    text, found = SOURCES.read_text(encoding="utf-8"), {}
    for argument, of, *values, _ in rows(text, "## Defaults"):
        for algorithm in FILES if of == "*" else of.split(", "):
            found[algorithm, argument.strip("`")] = tuple(map(_value, values))
    return found


def versions() -> list[str]:
    """Return the versions of AgileRL at the head of the table."""
    text = SOURCES.read_text(encoding="utf-8").split("## Defaults", 1)[1]
    return re.findall(r"AgileRL (\d\S+)", text.split("| --- ", 1)[0])


def theirs(wheel: Path, algorithm: str) -> dict[str, Any]:
    """Return the defaults of an algorithm's arguments in a wheel of AgileRL."""
    tree = ast.parse(zipfile.ZipFile(wheel).read(f"agilerl/algorithms/{FILES[algorithm]}.py"))
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == algorithm)
    init = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    given = zip(init.args.args[::-1], init.args.defaults[::-1])
    return {argument.arg: ast.literal_eval(value) for argument, value in given}


def main() -> None:
    """Print each default that is another one, and each argument of both that the table lacks; exit with 1 if any."""
    import inspect

    from agilerl.algorithms import ALGORITHMS

    wrong, listed = [], defaults()
    with tempfile.TemporaryDirectory() as folder:
        for place, version in enumerate(versions()):
            wanted = [f"agilerl=={version}", "--no-deps", "--dest", folder, "--quiet"]
            subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=True)
            wheel = next(Path(folder).glob(f"agilerl-{version}-*.whl"))
            for algorithm in FILES:
                own = inspect.signature(ALGORITHMS[algorithm]).parameters
                for argument, default in theirs(wheel, algorithm).items():
                    known = listed.get((algorithm, argument))
                    if argument in own and default != (own[argument].default if known is None else known[place]):
                        wrong.append(f"AgileRL {version}: {algorithm}({argument}={default!r}), listed: {known}")
    print("\n".join(wrong) or f"{len(listed)} defaults of AgileRL {' and '.join(versions())} are as listed")
    sys.exit(bool(wrong))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
