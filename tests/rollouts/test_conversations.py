"""What the engine keeps of a conversation: only new tokens are computed, with the completions of a new start."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from agilerl.rollouts import GenerationRequest, SamplingSettings, torch_engine
from agilerl.rollouts.engine import Conversation
from agilerl.runtime import Runtime
from agilerl.sizes import CPU_ROWS
from tests.rollouts.test_torch_engine import make_runtime, prompt
from tests.tiny_models import llama, qwen2

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return make_runtime()


def turn(number: int, texts: list[list[int]], conversations: list[Conversation | None]) -> list[GenerationRequest]:
    """Return the requests of a turn: of two agents and the base, with completions of several lengths."""
    return [
        GenerationRequest(
            (0, 2, None)[i % 3], text, 1, SamplingSettings(max_new_tokens=4 + 3 * (i % 2)), key=(i, number),
            conversation=conversation,
        )
        for i, (text, conversation) in enumerate(zip(texts, conversations))
    ]  # fmt: skip


def play(runtime: Runtime, *, keep: bool = True, members: Sequence[int] = range(6)) -> list[list[float]]:
    """Play three turns of some of six conversations; returns the log-probs of all that was said."""
    texts = [prompt(i, 6 + 5 * i) for i in range(6)]
    conversations = [Conversation() if keep else None for _ in range(6)]
    said: list[list[float]] = [[] for _ in range(6)]
    for number in range(3):
        asked = turn(number, texts, conversations)
        found = runtime.engine.generate([asked[i] for i in members])
        for i, (completion,) in zip(members, found):
            assert completion.logprobs is not None
            said[i] += completion.logprobs
            texts[i] = [*texts[i], *completion.token_ids, *prompt(100 * number + i, 3)]
    return said


@pytest.mark.parametrize("config", [qwen2(), llama()], ids=["qwen2", "llama"])
def test_completions_are_those_of_a_new_start(config: object) -> None:
    runtime = make_runtime(config)
    kept, fresh = play(runtime), play(runtime, keep=False)
    for ours, theirs in zip(kept, fresh):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("members", [(0, 3), (1, 4), (0, 2, 3, 5)])
def test_the_bits_of_an_agent_are_its_own(runtime: Runtime, members: Sequence[int]) -> None:
    together, apart = play(runtime), play(runtime, members=members)
    for i in members:
        assert apart[i] == together[i]


def test_agents_that_take_turns_change_nothing(runtime: Runtime) -> None:
    expected, before = play(runtime), runtime.engine.max_rows
    try:
        runtime.engine.max_rows = 2
        assert play(runtime) == expected
    finally:
        runtime.engine.max_rows = before


def computed(runtime: Runtime, texts: list[list[int]], conversations: list[Conversation | None]) -> list[int]:
    """Return the tokens of each pass over several prompts, and of the steps after it."""
    seen = []
    hook = runtime.base.body.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    runtime.engine.generate(turn(0, texts, conversations))
    hook.remove()
    return seen


def test_only_what_is_new_is_computed(runtime: Runtime) -> None:
    """So the tokens that an episode costs grow as its length does, not as its length times its turns."""
    conversation, text, tokens = Conversation(), prompt(0, 40), []
    for number in range(5):
        request = turn(number, [text], [conversation])
        tokens.append(computed(runtime, [text], [conversation])[0])
        text = [*conversation.token_ids, *prompt(number + 50, 12)]
        assert request[0].prompt_ids != text
    assert tokens[0] == -(-40 // CPU_ROWS) * CPU_ROWS
    assert tokens[1:] == [CPU_ROWS] * 4
    assert len(text) > 40 + 4 * 12


def test_what_prompts_have_in_common_is_computed_once(runtime: Runtime) -> None:
    common, questions = prompt(0, 40), [prompt(number, 12) for number in range(1, 7)]
    texts = [[*common, *question] for question in questions]
    # The first pass is that of two agents with two questions each.
    assert computed(runtime, texts, [None] * 6)[0] == 2 * (40 + 2 * 12)
    assert computed(runtime, questions, [None] * 6)[0] == 2 * 2 * CPU_ROWS
    (alone,), (together, *_) = (runtime.engine.generate(turn(0, asked, [None] * 6)) for asked in (texts[:1], texts))
    assert together[0].token_ids == alone[0].token_ids
    assert together[0].logprobs == pytest.approx(alone[0].logprobs, abs=1e-4)


def test_a_history_that_was_rewritten_is_computed_from_there(runtime: Runtime) -> None:
    conversation, text = Conversation(), prompt(0, 40)
    runtime.engine.generate(turn(0, [text], [conversation]))
    changed = [*text[:20], 63 - text[20], *text[21:]]
    assert computed(runtime, [changed], [replace(conversation)])[0] == -(-20 // CPU_ROWS) * CPU_ROWS
    shorter = text[:30]
    assert computed(runtime, [shorter], [replace(conversation)])[0] == CPU_ROWS  # the last token, to go on from it
    fresh = runtime.engine.generate(turn(0, [changed], [None]))[0][0]
    again = runtime.engine.generate(turn(0, [changed], [conversation]))[0][0]
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
    assert conversation.token_ids == [*changed, *again.token_ids[:-1]]


def test_nothing_is_kept_of_a_batch_that_fails(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed again, first without what was kept before."""
    expected, step, steps = play(runtime), torch_engine._Decoder._step, []

    def short_of_memory(decoder: Any, *arguments: Any) -> torch.Tensor:
        steps.append(len(decoder.in_flight))
        if len(steps) == 7:  # in the second turn
            raise MemoryError
        return step(decoder, *arguments)

    monkeypatch.setattr(torch_engine._Decoder, "_step", short_of_memory)
    found = play(runtime)
    assert steps[6] == 6
    assert runtime.limits.decode_rows is None  # what was kept of the turn before made room enough
    for ours, theirs in zip(found, expected):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_what_was_kept_is_given_up_before_a_row_is(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, join = play(runtime), torch_engine._kept

    def short_of_memory(*arguments: Any) -> Any:
        found = join(*arguments)
        if found is not None:
            raise MemoryError
        return found

    monkeypatch.setattr(torch_engine, "_kept", short_of_memory)
    for ours, theirs in zip(play(runtime), expected):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert runtime.limits.decode_rows is None


def test_another_agent_does_not_read_what_was_kept(runtime: Runtime) -> None:
    conversation, text = Conversation(), prompt(0, 12)
    runtime.engine.generate(turn(0, [text], [conversation]))
    settings = SamplingSettings(max_new_tokens=4)
    asked = [GenerationRequest(2, text, 1, settings, key=(7,), conversation=c) for c in (conversation, None)]
    found = [runtime.engine.generate([one])[0][0].logprobs for one in asked]
    assert found[0] == found[1]


def test_a_base_that_pads_its_rows_keeps_nothing() -> None:
    runtime = make_runtime()
    runtime.base.flattens = False
    conversation = Conversation()
    runtime.engine.generate(turn(0, [prompt(0, 9)], [conversation]))
    assert conversation == Conversation()
