"""Tokenizers and chat templates of many shapes, made by hand: what models in the world come with, on a small scale."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KIND = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
BETWEEN = "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}"
CHATML_BETWEEN = KIND + CHATML.replace("<|im_end|>\n{% endfor", BETWEEN + "{% endfor")
CHATML_LAST = CHATML.replace(
    "<|im_end|>\n{% endfor", "{{ '<|im_end|>\n' if add_generation_prompt or not loop.last else eos_token }}{% endfor"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
LLAMA2 = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '' }}{{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
MISTRAL_SYSTEM_LAST = (
    "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "[INST] {{ system + '\n\n' if loop.last and system else '' }}{{ m.content }}[/INST]"
    "{% else %}{{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
R1_BEFORE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
R1 = R1_BEFORE.replace("%}<|Assistant|>{% endif %}", "%}<|Assistant|><think>\n{% endif %}")
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% else %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content"
    " else '' %}<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN3_THINKING = QWEN3.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'system' %}"
    "{{ m.content }}\n{% else %}ASSISTANT: {{ m.content }}{{ eos_token }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
ALPACA = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt"
    " else '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def byte_level(special: str, post: str | None = None, *, spaced: bool = False, plain: str = "") -> Tokenizer:
    """A token a byte; ``spaced``: a text gets a space of its own, as in older models; ``plain``: added, not special."""
    names = special.split()
    vocabulary = {name: n for n, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain.split()])
    return _with_post(backend, post)


def sentencepiece(special: str, post: str | None = None, *, scheme: str = "always") -> Tokenizer:
    """A token a character, spaces as in SentencePiece; ``scheme``: which pieces get one, or ``legacy``: each text."""
    names, printable = special.split(), [chr(n) for n in range(33, 127)]
    vocabulary = {name: n for n, name in enumerate([*names, "▁", *(f"<0x{n:02X}>" for n in range(256)), *printable])}
    merges = []
    for character in printable[:]:
        vocabulary[f"▁{character}"] = len(vocabulary)
        merges.append(("▁", character))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    if scheme == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return _with_post(backend, post)


def _with_post(backend: Tokenizer, post: str | None) -> Tokenizer:
    if post is not None:
        used = [(name, backend.token_to_id(name)) for name in post.split() if name != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=post, special_tokens=used)
    return backend


@dataclass(frozen=True)
class Shape:
    """A tokenizer, its template and what the configurations beside it state; and what must come of it."""

    name: str
    backend: Tokenizer
    ends: str
    """The tokens that end an answer."""
    template: str | None = None
    eos: str | None = None
    bos: str | None = None
    pad: str | None = None
    generation: str | None = None
    """End tokens of generation_config.json; None: there is no such file."""
    config: str | None = None
    """Those of config.json."""
    kwargs: tuple[tuple[str, Any], ...] = ()
    grows: tuple[bool, bool | None] = (True, True)
    """Whether conversations only grow without a system text, and with one; None: the template refuses it."""
    learned: tuple[str, str] = ("", "")
    """What stands before the answers ``yes`` and ``<think>\\nso\\n</think>\\n\\nyes`` of what is learned."""
    opened: str = ""
    start: str = ""
    """What prompts begin with."""

    def tokenizer(self, folder: Path) -> Any:
        from agilerl.models.base import load_tokenizer

        names = {"eos_token": self.eos, "bos_token": self.bos, "pad_token": self.pad or self.eos or self.bos}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.backend,
            clean_up_tokenization_spaces=False,
            **{key: value for key, value in names.items() if value},
        )
        tokenizer.chat_template = self.template
        tokenizer.save_pretrained(folder)
        for file, stated in (("config", self.config), ("generation_config", self.generation)):
            if stated is not None or file == "config":
                ids = [self.backend.token_to_id(name) for name in (stated or "").split()]
                found = {"model_type": "llama", "eos_token_id": ids[0] if len(ids) == 1 else ids or None}
                (folder / f"{file}.json").write_text(json.dumps(found))
        (folder / "model.safetensors").write_bytes(b"")
        return load_tokenizer(str(folder), chat_template_kwargs=dict(self.kwargs))


IM = "<|endoftext|> <|im_start|> <|im_end|>"
EOT = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>"
TURN = "<pad> <eos> <bos> <start_of_turn> <end_of_turn>"
PHI = "<s> <|endoftext|> <|end|> <|user|> <|assistant|> <|system|>"
INST = "<s> </s> [INST] [/INST]"
DEEP = "<eos> <bos> <|User|> <|Assistant|>"
EMPTY = "<think>\n\n</think>\n\n"
OWN = "<think>\n"
SHAPES = [
    Shape("chatml, eos is its end", byte_level(IM), "<|im_end|>", CHATML, "<|im_end|>", start="<|im_start|>"),
    Shape(
        "chatml, eos of the base model",
        byte_level(IM),
        "<|endoftext|> <|im_end|>",
        CHATML,
        "<|endoftext|>",
        generation="<|endoftext|>",
        start="<|im_start|>",
    ),
    Shape(
        "chatml, two ends in the generation configuration",
        byte_level(IM),
        "<|endoftext|> <|im_end|>",
        CHATML,
        "<|im_end|>",
        generation="<|im_end|> <|endoftext|>",
        start="<|im_start|>",
    ),
    Shape(
        "chatml, two ends in config.json alone",
        byte_level(IM),
        "<|endoftext|> <|im_end|>",
        CHATML,
        "<|im_end|>",
        config="<|im_end|> <|endoftext|>",
        start="<|im_start|>",
    ),
    Shape(
        "chatml, ends between turns",
        byte_level(IM),
        "<|endoftext|> <|im_end|>",
        CHATML_BETWEEN,
        "<|endoftext|>",
        start="<|im_start|>",
    ),
    Shape(
        "chatml, another end behind the last answer",
        byte_level(IM),
        "<|endoftext|> <|im_end|>",
        CHATML_LAST,
        "<|endoftext|>",
        start="<|im_start|>",
        grows=(False, False),
    ),
    Shape(
        "mistral, ends between turns",
        byte_level(INST + " <|end|>", "<s> $A"),
        "<|end|> </s>",
        MISTRAL.replace("{{ eos_token }}", "{{ '<|end|>' if not loop.last }}"),
        "</s>",
        "<s>",
        grows=(True, None),
        start="<s>",
    ),
    Shape("chatml, no eos", byte_level(IM), "<|im_end|>", CHATML, pad="<|endoftext|>", start="<|im_start|>"),
    Shape(
        "chatml, tokens added but not special",
        byte_level("<|endoftext|>", plain="<|im_start|> <|im_end|>"),
        "<|endoftext|> <|im_end|>",
        CHATML,
        "<|endoftext|>",
        start="<|im_start|>",
    ),
    Shape("chatml, spelled by text", byte_level("<eos>"), "<eos>", CHATML, "<eos>", grows=(False, False), start="<"),
    Shape(
        "llama 3",
        byte_level(EOT, "<|begin_of_text|> $A"),
        "<|eot_id|> <|end_of_text|> <|eom_id|>",
        LLAMA3,
        "<|eot_id|>",
        "<|begin_of_text|>",
        generation="<|end_of_text|> <|eom_id|> <|eot_id|>",
        start="<|begin_of_text|>",
    ),
    Shape(
        "llama 3, eos of the base model",
        byte_level(EOT, "<|begin_of_text|> $A"),
        "<|eot_id|> <|end_of_text|>",
        LLAMA3,
        "<|end_of_text|>",
        "<|begin_of_text|>",
        config="<|end_of_text|>",
        start="<|begin_of_text|>",
    ),
    Shape(
        "gemma",
        byte_level(TURN, "<bos> $A"),
        "<eos> <end_of_turn>",
        GEMMA,
        "<eos>",
        "<bos>",
        "<pad>",
        generation="<eos> <end_of_turn>",
        grows=(True, None),
        start="<bos>",
    ),
    Shape(
        "gemma 3",
        byte_level(TURN, "<bos> $A"),
        "<eos> <end_of_turn>",
        GEMMA3,
        "<eos>",
        "<bos>",
        "<pad>",
        config="<eos>",
        start="<bos>",
    ),
    Shape("gemma, pretrained", byte_level(TURN, "<bos> $A"), "<eos>", None, "<eos>", "<bos>", "<pad>", start="<bos>"),
    Shape(
        "phi 3",
        byte_level(PHI),
        "<|endoftext|> <|end|>",
        PHI3,
        "<|endoftext|>",
        "<s>",
        generation="<|endoftext|>",
        start="<|user|>",
    ),
    Shape("llama 2", byte_level("<s> </s>", "<s> $A"), "</s>", LLAMA2, "</s>", "<s>", learned=(" ", " "), start="<s>"),
    Shape("mistral", byte_level(INST, "<s> $A"), "</s>", MISTRAL, "</s>", "<s>", grows=(True, None), start="<s>"),
    Shape(
        "mistral, system in the last turn",
        byte_level(INST, "<s> $A"),
        "</s>",
        MISTRAL_SYSTEM_LAST,
        "</s>",
        "<s>",
        grows=(True, False),
        start="<s>",
    ),
    Shape("r1 before", byte_level(DEEP), "<eos>", R1_BEFORE, "<eos>", "<bos>", grows=(False, False), start="<bos>"),
    Shape("r1", byte_level(DEEP), "<eos>", R1, "<eos>", "<bos>", grows=(False, False), opened=OWN, start="<bos>"),
    Shape(
        "qwen 3, thinking",
        byte_level(IM, plain="<think> </think>"),
        "<|im_end|> <|endoftext|>",
        QWEN3,
        "<|im_end|>",
        generation="<|im_end|> <|endoftext|>",
        grows=(False, False),
        learned=(EMPTY, ""),
        start="<|im_start|>",
    ),
    Shape(
        "qwen 3, not thinking",
        byte_level(IM, plain="<think> </think>"),
        "<|im_end|>",
        QWEN3,
        "<|im_end|>",
        kwargs=(("enable_thinking", False),),
        grows=(False, False),
        opened=EMPTY,
        start="<|im_start|>",
    ),
    Shape(
        "qwen 3, always thinking",
        byte_level(IM),
        "<|im_end|>",
        QWEN3_THINKING,
        "<|im_end|>",
        grows=(False, False),
        learned=("\n</think>\n\n", ""),
        opened=OWN,
        start="<|im_start|>",
    ),
    Shape("zephyr", byte_level(PHI + " </s>", "<s> $A"), "</s>", ZEPHYR, "</s>", "<s>", start="<|user|>"),
    Shape("vicuna", byte_level("<s> </s>", "<s> $A"), "</s>", VICUNA, "</s>", "<s>", learned=(" ", " "), start="U"),
    Shape("alpaca, no end", byte_level("<s> </s>"), "</s>", ALPACA, "</s>", start="#", grows=(False, False)),
    Shape(
        "glm, the next turn is the end",
        byte_level("<|endoftext|> <|user|> <|assistant|> <|system|>"),
        "<|endoftext|> <|user|>",
        GLM,
        "<|endoftext|>",
        generation="<|endoftext|> <|user|>",
        start="<|user|>",
    ),
    Shape(
        "glm, no end is stated",
        byte_level("<|endoftext|> <|user|> <|assistant|> <|system|>"),
        "<|endoftext|>",
        GLM,
        "<|endoftext|>",
        start="<|user|>",
        grows=(False, False),
    ),
    Shape(
        "harmony",
        byte_level("<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|> <|endoftext|>"),
        "<|return|> <|call|> <|endoftext|>",
        HARMONY,
        "<|return|>",
        pad="<|endoftext|>",
        generation="<|return|> <|call|> <|endoftext|>",
        learned=("<|channel|>final<|message|>",) * 2,
        start="<|start|>",
        grows=(False, False),
    ),
    Shape("no template", byte_level("<eos>"), "<eos>", None, "<eos>"),
    Shape("no template, bos", byte_level("<s> </s>", "<s> $A"), "</s>", None, "</s>", "<s>", start="<s>"),
    Shape("no template, eos behind", byte_level("<s> </s>", "<s> $A </s>"), "</s>", None, "</s>", "<s>", start="<s>"),
    Shape(
        "no template, as bert", byte_level("[CLS] [SEP] <eos>", "[CLS] $A [SEP]"), "<eos>", None, "<eos>", start="[CLS]"
    ),
    Shape("no template, eos alone behind", byte_level("</s>", "$A </s>"), "</s>", None, "</s>"),
    Shape(
        "bos is eos",
        byte_level("<|endoftext|>", "<|endoftext|> $A"),
        "<|endoftext|>",
        None,
        "<|endoftext|>",
        "<|endoftext|>",
        start="<|endoftext|>",
    ),
    Shape(
        "template, and eos behind",
        byte_level(IM + " <s>", "<s> $A <|im_end|>"),
        "<|im_end|>",
        CHATML,
        "<|im_end|>",
        "<s>",
        start="<|im_start|>",
    ),
    *(
        Shape(
            f"sentencepiece, {scheme}",
            sentencepiece("<s> </s>", "<s> $A", scheme=scheme),
            "</s>",
            None,
            "</s>",
            "<s>",
            start="<s>",
        )
        for scheme in ("always", "first", "never", "legacy")
    ),
    *(
        Shape(
            f"sentencepiece with a template, {scheme}",
            sentencepiece("<s> </s>", "<s> $A", scheme=scheme),
            "</s>",
            VICUNA,
            "</s>",
            "<s>",
            learned=(" ", " "),
            start="▁U" if scheme != "never" else "U",
        )
        for scheme in ("always", "first", "never", "legacy")
    ),
    Shape(
        "sentencepiece, gemma 3",
        sentencepiece(TURN, "<bos> $A", scheme="never"),
        "<eos> <end_of_turn>",
        GEMMA3,
        "<eos>",
        "<bos>",
        "<pad>",
        start="<bos>",
    ),
    Shape(
        "a space before each text",
        byte_level("<s> </s>", "<s> $A", spaced=True),
        "</s>",
        None,
        "</s>",
        "<s>",
        start="<s>",
    ),
    Shape(
        "a space before each text, with a template",
        byte_level("<s> </s>", spaced=True),
        "</s>",
        VICUNA,
        "</s>",
        "<s>",
        learned=(" ", " "),
        start="Ġ",
    ),
]
