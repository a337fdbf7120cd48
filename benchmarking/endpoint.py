"""Measure what the endpoint of agent programs costs: processor time per call, filled batches, the in-process ratio.

    python benchmarking/endpoint.py [OUT] [--model build/smollm2] [--rounds 5]

``call_ms`` is processor time of this process, one thread for torch, for one call of the stock client: ``empty`` of a
server that returns a constant, ``endpoint`` of ours with an engine that answers at once, and ``ours`` the difference;
``episode`` of a program that makes a client for one call. ``rollout`` compares a rollout of a game played by a program
with the same game as an environment in the process: ``ratio`` is the median of their processor times within a round,
``rows_per_step`` the mean number of rows of a decoding step. Writes OUT and prints it.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from statistics import median
from time import process_time
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.responses import JSONResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from agilerl import GRPO, Population, Runtime  # noqa: E402
from agilerl.data import Completion  # noqa: E402
from agilerl.envs.core import Place, Row, Split, Task  # noqa: E402
from agilerl.envs.episode_task import EpisodeTask  # noqa: E402
from agilerl.envs.games import GuessTheNumber  # noqa: E402
from agilerl.envs.programs import AgentTask, ProgramLimits, client, run_program  # noqa: E402
from agilerl.rollouts import torch_engine  # noqa: E402
from agilerl.rollouts.endpoint.server import Endpoint  # noqa: E402
from agilerl.rollouts.endpoint.session import Session  # noqa: E402
from agilerl.rollouts.engine import Ask  # noqa: E402
from benchmarking.startup import revision  # noqa: E402

ASKED: Any = {"model": "policy", "messages": [{"role": "user", "content": "4, 6."}]}
SAID = [5, 6, 7, 8, 9, 10, 11]
SETTINGS: dict[str, Any] = {"group_size": 8, "batch_size": 32, "max_output_tokens": 8, "lr": 1e-2, "beta": 0.0}
TARGETS = {"ours_ms": 2.0, "ratio": 1.3}


async def asks_once(openai: Any, row: Row) -> str:
    return str((await openai.chat.completions.create(**ASKED)).choices[0].message.content)


class Empties(Endpoint):
    """The same server around a constant."""

    def app(self) -> Any:
        message = {"role": "assistant", "content": "4, 6, 7"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
        used = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
        document = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy"}

        async def constant(request: Any) -> Any:
            await request.body()
            return JSONResponse({**document, "choices": choices, "usage": used})

        return Starlette(routes=[Route("/e/{episode:int}/v1/chat/completions", constant, methods=["POST"])])


def call_ms(kind: type[Endpoint], runtime: Runtime, agent: GRPO, calls: int) -> tuple[float, float]:
    """Return milliseconds of a call of one client, and of an episode of one call."""
    sessions: list[Session] = []
    endpoint = kind(runtime.tokenizer, sessions, {}, context_length=agent.context_length, most_new_tokens=8)
    ask = Ask(agent.slot, Place({}), 1, agent.sampling, agent.context_length, 0, key=(0, 0, 0))
    sessions += [Session(ask, n, ProgramLimits(), endpoint.chat_of) for n in range(2 * calls + 10)]
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            try:
                endpoint.inbox.get(timeout=0.05).answer.set_result(Completion(SAID, [-0.5] * len(SAID), "stop"))
            except Empty:
                continue

    async def ask_all(first: int, count: int) -> None:
        async with client(endpoint.url(0), endpoint.key, 60.0, asynchronous=True) as openai:
            for n in range(first, first + count):
                openai.base_url = endpoint.url(n)
                await asks_once(openai, {})

    with endpoint:
        threading.Thread(target=answer, daemon=True).start()
        asyncio.run(ask_all(0, 10))
        start = process_time()
        asyncio.run(ask_all(10, calls))
        middle = process_time()
        for n in range(10 + calls, 10 + 2 * calls):
            run_program(asks_once, {}, endpoint.url(n), endpoint.key, 60.0)
        end = process_time()
        ended.set()
    return 1e3 * (middle - start) / calls, 1e3 * (end - middle) / calls


class Seeds(Task):
    """The seeds of a game as rows; the program's result is the return."""

    name, exam_prompts, test_prompts = "seeds", 4, 4

    def __init__(self, of: EpisodeTask) -> None:
        self.of = of

    def row(self, split: Split, index: int) -> Row:
        return {"question": "", "answer": "", "seed": self.of.episode_seed(split, index)}

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(completion)


