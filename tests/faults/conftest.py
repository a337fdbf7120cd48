"""One run that was left half-way, shared by all that damage copies of it."""

import pytest

from tests.faults.unfinished import Unfinished, leave_unfinished


@pytest.fixture(scope="session")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Unfinished:
    return leave_unfinished(tmp_path_factory.mktemp("faults") / "run")
