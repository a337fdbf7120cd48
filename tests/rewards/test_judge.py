"""The judge against a real HTTP server on loopback."""

import json
import logging
from pathlib import Path

import pytest

from agilerl.errors import ConfigError, RewardError
from agilerl.rewards import CombinedGrader, JudgeGrader, call_grader, grade
from agilerl.rewards.grader import attempt_grader
from tests.rewards.chat_server import chat, serve, slowly

KEY = "sk-very-secret-123"
ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def judge(url: str, **settings: object) -> JudgeGrader:
    defaults: dict[str, object] = {"base_url": url, "api_key_env": "JUDGE_KEY", "first_wait": 0.0, "timeout": 5.0}
    return JudgeGrader("grader-1", **{**defaults, **settings})  # type: ignore[arg-type]


def by_length(body: dict, number: int) -> tuple[int, str]:
    """Score the answer by its number of words."""
    text = body["messages"][-1]["content"]
    answer = text.partition("<answer>\n")[2].partition("\n</answer>")[0]
    return 200, chat(json.dumps({"score": len(answer.split())}))


def test_scores_are_scaled_and_in_order():
    with serve(by_length) as server, judge(server.url) as grader:
        assert call_grader(grader, ["one", "one two", " ".join("x" * 10)], ROWS) == [0.1, 0.2, 1.0]
    assert server.paths == ["/v1/chat/completions"] * 3
    request = next(r for r in server.requests if "2+2?" in r["messages"][0]["content"])
    assert request["model"] == "grader-1"
    assert request["temperature"] == 0
    assert "<reference>\n4\n</reference>" in request["messages"][0]["content"]
    assert "one two" in request["messages"][0]["content"]


def test_template_system_pattern_and_request_are_the_users():
    def answer(body, number):
        return 200, chat("I would say 3 of 5. Score: 4")

    settings = {
        "template": "{{ prompt }}|{{ completion }}|{{ level }}",
        "system": "Be strict.",
        "low": 1,
        "high": 5,
        "pattern": r"Score: (\d+)",
        "request": {"temperature": 0.5, "max_tokens": 7},
    }
    with serve(answer) as server, judge(server.url, **settings) as grader:
        assert call_grader(grader, ["{{ 1 + 1 }}"], [{"question": "q", "level": 9}]) == [0.75]
    (request,) = server.requests
    assert request["messages"] == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "q|{{ 1 + 1 }}|9"},
    ]
    assert (request["temperature"], request["max_tokens"]) == (0.5, 7)


def test_the_key_is_sent_and_shown_nowhere(caplog):
    def answer(body, number):
        return 401, f"Incorrect API key provided: {KEY}"

    caplog.set_level(logging.DEBUG)
    with serve(answer) as server, judge(server.url) as grader:
        (outcome,) = attempt_grader(grader, ["x"], ROWS[:1])
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert isinstance(outcome, RewardError)
    assert "status 401" in str(outcome)
    shown = [str(outcome), repr(outcome.__cause__), repr(grader), caplog.text, json.dumps(server.requests)]
    assert not any(KEY in text for text in shown)
    assert len(server.requests) == 1, "an error of the client is not tried again"


def test_no_key_where_none_is_wanted_and_a_sentence_where_it_is_missing(monkeypatch):
    with serve(by_length) as server, judge(server.url, api_key_env=None) as grader:
        assert call_grader(grader, ["one"], ROWS[:1]) == [0.1]
    assert "Authorization" not in server.headers[0]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="variable JUDGE_KEY"):
        judge(server.url).setup()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_overload_is_tried_again(status):
    def answer(body, number):
        return (status, "busy") if number < 2 else (200, chat('{"score": 10}'))

    with serve(answer) as server, judge(server.url, attempts=3) as grader:
        assert call_grader(grader, ["x"], ROWS[:1]) == [1.0]
    assert len(server.requests) == 3


