"""Text in, text out: answers of an agent or of the base, and conversations as tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.checks.arguments import Count, NotNegative, Whole, checked
from agilerl.data import Trajectory
from agilerl.envs.examples import render_completion, render_conversation, trajectories
from agilerl.envs.prompts import as_messages, decode_completions, render_prompt
from agilerl.errors import ConfigError
from agilerl.rollouts.engine import GenerationRequest, SamplingSettings
from agilerl.runtime import Runtime


@checked
def generate(
    runtime: Runtime,
    prompts: str | Sequence[Any],
    *,
    max_new_tokens: Count | None = None,
    temperature: NotNegative = 0.0,
    seed: Whole = 0,
) -> str | list[str]:
    """Return the base's answer to a text or conversation, without adapters; arguments as of ``agent.generate``."""
    most = runtime.base.context_length
    return answers(runtime, None, prompts, most, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


def answers(
    runtime: Runtime,
    slot: int | None,
    prompts: str | Sequence[Any],
    context_length: int,
    *,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
) -> str | list[str]:
    """Return the answer of a slot (None: the base) to a text or conversation, or its answers to a list of them."""
    conversational = not isinstance(prompts, str) and bool(prompts) and isinstance(prompts[0], Mapping)
    several = not isinstance(prompts, str) and not conversational
    tokenizer = _reads_text(runtime, "generate")
    asked = [as_messages(one) for one in (prompts if several else [prompts])]
    # Room for at least one token of an answer.
    ids = [render_prompt(tokenizer, messages, context_length - 1) for messages in asked]
    limits = [min(max_new_tokens or context_length, context_length - len(prompt)) for prompt in ids]
    settings = [SamplingSettings(limit, temperature=temperature) for limit in limits]
    requests = [
        # Numbered over all processes: an answer does not depend on which of them gives it.
        GenerationRequest(slot, prompt, 1, sampling, purpose="generate", key=(seed, number))
        for number, (prompt, sampling) in enumerate(zip(ids, settings), runtime.processes.first_number(len(ids)))
    ]
    completions = [completion for (completion,) in runtime.complete(requests)]
    texts: list[str] = decode_completions(tokenizer, [completion.token_ids for completion in completions])
    return texts if several else texts[0]


@checked
def tokenize(runtime: Runtime, conversation: str | Sequence[Any]) -> Trajectory:
    """Return a text or conversation as tokens, rendered as for training; it has no reward and no log-probs.

    If its last message is the assistant's, the mask has the tokens of all the assistant's messages, which
    ``agent.logprobs`` and ``agent.accumulate`` see once ``collate([...], pad_token_id)`` has made a batch; else it
    is only a prompt.

    Raises ConfigError without a tokenizer, for a conversation of another form, and for several answers with a chat
    template that rewrites earlier ones; EnvError for an empty prompt, or none.
    """
    tokenizer, messages = _reads_text(runtime, "tokenize"), as_messages(conversation)
    *before, last = (message["role"] == "assistant" for message in messages)
    if not last:
        return Trajectory(render_prompt(tokenizer, messages), [], [], None, [float("nan")])
    if any(before) or not before:
        example = render_conversation(tokenizer, messages)
    else:
        example = render_completion(tokenizer, messages[:-1], messages[-1]["content"])
    return trajectories([example], 0, {})[0]


def _reads_text(runtime: Runtime, what: str) -> Any:
    if runtime.tokenizer is None:
        raise ConfigError(
            f"{what} reads and writes text, and this base has no tokenizer; load the base by its name, or use "
            "token ids: agent.get_action"
        )
    return runtime.tokenizer
