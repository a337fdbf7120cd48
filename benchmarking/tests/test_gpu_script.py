"""``benchmarking/gpu.sh``: each part keeps the rows it has, whatever becomes of it; what is missing is said first."""

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarking import gpu
from docs import generate_gpu

ROOT = Path(__file__).resolve().parents[2]
HEAD = {"part", "benchmark", "device", "versions", "commit", "date", "command", "rows", "status", "seconds"}

MEASURING = """
import subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarking.gpu import Rows
out = Path(sys.argv[sys.argv.index("--out") + 1])
rows = Rows(out, out.stem, {{"kind": sys.argv[sys.argv.index("--device") + 1]}})
rows.add(number=1)
{then}
"""
"""A part that has measured one row."""


def part(tmp_path: Path, name: str, then: str, limit: int = 20, **options: Any) -> gpu.Part:
    script = tmp_path / f"{name}.py"
    script.write_text(MEASURING.format(root=str(ROOT), then=then))
    return gpu.Part(name, limit, "for a test", command=[sys.executable, str(script)], **options)


@pytest.mark.processes
def test_a_part_keeps_its_rows_whatever_becomes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_facts", lambda device: {"kind": device, "name": "a CPU"})
    left = tmp_path / "left"
    child = f"subprocess.Popen(['sh', '-c', 'sleep 3; touch {left}'])"
    parts = [
        part(tmp_path, "well", "rows.add(number=2)"),
        part(tmp_path, "failing", "sys.exit('no such kernel')"),
        part(tmp_path, "slow", f"{child}; time.sleep(60)", limit=2),
        part(tmp_path, "half", "out.write_text('{')"),
        part(tmp_path, "elsewhere", "", needs=["torch", "a_module_that_nobody_has"]),
    ]
    out = tmp_path / "out"
    started = time.monotonic()
    assert gpu.measured(parts, out, "cpu", 60) == 1
    assert time.monotonic() - started < 30
    document = json.loads((out / "gpu.json").read_text())
    found = {p["part"]: p for p in document["parts"]}
    assert {name: len(p["rows"]) for name, p in found.items()} == {
        "well": 2, "failing": 1, "slow": 1, "half": 0, "elsewhere": 0
    }  # fmt: skip
    assert found["well"]["status"] == "done"
    assert found["failing"]["status"] == "failed with exit code 1: no such kernel"
    assert found["slow"]["status"] == "stopped after its limit of 2 s"
    assert found["half"]["status"] == "failed: it wrote no JSON"
    assert "a-module-that-nobody-has" in found["elsewhere"]["status"]
    assert "no such kernel" in found["failing"]["log"][-1]
    for name in ("well", "failing", "slow", "half"):
        assert set(json.loads((out / f"{name}.json").read_text())) >= HEAD
    assert set(document) >= HEAD - {"part", "rows", "status"}
    assert not list(out.glob("*.tmp"))
    time.sleep(2)
    assert not left.exists()  # what a part has started ends with it


@pytest.mark.processes
def test_what_comes_late_is_left_out_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_facts", lambda device: {"kind": device, "name": "a CPU"})
    parts = [part(tmp_path, "first", "time.sleep(1.5)"), part(tmp_path, "second", "")]
    assert gpu.measured(parts, tmp_path / "out", "cpu", 6) == 1
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]
    assert [p["status"] for p in found] == ["done", "not run: the time was up"]


