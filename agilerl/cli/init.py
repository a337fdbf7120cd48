"""``agilerl init``: ask three questions, and write the files of a run that can start at once.

What it proposes follows from the answers in the rows: how they are asked for and graded, and how long they may get.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer import Argument, Option

from agilerl.checks.arguments import counted, shown
from agilerl.cli.options import Quiet, as_path
from agilerl.cli.output import console, facts
from agilerl.cli.running import configuration, quieten_libraries
from agilerl.config.named_files import ENDINGS, names_a_file
from agilerl.errors import AgileRLError, ConfigError, WriteError

SAMPLE = "sample"
REWARDS = ("function", "exact", "accuracy")
_EMBEDDED = "embedded"
_NUMBER = re.compile(r"[-+]?[$€£]?\d[\d,]*(\.\d+)?%?")
_WORDS = 5
"""Most words of a short answer."""
_CHARACTERS = 2
"""Of a token, at least: a bound on the tokens of an answer that needs no tokenizer."""
_REASONING = 128
"""Tokens that a chat model has to write before its answer."""

_MANIFEST = """\
# Written by agilerl init. Every key: docs/manifest.md. Check it, then run it:
# {command} --dry-run
# {command}
network:
  pretrained_model_name_or_path: {model}

environment:
  {source}
  eval_prompts: {exam:<16} # the exam that selection uses
  test_prompts: {test:<16} # the test of the result
{graders}{form}  data_batch_size_per_gpu: 16   # prompts of each agent in an iteration

algorithm:
  name: GRPO
  group_size: 8                 # completions of each prompt, which are compared with one another
  batch_size: 64
  max_output_tokens: {tokens:<11} # the longest answer

training:
  max_steps: 24576              # completions of all agents together
  # pop_size: 4                 # agents; without it 4, or fewer if max_steps is small: more agents need more of it
