"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option


def as_path(text: str) -> Path:
    """Return a path; pathlib would read an empty text (e.g. an unset variable) as the working directory."""
    if not text:
        raise typer.BadParameter("expected a path, found an empty text; '.' is the working directory")
    return Path(text)


def _settings(incomplete: str) -> list[str]:
    """Return what completes the start of ``section.key=value``, or of a manifest's name."""
    from agilerl.config.declared import HYPERPARAMETERS
    from agilerl.config.run import RunConfig

    section, dot, _ = incomplete.partition(".")
    if not dot:
        names = [str(path) for path in sorted(Path().iterdir()) if path.suffix in (".yaml", ".yml")]
        sections = [f"{field_name}." for field_name in RunConfig.model_fields]
        return [name for name in [*names, *sections] if name.startswith(section)]
    if section == "algorithm":
        keys = {"name", *HYPERPARAMETERS}
    else:
        field = RunConfig.model_fields.get(section)
        keys = set(getattr(None if field is None else field.annotation, "model_fields", ()))
    return [key for name in sorted(keys) if (key := f"{section}.{name}=").startswith(incomplete)]


Arguments = Annotated[
    list[str] | None,
    Argument(
        metavar="MANIFEST | KEY.PATH=VALUE",
        help="A YAML manifest (without one: the embedded default) and settings that override it.",
        autocompletion=_settings,
    ),
]
AdapterPath = Annotated[
    Path,
    Argument(
        metavar="RUN_OR_ADAPTER",
        help="A run directory, which stands for its elite; or an adapter: RUN/elite, an agent of a checkpoint, a PEFT "
        "folder.",
        parser=as_path,
    ),
]
Replacements = Annotated[
    list[str] | None,
    Argument(
        metavar="KEY.PATH=VALUE",
        help="Settings that replace the run's; for an adapter without a run also a manifest.",
    ),
]
OneRun = Annotated[Path, Argument(metavar="RUN", help="Run directory.", parser=as_path)]
FinishedRun = Annotated[Path, Argument(metavar="RUN", help="Directory of a finished run.", parser=as_path)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print errors only.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object for programs to read.")]
LogFormat = Annotated[
    Literal["text", "json"], Option("--log-format", help="json: plan, progress and result as JSON objects, one a line.")
]
AllowCode = Annotated[
    bool,
    Option(
        "--allow-code",
        help="Run the Python code that the manifest names (rewards.py:my_reward, module:Name); read it first.",
    ),
]
Temperature = Annotated[
    float, Option("--temperature", metavar="N", min=0.0, max=100.0, help="0: the most likely token.")
]
