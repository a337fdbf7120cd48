"""Commands on real models, and what these compute."""

from pathlib import Path

import torch

from tests.programs import Program

ROOT = Path(__file__).parents[2]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


def agilerl(place: Path, *arguments: str) -> Program:
    return Program("-m", "agilerl", *arguments, cwd=place)


def done(place: Path, *arguments: str) -> str:
    """Return what a command printed that has to succeed."""
    program = agilerl(place, *arguments)
    output, errors = program.communicate()
    assert program.returncode == 0, output + errors
    return output


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]
