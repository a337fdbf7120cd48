"""Messages to token ids and back: the only caller of a chat template."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from agilerl.errors import ConfigError, EnvError

__all__ = ["PromptTooLongError", "check_tokenizer", "decode_completions", "render_prompt", "render_text", "text_ids"]


class PromptTooLongError(EnvError):
    """A prompt, or an example, has more tokens than fit."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a ConfigError unless the tokenizer can pad and end a sequence."""
    for what in ("pad", "eos"):
        if getattr(tokenizer, f"{what}_token_id", None) is None:
            cure = "tokenizer.pad_token = tokenizer.eos_token" if what == "pad" else 'tokenizer.eos_token = "..."'
            raise ConfigError(
                f"expected a tokenizer with a {what} token, found none in {type(tokenizer).__name__} "
                f"{getattr(tokenizer, 'name_or_path', '')!r}; set one, for instance {cure}"
            )


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    use_template: bool = True,
) -> list[int]:
    """Return the token ids of a conversation up to where the model continues it.

    The chat template is applied with its generation prompt. A last message of the assistant is a prefill: the prompt
    ends with its text, and the model continues it. A tokenizer without a chat template gets the contents joined by
    newlines, with the special tokens that it adds by itself.

    Args:
        tokenizer: a Hugging Face tokenizer.
        messages: ``{"role", "content"}`` each, at least one.
        max_tokens: most tokens that the prompt may have.
        tools: JSON schemas of functions, which the template describes to the model.
        use_template: False treats the tokenizer as one without a chat template.

    Raises:
        ConfigError: no pad token, a malformed message, or a template that refuses the messages (for instance a system
            message).
        EnvError: the prompt is empty or has more than ``max_tokens`` tokens.
    """
    check_tokenizer(tokenizer)
    messages = [_checked(message) for message in messages]
    prefill = bool(messages) and messages[-1]["role"] == "assistant"
    if prefill and not messages[-1]["content"]:
        messages, prefill = messages[:-1], False  # an empty prefill is what the generation prompt does
    if not messages:
        raise EnvError("expected at least one message with content in a prompt, found none")
    if use_template and getattr(tokenizer, "chat_template", None):
        if any(message["role"] == "system" for message in messages):
            _check_system_role(tokenizer)
        ids = _ids(_apply_template(tokenizer, messages, prefill, tools=tools))
    else:
        ids = _ids(tokenizer("\n".join(message["content"] for message in messages)))
    if not ids:
        raise EnvError(f"expected a prompt of at least one token, found none in {messages!r}")
    if max_tokens is not None and len(ids) > max_tokens:
        raise PromptTooLongError(
            f"expected a prompt of at most {max_tokens} tokens, found {len(ids)}; raise max_context_length (or "
            f"max_model_len), or leave such prompts out: {messages[-1]['content'][:80]!r}"
        )
    return ids


def decode_completions(tokenizer: Any, completions: Iterable[Sequence[int]]) -> list[str]:
    """Return the text of generated ids, each cut at its first end or pad token, without special tokens."""
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    kept = []
    for ids in completions:
        end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
        kept.append(list(ids[:end]))
    return [tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in kept]


def _checked(message: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise ConfigError(f"a message is {{'role': ..., 'content': ...}}, found {message!r}")
    if not isinstance(message["content"], str):
        raise ConfigError(f"the content of a message must be text, found {message['content']!r}")
    return message


def render_text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return a conversation as the chat template writes it, up to where the model continues it.

    Raises:
        ConfigError: a malformed message, or a template that refuses the messages.
    """
    return str(_apply_template(tokenizer, [_checked(m) for m in messages], False, tools=tools, tokenize=False))


def _check_system_role(tokenizer: Any) -> None:
    """Raise ConfigError where the chat template leaves out what the system says."""
    mark = "agilerl:the-system-speaks"
    conversation = [{"role": "system", "content": mark}, {"role": "user", "content": "x"}]
    if mark not in str(_apply_template(tokenizer, conversation, False, tokenize=False)):
        raise ConfigError(
            "the tokenizer's chat template leaves out system messages, so the model would never see this one; move its "
            "text into the user message"
        )


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that continues another one: nothing is added in front or behind."""
    return _ids(tokenizer(text, add_special_tokens=False))


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    prefill: bool,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tokenize: bool = True,
) -> Any:
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=tokenize,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
        )
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        roles = [message["role"] for message in messages]
        cure = "move its text into the user message" if "system" in roles else "check the roles and their order"
        raise ConfigError(
            f"the tokenizer's chat template does not accept a conversation of {', '.join(roles)}: {error}; {cure}"
        ) from error


def _ids(encoded: Any) -> list[int]:
    """Return the ids of a BatchEncoding (transformers 5) or of a plain list (transformers 4)."""
    return [int(token) for token in (encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)]