@pytest.mark.processes
def test_a_bare_python_is_told_what_it_lacks(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", ROOT / "benchmarking" / "gpu.py", tmp_path / "out", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "")
    document = json.loads((tmp_path / "out" / "gpu.json").read_text())
    for name in ("torch", "transformers", "peft", "pydantic", "liger-kernel"):
        assert f"missing: {name}" in done.stdout
        assert document["missing"][name]
    assert [p["part"] for p in document["parts"]] == [p.name for p in gpu.PARTS]
    assert all("torch" in p["status"] for p in document["parts"])


def test_the_shell_script_finds_its_python(tmp_path: Path) -> None:
    script = ROOT / "benchmarking" / "gpu.sh"
    said = subprocess.run(["bash", script, "there", "cpu", "echo"], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(ROOT / "benchmarking" / "gpu.py"), "there", "--device", "cpu"]
    assert subprocess.run(["bash", script], capture_output=True).returncode != 0


def test_every_requirement_has_a_purpose() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {requirement.split(">")[0].split("=")[0].split("<")[0] for requirement in project["dependencies"]}
    assert required <= {gpu.for_pip(module) for module in gpu.MODULES}
    for one in gpu.PARTS:
        assert set(one.needs) <= set(gpu.MODULES)
    assert sum(one.limit for one in gpu.PARTS[:6]) < gpu.BUDGET["cuda"] < 600


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_what_was_measured_and_nothing_else() -> None:
    written = generate_gpu.PAGE.read_text(encoding="utf-8")
    assert written == generate_gpu.page(generate_gpu.results()), "run: python docs/generate_gpu.py"
    for one in gpu.PARTS:
        assert f"| `{one.name}` |" in written
        assert f"| {one.limit} |" in written


def step(agents: int, tokens_per_second: float, predicted: float) -> dict[str, Any]:
    phases = {name: {"fraction_of_limit": 0.5, "measured": 1.0} for name in generate_gpu.PHASES}
    return {
        "model": "0.5B", "agents": agents, "step_seconds": 2.0, "tokens_per_second": tokens_per_second,
        "decode_tokens_per_second": 9e3, "fraction_of_limit": 0.5, "predicted_over_measured": predicted,
        "phases": phases, "memory": {"peak": 2**31},
    }  # fmt: skip


def test_targets_are_held_or_missed_by_the_numbers() -> None:
    parts: dict[str, list[dict[str, Any]]] = {
        "step": [
            step(1, 1000.0, 1.1),
            step(8, 3500.0, 0.5),
            {"model": "1.5B", "agents": 8, "failed": "OutOfMemoryError"},
        ],
        "train": [{"prompt_tokens": 896, "completion_tokens": 128, "agents": 8, "mfu": 0.2}],
        "decode": [{"rows": 8, "kept_with_adapters": 0.1}, {"rows": 64, "kept_with_adapters": 0.8}, {"a_token": 0.25}],
        "engines": [{"arms": {"vLLM": {"ratio_to_torch_engine": [4.0, 3.0, 5.0]}}}],
    }
    document = {
        "device": {"name": "NVIDIA H100"}, "versions": {"torch": "2.11.0"}, "commit": "abc",
        "date": "2026-12-01T00:00:00", "command": ["gpu.py"], "seconds": 500.0,
        "parts": [{"part": name, "status": "done", "seconds": 1.0, "rows": rows} for name, rows in parts.items()],
    }  # fmt: skip
    text = generate_gpu.render([document])
    lines = {line.split(" | ")[0].lstrip("| "): line.split(" | ")[-1].rstrip(" |") for line in text.splitlines()[2:8]}
    assert list(lines.values()) == [
        "3.50, held", "0.20, missed", "0.80, held", "0.25, missed", "0.25, held", "0.50, missed"
    ]  # fmt: skip
    assert "| 0.5B | 8 | 2.00 | 3,500 | 9,000 | 2.0 |" in text
    assert "not measured" not in text
    assert generate_gpu.NOTHING not in text


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_rehearsal_passes_whole_in_under_five_minutes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["bash", ROOT / "benchmarking" / "gpu.sh", tmp_path / "out", "cpu", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    document = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert {p["part"]: p["status"] for p in document["parts"]} == {one.name: "done" for one in gpu.PARTS}, done.stdout
    assert done.returncode == 0
    assert document["seconds"] < 300
    (resumed,) = generate_gpu.rows(document, "run", has="same")
    assert resumed["same"]
    assert all(row["alone"]["same_adapters"] for row in generate_gpu.rows(document, "bits"))
    assert "| 0.2M | 8 |" in generate_gpu.render([document])
