"""``agilerl check``: what is wrong with an environment or a manifest, in sentences."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agilerl.arguments import shown
from agilerl.errors import ConfigError


def run_check(arguments: Sequence[str], *, tokenizer: str | None, allow_code: bool, as_json: bool) -> None:
    """Check what the first argument names; see ``agilerl check --help``."""
    target, *settings = arguments
    if _is_manifest(target):
        if tokenizer is not None:
            raise ConfigError(f"--tokenizer is for environments; the manifest {shown(target)} names its model itself")
        _check_manifest(Path(target), settings, allow_code)
        _print(target, [], as_json)
        return
    findings = _check_environment(target, _keywords(settings), tokenizer)
    _print(target, findings, as_json)
    if any(finding["level"] == "error" for finding in findings):
        sys.exit(1)


def _check_manifest(path: Path, overrides: Sequence[str], allow_code: bool) -> None:
    from agilerl.config.manifest import load_manifest

    config = load_manifest(path, overrides)
    from agilerl.training.setup import build  # imported once the manifest is known to be well formed

    build(config, allow_code=allow_code)


def _check_environment(name: str, settings: dict[str, Any], model: str | None) -> list[dict[str, str]]:
    from agilerl.envs.adapters import make_env  # also tells gymnasium the built-in ids
    from agilerl.envs.check import check_env

    make_env(name, **settings).close()  # a name that does not exist is a mistake in the command, not a finding
    tokenizer = None
    if model is not None:
        from agilerl.models.base import load_tokenizer

        tokenizer = load_tokenizer(model)
    findings = check_env(partial(make_env, name, **settings), tokenizer)
    return [{"level": f.level, "code": f.code, "sentence": f.sentence} for f in findings]


def _print(target: str, findings: Sequence[dict[str, str]], as_json: bool) -> None:
    errors = sum(finding["level"] == "error" for finding in findings)
    if as_json:
        print(json.dumps({"target": target, "ok": errors == 0, "findings": list(findings)}, indent=1))
        return
    for finding in findings:
        print(f"{finding['level']}: {finding['sentence']} [{finding['code']}]")
    warnings = len(findings) - errors
    counts = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
    print(f"{target}: {' and '.join(counts) or 'nothing wrong'}")


def _is_manifest(name: str) -> bool:
    """Tell a file from the name of an environment: by its ending, or because it is there."""
    try:
        return Path(name).suffix in (".yaml", ".yml") or (Path(name).is_file() and not name.endswith(".py"))
    except OSError:  # a name too long for the file system
        return False


def _keywords(settings: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` pairs as keyword arguments; values are read as YAML."""
    keywords = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"expected key=value as a setting of the environment, found {shown(setting)}")
        try:
            keywords[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits, a 31st of June
            raise ConfigError(f"expected a YAML value for {key}, found {shown(value)}") from error
    return keywords
