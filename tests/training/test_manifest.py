"""The manifest: what is accepted, what is refused before any model is loaded, and in which words."""

import json
from pathlib import Path

import pytest

from agilerl.checks.arguments import nearest, shown
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError
from agilerl.training.resolved import resolve
from agilerl.training.setup import build, check
from agilerl.training.tasks import task

MANIFESTS = Path(__file__).resolve().parents[2] / "tutorials" / "manifests"
FULL = """
algorithm:
  {name: GRPO, lr: 5e-6, beta: 0.001, group_size: 4, batch_size: 8, max_output_tokens: 16, max_model_len: 256,
   clip_coef: [0.8, 1.3]}
environment:
  env_type: reasoning
  task: "reasoning_gym:gcd"
  params: {max_value: 60}
  reward: score
  data_batch_size_per_gpu: 4
  eval_prompts: 16
  test_prompts: 20
  holdout: any
  conversation_template:
    - {role: user, content: "{question}"}
training:
  {pop_size: 2, max_steps: 1e3, max_tokens: 100000, max_seconds: 60.5, evo_steps: 3, evaluation_interval: 1, seed: 7,
   init: same, eval_max_new_tokens: 8, threads: 1, device: cpu, dtype: float32, max_tokens_in_flight: 2048,
   max_rows_in_flight: 64, log_completions: 3, keep_checkpoints: 4}
mutation:
  probabilities: {no_mut: 0.2, arch_mut: 0.2, new_layer: 0, params_mut: 0, act_mut: 0, rl_hp_mut: 0.6}
  rl_hp_selection:
    lr: {min: 1e-7, max: 1e-4, scale: log}
    group_size: {min: 2, max: 8, shrink_factor: 0.5, grow_factor: 2}
  mutation_sd: 0.05
  genes_per_mutation: 2
  rank_range: [4, 32]
  mutate_elite: false
  rand_seed: 3
selection_strategy: {name: tournament, tournament_size: 2, elitism: true}
network:
  pretrained_model_name_or_path: embedded
  lora_config: {r: 8, lora_alpha: 16, target_modules: [q_proj, v_proj], use_rslora: true}
"""


def refused(*overrides: str, text: str | None = None, path: Path | None = None) -> str:
    """Return the sentence with which settings are refused, by all checks that need no model."""
    if text is not None and path is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check(load_manifest(path, overrides))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# -- accepted ---------------------------------------------------------------------------------------------------------