async def plays(openai: Any, row: Row) -> str:
    game = GuessTheNumber(max_number=9, max_turns=4)
    observation, _ = game.reset(seed=row["seed"])
    messages: Any = [{"role": "user", "content": observation}]
    total, ended = 0.0, False
    while not ended:
        message = (await openai.chat.completions.create(model="policy", messages=messages)).choices[0].message
        observation, reward, terminated, truncated, _ = game.step(message.content or "")
        total, ended = total + float(reward), terminated or truncated
        messages += [message, {"role": "user", "content": observation}]
    return str(total)


def rollout(
    model: str, agents: int, prompts: int, task: Callable[[EpisodeTask], Any]
) -> Callable[[], dict[str, float]]:
    """Return what measures one rollout."""
    game = EpisodeTask(GuessTheNumber, {"max_number": 9, "max_turns": 4}, exam_episodes=4, test_episodes=4)
    runtime = Runtime.from_pretrained(model, seed=0)
    members = [GRPO(runtime=runtime, index=i, seed=0, **SETTINGS) for i in range(agents)]
    population = Population(members, task(game), prompts_per_step=prompts, eval_max_new_tokens=8)
    step = torch_engine._Decoder._step

    def measured() -> dict[str, float]:
        steps = 0

        def counted(decoder: Any) -> None:
            nonlocal steps
            steps += 1
            step(decoder)

        with mock.patch.object(torch_engine._Decoder, "_step", counted):
            start = process_time()
            played = population.rollout()
            seconds = process_time() - start
        rows = [t for own in played.trajectories.values() for t in own]
        turns = sum(t.outcome.turns for t in rows if t.outcome)
        tokens = sum(sum(t.action_mask) for t in rows)
        return {"seconds": seconds, "calls": turns, "tokens": tokens, "rows_per_step": (tokens - turns) / max(steps, 1)}

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "benchmarking" / "results" / "endpoint.json")
    parser.add_argument("--model", default="embedded", help="embedded, or a folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4, help="of each agent; each is played eight times")
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runtime = Runtime.from_pretrained("embedded", seed=0)
    agent = GRPO(runtime=runtime, index=0, seed=0, **SETTINGS)
    size = arguments.model, arguments.agents, arguments.prompts
    program = rollout(*size, lambda game: AgentTask(Seeds(game), plays, ProgramLimits(timeout=600.0)))
    environment = rollout(*size, lambda game: game)
    program(), environment()
    calls: list[dict[str, float]] = []
    rollouts: list[dict[str, dict[str, float]]] = []
    loads = []
    for _ in range(arguments.rounds):
        loads.append(os.getloadavg()[0])
        empty, empty_episode = call_ms(Empties, runtime, agent, arguments.calls)
        ours, episode = call_ms(Endpoint, runtime, agent, arguments.calls)
        calls.append({"empty": empty, "endpoint": ours, "empty_episode": empty_episode, "episode": episode})
        rollouts.append({"program": program(), "environment": environment()})
        print(calls[-1], rollouts[-1], file=sys.stderr, flush=True)
    typical = {name: round(median(one[name] for one in calls), 3) for name in calls[0]}
    typical["ours"] = round(median(one["endpoint"] - one["empty"] for one in calls), 3)
    ratio = median(one["program"]["seconds"] / one["environment"]["seconds"] for one in rollouts)
    result = {
        "commit": revision(ROOT),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load": loads},
        "model": arguments.model,
        "episodes": arguments.agents * arguments.prompts * SETTINGS["group_size"],
        "call_ms": typical,
        "rollout": {
            "ratio": round(ratio, 3),
            "rows_per_step": round(median(one["program"]["rows_per_step"] for one in rollouts), 1),
            "rows_per_step_in_process": round(median(one["environment"]["rows_per_step"] for one in rollouts), 1),
        },
        "targets": TARGETS,
        "rounds": {"calls": calls, "rollouts": rollouts},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("call_ms", "rollout", "targets")}, indent=1))


if __name__ == "__main__":
    main()
