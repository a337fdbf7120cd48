"""Keys are written nowhere: not into the run directory, not to the terminal, not into errors."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from agilerl.checks.redaction import names_a_secret, redacted
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.config.vllm import VLLMConfig
from agilerl.errors import ConfigError
from agilerl.report import build_report
from agilerl.rewards.judge import JudgeGrader
from agilerl.runs import RunDirectory
from agilerl.runs.completions import completion_steps, read_completions
from agilerl.training.tasks import task
from tests import programs
from tests.cli.outcome import Agilerl
from tests.faults.test_hostile_manifests import read_and_checked
from tests.rewards.chat_server import Answer, chat, serve
from tests.training.small_runs import SMALL, environment, lines

KEY = "sk-SeCrEt-0123456789"
VARIABLES = ("OPENAI_API_KEY", "JUDGE_KEY", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")

JUDGE = """
from agilerl.rewards.judge import JudgeGrader


class Local(JudgeGrader):
    def __init__(self, port, **settings):
        url = f"http://127.0.0.1:{port}/v1"
        super().__init__("m", base_url=url, api_key_env="JUDGE_KEY", attempts=1, **settings)
"""


@pytest.mark.model
@pytest.mark.processes
def test_a_run_with_a_judge_shows_its_key_to_nobody_but_the_judge(tmp_path: Path) -> None:
    """An endpoint that repeats the key in its errors and replies; keys of others are in the environment as well."""

    def answer(body: dict[str, Any], number: int) -> Answer:
        if number % 20 == 10:
            return 400, f"the key {KEY} has no credit"
        return 200, chat(f"no score, Bearer {KEY}" if number % 20 == 11 else f'{{"score": 5}} for {KEY}')

    (tmp_path / "judge.py").write_text(JUDGE)
    with serve(answer) as server:
        port = server.url.split(":")[2].partition("/")[0]
        graders = f"[{{name: 'judge.py:Local', label: judge, params: {{port: {port}}}}}, {{name: task}}]"
        arguments = [*SMALL, "training.max_steps=48", f"environment.graders={graders}", "--allow-code", "--out", "run"]
        keys = dict.fromkeys(VARIABLES, KEY)
        done = programs.run(
            "-m", "agilerl", "train", *arguments, cwd=tmp_path, env={**environment(), **keys}, timeout=200
        )
        assert server.requests, done.stderr
        assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)
    assert KEY not in done.stdout + done.stderr
    assert_nowhere(tmp_path)
    assert done.returncode == 0, done.stderr
    train = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    failed = sum(line["reward_errors/judge"] for line in train)
    assert failed > 0
    # Not only the dry run: the end of the run, and its report, count what failed and say why.
    said = f"judge gave no grade to {failed:.0f} completion"
    assert re.search(rf"{said}s? of the run, the first because judge: \S", done.stdout)
    assert said in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def assert_nowhere(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path
    for completions in folder.rglob("completions"):
        for step in completion_steps(completions):
            assert KEY not in json.dumps(read_completions(completions, step))


@pytest.mark.parametrize(
    "setting",
    [
        *(
            f"{setting.replace('ADDRESS', address)}"
            for address in (
                f"http://h/v1?api_key={KEY}",
                f"http://h/v1?k={KEY}",
                f"http://h/v1#{KEY}",
                f"ws://{KEY}@h/v1",
            )
            for setting in (
                "environment.graders=[{name: judge, params: {model: m, base_url: 'ADDRESS'}}]",
                "environment.graders=[{name: 'code.py:Local', params: {of: [{endpoint: 'ADDRESS'}]}}]",
                "network.vllm_config.base_url='ADDRESS'",
                "environment.env_id='openenv:ADDRESS'",
                "teacher.url='ADDRESS'",
                "training.max_steps='ADDRESS'",
                "environment.nonsense='ADDRESS'",
            )
        ),
        f"environment.graders=[{{name: judge, params: {{model: m, api_key: {KEY}}}}}]",
        f"environment.graders=[{{name: judge, params: {{model: m, request: {{extra: [{{hfToken: {KEY}}}]}}}}}}]",
        f"environment.graders=[{{name: judge, params: {{model: m, api_key_env: {KEY}}}}}]",
        f"environment.graders=[{{name: judge, params: {{model: m, base_url: 'https://me:{KEY}@host/v1'}}}}]",
        f"environment.graders=[{{name: judge, params: {{model: m, nonsense: {KEY}}}}}]",
        f"environment.params.api_key={KEY}",
        f"environment.api_key={KEY}",
        f"training.password={KEY}",
        f"tracker.wandb_api_key={KEY}",
        f"algorithm.secret={KEY}",
    ],
)
def test_a_key_among_the_settings_is_refused_and_not_repeated(setting: str, tmp_path: Path, agilerl: Agilerl) -> None:
    ended = agilerl("train", setting, "--out", "run")
    assert (ended.code, ended.errors.count("\n")) == (2, 1)
    assert KEY not in ended.errors + ended.output
    assert list(tmp_path.iterdir()) == []
    key, _, value = setting.partition("=")
    way, last = key.split("."), value
    text = f"{way[0]}:\n  " + ": {".join(way[1:]) + f": {last}" + "}" * (len(way) - 2)
    (tmp_path / "it.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_and_checked(tmp_path / "it.yaml")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [{"api_key": KEY}, {"request": {"extra": [{"hfToken": KEY}]}}, {"request": {"headers": {"Authorization": KEY}}}],
)
def test_a_secret_is_recognised_wherever_it_is_nested(params: dict[str, Any]) -> None:
    for section in ({"graders": [{"name": "judge", "params": params}]}, {"params": params}):
        with pytest.raises(ConfigError, match="name of a secret") as caught:
            RunConfig.from_dict({"environment": section})
        assert KEY not in str(caught.value)
    RunConfig.from_dict({"environment": {"params": {"api_key_env": "MY_KEY", "max_tokens": "5", "api_key": None}}})


def test_a_judge_without_its_key_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    monkeypatch.setenv("OTHER_KEY", KEY)
    (tmp_path / "it.yaml").write_text(
        "environment: {graders: [{name: judge, params: {model: m, api_key_env: JUDGE_KEY}}]}"
    )
    with pytest.raises(ConfigError, match="variable JUDGE_KEY") as caught:
        task(load_manifest(tmp_path / "it.yaml"))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["a.api_key=x y,z", "b=1"], ["a.api_key=***", "b=1"]),
        (["training.max_tokens=5", "algorithm.max_output_tokens=8"], None),
        (["network.lora_config.target_modules=[q_proj, k_proj]"], None),
        (["environment.columns={question: problem, answer: solution}"], None),
        (
            ["g=[{name: judge, params: {api_key: 'x y', model: m}}]"],
            ["g=[{name: judge, params: {api_key: ***, model: m}}]"],
        ),
        (["g=[{params: {api_key_env: MY_KEY}}]"], None),
        (['g={"hfToken": "x", "n": 1}'], ['g={"hfToken": ***, "n": 1}']),
        (["url=https://me:pass@host/v1?access_token=x&n=1"], ["url=https://***@host/v1?***"]),
        (["--wandb-api-key", "x", "--seed", "3"], ["--wandb-api-key", "***", "--seed", "3"]),
        (["--password=x", "--secret", "--quiet"], ["--password=***", "--secret", "--quiet"]),
        (
            ["OPENAI_API_KEY=x", "MyPassword=y", "clientSecret=z"],
            ["OPENAI_API_KEY=***", "MyPassword=***", "clientSecret=***"],
        ),
    ],
)
def test_what_looks_like_a_key_is_not_in_the_command_line_of_run_json(
    arguments: list[str], written: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert redacted(arguments) == (written or arguments)
    with RunDirectory.create(tmp_path / "a", {}, 0, command=arguments) as run:
        assert json.loads(run.run_json.read_text())["command"] == (written or arguments)
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    with RunDirectory.create(tmp_path / "b", {}, 0) as run:
        assert json.loads(run.run_json.read_text())["command"] == ["script.py", *(written or arguments)]


def test_a_key_in_an_address_of_an_earlier_run_is_not_in_its_report(tmp_path: Path) -> None:
    grader = {"name": "judge", "params": {"base_url": f"http://me:{KEY}@h/v1?api_key={KEY}#{KEY}"}}
    config = {"environment": {"graders": [grader]}, "algorithm": {"name": "GRPO"}, "training": {}}
    RunDirectory.create(tmp_path / "run", config, 0, command=["train"]).close()
    assert KEY in (tmp_path / "run" / "run.json").read_text()
    build_report([tmp_path / "run"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert KEY not in text
    assert "http://***@h/v1?***" in text


@pytest.mark.parametrize("part", [f"me:{KEY}@h/v1", f"h/v1?api_key={KEY}", f"h/v1#{KEY}"])
def test_python_is_told_of_a_key_in_an_address(part: str) -> None:
    for made in (lambda: JudgeGrader("m", base_url=f"http://{part}"), lambda: VLLMConfig(base_url=f"http://{part}")):
        with pytest.raises(ConfigError, match="expected") as caught:
            made()
        assert KEY not in str(caught.value)


def test_names_of_secrets() -> None:
    assert all(map(names_a_secret, ["api_key", "apiKey", "API-KEY", "a.b.token", "hf_token", "PASSWORD", "privatekey"]))
    assert not any(map(names_a_secret, ["max_tokens", "tokens", "api_key_env", "tokenizer", "keyboard", "keep", "lr"]))
