"""Custom code neither ends a run nor changes what the rest of it computes."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.config.manifest import load_manifest
from agilerl.config.named_files import given_digests
from agilerl.data import collate
from agilerl.envs.check import check_env
from agilerl.envs.core import Task
from agilerl.envs.episode_task import EpisodeTask, Stepping
from agilerl.envs.text_env import TextEnv
from agilerl.errors import ConfigError, RewardError
from agilerl.rewards import CombinedGrader, IsolatedGrader, call_grader, grade
from agilerl.safety.custom_code import contained, given_name, given_source, load_code, torch_restored
from agilerl.training.setup import build
from tests.algorithms.conftest import make_agents, sample
from tests.algorithms.off_policy import SETTINGS
from tests.faults.graders import killed
from tests.tiny_models import PAD
from tests.training.small_runs import SMALL, agilerl, less_times, lines

ROW = {"question": "3+4", "answer": "7"}


def test_a_module_may_import_its_parts_when_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(
        "def __getattr__(name):\n    if name == 'right':\n        return len\n    raise AttributeError(name)\n"
    )
    assert load_code("here", f"{tmp_path / 'lazy.py'}:right", allowed=True) is len
    with pytest.raises(ConfigError, match=r"expected wrong in .*lazy\.py, found nothing"):
        load_code("here", f"{tmp_path / 'lazy.py'}:wrong", allowed=True)


def settings() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "threads": torch.get_num_threads(),
        "as a mode": len(torch.overrides._get_current_function_mode_stack()),  # type: ignore[attr-defined]
    }


def meddle() -> None:
    torch.set_grad_enabled(not torch.is_grad_enabled())
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.set_num_threads(torch.get_num_threads() + 1)


def meddling(completion: str, answer: str) -> float:
    meddle()
    return float(completion == answer)


def meddling_batch(completions: list[str], answer: list[str]) -> list[float]:
    meddle()
    return [float(text == right) for text, right in zip(completions, answer)]


async def meddling_later(completion: str, answer: str) -> float:
    meddle()
    return float(completion == answer)


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    before = settings()
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(before["grad"])
    torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warn only"])
    torch.set_num_threads(before["threads"])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("grader", [meddling, meddling_batch, meddling_later])
def test_a_grader_leaves_torch_as_it_was(grader: Callable[..., Any], grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        before = settings()
        assert call_grader(grader, ["7", "8"], [ROW, ROW]) == [1.0, 0.0]
        assert settings() == before
        with suppress(ZeroDivisionError), torch_restored():
            meddle()
            raise ZeroDivisionError
        assert settings() == before


class Meddler(TextEnv):
    """Meddles wherever it is called."""

    max_turns = 2

    def __init__(self) -> None:
        meddle()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        meddle()
        return "?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        meddle()
        return "", 1.0, True, False, {}

    def close(self) -> None:
        meddle()


class Own(Task):
    """A task whose reward is custom code."""

    name, grader = "own", "own"

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def row(self, split: Any, index: int) -> dict[str, Any]:
        return dict(ROW)

    def reward(self, completion: str, row: Mapping[str, Any]) -> float | None:
        if completion == "act":
            self.act()
        return 1.0


def test_an_environment_a_task_and_a_module_leave_torch_as_it_was(tmp_path: Path) -> None:
    before = settings()
    task = EpisodeTask(Meddler, {}, name="meddler", max_turns=2)
    env = task.take()
    assert settings() == before
    for timeout in (None, 5.0):
        with Stepping(timeout) as stepping:
            stepping.add(lambda: env.reset(seed=0))
            stepping.add(lambda: env.step(""))
            assert stepping.results() == [None, None]
        assert settings() == before
    task.give_back(env)
    task.close()
    assert settings() == before
    assert Own(meddle).grade(["act"], [ROW]).rewards == [1.0]
    assert settings() == before
    (tmp_path / "own.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\ndef f(completion): return 1"
    )
    load_code("here", f"{tmp_path / 'own.py'}:f", allowed=True)
    assert settings() == before


@pytest.mark.model
def test_a_loss_leaves_torch_as_it_was_and_does_not_end_the_process() -> None:
    def meddling_loss(inputs: Any) -> Any:
        loss = (inputs.logp * inputs.advantages).sum() / inputs.denominator
        meddle()
        return loss

    def leaving_loss(inputs: Any) -> Any:
        sys.exit(0)

    (agent,) = make_agents(1, **SETTINGS)
    (rows,) = sample([agent])
    before = settings()
    agent.loss = meddling_loss
    agent.learn(collate(rows, PAD))
    assert settings() == before
    agent.loss = leaving_loss
    with pytest.raises(ConfigError, match="SystemExit: 0"):
        agent.learn(collate(rows, PAD))


# -- sys.exit ---------------------------------------------------------------------------------------------------------


def leaving(completion: str) -> float:
    return sys.exit(3) if completion == "leave" else 1.0


def leaving_batch(completions: list[str]) -> list[float]:
    return [leaving(text) for text in completions]


async def leaving_later(completion: str) -> float:
    return leaving(completion)


@pytest.mark.parametrize("grader", [leaving, leaving_batch, leaving_later])
def test_a_grader_that_leaves_has_failed(grader: Callable[..., Any]) -> None:
    grades = grade(CombinedGrader({"g": grader}), ["stay", "leave", "stay"], [ROW] * 3)
    assert grades.rewards == [1.0, None, 1.0]
    assert grades.failures == {"g": [1]}
    assert "SystemExit: 3" in str(grades.reasons[1])
    with pytest.raises(RewardError, match="failed on all 2"):
        grade(grader, ["leave", "leave"], [ROW] * 2)


def test_a_task_a_factory_a_module_and_a_check_that_leave_have_failed(tmp_path: Path) -> None:
    assert Own(sys.exit).grade(["stay", "act"], [ROW] * 2).failures == {"own": [1]}
    with pytest.raises(ConfigError, match="SystemExit"):
        EpisodeTask(lambda: sys.exit(0), {}, name="x", max_turns=1).take()
    (tmp_path / "own.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, match="SystemExit: 0"):
        load_code("here", f"{tmp_path / 'own.py'}:f", allowed=True)
    with pytest.raises(RuntimeError, match="SystemExit: 0"), contained():
        sys.exit(0)

    class Leaver(Meddler):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            sys.exit(0)

    assert [finding.level for finding in check_env(Leaver)] == ["error"]


GRADER = """
import sys
import torch

