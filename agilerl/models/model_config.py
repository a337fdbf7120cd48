"""How the files of a model are read: configuration and tokenizer, checked and changed as the user asks, and weights."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from agilerl.checks.arguments import nearest, reason, shown
from agilerl.config.base_model import AttentionKind
from agilerl.errors import AgileRLError, ConfigError, lacks_memory
from agilerl.safety.addresses import is_out_of_reach
from agilerl.safety.bounds import check_file, check_links, memory_bytes


def overridden_dtype(dtype: str, overrides: dict[str, Any]) -> str:
    """Take the data type out of the overrides of a model's configuration, which is where AgileRL expects it."""
    for name in ("dtype", "torch_dtype"):
        if name in overrides:
            wanted = str(overrides.pop(name)).removeprefix("torch.")
            if wanted not in ("auto", "float32", "bfloat16", "float16") or dtype not in ("auto", wanted):
                raise ConfigError(
                    f"the model's {name}={wanted!r} contradicts dtype={dtype!r}; expected auto, float32, bfloat16 "
                    "or float16, the same in both places"
                )
            dtype = wanted
    return dtype


def check_model_folder(folder: Path) -> None:
    """Raise ConfigError for a model folder with links that leave it, special files, or a file that is far too large.

    transformers would wait for ever on a named pipe. An index of weights may only name safetensors below the folder:
    transformers would open any path that it names, and read other formats with pickle.
    """
    check_links(folder, _READ_BELOW)
    for path in (*folder.iterdir(), *(path for name in _READ_BELOW for path in folder.glob(f"{name}/*"))):
        if not path.is_dir():
            most = _CONFIG_BYTES if path.name in _CONFIGS else _TEXT_BYTES
            check_file(path, most if path.suffix in _READ and path.suffix != ".safetensors" else None)
    for path in folder.glob(f"*{_INDEX}"):
        try:
            named = {str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # loading reports it
            continue
        for name in sorted(named):
            weights = PurePosixPath(name)
            if weights.is_absolute() or ".." in weights.parts or "\\" in name or weights.suffix != ".safetensors":
                raise ConfigError(f"{path} names {shown(name)}; expected *.safetensors in the folder of the model")
            check_links(folder, weights.parts[:1])
            check_file(folder / name)


def check_config(path: str, **known: Any) -> None:
    """Raise ConfigError for a config.json with numbers too large for any model; an unreadable file is passed over.

    This runs before transformers makes an object of it, because that may already build a list with an entry per layer.
    """
    from transformers import PretrainedConfig

    try:
        values = PretrainedConfig.get_config_dict(path, **known)[0]
        _check_values(f"the model {path!r}: ", "config.json", "", values)
    except ConfigError:
        raise
    except Exception:  # loading the file will report it
        return


def check_attention(where: str, value: Any) -> None:
    """Raise ConfigError for an attention implementation that is not one of ours, whatever key a file uses for it.

    transformers also accepts the name of a repository there, and would download kernels from it and run them.
    """
    for name in value.values() if isinstance(value, dict) else (value,):
        if name is not None and name not in get_args(AttentionKind):
            raise ConfigError(
                f"{where}: expected one of {', '.join(get_args(AttentionKind))}, found {shown(name)}; kernels from the "
                "hub are code, which a model folder or a manifest must not load"
            )


def _check_values(of: str, where: str, key: str, value: Any) -> None:
    """Check numbers, the lengths of lists, and values that transformers looks up by name, at any depth."""
    if key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        check_attention(f"{of}{where}", value)
    elif key in ("dtype", "torch_dtype") and isinstance(value, str):
        if value.removeprefix("torch.") not in _DTYPES:
            raise ConfigError(f"{of}expected {where} as one of {', '.join(_DTYPES)}, found {shown(value)}")
    elif key == "transformers_weights" and value is not None:
        # A plain name is that of a file which check_model_folder has looked at.
        if not isinstance(value, str) or {"/", "\\"} & set(value) or not value.endswith((".safetensors", _INDEX)):
            raise ConfigError(
                f"{of}expected {where} as *.safetensors, or an index of them, in the folder of the model, found "
                f"{shown(value)}"
            )
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_values(of, f"{where}: {name}", str(name), inner)
    elif isinstance(value, list):
        if len(value) > _COUNT:
            raise ConfigError(f"{of}{where} is a list of {len(value):,} entries, expected at most {_COUNT:,}")
        for inner in value:
            _check_values(of, where, key, inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        if (_COUNTED.search(key) and value > _COUNT) or (_SIZED.search(key) and value > _SIZE):
            raise ConfigError(
                f"{of}{where}={value} is more than any model has; use the config.json that belongs to these weights"
            )
        if key in _POSITIVE and value < 1:
            raise ConfigError(f"{of}expected 1 or more for {where}, found {value}")


_INDEX = "safetensors.index.json"
_READ_BELOW = ("additional_chat_templates",)
_READ = (".json", ".jinja", ".txt", ".model", ".safetensors", ".tiktoken")
_TEXT_BYTES = 500_000_000
_CONFIGS, _CONFIG_BYTES = ("config.json", "generation_config.json"), 5_000_000
"""A configuration with as many labels as fit into a larger file would take minutes to read."""
_COUNTED, _COUNT = re.compile(r"layers?$|layers?_|n_layer|blocks?$|depths?$|stages?$|experts?$|heads?$|labels$"), 4096
_POSITIVE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
_SIZED, _SIZE = re.compile(r"size|dim|vocab|hidden|width|channels|rank|embd|inner|positions|state|d_"), 50_000_000


def check_size(config: Any, name: str, width: float, kind: Any = None) -> None:
    """Raise ConfigError if a configuration describes a larger model than the machine's memory, or its files, can hold.

    transformers allocates weights at the size that the configuration states, also those that the files do not have.
    ``name`` is a folder or a name on the hub, of which only the memory is a bound; ``width`` is the least bytes of a
    parameter, ``kind`` the auto class that loads it (None: ``auto_class``).
    """
    import torch

    limit, stored = memory_bytes(), _stored(Path(name).expanduser())
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = (kind or auto_class(config)).from_config(config, trust_remote_code=False)
    count = sum(parameter.numel() for parameter in model.parameters())
    too_large = limit is not None and count * width > limit
    if too_large or count > stored:
        holds = "this machine's memory holds" if too_large else "its *.safetensors hold"
        raise ConfigError(
            f"the model {name!r} has {count:,} parameters according to its config.json, more than {holds}; use the "
            "config.json that belongs to the weights, or a smaller model"
        )


def _stored(folder: Path) -> float:
    """Return the most parameters that the weights in a folder may hold, from the heads of its files, if it has any."""
    from safetensors import SafetensorError, safe_open

    count = 0
    try:
        for path in folder.rglob("*.safetensors"):
            with safe_open(path, "pt") as file:
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return math.inf  # loading reports it
    return 2 * count + _NOT_STORED if count else math.inf  # two of 4 bits are stored as one of 8


_NOT_STORED = 2**20
"""Parameters that files may lack, for instance a head that loading would report as missing."""


def model_config(path: str, overrides: Mapping[str, Any]) -> Any:
    """Read a model's configuration and apply overrides; raises ConfigError for a setting that it does not have."""
    from transformers import AutoConfig

    check_config(path)
    _check_values("", "config_overrides", "", dict(overrides))
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = config.get_text_config()
    for name, value in overrides.items():
        owner = text if hasattr(text, name) else config
        refused = name in ("auto_map", "quantization_config", "model_type") or name.startswith("_")
        refused = refused or callable(getattr(type(owner), name, None))  # a method is not a setting
        if refused or not hasattr(owner, name):
            known = [key for key in text.to_dict() if not key.startswith("_")]
            raise ConfigError(
                f"a {config.model_type!r} model has no setting {name!r} to change; {nearest(name, known)}"
            )
        setattr(owner, name, value)
    return config


def auto_class(config: Any) -> Any:
    """Return transformers' auto class for causal language models, or the one for models of text and images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    speaks = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if speaks else AutoModelForImageTextToText


# -- loading: silence, errors as sentences, complete weights ----------------------------------------------------------


@contextmanager
def loading(what: str, name: str, expected: str, *, of_hub: bool = False) -> Iterator[None]:
    """Silence transformers' reports and progress bars, and turn any error it raises into a ConfigError."""
    from huggingface_hub import constants
    from transformers.utils import logging

    verbosity, bar, offline = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # If the hub does not answer, a model of it comes from its cache alone: its client would retry for a minute.
        constants.HF_HUB_OFFLINE = offline or (of_hub and is_out_of_reach())
        yield
    except AgileRLError:
        raise
    except Exception as error:  # any of several libraries that read files: no list of their errors is complete
        if lacks_memory(error):
            raise
        raise ConfigError(f"cannot load {what} {name!r}: {reason(error)}; expected {expected}") from error
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def load_whole(path: str | Path, name: str, config: Any, width: float, **options: Any) -> Any:
    """Return a causal language model with the weights of its files, of which none may be missing.

    ``name`` is that of messages, ``width`` the least bytes of a parameter, ``options`` are those of from_pretrained.
    Raises ConfigError for weights that do not fit the memory or the configuration.
    """
    check_size(config, name, width)
    model, report = auto_class(config).from_pretrained(
        path,
        config=config,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # reported below, by name
        output_loading_info=True,
        **options,
    )
    # Weights that transformers has left at random values; tied ones are not among them.
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise ConfigError(
            f"the weights of {name!r} are incomplete: {missing[0]}{more} missing from its files; use a complete copy, "
            "or the config.json that belongs to these weights"
        )
    if mismatched:
        key, stored, expected = mismatched[0]
        raise ConfigError(
            f"the weights of {name!r} do not fit its config.json: {key} has shape {list(stored)}, expected "
            f"{list(expected)}; use the two files of the same model"
        )
    return model


# -- tokenizers: the parts of tokenizer.json that can be abused, regular expressions and replacements -----------------


_GROWTH = 256
"""How many times longer a text may become; a space that becomes a three-byte mark is common."""
_PARTS = ("normalizer", "pre_tokenizer", "decoder")


def check_tokenizer_parts(tokenizer: Any, name: str) -> None:
    """Raise ConfigError for a tokenizer that a short text can make run for ever, or fill the memory.

    A regular expression with nested repeats tries every way to divide a text among them; six replacements of one letter
    by a hundred turn it into a million million letters.
    """
    for step in _steps(getattr(tokenizer, "response_template", None)):
        for key, expression in step.items():
            if key.endswith("pattern") and isinstance(expression, str):
                _check_repeats(expression, name, "response template")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for part in _PARTS if backend is not None else ():
        rules = getattr(backend, part, None)
        growth, values = 1.0, None if rules is None else json.loads(rules.__getstate__())
        for step in _steps(values):
            pattern = step.get("pattern")
            expression = pattern.get("Regex") if isinstance(pattern, dict) else None
            if isinstance(expression, str):
                _check_repeats(expression, name, part)
            growth *= _growth(step, pattern)
        if growth > _GROWTH or (part == "normalizer" and _is_blown_up(rules, values)):
            raise ConfigError(
                f"the tokenizer of {name!r}: its {part} can make a text more than {_GROWTH} times as long; use the "
                "tokenizer from its original source"
            )


def _steps(values: Any) -> Iterator[dict[str, Any]]:
    """Yield every part of a description, at any depth."""
    if isinstance(values, dict):
        yield values
    for inner in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _steps(inner)


def _growth(step: dict[str, Any], pattern: Any) -> float:
    if step.get("type") == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")).encode())
    if step.get("type") != "Replace" or not isinstance(pattern, dict):
        return 1.0
    content, literal = len(str(step.get("content", "")).encode()), pattern.get("String")
    # An expression may match the empty string, between every two characters.
    return max(content / max(len(literal.encode()), 1), 1.0) if isinstance(literal, str) else 1.0 + content


def _is_blown_up(normalizer: Any, values: Any) -> bool:
    """Return whether a normalizer with a compiled table makes some character far longer, found by trying it."""
    if not any(step.get("type") == "Precompiled" for step in _steps(values)):
        return False
    pieces = ("".join(map(chr, range(start, start + 128))) for start in range(1, 0xD780, 128))
    return any(len(normalizer.normalize_str(piece)) > 8 * len(piece) + 1000 for piece in pieces)


_UNBOUNDED = re.compile(r"[*+]|\{\s*(\d+\s*,|\d*\s*,\s*0*(1[1-9]|[2-9]\d|[1-9]\d\d+))\s*\}")
"""A repeat without bound, or with one above ten: after a group with repeats, that is as bad."""


def _check_repeats(expression: str, name: str, part: str) -> None:
    if _repeats_repeats(expression):
        raise ConfigError(
            f"the tokenizer of {name!r}: the regular expression {expression[:80]!r} of its {part} has nested "
            "repeats, which can take for ever; use the tokenizer from its original source"
        )


def _repeats_repeats(pattern: str) -> bool:
    """Return whether a group with an unbounded repeat inside is itself repeated without bound, or refers back."""
    inside, closed, classes = [False], False, 0
    for part in re.findall(r"\\.|\{[\d\s,]*\}|.", pattern, re.DOTALL):
        if classes or part == "[":  # character classes may be nested
            classes += (part == "[") - (part == "]")
            closed = False
        elif re.match(r"\\[1-9kg]", part):
            return True
        elif part == "(":
            inside.append(False)
            closed = False
        elif part == ")" and len(inside) > 1:
            closed = inside.pop()
            inside[-1] = inside[-1] or closed
        elif _UNBOUNDED.fullmatch(part):
            if closed:
                return True
            inside[-1] = True
        elif part[0] not in "?{":
            closed = False
    return False
