"""Compare what the pages say of other projects with their packages: ``python docs/check_sources.py``.

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
STATEMENTS = (
    ("trl", "1.16.0", "trl/trainer/grpo_config.py", r"use_bias_correction_kl: bool = field\(\s*default=True"),
    ("trl", "1.16.0", "trl/trainer/grpo_config.py", r"learning_rate: float = field\(\s*default=1e-6"),
    ("trl", "1.16.0", "trl/trainer/rloo_config.py", r"learning_rate: float = field\(\s*default=1e-6"),
    ("trl", "1.16.0", "trl/trainer/dpo_config.py", r"learning_rate: float = field\(\s*default=1e-6"),
    ("trl", "1.16.0", "trl/trainer/kto_config.py", r"learning_rate: float = field\(\s*default=1e-6"),
    ("trl", "1.16.0", "trl/trainer/sft_config.py", r"learning_rate: float = field\(\s*default=2e-5"),
    ("ray", "2.60.0", "ray/tune/schedulers/pbt.py", r"class PopulationBasedTrainingReplay\b"),
    ("agilerl", "2.58.0", "agilerl/algorithms/ppo_llm.py", r"kl_clamp: float \| None = 10\.0"),
    ("verl", "0.9.1", "verl/workers/config/engine.py", r"full_determinism: bool = False"),
)
"""What the pages say of other projects: the package, its version, a file in it, and a pattern that is found there."""


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


def wheel_of(project: str, version: str, folder: str) -> Path:
    """Return the wheel of a project, downloaded unless it is there."""
    if not list(Path(folder).glob(f"{project}-{version}-*.whl")):
        wanted = [f"{project}=={version}", "--no-deps", "--dest", folder, "--quiet"]
        subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=True)
    return next(Path(folder).glob(f"{project}-{version}-*.whl"))


def theirs(wheel: Path, algorithm: str) -> dict[str, Any]:
    """Return the defaults of an algorithm's arguments in a wheel of AgileRL."""
    tree = ast.parse(zipfile.ZipFile(wheel).read(f"agilerl/algorithms/{FILES[algorithm]}.py"))
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == algorithm)
    init = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    given = zip(init.args.args[::-1], init.args.defaults[::-1])
    return {argument.arg: ast.literal_eval(value) for argument, value in given}


def main() -> None:
    """Print each default and statement that is wrong, and each argument of both that the table lacks.

    Exits with 1 if there are any.
    """
    from agilerl.algorithms import ALGORITHMS

    wrong, listed = [], defaults()
    with tempfile.TemporaryDirectory() as folder:
        for project, version, file, pattern in STATEMENTS:
            if not re.search(pattern, zipfile.ZipFile(wheel_of(project, version, folder)).read(file).decode()):
                wrong.append(f"{project} {version}: {file} lacks {pattern}")
        for place, version in enumerate(versions()):
            wheel = wheel_of("agilerl", version, folder)
            for algorithm in FILES:
                own = ALGORITHMS[algorithm].defaults()
                for argument, default in theirs(wheel, algorithm).items():
                    known = listed.get((algorithm, argument))
                    if argument in own and default != (own[argument] if known is None else known[place]):
                        wrong.append(f"AgileRL {version}: {algorithm}({argument}={default!r}), listed: {known}")
    print("\n".join(wrong) or f"{len(listed)} defaults of AgileRL and {len(STATEMENTS)} statements are as listed")
    sys.exit(bool(wrong))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
