"""Names that nothing has lead to the nearest one: in manifests, on the command line and in Python."""

import re
from pathlib import Path

import pytest

from agilerl import GRPO, train
from agilerl.config.manifest import load_manifest
from agilerl.errors import ConfigError


def test_keywords_of_python() -> None:
    with pytest.raises(ConfigError, match="did you mean 'group_size'"):
        GRPO(gruop_size=10)


@pytest.mark.parametrize(
    ("name", "place"),
    [("lr", "algorithm.lr"), ("max_tokens", "training.max_tokens"), ("dataset", "environment.dataset")],
)
def test_our_own_names_lead_to_their_section(name: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text(f"{name}: 7\n")
    for manifest, overrides in ((None, [f"{name}=7"]), (tmp_path / "flat.yaml", [])):
        with pytest.raises(ConfigError, match=f"unknown key '{name}'; did you mean '{place}'"):
            load_manifest(manifest, overrides)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lr", "algorithm={'lr': 1}"),
        ("max_steps", "training={'max_steps': 1}"),
        ("loss", "docs/losses.md"),
        ("populaton", "population"),
    ],
)
def test_an_argument_that_train_lacks_leads_to_its_place(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        train(task="gcd", **{name: 1})