def meddling(completion, answer):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return float(completion == answer)

def plain(completion, answer):
    return float(completion == answer)

def leaving(completion, answer):
    sys.exit(0)
"""


@pytest.mark.model
@pytest.mark.processes
def test_runs_with_graders_that_leave_and_that_meddle(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(GRADER)
    done = {
        name: agilerl(
            *("train", *SMALL, "training.max_steps=96", "--allow-code", "--out", name),
            f"environment.graders=[{{name: 'own.py:{name}'}}]",
            cwd=tmp_path,
            timeout=240,
        )
        for name in ("plain", "meddling", "leaving")
    }
    assert done["leaving"].returncode == 2
    assert "SystemExit: 0" in done["leaving"].stderr
    assert "Traceback" not in done["leaving"].stderr
    assert (done["plain"].returncode, done["meddling"].returncode) == (0, 0), done["meddling"].stderr
    found = {
        name: json.dumps(less_times(lines(tmp_path / name / "metrics.jsonl"))).replace(name, "g")
        for name in ("plain", "meddling")
    }
    assert found["plain"] == found["meddling"]


@pytest.mark.processes
def test_a_worker_that_is_killed_says_so_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with IsolatedGrader(killed, timeout=5) as grader:
        first, last = grader(["", ""], ["kill", "stay"])
    assert isinstance(first, RewardError)
    assert "SIGKILL" in str(first)
    assert last == 1.0
    assert "Traceback" not in capfd.readouterr().err


def test_a_manifest_whose_file_leaves_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys\nclass G:\n    def __init__(self): sys.exit(0)\n")
    config = load_manifest(None, [*SMALL, f"environment.graders=[{{name: '{tmp_path / 'own.py'}:G'}}]"])
    with pytest.raises(ConfigError, match="SystemExit"):
        build(config, allow_code=True)


def test_the_source_of_a_function_that_python_handed_over_is_part_of_the_digests() -> None:
    def reward(completion: str) -> float:
        return float(len(completion))

    first = reward

    def reward(completion: str) -> float:  # type: ignore[no-redef]
        return float(len(completion)) / 2

    names = [given_name(code) for code in (first, reward)]
    of_both = []
    for name in names:
        config = load_manifest(None, [f"environment.graders=[{{name: '{name}'}}]"])
        of_both.append(given_digests(config.environment, "knockout", config.training))
    assert [list(one) for one in of_both] == [[name] for name in names]
    assert len({digest for one in of_both for digest in one.values()}) == 2
    assert given_source("python:nobody") is None
    assert given_source(given_name(eval("lambda completion: 0.0"))) is None
