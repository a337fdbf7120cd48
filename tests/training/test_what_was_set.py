"""What was set stays told from what has its default, in every way a configuration travels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from agilerl.algorithms import ALGORITHMS, FAMILY, GRPO, LLMAlgorithm
from agilerl.algorithms.codec import packed, read_state, unpacked, write_state
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.parameters import values_of
from agilerl.run import train as train_in_python
from agilerl.runs.directory import RunDirectory, read_run
from agilerl.runtime import Runtime
from agilerl.training.base import load_runtime
from agilerl.training.resolved import resolve
from agilerl.training.saved import open_run, recorded
from agilerl.training.setup import build, check, first_generation
from agilerl.training.trainer import LocalTrainer
from agilerl.utils.utils import create_population
from tests.training.small_runs import SMALL

MANIFESTS = Path(__file__).resolve().parent.parent.parent / "tutorials" / "manifests"
BY_ALGORITHM = {name: MANIFESTS / f"{name.lower()}.yaml" for name in ALGORITHMS}
DERIVED = {"seed"}
"""What every agent is given of the run's own settings."""
ALL_SETTINGS = [(name, field) for name, algorithm in ALGORITHMS.items() for field in algorithm.Config.model_fields]


def declared_once() -> list[tuple[str, str]]:
    """Return each declaration of a setting with one of the algorithms that have it, each of them in turn."""
    found: dict[tuple[type, str], list[str]] = {}
    for name, field in ALL_SETTINGS:
        home = next(c for c in ALGORITHMS[name].Config.__mro__ if field in vars(c).get("__annotations__", {}))
        found.setdefault((home, field), []).append(name)
    return [(names[number % len(names)], field) for number, ((_, field), names) in enumerate(found.items())]


class Configured(Exception):  # noqa: N818
    """Holds the configuration of a run that is about to begin."""


def configured_by_train(**given: Any) -> RunConfig:
    """Return what ``agilerl.train`` makes of its arguments."""

    def stop(config: RunConfig, *_: Any, **__: Any) -> None:
        raise Configured(config)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("agilerl.training.run.start", stop)
        with pytest.raises(Configured) as caught:
            train_in_python(**given, display=False)
    config: RunConfig = caught.value.args[0]
    return config


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    config = load_manifest(None)
    return load_runtime(resolve(config))


def choices(annotation: Any) -> list[Any]:
    """Return what a type could hold: all of a Literal, both booleans, some numbers."""
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) is tuple:
        return [[0.7, 1.4]]
    numbers = {int: [7, 12], float: [0.3, 0.95, 1.7, 2.5]}.get(annotation, [])
    return numbers + [choice for part in get_args(annotation) for choice in choices(part)]


def another_value(field: FieldInfo) -> Any:
    """Return a value that a field takes and that is not its default, as JSON holds it."""
    if get_origin(field.annotation) is dict:
        return {"exact": 0.5}
    adapter: TypeAdapter[Any] = TypeAdapter(
        Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    )
    for choice in choices(field.annotation):
        try:
            if adapter.validate_python(choice) != field.get_default(call_default_factory=True):
                return choice
        except ValidationError:
            continue
    raise AssertionError(f"no other value for {field}")


def started(config: RunConfig, root: Path) -> None:
    """Leave the directory of a run that ended before its first checkpoint."""
    RunDirectory.create(root, resolve(config).document(), 1, given=resolve(config).given()).close()


def reopened(root: Path, *, report: Any = print) -> RunConfig:
    saved = open_run(root, report=report)
    saved.run.close()
    return saved.config


def refusal(config: RunConfig) -> str | None:
    """Return what is wrong with a configuration, if anything is; a value that a range moves counts."""
    try:
        check(config)
    except (ConfigError, UserWarning) as error:
        return str(error)
    return None


def set_to_another_value(name: str, field: str) -> tuple[RunConfig, Any]:
    # A context holds the completion too.
    value = 64 if field == "max_model_len" else another_value(ALGORITHMS[name].Config.model_fields[field])
    return load_manifest(BY_ALGORITHM[name], [f"algorithm.{field}={json.dumps(value)}"]), value


