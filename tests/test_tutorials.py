"""Every tutorial runs as a reader would run it, in its own process, in less than two minutes."""

from pathlib import Path

import pytest

from tests import programs
from tests.training.small_runs import environment

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


@pytest.mark.model
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
@pytest.mark.processes
def test_tutorial_runs(script: Path, tmp_path: Path) -> None:
    strict = "import warnings; warnings.filterwarnings('error', category=UserWarning, module='agilerl')"
    code = f"{strict}; import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = programs.run("-c", code, cwd=tmp_path, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_tutorials() -> None:
    assert TUTORIALS
