"""Attacks by the servers that are asked: a vLLM that samples, a teacher, a judge. A wrong answer costs one request."""

import json
import resource
import time
from typing import Any

import pytest

from agilerl.errors import EngineError, RewardError
from agilerl.rewards import JudgeGrader, PairwiseJudgeGrader
from agilerl.rollouts.teacher import TeacherEndpoint
from agilerl.rollouts.vllm.backend import SampleRequest
from tests.rewards.chat_server import chat, serve
from tests.rollouts.test_vllm_server import GOOD, ROW, answering, client

LONGEST = 700
"""Characters of a sentence."""


def completion(tokens: Any = (7, 8), logprobs: Any = (-0.5, -1), finish_reason: Any = "stop") -> Any:
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish_reason}
    return {"choices": [choice]}


COMPLETIONS: dict[str, tuple[Any, str]] = {
    "a token outside of the vocabulary": (completion([7, 5000]), "choices.0.token_ids: expected tokens from 0 to"),
    "a negative token": (completion([7, -1]), "expected tokens from 0 to"),
    "a huge token": (completion([7, 10**30]), "expected tokens from 0 to"),
    "a fraction of a token": (completion([7, 1.7]), "token_ids.1: input should be a valid integer, found 1.7"),
    "a whole number as a float": (completion([7, 2.0]), "token_ids.1: input should be a valid integer"),
    "true as a token": (completion([7, True]), "token_ids.1: input should be a valid integer, found True"),
    "a text as a token": (completion([7, "8"]), "token_ids.1: input should be a valid integer, found '8'"),
    "one token too many": (completion([7, 8, 9], [-1, -1, -1]), "expected 1 to 2 tokens"),
    "100,000 tokens": (completion([7] * 100_000, [-1] * 100_000), "expected 1 to 2 tokens"),
    "no token": (completion([], []), "expected 1 to 2 tokens"),
    "one log-prob too many": (completion(logprobs=[-1] * 3), "as many log-probs as tokens, found 3"),
    "a probability of e to the 5": (completion(logprobs=[-1, 5]), "should be less than or equal to 0.001, found 5"),
    "null as a log-prob": (completion(logprobs=[-1, None]), "input should be a valid number, found None"),
    "NaN as a log-prob": (completion(logprobs=[-1, float("nan")]), "input should be a finite number, found nan"),
    "infinity as a log-prob": (completion(logprobs=[-1, float("-inf")]), "input should be a finite number"),
    "true as a log-prob": (completion(logprobs=[-1, True]), "input should be a valid number, found True"),
    "a reason that is a number": (completion(finish_reason=7), "finish_reason: input should be a valid string"),
    "two choices": ({"choices": completion()["choices"] * 2}, "choices: "),
    "a list": ([], "found \\[\\]"),
    "a longer answer than was asked for": ({"choices": [], "x": " " * (5 * 2**20)}, "the answer has more than"),
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_vllm_server_answers_what_it_was_asked_or_a_sentence_says_why_not(name: str) -> None:
    answer, said = COMPLETIONS[name]
    replies = dict(GOOD)
    with answering(replies) as url, client(url) as server:
        server.start(2, 4, None)
        replies["/v1/completions"] = (200, answer)
        with pytest.raises(EngineError, match=said) as error:
            server.complete([ROW])
        assert url in str(error.value)
        assert len(str(error.value)) < LONGEST
        replies.update(GOOD)
        assert server.complete([ROW])[0].token_ids == [7, 8]  # the next request is answered


def test_an_answer_may_be_as_long_as_was_asked() -> None:
    """The limit grows with the tokens: with all that vLLM says about each of them, 40,000 take more than 4 MiB."""
    tokens, logprobs = [7] * 40_000, [-0.12345678901234567] * 40_000
    answer: Any = completion(tokens, logprobs)
    answer["choices"][0]["logprobs"]["top_logprobs"] = [{f"token_id:{token}": -0.12345678901234567} for token in tokens]
    answer["choices"][0]["logprobs"]["tokens"] = [f"token_id:{token} with its text of some length" for token in tokens]
    assert len(json.dumps(answer)) > 4 * 2**20
    with answering({**GOOD, "/v1/completions": (200, answer)}) as url, client(url) as server:
        server.start(2, 4, None)
        (found,) = server.complete([SampleRequest([5], {"max_tokens": 40_000}, None)])
    assert (found.token_ids, found.logprobs) == (tokens, logprobs)


def model(**values: Any) -> dict[str, Any]:
    return {"data": [{"id": "tiny", "root": "/models/tiny", **values}]}


STARTS: dict[str, tuple[str, Any]] = {
    "models that are a list": ("/v1/models", [1]),
    "models without data": ("/v1/models", {"data": None}),
    "data of numbers": ("/v1/models", {"data": [1, 2]}),
    "data that is a text": ("/v1/models", {"data": "tiny"}),
    "data that is a mapping": ("/v1/models", {"data": {"id": "tiny"}}),
    "a name that is a list": ("/v1/models", model(id=["tiny"])),
    "no name": ("/v1/models", {"data": [{"root": "/models/tiny"}]}),
    "a context that is a text": ("/v1/models", model(max_model_len="long")),
    "a context that is a list": ("/v1/models", model(max_model_len=[64])),
    "a negative context": ("/v1/models", model(max_model_len=-5)),
    "a context of true": ("/v1/models", model(max_model_len=True)),
    "an endless context": ("/v1/models", model(max_model_len=float("inf"))),
    "many models": ("/v1/models", {"data": [{"id": "x" * 900}] * 1001}),
    "a version that is a number": ("/version", {"version": 0.32}),
    "a version of 5 MiB": ("/version", {"version": "x" * (5 * 2**20)}),
    "a version that is long": ("/version", {"version": "x" * 2**20}),
    "a state of 5 MiB": ("/health", "x" * (5 * 2**20)),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_vllm_server_that_says_nonsense_at_the_start_is_named(name: str) -> None:
    path, answer = STARTS[name]
    with (
        answering({**GOOD, path: (200, answer)}) as url,
        client(url) as server,
        pytest.raises(EngineError) as error,
    ):
        server.start(2, 4, None)
    assert url in str(error.value)
    assert len(str(error.value)) < LONGEST


def known(*values: Any) -> str:
    return json.dumps({"choices": [{"prompt_logprobs": [None, *({str(t): v} for t, v in zip((2, 3), values))]}]})


TEACHERS: dict[str, tuple[str, str]] = {
    "a text as a log-prob": (known({"logprob": -1}, {"logprob": "-2"}), "logprob: input should be a valid number"),
    "true as a log-prob": (known({"logprob": -1}, {"logprob": True}), "logprob: input should be a valid number"),
    "a number alone": (known({"logprob": -1}, -2), "found -2"),
    "one too few": (known({"logprob": -1}), "expected 2, found 1"),
    "a mapping of choices": (json.dumps({"choices": {"0": {}}}), "choices: "),
    "a million mistakes": (f'{{"choices": [{{"prompt_logprobs": [{"0," * 2**20}0]}}]}}', "prompt_logprobs.0: input"),
    "6 MiB": ("{}," * 2**21, "more than 4,197,376 bytes"),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_answers_what_it_was_asked_or_a_sentence_says_why_not(name: str) -> None:
    reply, said = TEACHERS[name]
    began = time.process_time()
    with serve(lambda body, number: (200, reply)) as server:
        teacher = TeacherEndpoint(server.url, "big", timeout=10)
        try:
            with pytest.raises(EngineError, match=said) as error:
                teacher._prompt([1, 2, 3])
        finally:
            teacher.close()
    assert len(str(error.value)) < LONGEST
    assert time.process_time() - began < 3


JUDGES: dict[str, str] = {
    "60 MiB of nothing": chat("{}" * (30 * 2**20)),
    "4 MiB of nothing": chat("{}" * (2**21 - 1000)),
    "a MiB of nothing": chat("{}" * 2**19),
    "beside the reply": json.dumps({"choices": [{"message": {"content": "no"}}]})[:-1]
    + ', "x": ['
    + "{}," * 2**20
    + "{}]}",
    "a million mistakes": json.dumps({"choices": [0] * 2**20}),
    "a score behind many brackets": chat('{"score": ' + "[" * 200_000 + "}"),
    "many brackets that are closed": chat('{"score": ' + "[" * 200_000 + "]" * 200_000 + "}"),
}


@pytest.mark.parametrize("kind", [JudgeGrader, PairwiseJudgeGrader])
@pytest.mark.parametrize("name", JUDGES)
def test_a_judge_costs_little_whatever_it_replies(name: str, kind: type[JudgeGrader]) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with (
        serve(lambda body, number: (200, JUDGES[name])) as server,
        kind("m", base_url=server.url, api_key_env=None, attempts=1, timeout=20, concurrency=1) as grader,
    ):
        (found, other) = grader(["q", "q"], ["a", "b"])
    assert isinstance(found, RewardError)
    assert isinstance(other, RewardError)
    assert len(str(found)) < LONGEST
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 2**10
