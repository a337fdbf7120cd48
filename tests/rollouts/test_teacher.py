"""A teacher behind an endpoint, against a real HTTP server on loopback whose log-probs come from a real model."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.algorithms.distillation import Teacher as Distillation
from agilerl.algorithms.distillation import with_teacher
from agilerl.algorithms.learner import behaviour_logprobs
from agilerl.algorithms.update import learn_together
from agilerl.config.run import RunConfig
from agilerl.data import RolloutBatch, collate
from agilerl.envs.datasets import DatasetTask
from agilerl.errors import ConfigError, EngineError
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from agilerl.population import Population
from agilerl.processes import ALONE
from agilerl.rollouts.teacher import TeacherAPI, TeacherEndpoint
from agilerl.training.setup import check
from tests.algorithms.data_agents import embedded_runtime
from tests.rewards.chat_server import ChatServer, serve

pytestmark = pytest.mark.model
KEY = "sk-teacher-secret-9"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", KEY)


class Teacher:
    """What an inference server does: a model with random changes to its head, its tokenizer, and three paths."""

    def __init__(self, shift: int = 0, *, tokenize: bool = True) -> None:
        runtime = embedded_runtime()
        self.tokenizer, self.model, self.shift, self.tokenize = runtime.tokenizer, runtime.base.model, shift, tokenize
        torch.manual_seed(3)
        with torch.no_grad():
            self.model.model.norm.weight.mul_(1 + 0.8 * torch.randn_like(self.model.model.norm.weight))

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of every token but the first."""
        table = self.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [float(table[t, token]) for t, token in enumerate(ids[1:])]

    def text(self, token: int) -> str:
        return str(self.tokenizer.decode([(token + self.shift) % len(self.tokenizer)]))

    def __call__(self, body: dict[str, Any], number: int) -> tuple[int, str]:
        if "add_special_tokens" in body:
            if not self.tokenize:
                return 404, "Not Found"
            ids = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return 200, json.dumps({"tokens": [token + self.shift for token in ids]})
        ids = body["prompt"]
        values = self.logprobs(ids)
        choice: dict[str, Any] = {"text": "x"}
        if body.get("prompt_logprobs") is not None:
            known = [
                {str(t): {"logprob": v, "decoded_token": self.text(t)}, "-7": {"logprob": 0.0, "decoded_token": "?"}}
                for t, v in zip(ids[1:], values)
            ]
            choice["prompt_logprobs"] = [None, *known]
        if body.get("echo"):
            said = [self.text(t) for t in ids]
            choice["logprobs"] = {"token_logprobs": [None, *values, -0.5], "tokens": [*said, "x"]}
        return 200, json.dumps({"choices": [choice]})


@contextmanager
def endpoint(answer: Any, api: TeacherAPI = "prompt_logprobs") -> Iterator[tuple[TeacherEndpoint, ChatServer]]:
    with serve(answer) as server:
        found = TeacherEndpoint(server.url, "big", api, timeout=10)
        try:
            yield found, server
        finally:
            found.close()


def student(**changes: Any) -> GRPO:
    settings = {"lr": 1e-2, "beta": 0.0, "group_size": 6, "max_output_tokens": 5, "batch_size": 24, **changes}
    return GRPO(runtime=embedded_runtime(), index=0, seed=5, **settings)


def population(agent: GRPO, **teacher: Any) -> Population:
    rows = [{"question": str(i), "answer": "0"} for i in range(4)]
    task = DatasetTask(rows, rows, reward_fn=lambda completion, answer, question: float(len(completion) % 2))
    return Population([agent], task, prompts_per_step=4, teacher=teacher)


def batch_of(agent: GRPO) -> RolloutBatch:
    return collate(population(agent).rollout().batch(0), agent.pad_token_id)


