"""Messages to token ids and back: chat templates for tasks and environments, and where a completion ends."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

from jinja2 import TemplateError

from agilerl.checks.arguments import Tokenizer, Whole, checked, described
from agilerl.errors import ConfigError, EnvError
from agilerl.text.contract import CLOSED, MARK, contract_of, plain_ids, template_ids, text_ids
from agilerl.text.padding import decoded, has_template
from agilerl.text.templates import TemplateBrokenError, apply_chat_template

ItemT = TypeVar("ItemT")


class PromptTooLongError(EnvError):
    """A prompt or an example has too many tokens."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a ConfigError unless the tokenizer can pad a sequence, and something ends one."""
    for what in ("pad", "eos"):
        if getattr(tokenizer, f"{what}_token_id", None) is None and (
            what == "pad" or contract_of(tokenizer).end is None
        ):
            cure = "tokenizer.pad_token = tokenizer.eos_token" if what == "pad" else 'tokenizer.eos_token = "..."'
            raise ConfigError(
                f"expected a tokenizer with a {what} token, found none in {type(tokenizer).__name__} "
                f"{getattr(tokenizer, 'name_or_path', '')!r}; set one, e.g. {cure}"
            )


@checked
def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: Whole | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    use_template: bool = True,
) -> list[int]:
    """Return the token ids of a conversation up to where the model continues it.

    The chat template is applied with its generation prompt. A final assistant message is a prefill: the prompt ends
    with its text, and the model continues it. Without a chat template, the contents are joined by newlines, behind the
    special tokens that the tokenizer puts before a text.

    Args:
        tokenizer: a Hugging Face tokenizer.
        messages: ``{"role", "content"}`` each, at least one.
        max_tokens: most tokens that the prompt may have.
        tools: JSON schemas of functions, which the template describes to the model.
        use_template: if False, ignore the tokenizer's chat template.

    Raises:
        ConfigError: no pad token, a malformed message, or a template that refuses the messages (for instance a system
            message).
        EnvError: the prompt is empty or has more than ``max_tokens`` tokens.
    """
    check_tokenizer(tokenizer)
    conversation = as_messages(messages) if messages else []
    if conversation and conversation[-1]["role"] == "assistant" and not conversation[-1]["content"]:
        conversation.pop()  # an empty prefill equals the generation prompt
    if not conversation:
        raise EnvError("expected at least one message with content in a prompt, found none")
    if use_template and has_template(tokenizer):
        if any(message["role"] == "system" for message in conversation) and contract_of(tokenizer).drops_system:
            raise ConfigError(
                "the tokenizer's chat template drops system messages, so the model would never see this one; move its "
                "text into the user message"
            )
        ids = template_ids(tokenizer, prompt_text(tokenizer, conversation, tools))
    else:
        ids = plain_ids(tokenizer, "\n".join(message["content"] for message in conversation))
    if not ids:
        raise EnvError(f"expected a prompt of at least one token, found none in {conversation!r}")
    if max_tokens is not None and len(ids) > max_tokens:
        raise PromptTooLongError(
            f"expected a prompt of at most {max_tokens} tokens, found {len(ids)}; raise max_model_len (of a "
            f"gym, max_context_length), or remove such prompts: {conversation[-1]['content'][:80]!r}"
        )
    return ids


