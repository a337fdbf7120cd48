"""Every causal architecture of transformers is trained right, or refused in a sentence before training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarking.models import RESULTS, names, outcome

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = {
    "doge": "depends on later tokens",
    "gemma2": "",
    "glm4_moe": "",
    "gpt2": "",
    "llama4_text": "",
    "mamba": "keep a state",
    "phi3, LongRoPE": "",
    "xlnet": "follow",
}
"""Some of each kind, and a part of the sentence with which one is refused."""
pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", QUICK)
def test_some_architectures_are_right_or_refused(name: str, tmp_path: Path) -> None:
    result = outcome(name, tmp_path)
    assert result["outcome"] == ("refused" if QUICK[name] else "right"), result
    assert QUICK[name] in result.get("why", "")


@pytest.mark.models
@pytest.mark.parametrize("name", sorted(set(names()) - set(QUICK)))
def test_every_architecture_is_right_or_refused(name: str, tmp_path: Path) -> None:
    """What is written in the results still holds, and none of them is wrong."""
    result, known = outcome(name, tmp_path), json.loads(RESULTS.read_text(encoding="utf-8"))[name]
    assert result["outcome"] == known["outcome"] != "wrong", result


def test_no_result_is_wrong_and_the_page_is_made_of_them() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert sorted(results) == names()
    assert [name for name, result in results.items() if result["outcome"] == "wrong"] == []
    assert sum(result["outcome"] != "not tried" for result in results.values()) >= 120
    command = [sys.executable, str(ROOT / "docs" / "generate_models.py"), "--print"]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert page == (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
