"""vLLM on a CPU with SmolLM2-135M-Instruct: it serves what a run has trained, and samples for a run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agilerl
from agilerl.cli.fetch import run_fetch
from tests.real.commands import CAPITALS
from tests.real.test_smollm2 import FOLDER, SETTINGS
from tests.with_vllm.test_server import free_port
from tests.with_vllm.test_serving import TOLERANCE, asked, gap, own_answers, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

QUESTIONS = [[{"role": "user", "content": f"Name the capital of {country}."}] for country in CAPITALS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_fetch("smollm2", FOLDER, quiet=True)
    place = tmp_path_factory.mktemp("real")
    rows = [
        {"question": question[0]["content"], "answer": city} for question, city in zip(QUESTIONS, CAPITALS.values())
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    return place


def train(place: Path, out: str, *settings: str) -> Path:
    command = ["train", *SETTINGS, "training.max_steps=16", "algorithm.lr=1e-3", *settings, "--out", out, "--quiet"]
    subprocess.run([sys.executable, "-m", "agilerl", *command], cwd=place, check=True)
    return place / out


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return train(place, "run")


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "agilerl", "serve", str(run), "--port", str(port)]
    with serving(command, port, run.parent / "log.txt") as address:
        yield address


def test_the_elite_is_served_as_it_was_trained(run: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.with_vllm.test_serving.QUESTIONS", QUESTIONS)
    agent = agilerl.load(str(run))
    for name in ("base", "elite"):
        served = [asked(url, name, question, temperature=0) for question in QUESTIONS]
        own = own_answers({"base": agent, "elite": agent}, name)
        assert [answer.tokens for answer in served] == [answer.tokens for answer in own], name
        assert gap(served, own) <= TOLERANCE, name


def test_a_run_samples_with_it(place: Path) -> None:
    summary = json.loads((train(place, "sampled", "network.use_vllm=true") / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["iterations"] > 0
