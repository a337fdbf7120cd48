"""The command line, called as the console script calls it."""

import sys
from pathlib import Path

import pytest

from agilerl.cli import main
from tests.cli.outcome import Agilerl, Outcome


@pytest.fixture
def agilerl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Agilerl:
    """Run the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["agilerl", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), output, errors)

    return call
