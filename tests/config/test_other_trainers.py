"""Names of other trainers lead to ours: in manifests, on the command line and in Python."""

import ast
import importlib.util
import itertools
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from agilerl import GRPO, train
from agilerl.algorithms import ALGORITHMS
from agilerl.compat.other_trainers import NAMES, ours
from agilerl.config.base_model import SharedOptions
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError
from agilerl.training.resolved import resolve

KEY = re.compile(r"\b(?:algorithm|environment|training|network|selection_strategy)\.\w+(?:\.\w+)*")
ENTRIES = [(trainer, name, text) for trainer, names in NAMES.items() for name, text in names.items()]


def exists(key: str) -> bool:
    section, *rest = key.split(".")
    if section == "algorithm":
        models: list[type[BaseModel]] = [SharedOptions, *(a.Config for a in ALGORITHMS.values())]
        if rest == ["name"]:
            return True
    else:
        models = [RunConfig.model_fields[section].annotation]
    for part in rest:
        inner = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        if not inner:
            return False
        models = [one for kind in inner for one in (kind, *get_args(kind)) if hasattr(one, "model_fields")]
    return True


@pytest.mark.parametrize(("trainer", "name", "text"), ENTRIES)
def test_every_entry_names_keys_that_exist(trainer: str, name: str, text: str) -> None:
    keys = KEY.findall(text)
    assert keys or "--out" in text
    assert [key for key in keys if not exists(key)] == []
    hint = ours(name)
    assert hint is not None
    assert re.search(rf"{trainer}'s [^;]*\b{name} is {re.escape(text)} here", hint)


def test_only_one_name_means_something_else_here() -> None:
    known = {name for model in (SharedOptions, *(a.Config for a in ALGORITHMS.values())) for name in model.model_fields}
    # Of REINFORCE here. Where it is known, it is never looked up.
    assert known & {name for names in NAMES.values() for name in names} == {"advantage_estimator"}


def test_names_of_trl_are_those_of_its_version() -> None:
    home = Path(importlib.util.find_spec("trl").submodule_search_locations[0])  # type: ignore[union-attr, index]
    found = set()
    places = ("trainer/*_config.py", "experimental/cpo/*_config.py", "scripts/utils.py")
    for path in itertools.chain.from_iterable(home.glob(place) for place in places):
        classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        fields = itertools.chain.from_iterable(node.body for node in classes)
        found |= {f.target.id for f in fields if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)}
    transformers = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "eval_steps"}
    transformers |= {"save_steps", "save_total_limit", "output_dir", "lr_scheduler_type", "warmup_steps"}
    gone = {"max_prompt_length", "warmup_ratio", "rpo_alpha"}  # of earlier versions; many programs still have them
    own = {"reward_funcs"}  # an argument of the trainer
    assert set(NAMES["TRL"]) - found == transformers | gone | own


def test_names_of_tunix_lead_to_those_of_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from_tunix.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (GRPO|PPO) \|", page, re.MULTILINE)
    assert len(rows) > 20
    for theirs, name, algorithm in rows:
        if theirs in ALGORITHMS[algorithm].Config.model_fields or theirs in SharedOptions.model_fields:
            assert theirs == name  # it is never looked up
        else:
            with pytest.raises(ConfigError, match=rf"{theirs} is [^;]*\b{name}\b"):
                ALGORITHMS[algorithm](**{theirs: 1})
            with pytest.raises(ConfigError, match=rf"{theirs} is algorithm\.[^;]*\b{name}\b"):
                resolve(load_manifest(None, [f"{theirs}=1"]))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm.num_generations=4", "algorithm.group_size"),
        ("training.learning_rate=1e-5", "algorithm.lr"),
        ("per_device_train_batch_size=8", "algorithm.batch_size"),
        ("actor_rollout_ref.rollout.n=8", "algorithm.group_size"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.beta"),
        ("network.lora_config.lora_rank=8", "network.lora_config.r"),
        ("algorithm.chat_template_kwargs={enable_thinking: false}", "network.chat_template_kwargs"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "training.eval_samples"),
        ("training.num_train_epochs=3", "training.num_epochs"),
    ],
)
def test_overrides(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        resolve(load_manifest(None, [override]))


def test_a_section_of_another_trainer_is_looked_through(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    actor = "{ppo_epochs: 2, optim: {lr: 1e-6}}"
    path.write_text(f"algorithm: {{name: GRPO}}\nactor_rollout_ref: {{actor: {actor}, rollout: {{n: 5}}}}\n")
    with pytest.raises(ConfigError) as raised:
        load_manifest(path)
    assert all(key in str(raised.value) for key in ("algorithm.update_epochs", "algorithm.lr", "algorithm.group_size"))


def test_keywords_of_python() -> None:
    with pytest.raises(ConfigError, match=r"max_completion_length.*max_output_tokens"):
        GRPO(max_completion_length=10)
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
        ("learning_rate", "algorithm.lr"),
        ("loss", "docs/losses.md"),
        ("populaton", "population"),
    ],
)
def test_an_argument_that_train_lacks_leads_to_its_place(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        train(task="gcd", **{name: 1})
