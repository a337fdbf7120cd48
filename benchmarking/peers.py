"""One step of reinforcement learning (rollout and update) against TRL's GRPOTrainer.

    python benchmarking/peers.py [--trl-python .venv-trl/bin/python] [--models embedded 1.25M 30M]
                                 [--prompt-tokens 32 256] [--tokens 32] [--prompts 2] [--group 8] [--rank 8]
                                 [--trl-rows N] [--agents 8] [--common 0] [--arms trl ours together alone] [--rounds 15]
                                 [--out FILE]

All arms load the same folder (random weights, but for ``embedded``) and read the same prompts, of which the first
``--common`` tokens are the same; each completion has the
same number of tokens, for no model can draw an end token. LoRA on all linear layers with alpha twice the rank, no KL,
one epoch, one optimizer step, fp32, no gradient checkpointing. What peer_arm.py does not say of TRL is its default.

* ``trl``: one agent, as TRL's trainer makes its steps.
* ``ours``: one agent, as ``Population`` runs it.
* ``together``: N agents in one batch.
* ``alone``: the same N agents one at a time.
* ``activated``, ``activated alone``: the same two with activated adapters, which act from the last token of a prompt.
* ``bfloat16``: ``together`` with ``training.dtype=bfloat16``.

Each arm is a process of its own that stays alive and makes one step when told. Arms take turns within a round, the
order changes with the round, and a ratio is the median over rounds of the ratio within a round, with a bootstrap
interval of 95 %. N agents of TRL are N times its step. The clock is the process's CPU time in one thread. The first
round warms up; in it each arm counts the tokens that go through the model, padding included, with and without gradient.
The peak of the resident set is that of the whole process, libraries included. Our arms make the settings of malloc that
``agilerl train`` makes; where glibc's variables are set (``MALLOC_MMAP_THRESHOLD_`` and so on), all arms have
these instead, which are then part of the result. Prints a table of ratios and one JSON object.

TRL may live in another environment, which ``make peers`` makes; its steps need nothing of agilerl.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.cli.process_settings import keep_memory
from agilerl.envs.core import Place, Row, Split, Task
from agilerl.models.base import load_base
from agilerl.population import Population
from agilerl.runtime import Runtime
from benchmarking.measuring import ROOT, interval, surroundings, written
from benchmarking.peer_arm import (
    MARK,
    Turns,
    prompt_ids,
    reward_of,
    written_model,
    written_tokenizer,
)
from benchmarking.roofline import SIZES, made_model, named

ARMS = ("trl", "ours", "together", "alone", "activated", "activated alone", "bfloat16")
RATIOS = (
    ("trl", "ours"),
    ("trl", "together"),
    ("trl", "activated"),
    ("trl", "bfloat16"),
    ("alone", "together"),
    ("activated alone", "activated"),
    ("together", "bfloat16"),
)
"""Pairs of arms: how many times less the second needs."""
VERSIONS = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


class FixedPrompts(Task):
    """Random prompts of one length; a reward that differs from completion to completion, so that every row counts."""

    name = "fixed prompts"

    def __init__(self, length: int, vocabulary: int, common: int = 0) -> None:
        self.length, self.vocabulary, self.common = length, vocabulary, common

    def row(self, split: Split, index: int) -> Row:
        return {"question": str(index), "answer": None}

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return reward_of(row["completion_ids"])

    def place_at(self, split: Split, index: int, tokenizer: Any, context_length: int) -> Place:
        return Place(self.row(split, index), prompt_ids(index, self.length, self.vocabulary, self.common))


class Bench:
    """N agents on the model in a folder, together and one at a time."""

    def __init__(self, agents: int, load: Mapping[str, Any], dtype: str = "float32", activated: bool = False) -> None:
        shape = {"r": load["rank"], "lora_alpha": 2 * load["rank"], "target_modules": "all-linear"}
        lora = LoraConfig(**shape, task_type="CAUSAL_LM", alora_invocation_tokens=[MARK] if activated else None)
        base, tokenizer = load_base(load["model"], dtype=dtype), written_tokenizer(load["model"])
        tokenizer.eos_token = None  # no completion ends by itself
        self.runtime = Runtime(base, lora_config=lora, tokenizer=tokenizer, seed=0)
        self.runtime.store.reserve(agents + 1)
        self.agents = [
            GRPO(
                runtime=self.runtime,
                pad_token_id=0,
                index=i,
                group_size=load["group"],
                batch_size=load["prompts"] * load["group"],
                max_output_tokens=load["tokens"],
                beta=0.0,
                seed=0,
            )
            for i in range(agents)
        ]
        task = FixedPrompts(load["prompt_tokens"], min(base.vocabulary_size, len(tokenizer)), load.get("common", 0))
        self.together = [Population(self.agents, task, prompts_per_step=load["prompts"])]
        self.alone = [Population([agent], task, prompts_per_step=load["prompts"]) for agent in self.agents]

    def step(self, populations: Sequence[Population]) -> None:
        """Make a rollout and an update of some populations, one after the other."""
        for population in populations:
            population.learn(population.rollout())


class Arm:
    """A process that makes one step when told."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log, quiet = log, {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w") as errors:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=quiet, stdin=pipe, stdout=pipe, stderr=errors, text=True
            )
        self.loaded: int = self._answer()["loaded"]
        self.peak = self.loaded
        self.tokens: dict[str, int] = {}

    def step(self) -> float:
        """Return the CPU seconds of one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.tokens = answer.get("tokens", self.tokens)
        self.peak = answer["peak"]
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an arm ended: exit {self._process.wait()}: {self._log.read_text()[-1500:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def agents_of(arm: str, load: Mapping[str, Any]) -> int:
    """Return the number of agents that an arm trains in a step."""
    return 1 if arm in ("trl", "ours") else int(load["agents"])


def ratios(seconds: Mapping[str, float], load: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much less an arm needs than another, from the seconds of a round; TRL's count once for an agent."""
    found = {}
    for more, less in RATIOS:
        if more in seconds and less in seconds:
            times = agents_of(less, load) if more == "trl" else 1
            found[f"{'N ' if times > 1 else ''}{more} / {less}"] = times * seconds[more] / seconds[less]
    return found


