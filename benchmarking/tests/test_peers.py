"""The arms of ``benchmarking/peers.py`` do the same work, and the tokens that each computes are counted right."""

import json
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch

from benchmarking.peer_arm import MARK, Turns, prompt_ids, said, written_model, written_tokenizer
from benchmarking.peers import ROOT, Arm, Bench, in_turns, ratios, table, train_with_ours
from benchmarking.roofline import made_model

pytestmark = pytest.mark.model

# Sixteen rows fill the tiles of a CPU, so that no padding is counted.
LOAD = {"prompt_tokens": 16, "common": 0, "tokens": 3, "prompts": 1, "group": 16, "rank": 2, "agents": 2, "steps": 2}
# A prompt is computed once, the last token of a completion is not decoded.
OURS = {"with_gradient": 16 + 16 * 3, "without_gradient": 16 + 16 * 2}
TRL = {"with_gradient": 16 * (16 + 3), "without_gradient": 16 * 16 + 16 * 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers")
    written_model(made_model("embedded", "cpu"), path)
    return path


@pytest.mark.parametrize(("arm", "agents"), [("ours", 1), ("together", 2), ("alone", 2)])
def test_tokens_of_our_arms(folder: Path, arm: str, agents: int) -> None:
    torch.set_num_threads(1)
    answers = StringIO()
    train_with_ours(arm, {**LOAD, "model": str(folder)}, Turns(StringIO("step\nstep\n"), answers))
    ready, first, second = map(json.loads, answers.getvalue().splitlines())
    assert first["tokens"] == {name: agents * count for name, count in OURS.items()}
    assert "tokens" not in second
    assert first["seconds"] > 0
    assert 0 < ready["loaded"] < 1.01 * second["peak"]  # the kernel counts the two in different ways


def test_agents_end_with_the_same_adapters_together_and_alone(folder: Path) -> None:
    torch.set_num_threads(1)
    load = {"prompt_tokens": 6, "tokens": 5, "prompts": 1, "group": 4, "rank": 2, "model": str(folder)}
    benches = [Bench(2, load) for _ in range(2)]
    before = benches[0].runtime.store.theta.clone()
    benches[0].step(benches[0].together)
    benches[1].step(benches[1].alone)
    together, alone = (bench.runtime.store.theta for bench in benches)
    assert torch.equal(together, alone)
    assert all(not torch.equal(together[agent.slot], before[agent.slot]) for agent in benches[0].agents)


@pytest.mark.processes
def test_tokens_of_trl(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarking" / "peer_arm.py"), json.dumps({**LOAD, "model": str(folder)})]
    try:
        arm = Arm(command, tmp_path / "log")
    except RuntimeError as error:
        if "ImportError" not in str(error) and "ModuleNotFoundError" not in str(error):
            raise
        pytest.skip(f"TRL's trainer cannot be imported here: {str(error).splitlines()[-1]}")
    assert arm.step() > 0
    assert arm.tokens == TRL
    assert arm.peak >= arm.loaded > 0
    arm.close()


@pytest.mark.parametrize("model", ["embedded", "1M"])
def test_a_prompt_is_the_same_tokens_in_every_arm(tmp_path: Path, model: str) -> None:
    written_model(made_model(model, "cpu"), tmp_path)
    ids = prompt_ids(3, 12, 105)
    assert written_tokenizer(tmp_path)(text=said(ids))["input_ids"] == ids
    other = prompt_ids(4, 12, 105, common=7)
    assert ids != other
    assert prompt_ids(3, 12, 105, common=7)[:7] == other[:7]
    assert ids[-1] == other[-1] == MARK


def test_arms_take_turns_and_the_first_round_does_not_count() -> None:
    made: list[str] = []

    class Scripted(Arm):
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> float:
            made.append(self.name)
            return float(len(made))

    seconds = in_turns({"a": Scripted("a"), "b": Scripted("b")}, rounds=2)
    assert made == ["a", "b", "b", "a", "a", "b"]
    assert seconds == [{"b": 3.0, "a": 4.0}, {"a": 5.0, "b": 6.0}]


def test_ratios_are_by_how_much_ours_needs_less() -> None:
    seconds = {"trl": 2.0, "ours": 1.0, "together": 4.0, "alone": 6.0}
    found = ratios(seconds, {"agents": 8})
    assert found == {"trl / ours": 2.0, "N trl / together": 4.0, "alone / together": 1.5}
    row = {"model": "tiny", "parameters": 1e6, "prompt_tokens": 16, "common": 8}
    assert table([{**row, "ratios": {"trl / ours": (2.0, 1.5, 2.5)}}]).endswith("| 16 | 8 | 2.00 [1.50-2.50] |")


@pytest.mark.parametrize("names", [("", "_30M"), ("_135M_long",)])
def test_the_page_has_the_tables_of_the_results(names: tuple[str, ...]) -> None:
    paths = [ROOT / "benchmarking" / "results" / f"peers_cpu{name}.json" for name in names]
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))["results"]]
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert [line for line in table(rows).splitlines() if line not in page] == []
