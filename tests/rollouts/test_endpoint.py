"""The endpoint of a population: programs with the stock openai client, and what is captured of them."""

import asyncio
import contextlib
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from agilerl import GRPO, Population, Runtime
from agilerl.config.environment import AgentLimitsConfig
from agilerl.data import Completion
from agilerl.envs.core import Place, Row, Split, Task
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.games import GuessTheNumber
from agilerl.envs.programs import AgentTask, run_program
from agilerl.envs.prompts import ChatFormat
from agilerl.errors import ConfigError, EngineError, EnvError
from agilerl.rollouts.endpoint.collect import _answer, _arrived
from agilerl.rollouts.endpoint.server import Endpoint
from agilerl.rollouts.endpoint.session import ProgramSession
from agilerl.rollouts.engine import Ask, Conversation, GenerationRequest, SamplingSettings
from agilerl.training.evaluation import _last_reply, before_and_after

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parents[2]


class Letters(Task):
    """Answers that begin with a digit earn 1."""

    name, exam_prompts, test_prompts = "letters", 4, 4

    def row(self, split: Split, index: int) -> Row:
        return {"question": f"{index % 7}, {index % 5 + 1}.", "answer": "1", "index": index}

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(completion[:1].isdigit())


def population(task: Any, agents: int = 2, **settings: Any) -> Population:
    runtime = Runtime.from_pretrained("embedded", seed=0)
    shared = {"group_size": 4, "batch_size": 8, "max_output_tokens": 6, "lr": 1e-2, "beta": 0.0} | settings
    members = [GRPO(runtime=runtime, index=i, seed=0, **shared) for i in range(agents)]
    return Population(members, task, prompts_per_step=2, eval_max_new_tokens=6)


async def asks_once(client: Any, row: Row) -> str:
    reply = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": row["question"]}]
    )
    return str(reply.choices[0].message.content)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sampling_does_not_depend_on_torchs_default_dtype(dtype: torch.dtype) -> None:
    """A program that loads a model changes it for a while, in the middle of what the engine does for others."""
    agent = population(Letters(), 1).agents[0]
    agent.runtime.store.theta += 0.02 * torch.randn(agent.runtime.store.theta.shape)
    settings = SamplingSettings(8, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1)
    requests = [GenerationRequest(agent.slot, [5 + k, 9, 11], 3, settings, "rollout", (k,)) for k in range(4)]
    expected = agent.runtime.engine.generate(requests)
    torch.set_default_dtype(dtype)
    try:
        assert agent.runtime.engine.generate(requests) == expected
    finally:
        torch.set_default_dtype(torch.float32)


# -- the engine: bits that depend on a request alone ------------------------------------------------------------------


def test_bits_do_not_depend_on_what_arrives_when() -> None:
    """Two turns of 12 conversations of three agents and the base: alone, all at once, and a few at a time."""
    agents = population(Letters(), 3).agents
    runtime, draw = agents[0].runtime, random.Random(0)
    runtime.store.theta += 0.02 * torch.randn(runtime.store.theta.shape, generator=torch.Generator().manual_seed(0))
    slots = [None, *(agent.slot for agent in agents)]
    lengths = [9, 9, 5, 17, 33, 40, 9, 9, 5, 17, 33, 12]
    prompts = [[draw.randrange(3, 40) for _ in range(n)] for n in lengths]
    prompts[1] = prompts[0]  # computed once, sampled twice

    def request(number: int, turn: int, ids: list[int], known: Conversation) -> GenerationRequest:
        return GenerationRequest(slots[number % 4], ids, 1, SamplingSettings(8), "rollout", (number, turn), known)

    def play(at_once: Any) -> dict[tuple[int, ...], tuple[list[int], list[float] | None]]:
        waiting = [request(number, 0, ids, Conversation()) for number, ids in enumerate(prompts)]
        ended: dict[tuple[int, ...], tuple[list[int], list[float] | None]] = {}
        taken: list[GenerationRequest] = []

        def arrivals() -> list[GenerationRequest]:
            new = [waiting.pop(0) for _ in range(min(at_once(len(taken)), len(waiting)))]
            taken.extend(new)
            return new

        def deliver(number: int, sample: int, completion: Completion) -> None:
            asked = taken[number]
            ended[asked.key] = completion.token_ids, completion.logprobs
            if asked.key[1] == 0:
                kept = asked.conversation
                assert kept is not None
                ids = [*asked.prompt_ids, *completion.token_ids, 7, 8]
                known = Conversation(kept.slot, kept.token_ids, kept.kept)
                waiting.append(request(asked.key[0], 1, ids, known))

        while waiting:
            taken.clear()
            runtime.engine.generate(arrivals(), deliver, arrivals)
        return ended

    alone = play(lambda taken: 0 if taken else 1)
    few = random.Random(1)
    assert len(alone) == 24
    assert play(lambda taken: 64) == alone
    assert play(lambda taken: few.randrange(3) if taken else 2) == alone


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 64])
def test_an_update_has_the_same_bits_at_any_concurrency(concurrency: int) -> None:
    task = AgentTask(Letters(), asks_once, AgentLimitsConfig(concurrency=concurrency))
    trained = population(task)
    for _ in range(2):
        rollout = trained.rollout()
        assert not rollout.failures
        metrics = trained.learn(rollout)
    assert all(values["outcome"] == "ok" if "outcome" in values else True for values in metrics.values())
    theta = trained.agents[0].runtime.store.theta.clone()
    again = population(AgentTask(Letters(), asks_once, AgentLimitsConfig(concurrency=8)))
    for _ in range(2):
        again.learn(again.rollout())
    assert torch.equal(theta, again.agents[0].runtime.store.theta)


