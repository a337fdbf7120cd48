"""A population in one batch against the same agents one at a time: rollout, learning and both, memory, evolution.

    python benchmarking/population.py [--models embedded 1.25M] [--prompt-tokens 32 256] [--common 0]
                                      [--agents 1 2 4 8] [--activated] [--tokens 32] [--prompts 2] [--group 8]
                                      [--rank 8] [--rounds 7] [--no-memory] [--out FILE]

Both arms are the same agents on the same base in one process, as ``Population`` runs them, grading and building of
batches included: once as one population of N agents, once as N populations of one agent. Nothing ends early: the base
has no end token. The arms take turns, and the one that begins changes with the round; ``gain`` is the median over
rounds of (one at a time / batched) within a round, with a bootstrap interval of 95 %. The clock is the process's CPU
time in one thread, with the settings of malloc that ``agilerl train`` makes.

Memory is measured in a child process for each N: the banks' bytes, and the peak of the resident set above what a small
run has left; at most the rows of one agent are in flight, whatever N. The slope is per further agent, to be compared
with the 16 D bytes of its bank (D: numbers of an adapter). Evolution is the time to clone an agent and to mutate the
clone's weights. Prints a table and one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig  # noqa: E402

from agilerl.algorithms import GRPO  # noqa: E402
from agilerl.cli.process_settings import keep_memory  # noqa: E402
from agilerl.envs.core import Place, Row, Split, Task  # noqa: E402
from agilerl.hpo.mutation import Mutations  # noqa: E402
from agilerl.models.base import from_model, load_base, load_tokenizer  # noqa: E402
from agilerl.population import Population  # noqa: E402
from agilerl.runtime import Runtime  # noqa: E402
from agilerl.sizes import ADAPTER_COPIES, MAX_ROWS, padded_length  # noqa: E402
from benchmarking.peer_arm import MARK, prompt_ids, reward_of, written_tokenizer  # noqa: E402
from benchmarking.rollout import interval  # noqa: E402
from benchmarking.roofline import (  # noqa: E402
    SIZES,
    made_model,
    peak_bytes,
    resident_bytes,
    surroundings,
    written,
)

PHASES = ("rollout", "learn", "step")


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
    """The agents of one model, together and one at a time; ``folder`` is a model that was written, else ``name`` is."""

    def __init__(
        self,
        name: str,
        agents: int,
        load: Mapping[str, int],
        *,
        max_rows: int = MAX_ROWS,
        max_tokens: int | None = None,
        folder: str | None = None,
        dtype: str = "float32",
        activated: bool = False,
    ) -> None:
        shape = {"r": load["rank"], "lora_alpha": 2 * load["rank"], "target_modules": "all-linear"}
        lora = LoraConfig(**shape, task_type="CAUSAL_LM", alora_invocation_tokens=[MARK] if activated else None)
        base = from_model(made_model(name, "cpu"), "model") if folder is None else load_base(folder, dtype=dtype)
        tokenizer = load_tokenizer("embedded") if folder is None else written_tokenizer(folder)
        tokenizer.eos_token = None  # no completion ends by itself
        sizes = {"max_rows": max_rows, "max_tokens": max_tokens}
        self.runtime = Runtime(base, lora_config=lora, tokenizer=tokenizer, seed=0, **sizes)
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

    def step(self, populations: Sequence[Population]) -> dict[str, float]:
        """Return the seconds of a rollout and of an update of some populations, one after the other."""
        rollout = learn = 0.0
        for population in populations:
            start = process_time()
            sampled = population.rollout()
            middle = process_time()
            population.learn(sampled)
            rollout, learn = rollout + middle - start, learn + process_time() - middle
        return {"rollout": rollout, "learn": learn, "step": rollout + learn}

    def evolve(self) -> dict[str, float]:
        """Return the seconds of cloning an agent, and of mutating the weights of the clone."""
        start = process_time()
        clone = self.agents[0].clone(index=1000)
        cloned = process_time()
        Mutations(0, 0, 0, 1, 0, 0, mutate_elite=True).mutation([clone])
        spent = {"clone": cloned - start, "mutate": process_time() - cloned}
        clone.clean_up()
        return spent


def compared(name: str, agents: int, load: Mapping[str, int], rounds: int) -> dict[str, Any]:
    """Return the seconds of both arms, and how much less the batch needs."""
    bench = Bench(name, agents, load, activated=bool(load.get("activated")))
    arms: dict[str, Callable[[], dict[str, float]]] = {
        "batched": lambda: bench.step(bench.together),
        "one_at_a_time": lambda: bench.step(bench.alone),
    }
    times: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for number in range(rounds + 1):
        for arm in sorted(arms, reverse=number % 2 == 1):
            spent = arms[arm]()
            if number:  # the first round warms up
                times[arm].append(spent)
    found: dict[str, Any] = {"model": name, "parameters": bench.runtime.base.parameters, "agents": agents, **load}
    for phase in PHASES:
        pairs = [(a[phase], b[phase]) for a, b in zip(times["batched"], times["one_at_a_time"])]
        found[phase] = {
            "batched": median(a for a, _ in pairs),
            "one_at_a_time": median(b for _, b in pairs),
            "gain": interval([b / a for a, b in pairs]),
        }
    evolved = [bench.evolve() for _ in range(rounds)]
    found["evolve"] = {part: median(spent[part] for spent in evolved) for part in ("clone", "mutate")}
    return found


def held(name: str, agents: int, load: Mapping[str, int]) -> dict[str, Any]:
    """Return the bytes of the banks and the peak of this process over one step of N agents."""
    small = Bench("1M", 1, {**load, "prompt_tokens": 8, "tokens": 2, "prompts": 1})
    small.step(small.together)  # imports and kernels are no part of the memory
    before = resident_bytes("cpu")
    rows = load["prompts"] * load["group"]
    tokens = rows * padded_length(load["prompt_tokens"] + load["tokens"])
    bench = Bench(name, agents, load, max_rows=rows, max_tokens=tokens)
    bench.step(bench.together)
    store = bench.runtime.store
    banks = agents * ADAPTER_COPIES * store.size * store.theta.element_size()
    return {"agents": agents, "peak": peak_bytes("cpu") - before, "banks": banks}


def memory(name: str, agents: Sequence[int], load: Mapping[str, int]) -> dict[str, Any]:
    """Measure each N in a process of its own; returns the bytes, and the slope per further agent."""
    # Blocks go back to the system at once, else the resident set would hold what earlier phases have freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
    each = []
    for count in agents:
        command = [sys.executable, __file__, "--child", json.dumps([name, count, dict(load)])]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}, {count} agents: exit {done.returncode}: {done.stderr[-1500:]}")
        each.append(json.loads(done.stdout.splitlines()[-1]))
    first, last = each[0], each[-1]
    found: dict[str, Any] = {"model": name, **load, "each": each}
    if last["agents"] > first["agents"]:
        further = last["agents"] - first["agents"]
        found["slope"] = {part: (last[part] - first[part]) / further for part in ("peak", "banks")}
    return found


def table(results: Sequence[Mapping[str, Any]], memories: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| model | prompt | agents | phase | batched s | one at a time s | gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        for phase in PHASES:
            p = r[phase]
            (gain, low, high), size = p["gain"], f"{r['parameters'] / 1e6:.2f}M"
            lines.append(
                f"| {size} | {r['prompt_tokens']} | {r['agents']} | {phase} | {p['batched']:.3f} | "
                f"{p['one_at_a_time']:.3f} | {gain:.2f} [{low:.2f}-{high:.2f}] |"
            )
        evolve = r["evolve"]
        lines.append(f"|  |  |  | clone + mutate | {evolve['clone']:.4f} + {evolve['mutate']:.4f} |  |  |")
    for m in memories:
        peaks = ", ".join(f"{e['agents']}: {e['peak'] / 2**20:.0f} MiB" for e in m["each"])
        lines.append(f"\nmemory of {m['model']}, prompts of {m['prompt_tokens']}: {peaks}")
        if "slope" in m:
            peak, banks = (m["slope"][part] / 2**20 for part in ("peak", "banks"))
            lines.append(f"a further agent: {peak:.1f} MiB of the peak, {banks:.1f} MiB in the banks")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["embedded", "1.25M"], choices=["embedded", *SIZES])
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--common", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--activated", action="store_true", help="adapters that act after the prompt only")
    parser.add_argument("--agents", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--prompts", type=int, default=2, help="of each agent in a step")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true", help="leave out the child processes that measure memory")
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    if arguments.child:
        name, count, load = json.loads(arguments.child)
        print(json.dumps(held(name, count, load)))
        return
    keep_memory()
    document: dict[str, Any] = {
        "benchmark": "population",
        **surroundings(arguments.rounds),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "clock": "cpu seconds, one thread",
        "results": [],
        "memory": [],
    }
    shape = {name: getattr(arguments, name) for name in ("common", "activated", "tokens", "prompts", "group", "rank")}
    for name in arguments.models:
        for length in arguments.prompt_tokens:
            load = {"prompt_tokens": length, **shape}
            for count in arguments.agents:
                document["results"].append(compared(name, count, load, arguments.rounds))
                if arguments.out is not None:
                    written(arguments.out, document)
            if not arguments.no_memory:
                document["memory"].append(memory(name, arguments.agents, load))
    print(table(document["results"], document["memory"]))
    print(json.dumps(document))
    if arguments.out is not None:
        written(arguments.out, document)


if __name__ == "__main__":
    main()
