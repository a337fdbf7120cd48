"""What holds for every test: no network, one thread, the same examples each time, long files first."""

import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

# Set before the libraries read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

# Runs save with fsync, which on a disk takes as long as all else of a small one. Tests leave less than a gigabyte.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Else every start of pytest rewrites the assertions of hypothesis and of the tests again: 4 to 12 seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from hypothesis import settings  # noqa: E402

from tests.long_tests import LEFT_OUT  # noqa: E402

# A check that fails now and then is of no use to whoever did not cause it.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

LONGEST = (
    *("test_ray", "test_kill", "test_tutorials", "test_group", "test_group_faults", "test_attacks_on_scoring"),
    *("test_readme", "test_resume_kinds", "test_attacks", "test_one_agent", "test_curriculum", "test_family"),
    *("test_isolated", "test_command_line", "test_what_scorers_evaluate", "test_user_types", "test_endpoint"),
    *("test_report_in_a_browser", "test_after", "test_what_was_set", "test_default_search", "test_wrong_arguments"),
    *(
        "test_agents_arguments",
        "test_evidence",
        "test_loops",
        "test_helpers",
        "test_manifests",
        "test_surrogate_worlds",
        "test_resume",
        "test_one_agent_runs",
        "test_output",
        "test_custom_code",
        "test_trackers",
    ),
)
"""Files of 10 seconds and more, roughly the longest first: one of them at the end would leave the other cores idle."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Bits are those of one thread, whatever number a run in an earlier test has set."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than there are cores: a fifth of the time, tests wait for a process, a browser or the end of a time."""
    return (yield) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))
    long = {name for names in LEFT_OUT.values() for name in names}
    for item in items:
        row = item.nodeid.removeprefix("tests/")
        table = row.partition("[")[0]
        if row not in LEFT_OUT and not long.isdisjoint({row, table, table.rpartition("::")[0]}):
            item.add_marker("long")