def test_every_documented_section_and_setting(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text(FULL)
    config = load_manifest(tmp_path / "full.yaml")
    check(config)
    assert config.training.max_steps == 1000
    agent = resolve(config).hyperparameters
    assert agent.model_dump(include={"lr", "clip_coef", "max_model_len", "seed"}) == {
        "lr": 5e-6,
        "clip_coef": (0.8, 1.3),
        "max_model_len": 256,
        "seed": 7,
    }
    found = resolve(config).genes
    assert (found["lr"].min, found["lr"].max, found["lr"].factors) == (1e-7, 1e-4, None)
    assert (found["group_size"].dtype, found["group_size"].factors) == ("int", (0.5, 2.0))
    for section in ("environment", "training", "mutation", "selection_strategy", "network"):
        assert config.model_dump(exclude_unset=True)[section], section


def test_an_empty_manifest_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    assert load_manifest(tmp_path / "empty.yaml") == RunConfig()
    assert load_manifest(tmp_path / "empty.yaml") != load_manifest()  # the embedded default has settings of its own


def test_numbers_that_yaml_1_1_takes_for_text_are_numbers() -> None:
    config = load_manifest(None, ["algorithm.lr=5e-6", "training.max_steps=1e4"])
    assert config.algorithm["lr"] == 5e-6
    assert type(config.algorithm["lr"]) is float
    assert config.training.max_steps == 10_000


def test_overrides_reach_nested_keys_and_the_last_one_wins() -> None:
    config = load_manifest(
        None,
        ["network.lora_config.r=4", "mutation.rl_hp_selection.beta.min=0.01", "training.seed=1", "training.seed=2"],
    )
    assert (config.network.lora_config.r, config.network.lora_config.lora_alpha) == (4, 32)
    assert config.mutation.rl_hp_selection["beta"].min == 0.01
    assert config.training.seed == 2


def test_a_new_task_drops_the_old_ones_parameters_in_any_order() -> None:
    dropped = load_manifest(None, ["environment.task=reasoning_gym:chain_sum"])
    assert dropped.environment.params == {}
    for overrides in (
        ["environment.params.max_terms=3", "environment.task=reasoning_gym:chain_sum"],
        ["environment.task=reasoning_gym:chain_sum", "environment.params.max_terms=3"],
    ):
        assert load_manifest(None, overrides).environment.params == {"max_terms": 3}
    assert load_manifest(None, ["environment.params.min_value=5"]).environment.params["max_value"] == 60


def test_the_resolved_document_gives_the_same_configuration() -> None:
    config = load_manifest(None, ["algorithm.clip_coef=[0.8, 1.3]", "algorithm.max_model_len=64"])
    resolved = json.loads(json.dumps(resolve(config).document()))
    assert resolved["algorithm"]["temperature"] == 1.0  # defaults included
    assert resolve(RunConfig.from_dict(resolved)).document() == resolve(config).document()


@pytest.mark.parametrize("path", [None, *sorted(MANIFESTS.glob("*.yaml"))], ids=lambda p: p.stem if p else "sparse")
def test_the_resolved_document_survives_json_with_its_types(path: Path | None, tmp_path: Path) -> None:
    """32 equals 32.0, but is other text in run.json: a run that starts again from there would not be the same."""
    if path is None:
        path = tmp_path / "sparse.yaml"
        path.write_text("algorithm: {name: GRPO}")
    config = load_manifest(path)
    written = json.dumps(resolve(config).document())
    again = RunConfig.from_dict(json.loads(written))
    assert json.dumps(resolve(again).document()) == written
    assert repr(again.network) == repr(config.network)  # what is dumped has the declared type, whatever the default is


# -- refused ----------------------------------------------------------------------------------------------------------

UNKNOWN = {
    "trainig.pop_size=4": "unknown key 'trainig'; did you mean 'training'?",
    "max_step=3": "unknown key 'max_step'; did you mean 'training.max_steps'?",
    "training.popsize=4": "unknown key 'training.popsize'; did you mean 'pop_size'?",
    "Training.Pop_Size=4": "unknown key 'Training'; did you mean 'training'?",
    "network.lora_config.rr=4": "unknown key 'network.lora_config.rr'; ",
    "algorithm.lrr=1": "unknown key 'algorithm.lrr'; did you mean 'lr'?",
    "algorithm.groupsize=1": "unknown key 'algorithm.groupsize'; did you mean 'group_size'?",
    "algorithm.use_vlm=true": "unknown key 'algorithm.use_vlm'; did you mean 'network.use_vllm'?",
    "mutation.rl_hp_selection.lr.mni=1": "unknown key 'mutation.rl_hp_selection.lr.mni'; did you mean 'min'?",
    "mutation.rl_hp_selection.lrr.min=1": "GRPO has no hyperparameter 'lrr'; did you mean 'lr'?",
    "mutation.rl_hp_selection.seed.min=1": "this hyperparameter does not evolve",
    "algorithm.name=GRPPO": "algorithm.name='GRPPO' is unknown; did you mean 'GRPO'?",
    "training.попсайз=4": "unknown key 'training.попсайз'; known: pop_size, ",
    f"{'x' * 5000}=1": "...; known: algorithm, environment, training",
}
OUT_OF_RANGE = {
    "training.pop_size=0": "training.pop_size: input should be greater than or equal to 1, found 0",
    "algorithm.clip_coef=2": "clip_coef=2.0 gives the ratio bounds [-1, 3]",
    "algorithm.max_model_len=1": "algorithm.max_output_tokens=10 is above algorithm.max_model_len=1",
    "mutation.probabilities={no_mut: 0, rl_hp_mut: 0}": "not all 0",
    "mutation.probabilities.new_layer=0.5": "the base is frozen",
    "mutation.rank_range=[8, 4]": "rank_range must be (smallest, largest)",
    "training.device=tpu": "training.device: expected cpu, cuda, or cuda with a number such as cuda:1, found 'tpu'",
}
NOT_FINITE = {
    "algorithm.lr=.nan": "algorithm.lr: input should be a valid number",
    "training.max_seconds=inf": "training.max_seconds: input should be a finite number",
    "mutation.rl_hp_selection.lr.max=inf": "mutation.rl_hp_selection.lr.max: input should be a finite number",
    "training.max_steps=1e400": "the number 1e400 is too large",
}
WRONG_TYPE = {
    "training.pop_size=many": "training.pop_size: input should be a valid integer",
    "network.lora_config.alora_invocation_tokens=3": "tokens: input should be a valid string or a valid list, found 3",
    "network.lora_config.alora_invocation_tokens=[1, a]": "tokens: input should be a valid integer",
    "training.pop_size=4.5": "training.pop_size: input should be a valid integer, got a number with a fractional part",
    "training.pop_size=[1, 2": "the value of 'training.pop_size' cannot be read as YAML",
    "algorithm.batch_size=true": "algorithm.batch_size: input should be a number, found a boolean",
    "algorithm.name=[1]": "algorithm.name must be the name of an algorithm, found [1]",
    "training=3": "training must be a mapping of settings, found 3",
    "training=": "training must be a mapping of settings, found None",
    "environment.params=5": "environment.params: expected a mapping of settings, found 5",
    "mutation.rl_hp_selection.lr=3": "mutation.rl_hp_selection.lr: expected a mapping",
    "training.seed.x=3": "training.seed holds 42, so it has no key 'x'",
    "network.lora_config.target_modules=[]": "network.lora_config.target_modules: list should have at least 1 item",
    "network.lora_config.target_modules='('": "is not a regular expression: missing )",
    "environment.conversation_template=hello": "environment.conversation_template: input should be a valid list",
}
RANGES = {
    "algorithm.lr=0.05": "the range [1e-06, 0.01], the default, excludes the start, algorithm.lr=0.05",
    "mutation.rl_hp_selection.lr={min: 1, max: 1}": "rl_hp_selection.lr: min must be below max, found min=1.0, max=1.0",
    "mutation.rl_hp_selection.lr={min: 2, max: 1}": "min must be below max, found min=2.0, max=1.0",
    "mutation.rl_hp_selection.lr={min: 0, scale: log}": "a log range needs min > 0, found 0.0",
    "mutation.rl_hp_selection.lr.min=0": "lr allows 0.0, which the algorithm does not",
    "mutation.rl_hp_selection.group_size={min: 2.5, max: 9}": "an integer range needs integer bounds, found [2.5, 9.0]",
    "mutation.rl_hp_selection.group_size={min: 0, max: 9, scale: linear}": "allows 0, which the algorithm does not",
    "mutation.rl_hp_selection.temperature={min: -1, max: 2}": "allows -1.0, which the algorithm does not",
    "mutation.rl_hp_selection.clip_coef={max: 5}": "allows 5.0, which the algorithm does not",
    "mutation.rl_hp_selection.lr={choices: [1e-5]}": "needs at least two different choices, found (1e-05,)",
    "mutation.rl_hp_selection.lr={choices: [1e-5, 1e-5]}": "at least two different choices",
    "mutation.rl_hp_selection.lr={choices: [1e-4, 1e-3]}": "excludes the start, algorithm.lr=1e-05",
    "mutation.rl_hp_selection.lr={choices: [1e-5, -1]}": "allows -1.0, which the algorithm does not",
    "mutation.rl_hp_selection.lr={choices: [1e-5, 1e-4], min: 1}": "a gene with choices has no min",
    "mutation.rl_hp_selection.lr.shrink_factor=2": "shrink_factor: input should be less than 1, found 2",
    "selection_strategy.tournament_size=9": "tournament_size=9 is above training.pop_size=4",
}


@pytest.mark.parametrize(
    ("override", "message"), [*(UNKNOWN | OUT_OF_RANGE | NOT_FINITE | WRONG_TYPE | RANGES).items()], ids=shown
)
def test_one_wrong_setting(override: str, message: str) -> None:
    assert message in refused(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["mutation.probabilities.arch_mut=1", "mutation.rank_range=[32, 64]"],
            "excludes the start, network.lora_config.r",
        ),
        (["algorithm.loss_norm=fixed-length", "algorithm.max_output_tokens="], "set it"),
        (["training.popsize=4", "training.seeed=4"], "unknown key 'training.popsize'"),
    ],
)
def test_settings_that_contradict(overrides: list[str], message: str) -> None:
    assert message in refused(*overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("network: {lora_config: {alpha: 4}}", "unknown key 'network.lora_config.alpha'; did you mean 'lora_alpha'?"),
        ("training: {popsize: 4, seeed: 3}", "unknown key 'training.popsize'; did you mean 'pop_size'?; unknown key"),
        ("- 1\n- 2", "must be a mapping of sections, found [1, 2]"),
        ("hello", "must be a mapping of sections, found 'hello'"),
        ("training: {seed: 1}\ntraining: {seed: 2}", "line 2: the key 'training' is given twice"),
        ("training: {seed: *x}", "the alias *x is not supported"),
        ("training: {seed: !!python/name:os.system }", "the tag !!python/name:os.system is not supported"),
        ("training: [", "cannot be read as YAML"),
        ("training: {1: 2}", "a key must be text, found 1"),
        ("#" * 2_000_000, "has 2,000,000 bytes, expected at most 50,000"),
    ],
    ids=lambda value: shown(value)[:40],
)
def test_a_broken_manifest(text: str, message: str, tmp_path: Path) -> None:
    assert message in refused(text=text, path=tmp_path / "it.yaml")


