"""Every tutorial runs as a reader would run it, in its own process, in less than two minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


@pytest.mark.model
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_tutorial_runs(script: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:agilerl", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_tutorials() -> None:
    assert TUTORIALS
