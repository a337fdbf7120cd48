"""A GGUF file is a base like any folder, dequantised once; a file that lies about itself is refused unread."""

import json
import os
import random
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize
from huggingface_hub import constants
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.algorithms import GRPO
from agilerl.envs.prompts import end_token_ids, render_text
from agilerl.errors import AgileRLError, ConfigError, WriteError
from agilerl.models import gguf
from agilerl.models.base import is_of_hub, load_base, load_tokenizer
from agilerl.models.gguf import read_header
from agilerl.runtime import Runtime
from tests.gguf_files import PIECES, TOKENS, tiny_llama, write_gguf

pytestmark = pytest.mark.model

IDS = torch.arange(4, 24).reshape(2, 10)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home/gguf"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("file") / "kept.gguf", tiny_llama())


@pytest.fixture
def file(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(kept, tmp_path / "model.gguf"))


# -- a base -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_computes_what_its_model_does(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    base = load_base(str(write_gguf(tmp_path / "a file", model)))  # Ollama's files have no ending
    with torch.no_grad():
        torch.testing.assert_close(base.model(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    assert (base.dtype, base.parameters, base.quantisation) == (torch.float32, model.num_parameters(), None)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_its_numbers_are_those_of_its_blocks(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), kind=kind)
    embedded = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    expected = torch.from_numpy(dequantize(embedded.data, embedded.tensor_type).copy()).float()
    for dtype in (torch.float32, torch.bfloat16):
        base = load_base(str(path), dtype=str(dtype).removeprefix("torch."))
        weight = base.model.get_input_embeddings().weight
        assert weight.dtype == dtype
        assert torch.equal(weight, expected.to(dtype))
    header = read_header(path)
    assert (header.numbers, header.dtype) == (tiny_llama().num_parameters(), "bfloat16")


def test_it_is_written_once_and_for_every_name(file: Path, cache: Path, tmp_path: Path) -> None:
    first = load_base(str(file))
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert sorted(path.name.rpartition("-")[2] for path in cache.iterdir() if path.is_dir()) == ["float32", "tokenizer"]
    again = load_base(str(file.rename(tmp_path / "elsewhere.gguf")))
    assert again.fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == written
    other = write_gguf(file, tiny_llama(num_hidden_layers=1))
    assert load_base(str(other)).fingerprint != first.fingerprint


def test_its_tokenizer_and_template_are_the_files(file: Path, cache: Path) -> None:
    (file.parent / "tokenizer_config.json").write_text('{"chat_template": "another"}')  # of some other model
    (file.parent / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(str(file))
    assert not list(cache.rglob("*.safetensors"))  # the tokenizer costs no weights
    assert tokenizer.encode("ab ba") == [260, *(TOKENS.index(letter) for letter in ("Ġ", "b", "a"))]
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|end|>", "<|pad|>", len(TOKENS))
    assert render_text(tokenizer, [{"role": "user", "content": "hi"}]) == "<|user|>hi<|end|>"


PIECED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "silent: begins, with a space": ({}, ["<s>", "\u2581a", "b", "\u2581a"]),
    "begins": ({"add_bos_token": True}, ["<s>", "\u2581a", "b", "\u2581a"]),
    "does not begin": ({"add_bos_token": False}, ["\u2581a", "b", "\u2581a"]),
    "no space": ({"add_space_prefix": False}, ["<s>", "ab", "\u2581a"]),
    "nothing at all": ({"add_bos_token": False, "add_space_prefix": False}, ["ab", "\u2581a"]),
    "ends": ({"add_eos_token": True}, ["<s>", "\u2581a", "b", "\u2581a", "</s>"]),
    "another beginning": ({"bos_token_id": 3}, ["<end>", "\u2581a", "b", "\u2581a"]),
}


@pytest.mark.parametrize("name", PIECED)
def test_texts_of_pieces_begin_and_end_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    settings, tokens = PIECED[name]
    model = tiny_llama(vocab_size=len(PIECES))
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", model, template=None, pieces=True, **settings)))
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab a")["input_ids"]) == tokens
    for text in ("ab a", "b\n", *([" ab", "  a"] if settings.get("add_space_prefix") is False else [])):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({}, False),
        ({"tokenizer_pre": "llama-bpe"}, True),
        ({"tokenizer_pre": "tekken"}, True),
        ({"tokenizer_pre": "llama-bpe", "add_bos_token": False}, False),
        ({"tokenizer_pre": "smollm", "add_bos_token": True}, True),
        ({"add_space_prefix": True}, False),  # byte-level tokenizers know no such space
    ],
)
def test_texts_of_bytes_begin_as_in_llama_cpp(settings: dict[str, Any], begins: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), **settings)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer("ab")["input_ids"] == [1, 260] if begins else [260]
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [260]


def test_a_beginning_that_the_file_does_not_name_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), bos_token_id=None, add_bos_token=True)
    with pytest.raises(ConfigError, match=r"adds BOS to texts, but has no tokenizer\.ggml\.bos_token_id"):
        load_tokenizer(str(path))


