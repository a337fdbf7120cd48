"""Damaged bytes in everything that reads bytes from outside: only the package's own errors come out.

``benchmarking/fuzz.py`` does the same for as long as one likes.
"""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agilerl.checks.redaction import redacted
from agilerl.errors import CheckpointError
from benchmarking.fuzz import READERS, Reader, at_random, damaged

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of settings that are odd and allowed
EXAMPLES = {"override": 30, "manifest": 30, "rows-parquet": 15}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.processes
def test_valid_bytes_are_read(name: str, tmp_path: Path) -> None:
    for number, data in enumerate(READERS[name].seeds):
        folder = tmp_path / str(number)
        folder.mkdir()
        READERS[name].read(folder, data)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.processes
def test_damaged_bytes_are_read_or_refused(name: str) -> None:
    reader = READERS[name]

    @settings(max_examples=EXAMPLES.get(name, 60), suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False), st.sampled_from(reader.seeds))
    def attempt(draws: random.Random, seed: bytes) -> None:
        reader.try_one(damaged(seed, draws))

    attempt()


@pytest.mark.parametrize("name", ["manifest", "journal", "state", "agent", "rows-csv", "tensors"])
def test_any_bytes_are_read_or_refused(name: str) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=200))
    def attempt(data: bytes) -> None:
        READERS[name].try_one(data)

    attempt()


def test_the_fuzzer_finds_what_is_there() -> None:
    """A reader that trusts one byte is found out."""

    def trusting(folder: Path, data: bytes) -> None:
        if data[:4] != b"good":
            raise CheckpointError("not good")
        if data[4:] != b" and sound":
            raise KeyError("sound")

    count, data, error = at_random(Reader([b"good and sound"], trusting), 20.0, 1)
    assert data is not None
    assert isinstance(error, KeyError)
    assert count < 1000


@given(st.lists(st.text(max_size=80), max_size=4))
def test_redaction_takes_any_command_line(command: list[str]) -> None:
    assert len(redacted(command)) == len(command)
