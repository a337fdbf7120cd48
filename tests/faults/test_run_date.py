"""A chat template that shows the date: one date for a whole run, in every process, also when it is resumed."""

import json
import warnings
from datetime import datetime
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.envs.prompts import render_prompt, render_text
from agilerl.errors import CheckpointError, ConfigError
from agilerl.models.base import load_tokenizer, resolve_model
from agilerl.runs.directory import RunDirectory
from agilerl.text.templates import at_date, now
from agilerl.training.resolved import resolve
from agilerl.training.run import resume, train
from agilerl.training.saved import open_run
from agilerl.training.setup import build
from tests.distributed.together import Job, run_jobs
from tests.faults.evidence import SHORT, differences, evidence
from tests.faults.pieces import finish, until
from tests.faults.unfinished import change_json

LONG_AGO = datetime(2023, 12, 31, 23, 59, 58)
QUICK = (*SHORT, "training.pop_size=2", "training.max_steps=128")
QUESTION = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a chat template that shows the date, to the second."""
    folder = tmp_path_factory.mktemp("dated")
    for file in Path(resolve_model("embedded")).iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer("embedded")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    template = "{{ strftime_now('%Y %m %d %H %M %S') }}" + tokenizer.chat_template
    change_json(folder / "tokenizer_config.json", lambda values: {**values, "chat_template": template})
    return folder


def dated(model: Path, *overrides: str) -> RunConfig:
    return load_manifest(None, [*QUICK, f"network.pretrained_model_name_or_path={model}", *overrides])


def leave(config: RunConfig, root: Path, after: int) -> None:
    """Leave a run after an iteration; after 0, before it has learned anything."""
    events = train(build(config), root, command=["test"])
    until(events, after) if after else next(events)
    events.close()  # type: ignore[attr-defined]


def test_a_template_gets_the_date_of_the_run_and_without_a_run_that_of_the_clock(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    with at_date(LONG_AGO):
        assert render_text(tokenizer, QUESTION).startswith("2023 12 31 23 59 58")
        with at_date(datetime(2024, 1, 1)):
            assert render_text(tokenizer, QUESTION).startswith("2024 01 01 00 00 00")
        ids = render_prompt(tokenizer, QUESTION)
        assert tokenizer.decode(ids) == render_text(tokenizer, QUESTION)
    assert now().year > 2023
    assert render_text(tokenizer, QUESTION).startswith(f"{now().year} ")


@pytest.mark.model
def test_a_run_resumed_on_another_day_has_the_same_bits(model: Path, tmp_path: Path) -> None:
    config = dated(model).dated(LONG_AGO)
    for _ in train(build(config), tmp_path / "whole", command=["test"]):
        pass
    for after in (0, 3):  # before the first checkpoint, and after it
        root = tmp_path / f"run {after}"
        leave(config, root, after)
        assert json.loads((root / "run.json").read_text())["date"] == "2023-12-31T23:59:58"
        finish(root, print)
        found = differences(evidence(root), evidence(tmp_path / "whole"))
        assert [name for name in found if name != "journal.jsonl"] == []


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.processes
def test_two_processes_have_one_date(model: Path, tmp_path: Path) -> None:
    override = f"network.pretrained_model_name_or_path={model}"
    run_jobs(
        2,
        Job(tmp_path / "two", (*QUICK, override), leave_after=1),
        Job(tmp_path / "two", (*QUICK, override), goes_on=True),
    )
    date = datetime.fromisoformat(json.loads((tmp_path / "two" / "run.json").read_text())["date"])
    for _ in train(build(dated(model).dated(date)), tmp_path / "one", command=["test"]):
        pass
    found = differences(evidence(tmp_path / "two"), evidence(tmp_path / "one"))
    assert [name for name in found if name != "journal.jsonl"] == []


def test_a_run_of_an_older_version_takes_the_day_it_was_started(tmp_path: Path) -> None:
    root = tmp_path / "run"
    RunDirectory.create(root, resolve(load_manifest(None)).document(), 1).close()
    change_json(root / "run.json", lambda info: info.pop("date") and {**info, "started": "2023-05-06T12:00:00+00:00"})
    saved = open_run(root, report=print)
    assert saved.config.date is not None
    assert saved.config.date.date() == datetime(2023, 5, 6).date()


@pytest.mark.model
def test_another_date_than_that_of_the_run_is_refused_where_it_is_shown(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    leave(dated(model).dated(LONG_AGO), root, 3)
    saved = open_run(root, report=print)
    with pytest.raises(ConfigError, match="2023-12-31"):
        next(resume(build(saved.config.dated(None), saved.checkpoint), saved.run))
    plain = load_manifest(None, QUICK).dated(LONG_AGO)
    leave(plain, tmp_path / "plain", 3)
    saved = open_run(tmp_path / "plain", report=print)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(resume(build(saved.config.dated(None), saved.checkpoint), saved.run))


@pytest.mark.parametrize("date", ["today", "2024-01-01T00:00:00+00:00", 5])
def test_what_is_no_date_is_refused(date: object, tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", resolve(load_manifest(None)).document(), 1).close()
    change_json(tmp_path / "run" / "run.json", lambda info: {**info, "date": date})
    with pytest.raises(CheckpointError, match="dates"):
        open_run(tmp_path / "run", report=print)
