"""The table of docs/environments.md is what its script measures."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def test_the_table_is_what_is_measured():
    script = runpy.run_path(str(DOCS / "measure_environments.py"))
    assert "\n".join(script["table"]()) in (DOCS / "environments.md").read_text(encoding="utf-8")