async def asks_twice(client: Any, row: Row) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["question"]}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=said)
        said += [
            {"role": "assistant", "content": str(reply.choices[0].message.content)},
            {"role": "user", "content": "?"},
        ]


def test_graders_of_a_program_see_its_conversation() -> None:
    seen: list[tuple[str, Any]] = []

    def grader(completion: str, prompt_messages: list[Any]) -> float:
        seen.append((completion, prompt_messages))
        return 1.0

    rows = [{"question": "4, 6.", "answer": "2"}]
    assert not population(AgentTask(DatasetTask(rows, rows, reward_fn=grader), asks_twice), 1).rollout().failures
    for text, messages in seen:
        assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
        assert messages[1]["content"] == "4, 6."
        assert isinstance(text, str)
    assert seen


class Seeds(Task):
    """The seeds of a game as rows; the program's result is the return."""

    name, exam_prompts, test_prompts = "seeds", 4, 4

    def __init__(self, of: EpisodeTask) -> None:
        self.of = of

    def row(self, split: Split, index: int) -> Row:
        return {"question": "", "answer": "", "seed": self.of.episode_seed(split, index)}

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(completion)


def plays_a_game(client: Any, row: Row) -> str:
    game = GuessTheNumber(max_number=9, max_turns=4)
    observation, _ = game.reset(seed=row["seed"])
    messages = [{"role": "user", "content": observation}]
    total, ended = 0.0, False
    while not ended:
        message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages.append(message)
        observation, reward, terminated, truncated, _ = game.step(message.content or "")
        total, ended = total + float(reward), terminated or truncated
        messages.append({"role": "user", "content": observation})
    return str(total)


def test_a_program_plays_a_game_with_the_tokens_of_our_environment() -> None:
    game = EpisodeTask(GuessTheNumber, {"max_number": 9, "max_turns": 4}, exam_episodes=4, test_episodes=4)
    ours, theirs = population(game), population(AgentTask(Seeds(game), plays_a_game))
    expected, captured = ours.rollout(), theirs.rollout()
    for index in expected.trajectories:
        pairs = list(zip(expected.trajectories[index], captured.trajectories[index], strict=True))
        assert any(len(set(own.turn_ids)) > 2 for own, _ in pairs)  # several turns were played
        for own, other in pairs:
            assert (own.prompt_ids, own.token_ids, own.turn_ids) == (other.prompt_ids, other.token_ids, other.turn_ids)
            assert own.episode_return == other.episode_return
            assert own.logprobs is not None
            assert other.logprobs == pytest.approx(own.logprobs, abs=1e-5)


def test_an_exam_goes_through_the_program() -> None:
    examined = population(AgentTask(Letters(), asks_once))
    plain = population(Letters())
    results = examined.evaluate("exam")
    assert {k: v.mean for k, v in results.items()} == {k: v.mean for k, v in plain.evaluate("exam").items()}


def raises(client: Any, row: Row) -> str:
    raise KeyError("no such tool")


async def reads(client: Any, row: Row) -> Any:
    return parsed("{")


def parsed(text: str) -> Any:
    return json.loads(text)


def hangs(client: Any, row: Row) -> None:
    time.sleep(3)


def exits(client: Any, row: Row) -> None:
    sys.exit(3)


def interrupts(client: Any, row: Row) -> None:
    raise KeyboardInterrupt


class AsObject:
    """A program may be an object."""

    async def __call__(self, client: Any, row: Row) -> None:
        raise LookupError(type(client).__name__)


async def sleeps(client: Any, row: Row) -> None:
    await asyncio.sleep(3)


def never_asks(client: Any, row: Row) -> str:
    return "1"


