"""One run that was left half-way, shared by all that damage copies of it."""

from pathlib import Path

import pytest

from tests.cli.conftest import agilerl
from tests.faults.pieces import finish
from tests.faults.unfinished import Unfinished, leave_unfinished

__all__ = ["agilerl"]


@pytest.fixture(scope="session")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Unfinished:
    return leave_unfinished(tmp_path_factory.mktemp("faults") / "run")


@pytest.fixture(scope="session")
def reference(unfinished: Unfinished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That run as it ends where nobody changes anything."""
    return finish(unfinished.copy(tmp_path_factory.mktemp("whole") / "run"))