@pytest.mark.parametrize("api", ["prompt_logprobs", "echo"])
def test_the_numbers_are_the_models(api: TeacherAPI) -> None:
    teacher, agent = Teacher(), student()
    batch = batch_of(agent)
    with endpoint(teacher, api) as (found, server):
        logps = found.logprobs(batch, ALONE, None)
    assert logps.shape == batch.action_mask.shape
    rows = {tuple(ids[:length]) for ids, length in zip(batch.ids.tolist(), batch.lengths.tolist())}
    assert sorted(tuple(r["prompt"]) for r in server.requests) == sorted(rows)
    for row in range(len(batch)):
        wanted = teacher.logprobs(batch.ids[row, : batch.lengths[row]].tolist())
        for t, value in enumerate(logps[row].tolist()):
            if batch.action_mask[row, t]:
                assert value == pytest.approx(wanted[t], abs=1e-5)
            else:
                assert value == 0.0
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(found)


def test_value_and_gradient_are_those_of_the_sampled_tokens_reverse_kl() -> None:
    """Advantages by hand from the teacher's model, and the gradient of an update as that of the sampled reverse KL."""
    teacher, agent, weight = Teacher(), student(max_grad_norm=None, loss_norm="token-mean"), 0.7
    batch = batch_of(agent)
    batch.rewards[:] = 1.0  # rewards teach nothing
    plain, own, mask = agent.prepare(batch), behaviour_logprobs(agent, batch).double(), batch.action_mask
    theirs = torch.zeros(mask.shape, dtype=torch.double)
    for row in range(len(batch)):
        known = teacher.logprobs(batch.ids[row, : batch.lengths[row]].tolist())
        theirs[row, : len(known)] = torch.tensor(known)
    gap = torch.where(mask, own - theirs, 0.0)
    whole, tokens = gap.sum(), mask.sum()
    others = (whole - gap.sum(1)) / (tokens - mask.sum(1))  # the baseline: the other rows' mean
    wanted = torch.where(mask, -weight * (gap - others[:, None]), 0.0)
    with endpoint(teacher) as (found, _):
        before = agent.tokens["trained"]
        taught = with_teacher(agent, plain, found, weight)
        assert agent.tokens["trained"] == before
        assert torch.allclose(taught.advantages.double(), wanted, atol=1e-4)
        assert taught.metrics["teacher/kl"] == pytest.approx(float(whole / tokens), rel=1e-4)
        twin = agent.clone(0)
        (metrics,) = learn_together([agent], [batch], teacher=Distillation(found, weight))
    assert metrics["teacher/kl"] == pytest.approx(float(whole / tokens), rel=1e-4)
    # On-policy the ratio is 1, so d loss / d log-prob is -advantage / tokens.
    twin.accumulate_tangents(batch, (-wanted / tokens).float())
    twin.optim_step()
    store = agent.runtime.store
    first, second = store.exp_avg[agent.slot], store.exp_avg[twin.slot]
    assert first.abs().max() > 1e-4
    assert torch.allclose(first, second, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("updates", [1, pytest.param(12, marks=pytest.mark.nightly)])
def test_the_students_of_a_population_come_near_a_teacher_of_another_model(updates: int) -> None:
    with serve(Teacher()) as server:
        own = student() if updates == 1 else student(group_size=24, batch_size=96)
        made = population(own, weight=1.0, url=server.url, model="big")
        made.task._grader = lambda completion, answer, question: 0.0  # type: ignore[attr-defined]
        gaps = [made.learn(made.rollout())[0]["teacher/kl"] for _ in range(updates)]
    assert abs(gaps[0]) > 0.01
    assert sum(gaps[-3:]) < 0.9 * sum(gaps[:3]) or updates == 1


@pytest.mark.parametrize("teacher", [Teacher(), Teacher(tokenize=False)], ids=["tokenize", "texts"])
@pytest.mark.parametrize("api", ["prompt_logprobs", "echo"])
def test_another_tokenizer_is_refused(teacher: Teacher, api: TeacherAPI) -> None:
    tokenizer = embedded_runtime().tokenizer
    with endpoint(teacher, api) as (found, _):
        found.check(tokenizer)
        teacher.shift = 3
        try:
            with pytest.raises(ConfigError, match="other tokens"):
                found.check(tokenizer)
        finally:
            teacher.shift = 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, json.dumps({"choices": [{"text": "x"}]})), "prompt_logprobs"),
        ((200, json.dumps({"choices": [{"prompt_logprobs": [None, {"1": {"logprob": -1}}]}]})), "prompt_logprobs"),
        ((200, json.dumps({"choices": []})), "teacher.api: echo"),
        ((200, "no json"), "teacher.api: echo"),
        ((401, f"wrong key {KEY}"), "TEACHER_API_KEY"),
        ((400, "too long"), "status 400"),
    ],
)
def test_answers_that_cannot_be_used(answer: tuple[int, str], words: str) -> None:
    with endpoint(lambda body, number: answer) as (found, _), pytest.raises(EngineError, match=words) as raised:
        found._prompt([1, 2, 3])
    assert KEY not in str(raised.value)


