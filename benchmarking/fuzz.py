"""Feed damaged bytes to everything that reads bytes from outside; only the package's own errors may come out.

    python benchmarking/fuzz.py [--seconds 60] [--only journal manifest] [--seed 0]

Each reader is given its share of the time; valid files are damaged at random. The first input that a reader chokes on
is written to fuzz-<reader>.bin in the working directory, and the exit code is 1. Exit code 0: nothing was found.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import safetensors.torch
import torch

from agilerl.algorithms.state import PlainState
from agilerl.config.manifest import load_manifest
from agilerl.envs.sources import read_dataset
from agilerl.errors import AgileRLError
from agilerl.models.adapters import read_config, read_tensors
from agilerl.runs import Journal, JsonLines, RunDirectory, read_lines, read_run, strict_json
from agilerl.runs.atomic import MANIFEST, commit_folder, verify_folder
from agilerl.runs.completions import CompletionRecord, read_completions, write_completions
from agilerl.training.checkpoint import ClockFile, StateFile
from agilerl.training.setup import check

TOKENS = (
    *(
        b"null",
        b"NaN",
        b"Infinity",
        b"1e999",
        b"-1",
        b"9" * 400,
        b"true",
        b'""',
        b"[]",
        b"{}",
        b"[" * 300,
        b'{"a":' * 300,
    ),
    *(b"\0", b"\xff", b"\r\n", b"\n", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"..", b"/", b"~", b"'", b'"', b"\t"),
    *(
        b"&a ",
        b"*a",
        b"<<: ",
        b"!!python/object/apply:os.system [ls]",
        b"!x ",
        b"- ",
        b": ",
        b"? ",
        b"|",
        b"%YAML 9",
        b"---\n",
    ),
    *(b"__proto__", b"__class__", b"PAR1", b'"seq":0', b'"crc":"00000000"', b'{"crc":"', b"\xef\xbb\xbf"),
)
FITNESS = {"mean": 0.5, "stderr": 0.1, "n": 8, "scores": [0.0, 1.0]}
STATE = {
    "progress": {
        "iteration": 2,
        "generation": 1,
        "step": 0,
        "samples": 96,
        "best": 0.5,
        "elite_iteration": 2,
        "tokens": {"generated": 1, "trained": 1, "evaluated": 1},
        "fitness": {"0": FITNESS},
        "exam": {"0": FITNESS},
        "base": FITNESS,
        "median": {"index": 0, "fitness": FITNESS},
    },
    "memory": {"train_tokens": None, "decode_rows": 64},
    "next_index": 3,
    "agents": [0, 2],
    "lineage_bytes": 100,
    "bank_rank": 4,
}
AGENT = {
    "algorithm": "GRPO",
    "base": "embedded",
    "config": {"lr": 1e-4, "group_size": 8},
    "own_loss": None,
    "genes": {
        "lr": {
            "name": "lr",
            "dtype": "float",
            "min": 1e-6,
            "max": 1e-2,
            "scale": "log",
            "choices": [],
            "step": 0.1,
            "resample": 0.1,
            "factors": None,
        }
    },
    "lora": {"r": 4, "lora_alpha": 8, "use_rslora": False},
    "pad": {"pad_token": None, "pad_token_id": 0},
    "schedule": {"num_epochs": 5, "warmup_proportion": 0.1},
    "counters": {"index": 0},
    "optimizer_steps": 2.0,
}
MANIFEST_YAML = b"""\
algorithm: {name: GRPO, lr: 1e-4, group_size: 8, batch_size: 64, loss_norm: token-mean}
environment:
  task: reasoning_gym:chain_sum
  params: {min_terms: 3}
  graders: [{name: task}, {name: regex, params: {pattern: "^[0-9]+$"}, weight: 0.5, label: digits}]
