"""A library that another one imports without need is imported when it is used, and is the same for everybody else."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agilerl.deferred import deferred

NAME = "library_that_waits"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that writes down each time it is imported."""
    log = tmp_path / "imports"
    log.touch()
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text(
        f"with open({str(log)!r}, 'a') as log:\n    log.write('x')\nvalue = 3\n"
    )
    (tmp_path / NAME / "part.py").write_text("value = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield log
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def load() -> Any:
    import library_that_waits  # type: ignore[import-not-found]

    return library_that_waits


def test_it_is_imported_when_it_is_used(library: Path) -> None:
    with deferred(NAME, load):
        import library_that_waits as held
    assert (library.read_text(), NAME in sys.modules) == ("", False)
    assert (held.value, library.read_text()) == (3, "x")
    assert (held.value, library.read_text()) == (3, "x")
    assert not hasattr(held, "nothing")


def test_others_import_the_library_itself(library: Path) -> None:
    with deferred(NAME, load):
        import library_that_waits as held
    import library_that_waits as real

    assert real is sys.modules[NAME]
    assert real is not held
    real.value = 5
    assert held.value == 5


def test_a_use_inside_the_block_imports_it(library: Path) -> None:
    with deferred(NAME, load):
        from library_that_waits import value
    assert (value, library.read_text()) == (3, "x")


def test_a_part_of_it_is_a_part_of_the_library(library: Path) -> None:
    with deferred(NAME, load):
        import library_that_waits.part  # noqa: F401
    assert (sys.modules[NAME].part.value, library.read_text()) == (4, "x")


def test_nothing_is_deferred_that_is_there_already_or_missing(library: Path) -> None:
    real = load()
    with deferred(NAME, load):
        assert load() is real
    with deferred("no_such_library", load), pytest.raises(ImportError):
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401


def test_an_error_inside_the_block_leaves_nothing_behind(library: Path) -> None:
    with pytest.raises(ZeroDivisionError), deferred(NAME, load):
        1 / 0  # noqa: B018
    assert NAME not in sys.modules
