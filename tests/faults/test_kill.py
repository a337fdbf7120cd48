"""`agilerl train` under SIGKILL at random moments and at every failpoint, compared with the run that nobody touched.

`benchmarking/kill_everywhere.py` does it, in children of one process that has imported everything.
"""

import json
from typing import Any

import pytest

from tests import programs
from tests.training.small_runs import ROOT, environment

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = (ROOT / "benchmarking" / "kill_everywhere.py", "out", "--random", "10")
    done = programs.run(*command, cwd=tmp_path_factory.mktemp("killed"), env=environment(), timeout=290)
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.processes
def test_ten_kills_at_random_moments(killed: dict[str, Any]) -> None:
    assert killed["random"]["kills"] == 10
    assert killed["random"]["failures"] == []


@pytest.mark.processes
def test_a_kill_at_every_failpoint(killed: dict[str, Any]) -> None:
    """Of recovery, an iteration, a selection, two checkpoints and finishing."""
    points = killed["points"]
    assert points["failures"] == []
    assert points["tried"] == points["cases"] >= 40
    assert points["failpoints"] >= 300
    assert set(points["operations"]) >= {
        *("open", "write", "half a write", "fsync", "ftruncate", "mkdir", "rename", "replace", "unlink", "rmdir"),
        *("before clone", "after clone", "before mutation", "after mutation"),
    }
