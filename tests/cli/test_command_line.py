"""What the commands print and return where nothing is wrong, and when they are interrupted."""

import fcntl
import json
import re
import signal
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.config.run import place_of_run
from tests.cli.outcome import Agilerl, Outcome
from tests.cli.test_start import started
from tests.programs import Program
from tests.training.small_runs import SMALL, environment


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["train", "--bogus"]])
@pytest.mark.processes
def test_help_and_typing_errors_are_quick(arguments: list[str], tmp_path: Path) -> None:
    ended, _, modules, _ = started(*arguments, cwd=tmp_path)
    assert ended == (2 if "--bogus" in arguments else 0)
    assert modules.isdisjoint({"torch", "transformers", "peft", "scipy", "reasoning_gym", "plotly", "pyarrow"})
    assert "agilerl" in modules


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["train", "report", "fetch", "Exit codes"]),
        (["train", "--help"], ["--out", "--seed", "--dry-run", "--quiet", "--json", "KEY.PATH=VALUE"]),
        (["probe", "--help"], ["[OPTIONS] [MANIFEST | KEY.PATH=VALUE]...", " N "]),
    ],
)
def test_help_names_what_there_is(arguments: list[str], words: list[str], agilerl: Agilerl) -> None:
    outcome = agilerl(*arguments)
    assert (outcome.code, outcome.errors) == (0, "")
    for word in words:
        assert word in outcome.output


def test_every_command_has_a_short_help_and_debug(agilerl: Agilerl) -> None:
    assert agilerl("-h") == agilerl("--help")
    for command in ("train", "init", "fetch"):
        short = agilerl(command, "-h")
        assert short == agilerl(command, "--help")
        assert "--debug" in short.output
    # Paragraphs are broken at the width of the terminal, not where the lines of the docstring end.
    assert "and lengths to match. If the columns" in agilerl("init", "-h").output


