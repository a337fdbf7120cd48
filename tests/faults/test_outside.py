"""A run writes into its directory and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.training.small_runs import SMALL, environment

pytestmark = pytest.mark.model


def tree(root: Path, *, less: Path | None = None) -> dict[str, tuple[int, int]]:
    """Return size and time of change of every file below a folder, and the folders."""
    found = {}
    for path in sorted(root.rglob("*")):
        if less is None or (path != less and less not in path.parents):
            status = path.lstat()
            changed = (status.st_size, status.st_mtime_ns) if path.is_file() else (0, 0)
            found[path.relative_to(root).as_posix()] = changed
    return found


@pytest.mark.processes
def test_nothing_is_written_outside_the_run_directory(tmp_path: Path) -> None:
    """Home, caches, temporary files and the working directory are as they were, those with the rows and the code too.

    Matplotlib, which reasoning_gym imports, keeps a list of the fonts of the machine: it has one already.
    """
    here, home, temporary = (tmp_path / name for name in ("here", "home", "tmp"))
    for folder in (here, home, temporary):
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    (here / "rewards.py").write_text("def vowels(completion): return float('a' in completion)\n")
    parquet.write_table(
        pa.table({"question": [f"say {n}" for n in range(80)], "answer": [str(n) for n in range(80)]}),
        here / "rows.parquet",
    )
    (here / "it.yaml").write_text(
        "environment: {dataset: rows.parquet, graders: [{name: task}, {name: 'rewards.py:vowels'}]}"
    )
    variables = {name: value for name, value in environment().items() if not name.startswith(("XDG_", "HF_HOME"))}
    variables |= {"HOME": str(home), "TMPDIR": str(temporary), "MPLCONFIGDIR": matplotlib.get_cachedir()}
    before = tree(tmp_path)
    arguments = ["it.yaml", *SMALL, "training.max_steps=96", "training.checkpoint_steps=1", "--allow-code"]
    done = subprocess.run(
        [sys.executable, "-m", "agilerl", "train", *arguments, "--out", "runs/1"],
        cwd=here,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (here / "runs" / "1" / "summary.json").exists()
    after = tree(tmp_path, less=here / "runs")
    assert {name: found for name, found in after.items() if not name.startswith("tmp/torchinductor_")} == before
    assert not list(temporary.glob("torchinductor_*/*")), "torch makes an empty folder"
    assert os.listdir(here / "runs") == ["1"]
