"""A ``.gguf`` file as a base: its header checked, then written once as an ordinary folder in the cache."""

import hashlib
import json
import math
import mmap
import os
import re
import shutil
import struct
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from agilerl.checks.arguments import shown
from agilerl.errors import ConfigError, WriteError
from agilerl.models.model_config import check_config, load_whole, loading
from agilerl.safety.bounds import check_file, memory_bytes

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the metadata types of a fixed size; 8 is a string, 9 an array."""
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_TENSORS, _ENTRIES, _TEXTS, _ELEMENTS, _TOKEN_BYTES = 65_536, 1_024, 2**20, 2_097_152, 4096
"""Most tensors; most metadata; most texts in an array, and elements in all arrays, of which readers make objects; most
bytes of a token, for which merges are derived by trying every way to cut it in two."""
_SLACK = 4096
"""Most bytes behind the last tensor: what pads it."""
_F32, _MOST_DIMENSIONS = 0, 4
_VERSION = 2
"""Counts the ways in which folders of the cache were written: what an earlier one wrote is not read."""
_TOKENIZER = "tokenizer.ggml."
_BEGINNING = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
}
"""Ways to split text (``tokenizer.ggml.pre``) whose tokenizers begin with BOS in llama.cpp if the file is silent."""


@dataclass(frozen=True)
class Header:
    """What the header of a file promises, and its length in bytes allows."""

    numbers: int
    """Numbers of all tensors together."""
    bytes: int
    """Of all tensors together, as they lie in the file."""
    dtype: str
    """``float32`` if every tensor is, else ``bfloat16``: what blocks of a few bits were most likely made from."""
    metadata: Mapping[str, int | str] = field(default_factory=dict, compare=False)
    """Its counts, ids, switches and short texts."""


def base_folder(file: Path, dtype: str | None = None) -> Path:
    """Return the folder in the cache that a file has been written to, writing it the first time.

    Without a ``dtype`` the folder has the configuration and the tokenizer alone. The cache is ``gguf/`` in the hub
    client's home (``HF_HOME``); its entries are named by the sha256 of the file. Raises ConfigError for a file that is
    damaged, too large for the memory, or of an architecture that transformers does not know; WriteError if the disk
    refuses.
    """
    from filelock import FileLock
    from huggingface_hub import constants

    try:
        status = file.stat()
        # Before all its bytes are read, of which a sparse file may have terabytes.
        _check_size(str(file), read_header(file).bytes, "as they are")
        digest = _digest(str(file.resolve()), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"{shown(str(file))} cannot be read: {error.strerror or error}") from error
    target = Path(constants.HF_HOME) / "gguf" / f"{digest[:32]}.{_VERSION}-{dtype or 'tokenizer'}"
    if target.is_dir():
        return target
    shape = None if dtype is None else base_folder(file)
    # Beside the target: a rename works within one file system.
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):  # one of several processes writes it, and the others wait
            if target.is_dir():  # another process was faster
                return target
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                if shape is None:
                    temporary.mkdir()
                else:
                    shutil.copytree(shape, temporary)
                write_base(file, temporary, dtype)
                for path in temporary.iterdir():
                    # Before the rename, or a crash could leave a folder that looks complete, with empty files in it.
                    with open(path, "rb+") as written:
                        os.fsync(written.fileno())
                temporary.rename(target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise WriteError(
            f"{target} could not be written: {error.strerror or error}; check the space and permissions of its "
            "folder, or set HF_HOME to another one"
        ) from error
    return target


@lru_cache(maxsize=8)
def _digest(path: str, size: int, changed: int) -> str:
    """Return the sha256 of a file; its size and time of change are part of the key of the cache alone."""
    check_file(Path(path))
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_base(file: Path, folder: Path, dtype: str | None) -> None:
    """Write a file's configuration and tokenizer into a folder without them; with a ``dtype`` its weights as well.

    Raises ConfigError for a file that cannot be read or is too large, and WriteError without the space.
    """
    import torch

    name, header = str(file), read_header(file)
    size = header.numbers * getattr(torch, dtype).itemsize if dtype is not None else 0
    _check_size(name, size, f"as {dtype}")
    free = shutil.disk_usage(folder).free
    if size > free:
        raise WriteError(f"{name!r} takes {size:,} bytes as {dtype}, and {folder.parent} has {free:,}; make room there")
    alone = folder / "model.gguf"  # other files beside the original would be read as if they belonged to it
    try:
        alone.symlink_to(file.resolve())
    except OSError:  # Windows without the privilege
        shutil.copyfile(file, alone)
    try:
        with (
            loading("the file", name, "a GGUF file of a causal language model that transformers can read"),
            redirect_stdout(StringIO()),  # what DeepSpeed logs when it is imported
            redirect_stderr(StringIO()),  # a progress bar that transformers' own settings do not reach
        ):
            if not (folder / "config.json").exists():
                _write_shape(folder, alone.name, header)
            if dtype is not None:
                _write_weights(name, folder, alone.name, getattr(torch, dtype))
    finally:
        alone.unlink()


def _check_size(name: str, size: int, how: str) -> None:
    limit = memory_bytes()
    if size > limit:
        raise ConfigError(
            f"the tensors of {name!r} take {size:,} bytes {how}, more than this machine's memory ({limit:,}); use a "
            "smaller model"
        )


def _write_shape(folder: Path, file: str, header: Header) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig

    values = {**PretrainedConfig.get_config_dict(folder, gguf_file=file)[0], "dtype": header.dtype}
    ends = [header.metadata.get(f"{_TOKENIZER}{end}_token_id") for end in ("eos", "eot", "eom")]
    if any(end is not None for end in ends[1:]):  # of a message, of a turn: transformers reads eos alone
        values["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")  # from here on as any model's folder
    check_config(str(folder))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, config=config, gguf_file=file, trust_remote_code=False)
    _add_special_tokens(tokenizer, header.metadata)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    # transformers adds the special tokens of a class that it takes for the file's, such as GPT-2's <|endoftext|>.
    kept = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kept["added_tokens"] = [token for token in kept["added_tokens"] if token["id"] < config.vocab_size]
    _prefix_space(kept, header.metadata.get(f"{_TOKENIZER}add_space_prefix"))
    (folder / "tokenizer.json").write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")


def _add_special_tokens(tokenizer: Any, metadata: Mapping[str, int | str]) -> None:
    """Let a tokenizer add BOS and EOS where llama.cpp does (``llama-vocab.cpp``): transformers drops the settings."""
    begins = metadata.get(f"{_TOKENIZER}model") == "llama" or metadata.get(f"{_TOKENIZER}pre") in _BEGINNING
    for name, default in (("bos", begins), ("eos", False)):
        adds = bool(metadata.get(f"{_TOKENIZER}add_{name}_token", default))
        if adds and getattr(tokenizer, f"{name}_token") is None:
            raise ConfigError(
                f"the file's tokenizer adds {name.upper()} to texts, but has no {_TOKENIZER}{name}_token_id; write it "
                f"into the file, or {_TOKENIZER}add_{name}_token = false"
            )
        if adds:
            setattr(tokenizer, f"add_{name}_token", True)


def _prefix_space(tokenizer: dict[str, Any], wanted: int | str | None) -> None:
    """Let a ``tokenizer.json`` of SentencePiece pieces put a space before a text, or not; None leaves it as it is."""
    space = {"type": "Prepend", "prepend": "\u2581"}
    parts = tokenizer["normalizer"]
    parts = [] if parts is None else parts.get("normalizers", [parts])
    pieces = tokenizer["pre_tokenizer"] or {}
    prepends = space in parts or pieces.get("prepend_scheme", "never") != "never"
    is_pieces = tokenizer["model"].get("byte_fallback")  # bytes have no such space, whatever the file says
    if wanted is None or prepends == bool(wanted) or not is_pieces:
        return
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [part for part in tokenizer["decoder"]["decoders"] if part != strip]
    tokenizer["decoder"]["decoders"] = [*decoders, strip] if wanted else decoders
    parts = [space, *parts] if wanted else [part for part in parts if part != space]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": parts}
    if not wanted and "prepend_scheme" in pieces:
        pieces["prepend_scheme"] = "never"


def _write_weights(name: str, folder: Path, file: str, dtype: Any) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    options: dict[str, Any] = {"dtype": dtype, "gguf_file": file}
    if (blocks := getattr(transformers, "GgufConfig", None)) is not None:  # its default may leave the weights packed
        options["quantization_config"] = blocks(dequantize=True)
    model = load_whole(folder, name, config, dtype.itemsize, **options)
    # save_pretrained refuses a model whose quantizer cannot write it.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):  # the weights are whole now, and would not be saved otherwise
        del model.config.quantization_config
    model.save_pretrained(folder)


# -- the header: every size in it is compared with the bytes that are there, before anything is allocated --------------


def read_header(file: Path) -> Header:
    """Return what a file's header promises; raises ConfigError for one that its bytes do not keep."""
    from gguf import GGML_QUANT_SIZES

    check_file(file)
    with open(file, "rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(
                f"expected a folder of a model or a GGUF file at {shown(str(file))}, found a file that does not begin "
                "with GGUF"
            )
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, str(file)).header({int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()})


