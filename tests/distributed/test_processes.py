"""Bytes and tensors between real processes."""

import json
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch.distributed as dist

from agilerl.errors import ConfigError, EngineError
from agilerl.processes import ALONE, Processes, joined
from tests.programs import Program

CHILD = """
import json, sys
import torch
from agilerl.errors import LostProcessError, RewardError
from agilerl.processes import joined

def raised(call):
    try:
        return call()
    except RewardError as error:
        return [str(error), error.everywhere]

def graded():
    if world.rank == 1:
        raise RewardError("cannot grade")
    return b"graded"

def failing():
    with world.telling():
        return [part.decode() for part in world.agreed(graded)]

def tells():
    with world.telling():
        if world.rank == 2:
            raise RewardError("of the last alone")
        return world.first(lambda: "never seen")

with joined(timeout_seconds=60) as world:
    total = torch.full((3,), float(world.rank + 1), dtype=torch.float64)
    world.add_(total)
    spread = torch.full((2,), float(world.rank))
    world.broadcast_(spread, 1)
    print(json.dumps({
        "rank": world.rank,
        "gathered": [d.decode() for d in world.gather(b"x" * world.rank)],
        "said": world.broadcast(b"from one" if world.rank == 1 else None, source=1).decode(),
        "silence": world.broadcast(b"" if world.rank == 2 else None, source=2).decode(),
        "total": total.tolist(), "spread": spread.tolist(),
        "all": world.all({"rank": world.rank, "nan": float("nan")}),
        "first": world.first(lambda: [world.rank, "first"]),
        "failed": raised(failing), "told": raised(tells),
    }), flush=True)
    world.gather(b"")
    if world.rank == 2:
        sys.stdout.flush()
        import os
        os._exit(9)
    try:
        world.gather(b"")
    except LostProcessError as error:
        print(json.dumps({"lost": str(error)}), flush=True)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(code: str, rank: int, size: int, port: int, more: Mapping[str, str] = MappingProxyType({})) -> Program:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Program("-c", code, cwd=Path(__file__).parents[2], env={**os.environ, **place, **more})


@pytest.mark.processes
def test_three_processes_talk_and_notice_a_loss() -> None:
    port = free_port()
    children = [start(CHILD, rank, 3, port) for rank in range(3)]
    said = [child.communicate(timeout=120) for child in children]
    lines = [[json.loads(line) for line in out.splitlines()] for out, _ in said]
    for rank, (first, *_) in enumerate(lines):
        assert first["rank"] == rank
        assert first["gathered"] == ["", "x", "xx"]
        assert (first["said"], first["silence"]) == ("from one", "")
        assert first["total"] == [6.0, 6.0, 6.0]
        assert first["spread"] == [1.0, 1.0]
        assert [value["rank"] for value in first["all"]] == [0, 1, 2]
        assert all(math.isnan(value["nan"]) for value in first["all"])
        assert first["first"] == [0, "first"]
        # What one raises, all raise.
        assert first["failed"] == ["cannot grade", True]
        assert first["told"] == ["of the last alone", True]
    for own in lines[:2]:
        assert "another process of this run is lost" in own[1]["lost"]
    assert children[2].returncode == 9


MEETING = """
import os, time
from pathlib import Path
from agilerl.processes import joined

# The first process comes late: what the second finds in the store until then is of those who have ended.
time.sleep(3 if os.environ["RANK"] == "0" else 0)
with joined(timeout_seconds=30) as world:
    print(world.gather(b"here"))
# A thread of gloo that is still at work while Python ends aborts the process now and then.
print([name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())])
"""


@pytest.mark.processes
def test_processes_that_are_started_again_meet_each_other_and_not_the_dead() -> None:
    """Torchrun keeps one store through its restarts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    again = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for _ in range(2):
        children = [start(MEETING, rank, 2, store.port, again) for rank in range(2)]
        said = [child.communicate(timeout=120)[0].strip() for child in children]
        assert said == ["[b'here', b'here']\n[]"] * 2


def test_one_process_alone_needs_nobody() -> None:
    assert ALONE.gather(b"a") == [b"a"]
    assert ALONE.broadcast(b"b") == b"b"


def test_shares_are_consecutive_and_even() -> None:
    assert [list(s) for s in Processes(0, 3).shares(7)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert Processes(2, 3).share(7) == range(5, 7)
    assert [len(s) for s in Processes(0, 4).shares(2)] == [1, 1, 0, 0]


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use"), joined():
            pass


def test_nobody_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match="could not meet"), joined(timeout_seconds=1):
        pass


def test_a_launcher_that_says_nonsense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "zero", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="RANK='zero'"), joined():
        pass


def test_alone_everything_is_what_it_was() -> None:
    value = {1: object()}
    assert ALONE.all(value) == [value]
    assert ALONE.first(lambda: value) is value
    with pytest.raises(EngineError) as raised, ALONE.telling():
        raise EngineError
    assert not raised.value.everywhere


def test_whole_agents_while_there_are_enough_else_rows() -> None:
    three, owners = Processes(0, 3), "aaabbbbccdd"
    assert three.parts(owners, whole=True) == [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10]]
    assert three.parts(owners, whole=False) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    # In turns, as a probe asks them; and fewer that ask than there are processes.
    assert three.parts("abcabc", whole=True) == [[0, 3], [1, 4], [2, 5]]
    assert three.parts("aa", whole=True) == [[0, 1], [], []]
