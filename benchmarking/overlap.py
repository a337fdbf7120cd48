"""The share of a step in which the base waits for graders, if they begin early and if they wait for the last row.

    python benchmarking/overlap.py [--sizes 0.5M 1.25M] [--seconds 2] [--rounds 3] [--out FILE]

A step is a rollout and an update of 4 agents, each with 4 prompts x 4 completions. Completions have different lengths:
8 tokens of the vocabulary end one, so that with random weights about one in eight reaches the limit of 256.

* ``judge``: a server in another process answers each question after a while, eight at a time, ``--seconds`` in all.
* ``judge, 16 rows at once``: the same; the engine decodes 16 rows of the 64 at a time.
* ``environment``: episodes of two turns, whose steps wait in eight threads, ``--seconds`` in all; 128 tokens a turn.
* ``function``: a plain function that costs nothing. It is called at the end either way.

``idle`` is the share of the step's wall time in which nothing is decoded or learned. The arms take turns, and the one
that begins changes with the round; seconds are medians over rounds. All samples are compared: they are equal, or it
stops. Prints a table and one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from gymnasium.spaces import Text  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: E402

from agilerl.algorithms import GRPO  # noqa: E402
from agilerl.data import Completion  # noqa: E402
from agilerl.envs.core import Row, Split, Task  # noqa: E402
from agilerl.envs.episode_task import EpisodeTask  # noqa: E402
from agilerl.envs.graded import GradedTask  # noqa: E402
from agilerl.envs.text_env import TextEnv  # noqa: E402
from agilerl.models.base import from_model, load_tokenizer  # noqa: E402
from agilerl.population import Population  # noqa: E402
from agilerl.rewards import JudgeGrader  # noqa: E402
from agilerl.rollouts import GenerationRequest, RolloutEngine  # noqa: E402
from agilerl.rollouts.engine import OnCompletion  # noqa: E402
from agilerl.runtime import Runtime  # noqa: E402
from benchmarking.roofline import SIZES, surroundings, written  # noqa: E402

ARMS = ("early", "at the end")
AGENTS, PROMPTS, SAMPLES, TOKENS, AT_ONCE, ENDS, TURNS = 4, 4, 4, 256, 8, 8, 2
ROWS = AGENTS * PROMPTS * SAMPLES
KINDS = ("judge", "judge, 16 rows at once", "environment", "function")


class Clocked:
    """An engine whose time is measured; told so, it reports no completion before the last one."""

    def __init__(self, inner: RolloutEngine) -> None:
        self.inner, self.exact = inner, inner.exact
        self.reports, self.seconds = True, 0.0

    def generate(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        start = time.perf_counter()
        try:
            return self.inner.generate(requests, on_completion if self.reports else None)
        finally:
            self.seconds += time.perf_counter() - start


class Questions(Task):
    """Short questions without a right answer; alone, they are graded by a function that costs nothing."""

    name, exam_prompts, test_prompts = "questions", 1, 0

    def row(self, split: Split, index: int) -> Row:
        return {"question": f"What is {index} + {index}?", "answer": ""}

    def reward(self, completion: str, row: Any) -> float:
        return len(completion) % 7 / 7


class Waits(TextEnv):
    """Answers after a while."""

    observation_space, action_space, max_turns = Text(100_000), Text(100_000), TURNS
    seconds = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"What is {seed}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        self.turn += 1
        return "And now?", len(action) % 7 / 7, self.turn == TURNS, False, {}


def answering(seconds: float, port: Any) -> None:
    """Serve a judge that takes its time; in a process of its own, which has its own interpreter lock."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            score = len(body["messages"][-1]["content"]) % 11
            message = {"role": "assistant", "content": json.dumps({"score": score})}
            data = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.put(server.server_port)
    server.serve_forever()


@contextmanager
def judged(seconds: float) -> Iterator[str]:
    """Have a judge that takes ``seconds`` for the rows of a step."""
    context = multiprocessing.get_context("spawn")
    port = context.SimpleQueue()
    process = context.Process(target=answering, args=(seconds * AT_ONCE / ROWS, port), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get()}/v1"
    finally:
        process.terminate()
        process.join()