"""
_REWARD = '''\
"""The reward of {manifest}: the function is called for every completion, with columns of the row by their names."""

import re


def reward(completion: str, answer: str) -> float:
    """Return a score: here 1 for the answer, a tenth for another number, 0 for anything else."""
    given = completion.strip()
    if given == answer.strip():
        return 1.0
    return 0.1 if re.fullmatch(r"-?\\d+", given) else 0.0
'''


def run_init(
    manifest: Annotated[Path, Argument(metavar="MANIFEST", help="The new manifest.", parser=as_path)] = Path("my.yaml"),
    *,
    model: Annotated[
        str | None, Option(help="A folder, a .gguf file, a name on the Hugging Face hub, or embedded.")
    ] = None,
    source: Annotated[
        str | None, Option("--data", help="A file of rows, a dataset on the hub, reasoning_gym:NAME, or sample.")
    ] = None,
    question: Annotated[str | None, Option(help="The column of the rows that is the question.")] = None,
    answer: Annotated[str | None, Option(help="The column of the rows that is the answer.")] = None,
    reward: Annotated[str | None, Option(help="function, exact or accuracy.")] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Ask nothing: take the defaults.")] = False,
    quiet: Quiet = False,
) -> None:
    """Ask three questions (model, data or task, reward), and write a manifest and the files it needs.

    Given a file of rows, it reads the answers and proposes a reward, an instruction, an answer format and lengths to
    match. If the columns' names do not make clear which is the question and which the answer, pass --question and
    --answer. The base then answers a question of the new run, unless --quiet is given. The other
    files are a reward function and sample rows, as asked for. No file is overwritten. Without a terminal nothing is
    asked.

    agilerl init my.yaml --model embedded --data sample --reward function
    """
    from agilerl.envs.curation import few_rows

    # Answers to the questions
    if manifest.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"expected a manifest NAME.yaml, found {shown(str(manifest))}; for instance my.yaml")
    rows, code = (manifest.with_name(f"{manifest.stem}_{name}") for name in ("rows.jsonl", "reward.py"))
    # exists() is False for a link that leads nowhere.
    taken = next((path for path in (manifest, rows, code) if path.exists() or path.is_symlink()), None)
    if taken is not None:
        raise ConfigError(f"{shown(str(taken))} exists, and is not overwritten; choose another name for the manifest")
    asks = not yes and sys.stdin.isatty()
    model = _answer("Model (a folder, a name on the hub, or embedded)", _EMBEDDED, model, asks, _check_model)
    names = {name: column for name, column in (("question", question), ("answer", answer)) if column is not None}
    wanted = "Data or task (a file, a dataset, reasoning_gym:NAME, or sample)"
    source = _answer(wanted, SAMPLE, source, asks, lambda text: _source_line(text, manifest, rows, names))
    answers = [row["answer"] for row in sample_rows()] if source == SAMPLE else []
    if names_a_file(source) and (path := Path(source).expanduser()).is_file():
        names, answers = _read(path, names)
    proposal = propose(answers, chats=model != _EMBEDDED) if answers else Proposal()
    screen = console(quiet=quiet)
    if names:
        screen.print(f"Columns: {', '.join(f'{name} from {column}' for name, column in names.items())}")
    if answers and reward is None:
        screen.print(f"{counted(len(answers), 'row')}: {proposal.reason}")
    wanted = "Reward (function: your own, exact, accuracy: the number)"
    default = "function" if source == SAMPLE else proposal.reward
    reward = _answer(wanted, default, reward, asks, _check_reward)

    # The files to write
    command = f"agilerl train {shlex.quote(str(manifest))}{' --allow-code' * (reward == 'function')}"
    count = len(answers)
    # At most a fifth and a quarter of the rows, so that more than half are left for training.
    exam, test = (max(2, min(128, count // 5)), max(2, min(400, count // 4))) if count else (128, 400)
    grader = {"function": f"{code.name}:reward", "accuracy": "accuracy"}.get(reward)
    text = _MANIFEST.format(
        command=command,
        model=_yaml(model),
        source=_source_line(source, manifest, rows, names),
        exam=exam,
        test=test,
        graders="" if grader is None else f"  graders: [{{name: {_yaml(grader)}}}]\n",
        form="".join(f"  {line}\n" for line in proposal.form(reward)),
        tokens=max(10, proposal.tokens) if answers or model == _EMBEDDED else 256,
    )
    files = {manifest: text}
    if source == SAMPLE:
        files[rows] = "".join(json.dumps(row) + "\n" for row in sample_rows())
    if reward == "function":
        files[code] = _REWARD.format(manifest=manifest.name)
    _write(files)
    for path in files:
        screen.print(f"wrote {path}")
    if answers and (few := few_rows({"read": count, "train": count - exam - test, "exam": exam, "test": test})):
        screen.print(f"warning: {few}")
    # A first trial
    if not quiet:
        screen.print("Trying it: loading the libraries and the model.")
        quieten_libraries()
        screen.print(facts(_try_out(manifest, allow_code=reward == "function")))  # the one written here, and no other
    for name, line in (("Check it:", f"{command} --dry-run"), ("Run it:", command)):
        screen.print(f"{name:<11}{line}", soft_wrap=True)  # to be copied whole


@dataclass(frozen=True)
class Proposal:
    """What the answers of some rows ask for."""

    reward: str = "function"
    reason: str = ""
    instruction: str = ""
    """What a prompt ends with."""
    after: bool = False
    """Whether the model may write before its answer, which then follows a phrase."""
    tokens: int = 0
    """``max_output_tokens``; 0: nothing is known."""

    def form(self, reward: str) -> list[str]:
        """Return the lines of the manifest that ask for an answer in this form; a function reads whole completions."""
        if self.after and reward != "function":
            return ['answer_format: after           # what follows "The answer is" in a completion is graded']
        if not self.instruction:
            return []
        message = json.dumps(f"{{question}}\n{self.instruction}", ensure_ascii=False)
        return [f"conversation_template: [{{role: user, content: {message}}}]"]


def propose(answers: Sequence[str], *, chats: bool) -> Proposal:
    """Return what to propose for rows with these answers: numbers, short texts, or long ones.

    ``chats``: the model follows instructions, and writes more than the answer unless it is told not to.
    """
    answers = [" ".join(answer.split()) for answer in answers]
    words = max(len(answer.split()) for answer in answers)
    tokens = 8 * ceil((max(map(len, answers)) / _CHARACTERS + 4) / 8)
    if all(_NUMBER.fullmatch(answer) for answer in answers):
        reward = "accuracy" if find_spec("math_verify") else "exact"
        reason = f"all answers are numbers, so the reward {reward} is proposed"
        return Proposal(reward, reason, after=chats, tokens=tokens + _REASONING * chats)
    if words <= _WORDS:
        reason = f"answers have {counted(words, 'word')} at most, so the reward exact is proposed"
        return Proposal("exact", reason, "Give only the answer, without an explanation." * chats, tokens=tokens)
    reason = f"answers are texts of up to {words} words, which seldom match exactly: a function is proposed"
    return Proposal("function", reason, tokens=min(1024, tokens))


def _read(path: Path, renamings: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return what columns of a file of rows are renamed to, as given or guessed by their names; and its answers."""
    from agilerl.envs.curation import MissingColumnError, RowFaultError, form_of, guess_columns
    from agilerl.envs.sources import read_dataset

    columns, answers = read_dataset(path, limit=1).columns, []
    names = guess_columns([name for name in columns if name not in renamings.values()]) | renamings
    rows = read_dataset(path, columns=names)
    try:
        form = form_of(rows.columns, "reasoning", path.name, needs="text")
    except MissingColumnError as error:
        raise ConfigError(
            f"expected the column {error.column} in {path.name}, found {', '.join(columns)}; say which of them it is: "
            f"--{error.column} NAME"
        ) from None
    for row in rows:
        with suppress(RowFaultError):  # a run says how many rows it cannot use
            answers.append(form.read(row).response or "")
    return names, list(filter(str.strip, answers))


