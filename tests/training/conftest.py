"""One small run of the command line, shared by all that look at what it leaves."""

import pytest

from tests.training.small_runs import SMALL, FinishedRun, agilerl


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    place = tmp_path_factory.mktemp("end to end")
    done = agilerl("train", *SMALL, "--out", "run [b]1[/b]", cwd=place, timeout=240)
    assert done.returncode == 0, done.stderr
    return FinishedRun(place / "run [b]1[/b]", done.stdout, done.stderr)
