"""``agilerl init``: three questions, and the files of a run of one's own that runs at once."""

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import typer
import yaml

from agilerl.arguments import shown
from agilerl.bounds import check_file, memory_bytes
from agilerl.cli.output import console
from agilerl.config.named_files import ENDINGS, names_a_file
from agilerl.errors import AgileRLError, ConfigError, WriteError

SAMPLE = "sample"
REWARDS = ("function", "exact", "accuracy")
_EMBEDDED = "embedded"
_LINES = (".jsonl", ".ndjson", ".csv", ".tsv")

_MANIFEST = """\
# Written by agilerl init. Every key: docs/manifest.md. Check it, then run it:
# {check}
# {run}
network:
  pretrained_model_name_or_path: {model}

environment:
{source}{graders}  data_batch_size_per_gpu: 16   # prompts of each agent in an iteration

algorithm:
  name: GRPO
  group_size: 8                 # completions of each prompt, which are compared with one another
  batch_size: 64
  max_output_tokens: {tokens}{room}

training:
  pop_size: 4
  max_steps: 24576              # completions of all agents together
"""
_REWARD = '''\
"""The reward of {manifest}: the function is called for every completion, with columns of the row by their names."""

import re


def reward(completion: str, answer: str) -> float:
    """Return a score: here 1 for the answer, a tenth for another number, 0 for anything else."""
    said = completion.strip()
    if said == answer.strip():
        return 1.0
    return 0.1 if re.fullmatch(r"-?\\d+", said) else 0.0
'''


def run_init(
    manifest: Path, *, model: str | None, source: str | None, reward: str | None, yes: bool, quiet: bool
) -> None:
    """Ask for what is not given, and write the files; see ``agilerl init --help``.

    Raises ConfigError, having written nothing, for a wrong answer in an option, and if one of the files exists.
    """
    if manifest.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"expected a manifest NAME.yaml, found {shown(str(manifest))}; for instance my.yaml")
    rows, code = (manifest.with_name(f"{manifest.stem}_{name}") for name in ("rows.jsonl", "reward.py"))
    _check_free(manifest, rows, code)
    asks = not yes and sys.stdin.isatty()
    place = manifest.parent
    wanted = "Model (a folder, a name on the Hugging Face hub, or the package's own)"
    model = _answer(wanted, _EMBEDDED, model, asks, _check_model)
    wanted = "Data or task (a file of rows, a dataset on the hub, reasoning_gym:NAME, or sample rows)"
    source = _answer(wanted, SAMPLE, source, asks, lambda text: _check_source(text, place))
    wanted = "Reward (function: yours to edit, exact: the whole answer, accuracy: the number in it)"
    reward = _answer(wanted, "function", reward, asks, _check_reward)

    files = {manifest: _manifest_text(manifest, model, source, reward, rows, code)}
    if source == SAMPLE:
        files[rows] = "".join(json.dumps(row) + "\n" for row in sample_rows())
    if reward == "function":
        files[code] = _REWARD.format(manifest=manifest.name)
    _write(files)
    screen = console(quiet=quiet)
    for path in files:
        screen.print(f"wrote {path}", soft_wrap=True)
    screen.print(f"Check it:  {_command(manifest, reward)} --dry-run", soft_wrap=True)
    screen.print(f"Run it:    {_command(manifest, reward)}", soft_wrap=True)


def sample_rows() -> list[dict[str, str]]:
    """Return 405 sums of three digits as rows with question and answer, in words that the embedded model knows."""
    words = "State the final answer to the following arithmetic problem: {} + {} + {} ="
    digits = [(a, b, c) for a in range(1, 10) for b in range(1, 10) for c in range(1, 6)]
    return [{"question": words.format(*terms), "answer": str(sum(terms))} for terms in digits]


def _answer(
    question: str, default: str, given: str | None, asks: bool, check: Callable[[str], None] = lambda _: None
) -> str:
    """Return what an option says, else what the user answers, else the default."""

    def checked(text: str) -> str:
        try:
            check(text.strip())
        except AgileRLError as error:
            raise typer.BadParameter(str(error)) from error  # typer asks again
        return text.strip()

    if given is None and asks:
        return str(typer.prompt(question, default=default, value_proc=checked))
    chosen = default if given is None else given.strip()
    if not chosen:
        raise ConfigError(f"expected an answer, found an empty text: {question}")
    check(chosen)
    return chosen


def _check_model(model: str) -> None:
    path = Path(model).expanduser()
    if model.startswith((".", "/", "~")) and not (path.is_dir() or path.is_file()):
        raise ConfigError(f"expected a model's folder or .gguf file, found none at {shown(model)}")


