"""The tokenizer of the embedded base: characters, and one token for each fixed phrase of the tasks it knows."""

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PAD, UNK, BOS, SEP, EOS = "<pad>", "<unk>", "<bos>", "<sep>", "<eos>"

# The words of a question that never change carry no information: as one token each they cost one position
# instead of sixty, and the model sees only what varies.
PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
)

# A question ends with <sep>, an answer with <eos>: rendering more messages only appends, and
# add_generation_prompt has nothing to add because the question's <sep> already asks for the answer.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['content'] is string %}{% set text = message['content'] %}"
    "{%- else %}{% set text = (message['content'] or []) | map(attribute='text') | join %}{% endif %}"
    "{%- if message['role'] == 'system' %}{{- text + '\\n' }}"
    "{%- elif message['role'] in ('user', 'tool') %}{{- text + '<sep>' }}"
    "{%- elif message['role'] == 'assistant' %}{{- text + eos_token }}"
    "{%- else %}{{- raise_exception('expected role system, user, tool or assistant, found ' + message['role']) }}"
    "{%- endif %}"
    "{%- endfor %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: 5 special tokens, 95 printable ASCII characters, newline, then ``PHRASES``.

    Byte-pair encoding without merges splits text into characters; a character outside the vocabulary is ``<unk>``.
    """
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([PAD, UNK, BOS, SEP, EOS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK, fuse_unk=False))
    # Without a decoder the tokens would be joined by spaces.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        sep_token=SEP,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