async def asks_without_end(client: Any, row: Row) -> str:
    for _ in range(1000):
        try:
            await asks_once(client, row)
        except openai.BadRequestError as error:
            return str(error.code)
    return ""


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        (raises, "reward_error", r"KeyError: 'no such tool' \(test_endpoint.py:\d+\)"),
        (
            reads,
            "reward_error",
            rf"program raised JSONDecodeError.*\(test_endpoint.py:{parsed.__code__.co_firstlineno + 1}\)",
        ),
        (hangs, "timeout", "within"),
        (sleeps, "timeout", "no result within 2 seconds"),
        (exits, "reward_error", r"exit the process \(SystemExit: 3\) \(test_endpoint.py:\d+\)"),
        (interrupts, "reward_error", "KeyboardInterrupt"),
        (AsObject(), "reward_error", "LookupError: AsyncOpenAI"),
        (lambda client, row: sleeps(client, row), "reward_error", "declare it with async def"),
        (never_asks, "reward_error", "did not call"),
        ((sys.executable, "-c", "import sys; sys.exit('out of tools')"), "reward_error", "status 1: out of tools"),
        (("no-such-program",), "reward_error", "cannot be started"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "timeout", "within 2 seconds"),
    ],
)
def test_a_failing_program_is_a_failed_episode(program: Any, kind: str, message: str) -> None:
    seconds = 10.0 if "status" in message else 2.0  # two interpreters have to start on a busy machine

    def sometimes(client: Any, row: Row) -> Any:
        if row["index"] % 2:
            return sync_once(client, row)
        return run_program(program, row, "http://127.0.0.1:1/v1", "key", seconds)

    trained = population(AgentTask(Letters(), sometimes, AgentLimitsConfig(timeout=seconds)))
    rollout = trained.rollout()
    failures = [*chain(*rollout.failures.values())]
    assert {failure.kind for failure in failures} == {kind}
    assert len(failures) == 8  # one row of two, four samples of two agents
    assert re.search(message, failures[0].message), failures[0].message
    metrics = trained.learn(rollout)
    assert [(m["env/errors"], m["env/episodes"]) for m in metrics.values()] == [(4.0, 8.0)] * 2


def sync_once(client: Any, row: Row) -> str:
    reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])
    return str(reply.choices[0].message.content)


class Heard(Letters):
    """Keeps what is graded."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        self.texts.append(completion)
        return 1.0


def test_the_last_answer_is_graded_if_a_program_returns_nothing() -> None:
    """Not the one of its longest conversation, nor only those of chats."""
    answers = []

    def long_then_short(client: Any, row: Row) -> None:
        said: Any = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "4"}]
        sync_once(client, {"question": "1, 1."})
        client.chat.completions.create(model="policy", messages=[*said, said[0]])
        answers.append(client.completions.create(model="policy", prompt="5, 5.", max_tokens=3).choices[0].text)

    task = Heard()
    assert not population(AgentTask(task, long_then_short), 1).rollout().failures
    assert sorted(task.texts) == sorted(answers)


def test_calls_are_bounded() -> None:
    trained = population(AgentTask(Letters(), asks_without_end, AgentLimitsConfig(max_calls=3)))
    rollout = trained.rollout()
    episodes = rollout.trajectories[0]
    assert not rollout.failures
    assert {t.outcome.turns for t in episodes if t.outcome} == {3}
    assert {t.outcome.truncated for t in episodes if t.outcome} == {"turns"}


@pytest.mark.parametrize("model", ["policy", "base"])
def test_a_refused_request_uses_up_no_calls(model: str) -> None:
    with Served(1, max_calls=3) as served:
        asked: Any = {"model": model, "messages": [{"role": "user", "content": "4, 6."}]}
        create = served.client().chat.completions.create
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="may make 3 calls"):
                create(n=4, **asked)
        assert len(create(n=2, **asked).choices) == 2
        assert len(create(n=1, **asked).choices) == 1
        with pytest.raises(openai.BadRequestError, match="may make 3 calls"):
            create(n=1, **asked)


def test_the_final_table_shows_the_last_answer_of_an_episode() -> None:
    answers = []

    def asks_twice(client: Any, row: Row) -> None:
        messages: Any = [{"role": "user", "content": row["question"]}]
        for _ in range(2):
            said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [said, {"role": "user", "content": "9, 9."}]
        answers.append(said.content)

    trained = population(AgentTask(Letters(), asks_twice), 1)
    shown = [one[who]["text"] for one in before_and_after(trained, trained.agents[0], 2) for who in ("base", "elite")]
    assert sorted(shown) == sorted(answers)
    assert _last_reply("> 3\n< lower\n> 2\n< right") == "2"  # an environment may have the last word


@pytest.mark.parametrize("choices", [1, 3])
def test_calls_side_by_side_share_the_tokens_of_an_episode(choices: int) -> None:
    """What is promised to calls in flight counts; what they leave is free again."""

    async def at_once(client: Any, row: Row) -> None:
        question: Any = [{"role": "user", "content": row["question"]}]
        asked = [client.chat.completions.create(model="policy", messages=question, seed=n, n=choices) for n in range(9)]
        await asyncio.gather(*asked, return_exceptions=True)
        with contextlib.suppress(openai.BadRequestError):
            for _ in range(20):
                await client.chat.completions.create(model="policy", messages=question, max_tokens=1)

    rollout = population(AgentTask(Letters(), at_once, AgentLimitsConfig(max_tokens=19)), 1).rollout()
    assert not rollout.failures
    episodes: dict[Any, int] = {}
    for t in rollout.trajectories[0]:
        key = t.group, t.episode
        episodes[key] = episodes.get(key, 0) + sum(turn >= 0 for turn in t.turn_ids)
    assert set(episodes.values()) == {19}
    assert {t.outcome.truncated for t in rollout.trajectories[0] if t.outcome} == {"turns"}


def test_all_programs_fail_and_the_run_says_why() -> None:
    with pytest.raises(EnvError, match="no such tool"):
        population(AgentTask(Letters(), raises)).rollout()


def test_a_command_gets_the_row_and_the_endpoint(tmp_path: Path) -> None:
    script = tmp_path / "solve.py"
    script.write_text(
        "import json, os, sys, urllib.request\n"
        "row = json.load(sys.stdin)\n"
        "body = {'model': os.environ['OPENAI_MODEL'], 'messages': [{'role': 'user', 'content': row['question']}]}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "request = urllib.request.Request(url, json.dumps(body).encode(), headers)\n"
        "print(json.load(urllib.request.urlopen(request))['choices'][0]['message']['content'])\n"
    )
    ours = population(AgentTask(Letters(), ["python", str(script)]), 1).rollout()
    theirs = population(AgentTask(Letters(), asks_once), 1).rollout()
    assert [t.token_ids for t in ours.trajectories[0]] == [t.token_ids for t in theirs.trajectories[0]]
    assert [t.rewards for t in ours.trajectories[0]] == [t.rewards for t in theirs.trajectories[0]]


def test_a_command_ends_with_what_it_started(tmp_path: Path) -> None:
    """A child that outlives it holds its output open."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
    )
    begun = time.monotonic()
    child = run_program((sys.executable, str(script)), {}, "http://127.0.0.1:1/v1", "key", 50.0)
    assert time.monotonic() - begun < 20
    assert waited_for(lambda: not alive(int(child)), 0.2)


