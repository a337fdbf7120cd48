"""What a base, its tokenizer and its chat template keep of what training relies on, a line for each claim."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from agilerl.envs.examples import render_completion
from agilerl.envs.prompts import ChatFormat
from agilerl.envs.tools.parsers import parser_for
from agilerl.errors import AgileRLError, ConfigError, EngineError, EnvError
from agilerl.models.layers import using_attention
from agilerl.models.reach import EVERYTHING
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.torch_engine import logprob_tolerance
from agilerl.runtime import Runtime
from agilerl.sizes import stated
from agilerl.text.contract import contract_of, readings

QUESTION, THOUGHT = [{"role": "user", "content": "2 + 2 ="}], "<think>\nTwo and two.\n</think>\n\n4"

_REFUSED = (
    "episodes of several turns are refused, unless strict_chat_template_boundary=False renders each turn again, and so "
    "is loss_on: assistant where an answer would change; single answers are learned"
)


@dataclass(frozen=True)
class Line:
    """What was found of one claim."""

    name: str
    text: str
    """What holds, or what does not."""
    holds: bool = True


def _whole(runtime: Runtime) -> str:
    tokenizer = runtime.tokenizer
    short = render_completion(tokenizer, QUESTION, "4")
    at = short.learned.index(True)
    row = " + ".join(f"{tokenizer.decode(ids)!r} {ids}" for ids in (short.ids[:at], short.ids[at:]))
    try:
        long = render_completion(tokenizer, QUESTION, THOUGHT)
        reasoned = f"learned as {tokenizer.decode(long.ids[long.learned.index(True) :])!r}"
    except EnvError as error:  # reasoning is switched off
        reasoned = f"refused: {error}"
    return f"a row is {row}, of which the answer is learned; one with reasoning is {reasoned}"


def _joint(runtime: Runtime) -> str:
    if contract_of(runtime.tokenizer).joins:
        return "texts tokenised one by one are the tokens of the whole"
    return "the tokenizer changes a text that it gets alone, so each is read behind what precedes it"


def _turns(runtime: Runtime) -> str:
    if not ChatFormat(runtime.tokenizer).rewrites_history:
        return "a conversation only grows, with a system text and without one"
    if not ChatFormat(runtime.tokenizer, system=False).rewrites_history:
        return f"a conversation only grows without a system text; with one, which the template moves, {_REFUSED}"
    return f"the template changes or does not end earlier turns: {_REFUSED}"


def _graders(runtime: Runtime) -> str:
    opening = contract_of(runtime.tokenizer).left_open
    read = f"each answer from {opening!r} on, which the prompt has written" if opening else "what the model writes"
    return f"graders read {read}; reward models and judges the whole conversation"


def _calls(runtime: Runtime) -> str:
    try:
        return f"calls of tools are read in the form {parser_for(runtime.tokenizer).family!r}"
    except ConfigError:
        return "the tokenizer has no tokens for calls of tools; parser: text finds them in what the model writes"


def _forward(runtime: Runtime) -> str:
    base, settings = runtime.base, SamplingSettings(8, temperature=0.0, min_new_tokens=8)
    prompt = [(1 + i) % base.vocabulary_size for i in range(min(12, base.context_length - settings.max_new_tokens))]
    config = base.model.config.get_text_config()
    with torch.no_grad(), base.narrowed():
        ((sampled,),) = runtime.engine.generate([GenerationRequest(None, prompt, 1, settings)])
        ids = torch.tensor([[*prompt, *sampled.token_ids]], device=base.device)
        with using_attention(config, "eager"):
            logits = base.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
    apart = float((expected - torch.tensor(sampled.logprobs)).abs().max())
    if not apart < logprob_tolerance(base.dtype):  # not >=, which is False for NaN
        raise EngineError(f"log-probs of sampling are {apart:.2g} nats from those of transformers with eager attention")
    rows = "in one line, what they have in common once" if base.flattens else "padded to one length"
    return f"log-probs of sampling and of transformers with eager attention are within {apart:.0e}; rows are {rows}"


def _adapter(runtime: Runtime) -> str:
    layers = runtime.store.layers
    by_weight = sum(layer.by_weight for layer in layers)
    parameters = f", {by_weight} of them as parameters (target_parameters)" if by_weight else ""
    return f"{len(layers)} layers carry adapters, which PEFT loads by their names{parameters}"


def _shape(runtime: Runtime) -> str:
    base = runtime.base
    longest = stated(base.model.config.get_text_config(), "max_position_embeddings") or base.context_length
    less = f" of {longest:,}, because longer ones would be computed otherwise" if base.context_length < longest else ""
    reaches = base.reaches if isinstance(base.reaches, dict) else {"": base.reaches}
    limits = [
        f"{kind or 'all'} layers see "
        + (f"the last {reach.window:,} tokens" if reach.window else f"chunks of {reach.chunk:,} tokens")
        for kind, reach in reaches.items()
        if reach != EVERYTHING
    ]
    seen = "; ".join(limits) or "each layer sees the whole row"
    return f"{base.num_layers} layers; rows of up to {base.context_length:,} tokens{less}; {seen}"


CHECKS: tuple[tuple[str, Callable[[Runtime], str]], ...] = (
    ("begin", lambda runtime: readings(runtime.tokenizer)[0]),
    ("end", lambda runtime: readings(runtime.tokenizer)[1]),
    ("whole", _whole),
    ("joint", _joint),
    ("turns", _turns),
    ("forward", _forward),
    ("adapter", _adapter),
    ("shape", _shape),
    ("graders", _graders),
    ("calls", _calls),
)
"""A claim each: what it returns holds; an error says what does not."""


def lines_of(runtime: Runtime) -> list[Line]:
    """Return a line for each claim; one that does not hold has the sentence of the error."""
    lines = []
    for name, check in CHECKS:
        try:
            lines.append(Line(name, check(runtime)))
        except AgileRLError as error:
            lines.append(Line(name, str(error), holds=False))
    return lines
