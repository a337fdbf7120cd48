"""The README and the guides do what they say: every block of code has a kind, and every kind a test.

| kind | its test |
| --- | --- |
| bash | commands of the package run, the others are parsed by their own programs; nothing is left out |
| python | runs |
| py | a program of another library: it is Python |
| yaml | is a manifest, or a part of one |
| json | is JSON |
| text | what a command prints, or an excerpt: `TEXTS` says which |
"""

import argparse
import importlib.util
import itertools
import json
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from agilerl.cli.app import app
from agilerl.config.manifest import load_manifest
from agilerl.models.tiny import tiny_model_path
from tests import programs
from tests.report.synthetic_run import make_run
from tests.training.small_runs import environment

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt")),
    *sorted((ROOT / "docs").glob("*.md")),
]
"""What the index names."""
SHOWING = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    *(path for folder in ("agilerl", "benchmarking", "tutorials", "tools") for path in (ROOT / folder).rglob("*.md")),
]
"""What may show code."""
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HUB_NAME = re.compile(r"network\.pretrained_model_name_or_path=\w+/[\w.-]+|network\.use_vllm=true")
"""What this machine need not have: a model of the hub, vLLM."""
PROGRAMS = {
    *("agilerl", "make", "pip", "python", "python3", "git", "cd", "source", "torchrun", "accelerate", "vllm"),
    "benchmarking/gpu.sh",
}


def fences(page: Path) -> list[tuple[str, str]]:
    """Return the kind and the text of each block."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [(kind, textwrap.dedent(text)) for _, kind, text in found]


def blocks(page: Path, kind: str) -> list[str]:
    return [text for found, text in fences(page) if found == kind]


def named(kind: str) -> dict[str, str]:
    """Return all blocks of a kind as ``page-number``."""

    def title(page: Path) -> str:
        return page.stem if page in PAGES else str(page.relative_to(ROOT).with_suffix(""))

    return {f"{title(page)}-{n}": text for page in SHOWING for n, text in enumerate(blocks(page, kind))}


def cases(found: dict[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "text"), found.items(), ids=found)


def commands(page: Path) -> list[str]:
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.join(split) for line in lines if (split := shlex.split(line, comments=True))]


def words(command: str) -> list[str]:
    """Split as the shell does, without variables before the program and the folder of the environment's programs."""
    program, *rest = itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), shlex.split(command))
    return [program.removeprefix(".venv/bin/"), *rest]


def all_of(program: str) -> list[str]:
    return sorted({line for page in SHOWING for line in commands(page) if words(line)[0] == program})


IN_ORDER = ROOT / "docs" / "after_the_run.md"
"""A page about a run that its first command makes; tests/cli/test_after.py runs its blocks one after another."""
SERVING = ROOT / "docs" / "serving.md"
"""Another one, of tests/cli/test_serve.py."""
OF_RUNS = (IN_ORDER.stem, SERVING.stem)
GIVEN = {
    'agent.save_checkpoint("here")': "",
    "batch = collate(rollout": """
import pytest
from agilerl import Population, ReasoningGymTask
from agilerl.data import collate
from agilerl.errors import CheckpointError
with pytest.raises(CheckpointError, match="my_loss"):
    GRPO.load("here", runtime=runtime)
rollout = Population([agent], ReasoningGymTask("gcd", {"max_value": 60}), prompts_per_step=2).rollout()
my_derivative = lambda logp, batch: -batch.action_mask.float()
""",
    "experience = agent.prepare": """
before = agent.state()
""",
}
"""Python that goes on from the first block of its page: how it begins, and what else a reader has by then."""


def scripts() -> dict[str, str]:
    """Return the Python that runs; what goes on from a page's first block is a part of it."""
    found: dict[str, str] = {}
    for name, code in named("python").items():
        first = re.sub(r"\d+$", "0", name)
        if given := [before for begins, before in GIVEN.items() if code.startswith(begins)]:
            found[first] += given[0] + code
        elif not first.startswith(OF_RUNS):
            found[name] = code
    return found


