"""A real model's folder, rows about capitals and a short run; the test module says of which model and with what."""

import json
import time
from pathlib import Path

import pytest

from agilerl.cli.fetch import run_fetch
from tests.real.commands import CAPITALS, done


@pytest.fixture(scope="module", autouse=True)
def folder(request: pytest.FixtureRequest) -> Path:
    run_fetch(request.module.NAME, request.module.FOLDER, quiet=True)
    return Path(request.module.FOLDER)


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("real")
    question, answer = request.module.ROW
    rows = [{"question": question.format(at), "answer": answer.format(city)} for at, city in CAPITALS.items()]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    return place


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, place: Path) -> Path:
    start = time.perf_counter()
    done(place, "train", *request.module.SETTINGS, *request.module.STEPS, "--out", "run")
    print(f"the run took {time.perf_counter() - start:.0f} s")
    return place / "run"