def made_runtime(size: str) -> Runtime:
    s, tokenizer = SIZES[size], load_tokenizer("embedded")
    config = Qwen2Config(
        vocab_size=s["vocabulary"],
        hidden_size=s["hidden"],
        intermediate_size=s["feed_forward"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # One of so many tokens that a completion ends after ENDS / 1024 of them, whatever the vocabulary.
    step = 1024 // ENDS
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(200, s["vocabulary"], step)]
    return Runtime(from_model(model, size), tokenizer=tokenizer, seed=0)


class Bench:
    """One kind of grading on one size, in both arms with the same samples."""

    def __init__(self, size: str, kind: str, seconds: float, url: str) -> None:
        self.engines: dict[str, Clocked] = {}
        self.populations: dict[str, Population] = {}
        for arm in ARMS:
            runtime = made_runtime(size)
            task: Any = Questions()
            if kind.startswith("judge"):
                task = GradedTask(task, JudgeGrader("m", base_url=url, api_key_env=None, concurrency=AT_ONCE))
            if kind == "judge, 16 rows at once":
                runtime.engine.max_rows = 16  # type: ignore[attr-defined]
            if kind == "environment":
                Waits.seconds = seconds * AT_ONCE / (ROWS * TURNS)
                task = EpisodeTask(Waits, exam_episodes=1, test_episodes=0)
            agents = GRPO.population(
                AGENTS,
                runtime=runtime,
                group_size=SAMPLES,
                batch_size=PROMPTS * SAMPLES,
                update_epochs=1,
                beta=0.0,
                lr=1e-4,
                max_output_tokens=TOKENS // TURNS if kind == "environment" else TOKENS,
                seed=0,
            )
            self.populations[arm] = Population(agents, task, prompts_per_step=PROMPTS)
            self.engines[arm] = runtime.engine = Clocked(runtime.engine)  # type: ignore[assignment]
            self.engines[arm].reports = arm == "early"

    def step(self, arm: str) -> tuple[dict[str, float], str]:
        """Return the seconds of a step's parts, and what it sampled and learned."""
        population, engine = self.populations[arm], self.engines[arm]
        engine.seconds = 0.0
        start = time.perf_counter()
        rollout = population.rollout()
        learning = time.perf_counter()
        learned = population.learn(rollout)
        end = time.perf_counter()
        parts = {"decode": engine.seconds, "learn": end - learning, "step": end - start}
        parts["idle"] = 1 - (parts["decode"] + parts["learn"]) / parts["step"]
        return parts, str((rollout.trajectories, learned))

    def close(self) -> None:
        for population in self.populations.values():
            population.task.close()


def measured(size: str, kind: str, seconds: float, rounds: int, url: str) -> dict[str, Any]:
    """Return the medians of both arms."""
    bench = Bench(size, kind, seconds, url)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):
        said = set()
        for arm in sorted(ARMS, reverse=number % 2 == 1):
            parts, samples = bench.step(arm)
            said.add(samples)
            if number:  # the first round warms up, and measures the environments
                found[arm].append(parts)
        if len(said) > 1:
            raise SystemExit(f"{size}, {kind}: the arms sampled or learned different things")
    bench.close()
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    names = ("decode", "learn", "step", "idle")
    return {
        "size": size,
        "grader": kind,
        "threads_left": len(left),
        "arms": {arm: {n: median(parts[n] for parts in found[arm]) for n in names} for arm in ARMS},
        "idle": {arm: [parts["idle"] for parts in found[arm]] for arm in ARMS},
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as rows of Markdown."""
    lines = [
        "| base | grader | step s, early | at the end | decode s, early | at the end | waited s, early | at the end | "
        "idle, early | at the end |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found in results:
        arms = [found["arms"][arm] for arm in ARMS]
        seconds = [f"{arm[name]:.2f}" for name in ("step", "decode") for arm in arms]
        waited = [f"{arm['idle'] * arm['step']:.2f}" for arm in arms]
        idle = [f"{100 * arm['idle']:.1f} %" for arm in arms]
        lines.append(f"| {' | '.join([found['size'], found['grader'], *seconds, *waited, *idle])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["0.5M", "1.25M"], choices=list(SIZES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seconds", type=float, default=2.0, help="that grading takes in a step, eight at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    results = []
    with judged(arguments.seconds) as url:
        for size in arguments.sizes:
            for kind in arguments.kinds:
                results.append(measured(size, kind, arguments.seconds, arguments.rounds, url))
                print(table(results[-1:]).splitlines()[-1], flush=True)
    document: dict[str, Any] = {
        "benchmark": "overlap",
        **surroundings(arguments.rounds),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "clock": "wall seconds, one thread",
        "load": os.getloadavg()[0],
        "seconds": arguments.seconds,
        "rows": ROWS,
        "tokens": TOKENS,
        "results": results,
    }
    print(table(results))
    print(json.dumps(document))
    if arguments.out is not None:
        written(arguments.out, document)


if __name__ == "__main__":
    main()