@pytest.mark.processes
def test_a_command_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    """And what it has started, in a session of its own."""
    pids = tmp_path / "pids"
    script = tmp_path / "stays.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "time.sleep(90)\n"
    )
    called = f"run_program((sys.executable, {str(script)!r}), {{}}, 'http://127.0.0.1:1/v1', 'key', 80.0)"
    trainer = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from agilerl.envs.programs import run_program; {called}"], cwd=ROOT
    )
    try:
        assert waited_for(lambda: pids.exists() and pids.read_text().endswith(" "), 60)
    finally:
        trainer.kill()
        trainer.wait()
    assert waited_for(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()), 20)


def waited_for(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"  # nobody may have read its status yet
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening the file and reading it
        return False


def test_a_program_cannot_change_the_row_of_others() -> None:
    def cheats(client: Any, row: Row) -> None:
        row["tests"].append("mine")

    row: Row = {"tests": ["theirs"]}
    run_program(cheats, row, "http://127.0.0.1:1/v1", "key", 5.0)
    assert row == {"tests": ["theirs"]}


def test_a_broken_engine_ends_the_rollout_at_once() -> None:
    """Programs that are between two calls are refused, not waited for."""

    class Breaks:
        exact, takes_arrivals = True, True

        def generate(self, *_: Any) -> None:
            raise EngineError("out of order")

    async def waits(client: Any, row: Row) -> None:
        await asyncio.sleep(0.3 * (row["index"] % 2))
        await asks_once(client, row)

    trained = population(AgentTask(Letters(), waits, AgentLimitsConfig(timeout=60.0)))
    trained.agents[0].runtime.engine = Breaks()  # type: ignore[assignment]
    begun = time.monotonic()
    with pytest.raises(EngineError, match="out of order"):
        trained.rollout()
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("program", [3, "solve.py", [], lambda row: row, [1]])
def test_what_is_no_program_is_refused(program: Any) -> None:
    with pytest.raises(ConfigError, match=r"environment\.agent"):
        AgentTask(Letters(), program)


# -- the protocol -----------------------------------------------------------------------------------------------------


class Served:
    """An endpoint whose engine answers in a thread, as a collection does."""

    def __init__(self, episodes: int = 3, engine: Any = None, **limits: Any) -> None:
        self.runtime = Runtime.from_pretrained("embedded", seed=0)
        self.engine = engine or self.runtime.engine
        self.agent = GRPO(runtime=self.runtime, index=0, group_size=2, batch_size=2, max_output_tokens=8, seed=0)
        self.sessions: list[ProgramSession] = []
        self.endpoint = Endpoint(
            self.runtime.tokenizer,
            self.sessions,
            {"base": None, "agent-0": self.agent.slot},
            context_length=self.agent.context_length,
            most_new_tokens=8,
        )
        ask = Ask(self.agent.slot, Place({}), 1, self.agent.sampling, self.agent.context_length, 0, key=(0, 0, 0))
        for sample in range(episodes):
            self.sessions.append(ProgramSession(ask, sample, AgentLimitsConfig(**limits), self.endpoint.chat_of))
        self.ended = threading.Event()

    def __enter__(self) -> "Served":
        self.endpoint.__enter__()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()
        return self

    def serve(self) -> None:
        while not self.ended.is_set():
            pending = _arrived(self.endpoint, self.sessions, 1, 0.004)
            if pending:
                _answer(self.engine, self.endpoint, pending)

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.endpoint.__exit__()

    def client(self, episode: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.endpoint.url(episode), api_key=self.endpoint.new_key(episode), max_retries=0)

    def post(self, path: str, content: bytes | None = None, key: str | None = None, **body: Any) -> httpx.Response:
        episode = re.match(r"/e/(\d{1,3})/", path)
        own = self.endpoint.new_key(int(episode[1]) if episode else 3)
        headers = {"Authorization": f"Bearer {own if key is None else key}"}
        root = self.endpoint.url(0).removesuffix("/e/0/v1")
        return httpx.post(root + path, content=content or json.dumps(body).encode(), headers=headers, timeout=30)


@pytest.fixture(scope="module")
def served() -> Any:
    with Served(episodes=40) as served:
        yield served


def test_chat_completions_of_the_stock_client(served: Served) -> None:
    client, question = served.client(0), [{"role": "user", "content": "4, 6."}]
    reply = client.chat.completions.create(
        model="policy", messages=question, n=2, logprobs=True, max_tokens=4, extra_body={"return_token_ids": True}
    )
    assert len(reply.choices) == 2
    calls = served.sessions[0].calls
    for choice, call in zip(reply.choices, calls, strict=True):
        assert call.completion is not None
        assert choice.token_ids == call.completion.token_ids  # type: ignore[attr-defined]
        assert choice.logprobs is not None
        assert [c.logprob for c in choice.logprobs.content or ()] == call.completion.logprobs
        assert choice.finish_reason in ("stop", "length")
        assert len(call.completion.token_ids) <= 4
    assert reply.prompt_token_ids == calls[0].prompt_ids  # type: ignore[attr-defined]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == sum(len(c.completion.token_ids) for c in calls if c.completion)
    streamed = client.chat.completions.create(model="policy", messages=question, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
    last = served.sessions[0].calls[-1].completion
    assert last is not None
    assert "".join(pieces) == served.runtime.tokenizer.decode(last.token_ids, skip_special_tokens=True)


def test_a_stream_ends_with_its_usage_if_that_is_asked_for(served: Served) -> None:
    question: Any = [{"role": "user", "content": "4, 6."}]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = served.client(9).chat.completions.create(model="policy", messages=question, **options)
    assert not last.choices
    assert last.usage.completion_tokens > 0


def test_the_other_dialects(served: Served) -> None:
    client = served.client(1)
    assert [model.id for model in client.models.list()] == ["policy", "base", "agent-0"]
    text = client.completions.create(model="policy", prompt="4, 6.", max_tokens=3, logprobs=1)
    ids = served.sessions[1].calls[0]
    assert ids.completion is not None
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.token_logprobs == ids.completion.logprobs
    answer = served.post(
        "/e/2/inference/v1/generate", model="agent-0", token_ids=ids.prompt_ids, sampling_params={"max_tokens": 3}
    ).json()["choices"][0]
    captured = served.sessions[2].calls[0].completion
    assert captured is not None
    assert answer["token_ids"] == captured.token_ids
    assert [part["token"] for part in answer["logprobs"]["content"]] == [f"token_id:{i}" for i in captured.token_ids]
    assert [part["logprob"] for part in answer["logprobs"]["content"]] == captured.logprobs


def test_other_models_answer_and_are_not_trained_on(served: Served) -> None:
    client = served.client(3)
    asked = {"messages": [{"role": "user", "content": "4, 6."}]}
    greedy = [client.chat.completions.create(model="base", temperature=0, **asked) for _ in range(2)]
    assert greedy[0].choices[0].message.content == greedy[1].choices[0].message.content
    drawn = {client.chat.completions.create(model="base", **asked).choices[0].message.content for _ in range(12)}
    assert len(drawn) > 1
    assert not served.sessions[3].calls
    assert served.post("/v1/chat/completions", model="agent-0", **asked).status_code == 200


CHAT, ASKED = "/e/4/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, {**ASKED, "model": "gpt-5"}, 404, "agent-0"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": ["x"]}, 400, "message"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "text only"),
        (CHAT, {**ASKED, "n": 1000}, 400, "n: "),
        (CHAT, {**ASKED, "tool_choice": "required"}, 400, ""),
        (CHAT, {"messages": [{"role": "user", "content": "1, 2. " * 400}]}, 400, "context"),
        ("/e/4/v1/completions", {"prompt": [-1]}, 400, "token ids"),
        (CHAT, {**ASKED, "seed": "x"}, 400, "seed"),
        (CHAT, {**ASKED, "stop": 3}, 400, "stop"),
        (CHAT, {**ASKED, "tools": ["x"]}, 400, "tools"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": ["x"]}]}, 400, "tool call"),
        (CHAT, {**ASKED, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("/e/4/inference/v1/generate", {"token_ids": "abc"}, 400, "token_ids: "),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": []}]}]}, 400, "text only"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]}, 400, "tool_calls is a list"),
        (CHAT, {"messages": [{"role": {}, "content": "x"}]}, 400, "a message is an object"),
        (CHAT, {**ASKED, "model": "x" * 100_000}, 404, "unknown model 'xxxxx"),
        (CHAT, {**ASKED, "stop": ["\ud800" * 5] * 3, "seed": "x" * 400}, 400, "seed"),
    ],
)
def test_a_wrong_call_is_refused(served: Served, path: str, body: dict[str, Any], status: int, message: str) -> None:
    answer = served.post(path, **body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]


def test_strangers_and_large_bodies_are_refused(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    for path in ("/e/4/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
        assert served.post(path, key="wrong", **body).status_code == 401
    models = served.endpoint.url(0) + "/models"
    assert httpx.get(models).status_code == 401
    for key, status in (("wrong", 401), ("", 401), (served.endpoint.new_key(0), 200)):  # as verifiers' client sends it
        headers = {"Authorization": "Bearer EMPTY", "X-Api-Key": key}
        assert httpx.get(models, headers=headers).status_code == status
    assert served.post("/e/4/v1/chat/completions", content=b"x" * 10**8).status_code == 413
    assert served.post("/e/4/v1/chat/completions", content=b"[" * 100_000).status_code == 400
    assert served.endpoint.url(0).startswith("http://127.0.0.1:")


def test_a_key_opens_its_own_episode_only(served: Served) -> None:
    key, asked = served.endpoint.new_key(30), {"model": "policy", **ASKED}
    for episode, status in (("30", 200), ("31", 403), ("030", 403), ("9" * 5000, 403), ("x", 403)):
        assert served.post(f"/e/{episode}/v1/chat/completions", key=key, **asked).status_code == status
    assert served.post("/v1/chat/completions", key=key, **asked).status_code == 200
    assert [len(served.sessions[episode].calls) for episode in (30, 31)] == [2, 0]


def test_what_no_context_holds_is_refused_unread(served: Served) -> None:
    """A message of 8 MB took its time in the thread that answers everyone."""
    begun = time.monotonic()
    answer = served.post(CHAT, messages=[{"role": "tool", "content": "1, 2. " * 1_400_000}])
    assert answer.status_code == 413
    assert "for a context of" in answer.json()["error"]["message"]
    assert time.monotonic() - begun < 5


def test_half_of_a_surrogate_pair_is_replaced(served: Served) -> None:
    reply = served.post(CHAT, model="policy", messages=[{"role": "user", "content": "a\ud800b \U0001f600"}])
    assert reply.status_code == 200
    assert served.sessions[4].calls[-1].messages[0]["content"] == "a\ufffdb \U0001f600"


UNUSED = "http://127.0.0.1:1/v1", "key"


BROKEN = [10**5000, [10**5000], type("Broken", (), {"__str__": lambda self: 1 / 0})()]


@pytest.mark.parametrize("result", BROKEN, ids=["number", "list", "object"])
def test_a_result_without_a_text_is_a_failed_episode(result: Any) -> None:
    with pytest.raises(EnvError, match=r"the agent program raised (ValueError|ZeroDivisionError)"):
        run_program(lambda client, row: result, {}, "http://127.0.0.1:1/v1", "key", 5.0)
    assert run_program(lambda client, row: {"a": ["\udfff"]}, {}, "http://127.0.0.1:1/v1", "key", 5.0) == {
        "a": ["\ufffd"]
    }


def test_a_command_gets_no_secrets_but_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SEARCH_API_KEY", "DB_PASSWORD", "PLAIN"):
        monkeypatch.setenv(name, "x")
    command = (sys.executable, "-c", "import os, json; print(json.dumps(sorted(os.environ)))")
    names = set(json.loads(run_program(command, {}, "http://h/v1", "key", 50.0, ["SEARCH_API_KEY"])))
    assert {"SEARCH_API_KEY", "PLAIN", "PATH", "OPENAI_API_KEY"} <= names
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"} & names


def test_a_client_that_goes_is_not_captured(served: Served) -> None:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "4, 6."}]}
    url, body = httpx.URL(served.endpoint.url(5)), json.dumps(asked).encode()
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((url.host, url.port)) as gone:
        gone.sendall(f"{head}Authorization: Bearer {served.endpoint.new_key(5)}\r\n\r\n".encode() + body)
    time.sleep(0.5)
    assert not served.sessions[5].calls
    assert served.client(5).chat.completions.create(**asked).choices  # type: ignore[call-overload]
    assert len(served.sessions[5].calls) == 1


