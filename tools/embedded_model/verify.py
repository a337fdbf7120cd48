"""Checksums of the embedded base's files: written when it is built, compared when somebody doubts."""

import hashlib
import json
from pathlib import Path

from agilerl.errors import CheckpointError

CHECKSUMS = "checksums.json"
BUILT_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def write_checksums(folder: Path) -> None:
    """Write the sha256 of every built file in ``folder`` to ``checksums.json`` beside them."""
    sums = {name: _sha256(folder / name) for name in BUILT_FILES}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def differences(folder: Path, reference: Path) -> list[str]:
    """Return a sentence for each file of ``folder`` that is missing or differs from the checksums in ``reference``.

    Raises CheckpointError when ``reference`` has no readable checksums.
    """
    try:
        expected = json.loads((reference / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"expected checksums in {reference / CHECKSUMS}, found none that can be read ({error}); reinstall agilerl"
        ) from error
    found = []
    for name in BUILT_FILES:
        if not (folder / name).is_file():
            found.append(f"{name} is missing from {folder}")
        elif (actual := _sha256(folder / name)) != expected.get(name):
            found.append(f"{name} has sha256 {actual}, expected {expected.get(name)}")
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