def compared(
    name: str, load: Mapping[str, Any], rounds: int, trl_python: str, names: Sequence[str] = ARMS[:4]
) -> dict[str, Any]:
    """Return the seconds, tokens and memory of all arms on one model, and their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        model, here = made_model(name, "cpu"), Path(folder)
        written_model(model, here / "model")
        parameters = model.num_parameters()
        del model
        said = json.dumps({**load, "model": str(here / "model"), "steps": rounds + 2})
        commands = {arm: [sys.executable, __file__, "--arm", arm, said] for arm in names}
        if "trl" in names:
            commands["trl"] = [trl_python, str(ROOT / "benchmarking" / "peer_arm.py"), said]
        arms: dict[str, Arm] = {}
        try:
            for arm, command in commands.items():
                arms[arm] = Arm(command, here / f"{arm}.log")
            seconds = in_turns(arms, rounds)
        finally:
            for opened in arms.values():
                opened.close()
        whole = load["prompts"] * load["group"] * (load["prompt_tokens"] + load["tokens"])
        if "trl" in names and (found := arms["trl"].tokens["with_gradient"]) != whole:
            raise RuntimeError(f"TRL trained on {found} tokens instead of {whole}: its prompts or lengths are others")
        return {
            "model": name,
            "parameters": parameters,
            **load,
            "arms": {
                name: {
                    "agents": agents_of(name, load),
                    "seconds": median(s[name] for s in seconds),
                    "each": [round(s[name], 5) for s in seconds],
                    "tokens": arm.tokens,
                    "loaded_bytes": arm.loaded,
                    "peak_bytes": arm.peak,
                }
                for name, arm in arms.items()
            },
            "ratios": {pair: interval([ratios(s, load)[pair] for s in seconds]) for pair in ratios(seconds[0], load)},
        }


def in_turns(arms: Mapping[str, Arm], rounds: int) -> list[dict[str, float]]:
    """Return the seconds of each arm in each round but the first, which warms up."""
    names, seconds = list(arms), []
    for number in range(rounds + 1):
        shift = number % len(names)
        spent = {name: arms[name].step() for name in names[shift:] + names[:shift]}
        if number:
            seconds.append(spent)
    return seconds


def train_with_ours(arm: str, load: Mapping[str, Any], turns: Turns) -> None:
    """Make the steps that are asked for: one agent's, or all agents' in one batch or one at a time."""
    dtype = "bfloat16" if arm == "bfloat16" else "float32"
    activated = arm.startswith("activated")
    bench = Bench(agents_of(arm, load), load, dtype, activated)
    turns.ready(bench.runtime.base.model)
    while turns.begin():
        bench.step(bench.alone if arm.endswith("alone") else bench.together)
        turns.end()


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each result."""
    pairs = list(dict.fromkeys(pair for r in results for pair in r["ratios"]))
    lines = [f"| model | prompt | common | {' | '.join(pairs)} |", "|---|---|---" + "|---" * len(pairs) + "|"]
    for r in results:
        known = {pair: f"{middle:.2f} [{low:.2f}-{high:.2f}]" for pair, (middle, low, high) in r["ratios"].items()}
        found = (known.get(pair, "") for pair in pairs)
        lines.append(f"| {named(r)} | {r['prompt_tokens']} | {r.get('common', 0)} | {' | '.join(found)} |")
    return "\n".join(lines)


