"""Tasksets of verifiers; those of ``tasksets`` can be imported, as if they were installed."""

import importlib.util
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="verifiers is not installed here; make test-verifiers makes an environment")
    for item in items:
        if item.path.parent.name == "with_verifiers":
            item.add_marker(pytest.mark.verifiers)
            if importlib.util.find_spec("verifiers") is None:
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent / "tasksets"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))  # servers of tools are processes of their own