def end_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a completion: those of the model, of its tokenizer and of its chat template.

    A model may have several (Qwen2.5-Instruct ends with ``<|im_end|>`` or ``<|endoftext|>``, its pad token); they are
    listed in the configurations next to the tokenizer's files.
    """
    return frozenset(contract_of(tokenizer).ends)


def completion_length(ids: Sequence[int], *, ends: Collection[int], pad: int | None, sampled: int | None = None) -> int:
    """Return how many of the ids after a prompt are its completion, end token included.

    ``sampled``, the number of tokens marked by an action mask or with log-probs, decides, because ids alone cannot
    distinguish a sampled pad token from padding. Without it, a completion ends at its first token of ``ends``, or else
    before the trailing padding; a pad token followed by other tokens was sampled. Raises EnvError for fewer ids than
    ``sampled``, or something other than padding after them.
    """
    if sampled is not None:
        behind = set(ids[sampled:])
        if sampled > len(ids) or not behind <= {pad, *ends}:
            raise EnvError(
                f"expected {sampled} sampled tokens (as many as log-probs or marked places in the action mask) and "
                f"then padding, found {len(ids)} tokens after the prompt"
            )
        return sampled
    first = next((length for length, token in enumerate(ids, 1) if token in ends), None)
    return first or next((length for length in range(len(ids), 0, -1) if ids[length - 1] != pad), 0)


@checked
def decode_completions(tokenizer: Tokenizer, completions: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of generated ids, each up to its first end token or its padding, without special tokens.

    Every grader and environment reads completions as this function decodes them. A pad token sampled within a
    completion is omitted from its text, as special tokens are, and does not end it.
    """
    ends = end_token_ids(tokenizer)
    texts = []
    for ids in completions:
        length = completion_length(ids, ends=ends, pad=tokenizer.pad_token_id)
        # An end token need not be a special one, and would then show in the text.
        answer = list(ids[: length - 1] if length and ids[length - 1] in ends else ids[:length])
        try:
            texts.append(decoded(tokenizer, answer, skip_special_tokens=True))
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"decode_completions: expected whole token ids, found {described(answer)}") from error
    return texts


def render_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    prompts: bool = True,
) -> str:
    """Return a conversation as the chat template writes it, up to where the model continues it.

    ``prompts=False`` omits the start of the model's message. Raises ConfigError for a malformed message, or a template
    that refuses the messages.
    """
    conversation = as_messages(messages)
    try:
        return apply_chat_template(tokenizer, conversation, tools=tools, prompts=prompts)
    except TemplateBrokenError as error:
        raise ConfigError(
            f"the tokenizer's chat template cannot be used: {error}; get it from its original source"
        ) from error
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        roles = [message["role"] for message in conversation]
        cure = "move its text into the user message" if "system" in roles else "check the roles and their order"
        raise ConfigError(
            f"the tokenizer's chat template does not accept a conversation of {', '.join(roles)}: {error}; {cure}"
        ) from error


def generation_prompt(tokenizer: Any) -> list[int]:
    """Return the tokens with which every prompt ends: what the chat template puts between a question and its answer."""
    first, second = (render_prompt(tokenizer, [{"role": "user", "content": text}])[::-1] for text in "12")
    # What two prompts that differ in nothing but their question end with alike.
    ending = _alike(first, second)[::-1]
    # Line breaks at the end may merge with those of a prefill into another token.
    while len(ending) > 1 and not tokenizer.decode(ending[-1:]).strip():
        ending.pop()
    if not ending:
        raise ConfigError(
            "network.lora_config.alora_invocation_tokens=generation_prompt: the chat template puts nothing between a "
            "question and its answer; name tokens, or a text, that every prompt has"
        )
    return ending


def _alike(first: Sequence[ItemT], second: Sequence[ItemT]) -> list[ItemT]:
    """Return what two sequences begin with alike."""
    return [item for item, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second))]


def check_opened(tokenizer: Any, *answers: str | None, where: str) -> None:
    """Raise EnvError, with the place of a row, as :func:`behind_opened` does for one of its answers."""
    try:
        for answer in answers:
            behind_opened(tokenizer, answer or "")
    except EnvError as error:
        raise EnvError(f"{where}: {error}") from None


