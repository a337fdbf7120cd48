"""Every setting of a manifest is read somewhere, and what is written in a manifest reaches what it is about."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

import agilerl
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.training.setup import Session, build
from tests.training.small_runs import SMALL

PACKAGE = Path(agilerl.__file__).parent
NOT_READ = {"env_type"}
"""Has one value so far in a manifest of this kind; it says which settings apply."""


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return a model and all models inside it."""
    found = [model]
    for field in model.model_fields.values():
        parts = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += sections(part)
    return found


@cache
def names_read() -> frozenset[str]:
    """Return all attributes that the package reads, declarations and assignments to them left out."""
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    return frozenset(read)


def passed_whole() -> set[str]:
    """Return the settings of sections that are handed on as they are (``LoraConfig(**section.model_dump())``).

    For each strategy's settings see ``test_strategies_in_manifests.py``.
    """
    whole = ("LoraSection", "QuantizationConfig", "VLLMConfig", "LRSchedule")
    return {name for s in sections(RunConfig) if s.__name__ in whole for name in s.model_fields}


SETTINGS = sorted({(s.__name__, name) for s in sections(RunConfig) for name in s.model_fields})


@pytest.mark.parametrize(("section", "name"), SETTINGS)
def test_every_setting_is_read(section: str, name: str) -> None:
    assert name in names_read() | passed_whole() | NOT_READ


def test_the_walk_finds_nested_sections_and_would_find_a_dead_setting() -> None:
    assert {"RunConfig", "TrainingConfig", "ProbabilityConfig", "GeneConfig", "LoraSection"} <= {s for s, _ in SETTINGS}
    assert "a_setting_that_nobody_reads" not in names_read()


@pytest.fixture(scope="module")
def default_session() -> Session:
    return build(load_manifest(None, SMALL))


@pytest.mark.model
@pytest.mark.parametrize(
    ("override", "look", "value"),
    [
        ("training.pop_size=2", lambda s: len(s.population), 2),
        ("training.eval_max_new_tokens=3", lambda s: s.population.examiner.eval_max_new_tokens, 3),
        ("training.max_tokens_in_flight=128", lambda s: s.population.runtime.max_tokens, 128),
        ("training.max_error_rate=0.1", lambda s: s.population.max_error_rate, 0.1),
        ("training.max_rows_in_flight=32", lambda s: s.population.runtime.engine.max_rows, 32),
        ("training.init=same", lambda s: len({a.lr for a in s.population.agents}), 1),
        ("training.seed=9", lambda s: s.population.agents[0].seed, 9),
        ("training.dtype=bfloat16", lambda s: str(s.population.runtime.base.dtype), "torch.bfloat16"),
        ("environment.data_batch_size_per_gpu=3", lambda s: s.population.prompts_per_step, 3),
        ("environment.eval_prompts=5", lambda s: len(s.population.examiner.panel("exam")), 5),
        ("environment.test_prompts=6", lambda s: len(s.population.examiner.panel("test")), 6),
        ("environment.reward=score", lambda s: s.task.reward_kind, "score"),
        ("environment.holdout=any", lambda s: s.task.holdout, "any"),
        (
            "environment.params.max_numbers=3",
            lambda s: max(len(re.findall(r"\d+", s.task.row("train", i)["question"])) for i in range(9)),
            3,
        ),
        ("algorithm.max_model_len=50", lambda s: s.population.examiner.context_length, 50),
        ("network.lora_config.r=4", lambda s: s.population.agents[0].rank, 4),
        ("network.lora_config.lora_alpha=8", lambda s: float(s.population.runtime.store.scaling[0]), 0.5),
        ("network.lora_config.use_rslora=true", lambda s: float(s.population.runtime.store.scaling[0]), 8.0),
        (
            "network.lora_config.target_modules=[q_proj]",
            lambda s: {layer.name[-6:] for layer in s.population.runtime.store.layers},
            {"q_proj"},
        ),
        ("algorithm.temperature=0.7", lambda s: s.population.agents[2].temperature, 0.7),
        ("mutation.mutate_elite=true", lambda s: s.resolved.mutations.mutate_elite, True),
        (
            "mutation={genes_per_mutation: 2, rl_hp_selection: {lr: {}, temperature: {}}}",
            lambda s: s.resolved.mutations.genes_per_mutation,
            2,
        ),
        ("mutation.rank_range=[8, 32]", lambda s: s.resolved.mutations.rank_range, (8, 32)),
    ],
)
def test_a_setting_arrives(
    override: str, look: Callable[[Session], object], value: object, default_session: Session
) -> None:
    assert look(build(load_manifest(None, [*SMALL, override]))) == value != look(default_session)