def test_debug_shows_the_traceback_of_a_mistake(agilerl: Agilerl) -> None:
    plain = agilerl("train", "training.popsize=4")
    assert plain.errors.count("\n") == 1
    for arguments in (["--debug", "train"], ["train", "--debug"]):
        told = agilerl(*arguments, "training.popsize=4")
        assert told.code == plain.code == 2
        assert told.errors.startswith("Traceback (most recent call last):\n")
        assert told.errors.endswith(f"\n{plain.errors}")
    assert agilerl("train", "training.popsize=4") == plain


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("training.pop", ["training.pop_size="]),
        ("algorithm.clip_c", ["algorithm.clip_coef="]),
        ("tr", ["training."]),
        ("m", ["mine.yaml", "mutation."]),
        ("nothing.", []),
    ],
)
def test_a_shell_completes_settings(
    typed: str, found: list[str], agilerl: Agilerl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").touch()
    monkeypatch.setenv("_AGILERL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"agilerl train {typed}")
    monkeypatch.setenv("COMP_CWORD", "2")
    done = agilerl("")
    assert (done.code, done.output.split()) == (0, found)


def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_manifest()
    places = [place_of_run(config.environment, None) for _ in range(3)]
    roots = [place.__enter__() for place in places]
    assert len(set(roots)) == 3
    assert all(root.is_dir() and root.parent == Path("runs") for root in roots)
    (roots[1] / "run.json").touch()
    for place in places:
        place.__exit__(None, None, None)
    assert [root.exists() for root in roots] == [False, True, False]
    (roots[1] / "run.json").unlink()
    with pytest.raises(ValueError, match="ends"), place_of_run(config.environment, None) as root:
        raise ValueError("ends")
    assert not root.exists()
    with place_of_run(config.environment, Path("given")) as root:
        assert root == Path("given")
    assert not root.exists()


def test_the_version_comes_with_what_a_bug_report_needs(agilerl: Agilerl) -> None:
    first, *others = agilerl("--version").output.splitlines()
    assert first.startswith("agilerl 0.")
    for word in ("installation", "platform", "torch", "transformers", "peft", "reasoning_gym", "python"):
        assert any(line.startswith(f"{word} ") for line in others), word


@pytest.mark.model
def test_a_dry_run_prints_the_plan_and_writes_nothing(agilerl: Agilerl, tmp_path: Path) -> None:
    outcome = agilerl("train", *SMALL, "training.max_seconds=7200", "--dry-run", "--out", "a/run", "--seed", "3")
    assert (outcome.code, outcome.errors) == (0, "")
    for word in (
        "embedded: ",
        "LoRA rank 16",
        "gcd, reward exact",
        "the reward reads the whole completion; prompts ask for no format",
        "`2` earns 0.29 on gcd (chance 0.17",
        "GRPO, 3 agents",
        "agent 2",
        "lr in [1e-06, 0.01]",
        "4 prompts x 4 completions = 16 for each agent, 8 an optimizer step",
        "an iteration for all agents",
        "4 iterations, ending after 7,200 s, selection every 2; exam 8 prompts, test 10",
        "prompt     <bos>Find the Greatest Common Divisor (GCD) of these numbers: ",
        ", reward ",
        "MiB on top of Python and torch; less than the sum",
        "a/run",
        "Dry run: everything checked, nothing written.",
    ):
        assert word in outcome.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_the_plan_warns_of_a_small_exam_that_was_asked_for(agilerl: Agilerl) -> None:
    asked = ("environment.eval_prompts=40", "training.max_steps=2048", "--dry-run")
    said = " ".join(agilerl("train", *asked).output.split())
    assert "warning: with 40 questions an exam can detect a difference in accuracy of 0.18 or more" in said
    assert re.search(r"time up to about [\d.]+ (s|min) on this device, by rates measured just now", said)
    chosen = agilerl("train", "training.max_steps=512", "environment={task: 'reasoning_gym:gcd'}", "--dry-run").output
    assert re.search(r"exam [1-4]?\d prompts", " ".join(chosen.split()))
    assert "warning: " not in " ".join(chosen.split()).partition(" exam ")[2]


@pytest.mark.model
def test_a_dry_run_as_json(agilerl: Agilerl, tmp_path: Path) -> None:
    plans = [json.loads(agilerl("train", *SMALL, "--dry-run", "--json", "--seed", seed).output) for seed in "34"]
    plan = plans[0]
    assert plan["population"]["0"] == {"lr": 1e-5}
    assert len(plan["population"]) == 3
    assert plan["batches"]["group_size"] == [4, 4]
    assert plan["batches"]["completions_per_iteration"] == 48
    low, high = plan["batches"]["prompt_tokens"]
    assert 0 < low <= high
    assert plan["batches"]["tokens_per_iteration_at_most"] == 48 * (high + 10)
    assert plan["length"]["iterations"] == 4
    assert plan["results"].startswith("runs/gcd-")
    assert "Greatest Common Divisor" in plan["sample"]["prompt"]
    assert plan["sample"]["score"] in (0.0, 1.0)
    assert {"name": "results", "text": plan["results"]} in plan["lines"]
    assert plans[1]["population"] != plan["population"]  # --seed reaches the spread start
    assert list(tmp_path.iterdir()) == []


DRAWS = """
import random

class Draws:
    max_turns = 1
    def reset(self, seed=None):
        return str(random.randint(1, 10**9)), {}
    def step(self, action):
        return "", float(len(action)), True, False, {}
"""


@pytest.mark.model
def test_a_dry_run_plays_the_environment_and_says_what_is_wrong(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DRAWS)
    mine = "environment={env_type: multiturn, env_id: 'mine.py:Draws', eval_prompts: 2, test_prompts: 2}"
    plan = json.loads(agilerl("train", mine, "training.pop_size=2", "--allow-code", "--dry-run", "--json").output)
    assert [sentence for sentence in plan["environment"] if sentence.startswith("error: ")]
    assert "[not-pure]" in " ".join(plan["environment"])
    sound = mine.replace("mine.py:Draws", "agilerl/GuessTheNumber-v0")
    assert json.loads(agilerl("train", sound, "--dry-run", "--json").output)["environment"] == []


@pytest.mark.model
def test_the_plan_shows_ranges_where_agents_differ(agilerl: Agilerl) -> None:
    gene = "mutation.rl_hp_selection={group_size: {min: 2, max: 16}}"
    plan = json.loads(agilerl("train", *SMALL, gene, "--dry-run", "--json").output)
    low, high = plan["batches"]["group_size"]
    assert 2 <= low < high <= 16
    text = agilerl("train", *SMALL, gene, "--dry-run").output
    assert f"4 prompts x {low}-{high} completions = {4 * low}-{4 * high} for each agent" in text


@pytest.mark.model
def test_quiet_and_json_keep_to_themselves(agilerl: Agilerl, tmp_path: Path) -> None:
    short = [*SMALL, "training.max_steps=48", "training.evo_steps=1"]
    quiet = agilerl("train", *short, "--quiet", "--out", "quiet")
    assert (quiet.code, quiet.output, quiet.errors) == (0, "", "")
    as_json = agilerl("train", *short, "--json", "--out", "json")
    assert (as_json.code, as_json.errors) == (0, "")
    assert json.loads(as_json.output) == json.loads((tmp_path / "json" / "summary.json").read_text())
    report = agilerl("report", "quiet", "json", "--out", "both.html")
    assert (report.code, report.output.strip()) == (0, "both.html")
    assert (tmp_path / "both.html").stat().st_size > 1000


@pytest.mark.model
def test_a_run_as_lines_of_json_that_is_then_overwritten(agilerl: Agilerl, tmp_path: Path) -> None:
    short = [*SMALL, "training.max_steps=48", "training.evo_steps=1", "--out", "run"]
    done = agilerl("train", *short, "--log-format", "json")
    assert (done.code, done.errors) == (0, "")
    found = [json.loads(line) for line in done.output.splitlines()]
    assert [line["event"] for line in found[:3]] == ["message", "plan", "start"]
    assert found[-1]["event"] == "finish"
    assert json.loads(agilerl("resume", "run", "--log-format", "json").output)["event"] == "message"
    dry = agilerl("train", *short, "--overwrite", "--dry-run", "--log-format", "json")
    assert [json.loads(line)["event"] for line in dry.output.splitlines()] == ["message", "plan", "message"]
    assert (tmp_path / "run" / "summary.json").exists()
    assert agilerl("train", *short).code == 2
    before = (tmp_path / "run" / "run.json").read_text()
    again = agilerl("train", *short, "--overwrite", "--quiet", "--log-format", "json", "--seed", "3")
    assert again == Outcome(0, "", "")
    assert json.loads(before)["seed"] != json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--overwrite"],
        ["train", "--overwrite", "--resume", "auto", "--out", "run"],
        ["train", "--json", "--log-format", "json"],
        ["resume", "run", "--json", "--log-format", "json"],
    ],
)
def test_options_that_contradict_each_other(arguments: list[str], agilerl: Agilerl) -> None:
    refused = agilerl(*arguments)
    assert (refused.code, refused.output, refused.errors.count("\n")) == (2, "", 1)


@pytest.mark.model
@pytest.mark.processes
def test_an_interruption_saves_says_so_and_frees_the_directory(tmp_path: Path) -> None:
    command = ("-m", "agilerl", "train", *SMALL, "training.max_steps=1000000", "--out", "run")
    with Program(*command, cwd=tmp_path, env=environment()) as run:
        assert any(line.startswith("iteration 2 ") for line in iter(run.stdout.readline, ""))
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert re.fullmatch(
        "SIGINT: will save a checkpoint and stop after this (iteration|exam); press Ctrl-C again to stop at once\n"
        "stopped; resume with: agilerl resume run\n",
        errors,
    )
    with open(tmp_path / "run" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 42
    assert not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().endswith(b"}\n")
