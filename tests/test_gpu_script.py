"""`benchmarking/gpu.sh` records what becomes of each part and leaves no half of a JSON; stand-ins play the parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

STAND_IN = """#!/bin/sh
# Python itself for what the script asks of it; for the parts, what a case of this test wants.
for last; do :; done
case "$1" in
    - | -c) exec {python} "$@" ;;
    -m) [ "$2" != pytest ] || exit 5; echo '{{"versions": {{}}}}' ;;
    *bits.py) echo '{{"half": ' >"$5" ;;
    *roofline.py) echo '{{"whole": true}}' >"$5" ;;
    *rollout.py) echo '{{"half": ' >"$5"; echo "no such device" >&2; exit 3 ;;
    *memory_estimate.py) echo '{{"half": ' >"$5"; exec sleep 60 ;;
esac
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The script beside empty parts, with a Python that plays them."""
    folder = tmp_path / "benchmarking"
    folder.mkdir()
    (folder / "gpu.sh").write_bytes((ROOT / "benchmarking" / "gpu.sh").read_bytes())
    for name in ("bits.py", "roofline.py", "rollout.py", "memory_estimate.py"):
        (folder / name).touch()
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    return tmp_path


def run(copied: Path, budget: int, device: str = "cpu") -> tuple[int, dict[str, dict[str, object]]]:
    command = ["bash", copied / "benchmarking" / "gpu.sh", copied / "out", device, copied / "python"]
    environment = {**os.environ, "BUDGET": str(budget)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    summary = json.loads((copied / "out" / "summary.json").read_text())
    assert summary["device"] == device
    return done.returncode, summary["parts"]


@pytest.mark.processes
def test_failures_are_recorded_and_the_others_go_on(copied: Path) -> None:
    code, parts = run(copied, 9)
    assert code == 1
    found = {name: part["status"] for name, part in parts.items()}
    assert found["environment"] == found["roofline"] == "done"
    assert found["bits"] == "failed: it wrote no JSON"
    assert found["rollout"] == "failed with exit code 3: no such device"
    assert str(found["memory"]).startswith("stopped after its limit of ")
    assert sorted(path.name for path in (copied / "out").glob("*.json")) == [
        "environment.json",
        "roofline.json",
        "summary.json",
    ]
    assert not list((copied / "out").glob("*.part"))


@pytest.mark.processes
def test_a_part_that_is_not_there_or_has_no_time_left_is_said(copied: Path) -> None:
    (copied / "benchmarking" / "rollout.py").unlink()
    code, parts = run(copied, 0)
    assert code == 1
    assert parts["rollout"]["status"] == "not run: benchmarking/rollout.py is not there"
    assert parts["roofline"]["status"] == "not run: the time was up"


@pytest.mark.processes
def test_where_no_test_is_marked_that_is_not_done(copied: Path) -> None:
    (copied / "benchmarking" / "memory_estimate.py").unlink()  # it would take all of its time
    code, parts = run(copied, 9, "cuda")
    assert code == 1
    assert parts["gpu-tests"]["status"] == "failed with exit code 5: no test is marked gpu"
    assert not (copied / "out" / "gpu-tests.json").exists()
