"""Bytes and tensors between real processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agilerl.errors import ConfigError, EngineError
from agilerl.processes import ALONE, Processes, joined

CHILD = """
import json, sys
import torch
from agilerl.errors import EngineError
from agilerl.processes import ALONE, joined

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


def start(code: str, rank: int, size: int, port: int) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
    for own in lines[:2]:
        assert "another process of this run is lost" in own[1]["lost"]
    assert children[2].returncode == 9


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