def _check_source(source: str, place: Path) -> None:
    if source == SAMPLE or source.startswith("reasoning_gym:"):
        if source == "reasoning_gym:":
            raise ConfigError("expected the name of a task after reasoning_gym:, found none; for instance gcd")
        return
    if source.startswith("agilerl/") or ("." in source.partition(":")[0] and ":" in source):
        raise ConfigError(f"expected rows or a task, found an environment: {shown(source)}; see docs/environments.md")
    if names_a_file(source):
        path = Path(source).expanduser()
        if not path.is_file():
            raise ConfigError(f"expected a file of rows ({', '.join(ENDINGS)}), found none at {shown(source)}")
        if not any(path.resolve().is_relative_to(root.resolve()) for root in (place, Path.cwd())):
            raise ConfigError(
                f"expected rows in the folder of the manifest or below, found {shown(source)}; move the file there"
            )
        _renamed(path)


def _renamed(path: Path) -> dict[str, str]:
    """Return what to rename in a file of rows; raises EnvError if it has no question, or no answer, under any name."""
    from agilerl.envs.curation import form_of, renamed
    from agilerl.envs.sources import read_dataset

    columns = read_dataset(path, limit=1).columns
    found = renamed(columns)
    form_of([*columns, *found], "reasoning", path.name, needs="text")
    return found


def _check_reward(reward: str) -> None:
    if reward not in REWARDS:
        raise ConfigError(f"expected the reward as one of {', '.join(REWARDS)}, found {shown(reward)}")


def _check_free(*files: Path) -> None:
    taken = next((path for path in files if path.exists() or path.is_symlink()), None)
    if taken is not None:
        raise ConfigError(f"{shown(str(taken))} exists, and is not overwritten; choose another name for the manifest")


def _command(manifest: Path, reward: str) -> str:
    return f"agilerl train {shlex.quote(str(manifest))}{' --allow-code' * (reward == 'function')}"


def _manifest_text(manifest: Path, model: str, source: str, reward: str, rows: Path, code: Path) -> str:
    """Return the manifest, having checked it and what it names."""
    own = model == _EMBEDDED
    if source.startswith("reasoning_gym:"):
        lines = [f"  task: {_yaml(source)}"]
    else:
        place = _yaml(rows.name if source == SAMPLE else _beside(manifest, source))
        theirs = _renamed(Path(source).expanduser()) if source != SAMPLE and names_a_file(source) else {}
        columns = ", ".join(f"{own}: {_yaml(name)}" for own, name in theirs.items())
        lines = [f"  dataset: {{path: {place}, columns: {{{columns}}}}}" if theirs else f"  dataset: {place}"]
    count = len(sample_rows()) if source == SAMPLE else _count(source)
    exam, test = (128, 400) if count is None else (max(2, min(128, count // 8)), max(2, min(400, count // 4)))
    lines += [f"  eval_prompts: {exam:<16} # the exam that selection uses"]
    lines += [f"  test_prompts: {test:<16} # the test of the result"]
    named = {"function": f"{code.name}:reward", "accuracy": "accuracy"}.get(reward)
    return _MANIFEST.format(
        check=f"{_command(manifest, reward)} --dry-run",
        run=_command(manifest, reward),
        model=_yaml(model),
        source="".join(f"{line}\n" for line in lines),
        graders="" if named is None else f"  graders: [{{name: {_yaml(named)}}}]\n",
        tokens=10 if own else 256,
        room="" if own else "        # the longest answer",
    )


def _beside(manifest: Path, source: str) -> str:
    """Return how a manifest names a file: from its own folder, else from the working directory; a dataset as it is."""
    path = Path(source).expanduser()
    if not names_a_file(source):
        return source
    for root in (manifest.parent, Path.cwd()):
        with suppress(ValueError):
            return str(path.absolute().relative_to(root.absolute()))
    return source


def _count(source: str) -> int | None:
    """Return the number of lines of a file of rows; None for what is not a text of one row a line.

    A line may be as long as the file, so it is read in pieces.
    """
    path = Path(source).expanduser()
    if not (names_a_file(source) and path.suffix.lower() in _LINES):
        return None
    try:
        memory = memory_bytes()
        check_file(path, None if memory is None else memory // 8)
        lines, inside = 0, False
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                first, *rest = piece.split(b"\n")
                inside = inside or bool(first.strip())
                for part in rest:
                    lines, inside = lines + inside, bool(part.strip())
        return lines + inside
    except OSError as error:
        raise ConfigError(f"{shown(source)} cannot be read: {error.strerror or error}") from error


def _yaml(text: str) -> str:
    """Return a text as YAML that stands for it, quoted where that needs it."""
    return str(yaml.safe_dump(text, width=10_000, allow_unicode=True)).partition("\n")[0]


def _write(files: dict[Path, str]) -> None:
    """Write new files, and check the first, the manifest; after an error none of them is there."""
    written: list[Path] = []
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
        _check_manifest(next(iter(files)))
    except (OSError, AgileRLError) as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise ConfigError(f"{shown(str(error.filename))} exists, and is not overwritten") from error
        if isinstance(error, OSError):
            raise WriteError(f"{error.filename or 'a file'} could not be written: {error.strerror or error}") from error
        raise


def _check_manifest(path: Path) -> None:
    """Check names and values, without loading the model or the rows."""
    from agilerl.cli.running import configuration
    from agilerl.envs.upstream import check_task

    check_task(configuration([str(path)]))
