import pytest
from synthetic_run import make_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Run directories by name, written once; tests only read them."""
    root = tmp_path_factory.mktemp("runs")
    return {
        "whole": make_run(root / "whole"),
        "other": make_run(root / "other", seed=3, agents=6, generations=3),
        "unfinished": make_run(root / "unfinished", seed=1, generations=2, finished=False),
        "hostile": make_run(root / "hostile", seed=1, generations=2, hostile=True),
    }
