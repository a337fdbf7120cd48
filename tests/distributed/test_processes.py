"""Bytes and tensors between real processes."""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch.distributed as dist

from agilerl.distributed.topology import Exchange
from agilerl.errors import ConfigError, EngineError
from agilerl.processes import ALONE, Processes, joined
from tests.programs import Program

CHILD = """
import json, sys
import torch
from agilerl.errors import EngineError
from agilerl.processes import ALONE, joined

def sent(world):
    if world.rank == 1:
        world.send(b"for the last", 2)
    return world.receive(1).decode() if world.rank == 2 else None

with joined(timeout_seconds=60) as world:
    total = torch.full((3,), float(world.rank + 1), dtype=torch.float64)
    world.add_(total)
    pair = world.subgroup([[0, 1], [2]])
    within = torch.tensor([float(world.rank)])
    pair.add_(within)
    print(json.dumps({
        "rank": world.rank,
        "gathered": [d.decode() for d in world.gather(b"x" * world.rank)],
        "said": world.broadcast(b"from one" if world.rank == 1 else None, source=1).decode(),
        "silence": world.broadcast(b"" if world.rank == 2 else None, source=2).decode(),
        "total": total.tolist(), "pair": [pair.rank, pair.size, within.item()],
        "handed": sent(world),
        "in_pair": [d.decode() for d in pair.gather(str(world.rank).encode())],
    }), flush=True)
    world.wait()
    if world.rank == 2:
        sys.stdout.flush()
        import os
        os._exit(9)
    try:
        world.gather(b"")
    except EngineError as error:
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
    assert [first["pair"] for first, *_ in lines] == [[0, 2, 1.0], [1, 2, 1.0], [0, 1, 2.0]]
    assert [first["in_pair"] for first, *_ in lines] == [["0", "1"], ["0", "1"], ["2"]]
    assert [first["handed"] for first, *_ in lines] == [None, None, "for the last"]
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
    pair = world.subgroup([[0, 1]])
    print(world.gather(b"here"), pair.gather(b"pair"))
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
        assert said == ["[b'here', b'here'] [b'pair', b'pair']\n[]"] * 2


def test_one_process_alone_needs_nobody() -> None:
    assert ALONE.gather(b"a") == [b"a"]
    assert ALONE.broadcast(b"b") == b"b"
    ALONE.wait()


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
    exchange, said = Exchange(), {1: object()}
    assert exchange.all(said) == [said]
    assert exchange.merged(said) == said
    assert exchange.first(lambda: 5) == 5
    with pytest.raises(EngineError), exchange.telling():
        raise EngineError("nobody to tell")
    assert not exchange.error_is_known
