"""What a base, its tokenizer and its chat template keep of what training relies on, a line for each claim."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agilerl.envs.prompts import render_prompt
from agilerl.errors import AgileRLError
from agilerl.runtime import Runtime
from agilerl.text.contract import contract_of


@dataclass(frozen=True)
class Line:
    """What was found of one claim."""

    name: str
    text: str
    """What holds, or what does not."""
    holds: bool = True


def named_tokens(runtime: Runtime, ids: Sequence[int]) -> str:
    """Return tokens with their ids, as people read them; "nothing" for none."""
    names = zip(ids, runtime.tokenizer.convert_ids_to_tokens(list(ids)))
    return " ".join(f"{name or 'unknown to the tokenizer'} ({number})" for number, name in names) or "nothing"


def _begin(runtime: Runtime) -> str:
    contract = contract_of(runtime.tokenizer)
    ids = render_prompt(runtime.tokenizer, [{"role": "user", "content": "2 + 2 ="}])
    alone = named_tokens(runtime, contract.begins)
    return f"prompts begin with {named_tokens(runtime, ids[:1])}; a text without a template with {alone}"


def _end(runtime: Runtime) -> str:
    ends = " or ".join(named_tokens(runtime, (end,)) for end in contract_of(runtime.tokenizer).ends)
    return f"answers end with {ends}"


CHECKS: tuple[tuple[str, Callable[[Runtime], str]], ...] = (("begin", _begin), ("end", _end))
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
