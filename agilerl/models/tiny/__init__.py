"""The embedded base model: small, shipped inside the package, careless on purpose (see README.md beside this file)."""

from pathlib import Path

__all__ = ["tiny_model_path"]


def tiny_model_path() -> Path:
    """Return the folder of the embedded base, ready for ``from_pretrained``; nothing is imported or read."""
    return Path(__file__).resolve().parent