def versions(python: str) -> dict[str, str]:
    """Return the versions that TRL's arm runs with; raises RuntimeError where it cannot."""
    command = [python, "-c", VERSIONS, "trl", "torch", "transformers", "peft", "accelerate", "datasets"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"--trl-python={python} cannot run TRL's trainer: {done.stderr[-500:]}; see `make peers`")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of TRL's arm; default: this one")
    parser.add_argument("--models", nargs="+", default=["embedded", "1.25M", "30M"], choices=["embedded", *SIZES])
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[32])
    parser.add_argument("--common", type=int, default=0, help="tokens with which all prompts begin")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS[:4])
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--prompts", type=int, default=2, help="of each agent in a step")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--trl-rows", type=int, help="rows of TRL's forward pass, as memory allows; default: all")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--agents", type=int, default=8, help="N")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    parser.add_argument("--arm", nargs=2, metavar=("NAME", "JSON"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    if arguments.arm:
        keep_memory()
        train_with_ours(arguments.arm[0], json.loads(arguments.arm[1]), Turns.on_standard_streams())
        return
    document: dict[str, Any] = {
        "benchmark": "peers",
        **surroundings(arguments.rounds),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "clock": "cpu seconds, one thread",
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        "versions": {
            "ours": {"torch": torch.__version__},
            "trl": versions(arguments.trl_python) if "trl" in arguments.arms else {},
        },
        "load_average": [],
        "results": [],
    }
    names = ("common", "tokens", "prompts", "group", "rank", "agents")
    for model in arguments.models:
        for length in arguments.prompt_tokens:
            load = {"prompt_tokens": length, **{name: getattr(arguments, name) for name in names}}
            load["trl_rows"] = arguments.trl_rows or load["prompts"] * load["group"]
            document["results"].append(compared(model, load, arguments.rounds, arguments.trl_python, arguments.arms))
            document["load_average"].append(round(os.getloadavg()[0], 1))
            if arguments.out is not None:
                written(arguments.out, document)
    print(table(document["results"]))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