class _Reader:
    """Walks through a header; every step asks whether the file has the bytes."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data, self._name, self._at, self._elements = data, name, len(_MAGIC), 0

    def header(self, sizes: dict[int, tuple[int, int]]) -> Header:
        version, tensors, pairs = self._number("I"), self._number("Q"), self._number("Q")
        self._expect(version in _VERSIONS, "version 2 or 3, little-endian", version)
        for what, count, limit in (("tensors", tensors, _TENSORS), ("metadata entries", pairs, _ENTRIES)):
            self._expect(count <= limit, f"at most {limit:,} {what}", count)
        known: dict[str, int | str | None] = {}
        for _ in range(pairs):
            key = self._text()
            self._expect(key not in known, "each metadata key once", key)
            known[key] = self._value(self._number("I"))
        alignment = known.get("general.alignment", _ALIGNMENT)
        alignment = alignment if isinstance(alignment, int) else 0
        self._expect(alignment > 0 and alignment & (alignment - 1) == 0, "general.alignment as a power of 2", alignment)
        table = [self._tensor(sizes) for _ in range(tensors)]
        room = len(self._data) - -(-self._at // alignment) * alignment
        names = {name for name, *_ in table}
        self._expect(len(names) == tensors > 0, "tensors, each under its own name", f"{len(names)} names of {tensors}")
        end = 0
        for name, _, _, offset, length in sorted(table, key=lambda row: row[3]):
            self._expect(offset % alignment == 0, f"{name} at a multiple of {alignment}", offset)
            # Tensors that share bytes could together be far larger than the file.
            self._expect(offset >= end, f"{name} behind byte {end:,}, where another tensor ends", offset)
            end = offset + length
            self._expect(end <= room, f"{length:,} bytes of {name} at {offset:,}", f"{max(room, 0):,} bytes of data")
        self._expect(room - end <= _SLACK, f"the end of the file at byte {end:,} of its data", f"{room:,} bytes")
        blocks = {int(name.split(".")[1]) for name in names if re.match(r"blk\.\d{1,6}\.", name)}
        layers = known.get(f"{known.get('general.architecture')}.block_count")
        layers = layers if isinstance(layers, int) else 0
        # A reader makes as many layers as the metadata say, and drops the others.
        self._expect(len(blocks) <= layers, f"block_count of at least {len(blocks)}, as it has tensors", layers)
        kinds = {kind for _, kind, *_ in table}
        return Header(
            sum(count for _, _, count, *_ in table),
            sum(length for *_, length in table),
            "float32" if kinds == {_F32} else "bfloat16",
            {key: value for key, value in known.items() if value is not None},
        )

    def _tensor(self, sizes: dict[int, tuple[int, int]]) -> tuple[str, int, int, int, int]:
        """Return name, type, count of numbers, offset and length in bytes of a tensor."""
        name, rank = self._text(), self._number("I")
        self._expect(1 <= rank <= _MOST_DIMENSIONS, f"1 to {_MOST_DIMENSIONS} dimensions of {name}", rank)
        shape = [self._number("Q") for _ in range(rank)]
        kind, offset = self._number("I"), self._number("Q")
        self._expect(kind in sizes, f"a known type of {name}", kind)
        block, width = sizes[kind]
        self._expect(min(shape) > 0 and shape[0] % block == 0, f"rows of {name} of whole blocks of {block}", shape)
        count = math.prod(shape)
        return name, kind, count, offset, count // block * width

    def _value(self, kind: int) -> int | str | None:
        """Skip a value, and return it if it is a count, an id, a switch or a short text."""
        if kind == _UINT32:
            return self._number("I")
        if kind == _BOOL:
            return self._number("?")
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            self._elements += count
            self._expect(self._elements <= _ELEMENTS, f"at most {_ELEMENTS:,} elements in arrays", self._elements)
            if kind == _STRING:
                self._expect(count <= _TEXTS, f"at most {_TEXTS:,} texts in an array", count)
                for _ in range(count):
                    length = self._number("Q")
                    self._expect(length <= _TOKEN_BYTES, f"tokens of at most {_TOKEN_BYTES:,} bytes", length)
                    self._skip(length)
                return None
        else:
            count = 1
        if kind == _STRING:
            start, length = self._at, self._number("Q")
            self._skip(length)
            return self._data[start + 8 : self._at].decode(errors="replace") if length <= _TOKEN_BYTES else None
        else:
            self._expect(kind in _WIDTHS, "a known type of metadata", kind)
            self._skip(count * _WIDTHS[kind])
        return None

    def _text(self) -> str:
        length = self._number("Q")
        start = self._at
        self._skip(length)
        return self._data[start : self._at].decode(errors="replace")

    def _number(self, kind: str) -> int:
        start = self._at
        self._skip(struct.calcsize(kind))
        return int(struct.unpack_from(f"<{kind}", self._data, start)[0])

    def _skip(self, count: int) -> None:
        left = len(self._data) - self._at
        self._expect(count <= left, f"{count:,} more bytes at {self._at:,}", f"{left:,}, where the file ends")
        self._at += count

    def _expect(self, holds: bool, expected: str, value: Any) -> None:
        if not holds:
            raise ConfigError(
                f"{shown(self._name)} is not a sound GGUF file: expected {expected}, found {shown(value)}; get it again"
            )
