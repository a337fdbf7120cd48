"""Small tokenizers with the special tokens and the conversation format of each model family."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tutorials.tools import response_templates

HERMES = (
    "{%- if tools %}<|im_start|>system{{ '\n' }}{{ tools | tojson }}<|im_end|>{{ '\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user{{ '\n' }}"
    "<tool_response>{{ m.content }}</tool_response><|im_end|>{{ '\n' }}"
    "{%- else %}<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content }}<|im_end|>{{ '\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{%- endif %}"
)
LLAMA = (
    "{%- for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>{{ '\n\n' }}"
    "{%- if loop.first and tools %}{{ tools | tojson }}{{ '\n' }}{%- endif %}{{ m.content }}<|eot_id|>"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{%- elif m.role == 'tool' %}"
    "{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{- raise_exception('call ids have nine characters') }}{%- endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{%- elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{%- else %}{{ raise_exception('no role ' + m.role) }}{%- endif %}"
    "{%- endfor %}"
)
WITHOUT_TOOLS = (
    "{%- for m in messages %}"
    "{%- if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{%- endif %}"
    "[{{ m.role }}]{{ m.content }}</s>"
    "{%- endfor %}"
)


def built(special: Sequence[str], plain: Sequence[str] = (), template: str = "", end: str = "</s>") -> object:
    """Characters, and one token for each of ``special`` and ``plain``; only the former vanish from decoded text."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=True) for t in dict.fromkeys([*special, end])])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        clean_up_tokenization_spaces=False,
        chat_template=template or None,
    )


def hermes(template: str = HERMES) -> object:
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    return built(["<|im_start|>"], tags, template, end="<|im_end|>")


def llama() -> object:
    special = ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"]
    tokenizer = built(special, (), LLAMA, end="<|eot_id|>")
    tokenizer.response_template = response_templates.LLAMA
    return tokenizer


def mistral(response_template: dict = response_templates.MISTRAL) -> object:
    tokens = ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    tokenizer = built([*tokens, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"], (), MISTRAL)
    tokenizer.response_template = response_template
    return tokenizer


def without_tools() -> object:
    return built([], (), WITHOUT_TOOLS)


FAMILIES = {
    "hermes": hermes,
    "llama": llama,
    "mistral": mistral,
    "mistral_list": lambda: mistral(response_templates.MISTRAL_LIST),
}


def encoded(tokenizer: object, text: str) -> list[int]:
    """Tokens of a text; the special tokens that are spelt in it become themselves."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def typed(tokenizer: object, text: str) -> list[int]:
    """Tokens of a text whose tags are typed as ordinary characters."""
    return [token for character in text for token in encoded(tokenizer, character)]
