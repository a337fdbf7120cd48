"""Where a completion ends: the same tokens and the same text on every path, whatever tokens a model ends with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.compat.experiences import ActionResult, action_result
from agilerl.compat.gyms import ReasoningGym
from agilerl.compat.tokenized import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.data import Completion
from agilerl.envs.core import Place, Row, Split, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.prompts import completion_length, end_token_ids, render_prompt
from agilerl.errors import EnvError
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.collect import collect_answers
from agilerl.rollouts.engine import Ask
from agilerl.rollouts.episodes import collect_episodes
from agilerl.runtime import Runtime
from tests.envs.conftest import make_tokenizer
from tests.envs.scripted import Echo

SAMPLING = SamplingSettings(max_new_tokens=8)


def tokenizer_of(kind: str, folder: Path) -> Any:
    """Return a tokenizer as models come with: its own pad token, pad == eos, or several end tokens, pad among them."""
    tokenizer = make_tokenizer()
    if kind == "pad is eos":
        tokenizer.pad_token = tokenizer.eos_token
    if kind == "several ends":
        tokenizer.save_pretrained(folder)
        ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        tokenizer = type(tokenizer).from_pretrained(folder)
    return tokenizer


@dataclass(frozen=True)
class Case:
    """One completion ``x`` beside a longer one of the same group, written as text with E and P for end and pad."""

    kind: str
    said: str
    text: str
    ends_itself: bool

    def ids(self, tokenizer: Any) -> list[int]:
        special = {"E": tokenizer.eos_token_id, "P": tokenizer.pad_token_id}
        return [special[c] if c in special else tokenizer.convert_tokens_to_ids(c) for c in self.said]


CASES = [
    Case("one end", "abE", "ab", True),
    Case("one end", "ab", "ab", False),
    Case("one end", "aPb", "ab", False),  # a pad token that was sampled
    Case("one end", "aPbE", "ab", True),
    Case("one end", "abP", "ab", False),
    Case("pad is eos", "abE", "ab", True),
    Case("pad is eos", "ab", "ab", False),
    Case("several ends", "abE", "ab", True),
    Case("several ends", "abP", "ab", True),
    Case("several ends", "P", "", True),
    Case("several ends", "ab", "ab", False),
]


@pytest.fixture(params=CASES, ids=lambda c: f"{c.kind}-{c.said}")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def tokenizer(case: Case, tmp_path: Path) -> Any:
    return tokenizer_of(case.kind, tmp_path)


class Scripted:
    """An engine that says the case, and beside it something longer, so that tensors are padded."""

    exact = True

    def __init__(self, said: Sequence[int], ended: bool, other: Sequence[int]) -> None:
        self.said, self.ended, self.other = list(said), ended, list(other)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        first = Completion(self.said, [-0.5 - k for k in range(len(self.said))], "stop" if self.ended else "length")
        second = Completion(self.other, [-1.0] * len(self.other), "length")
        return [[first, *[second] * (r.samples - 1)] for r in requests]


class Listening(Task):
    """Notes the texts that it grades."""

    name, exam_prompts = "listening", 1

    def __init__(self) -> None:
        self.heard: list[str] = []

    def row(self, split: Split, index: int) -> Row:
        return {"question": f"q{index}", "answer": ""}

    def reward(self, completion: str, row: Any) -> float:
        self.heard.append(completion)
        return float(len(completion))


def engine_of(case: Case, tokenizer: Any) -> Scripted:
    return Scripted(case.ids(tokenizer), case.ends_itself, tokenizer("abcdefg", add_special_tokens=False)["input_ids"])


def acted(case: Case, tokenizer: Any, prompt: dict[str, Any]) -> ActionResult:
    """Return what ``get_action`` does for one prompt and a group of two, the second one longer."""
    ids = prompt["input_ids"][0].tolist()
    engine = engine_of(case, tokenizer)
    request = GenerationRequest(0, ids, 2, SAMPLING)
    return action_result([ids], engine.generate([request]), tokenizer.pad_token_id)


def test_all_paths_read_the_same_text(case: Case, tokenizer: Any) -> None:
    task, engine = Listening(), engine_of(case, tokenizer)
    ask = Ask(0, Place(task.row("train", 0), [1, 2]), 2, lambda length: SAMPLING, 100, 0)
    ((first, _),), _ = collect_answers(engine, task, tokenizer, [ask])
    assert (first.text, first.token_ids, task.heard[0]) == (case.text, case.ids(tokenizer), case.text)

    gym = ReasoningGym.from_task(Listening(), tokenizer, 1)
    (prompt,) = gym.reset()
    gym.step(acted(case, tokenizer, prompt).completion_ids)
    assert gym.task.heard[0] == case.text

    episodes = EpisodeTask(lambda: Echo(length=1), max_turns=1)
    ask = Ask(0, Place({"seed": 3}), 1, lambda length: SAMPLING, 100, 0)
    ((row,),), _ = collect_episodes(engine, episodes, tokenizer, [ask])
    assert row.text.startswith(f"> {case.text}\n")
    assert row.token_ids == case.ids(tokenizer)
    assert row.action_mask == [True] * len(row.token_ids)


Told = Callable[[TokenObservationWrapper, ActionResult], Any]
TOLD: dict[str, Told] = {
    "log-probs": lambda env, a: env.step(a.completion_ids[0][:1], a.sampling_logps[0]),
    "mask": lambda env, a: env.step(a.completion_ids[0][:1], action_mask=a.action_masks[0][:1]),
    "both": lambda env, a: env.step(a.completion_ids[0][:1], a.sampling_logps[0], a.action_masks[0][:1]),
}


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
def test_a_padded_completion_is_as_long_as_it_was(case: Case, tokenizer: Any, told: Told) -> None:
    env = TokenObservationWrapper(inner := Echo(length=2), tokenizer, 5)
    prompt, _ = env.reset(0)
    told(env, acted(case, tokenizer, prompt))
    (row,) = env.trajectories()
    said = case.ids(tokenizer)
    assert row.token_ids[: len(said)] == said
    assert row.turn_ids.count(0) == len(said)
    assert inner.heard == [(case.text, said)]
    assert row.finish_reason == ("stop" if case.ends_itself else "length")
    # The template ends the message of the assistant with the end token, which is not written twice.
    assert (row.token_ids[len(said)] == tokenizer.eos_token_id) is not case.ends_itself


def test_the_documented_loop(case: Case, tokenizer: Any) -> None:
    """One row a prompt, as ``repeat_prompts=False`` gives, is never padded: nothing has to be told."""
    for told in (True, False):
        vec = SyncMultiTurnVecEnv(lambda: TokenObservationWrapper(Echo(length=2), tokenizer, 5), 2, 1)
        prompts: Any = vec.reset(seed=0)
        engine = engine_of(case, tokenizer)
        while prompts:
            ids = [p["input_ids"][0].tolist() for p in prompts]
            groups = engine.generate([GenerationRequest(0, own, 1, SAMPLING) for own in ids])
            action = action_result(ids, groups, tokenizer.pad_token_id)
            prompts = vec.step(action.completion_ids, action.sampling_logps if told else None)
        rows = [row for env in vec.envs for row in env.trajectories()]
        sampled = [[t for t, action in zip(row.token_ids, row.action_mask) if action] for row in rows]
        if told or case.said != "abP" or case.kind != "one end":  # a pad token at the end, sampled: nothing tells
            assert sampled == [case.ids(tokenizer) * 2] * 2
        _, masks, _, _, _, logps = vec.get_trajectories()
        assert (logps is not None) is told
        assert logps is None or [len(own) for own in logps if own is not None] == [int(m.sum()) for m in masks]


def test_a_completion_that_may_be_padding_is_told_once(tmp_path: Path) -> None:
    from agilerl.compat.tokenized import _warn_of_padding

    _warn_of_padding.cache_clear()
    tokenizer = tokenizer_of("pad is eos", tmp_path)
    env = TokenObservationWrapper(Echo(length=2), tokenizer, 5)
    prompt, _ = env.reset(0)
    with pytest.warns(UserWarning, match="sampling_logps"):
        env.step(acted(Case("pad is eos", "ab", "ab", False), tokenizer, prompt).completion_ids[0][:1])


def test_end_tokens_are_the_models(tmp_path: Path) -> None:
    plain = tokenizer_of("one end", tmp_path)
    assert end_token_ids(plain) == {plain.eos_token_id}
    several = tokenizer_of("several ends", tmp_path)
    assert end_token_ids(several) == {several.eos_token_id, several.pad_token_id}
    for number, text in enumerate(("[1, 2", "[]", '{"eos_token_id": null}', '{"eos_token_id": 7}', "[" * 100_000)):
        folder = tmp_path / str(number)
        plain.save_pretrained(folder)
        (folder / "generation_config.json").write_text(text)
        found = end_token_ids(type(plain).from_pretrained(folder))
        assert found == {plain.eos_token_id} | ({7} if "7" in text else set())


@pytest.mark.parametrize(
    ("ids", "known", "found"),
    [
        ([5, 6, 1, 0], None, 3),
        ([5, 0, 6, 0, 0], None, 3),
        ([0, 0], None, 0),
        ([5, 0, 0], 2, 2),
        ([5, 1, 6, 0], 3, 3),  # an end token that did not end it
        ([], None, 0),
    ],
)
def test_length(ids: list[int], known: int | None, found: int) -> None:
    assert completion_length(ids, ends={1}, pad=0, sampled=known) == found


@pytest.mark.parametrize(("ids", "known"), [([5, 6], 3), ([5, 6, 7], 2)])
def test_a_length_that_does_not_fit(ids: list[int], known: int) -> None:
    with pytest.raises(EnvError):
        completion_length(ids, ends={1}, pad=0, sampled=known)


@pytest.mark.parametrize(
    ("logps", "mask"),
    [
        (torch.zeros(2), None),
        (torch.zeros(9), None),
        (torch.zeros(3), [[1] * 4]),
        (None, [[0] * 9 + [1, 0, 1]]),
        (None, [[1] * 12]),
        (torch.zeros(2), [[0] * 8 + [1] * 3]),
    ],
)
def test_logprobs_and_masks_that_do_not_fit(logps: Any, mask: Any) -> None:
    tokenizer = make_tokenizer()
    env = TokenObservationWrapper(Echo(), tokenizer, 5)
    prompt, _ = env.reset(0)
    tail = torch.tensor([tokenizer("abc", add_special_tokens=False)["input_ids"]])
    assert prompt["input_ids"].shape[1] == 9
    with pytest.raises(EnvError):
        env.step(torch.cat([prompt["input_ids"], tail], 1), logps, None if mask is None else torch.tensor(mask))


def test_a_row_of_some_known_logprobs_has_none() -> None:
    tokenizer = make_tokenizer()
    env = TokenObservationWrapper(Echo(length=2), tokenizer, 5)
    prompt, _ = env.reset(0)
    ids = torch.tensor([[*tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
    prompt = env.step(torch.cat([prompt["input_ids"], ids], 1), torch.tensor([-1.0, -2.0]))[0]
    assert env.trajectories()[0].logprobs is not None
    env.step(torch.cat([prompt["input_ids"], ids], 1))
    assert env.trajectories()[0].logprobs is None


def test_a_completion_ends_at_the_tokenizers_end_where_the_model_does_not_name_it() -> None:
    asked = [{"role": "user", "content": "Spell this word backward (example: sun -> nus): moon"}]
    found = []
    for ends in (4, 0, [5, 6]):
        loaded = Runtime.from_pretrained("embedded")
        loaded.base.model.generation_config.eos_token_id = ends
        runtime = Runtime(loaded.base, tokenizer=loaded.tokenizer)
        assert runtime.base.eos_token_ids.count(4) == 1
        ids = render_prompt(runtime.tokenizer, asked)
        ((said,),) = runtime.engine.generate([GenerationRequest(None, ids, 1, SamplingSettings(30, temperature=0.0))])
        assert said.token_ids[-1] == runtime.tokenizer.eos_token_id == 4
        found.append((said.token_ids, said.finish_reason))
    assert found == [(found[0][0], "stop")] * 3