training: {pop_size: 4, max_steps: 16384, seed: 1}
mutation: {rl_hp_selection: {lr: {min: 1e-5, max: 1e-2}, temperature: {}}, rank_range: [4, 64]}
network: {lora_config: {r: 4, target_modules: [q_proj]}}
"""
ROWS = [{"question": f"say {n}", "answer": str(n), "tags": ["a"]} for n in range(5)]


@dataclass(frozen=True)
class Reader:
    """Something that reads bytes from outside."""

    seeds: list[bytes]
    """Files that it takes."""
    read: Callable[[Path, bytes], object]
    """Given an empty folder and the bytes of a file."""
    allowed: tuple[type[Exception], ...] = (AgileRLError,)
    """What may come out."""

    def try_one(self, data: bytes) -> None:
        """Read the bytes; raises what no reader should."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                self.read(Path(folder), data)
            except self.allowed as error:
                if len(str(error)) > 10_000:
                    raise AssertionError("an error that nobody can read") from error


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    """Return a reader of a file of this name."""

    def call(folder: Path, data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return call


def written(name: str, write: Callable[[Path], object]) -> bytes:
    """Return what ``write(folder)`` puts into a file."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return (Path(folder) / name).read_bytes()


def _journal(folder: Path) -> None:
    with Journal(folder / "it") as journal:
        for number in range(4):
            journal.append({"kind": "evolution", "number": number, "plan": {"births": [1, 2]}})


def _metrics(folder: Path) -> None:
    with JsonLines(folder / "it") as metrics:
        for number in range(4):
            metrics.write({"kind": "train", "loss": float("nan"), "step": number})


def _commit(folder: Path) -> None:
    commit_folder(folder / "c", lambda inner: (inner / "state.json").write_text("{}"))  # type: ignore[arg-type,return-value]


def _verify(folder: Path, data: bytes) -> None:
    _commit(folder)
    (folder / "c" / MANIFEST).write_bytes(data)
    verify_folder(folder / "c")


def _append_again(path: Path) -> None:
    """Whatever is opened can be gone on with: a record more is there when it is opened again."""
    with Journal(path) as journal:
        count = journal.append({"kind": "more"})
    with Journal(path) as journal:
        assert len(journal) == count + 1
        assert journal.records[-1] == {"kind": "more"}


def _completions(folder: Path) -> None:
    write_completions(folder, 1, [CompletionRecord(0, 1, 0, 0, 0, "p", "c", "a", 1.0, 3, "stop")] * 3)


def _read_completions(folder: Path, data: bytes) -> None:
    (folder / "step_000001.parquet").write_bytes(data)
    read_completions(folder, 1)


def _manifest(path: Path) -> None:
    check(load_manifest(path))


def _override(folder: Path, data: bytes) -> None:
    check(load_manifest(None, [data.decode(errors="surrogateescape")]))


def _parquet(folder: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "it")


def _rows(path: Path) -> None:
    rows = read_dataset(str(path))
    assert all(isinstance(row, dict) for row in rows)


def _text(value: object) -> bytes:
    return strict_json.dumps(value, indent=1).encode()


JSON_LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
READERS: dict[str, Reader] = {
    "manifest": Reader([MANIFEST_YAML], in_file("it.yaml", _manifest)),
    "override": Reader([b"training.pop_size=4", b"environment.params={a: [1, 2e5, x]}"], _override),
    "strict-json": Reader([_text(STATE)], lambda folder, data: strict_json.loads(data), (ValueError,)),
    "journal": Reader([written("it", _journal)], in_file("journal.jsonl", _append_again)),
    "metrics": Reader([written("it", _metrics)], in_file("metrics.jsonl", lambda path: list(read_lines(path)))),
    "checkpoint-manifest": Reader([written(f"c/{MANIFEST}", _commit)], _verify),
    "state": Reader([_text(STATE)], in_file("state.json", partial(strict_json.read_json, model=StateFile))),
    "clock": Reader(
        [_text({"seconds": 1.5, "metrics_bytes": 9, "journal_records": 2})],
        in_file("clock.json", partial(strict_json.read_json, model=ClockFile)),
    ),
    "agent": Reader([_text(AGENT)], in_file("agent.json", partial(strict_json.read_json, model=PlainState))),
    "run": Reader(
        [written("r/run.json", lambda folder: RunDirectory.create(folder / "r", {"a": 1}, 0).close())],
        in_file("run.json", lambda path: read_run(path.parent)),
    ),
    "adapter-config": Reader(
        [b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'],
        in_file("adapter_config.json", lambda path: read_config(path.parent)),
    ),
    "tensors": Reader(
        [safetensors.torch.save({"a": torch.ones(2, 3), "b": torch.zeros(4)}, {"format": "pt"})],
        in_file("it.safetensors", read_tensors),
    ),
    "completions": Reader([written("step_000001.parquet", _completions)], _read_completions),
    "rows-jsonl": Reader([JSON_LINES], in_file("it.jsonl", _rows)),
    "rows-json": Reader([json.dumps(ROWS).encode()], in_file("it.json", _rows)),
    "rows-csv": Reader([b'question,answer\n"say, 1",1\nsay 2,"2""\n3"\n'], in_file("it.csv", _rows)),
    "rows-parquet": Reader([written("it", _parquet)], in_file("it.parquet", _rows)),
}


def damaged(data: bytes, draws: random.Random) -> bytes:
    """Return bytes after one to eight changes: bits, cuts, repetitions, swaps, and what parsers stumble over."""
    made = bytearray(data)
    for _ in range(draws.randint(1, 8)):
        start = draws.randint(0, len(made))
        end = min(len(made), start + draws.choice((0, 1, 1, 4, 30, 300)))
        kind = draws.randint(0, 6)
        if kind == 0 and made:
            place = draws.randrange(len(made))
            made[place] ^= 1 << draws.randint(0, 7)
        elif kind == 1:
            del made[start:end]
        elif kind == 2:
            made[start:start] = made[start:end] * draws.choice((1, 2, 50))
        elif kind == 3:
            made[start:end] = draws.choice(TOKENS)
        elif kind == 4:
            made[start:start] = draws.choice(TOKENS)
        elif kind == 5:
            made[start:end] = made[start:end][::-1]
        else:
            made[start:end] = bytes(draws.randint(0, 255) for _ in range(end - start))
        del made[60_000:]
    return bytes(made)


def at_random(reader: Reader, seconds: float, seed: int) -> tuple[int, bytes | None, Exception | None]:
    """Return how many inputs were read, and the first that did harm."""
    draws, count = random.Random(seed), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        data = damaged(draws.choice(reader.seeds), draws)
        count += 1
        try:
            reader.try_one(data)
        except Exception as error:  # whatever it is, it is a finding
            return count, data, error
    return count, None, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable()  # the libraries' own words about damaged files
    share, found = given.seconds / len(given.only), False
    for name in given.only:
        count, data, error = at_random(READERS[name], share, given.seed)
        print(f"{name}: {count} inputs, {'nothing found' if error is None else f'{type(error).__name__}: {error}'}")
        if data is not None:
            Path(f"fuzz-{name}.bin").write_bytes(data)
            found = True
    sys.exit(int(found))


if __name__ == "__main__":
    main()