def prompt_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a conversation as the chat template writes it, up to where the model continues it.

    A last message of the assistant is a prefill. It stands unchanged, whatever the template would make of it, and what
    the generation prompt has opened is not opened again.
    """
    *before, last = messages
    if last["role"] != "assistant":
        return render_text(tokenizer, messages, tools=tools)
    prefill = str(last["content"])

    def written(answer: str) -> str:
        return render_text(tokenizer, [*before, {**last, "content": answer}], tools=tools, prompts=False)

    prompt, new = render_text(tokenizer, before, tools=tools) if before else "", behind_opened(tokenizer, prefill)
    # The mark keeps blanks at the end of the prefill, which some templates would trim.
    whole, mark, _ = written(prefill + MARK).rpartition(MARK)
    shown = next((text for text in (prefill, prefill.lstrip()) if mark and whole.endswith(text)), None)
    if shown is not None:
        lead = whole[: len(whole) - len(shown)]
        # What the template itself begins an answer with, such as thinking that is over.
        words = lead.removeprefix(prompt).split()[:1]
        changes = bool(words and prefill.split()[:1] == words)
    else:
        # What it writes before two answers that it may change as well; thinking that it closes is left to the prefill.
        answers = written("a"), written("b")
        lead = "".join(_alike(*answers))
        added = lead.removeprefix(prompt)
        thinks = bool(added.strip() and CLOSED.fullmatch(added))
        changes = answers[0] == answers[1] or not lead.startswith(prompt) or thinks
    return (prompt if changes or new != prefill else lead) + new


def behind_opened(tokenizer: Any, answer: str) -> str:
    """Return an answer without the tags at its beginning that the generation prompt has opened for it.

    Raises EnvError for an answer that opens again what the generation prompt has closed.
    """
    opened, text = contract_of(tokenizer).opened, answer.lstrip()
    words = list(re.finditer(r"\S+", opened))
    for word in words:
        tags, blank = opened[word.start() : words[-1].end()], opened[words[-1].end() :]
        if text.startswith(tags):
            return text.removeprefix(tags).removeprefix(blank)
    if words and text.startswith(words[0][0]):
        raise EnvError(
            f"expected an answer that goes on behind {opened!r}, which the chat template writes before it, found one "
            f"that begins with {words[0][0]!r} again: {answer[:80]!r}; remove that part of it, or set "
            "network.chat_template_kwargs so that the template leaves it to the answer"
        )
    return answer


# -- conversations that only grow: how a chat template continues one --------------------------------------------------


REWRITES = (
    "the tokenizer's chat template changes earlier turns (what the assistant thought, the system text, tools) when "
    "later ones follow, or does not end them, so a transcript is not append-only; allow this with "
    "strict_chat_template_boundary=False (one training row for each turn after a change), or write turns without it: "
    "apply_chat_template=False"
)
"""What is wrong with a template for which :attr:`ChatFormat.rewrites_history` is true."""
_THOUGHT = "<think>\nbecause\n</think>\n\n"
"""What some templates remove from a completion once it is history."""


class ChatFormat:
    """Renders the start of a conversation and the text between two completions, for one tokenizer.

    What the model generated is never rendered again: a conversation continues by appending the end of the assistant's
    message (unless the model wrote it itself), the environment's messages and the start of the next completion.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        apply_chat_template: bool = True,
        system: bool | None = None,
    ) -> None:
        """Probe a tokenizer's chat template; ``system``: whether conversations have a system text, None: some may.

        Raises ConfigError for no pad or end token, or a template that refuses the roles user, assistant, user, or
        leaves out the tools.
        """
        check_tokenizer(tokenizer)
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        ends = end_token_ids(tokenizer)
        # A pad token that was sampled ends nothing, unless it is one of the model's end tokens.
        self._ends = ends | (set(getattr(tokenizer, "all_special_ids", ())) - {tokenizer.pad_token_id})
        self.uses_template = apply_chat_template and has_template(tokenizer)
        self.opening = contract_of(tokenizer).left_open if self.uses_template else ""
        """What every answer begins with, because the prompt has written it."""
        user = [{"role": "user", "content": "x"}]
        if self.tools and (
            not self.uses_template or render_text(tokenizer, user, tools=self.tools) == render_text(tokenizer, user)
        ):
            raise ConfigError(
                f"the environment offers {len(self.tools)} tools, but the tokenizer's chat template does not show "
                "tools to the model; describe them in the system prompt, or use a model whose template supports tools"
            )
        self._appended: dict[tuple[str, ...], bool] = {}
        """By the roles of a conversation, whether the template only adds text to it."""
        answer, rules = {"role": "assistant", "content": "one"}, {"role": "system", "content": "rules"}
        openings = [[rules, *user]] if system is not False and self._accepts([rules, *user]) else []
        openings += [] if openings and (system or not self._accepts(user)) else [user]
        result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": MARK}
        reply = result if self.tools and self._accepts([*user, answer, result], MARK) else user[0]
        self.rewrites_history = not all(
            # As the last answer and as an earlier one, since a template may tell them apart.
            self.appends(opening, [reply]) and self.appends([*opening, answer, reply], [reply])
            for opening in openings
        )
        """Whether earlier turns change when later ones follow, e.g. because thinking is removed from them."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None) -> list[int]:
        """Return the tokens of the conversation up to the first completion; errors as of ``render_prompt``."""
        return render_prompt(self.tokenizer, messages, max_tokens, tools=self.tools, use_template=self.uses_template)

    def between(
        self, before: Sequence[Mapping[str, Any]], completion: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the tokens between a completion and the next one.

        ``before`` is the conversation before the completion; ``messages`` are the environment's new ones.
        The end token of the assistant's message is left out if the completion ends with it, or with another token that
        ends turns (Llama 3 ends a tool call with one of its own).
        """
        if not self.uses_template:
            text = "\n" + "\n".join(str(m["content"]) for m in messages) + "\n"
            return text_ids(self.tokenizer, text, MARK)
        rendered = self._rendered(before, MARK, messages)
        _, mark, text = rendered.rpartition(MARK)
        if not mark:
            raise ConfigError(
                "the tokenizer's chat template does not show what the assistant said, so turns cannot follow one "
                "another; use another template, or apply_chat_template=False"
            )
        ids = text_ids(self.tokenizer, text, rendered.removesuffix(text))
        last, size = completion[-1] if completion else None, self._ending(ids)
        # Without an end of the template's own, what stands there begins the next message.
        ends = size and last in self._ends and (ids[size - 1] == last or contract_of(self.tokenizer).closing)
        return ids[size:] if ends else ids

    def _ending(self, ids: Sequence[int]) -> int:
        """Return how many tokens behind an answer end it: one, and blanks before it; 0 if none ends it."""
        for number, token in enumerate(ids):
            if token in self._ends:
                return number + 1
            if self.tokenizer.decode([token]).strip():
                break
        return 0

    def appends(self, before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the template ends a completion when messages follow, and changes nothing before it.

        Found once for each order of roles. Where it does not, :meth:`prompt` has the tokens of the whole conversation.
        """
        roles = tuple(str(message["role"]) for message in (*before, *messages))
        if self.uses_template and roles not in self._appended:
            # With thinking and without it: some templates remove it from what is history.
            whole = [self._answered(before, answer, messages) for answer in (MARK, _THOUGHT + MARK)]
            behind = text_ids(self.tokenizer, whole[0].removeprefix(MARK), MARK)
            grows = whole[0].startswith(MARK) and whole[1].startswith(_THOUGHT + MARK)
            # Behind another token the end that a completion has would be one more than the template writes.
            contract, ending = contract_of(self.tokenizer), self._ending(behind)
            ends = (contract.end,) if contract.closing else contract.ends
            self._appended[roles] = grows and ending > 0 and behind[ending - 1] in ends
        return not self.uses_template or self._appended[roles]

    def _answered(self, before: Sequence[Mapping[str, Any]], answer: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return what follows the prompt once it is answered, without blanks before it; empty if the prompt changes."""
        prompt, whole = self._rendered(before, answer), self._rendered(before, answer, messages)
        # Models write the blank themselves that some templates put before an answer.
        return whole.removeprefix(prompt).lstrip() if whole.startswith(prompt) else ""

    def _rendered(
        self, before: Sequence[Mapping[str, Any]], answer: str, messages: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return a conversation in which ``answer`` stands for whatever the model said, and before messages follow."""
        history = [{**message, "content": answer} if message["role"] == "assistant" else message for message in before]
        new = [{"role": "assistant", "content": answer}, *messages] if messages else []
        return render_text(self.tokenizer, [*history, *new], tools=self.tools)

    def _accepts(self, messages: Sequence[Mapping[str, Any]], mark: str = "") -> bool:
        """Return whether the template takes such messages, and writes the mark that is in them."""
        try:
            return mark in self._rendered(messages, "one")
        except ConfigError:
            return False


HALF = re.compile("[\ud800-\udfff]")
"""Lone surrogates: JSON can contain them, but no tokenizer reads them."""


def as_messages(observation: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an observation as messages; plain text becomes a user message. Raises ConfigError for anything else."""
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    if (
        not isinstance(messages, Sequence)
        or not messages
        or not all(isinstance(m, Mapping) and "role" in m and isinstance(m.get("content"), str) for m in messages)
    ):
        raise ConfigError(
            "expected text or a list of messages {'role', 'content'} whose content is text, found "
            f"{described(observation)}"
        )
    if any(HALF.search(message["content"]) for message in messages):
        raise ConfigError("expected text, found half of a character in it (a lone surrogate); remove it")
    return [dict(message) for message in messages]
