"""Every setting of a manifest is read somewhere, and what is written in a manifest reaches what it is about."""

import ast
from pathlib import Path

import pytest
from pydantic import BaseModel

import agilerl
from agilerl.training.config import RunConfig, load_manifest
from agilerl.training.setup import build
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


def names_read() -> set[str]:
    """Return all attributes that the package reads, declarations and assignments to them left out."""
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    return read


def passed_whole() -> set[str]:
    """Return the settings of sections that are handed on as they are (``LoraConfig(**section.model_dump())``)."""
    lora = next(s for s in sections(RunConfig) if s.__name__ == "LoraSection")
    return set(lora.model_fields)


SETTINGS = sorted({(s.__name__, name) for s in sections(RunConfig) for name in s.model_fields})


@pytest.mark.parametrize(("section", "name"), SETTINGS)
def test_every_setting_is_read(section: str, name: str) -> None:
    assert name in names_read() | passed_whole() | NOT_READ


def test_the_walk_finds_nested_sections_and_would_find_a_dead_setting() -> None:
    assert {"RunConfig", "TrainingConfig", "ProbabilityConfig", "GeneConfig", "LoraSection"} <= {s for s, _ in SETTINGS}
    assert "a_setting_that_nobody_reads" not in names_read()


@pytest.mark.model
@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("training.pop_size=2", "len(s.population)", 2),
        ("training.eval_max_new_tokens=3", "s.population.eval_max_new_tokens", 3),
        ("training.max_tokens_in_flight=128", "s.population.runtime.max_tokens", 128),
        ("training.max_rows_in_flight=32", "s.population.runtime.engine.max_rows", 32),
        ("training.init=same", "len({a.lr for a in s.population.agents})", 1),
        ("training.seed=9", "s.population.agents[0].seed", 9),
        ("training.dtype=bfloat16", "str(s.population.runtime.base.dtype)", "torch.bfloat16"),
        ("environment.data_batch_size_per_gpu=3", "s.population.prompts_per_step", 3),
        ("environment.eval_prompts=5", "len(s.population.panel('exam'))", 5),
        ("environment.test_prompts=6", "len(s.population.panel('test'))", 6),
        ("environment.reward=score", "s.task.reward_kind", "score"),
        ("environment.holdout=any", "s.task.holdout", "any"),
        ("environment.params.max_word_len=3", "max(len(s.task.row('train', i)['answer']) for i in range(9))", 3),
        ("network.max_context_length=50", "s.population.context_length", 50),
        ("network.lora_config.r=4", "s.population.agents[0].rank", 4),
        ("network.lora_config.lora_alpha=8", "float(s.population.runtime.store.scaling[0])", 0.5),
        ("network.lora_config.use_rslora=true", "float(s.population.runtime.store.scaling[0])", 8.0),
        ("network.lora_config.target_modules=[q_proj]", "len(s.population.runtime.store.layers)", 3),
        ("algorithm.temperature=0.7", "s.population.agents[2].temperature", 0.7),
        ("mutation.mutation_sd=0.3", "s.mutations.mutation_sd", 0.3),
        ("mutation.mutate_elite=true", "s.mutations.mutate_elite", True),
        ("mutation.genes_per_mutation=2", "s.mutations.genes_per_mutation", 2),
        ("mutation.rank_range=[8, 32]", "s.mutations.rank_range", (8, 32)),
        ("selection_strategy.tournament_size=3", "s.selection.tournament_size", 3),
        ("selection_strategy.elitism=false", "s.selection.elitism", False),
        ("selection_strategy.name=truncation", "type(s.selection).__name__", "TruncationSelection"),
        ("selection_strategy.name=none", "type(s.selection).__name__", "NoSelection"),
    ],
)
def test_a_setting_arrives(override: str, place: str, value: object) -> None:
    session = build(load_manifest(None, [*SMALL, override]))
    assert eval(place, {"s": session}) == value  # noqa: S307
    assert eval(place, {"s": DEFAULT or DEFAULT.append(build(load_manifest(None, SMALL))) or DEFAULT[0]}) != value


DEFAULT: list[object] = []
