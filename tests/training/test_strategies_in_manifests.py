"""Selection strategies by name: every setting reaches its strategy, and what does not belong to it is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agilerl.config.manifest import load_manifest
from agilerl.config.named_files import digests, named_files
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.strategies import STRATEGIES, LRSchedule
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.resolved import resolve
from agilerl.training.saved import recorded
from agilerl.training.setup import build
from tests.training.small_runs import SIZES, lines, run_here

PULSES = {"every": 5, "factors": [2.0, 0.5], "challenge": 0.7, "until": 0.3, "guard": 0.9, "guard_factor": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "knockout": {"period": 2, "confidence": 0.7, "floor": 2, "pulses": PULSES},
    "tournament": {"tournament_size": 3, "elitism": False, "gate": 0.9},
    "truncation": {"fraction": 0.5, "confidence": 0.6},
    "multi_frequency": {
        "n_subpopulations": 2,
        "evolution_frequency_ratios": [1, 3],
        "n_winners": 1,
        "n_survivors": 0,
        "n_open_for_migration": 0,
        "n_losers": 1,
    },
    "none": {},
}


def section(**values: Any) -> list[str]:
    return [f"selection_strategy={yaml.safe_dump(values, default_flow_style=True, width=10_000).strip()}"]


def test_the_table_has_every_setting_of_every_strategy() -> None:
    assert {name: {*values} for name, values in SETTINGS.items()} == {
        name: {*strategy.names()} for name, strategy in STRATEGIES.items()
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_setting_arrives(name: str) -> None:
    resolved = resolve(load_manifest(None, section(name=name, **SETTINGS[name])))
    assert type(resolved.selection) is STRATEGIES[name]
    assert resolved.selection.model_dump(mode="json") == SETTINGS[name]
    # The document has all of it, and makes the same strategy again.
    document = resolved.document()
    assert {key: document["selection_strategy"][key] for key in SETTINGS[name]} == SETTINGS[name]
    again = resolve(recorded({"config": document, "given": resolved.given(), "date": "2026-01-01T00:00:00"}))
    assert again.selection == resolved.selection
    assert again.document() == document


@pytest.mark.parametrize("name", STRATEGIES)
def test_defaults_are_the_strategys_own_and_in_the_document(name: str) -> None:
    document = resolve(load_manifest(None, section(name=name))).document()["selection_strategy"]
    defaults = STRATEGIES[name]().model_dump(mode="json")
    assert {key: document[key] for key in defaults} == defaults


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "trunkation"}, "did you mean 'truncation'"),
        ({"name": "truncation", "gate": 0.9}, r"gate .* selection_strategy.name=truncation"),
        ({"name": "truncation", "pulses": {"every": 3}}, "pulses is not a setting"),
        ({"name": "none", "period": 3}, "no other settings"),
        ({"name": "none", "elitism": True}, "elitism is a setting of name: tournament"),
        ({"name": "knockout", "tournament_size": 2}, r"tournament_size .* tournament"),
        ({"name": "knockout", "params": {"a": 1}}, "params is not a setting"),
        ({"name": "knockout", "floor": 9}, r"floor .* population_size=4"),
        ({"name": "knockout", "pulses": {"factors": [1.0]}}, "must be above 0 and not 1"),
        ({"name": "knockout", "pulses": {"evry": 3}}, "every"),
        ({"name": "multi_frequency", "n_subpopulations": 3}, "multiple of n_subpopulations"),
    ],
)
def test_what_does_not_belong_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(load_manifest(None, section(**values)))


@pytest.mark.parametrize(
    ("settings", "genes"),
    [
        ((), ["lr"]),
        (("selection_strategy.name=tournament",), ["lr"]),
        (("selection_strategy.name=none",), []),
        (("selection_strategy.name=tournament", "training.pop_size=1"), []),
        (("selection_strategy.name=tournament", "mutation={probabilities: {no_mut: 0.5}}"), []),
        (("selection_strategy.name=tournament", "mutation={rl_hp_selection: {}}"), []),
    ],
)
def test_a_manifest_without_mutation_evolves_the_learning_rate(settings: tuple[str, ...], genes: list[str]) -> None:
    resolved = resolve(load_manifest(None, settings))
    assert list(resolved.genes) == genes
    assert recorded(
        {"config": resolved.document(), "given": resolved.given(), "date": "2026-11-24T00:00:00"}
    ).genes.keys() == set(genes)
    # A run that was recorded without genes keeps that.
    before = resolved.document()
    before["mutation"]["rl_hp_selection"] = {}
    assert recorded({"config": before, "given": resolved.given(), "date": "2026-11-24T00:00:00"}).genes == {}


def test_what_the_tournament_alone_has_names_the_tournament() -> None:
    assert load_manifest(None, section(tournament_size=3)).selection_strategy.strategy == "tournament"
    assert load_manifest(None, section(elitism=True)).selection_strategy.strategy == "tournament"


def test_a_gate_keeps_agents_that_are_not_certainly_worse() -> None:
    close = {i: Fitness.from_scores([1.0] * (10 + i) + [0.0] * (10 - i)) for i in range(4)}
    far = {i: Fitness.from_scores([1.0] * (1 + 6 * i) + [0.0] * (19 - 6 * i)) for i in range(4)}
    gated, free = (TournamentSelection(3, population_size=4, **gate) for gate in ({"gate": 0.99}, {}))
    assert free.plan(close, 0, 0, 4).births
    assert not gated.plan(close, 0, 0, 4).births
    replaced = {birth.parent for birth in gated.plan(far, 0, 0, 4).births}
    assert replaced == {3}


# -- the course of the learning rate -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "schedule"),
    [
        (section(name="tournament"), LRSchedule()),
        (section(name="knockout"), LRSchedule("linear", decay=0.4)),
        (["training.lr_schedule=cosine"], LRSchedule("cosine")),
        (["training.lr_schedule={name: cosine, warmup: 0.1, end: 0.2}"], LRSchedule("cosine", 0.1, 1.0, 0.2)),
        ([*section(name="knockout"), "training.lr_schedule={name: constant}"], LRSchedule()),
    ],
)
def test_the_schedule_of_a_manifest(overrides: list[str], schedule: LRSchedule) -> None:
    assert load_manifest(None, overrides).lr_schedule == schedule


ALGORITHMS = {
    "GRPO": "algorithm={name: GRPO, lr: 1e-3, group_size: 4, batch_size: 8, max_output_tokens: 6}",
    "PPO": "algorithm={name: PPO, lr_actor: 1e-3, lr_critic: 2e-3, group_size: 4, batch_size: 8, max_output_tokens: 6}",
    "SFT": "algorithm={name: SFT, lr: 1e-3, batch_size: 4, max_output_tokens: 6}",
}


@pytest.mark.model
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_factor_is_on_the_learning_rate_of_every_algorithm(name: str, tmp_path: Path) -> None:
    gene = "lr_actor" if name == "PPO" else "lr"
    source = ["environment.env_type=sft", "training.max_steps=12"] if name == "SFT" else ["training.max_steps=48"]
    settings = [ALGORITHMS[name], *source, *section(name="none"), "training.lr_schedule={name: linear}"]
    settings += ["training.pop_size=1", f"mutation.rl_hp_selection={{{gene}: {{}}}}", "training.evo_steps=1"]
    out = run_here(tmp_path / "run", *settings)
    trained = [line for line in lines(out / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["learning_rate"] for line in trained] == pytest.approx([1e-3 * (1 - k / 3) for k in range(3)])


@pytest.mark.model
def test_a_limit_on_tokens_that_only_grows(tmp_path: Path) -> None:
    """``max_output_tokens`` evolves if it is named, limits what is sampled, and never falls."""
    start = "algorithm={name: GRPO, lr: 1e-3, group_size: 4, batch_size: 8, max_output_tokens: 2}"
    grows = "{max_output_tokens: {min: 1, max: 12, monotone: up}}"
    gene = f"mutation={{probabilities: {{rl_hp_mut: 1}}, rl_hp_selection: {grows}}}"
    more = ("training.max_steps=128", "training.evo_steps=1", "training.pop_size=2", "training.init=same")
    out = run_here(tmp_path / "run", start, gene, *more, *section(name="tournament"))
    changes = [
        (change["gene"], change["old"] < change["new"])
        for line in lines(out / "lineage.jsonl")
        if line["event"] == "mutation"
        for change in line["changes"]
    ]
    assert set(changes) == {("max_output_tokens", True)}
    longest = [line["completions/max_length"] for line in lines(out / "metrics.jsonl") if line["kind"] == "train"]
    assert longest[0] == 2
    assert 2 < max(longest) <= 12


# -- code of the user's ------------------------------------------------------------------------------------------------

CODE = '''
from agilerl.hpo.fitness import ranking
from agilerl.hpo.selection import Birth, Plan


class Last:
    """The last agent becomes a copy of the best one."""

    def __init__(self, keep=1):
        self.keep = keep

    def plan(self, fitness, generation, seed, next_index, standing):
        ranked = ranking(fitness)
        best, last = ranked[0], ranked[-1]
        slots = tuple(next_index if index == last else index for index in fitness)
        reason = f"{standing.spent:.2f} spent"
        return Plan(generation, best, slots, (Birth(next_index, best),), (last,), (next_index,), reason)


class NoPlan:
    pass


class Wrong(Last):
    def plan(self, fitness, generation, seed, next_index, standing):
        if self.keep == 1:
            return None
        if self.keep == 2:
            return Plan(generation, 99, tuple(fitness))
        if self.keep == 3:
            return Plan(generation, next(iter(fitness)), tuple(fitness)[:1])
        raise RuntimeError("lost")
'''


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "run.yaml").write_text(
        "selection_strategy: {name: 'own.py:Last', params: {keep: 1}}\nalgorithm: {max_output_tokens: 6, lr: 1e-3}\n"
        "environment: {task: 'reasoning_gym:spell_backward', params: {min_word_len: 3, max_word_len: 4}}\n"
        "network: {pretrained_model_name_or_path: embedded}\nmutation: {rl_hp_selection: {lr: {}}}\n"
    )
    return tmp_path / "run.yaml"


def made(manifest: Path, *overrides: str, allow: bool = True) -> Any:
    return build(load_manifest(manifest, [*SIZES, *overrides]), allow_code=allow)


@pytest.mark.model
def test_a_class_of_the_users_selects(manifest: Path, tmp_path: Path) -> None:
    from agilerl.training.run import train

    session = made(manifest)
    for _ in train(session, tmp_path / "out"):
        pass
    records = lines(tmp_path / "out" / "lineage.jsonl")
    births = [line for line in records if line["event"] == "birth" and line["parent"] is not None]
    deaths = [line for line in records if line["event"] == "death"]
    assert [birth["agent"] for birth in births] == [3]
    assert deaths[0]["reason"] == "0.50 spent"
    assert list(digests(named_files(session.config))["code"]) == [str(manifest.parent / "own.py")]


@pytest.mark.model
def test_code_needs_to_be_allowed_and_to_stand_beside_the_manifest(manifest: Path) -> None:
    with pytest.raises(ConfigError, match="--allow-code"):
        made(manifest, allow=False)
    outside = manifest.parent / "inner" / "run.yaml"
    outside.parent.mkdir()
    outside.write_text(manifest.read_text().replace("own.py", "../own.py"))
    with pytest.raises(ConfigError, match="folder of the manifest"):
        load_manifest(outside)


@pytest.mark.model
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("selection_strategy={name: '{own}:Nobody'}", "expected Nobody in"),
        ("selection_strategy={name: '{own}:NoPlan'}", "a class with a method plan"),
        ("selection_strategy={name: '{own}:Last', params: {kep: 1}}", "selection_strategy.params"),
        ("selection_strategy={name: '{own}:Last', period: 1}", "period is not a setting"),
    ],
)
def test_code_that_is_no_strategy_is_refused_before_training(manifest: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(manifest, override.replace("{own}", str(manifest.parent / "own.py")))


@pytest.mark.model
@pytest.mark.parametrize(
    ("keep", "message"),
    [(1, "found NoneType"), (2, "found 99"), (3, "in slots or in deaths"), (4, "RuntimeError: lost")],
)
def test_plans_that_do_not_fit_are_refused_with_the_name_of_the_class(manifest: Path, keep: int, message: str) -> None:
    name = f"{manifest.parent / 'own.py'}:Wrong"
    session = made(manifest, f"selection_strategy={{name: '{name}', params: {{keep: {keep}}}}}")
    with pytest.raises(ConfigError, match=message) as raised:
        session.selection.plan({0: Fitness(0.1), 1: Fitness(0.2)}, 0, 0, 2)
    assert "Wrong" in str(raised.value)
