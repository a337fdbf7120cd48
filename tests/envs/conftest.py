import string
from collections.abc import Iterator

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agilerl.envs.scorers import Scorers

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE, pad: bool = True) -> PreTrainedTokenizerFast:
    """One token a character; the markers of the template are single tokens."""
    characters = string.printable
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    backend.decoder = decoders.Fuse()
    special = {"eos_token": "<end>", **({"pad_token": "<pad>"} if pad else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.add_tokens([AddedToken(f"<{role}>", special=True) for role in ("system", "user", "assistant")])
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_without_template():
    return make_tokenizer(template=None)


@pytest.fixture(scope="session")
def tokenizer_without_pad():
    return make_tokenizer(pad=False)


@pytest.fixture(scope="session")
def tokenizer_without_system_role():
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    return make_tokenizer(template=refuse + TEMPLATE)


@pytest.fixture(scope="module", autouse=True)
def one_worker() -> Iterator[None]:
    """Keep the process of the scorers, once it is needed, from ending and starting again between tests."""
    holder = Scorers("n_queens", [{}], [])
    holder._share_worker()
    yield
    holder.close()
