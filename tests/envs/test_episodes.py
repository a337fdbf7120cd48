"""Episodes keep tokens as they were sampled, mask what the environment wrote, and stay within their limits."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.data import collate
from agilerl.envs.episode_task import Episode, EpisodeLimits
from agilerl.envs.prompts import ChatFormat
from agilerl.errors import EnvError
from tests.envs.conftest import make_tokenizer
from tests.envs.scripted import Echo, said
from tests.envs.test_conversation import CUTS_THINKING


def play(tokenizer: Any, words: list[str], env: Echo | None = None, seed: int = 0, **limits: Any) -> Episode:
    chat = ChatFormat(tokenizer)
    episode = Episode(env or Echo(), chat, EpisodeLimits(**{"context_length": 1000, **limits}))
    episode.begin(seed)
    for word in words:
        if episode.done:
            break
        episode.act(said(tokenizer, word), word)
    return episode


def test_an_episode_is_one_row_that_only_grew(tokenizer: Any) -> None:
    (row,) = play(tokenizer, ["a", "bc", "d"]).trajectories(group=4, number=2)
    assert tokenizer.decode(row.prompt_ids) == "<user>start0<end><assistant>"
    expected = "a<end><user>echo:a<end><assistant>bc<end><user>echo:bc<end><assistant>d<end>"
    assert tokenizer.decode(row.token_ids) == expected
    spoken = [token for token, action in zip(row.token_ids, row.action_mask) if action]
    assert tokenizer.decode(spoken) == "a<end>bc<end>d<end>"
    assert [turn for turn in row.turn_ids if turn >= 0] == [0, 0, 1, 1, 1, 2, 2]
    assert [logp for logp, action in zip(row.logprobs, row.action_mask) if action] == [
        -0.5, -1.5, -0.5, -1.5, -2.5, -0.5, -1.5,
    ]  # fmt: skip
    assert all(logp == 0 for logp, action in zip(row.logprobs, row.action_mask) if not action)
    assert row.rewards == [1.0, 2.0, 3.0]
    assert (row.group, row.episode, row.finish_reason) == (4, 2, "stop")
    assert row.outcome is not None
    assert (row.outcome.turns, row.outcome.success, row.outcome.truncated) == (3, True, None)


def test_the_environment_gets_text_and_the_very_tokens(tokenizer: Any) -> None:
    env = Echo()
    play(tokenizer, ["a", "bc"], env)
    end = tokenizer.eos_token_id
    assert env.heard == [("a", [tokenizer("a")["input_ids"][0], end]), ("bc", [*tokenizer("bc")["input_ids"], end])]


def test_the_system_prompt_comes_first(tokenizer: Any) -> None:
    episode = play(tokenizer, [], Echo(system_prompt="be brief"))
    assert tokenizer.decode(episode.prompt_ids) == "<system>be brief<end><user>start0<end><assistant>"


def test_the_turn_limit_cuts(tokenizer: Any) -> None:
    episode = play(tokenizer, ["a", "b", "c"], max_turns=2)
    (row,) = episode.trajectories(0, 0)
    assert episode.done
    assert row.rewards == [1.0, 2.0]
    assert row.outcome is not None
    assert (row.outcome.truncated, row.finish_reason) == ("turns", "length")
    assert row.token_ids[-1] == tokenizer.eos_token_id, "what nobody answers is not in the row"


def test_a_full_context_cuts_with_its_reason(tokenizer: Any) -> None:
    whole = play(tokenizer, ["aaaa"] * 3)
    room = len(whole.prompt_ids) - 1
    cut = play(tokenizer, ["aaaa"] * 3, context_length=room, reserve=5)
    (row,) = cut.trajectories(0, 0)
    assert row.outcome is not None
    assert (row.outcome.truncated, row.finish_reason, len(row.rewards)) == ("context", "context", 2)


def test_a_sliding_window_forgets_the_oldest_turns_in_a_row_of_its_own(tokenizer: Any) -> None:
    episode = play(tokenizer, ["aa", "bb", "cc"], Echo(length=4), context_length=38, reserve=4, sliding_window=True)
    first, second = episode.trajectories(0, 7)
    assert tokenizer.decode(second.prompt_ids) == ("<user>start0<end><assistant>bb<end><user>echo:bb<end><assistant>")
    assert tokenizer.decode(second.token_ids).startswith("cc<end>")
    assert [t for t in first.turn_ids if t >= 0] == [0, 0, 0, 1, 1, 1]
    assert [t for t in second.turn_ids if t >= 0] == [2, 2, 2]
    assert first.rewards == second.rewards == [1.0, 2.0, 3.0]
    assert first.episode == second.episode == 7
    batch = collate([first, second], tokenizer.pad_token_id)
    heads, places = batch.heads()
    assert (heads.tolist(), places.tolist()) == ([0], [0, 0])


def test_a_template_that_cuts_thinking_is_followed_in_rows_of_its_own() -> None:
    tokenizer = make_tokenizer(CUTS_THINKING)
    episode = play(tokenizer, ["<think>x</think>a", "b", "c"], Echo(length=4), forks=True)
    rows = episode.trajectories(0, 0)
    assert [tokenizer.decode(row.prompt_ids) for row in rows] == [
        "<user>start0<end><assistant>",
        "<user>start0<end><assistant>a<end><user>echo:<think>x</think>a<end><assistant>",
    ]
    said_tokens = [[t for t, a in zip(row.token_ids, row.action_mask) if a] for row in rows]
    assert [tokenizer.decode(ids) for ids in said_tokens] == ["<think>x</think>a<end>", "b<end>c<end>"]


def test_a_prompt_over_the_budget_is_a_sentence(tokenizer: Any) -> None:
    with pytest.raises(EnvError, match="at most 7 tokens"):
        play(tokenizer, [], context_length=8)


class Broken(Echo):
    """Returns whatever it is told to."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def step(self, action: str) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (("x", 1.0, False, {}), ".observation, reward, terminated, truncated, info., found a tuple of 4"),
        ("x", "found a str"),
        (None, "found a NoneType"),
        (("x", float("nan"), False, False, {}), r"finite number .*, found nan"),
        (("x", "1", False, False, {}), "found '1'"),
        (("x", None, False, False, {}), r"finite number .*, found None"),
        (("x", [1, 2], False, False, {}), "found \\[1, 2\\] of type list"),
        ((3, 1.0, False, False, {}), "text or a list of messages"),
    ],
)
def test_an_environment_that_breaks_the_protocol(tokenizer: Any, result: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        play(tokenizer, ["a"], Broken(result))


WORDS = st.lists(st.text(alphabet="abcXYZ <>{}:0", max_size=8), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(words=WORDS, seed=st.integers(0, 99), ended=st.booleans(), room=st.integers(60, 300), window=st.booleans())
def test_rows_of_any_episode_hold_together(words: list[str], seed: int, ended: bool, room: int, window: bool) -> None:
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer)
    episode = Episode(Echo(length=5), chat, EpisodeLimits(room, reserve=9, sliding_window=window))
    episode.begin(seed)
    prompts, completions = [], []
    for word in words:
        if episode.done:
            break
        completion = said(tokenizer, word or "0", ended=ended)
        prompts.append(episode.prompt_ids)
        completions.append(completion)
        episode.act(completion, word)
    rows = episode.trajectories(0, 0)
    for row in rows:
        lengths = {len(row.token_ids), len(row.action_mask), len(row.logprobs), len(row.turn_ids)}
        assert lengths == {len(row.token_ids)}
        assert row.action_mask == [turn >= 0 for turn in row.turn_ids]
        assert len(row.prompt_ids) + len(row.token_ids) <= room
    # Every completion stands in exactly one row, as it was sampled, behind the very prompt that it continued.
    for turn, (prompt, completion) in enumerate(zip(prompts, completions)):
        (row,) = [row for row in rows if turn in row.turn_ids]
        start = row.turn_ids.index(turn)
        assert row.token_ids[start : start + len(completion.token_ids)] == completion.token_ids
        assert row.logprobs[start : start + len(completion.token_ids)] == completion.logprobs
        assert row.turn_ids.count(turn) == len(completion.token_ids)
        assert row.prompt_ids + row.token_ids[:start] == prompt
    assert rows[0].episode_return == sum(seed % 10 + turn + 1 for turn in range(len(completions)))
