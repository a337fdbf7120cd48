"""Whoever names what has gone is told in one sentence what to use instead."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agilerl
from agilerl import Mutations, gone
from agilerl.compat import manifests
from agilerl.config.manifest import config_of
from agilerl.envs.adapters import make_env
from agilerl.envs.tools.parsers import parser_of
from agilerl.errors import ConfigError
from agilerl.gone import GONE, instead
from agilerl.runs.directory import RunDirectory, read_run
from agilerl.training.tasks import _check_id, graded
from tests.probes import ConstantTarget


def of_kind(kind: str) -> list[str]:
    """Return the names of a kind: ``command``, ``option``, ``value`` or ``key``."""

    def kind_of(name: str) -> str:
        if name.startswith("--"):
            return "option"
        return "command" if name.startswith("agilerl ") else "value" if "=" in name else "key"

    return [name for name in GONE if kind_of(name) == kind]


def said_by_the_command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "agilerl", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def test_what_is_inside_of_what_has_gone_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GONE, "section", "use the other one")
    assert instead("section.key.inner") == "section has gone: use the other one"
    assert instead("sections") is None
    assert instead("section=value") is None


def test_a_key_of_a_manifest() -> None:
    for key in of_kind("key"):
        value: dict[str, Any] = {}
        for part in reversed(key.split(".")):
            value = {part: value or 1}
        for manifest, overrides in ((value, []), ({}, [f"{key}=1"])):
            with pytest.raises(ConfigError) as raised:
                config_of(manifest, overrides)
            assert GONE[key] in str(raised.value)


@pytest.mark.processes
def test_a_command() -> None:
    for name in of_kind("command"):
        assert GONE[name] in said_by_the_command(*name.split()[1:])


@pytest.mark.processes
def test_an_option() -> None:
    for name in of_kind("option"):
        assert GONE[name] in said_by_the_command("train", name)


def _made(grader: str) -> Any:
    config = config_of({"environment": {"graders": [{"name": f"{grader}.accuracy_reward"}]}})
    return graded(config.environment, ConstantTarget())


def test_a_value() -> None:
    for name in of_kind("value"):
        kind, _, value = name.partition("=")
        in_python = {"environments": (make_env, _check_id), "parser": (parser_of,), "graders": (_made,)}
        if kind in in_python:
            for make in in_python[kind]:
                with pytest.raises(ConfigError, match=re.escape(GONE[name])):
                    make(value)
            continue
        values = {
            "strategies": {"selection_strategy": {"name": value}},
            "trackers": {"training": {"trackers": {value: {}}}},
        }
        with pytest.raises(ConfigError) as raised:
            config_of(values[kind])
        assert GONE[name] in str(raised.value)


def test_a_keyword() -> None:
    for call, key in (
        (lambda: Mutations(crossover=0.1), "mutation.crossover"),  # type: ignore[call-arg]
        (lambda: agilerl.train(sharing={"experience": 1}), "sharing"),
    ):
        with pytest.raises((ConfigError, TypeError), match=re.escape(GONE[key])):
            call()


def test_a_run_that_recorded_what_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GONE, "section", "use the other one")
    monkeypatch.setitem(GONE, "training.old", "use training.max_steps")
    monkeypatch.setitem(manifests._EARLIER, "section.steps", "training.max_steps")
    config = {"section": {"steps": 8, "cap": 2.0}, "training": {"old": 3, "seed": 1}}

    def read_with(given: dict[str, Any] | None) -> tuple[Any, Any]:
        RunDirectory.create(tmp_path / "run", config, 1, given=given, overwrite=True).close()
        info = read_run(tmp_path / "run")
        return info["config"], info.get("given")

    # Defaults, and what was given but off, are left out; a key with another name has today's.
    today = {"training": {"max_steps": 8, "seed": 1}}
    assert read_with({"section": {"steps": 8, "cap": 0}, "training": {"seed": 1}}) == (today, today)
    # What the run used stays: resuming it is refused with the sentence about it.
    assert read_with({"training": {"old": 3}}) == (today, {"training": {"old": 3}})
    # A run that did not record what it was given may have been given all of it.
    assert read_with(None) == ({"section": {"cap": 2.0}, "training": {"old": 3, "max_steps": 8, "seed": 1}}, None)
    # Except for what had no effect.
    monkeypatch.setattr(gone, "WITHOUT_EFFECT", ("training.old",))
    assert read_with({"training": {"old": 3}}) == (today, {"training": {}})


def test_a_key_with_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(manifests._EARLIER, "limits.inner.steps", "training.max_steps")
    for manifest, overrides in (({"limits": {"inner": {"steps": 8}}}, []), ({}, ["limits.inner.steps=8"])):
        with pytest.warns(UserWarning, match=r"limits.inner.steps is called training.max_steps now"):
            assert config_of(manifest, overrides).training.max_steps == 8
    with pytest.raises(ConfigError, match="mean the same but differ"):
        config_of({"limits": {"inner": {"steps": 8}}, "training": {"max_steps": 9}})
