"""What holds for every test: no network, one thread, the same examples each time."""

import os
import re
from functools import cache
from pathlib import Path

# Set before the libraries read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from hypothesis import settings

# A check that fails now and then is of no use to whoever did not cause it.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

STARTERS = re.compile(
    r"^(import subprocess|from tests(\.\w+)* import .*\b(programs|forked)\b"
    r"|from tests\.(programs|distributed\.together)|from tests\.training\.small_runs import .*\bagilerl\b"
    r"|from agilerl\.(rewards\.(isolated|sandbox)|envs\.scorers|distributed\.ray_launcher) import)",
    re.MULTILINE,
)
"""What a file of tests imports to start processes: their tests have the mark ``processes``."""


@cache
def starts_processes(file: Path) -> bool:
    return bool(STARTERS.search(file.read_text(encoding="utf-8")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if starts_processes(item.path):
            item.add_marker(pytest.mark.processes)