def test_the_server_says_how_long_to_wait_and_waits_double(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", waits.append)

    def answer(body, number):
        return (429, "busy", {"Retry-After": "7"}) if number == 1 else (503, "busy")

    with serve(answer) as server, judge(server.url, attempts=5, first_wait=2.0) as grader:
        assert isinstance(attempt_grader(grader, ["x"], ROWS[:1])[0], RewardError)
    assert len(server.requests) == 5
    assert waits == [2.0, 7.0, 8.0, 16.0]


def test_a_judge_that_does_not_answer_in_time_is_a_failure():
    def answer(body, number):
        return slowly(0.5, chat('{"score": 1}'))

    with serve(answer) as server, judge(server.url, timeout=0.05, attempts=2) as grader:
        (outcome,) = attempt_grader(grader, ["x"], ROWS[:1])
    assert len(server.requests) == 2
    assert "ReadTimeout" in str(outcome)


def test_a_judge_that_is_not_there_is_a_failure():
    with serve(by_length) as server:
        pass
    with judge(server.url, attempts=2) as grader, pytest.raises(RewardError, match="ConnectError"):
        call_grader(grader, ["x"], ROWS[:1])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("<html>", "judge grader-1 at .* something else than"),
        ("{}", "judge grader-1 at .* something else than"),
        ('{"choices": []}', "judge grader-1 at .* something else than"),
        (chat(None), "choices.0.message.content: input should be a valid string, found None"),
        (chat("very good"), r"0 to 10 .* found 'very good'"),
        (chat('{"score": "high"}'), "expected a score"),
        (chat('{"score": 11}'), "expected a score from 0 to 10"),
        (chat('{"score": NaN}'), "expected a score"),
        (chat('{"score": true}'), "expected a score"),
        (chat('[{"score": 3}, {"score": '), None),
    ],
)
def test_malformed_replies(text, sentence):
    with serve(lambda body, number: (200, text)) as server, judge(server.url) as grader:
        if sentence is None:
            assert call_grader(grader, ["x"], ROWS[:1]) == [0.3]
        else:
            with pytest.raises(RewardError, match=sentence):
                call_grader(grader, ["x"], ROWS[:1])


def test_one_bad_reply_masks_one_completion_and_is_counted():
    def answer(body, number):
        return (500, "no") if "bad" in body["messages"][0]["content"] else by_length(body, number)

    with serve(answer) as server, CombinedGrader([judge(server.url, attempts=2), (len_of, 0.5)]) as grader:
        grades = grade(grader, ["one", "bad", "one two"], ROWS)
    assert grades.scores["judge"] == [0.1, None, 0.2]
    assert grades.rewards == [pytest.approx(0.1 + 1.5), None, pytest.approx(0.2 + 3.5)]
    assert grades.errors == {"judge": 1, "len_of": 0}


def len_of(completion: str) -> float:
    return float(len(completion))


def test_the_same_question_is_asked_once_also_over_runs(tmp_path: Path):
    cache = tmp_path / "judge" / "cache.jsonl"
    with serve(by_length) as server:
        with judge(server.url, cache=cache) as grader:
            assert call_grader(grader, ["one", "one", "one two"], [ROWS[0]] * 3) == [0.1, 0.1, 0.2]
            assert call_grader(grader, ["one two"], ROWS[:1]) == [0.2]
        assert len(server.requests) == 2
        with cache.open("a") as file:
            file.write('{"key": "torn')
        with judge(server.url, cache=cache) as grader:
            assert call_grader(grader, ["one two", "one"], [ROWS[0]] * 2) == [0.2, 0.1]
            assert len(server.requests) == 2
            assert call_grader(grader, ["one"], ROWS[1:2]) == [0.1]  # another prompt
        assert len(server.requests) == 3
        with judge(server.url, cache=cache) as grader:
            assert call_grader(grader, ["one"], ROWS[1:2]) == [0.1]
        assert len(server.requests) == 3, "what was written after a torn line is read"
    assert KEY not in cache.read_text()


def test_a_reply_without_a_score_is_not_kept():
    def answer(body, number):
        return 200, chat("hm" if number == 0 else '{"score": 5}')

    with serve(answer) as server, judge(server.url) as grader:
        assert isinstance(attempt_grader(grader, ["x"], ROWS[:1])[0], RewardError)
        assert call_grader(grader, ["x"], ROWS[:1]) == [0.5]


def test_requests_run_side_by_side_up_to_the_limit():
    def answer(body, number):
        return slowly(0.1, chat('{"score": 1}'))

    with serve(answer) as server, judge(server.url, concurrency=3) as grader:
        call_grader(grader, [str(n) for n in range(9)], [ROWS[0]] * 9)
    assert server.most_at_once == 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"low": 5, "high": 5}, "expected low < high"),
        ({"base_url": "ftp://x"}, r"http\(s\)://host/path"),
        ({"base_url": "http://user:pass@host/v1"}, "without a password or a query, on host"),
        ({"template": "{{ prompt"}, r"the template .* Jinja"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "x"}, "expected a group"),
    ],
)
def test_settings_that_cannot_be_meant(settings, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        JudgeGrader("m", **settings)
    assert "pass@" not in str(caught.value)


def test_a_template_that_does_not_fit_the_row():
    with pytest.raises(RewardError, match="'hint' is undefined"):
        call_grader(judge("http://127.0.0.1:1", template="{{ completion }} {{ hint }}"), ["x"], ROWS[:1])


def test_half_of_a_character_is_asked_about_as_a_question_mark():
    """A model may sample half of a character, which JSON in UTF-8 cannot hold."""
    with serve(by_length) as server, judge(server.url, system="\ud83d") as grader:
        assert call_grader(grader, ["one \ud83d"], ROWS[:1]) == [0.2]
    system, question = server.requests[0]["messages"]
    assert system["content"] == "?"
    assert "one ?" in question["content"]
