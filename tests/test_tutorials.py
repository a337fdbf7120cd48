"""Every tutorial runs as a reader would run it, in its own process, in less than two minutes; recipes are valid."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.safety.custom_code import load_code
from agilerl.training.resolved import resolve
from tests import programs
from tests.training.small_runs import environment

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
RECIPES = sorted((ROOT / "tutorials" / "recipes").glob("*.yaml"))
PUBLISHED = {"0.5B": "54.3", "1.5B": "77.9", "3B": "86.1"}
"""Share of GSM8K's test that verl's documentation reports for GRPO with LoRA of rank 32, by the size of Qwen2.5."""


@pytest.mark.model
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
@pytest.mark.processes
def test_tutorial_runs(script: Path, tmp_path: Path) -> None:
    strict = "import warnings; warnings.filterwarnings('error', category=UserWarning, module='agilerl')"
    code = f"{strict}; import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = programs.run("-c", code, cwd=tmp_path, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "expect" in done.stdout  # the number that one should see


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_what_a_tutorial_imports_exists(script: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "agilerl":
            names.add(("agilerl", node.attr))
    assert any(module.startswith("agilerl") for module, _ in names)
    assert [(module, name) for module, name in names if not hasattr(import_module(module), name)] == []


def test_the_tutorials_are_a_course() -> None:
    assert [script.stem[:3] for script in TUTORIALS] == [f"{number:02}_" for number in range(1, 11)]
    page = (ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")
    assert [script.name for script in TUTORIALS if f"(../tutorials/{script.name})" not in page] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_valid_settings(path: Path) -> None:
    """Its names and settings; that needs neither the base nor the rows."""
    manifest = load_manifest(path)
    resolved = resolve(manifest)
    text, base = path.read_text(encoding="utf-8"), manifest.network.pretrained_model_name_or_path
    [size] = re.findall(r"^Qwen/Qwen2\.5-([\d.]+B)-Instruct$", base)
    assert path.stem == f"gsm8k_qwen2.5_{size.lower()}"
    assert f"agilerl train tutorials/recipes/{path.name} --allow-code" in text
    assert "Not run here" in text
    assert f"reports {PUBLISHED[size]} %" in text
    assert (resolved.config.network.lora_config.r, resolved.config.training.device) == (32, "cuda")


def test_there_is_a_recipe_for_each_published_number() -> None:
    assert len(RECIPES) == len(PUBLISHED)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("3 + 4 = 7\n#### 7", 1.0),
        ("#### 1,007", 0.0),
        ("#### $7.00", 1.0),
        ("first #### 3, no: #### 7", 1.0),
        ("The answer is 7", 0.0),
        ("#### -7", 0.0),
        ("####", 0.0),
    ],
)
def test_the_recipes_reward(completion: str, score: float) -> None:
    right = load_code("recipe", f"{ROOT / 'tutorials' / 'recipes' / 'gsm8k.py'}:right", allowed=True)
    assert right(completion, "Natalia has 3 + 4 = <<3+4=7>>7 clips.\n#### 7") == score
