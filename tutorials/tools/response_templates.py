"""How Llama and Mistral write calls of tools: response templates of transformers, for tokenizers that have none.

Pass one to the environment, ``ToolEnv(..., parser=LLAMA)``, or to the tokenizer, ``tokenizer.response_template =
LLAMA``, which saves it with the model.
"""

LLAMA = {
    "start_anchor": "<|end_header_id|>\n\n",
    "fields": {
        "tool_calls": {
            # Llama 3.1 and later. Without the tag, a call counts only if it is all that the model writes.
            "open_pattern": r'<\|python_tag\|>|\A\s*(?=\{\s*"name"\s*:.*"parameters"\s*:.*<\|(?:eom|eot)_id\|>)',
            "close_pattern": r"<\|(?:eom|eot)_id\|>",
            "repeats": True,
            "content": "json",
            "transform": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
        "content": {},
    },
}

MISTRAL_LIST = {  # a list of calls: to the seventh version of its tokenizer
    "start_anchor": "[/INST]",
    "fields": {
        "tool_calls": {"open": "[TOOL_CALLS]", "close": "</s>", "content": "json"},
        "content": {},
    },
}

MISTRAL = {  # one by one: from the eleventh version on
    "start_anchor": "[/INST]",
    "fields": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\]]+)(?:\[CALL_ID\](?P<id>\w+)|(?P<id>))\[ARGS\]",
            "close_pattern": r"</s>|(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": {"name": "{name}", "id": "{id}", "arguments": "{content}"},
        },
        "content": {},
    },
}
