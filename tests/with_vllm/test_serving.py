"""`agilerl serve` with vLLM itself, asked with the openai client: each name answers with its own adapter.

The run's agents are compared with this package's torch engine, whose numbers are the trainer's.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import NotFoundError, OpenAI

import agilerl
from agilerl.envs.prompts import decode_completions, render_prompt
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.vllm.engine import trainer_logprobs
from agilerl.runs import newest_agents
from tests.training.small_runs import run_here
from tests.with_vllm.test_server import free_port

TOLERANCE = 1e-4
"""Largest difference of a token's log-probs in nats, in float32."""
QUESTIONS = [
    [{"role": "user", "content": f"Find the Greatest Common Divisor (GCD) of these numbers: {a}, {b}. {rest}"}]
    for a, b in ((12, 18), (22, 22), (35, 49), (6, 54), (14, 21), (40, 60), (9, 30), (50, 15))
    for rest in ("Give only the GCD as your final answer.",)
]
NAMES = ("base", "elite", "agent-0", "agent-1", "agent-2")
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "serving.md"
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other tests have the cores too
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    text: str


@contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[str]:
    """Yield the address of a server once it is up, and stop it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                if httpx2.get(f"{address}/health", timeout=2).status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.5)
        yield f"{address}/v1"
    finally:
        with suppress(ProcessLookupError):  # it has died, and the reason is above
            os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rates = "mutation={probabilities: {no_mut: 1}, rl_hp_selection: {lr: {min: 1e-3, max: 1e-2}}}"
    keep = ("selection_strategy.name=none", "algorithm.lr=3e-3", rates)
    return run_here(tmp_path_factory.mktemp("serving") / "a,b" / "run", *keep)


@pytest.fixture(scope="module")
def url(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("log") / "log.txt"
    command = [sys.executable, "-m", "agilerl", "serve", str(run), "--population", "--port", str(port)]
    with serving(command, port, log) as address:
        yield address


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none")


def asked(url: str, model: str, messages: Any, **settings: Any) -> Answer:
    with client(url) as opened:
        more = {"return_token_ids": True}
        answer = opened.chat.completions.create(
            model=model, messages=messages, max_tokens=10, logprobs=True, extra_body=more, **settings
        )
    (choice,) = answer.choices
    return Answer(choice.token_ids, [token.logprob for token in choice.logprobs.content], choice.message.content)


def asked_at_once(url: str, names: tuple[str, ...], **settings: Any) -> dict[str, list[Answer]]:
    """Ask every name every question, so that their rows share batches."""
    pairs = [(name, messages) for messages in QUESTIONS for name in names]
    with ThreadPoolExecutor(len(pairs)) as pool:
        answers = list(pool.map(lambda pair: asked(url, *pair, **settings), pairs))
    return {name: [a for (who, _), a in zip(pairs, answers) if who == name] for name in names}


@pytest.fixture(scope="module")
def agents(run: Path) -> dict[str, Any]:
    """The agents in this process, by the names that they are served under; ``base`` is any of them without adapter."""
    folders = {name.replace("_", "-"): actor.parent for name, actor in newest_agents(run / "checkpoints").items()}
    loaded = {name: agilerl.load(str(run if name == "elite" else folder)) for name, folder in folders.items()}
    return {**loaded, "base": loaded["elite"]}


def own_answers(agents: dict[str, Any], name: str) -> list[Answer]:
    """Return the torch engine's greedy answers."""
    agent = agents[name]
    tokenizer, slot = agent.runtime.tokenizer, None if name == "base" else agent.slot
    sampling = SamplingSettings(max_new_tokens=10, temperature=0.0)
    requests = [
        GenerationRequest(slot, render_prompt(tokenizer, messages), 1, sampling, "test", (place,))
        for place, messages in enumerate(QUESTIONS)
    ]
    found = [completion for (completion,) in agent.runtime.engine.generate(requests)]
    texts = decode_completions(tokenizer, [completion.token_ids for completion in found])
    return [Answer(list(c.token_ids), list(c.logprobs), text) for c, text in zip(found, texts)]