def test_the_ends_of_turns_and_messages_end_a_completion(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), eot_token_id=2, eom_token_id=3)
    assert load_base(str(path)).eos_token_ids == (1, 2, 3)
    tokenizer = load_tokenizer(str(path))
    assert end_token_ids(tokenizer) == {1, 2, 3}
    assert tokenizer.eos_token_id == 1


def test_an_adapter_names_the_file(file: Path, tmp_path: Path) -> None:
    agent = GRPO(runtime=Runtime.from_pretrained(file, lora_config=None), batch_size=2, group_size=2)
    agent.save_checkpoint(tmp_path / "agent")
    named = json.loads((tmp_path / "agent/actor/adapter_config.json").read_text())["base_model_name_or_path"]
    assert (named, json.loads((tmp_path / "agent/agent.json").read_text())["base"]) == (str(file), str(file))
    model = AutoModelForCausalLM.from_pretrained(agent.runtime.base.source)
    PeftModel.from_pretrained(model, tmp_path / "agent/actor")
    assert len(AutoTokenizer.from_pretrained(agent.runtime.base.source)) == len(TOKENS)
    loaded = GRPO.load(tmp_path / "agent")
    assert loaded.runtime.base.name == str(file)


def test_a_name_at_a_path_is_not_of_the_hub(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/model").mkdir(parents=True)
    names = ("embedded", "model.gguf", "owner/model", str(file), "./none")
    assert not any(map(is_of_hub, names))
    assert is_of_hub("owner/other")


def test_an_interrupted_conversion_leaves_nothing(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf, "_write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_base(str(file))
    assert [path.name[-9:] for path in cache.iterdir() if path.is_dir()] == ["tokenizer"]
    load_base(str(file))


def test_a_cache_that_cannot_be_written_is_a_sentence(file: Path, cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(WriteError, match=r"could not be written: .* set HF_HOME"):
        load_base(str(file))


# -- lies -------------------------------------------------------------------------------------------------------------

TENSOR, LAST = b"blk.0.attn_q.weight", b"output_norm.weight"


def put(data: bytearray, at: int, kind: str, value: int) -> None:
    struct.pack_into(f"<{kind}", data, at, value)


def behind(data: bytearray, name: bytes, more: int = 0) -> int:
    return data.index(name) + len(name) + more


def doubled(data: bytearray) -> None:
    data[behind(data, b"blk.1.") - 2] = ord("0")


LIES: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "another format": (lambda d: put(d, 0, "I", 7), "does not begin with GGUF"),
    "another byte order": (lambda d: put(d, 4, "I", 3 << 24), "expected version 2 or 3, little-endian, found 50331648"),
    "no more than a magic": (lambda d: d.__delitem__(slice(4, None)), "4 more bytes at 4, found .0, where the file"),
    "tensors without end": (lambda d: put(d, 8, "Q", 2**60), "at most 65,536 tensors"),
    "a tensor too many": (lambda d: put(d, 8, "Q", struct.unpack_from("<Q", d, 8)[0] + 1), "not a sound GGUF file"),
    "no tensors": (lambda d: put(d, 8, "Q", 0), "expected tensors"),
    "metadata without end": (lambda d: put(d, 16, "Q", 2**63), "at most 1,024 metadata entries"),
    "a key of 2^50 bytes": (lambda d: put(d, 24, "Q", 2**50), r"1,125,899,906,842,624 more bytes at 32"),
    "a text of 2^50 bytes": (lambda d: put(d, behind(d, b"general.name", 4), "Q", 2**50), "899,906,842,624 more bytes"),
    "an unknown kind of value": (lambda d: put(d, behind(d, b"general.name"), "I", 99), "type of metadata, found 99"),
    "2^62 tokens": (lambda d: put(d, behind(d, b"ggml.tokens", 8), "Q", 2**62), "at most 2,097,152 elements"),
    "an array of arrays": (lambda d: put(d, behind(d, b"ggml.token_type", 4), "I", 9), "type of metadata, found 9"),
    "a token of 2^40 bytes": (lambda d: put(d, behind(d, b"ggml.tokens", 16), "Q", 2**40), "tokens of at most 4,096"),
    "a key twice": (lambda d: d.__setitem__(d.index(b"bos_token_id"), ord("e")), "each metadata key once"),
    "a name twice": (doubled, "each under its own name"),
    "no dimensions": (lambda d: put(d, behind(d, TENSOR), "I", 0), "1 to 4 dimensions"),
    "2^31 dimensions": (lambda d: put(d, behind(d, TENSOR), "I", 2**31), "1 to 4 dimensions"),
    "2^62 rows": (lambda d: put(d, behind(d, TENSOR, 12), "Q", 2**62), "bytes of blk.0.attn_q.weight at"),
    "rows that overflow 64 bits": (
        lambda d: [put(d, behind(d, TENSOR, 4 + 8 * n), "Q", 2**62) for n in (0, 1)],
        "bytes of blk.0.attn_q.weight at",
    ),
    "empty rows": (lambda d: put(d, behind(d, TENSOR, 4), "Q", 0), "whole blocks"),
    "an unknown type": (lambda d: put(d, behind(d, TENSOR, 20), "I", 4711), "a known type of blk.0.attn_q.weight"),
    "a type that was removed": (lambda d: put(d, behind(d, TENSOR, 20), "I", 4), "a known type of blk.0.attn_q.weight"),
    "blocks that rows do not fill": (lambda d: put(d, behind(d, TENSOR, 20), "I", 12), "whole blocks of 256"),
    "an unaligned offset": (
        lambda d: put(d, behind(d, LAST, 16), "Q", struct.unpack_from("<Q", d, behind(d, LAST, 16))[0] + 4),
        "output_norm.weight at a multiple of 32",
    ),
    "60,000 metadata": (lambda d: put(d, 16, "Q", 60_000), "at most 1,024 metadata entries"),
    "a terabyte behind the end": (lambda d: d.extend(bytes(8192)), "the end of the file at byte"),
    "half of its layers": (lambda d: put(d, behind(d, b"llama.block_count", 4), "I", 1), "block_count of at least 2"),
    "an offset beyond the end": (lambda d: put(d, behind(d, TENSOR, 24), "Q", 2**40), "at 1,099,511,627,776"),
    "an offset that overflows": (lambda d: put(d, behind(d, TENSOR, 24), "Q", 2**64 - 64), "at 18,446,744,073,709,551"),
    "cut": (lambda d: d.__delitem__(slice(-5000, None)), "bytes of data"),
}  # fmt: skip


def lie(file: Path, change: Callable[[bytearray], object]) -> Path:
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused_before_anything_is_allocated(name: str, file: Path, cache: Path) -> None:
    change, message = LIES[name]
    lie(file, change)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=message) as error:
        load_base(str(file))
    seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert seconds < 5
    assert peak < 20e6
    assert not cache.exists()


def test_tensors_may_not_share_their_bytes(file: Path) -> None:
    def share(data: bytearray) -> None:
        offset = struct.unpack_from("<Q", data, behind(data, b"blk.0.ffn_up.weight", 24))[0]
        for name in (b"blk.0.ffn_gate.weight", b"blk.1.ffn_gate.weight", b"blk.1.ffn_up.weight"):
            put(data, behind(data, name, 24), "Q", offset)
        del data[-3 * 64 * 128 * 4 :]
        put(data, behind(data, LAST, 16), "Q", 0)

    with pytest.raises(ConfigError, match="where another tensor ends"):
        read_header(lie(file, share))


def test_a_sparse_terabyte_is_refused_before_it_is_read(file: Path) -> None:
    with open(file, "rb+") as opened:
        opened.truncate(2**40)
    begun = time.perf_counter()
    with pytest.raises(ConfigError, match="the end of the file at byte"):
        load_base(str(file))
    assert time.perf_counter() - begun < 5


METADATA: dict[str, tuple[bytes, int, str]] = {
    "layers": (b"llama.block_count", 5000, "num_hidden_layers=5000 is more than any model has"),
    "width": (b"llama.embedding_length", 2**31, "is more than any model has"),
    "more layers than tensors": (b"llama.block_count", 3, "are incomplete: model.layers.2"),
    "wider than its tensors": (b"llama.feed_forward_length", 256, "has shape"),
    "an end that is no token": (b"ggml.eos_token_id", 10**6, "cannot load the file"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_does_not_fit_is_a_sentence(name: str, file: Path) -> None:
    key, value, message = METADATA[name]
    with pytest.raises(ConfigError, match=message) as error:
        load_base(str(lie(file, lambda data: put(data, behind(data, key, 4), "I", value))))
    assert "\n" not in str(error.value)


def test_a_model_larger_than_the_memory_or_the_disk_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(gguf, "memory_bytes", lambda: 100_000)
        with pytest.raises(ConfigError, match=r"take [\d,]+ bytes as they are, more than this machine's memory"):
            load_base(str(file))
    free = shutil.disk_usage(file)._replace(free=100_000)
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda path: free)
    with pytest.raises(WriteError, match="make room there"):
        load_base(str(file))


@pytest.mark.parametrize("what", ["a folder", "an empty file", "text", "a pipe"])
def test_what_is_not_a_file_of_this_kind_is_a_sentence(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    {
        "a folder": path.mkdir,
        "an empty file": path.touch,
        "text": lambda: path.write_text("GG"),
        "a pipe": lambda: os.mkfifo(path),
    }[what]()
    with pytest.raises(ConfigError, match=r"does not begin with GGUF|has no config\.json|no model folder at"):
        load_base(str(path))


def test_a_hostile_template_is_refused(tmp_path: Path) -> None:
    template = "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), template=template)
    with pytest.raises(AgileRLError, match="template"):
        render_text(load_tokenizer(str(path)), [{"role": "user", "content": "hi"}])


def test_any_byte_may_be_wrong(file: Path) -> None:
    """A header with random bytes changed, or cut anywhere, is read or refused, quickly and without a traceback."""
    draw, whole = random.Random(0), file.read_bytes()
    start = whole.index(LAST) + 60
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(4, start)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        if draw.random() < 0.2:
            del data[draw.randrange(4, len(data)) :]
        file.write_bytes(data)
        with suppress(ConfigError):
            read_header(file)