def test_no_port_is_left_open() -> None:
    with Served(1) as one, Served(1) as two:
        urls = [one.endpoint.url(0), two.endpoint.url(0)]
        assert urls[0] != urls[1]
        crossed = httpx.get(urls[0] + "/models", headers={"Authorization": f"Bearer {two.endpoint.new_key(0)}"})
        assert crossed.status_code == 401
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/models")


# -- tools ------------------------------------------------------------------------------------------------------------


class Says:
    """An engine that says the same texts whatever it is asked, one each time; it takes requests in batches only."""

    exact = False

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)

    def generate(self, requests: Any, on_completion: Any = None) -> list[list[Completion]]:
        found = []
        for _ in requests:
            ids = [
                *self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"],
                self.tokenizer.eos_token_id,
            ]
            found.append([Completion(ids, [-0.5] * len(ids), "stop")])
        return found


MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALLED = 'Let me see. <tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'


def test_a_tool_is_called_and_its_result_continues_the_conversation() -> None:
    """The chat template shows no tools: a system message does, and the result comes as a user's message."""
    tokenizer = Runtime.from_pretrained("embedded").tokenizer
    with Served(2, Says(tokenizer, CALLED, "42", "<tool_call>{broken", CALLED)) as served:
        client, session = served.client(0), served.sessions[0]
        asked: list[Any] = [{"role": "user", "content": "6 x 7?"}]
        reply = client.chat.completions.create(model="policy", messages=asked, tools=[MULTIPLY])  # type: ignore[list-item]
        assert reply.choices[0].finish_reason == "tool_calls"
        message = reply.choices[0].message
        (call,) = message.tool_calls or ()
        assert message.content == "Let me see."
        assert json.loads(call.function.arguments) == {"a": 6, "b": 7}  # type: ignore[union-attr]
        asked += [message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        last = client.chat.completions.create(model="policy", messages=asked, tools=[MULTIPLY])  # type: ignore[list-item]
        assert last.choices[0].message.content == "42"
        (row,) = session.rows()
        text = tokenizer.decode(row.ids)
        assert '"name": "multiply", "parameters"' in text
        assert text.count("Let me see.") == 1
        assert [turn for turn, token in zip(row.turn_ids, row.token_ids) if turn >= 0].count(1) == 3
        assert session.transcript()[-2]["content"] == "42"
        broken = client.chat.completions.create(model="policy", messages=asked[:1], tools=[MULTIPLY])  # type: ignore[list-item]
        assert (broken.choices[0].message.tool_calls, broken.choices[0].finish_reason) == (None, "stop")
        streamed = client.chat.completions.create(
            model="policy",
            messages=asked[:1],
            tools=[MULTIPLY],
            stream=True,  # type: ignore[list-item]
        )
        calls = [c for chunk in streamed if chunk.choices for c in chunk.choices[0].delta.tool_calls or ()]
        assert [c.function.name for c in calls if c.function] == ["multiply"]


def test_an_agent_of_langgraph_learns_unchanged() -> None:
    """A graph with a tool node, as its users write it; the model is LangChain's client of OpenAI."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    def graph(client: Any, row: Row) -> str:
        model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key)
        ended = create_agent(model, [multiply]).invoke({"messages": [("user", row["question"])]})
        return str(ended["messages"][-1].content)

    tokenizer = Runtime.from_pretrained("embedded").tokenizer
    answers = iter([CALLED, "42"])
    with Served(1, Says(tokenizer, *answers)) as served:
        assert graph(served.client(0), {"question": "6 x 7?"}) == "42"
        (row,) = served.sessions[0].rows()
        assert set(row.turn_ids) == {-1, 0, 1}
    trained = population(AgentTask(Letters(), graph), 1)
    rollout = trained.rollout()
    assert not rollout.failures
    assert all(t.token_ids for t in rollout.trajectories[0])
    trained.learn(rollout)


# -- what is captured -------------------------------------------------------------------------------------------------


def test_a_growing_conversation_is_one_row_and_a_branch_another(served: Served) -> None:
    client, session = served.client(6), served.sessions[6]
    first = [{"role": "user", "content": "4, 6."}]
    said = client.chat.completions.create(model="policy", messages=first).choices[0].message
    for text in ("5, 5.", "7, 7."):  # two continuations of one reply
        client.chat.completions.create(model="policy", messages=[*first, said, {"role": "user", "content": text}])
    client.chat.completions.create(model="policy", messages=first)  # a retry
    rows = session.rows()
    spoken = [[token for token, turn in zip(row.token_ids, row.turn_ids) if turn >= 0] for row in rows]
    sampled = [call.completion.token_ids for call in session.calls if call.completion]
    assert sorted(chain(*spoken)) == sorted(chain(*sampled))  # each sampled token is trained on once
    assert len(rows) == 3
    assert session.breaks == 0
    extended = next(row for row in rows if len(set(row.turn_ids)) == 3)  # two turns, and what was heard between
    chat = ChatFormat(served.runtime.tokenizer)
    call = session.calls[0]
    assert call.completion is not None
    between = chat.between(first, call.completion.token_ids, [{"role": "user", "content": "5, 5."}])
    assert extended.ids[: len(call.ids) + len(between)] in (
        call.ids + between,
        call.ids + chat.between(first, call.completion.token_ids, [{"role": "user", "content": "7, 7."}]),
    )


def test_two_branches_of_one_line_have_draws_of_their_own() -> None:
    with Served(2) as served:
        session = served.sessions[0]
        root = session.of_tokens([5, 6, 7])
        session.answered(root, Completion([8], [-0.5], "stop"), "x")
        first, second = session.of_tokens([5, 6, 7, 8, 9]), session.of_tokens([5, 6, 7, 8, 10])
        again = session.of_tokens([5, 6, 7, 8, 9])
        assert first.key == (1, 0)
        assert len({root.key, first.key, second.key, again.key}) == 4


def test_a_changed_history_is_a_break(served: Served) -> None:
    client, session = served.client(7), served.sessions[7]
    first = [{"role": "user", "content": "4, 6."}]
    client.chat.completions.create(model="policy", messages=first)
    changed = [*first, {"role": "assistant", "content": "something else"}, {"role": "user", "content": "5, 5."}]
    client.chat.completions.create(model="policy", messages=changed)
    assert session.breaks == 1
    examples = [*first, {"role": "assistant", "content": "2"}, {"role": "user", "content": "9, 3."}]
    served.client(14).chat.completions.create(model="policy", messages=examples)
    assert served.sessions[14].breaks == 0  # an example is no reply of the model
    assert len(session.rows()) == 2


def test_a_stop_text_cuts_the_completion(served: Served) -> None:
    client, session = served.client(8), served.sessions[8]
    reply = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "4, 6."}], stop=[str(d) for d in range(10)]
    )
    assert not any(character.isdigit() for character in reply.choices[0].message.content or "")
    said = session.calls[0].completion
    assert said is not None
    assert len(said.token_ids) == len(said.logprobs or ())


def test_side_by_side_calls_do_not_depend_on_their_order(served: Served) -> None:
    """Sub-agents of one episode at once, after a first call: the same rows in both episodes."""

    async def play(episode: int, order: list[int]) -> None:
        async with openai.AsyncOpenAI(
            base_url=served.endpoint.url(episode), api_key=served.endpoint.new_key(episode), max_retries=0
        ) as client:

            async def asked(text: str, wait: float = 0.0) -> None:
                await asyncio.sleep(wait)
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])

            await asked("4, 6.")
            await asyncio.gather(*(asked(f"{n}, {n}.", 0.05 * place) for place, n in enumerate(order)))

    async def begin_together(episode: int, order: list[int]) -> None:
        async with openai.AsyncOpenAI(
            base_url=served.endpoint.url(episode), api_key=served.endpoint.new_key(episode), max_retries=0
        ) as client:
            for n in order:
                question: Any = [{"role": "user", "content": f"{n}, {n}."}]
                await client.chat.completions.create(model="policy", messages=question, seed=n)

    first, second = served.sessions[10], served.sessions[11]
    second.sample = first.sample
    third, fourth = served.sessions[12], served.sessions[13]
    fourth.sample = third.sample
    asyncio.run(play(10, [1, 2, 3]))
    asyncio.run(play(11, [3, 1, 2]))
    asyncio.run(begin_together(12, [5, 6]))
    asyncio.run(begin_together(13, [6, 5]))
    assert sorted(row.token_ids for row in third.rows()) == sorted(row.token_ids for row in fourth.rows())
    assert [row.token_ids for row in first.rows()] == [row.token_ids for row in second.rows()]
    assert [row.logprobs for row in first.rows()] == [row.logprobs for row in second.rows()]
