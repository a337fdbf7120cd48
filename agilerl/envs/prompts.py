"""Messages to token ids and back: chat templates for tasks and environments, and where a completion ends."""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from agilerl.checks.arguments import Tokenizer, Whole, checked, described
from agilerl.errors import ConfigError, EnvError
from agilerl.text.padding import decoded, has_template
from agilerl.text.templates import TemplateBrokenError, apply_chat_template

_GENERATION_CONFIG = "generation_config.json"
_LARGEST_CONFIG = 1 << 20
"""Largest generation configuration to read, in bytes."""


class PromptTooLongError(EnvError):
    """A prompt or an example has too many tokens."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a ConfigError unless the tokenizer can pad and end a sequence."""
    for what in ("pad", "eos"):
        if getattr(tokenizer, f"{what}_token_id", None) is None:
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
    with its text, and the model continues it. Without a chat template, the contents are joined by newlines, with the
    special tokens that the tokenizer adds by default.

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
    prefill = bool(conversation) and conversation[-1]["role"] == "assistant"
    if prefill and not conversation[-1]["content"]:
        conversation, prefill = conversation[:-1], False  # an empty prefill equals the generation prompt
    if not conversation:
        raise EnvError("expected at least one message with content in a prompt, found none")
    if use_template and has_template(tokenizer):
        if any(message["role"] == "system" for message in conversation):
            _check_system_role(tokenizer)
        ids = _ids(_apply_template(tokenizer, conversation, tools, prompts=not prefill, continues=prefill))
    else:
        ids = _ids(tokenizer("\n".join(message["content"] for message in conversation)))
    if not ids:
        raise EnvError(f"expected a prompt of at least one token, found none in {conversation!r}")
    if max_tokens is not None and len(ids) > max_tokens:
        raise PromptTooLongError(
            f"expected a prompt of at most {max_tokens} tokens, found {len(ids)}; raise max_model_len (of a "
            f"gym, max_context_length), or remove such prompts: {conversation[-1]['content'][:80]!r}"
        )
    return ids


def end_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a completion: the end tokens of the tokenizer and of its model.

    A model may have several (Qwen2.5-Instruct ends with ``<|im_end|>`` or ``<|endoftext|>``, its pad token); they are
    listed in the generation configuration next to the tokenizer's files.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    ends = _ends_beside(str(getattr(tokenizer, "name_or_path", None) or ""))
    return ends if end is None else ends | {int(end)}


def completion_length(ids: Sequence[int], *, ends: Collection[int], pad: int | None, known: int | None = None) -> int:
    """Return how many of the ids after a prompt are its completion, end token included.

    ``known``, the number of tokens marked by an action mask or with log-probs, decides, because ids alone cannot
    distinguish a sampled pad token from padding. Without it, a completion ends at its first token of ``ends``, or else
    before the trailing padding; a pad token followed by other tokens was sampled. Raises EnvError for fewer ids than
    ``known``, or something other than padding after them.
    """
    if known is not None:
        behind = set(ids[known:])
        if known > len(ids) or not behind <= {pad, *ends}:
            raise EnvError(
                f"expected {known} sampled tokens (as many as log-probs or marked places in the action mask) and then "
                f"padding, found {len(ids)} tokens after the prompt"
            )
        return known
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
        kept = list(ids[: length - 1] if length and ids[length - 1] in ends else ids[:length])
        try:
            texts.append(decoded(tokenizer, kept, skip_special_tokens=True))
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"decode_completions: expected whole token ids, found {described(kept)}") from error
    return texts


@lru_cache(maxsize=64)
def _ends_beside(name: str) -> frozenset[int]:
    """Return the end tokens of the generation configuration in a folder, or of a cached hub name."""
    from huggingface_hub import try_to_load_from_cache

    if not name:
        return frozenset()
    try:
        is_folder = Path(name).is_dir()
        file = Path(name, _GENERATION_CONFIG) if is_folder else try_to_load_from_cache(name, _GENERATION_CONFIG)
        # The cache answers with a path, None, or a mark for a file that is known not to exist.
        if not isinstance(file, str | Path) or not Path(file).is_file() or os.path.getsize(file) > _LARGEST_CONFIG:
            return frozenset()
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # damaged, or no valid name on the hub
        return frozenset()
    ends = settings.get("eos_token_id") if isinstance(settings, dict) else None
    # By type, since JSON has true, and a bool is an int.
    return frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int)


def render_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    prompts: bool = True,
    continues: bool = False,
) -> str:
    """Return a conversation as the chat template writes it, up to where the model continues it.

    ``prompts=False`` omits the start of the model's message. With ``continues`` the last message stays open for the
    model to continue. Raises ConfigError for a malformed message, or a template that refuses the messages.
    """
    conversation, roles = as_messages(messages), {"prompts": prompts, "continues": continues}
    return str(_apply_template(tokenizer, conversation, tools, **roles, tokenize=False))


def _check_system_role(tokenizer: Any) -> None:
    """Raise ConfigError if the chat template drops the system message."""
    mark = "agilerl:the-system-speaks"
    conversation = [{"role": "system", "content": mark}, {"role": "user", "content": "x"}]
    if mark not in render_text(tokenizer, conversation):
        raise ConfigError(
            "the tokenizer's chat template drops system messages, so the model would never see this one; move its "
            "text into the user message"
        )