@pytest.mark.filterwarnings("ignore:.*the update is biased")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_a_manifest_and_of_run_json(name: str) -> None:
    for _, field in (setting for setting in ALL_SETTINGS if setting[0] == name):
        config, value = set_to_another_value(name, field)
        refused = refusal(config)
        if refused is not None:
            assert field in refused
            continue
        resolved = resolve(config)
        info = {"config": resolved.document(), "given": resolved.given(), "date": "2026-01-31T12:00:00"}
        for found in (resolved.hyperparameters, resolve(recorded(info)).hyperparameters):
            assert found.model_fields_set - DERIVED == {*config.algorithm} - {"name"} - DERIVED, field
            assert json.loads(found.model_dump_json(include={field})) == {field: value}


@pytest.mark.model
@pytest.mark.filterwarnings("ignore:.*the update is biased")
@pytest.mark.parametrize(("name", "field"), declared_once())
def test_one_setting_of_an_agent(name: str, field: str, runtime: Runtime, tmp_path: Path) -> None:
    config, value = set_to_another_value(name, field)
    expected = ({*config.algorithm} - {"name"}) | DERIVED
    refused = refusal(config)
    if refused is not None:
        assert field in refused
        return
    if field == "router_aux_loss_coef":  # for mixtures of experts, which this base is not
        with pytest.raises(ConfigError, match=field):
            first_generation(resolve(config), runtime)
        return
    (agent, *_) = first_generation(resolve(config), runtime)
    assert agent.config.model_fields_set == expected
    assert json.loads(agent.config.model_dump_json(include={field})) == {field: value}

    assert agent.clone(9).config.model_fields_set == expected
    assert unpacked(packed(agent.state())).config.keys() == expected
    write_state(agent.state(), tmp_path / "agent", runtime, agent.lora_config)
    loaded = ALGORITHMS[name].from_state(read_state(tmp_path / "agent", runtime.store.layers), runtime)
    assert (loaded.config, loaded.config.model_fields_set) == (agent.config, expected)

    started(config, tmp_path / "run")
    again = reopened(tmp_path / "run")
    assert (resolve(again).document(), resolve(again).given()) == (resolve(config).document(), resolve(config).given())
    (resumed, *_) = first_generation(resolve(again), runtime)
    assert (resumed.config, resumed.config.model_fields_set) == (agent.config, expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_python_configuration_gives_what_was_set(name: str, runtime: Runtime) -> None:
    algorithm: type[LLMAlgorithm] = ALGORITHMS[name]
    agent = algorithm(config=algorithm.Config(update_epochs=2), runtime=runtime, max_output_tokens=5)
    assert agent.config.model_fields_set == {"update_epochs", "max_output_tokens"}
    assert agent.clone().config.model_fields_set == {"update_epochs", "max_output_tokens"}


ENVIRONMENTS = {"SFT": {"env_type": "sft"}, "DPO": {"env_type": "preference"}, "KTO": {"env_type": "unpaired"}}


def refused(call: Callable[[], Any]) -> str:
    """Return why a call is refused; empty if it is not."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:.*the update is biased")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_given_in_python(name: str, runtime: Runtime) -> None:
    """By LocalTrainer, ``agilerl.train`` and create_population."""
    algorithm: type[LLMAlgorithm] = ALGORITHMS[name]
    environment = ENVIRONMENTS.get(name, {"task": "reasoning_gym:gcd"})
    named = {*load_manifest(None, [f"algorithm.name={name}"]).algorithm}
    for field in sorted({*algorithm.Config.model_fields} - {"seed", "router_aux_loss_coef", "reward_weights"}):
        _, value = set_to_another_value(name, field)
        own = {field: value}
        if why := refused(lambda own=own: algorithm.Config(**own)):  # type: ignore[misc]
            assert field in why  # it needs another setting
            continue
        trainer = LocalTrainer({"name": name, **own}, environment)
        assert resolve(trainer.config).hyperparameters.model_fields_set - (
            {*DERIVED, "max_output_tokens"} - {field}
        ) == {field}
        config = configured_by_train(environment=environment, algorithm={"name": name, **own})
        assert config.algorithm[field] == json.loads(json.dumps(value))
        assert {*config.algorithm} - {field} <= named
        (agent,) = create_population(name, INIT_HP={field.upper(): value}, actor_network=runtime.base.model)
        assert agent.config.model_fields_set == {field}
        agent.clean_up()


def test_the_gene_algorithm_carries_what_was_set_and_no_default(runtime: Runtime) -> None:
    for field in sorted({*GRPO.Config.model_fields} - {"router_aux_loss_coef"}):
        value = 64 if field == "max_model_len" else another_value(GRPO.Config.model_fields[field])
        given = {"max_output_tokens": 60, field: value}
        if refused(lambda given=given: GRPO.Config(**given)):  # type: ignore[misc]
            continue
        for name in FAMILY:
            agent = GRPO(runtime=runtime, **given)
            why = refused(lambda: agent.set_hyperparameters({"algorithm": name}))  # noqa: B023
            assert not why or field in why  # it does not use the setting
            clone = agent.clone(9)
            assert agent.config.model_fields_set == clone.config.model_fields_set == {*given}
            assert (clone.algorithm, clone.config) == (agent.algorithm, agent.config)
            clone.clean_up()
            agent.clean_up()


OF_SECTIONS = [
    "training.eval_temperature=0.5",
    "training.lr_schedule=cosine",
    "training.num_epochs=2",
    "training.init=same",
    "mutation.rank_range=[2, 8]",
    "mutation.probabilities={arch_mut: 0.5, rl_hp_mut: 0.5}",
    "selection_strategy.soup=0.8",
    "selection_strategy.candidates=3",
    "selection_strategy.equal_tokens=true",
    "selection_strategy.pulses={until: 0.5}",
    "selection_strategy.collapse_guard=false",
    "network.lora_config.lora_dropout=0.1",
    "network.lora_config.init_lora_weights=gaussian",
    "network.pad_token_id=7",
    "network.stop_sequences=[e]",
    "environment.curriculum={prompts_per_level: 8}",
    "environment.holdout=any",
]


@pytest.mark.parametrize("setting", OF_SECTIONS)
def test_a_setting_of_a_section(setting: str, tmp_path: Path) -> None:
    """Its value, that it was set, and that nothing else of its section was."""
    config = load_manifest(None, [setting])
    started(config, tmp_path / "run")
    again = reopened(tmp_path / "run")
    section, field = setting.partition("=")[0].split(".")[:2]
    assert field in resolve(config).given()[section]
    assert (resolve(again).document(), resolve(again).given()) == (resolve(config).document(), resolve(config).given())
    for name in RunConfig.model_fields:
        own, found = getattr(config, name), getattr(again.given, name)
        assert (found, getattr(found, "model_fields_set", None)) == (own, getattr(own, "model_fields_set", None))


CISPO_BOUNDS = {
    "the cap of GRPO's": (["algorithm.loss_type=cispo"], (0.0, 5.0)),
    "GRPO's own cap": (["algorithm.loss_type=cispo", "algorithm.clip_max=3"], (0.0, 3.0)),
    "GRPO's own clip": (["algorithm.loss_type=cispo", "algorithm.clip_coef=0.2"], (0.8, 1.2)),
    "one number": (["algorithm.name=CISPO", "algorithm.clip_coef=0.2"], (0.8, 1.2)),
    "a pair": (["algorithm.name=CISPO", "algorithm.clip_coef=[0.5, 2]"], (0.5, 2.0)),
    "floor and cap": (["algorithm.name=CISPO", "algorithm.clip_min=0.1", "algorithm.clip_max=4"], (0.1, 4.0)),
}


@pytest.mark.model
@pytest.mark.parametrize(("overrides", "bounds"), CISPO_BOUNDS.values(), ids=CISPO_BOUNDS)
def test_the_bounds_of_cispo(overrides: list[str], bounds: tuple[float, float], tmp_path: Path) -> None:
    config = load_manifest(None, [*SMALL, *overrides])
    for made in (config, RunConfig.from_dict(resolve(config).document())):  # the resolved manifest is a manifest
        agents = build(made).population.agents
        assert [agent.config.weight_range for agent in agents] == [bounds] * 3  # type: ignore[attr-defined]
    started(config, tmp_path / "run")
    assert resolve(reopened(tmp_path / "run")).hyperparameters.weight_range == bounds  # type: ignore[attr-defined]


def test_a_gene_with_choices_survives_run_json(tmp_path: Path) -> None:
    config = load_manifest(
        BY_ALGORITHM["SFT"], ["mutation.rl_hp_selection.loss_type.choices=[nll, dft]", "algorithm.loss_type=nll"]
    )
    check(config)
    check(RunConfig.from_dict(resolve(config).document()))
    started(config, tmp_path / "run")
    check(reopened(tmp_path / "run"))


def test_a_run_that_did_not_say_what_was_set_is_read_as_before(tmp_path: Path) -> None:
    config = load_manifest(None, ["algorithm.clip_coef=[0.8, 1.3]"])
    RunDirectory.create(tmp_path / "run", resolve(config).document(), 1).close()
    assert "given" not in json.loads((tmp_path / "run" / "run.json").read_text())
    again = reopened(tmp_path / "run")
    assert resolve(again).document() == resolve(config).document()
    assert resolve(again).hyperparameters.model_fields_set == set(type(resolve(config).hyperparameters).model_fields)


def test_a_default_that_has_changed_keeps_the_recorded_value() -> None:
    config = load_manifest(None)
    info = {"config": resolve(config).document(), "given": resolve(config).given(), "date": "2026-01-31T12:00:00"}
    info["config"]["algorithm"]["temperature"] = 0.9  # as if 0.9 had been the default then
    info["config"]["training"]["evo_steps"] = 5
    again = recorded(info)
    assert resolve(again).document() == info["config"]
    assert (again.algorithm["temperature"], again.training.evo_steps) == (0.9, 5)
    info["config"]["environment"]["params"] = {}  # as if what was set had been resolved to less
    assert resolve(recorded(info)).document() == info["config"]
    assert resolve(again).hyperparameters.model_fields_set == resolve(config).hyperparameters.model_fields_set | {
        "temperature"
    }


def test_a_default_that_leaves_the_range_of_its_gene_keeps_the_recorded_value() -> None:
    set_then = {"mutation": {"rl_hp_selection": {"lr": {"min": 1e-3, "max": 1e-2}}}}
    # As if 5e-3 had been the default of lr then; today's is outside of the range.
    document = resolve(RunConfig.from_dict({**set_then, "algorithm": {"lr": 5e-3}})).document()
    info = {"config": document, "given": {**set_then, "algorithm": {"name": "GRPO"}}, "date": "2026-01-31T12:00:00"}
    assert recorded(info).algorithm["lr"] == 5e-3


def test_a_default_outside_of_the_range_of_its_gene_starts_at_the_nearer_end() -> None:
    genes = "mutation.rl_hp_selection={beta: {}}"
    with pytest.warns(UserWarning, match=r"beta=0\.0.*\[0\.0001, 0\.1\]"):
        start = resolve(load_manifest(None, [genes])).hyperparameters
    assert start.model_dump(include={"beta"}) == {"beta": 1e-4}
    with pytest.raises(ConfigError, match=r"excludes the start, algorithm\.beta=0\.0; widen"):
        resolve(load_manifest(None, [genes, "algorithm.beta=0"]))


def test_what_was_set_is_guarded_by_its_sha256(tmp_path: Path) -> None:
    started(load_manifest(None, ["algorithm.loss_type=cispo", "algorithm.clip_coef=0.2"]), tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    info = json.loads(file.read_text())
    del info["given"]["algorithm"]["clip_coef"]
    file.write_text(json.dumps(info))
    with pytest.raises(CheckpointError, match="sha256"):
        open_run(tmp_path / "run", report=print)


def test_values_that_evolve_count_as_set(runtime: Runtime) -> None:
    config = load_manifest(BY_ALGORITHM["CISPO"])
    agents = first_generation(resolve(config), runtime)
    for agent in agents:
        assert set(values_of(agent.config, agent.genes)) <= agent.config.model_fields_set | {"clip_max"}
    assert all("clip_max" in agent.config.model_fields_set for agent in agents[1:])


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "mixed"])
def test_a_run_of_before_the_present_names_keeps_what_was_set(name: str) -> None:
    info = read_run(Path(__file__).parent.parent / "fixtures" / "checkpoints" / name)
    config = recorded(info)
    for section, values in info["given"].items():
        if section != "algorithm":
            # What the budget decided was given by nobody.
            assert getattr(config.given, section).model_fields_set == set(values), section
