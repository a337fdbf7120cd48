"""How a chat template continues a conversation, so that transcripts are append-only."""

from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.envs.prompts import check_tokenizer, end_token_ids, render_prompt, render_text, text_ids
from agilerl.envs.text_env import Observation
from agilerl.errors import ConfigError

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

        Raises:
            ConfigError: no pad or end token, a template that refuses the roles user, assistant, user, one that hides
                what the assistant said, or one that leaves out the tools.
        """
        check_tokenizer(tokenizer)
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        ends = end_token_ids(tokenizer)
        # A pad token that was sampled ends nothing, unless it is one of the model's end tokens.
        self._ends = ends | (set(tokenizer.all_special_ids) - {tokenizer.pad_token_id})
        self.uses_template = apply_chat_template and bool(getattr(tokenizer, "chat_template", None))
        if self.tools:
            self._check_tools()
        self.rewrites_history = self.uses_template and any(self._is_rewritten(said) for said in _PROBES)
        """Whether earlier turns change when later ones follow, e.g. because thinking is removed from them."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None) -> list[int]:
        """Return the tokens of the conversation up to the first completion; errors as of ``render_prompt``."""
        return render_prompt(self.tokenizer, messages, max_tokens, tools=self.tools, use_template=self.uses_template)

    def between(
        self, before: Sequence[Mapping[str, Any]], said: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the tokens between the completion ``said`` and the next one.

        ``before`` is the conversation of the first prompt; ``messages`` are the environment's new ones.
        The end token of the assistant's message is left out if ``said`` ends with it, or with another token that
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
        ends_itself = bool(ids and said) and (ids[0] == said[-1] or {ids[0], said[-1]} <= self._ends)
        return ids[1:] if ends_itself else ids

    def _check_tools(self) -> None:
        user = [{"role": "user", "content": "x"}]
        shown = self.uses_template and render_text(self.tokenizer, user, tools=self.tools) != render_text(
            self.tokenizer, user
        )
        if not shown:
            raise ConfigError(
                f"the environment offers {len(self.tools)} tools, but the tokenizer's chat template does not show "
                "tools to the model; describe them in the system prompt, or use a model whose template supports tools"
            )

    def _is_rewritten(self, said: str) -> bool:
        """Return whether the template changes a completion once another turn follows."""
        first = [{"role": "user", "content": "x"}]
        later = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "y"}]
        again = [*later, {"role": "assistant", "content": "two"}, {"role": "user", "content": "z"}]
        opened = render_text(self.tokenizer, first) + said
        return not all(render_text(self.tokenizer, c).startswith(opened) for c in (later, again))


def as_messages(observation: Observation) -> list[dict[str, Any]]:
    """Return an observation as messages; plain text becomes a user message.

    Raises:
        ConfigError: it is neither text nor a list of messages with a role and content.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    found: list[dict[str, Any]] = []
    for message in observation if isinstance(observation, Sequence) else ():
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            found = []
            break
        found.append(dict(message))
    if found:
        return found
    raise ConfigError(
        f"an observation is text or a list of messages {{'role', 'content'}}, found {type(observation).__name__} "
        f"{str(observation)[:60]!r}"
    )
