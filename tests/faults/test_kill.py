"""`agilerl train` under SIGKILL at random moments and at every failpoint, compared with the run that nobody touched.

`benchmarking/kill_everywhere.py` does it, in children of one process that has imported everything.
"""

import json
from typing import Any

import pytest

from tests import programs
from tests.training.small_runs import ROOT, environment

pytestmark = pytest.mark.model


KILLS = 10


@pytest.fixture(scope="module", params=["few", pytest.param("each case", marks=pytest.mark.nightly)])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A failpoint of each case takes two minutes; of ``few``, one for each operation and each kind of file."""
    few = ("--few",) if request.param == "few" else ()
    command = (ROOT / "benchmarking" / "kill_everywhere.py", "out", "--random", KILLS, *few)
    done = programs.run(*command, cwd=tmp_path_factory.mktemp("killed"), env=environment(), timeout=290)
    assert done.stdout, done.stderr
    found = dict(json.loads(done.stdout))
    found["points"]["least"] = 10 if few else found["points"]["cases"]
    return found


@pytest.mark.processes
def test_ten_kills_at_random_moments(killed: dict[str, Any]) -> None:
    assert killed["random"]["kills"] == KILLS
    assert killed["random"]["failures"] == []


@pytest.mark.processes
def test_a_kill_at_every_failpoint(killed: dict[str, Any]) -> None:
    """Of recovery, an iteration, a selection, two checkpoints and finishing."""
    points = killed["points"]
    assert points["failures"] == []
    assert points["cases"] >= 40
    assert points["tried"] >= points["least"]
    assert points["failpoints"] >= 300
    assert set(points["operations"]) >= {
        *("open", "write", "half a write", "fsync", "ftruncate", "mkdir", "rename", "replace", "unlink", "rmdir"),
        *("before clone", "after clone", "before mutation", "after mutation"),
    }