def test_numbers_that_are_no_log_probs() -> None:
    teacher = Teacher()
    with endpoint(teacher) as (found, _):
        for value in (math.nan, math.inf, 5.0, "x", None):
            teacher.logprobs = lambda ids, value=value: [value] * (len(ids) - 1)  # type: ignore[misc]
            with pytest.raises(EngineError, match=r"log-probs of|prompt_logprobs\.1\.2\.logprob: "):
                found._prompt([1, 2, 3])


def test_overload_is_tried_again_and_a_lost_server_named() -> None:
    teacher = Teacher()
    with endpoint(lambda body, n: (503, "busy") if n == 0 else teacher(body, n)) as (found, server):
        found._prompt([1, 2, 3])
        assert len(server.requests) == 2
    gone = TeacherEndpoint("http://127.0.0.1:9", "big", timeout=1)
    with pytest.raises(EngineError, match=r"did not answer .* resume"):
        gone._prompt([1, 2, 3])


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"url": "http://x:1", "model": "m"}, "weight is 0"),
        ({"url": "http://x:1", "weight": 1.0}, "go together"),
        ({"model": "m", "weight": 1.0}, "go together"),
        ({"url": "http://x", "model": "m", "adapter": "here", "weight": 1.0}, "two teachers"),
        ({"url": "nowhere", "model": "m", "weight": 1.0}, "address of a server"),
        ({"url": "http://a:b@x", "model": "m", "weight": 1.0}, "url: .*address with"),
    ],
)
def test_settings_that_make_no_sense(teacher: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_dict({"teacher": teacher})
    with pytest.raises(ConfigError, match=words):
        population(student(), **teacher)


def test_other_temperatures_are_refused() -> None:
    teacher = {"weight": 1.0, "url": "http://127.0.0.1:9", "model": "m"}
    with pytest.raises(ConfigError, match=r"temperature=0\.5"):
        population(student(temperature=0.5), **teacher)
    with pytest.raises(ConfigError, match="gene temperature"):
        population(student(hp_config=HyperparameterConfig(temperature=RLParameter(min=0.5, max=1.0))), **teacher)


def test_a_manifest_sends_the_key_only_where_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"teacher": {"weight": 1.0, "url": "http://x.test:1/v1", "model": "m"}}
    config = RunConfig.from_dict(values)
    assert config.teacher.url == "http://x.test:1"
    with pytest.raises(ConfigError, match=r"teacher\.url"):
        check(config)
    for allowed in ("http://x.test:1", "http://x.test:1/v1"):
        monkeypatch.setenv("AGILERL_ALLOWED_ADDRESSES", allowed)
        check(config)
    monkeypatch.setenv("AGILERL_ALLOWED_ADDRESSES", "http://x.test:1/v1/other")
    with pytest.raises(ConfigError, match=r"teacher\.url"):
        check(config)
    monkeypatch.delenv("AGILERL_ALLOWED_ADDRESSES")
    monkeypatch.delenv("TEACHER_API_KEY")
    check(config)
