"""Bits flip and files are cut: every one is found, and the last good checkpoint is used."""

import random
import shutil
from pathlib import Path

import pytest

from agilerl.errors import CheckpointError
from agilerl.runs.atomic import MANIFEST, verify_folder
from agilerl.training.checkpoint import read_checkpoint
from agilerl.training.saved import open_run
from tests.cli.outcome import Agilerl
from tests.faults.unfinished import Unfinished, contents, newest

pytestmark = pytest.mark.model

FLIPS, CUTS = 200, 50


def one_of_each_kind(checkpoint: Path) -> list[Path]:
    """Return a file of each name that a checkpoint has."""
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    return list({path.name: path for path in files}.values())


def damaged(data: bytes, number: int, draws: random.Random) -> bytes:
    """Flip a bit, or cut the file: ends, beginnings and headers as often as anything else."""
    if number < FLIPS:
        places = [draws.randrange(8 * len(data)), draws.randrange(min(8 * len(data), 1024)), 8 * len(data) - 1]
        place = places[number % 3]
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        return bytes(flipped)
    return data[: [0, 1, len(data) - 1, draws.randrange(len(data))][number % 4]]


def test_every_flip_and_every_cut_is_found_and_the_last_good_one_is_loaded(
    unfinished: Unfinished, tmp_path: Path
) -> None:
    root = unfinished.copy(tmp_path / "run")
    folder, older = newest(root), root / "checkpoints" / "000001"
    kinds = one_of_each_kind(folder)
    assert {path.name for path in kinds} >= {
        *("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "agent.json"),
        *("state.json", "clock.json", MANIFEST),
    }
    draws, good = random.Random(7), contents(older)
    for number in range(FLIPS + CUTS):
        path = kinds[number % len(kinds)]
        data = path.read_bytes()
        path.write_bytes(damaged(data, number, draws))
        said: list[str] = []
        saved = open_run(root, report=said.append)
        saved.run.close()
        assert saved.checkpoint == older, (number, path)
        aside = folder.with_name("000002.corrupt")
        assert len(said) == 1
        assert str(aside) in said[0]
        aside.rename(folder)
        path.write_bytes(data)
    assert contents(older) == good
    assert read_checkpoint(older, unfinished.session.population.runtime).progress.iteration == 1
    saved = open_run(root, report=pytest.fail)
    assert saved.checkpoint == folder
    saved.run.close()


@pytest.mark.parametrize("name", ["run.json", "journal.jsonl"])
def test_the_files_around_the_checkpoints_say_so_too(name: str, unfinished: Unfinished, tmp_path: Path) -> None:
    """Of run.json what decides the run; of the journal every record but the last, which a crash may have torn."""
    root, draws = unfinished.copy(tmp_path / "run"), random.Random(8)
    path = root / name
    data = path.read_bytes()
    start = data.index(b'"config"') if name == "run.json" else 0
    end = data.index(b'"files"') if name == "run.json" else data[:-1].rindex(b"\n")
    for _ in range(40):
        flipped = bytearray(data)
        place = draws.randrange(8 * start, 8 * end)
        flipped[place // 8] ^= 1 << place % 8
        if flipped.split() == data.split():
            continue  # white space between the values
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            started(root, unfinished)


def started(root: Path, unfinished: Unfinished) -> None:
    """Do what ``agilerl resume`` does before the first iteration, less the building of another population."""
    from agilerl.training.records import RunWriter

    saved = open_run(root, report=pytest.fail)
    with saved.run:
        assert saved.checkpoint is not None
        RunWriter(saved.run, read_checkpoint(saved.checkpoint, unfinished.session.population.runtime)).close()


def test_resume_goes_on_from_the_last_good_one_and_ends_with_the_same_adapters(
    unfinished: Unfinished, tmp_path: Path, agilerl: Agilerl
) -> None:
    ends = []
    for name in ("whole", "damaged"):
        root = unfinished.copy(tmp_path / name)
        if name == "damaged":
            path = next(newest(root).glob("agent_*")) / "optimizer.safetensors"
            path.write_bytes(path.read_bytes()[:-1])
        ended = agilerl("resume", name)
        assert ended.code == 0, ended.errors
        assert ("set aside as" in ended.errors) == (name == "damaged")
        shutil.rmtree(root / "checkpoints" / "000002.corrupt", ignore_errors=True)
        assert not list((root / "checkpoints").glob("*.corrupt"))
        verify_folder(newest(root))
        ends.append({key: data for key, data in contents(root).items() if key.endswith(".safetensors")})
    assert set(ends[0]) >= {"elite/adapter_model.safetensors"}
    both = set(ends[0]) & set(ends[1])
    assert {key: ends[0][key] for key in both} == {key: ends[1][key] for key in both}
    assert any(key.startswith("checkpoints/000004/agent_") for key in both)