def test_a_manifest_that_is_no_text_or_no_file(tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_bytes(b"training: \xff\xfe")
    assert "UTF-8 text (byte 10)" in refused(path=tmp_path / "it.yaml")
    assert "found nothing at" in refused(path=tmp_path / "other.yaml")
    assert "found a folder" in refused(path=tmp_path)
    assert "File name too long" in refused(path=tmp_path / ("x" * 300))


@pytest.mark.parametrize("override", ["", "foo", "=5", "training.=5", ".=5", "training..pop_size=5", " = "])
def test_what_is_no_override(override: str) -> None:
    assert "expected key.path=value" in refused(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.task=reasoning_gym:gdc"], "found 'gdc'; did you mean 'gcd'"),
        (["environment.task=gcd"], "expected reasoning_gym:<dataset>; did you mean reasoning_gym:gcd?"),
        (["environment.task=other:gcd"], "expected reasoning_gym:<dataset>"),
        (["environment.task=reasoning_gym:gcd", "environment.params.max_valeu=5"], "did you mean 'max_value'"),
        (["environment.task=reasoning_gym:gcd", "environment.params.max_value=abc"], "expected a whole number"),
        (["environment.task=reasoning_gym:gcd", "environment.params.max_value=-5"], "max_value must be > min_value"),
        (["environment.params.size=5"], "is set by the run"),
        (["environment.task=reasoning_gym:composite"], "expected a list for params.datasets"),
        (
            ["environment.task=reasoning_gym:composite", "environment.params={datasets: [{name: gcd, weight: -1}]}"],
            "for the weight of gcd, found -1",
        ),
        (
            ["environment.task=reasoning_gym:composite", "environment.params={datasets: [{name: gdc}]}"],
            "found 'gdc'; did you mean 'gcd'",
        ),
        (["environment.conversation_template=[{role: user, content: hi}]"], "expected {question} (or another column)"),
        (["environment.conversation_template=[{role: user}]"], "expected role and content"),
    ],
)
def test_a_wrong_task(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task(load_manifest(None, overrides))
    assert message in str(caught.value)


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device='cuda' needs a CUDA build of torch and that GPU, found 0 GPUs" in refused("training.device=cuda")
    assert "found 0 GPUs" in refused("training.device=cuda:7")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["training.pop_size=100000000"], "adapters"),
        (["network.lora_config.r=10000000"], "adapters"),
        (["mutation.probabilities.arch_mut=1", "mutation.rank_range=[4, 10000000]"], "adapters"),
        (["algorithm.group_size=100000000"], "rollouts"),
        (["environment.data_batch_size_per_gpu=100000000"], "rollouts"),
        # Not the decode cache: it holds 256 rows of an agent at once, whatever max_rows_in_flight allows.
        (["training.max_rows_in_flight=100000000", "algorithm.group_size=100000"], "rollouts"),
    ],
)
@pytest.mark.model
def test_more_than_the_memory(overrides: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=f"memory, most .* {part} .*cpu.*; lower "):
        build(load_manifest(None, overrides))


def test_hints_name_the_nearest_or_a_few() -> None:
    assert nearest("Lr", ["lr", "beta"]) == "did you mean 'lr'?"
    assert (
        nearest("promts", ["test_prompts", "lr", "prompts_per_step"])
        == "did you mean 'test_prompts' or 'prompts_per_step'?"
    )
    assert nearest("zzz", ["lr", "beta"]) == "known: lr, beta"
    assert nearest("zzz", map(str, range(100))).endswith("11, ...")