CHECKS = {
    "run = agilerl.train(dataset=rows, reward=adds_up, population=4, max_tokens=60_000, **settings)": """
test = {who: result.mean for who, result in run.test.items()}
assert test["base"] == 0.28
assert abs(test["elite"] - 0.88) < 0.06, test
""",
    # The adapter on disk is the elite: PEFT gives its logits, and they are not those of the base.
    'save_llm_checkpoint(elite, "elite", overwrite=True)': """
import torch
ids = torch.arange(1, 40)[None]
with torch.no_grad(), elite.select_adapter("actor"):
    own = runtime.base.model(input_ids=ids).logits
with torch.no_grad():
    loaded = policy(input_ids=ids).logits
    with policy.disable_adapter():
        bare = policy(input_ids=ids).logits
assert float((own - loaded).abs().max()) < 1e-5
assert float((own - bare).abs().max()) > 1e-2
assert after.mean > before.mean + 0.1, (before, after)
""",
}
"""What is checked at the end of a script, by a piece of it, besides that it runs."""


@cases(scripts())
@pytest.mark.processes
def test_python_runs(name: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(text + "".join(check for piece, check in CHECKS.items() if piece in text))
    done = programs.run(script, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr


def test_tables_of_python_name_one_block_each() -> None:
    texts = named("python").values()
    assert [piece for piece in CHECKS if sum(piece in text for text in scripts().values()) != 1] == []
    assert [begins for begins in GIVEN if sum(text.startswith(begins) for text in texts) != 1] == []


@cases(named("py"))
def test_programs_of_other_libraries_are_python(name: str, text: str) -> None:
    """What they name is compared with these libraries in tests/surface and tests/oracle."""
    compile(text, name, "exec")


def test_json_is_json() -> None:
    for text in named("json").values():
        json.loads(text)


@cases(named("yaml"))
def test_yaml_is_a_manifest(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(text)
    load_manifest(tmp_path / "shown.yaml", [])
    page = next(page for page in SHOWING if text in blocks(page, "yaml"))
    for file in re.findall(r"^# (\w+\.yaml)$", text, re.MULTILINE):
        assert any(file in words(command) for command in commands(page)), f"no command of the page takes {file}"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the manifests of the tutorials and of the pages, and the rows that some of them name."""
    shutil.copytree(ROOT / "tutorials" / "manifests", tmp_path / "tutorials" / "manifests")
    shutil.copytree(ROOT / "tutorials" / "agents", tmp_path / "tutorials" / "agents")
    shutil.copytree(tiny_model_path(), tmp_path / "build" / "smollm2")  # in place of SmolLM2, which tests/real has
    for name, columns in (("rows.jsonl", ("question", "answer")), ("more.jsonl", ("problem", "solution"))):
        rows = ({columns[0]: f"{name} {i}", columns[1]: str(i)} for i in range(64))
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for text in named("yaml").values():
        if name := re.match(r"# (\w+\.yaml)\n", text):
            (tmp_path / name[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.mark.parametrize("command", [c for c in all_of("agilerl") if words(c)[1] == "train" and not HUB_NAME.search(c)])
def test_train_commands_pass_every_check(command: str, workplace: Path) -> None:
    for option, schedule in itertools.pairwise(words(command)):
        if option == "--replay":
            make_run(workplace / "found")
            CliRunner().invoke(app, ["schedule", "found", "--out", schedule], catch_exceptions=False)
    done = CliRunner().invoke(app, [*words(command)[1:], "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "Dry run: everything checked, nothing written." in done.output
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize("command", [c for c in all_of("agilerl") if words(c)[1] == "train" or HUB_NAME.search(c)])
def test_train_commands_have_valid_options_and_settings(command: str) -> None:
    command_line(words(command)[1:])


def command_line(arguments: list[str]) -> typer.Context:
    """Parse as the command line does, without running the command; settings are checked as well."""
    program = typer.main.get_command(app)
    with program.make_context("agilerl", list(arguments)) as context:
        name, command, rest = program.resolve_command(context, arguments)  # type: ignore[attr-defined]
        with command.make_context(name, rest, parent=context) as parsed:
            if name == "train":
                load_manifest(None, [word for word in rest if re.match(r"[a-z_]+\.[\w.]+=", word)])
            return parsed


def invoke(command: str, workplace: Path) -> str:
    """Run a command of the package, and return what it printed."""
    variables = {word.partition("=")[0] for word in itertools.takewhile(lambda w: "=" in w, shlex.split(command))}
    assert variables <= {"AGILERL_ALLOWED_ADDRESSES"}
    for run in (word for word in words(command)[2:] if word.startswith("runs/")):
        if not (workplace / run).exists():
            make_run(workplace / run)
    done = CliRunner().invoke(app, words(command)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.output
    return done.output


@pytest.mark.parametrize(
    "command",
    [c for c in all_of("agilerl") if words(c)[1] != "train" and c not in [*commands(IN_ORDER), *commands(SERVING)]],
)
def test_other_commands_run(command: str, workplace: Path) -> None:
    invoke(command, workplace)


def inline() -> list[str]:
    """Return the command lines of the package within sentences; what stands for something else is in capitals."""
    texts = (FENCE.sub("", page.read_text(encoding="utf-8")) for page in SHOWING if page.name != "CHANGELOG.md")
    found = (code for text in texts for code in re.findall(r"`((?:\.venv/bin/)?agilerl [a-z][^`]*)`", text))
    return sorted({" ".join(code.split()) for code in found if "..." not in code})


@pytest.mark.parametrize("command", inline())
def test_commands_within_sentences_have_names_and_options_that_exist(command: str) -> None:
    program = typer.main.get_command(app)
    name, *rest = words(command)[1:]
    assert name in program.commands  # type: ignore[attr-defined]
    options = {
        option
        for parameter in program.get_command(None, name).params  # type: ignore[attr-defined]
        for option in (*parameter.opts, *parameter.secondary_opts, "--help", "-h")
    }
    assert [word for word in rest if word.startswith("-") and word not in options] == []
    load_manifest(None, [word for word in rest if re.match(r"[a-z_]+\.[\w.]+=[^A-Z]", word)])


# -- what commands print -----------------------------------------------------------------------------------------------


TEXTS = {
    "README-0": "the main job",
    "start-0": "the main job",
    "start-1": "the commands before it",
    "faq-0": "what became of an agent",
    "probe-0": "a table, with other numbers",
    "CONTRIBUTING-0": "files of the package",
}
"""Blocks of text, besides those of `OF_RUNS`: what they show. Each has its test below."""


def test_every_text_says_what_it_shows() -> None:
    assert set(TEXTS) == {name for name in named("text") if not name.startswith(OF_RUNS)}


@pytest.mark.parametrize("name", [name for name, what in TEXTS.items() if what == "the commands before it"])
def test_text_is_what_the_commands_before_it_print(name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the text has a line ``...``, lines are left out; the parts around it are compared as they are."""
    monkeypatch.setenv("COLUMNS", "80")
    text = named("text")[name]
    pairs = (pair for page in SHOWING for pair in itertools.pairwise(fences(page)))
    (before,) = [before for (kind, before), following in pairs if (kind, following) == ("bash", ("text", text))]
    printed = "".join(invoke(line, workplace) for line in shlex_lines(before))
    printed = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    for part in text.split("...\n"):
        assert part in printed
        printed = printed.partition(part)[2]


def shlex_lines(code: str) -> list[str]:
    return [shlex.join(split) for line in code.splitlines() if (split := shlex.split(line, comments=True))]


def shape(text: str) -> list[str]:
    """Return the lines with numbers masked and blanks as one."""
    lines = (re.sub(r"[-+]?\d[\d,.]*\d|[-+]?\d", "0", " ".join(line.split())) for line in text.splitlines())
    return [line for line in lines if line]


def assert_excerpt(name: str, printed: str) -> None:
    """The lines of a text are among those printed, in their order; ``...`` stands for lines that are left out."""
    lines = iter(shape(printed))
    assert [line for line in shape(named("text")[name]) if line != "..." and line not in lines] == []


def test_a_probe_prints_the_table_that_is_shown(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (command,) = commands(ROOT / "docs" / "probe.md")[:1]
    assert_excerpt("probe-0", invoke(command, workplace))


def test_the_life_of_an_agent_is_told_as_shown(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of the page, a few seconds: an agent whose learning rate is too high, and what is said about it."""
    monkeypatch.setenv("COLUMNS", "120")
    for command in (line for line in commands(ROOT / "docs" / "faq.md") if "runs/exploding" in line):
        done = CliRunner().invoke(app, words(command)[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert shape(done.output) == shape(named("text")["faq-0"])


MAIN_JOB = [name for name, what in TEXTS.items() if what == "the main job"]
SMALLER = (
    *("training.max_steps=512", "algorithm.batch_size=8", "algorithm.group_size=4"),
    *("environment.data_batch_size_per_gpu=2", "environment.eval_prompts=4", "environment.test_prompts=8"),
    "training.seed=3",  # few ties, of which there are many with four questions
)


def test_excerpts_of_the_main_job_have_the_lines_of_a_smaller_one(workplace: Path) -> None:
    done = CliRunner().invoke(app, ["train", *SMALLER], catch_exceptions=False)
    assert done.exit_code == 0
    for name in MAIN_JOB:
        assert_excerpt(name, done.output)


def test_the_agent_program_of_the_readme_trains(workplace: Path) -> None:
    """The function and the manifest as they stand, with rows of one's own, in a smaller run."""
    section = (
        ROOT.joinpath("README.md").read_text(encoding="utf-8").partition("\n## Any agent\n")[2].partition("\n## ")[0]
    )
    (_, program), (_, manifest) = [(kind, text) for _, kind, text in FENCE.findall(section)]
    rows = [{"question": f"{n}, {n + 1}.", "answer": str(n)} for n in range(40)]
    Path("agent.py").write_text(program)
    Path("mine.yaml").write_text(manifest)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", "mine.yaml", "--allow-code", *SMALLER, "training.max_steps=64", "--out", "agents"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "The first 8 test questions" in done.output
    assert Path("agents", "elite", "adapter_model.safetensors").exists()


@pytest.mark.nightly
@pytest.mark.processes
def test_excerpts_of_the_main_job_are_its_own(tmp_path: Path) -> None:
    """A minute or two. What is learned in 156 iterations depends on the processor's rounding, by a point or so."""
    done = programs.run("-m", "agilerl", "train", "--out", "run", cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    tests = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    for name in MAIN_JOB:
        assert_excerpt(name, done.stdout)
        shown = dict(re.findall(r"^(base|median|elite).*?(0\.\d+) +0\.\d+ +400$", named("text")[name], re.MULTILINE))
        assert float(shown["base"]) == pytest.approx(tests["base"]["mean"], abs=1e-3)
        assert float(shown["elite"]) == pytest.approx(tests["elite"]["mean"], abs=0.03)


def test_the_way_of_the_data_names_files_that_exist() -> None:
    files = re.findall(r"[\w/]+(?:\.py|/)(?=[, \n])", named("text")["CONTRIBUTING-0"])
    assert len(files) > 20
    assert [name for name in files if not (ROOT / "agilerl" / name).exists()] == []


# -- other programs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*all_of("torchrun"), *all_of("accelerate")])
def test_launchers_parse_their_commands(command: str) -> None:
    program, *rest = words(command)
    if program == "accelerate":
        assert rest.pop(0) == "launch"
    parsed = (get_args_parser() if program == "torchrun" else launch_command_parser()).parse_args(rest)
    config = getattr(parsed, "config_file", None)
    assert config is None or (ROOT / config).is_file()
    assert parsed.module
    assert importlib.util.find_spec(f"{parsed.training_script}.__main__")
    command_line(parsed.training_script_args)


@pytest.mark.parametrize("command", [c for c in (*all_of("python"), *all_of("python3")) if "-m venv" not in c])
def test_scripts_parse_their_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser) -> NoReturn:
        parse(parser)
        raise ParsedError

    _, *rest = words(command)
    path = rest.pop(1).replace(".", "/") + ".py" if rest[0] == "-m" else rest[0]
    monkeypatch.setattr(sys, "argv", rest)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(ParsedError):
        runpy.run_path(str(ROOT / path), run_name="__main__")


@pytest.mark.parametrize("command", all_of("benchmarking/gpu.sh"))
def test_the_script_for_a_gpu_hands_its_arguments_on(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out, device = ROOT / words(command)[0], words(command)[1], words(command)[2:3] or ["cuda"]
    said = subprocess.run(["bash", script, out, *device, "echo"], capture_output=True, text=True, check=True).stdout
    assert shlex.split(said) == [str(script.with_suffix(".py")), out, "--device", *device]
    test_scripts_parse_their_arguments(f"python benchmarking/gpu.py {out} --device {device[0]}", monkeypatch)


@pytest.mark.parametrize("command", all_of("vllm"))
def test_options_of_vllm_are_those_that_its_tests_start_it_with(command: str) -> None:
    """`make test-vllm` does, with vLLM."""
    assert words(command)[1] == "serve"
    tested = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "with_vllm").glob("*.py"))
    assert [word for word in words(command) if word.startswith("--") and f'"{word}"' not in tested] == []
    assert [word for word in shlex.split(command) if re.match("VLLM_", word) and word.split("=")[0] not in tested] == []


@pytest.mark.parametrize("command", all_of("make"))
@pytest.mark.processes
def test_make_targets_exist(command: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    plan = subprocess.run([*words(command), "--dry-run"], cwd=tmp_path, capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr


def test_installation_commands_name_what_is_there() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all_of("pip")
    for command in all_of("pip"):
        install, *rest = words(command)[1:]
        assert install in ("install", "uninstall")
        assert all((ROOT / after).exists() for word, after in itertools.pairwise(rest) if word == "-c")
        assert all(f'"{word}"' in pyproject or word in pins for word in rest if re.match(r"torch\b", word))


def test_no_command_goes_unchecked() -> None:
    assert {words(line)[0] for page in SHOWING for line in commands(page)} <= PROGRAMS


@pytest.mark.parametrize("page", SHOWING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    marks = re.findall(r"^[ >]*(?:`{3,}|~{3,}).*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(marks) == 2 * len(fences(page)), marks
    assert {kind for kind, _ in fences(page)} <= {"bash", "python", "py", "yaml", "json", "text"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_site_shows_lists_as_lists(page: Path) -> None:
    """Its Markdown wants a blank line before a list, and four blanks before what else belongs to an item."""
    item = re.compile(r" *(\* |\d+\. )")
    texts = FENCE.sub("", page.read_text(encoding="utf-8"))
    for part in re.split(r"\n\s*\n", texts):
        first, *rest = part.strip("\n").split("\n")
        assert not re.match(r" {1,3}\S", first), first
        assert item.match(first) or not any(item.match(line) for line in rest), first


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if target.startswith(("https://", "http://")):
            continue
        aim = page.parent / path if path else page
        assert aim.exists(), target
        headings = {
            re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-")
            for h in re.findall(r"^#+ (.*)$", aim.read_text(encoding="utf-8") if anchor else "", re.MULTILINE)
        }
        assert not anchor or anchor in headings, target


def test_the_index_names_every_page() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT) for page in PAGES if page.suffix == ".md"]
    assert [str(page) for page in pages if f"]({page})" not in text] == []


def test_the_documentation_is_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 40_000


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1200
    assert len([line for line in text.splitlines() if line.startswith("|")]) <= 15


def numbers(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.-])\d[\d,.]*(?:\d|M)?\b", text))


def claims() -> list[tuple[str, Path]]:
    """Return the claims of the README, each with the page that it links to as its proof."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## What you get\n", 1)[1].split("\n\n")[0]
    found = re.findall(r"^\* (.*?\[[^]]+\]\((docs/[\w.]+)[^)]*\).*?)(?=\n\*|\Z)", section, re.MULTILINE | re.DOTALL)
    return [(" ".join(claim.split()), ROOT / page) for claim, page in found]


def test_the_readme_has_seven_claims() -> None:
    assert len({page for _, page in claims()}) == 7
    assert all(claim.startswith("**") for claim, _ in claims())


@pytest.mark.parametrize(("claim", "page"), claims(), ids=[page.stem for _, page in claims()])
def test_a_claims_numbers_are_on_the_page_that_proves_it(claim: str, page: Path) -> None:
    assert numbers(re.sub(r"\(docs/[^)]*\)", "", claim)) - numbers(page.read_text(encoding="utf-8")) == set()


def test_the_readmes_links_are_absolute_on_a_package_index(tmp_path: Path) -> None:
    """As `tools/release.sh` makes them; an image needs the file itself, not the page that shows it."""
    copy = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", copy)
    subprocess.run([ROOT / "tools" / "absolute_links.sh", "https://host/name/agilerl", "0.1.0", copy], check=True)
    targets = re.findall(r"(!?)\[[^]]*\]\(([^)\s]+)\)", copy.read_text(encoding="utf-8"))
    assert len(targets) > 20
    for image, target in targets:
        path = target.removeprefix(f"https://host/name/agilerl/{'raw' if image else 'blob'}/v0.1.0/")
        assert (ROOT / path.partition("#")[0]).exists() if path != target else target.startswith("https://"), target
        assert not (path == target and target.startswith("https://host")), target


def test_silent_failures_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "silent_failures.md").read_text(encoding="utf-8")
    statements = re.findall(r"^\* \*\*.*(?:\n  .*)*", page, re.MULTILINE)
    assert len(statements) > 25
    for statement in statements:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", statement)
        assert named, statement
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, test)


def site_pages(entry: object) -> list[str]:
    """Return the files that a part of the site's navigation names."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in site_pages(part)]  # type: ignore[attr-defined]


def test_the_site_names_every_page_once() -> None:
    pages = site_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(pages) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_each_paper_is_listed_with_the_files_that_name_it() -> None:
    names: dict[str, set[str]] = {}
    for file in sorted((ROOT / "agilerl").rglob("*.py")):
        text = " ".join(file.read_text(encoding="utf-8").split())
        for paper in re.findall(r"(?:arXiv |arxiv\.org/abs/)(\d{4}\.\d{5})", text):
            names.setdefault(paper, set()).add(str(file.relative_to(ROOT / "agilerl")))
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\* \[.+\]\(https://arxiv\.org/abs/([\d.]+)\): (.+)$", page, re.MULTILINE)
    assert {paper: set(re.findall(r"`([^`]+)`", files)) for paper, files in rows} == names
    for authors, year, file in re.findall(r"\((\w+)(?: et al\.)?, (\d{4})\)[^(]*?`(\S+\.py)`", page):
        text = (ROOT / "agilerl" / file).read_text(encoding="utf-8")
        assert authors in text, file
        assert year in text, file


def test_the_reference_names_what_exists() -> None:
    entry = re.compile(r"^::: (\S+)\n(?:    options:\n(?:      .*\n)*?      members: \[(.*)\])?", re.MULTILINE)
    named = entry.findall((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    for path, members in named:
        found = pkgutil.resolve_name(path)
        assert [name for name in members.split(", ") if name and not hasattr(found, name)] == [], path


def test_ten_keys_are_ten_and_all_in_the_manifest_that_shows_them() -> None:
    page = ROOT / "docs" / "start.md"
    keys = re.findall(r"^\| `(\w+)\.(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    (manifest,) = [text for text in blocks(page, "yaml") if text.startswith("# ten.yaml")]
    shown = yaml.safe_load(manifest)
    assert len(keys) == 10
    assert [f"{section}.{key}" for section, key in keys if key not in shown[section]] == []


@pytest.mark.nightly
@pytest.mark.processes
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Downloads MkDocs into an environment of its own; `make docs` is the same."""
    done = subprocess.run(
        ["make", "docs", f"DOCS_VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    pages = (ROOT / "build" / "site").glob("*.html")
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {page.stem for page in pages}


def test_the_settings_to_know_first_are_in_the_reference() -> None:
    text = (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\* `([\w.<>\[\]]+)`: ", text, re.MULTILINE)
    first = text.split("to know first\n", 1)[1].split("\n## ", 1)[0]
    sections = re.findall(r"`(\w+)\.([\w.]+)`", first)
    assert len(set(keys)) > 250
    assert len(sections) >= 25
    assert [key for _, key in sections if key not in keys] == []


@pytest.mark.processes
def test_manifest_reference_is_fresh() -> None:
    """`make generated` writes it."""
    done = programs.run(ROOT / "docs" / "generate_reference.py", "--print", cwd=ROOT)
    assert done.stdout == (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8")