def generation_prompt(tokenizer: Any) -> list[int]:
    """Return the tokens with which every prompt ends: what the chat template puts between a question and its answer."""
    first, second = (render_prompt(tokenizer, [{"role": "user", "content": text}])[::-1] for text in "12")
    # What two prompts that differ in nothing but their question end with alike.
    ending = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second))][::-1]
    # Line breaks at the end may merge with those of a prefill into another token.
    while len(ending) > 1 and not tokenizer.decode(ending[-1:]).strip():
        ending.pop()
    if not ending:
        raise ConfigError(
            "network.lora_config.alora_invocation_tokens=generation_prompt: the chat template puts nothing between a "
            "question and its answer; name tokens, or a text, that every prompt has"
        )
    return ending


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that continues another one; no special tokens are added."""
    return _ids(tokenizer(text, add_special_tokens=False))


def _apply_template(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    prompts: bool,
    continues: bool,
    tokenize: bool = True,
) -> Any:
    try:
        return apply_chat_template(
            tokenizer,
            messages,
            # None, not an empty list: Llama 3's templates announce tools unless `tools` is none.
            tools=[dict(tool) for tool in tools] or None,
            tokenize=tokenize,
            add_generation_prompt=prompts,
            continue_final_message=continues,
        )
    except TemplateBrokenError as error:
        raise ConfigError(
            f"the tokenizer's chat template cannot be used: {error}; get it from its original source"
        ) from error
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        roles = [message["role"] for message in messages]
        cure = "move its text into the user message" if "system" in roles else "check the roles and their order"
        raise ConfigError(
            f"the tokenizer's chat template does not accept a conversation of {', '.join(roles)}: {error}; {cure}"
        ) from error


def _ids(encoded: Any) -> list[int]:
    """Return the ids of a BatchEncoding, or of the plain list of a tokenizer of another kind."""
    return [int(token) for token in (encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)]


# -- conversations that only grow: how a chat template continues one --------------------------------------------------


_MARK = "agilerl:here-the-model-spoke"
"""Placeholder for a completion while the text around it is determined."""
_PROBES = ("one", "<think>\nbecause\n</think>\n\none")
"""Completions that some templates rewrite once they are history: any, or those with thinking in them."""


class ChatFormat:
    """Renders the start of a conversation and the text between two completions, for one tokenizer.

    What the model generated is never rendered again: a conversation continues by appending the end of the assistant's
    message (unless the model wrote it itself), the environment's messages and the start of the next completion.
    """

    def __init__(
        self, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = (), apply_chat_template: bool = True
    ) -> None:
        """Probe a tokenizer's chat template.

        Raises ConfigError for no pad or end token, or a template that refuses the roles user, assistant, user, or
        leaves out the tools.
        """
        check_tokenizer(tokenizer)
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        ends = end_token_ids(tokenizer)
        # A pad token that was sampled ends nothing, unless it is one of the model's end tokens.
        self._ends = ends | (set(getattr(tokenizer, "all_special_ids", ())) - {tokenizer.pad_token_id})
        self.uses_template = apply_chat_template and has_template(tokenizer)
        user = [{"role": "user", "content": "x"}]
        if self.tools and (
            not self.uses_template or render_text(tokenizer, user, tools=self.tools) == render_text(tokenizer, user)
        ):
            raise ConfigError(
                f"the environment offers {len(self.tools)} tools, but the tokenizer's chat template does not show "
                "tools to the model; describe them in the system prompt, or use a model whose template supports tools"
            )
        self.rewrites_history = self.uses_template and any(self._is_rewritten(completion) for completion in _PROBES)
        """Whether earlier turns change when later ones follow, e.g. because thinking is removed from them."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None) -> list[int]:
        """Return the tokens of the conversation up to the first completion; errors as of ``render_prompt``."""
        return render_prompt(self.tokenizer, messages, max_tokens, tools=self.tools, use_template=self.uses_template)

    def between(
        self, before: Sequence[Mapping[str, Any]], completion: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the tokens between a completion and the next one.

        ``before`` is the conversation of the first prompt; ``messages`` are the environment's new ones.
        The end token of the assistant's message is left out if the completion ends with it, or with another token that
        ends turns (Llama 3 ends a tool call with one of its own).
        """
        if not self.uses_template:
            return text_ids(self.tokenizer, "\n" + "\n".join(str(m["content"]) for m in messages) + "\n")
        rendered = render_text(
            self.tokenizer, [*before, {"role": "assistant", "content": _MARK}, *messages], tools=self.tools
        )
        _, mark, text = rendered.rpartition(_MARK)
        if not mark:
            raise ConfigError(
                "the tokenizer's chat template does not show what the assistant said, so turns cannot follow one "
                "another; use another template, or apply_chat_template=False"
            )
        ids = text_ids(self.tokenizer, text)
        last = completion[-1] if completion else None
        ends_itself = bool(ids) and last is not None and (ids[0] == last or {ids[0], last} <= self._ends)
        return ids[1:] if ends_itself else ids

    def _is_rewritten(self, completion: str) -> bool:
        """Return whether the template changes a completion once another turn follows."""
        first = [{"role": "user", "content": "x"}]
        later = [*first, {"role": "assistant", "content": completion}, {"role": "user", "content": "y"}]
        again = [*later, {"role": "assistant", "content": "two"}, {"role": "user", "content": "z"}]
        opened = render_text(self.tokenizer, first) + completion
        # As the last answer and as an earlier one, since a template may tell them apart.
        return not all(render_text(self.tokenizer, c).startswith(opened) for c in (later, again))


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