def gap(first: list[Answer], second: list[Answer]) -> float:
    pairs = zip((a.logprobs for a in first), (b.logprobs for b in second), strict=True)
    return max(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True))


@pytest.mark.timeout(600)
def test_each_name_gives_the_greedy_answers_of_its_own_adapter(url: str, agents: dict[str, Any]) -> None:
    with client(url) as opened:
        assert {model.id for model in opened.models.list()} == set(NAMES) == set(agents)
    served = asked_at_once(url, NAMES, temperature=0)
    for name in NAMES:
        own = own_answers(agents, name)
        assert [a.tokens for a in served[name]] == [a.tokens for a in own], name
        assert [a.text for a in served[name]] == [a.text for a in own], name
        assert gap(served[name], own) <= TOLERANCE, name
    # They do differ, more than what would pass as the same.
    apart = [(a, b) for a in NAMES for b in NAMES if a < b and "elite" not in (a, b)]
    for a, b in apart:
        firsts = [[answer.logprobs[0] for answer in served[name]] for name in (a, b)]
        assert max(abs(x - y) for x, y in zip(*firsts)) > 100 * TOLERANCE, (a, b)


def test_drawn_answers_have_the_trainer_s_log_probs(url: str, agents: dict[str, Any]) -> None:
    drawn = asked_at_once(url, NAMES, temperature=0.8, seed=7)
    again = asked_at_once(url, NAMES, temperature=0.8, seed=7)
    for name in NAMES:
        assert [a.tokens for a in again[name]] == [a.tokens for a in drawn[name]]
        agent = agents[name]
        slot, prompts = (
            None if name == "base" else agent.slot,
            [render_prompt(agent.runtime.tokenizer, messages) for messages in QUESTIONS],
        )
        rows = [(slot, prompt, answer.tokens) for prompt, answer in zip(prompts, drawn[name])]
        trainer = trainer_logprobs(agent.runtime.base, agent.runtime.store, rows, 0.8)
        theirs = [Answer(a.tokens, logprobs, a.text) for a, logprobs in zip(drawn[name], trainer)]
        assert gap(drawn[name], theirs) <= TOLERANCE, name
    assert any(asked(url, "elite", QUESTIONS[0], seed=n).tokens != drawn["elite"][0].tokens for n in range(8))


def test_a_name_that_is_not_served_is_not_found(url: str) -> None:
    with pytest.raises(NotFoundError):
        asked(url, "agent-9", QUESTIONS[0])


def test_no_adapter_is_loaded_on_request(url: str, run: Path) -> None:
    body = {"lora_name": "more", "lora_path": str(run / "elite")}
    assert httpx2.post(f"{url}/load_lora_adapter", json=body).status_code == 404


def test_the_page_s_program_asks_every_name(url: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "ask.py").write_text(code.replace("http://127.0.0.1:8000/v1", url))
    done = subprocess.run([sys.executable, tmp_path / "ask.py"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(NAMES)


@pytest.mark.timeout(600)
def test_a_merged_model_gives_the_elite_s_answers(run: Path, agents: dict[str, Any], tmp_path: Path) -> None:
    program = [sys.executable, "-m", "agilerl"]
    subprocess.run([*program, "merge", str(run), "merged", "--dtype", "float32"], cwd=tmp_path, check=True)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "merged")]
    options = ["--served-model-name", "merged", "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    sizes = ["--enforce-eager", "--kv-cache-memory-bytes", "1G", "--generation-config", "vllm"]
    with serving([*command, *options, *sizes], port, tmp_path / "log.txt") as address:
        served = asked_at_once(address, ("merged",), temperature=0)["merged"]
    own = own_answers(agents, "elite")
    assert [a.tokens for a in served] == [a.tokens for a in own]
    assert gap(served, own) <= TOLERANCE