def _try_out(manifest: Path, *, allow_code: bool) -> Iterator[tuple[str, str]]:
    """Yield the lines of a plan about what a run begins with: an answer of the base, its exam, and its time."""
    from agilerl.cli.progress import plan_document
    from agilerl.models.base import is_of_hub
    from agilerl.training.preflight import tried
    from agilerl.training.setup import build

    config = configuration([str(manifest)])
    # It may be gigabytes, and the user has not agreed to a download yet.
    if is_of_hub(config.network.pretrained_model_name_or_path):
        yield "model", "not tried here, because it may have to be downloaded; the dry run does that"
        return
    try:
        session = build(config, allow_code=allow_code)
        lines = plan_document(session, Path(), tried(session), timed=True)["lines"]
        session.task.close()
    except AgileRLError as error:
        lines = [{"name": "warning", "text": str(error)}]
    for line in lines:
        if line["name"] in ("prompt", "answer", "base", "warning", "exam", "time"):
            yield line["name"], line["text"]


def sample_rows() -> list[dict[str, str]]:
    """Return 405 sums of three digits as rows with question and answer, in words that the embedded model knows."""
    words = "State the final answer to the following arithmetic problem: {} + {} + {} ="
    digits = [(a, b, c) for a in range(1, 10) for b in range(1, 10) for c in range(1, 6)]
    return [{"question": words.format(*terms), "answer": str(sum(terms))} for terms in digits]


def _answer(question: str, default: str | None, stated: str | None, asks: bool, check: Callable[[str], object]) -> str:
    """Return what an option says, else what the user answers, else the default; ``check`` refuses wrong answers."""

    def checked(text: str) -> str:
        try:
            check(text.strip())
        except AgileRLError as error:
            raise typer.BadParameter(str(error)) from error  # typer prints it, and asks again
        return text.strip()

    if stated is None and asks:
        return str(typer.prompt(question, default=default, value_proc=checked))
    answer = default if stated is None else stated.strip()
    if not answer:
        raise ConfigError(f"expected an answer, found an empty text: {question}")
    check(answer)
    return answer


def _check_model(model: str) -> None:
    path = Path(model).expanduser()
    if model.startswith((".", "/", "~")) and not (path.is_dir() or path.is_file()):
        raise ConfigError(f"expected a model's folder or .gguf file, found none at {shown(model)}")


def _check_reward(reward: str) -> None:
    if reward not in REWARDS:
        raise ConfigError(f"expected the reward as one of {', '.join(REWARDS)}, found {shown(reward)}")


def _source_line(source: str, manifest: Path, rows: Path, names: dict[str, str]) -> str:
    """Return the manifest's setting of the data or task, with columns renamed; raises ConfigError or EnvError."""
    if names and (source == SAMPLE or source.startswith("reasoning_gym:")):
        raise ConfigError(f"--question and --answer are columns of rows, found {shown(source)}; leave them out")
    from agilerl.envs.sources import read_dataset

    if source == SAMPLE:
        return f"dataset: {_yaml(rows.name)}"
    if source == "reasoning_gym:":
        raise ConfigError("expected the name of a task after reasoning_gym:, found none; for instance gcd")
    if source.startswith("reasoning_gym:"):
        return f"task: {_yaml(source)}"
    if source.startswith("agilerl/") or ("." in source.partition(":")[0] and ":" in source):
        raise ConfigError(f"expected rows or a task, found an environment: {shown(source)}; see docs/environments.md")
    if names_a_file(source):
        path, folders = Path(source).expanduser().resolve(), (manifest.parent.resolve(), Path.cwd().resolve())
        if not path.is_file():
            raise ConfigError(f"expected a file of rows ({', '.join(ENDINGS)}), found none at {shown(source)}")
        folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
        if folder is None:
            raise ConfigError(
                f"expected rows in the folder of the manifest or below, found {shown(source)}; move the file there"
            )
        read_dataset(path, limit=1)
        source = str(path.relative_to(folder))
    return f"dataset: {_yaml({'path': source, 'columns': names} if names else source)}"


def _yaml(value: str | dict[str, Any]) -> str:
    """Return a value as YAML on one line, its texts quoted where they need it."""
    # Wider than any value: PyYAML breaks lines at the width.
    text = yaml.safe_dump(value, width=10_000, allow_unicode=True, default_flow_style=True, sort_keys=False)
    return str(text).partition("\n")[0]  # PyYAML ends a document of one scalar with a line of dots


def _write(files: dict[Path, str]) -> None:
    """Write new files, and check the first, the manifest; after an error none of them is there."""
    from agilerl.envs.upstream import check_task

    written: list[Path] = []
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # x: a file that has appeared in the meantime is not overwritten either.
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
        check_task(configuration([str(next(iter(files)))]).environment)  # without loading the model or the rows
    except (OSError, AgileRLError) as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError(f"{error.filename or 'a file'} could not be written: {error.strerror or error}") from error
        raise
