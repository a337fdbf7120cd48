"""What people get wrong in Python, at every public door: each ends in one sentence that names what was found.

Missing or unknown keyword arguments are Python's own TypeError and not in here, except where a constructor takes
hyperparameters as keywords: those have a sentence of ours. ``test_wrong_values`` generates what annotations refuse:
here are mistakes with a meaning, or of arguments that are wrong together.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agilerl import Mutations, Population, Run, Runtime, TournamentSelection, load
from agilerl.algorithms import (
    GRPO,
    GSPO,
    KTO,
    SFT,
    GRPOConfig,
)
from agilerl.envs import (
    CuratedTask,
    DatasetTask,
    read_dataset,
)
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import AgileRLError, CheckpointError, ConfigError, EnvError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from agilerl.hpo.schedule import hyperparameter_schedule, stretched
from agilerl.hpo.selection import NoSelection
from agilerl.llm_envs import (
    PreferenceGym,
    SFTGym,
    UnpairedGym,
)
from agilerl.report import build_report
from agilerl.rewards import (
    CombinedGrader,
    JudgeGrader,
    PairwiseJudgeGrader,
    exact_match,
)
from agilerl.runs import RunDirectory
from agilerl.training.trackers import check_trackers
from agilerl.utils.probe_envs_llm import GridNavigationEnv
from agilerl.utils.utils import (
    aggregate_metrics_across_gpus,
    create_population,
)
from tests.faults.mistaken import (
    ROWS,
    World,
    beyond,
    dataset,
    episodes,
    evolve,
    foreign,
    gym,
    ids,
    long,
    manifest,
    mutations,
    namesake,
    questions,
    stranger,
    trained,
    trainer,
)
from tests.probes import ConstantTarget, GridNavigation

pytestmark = pytest.mark.model


LATE = {"genes": {"lr": [{"tokens": 5, "value": 1e-4}]}}
"""A schedule without a value at its beginning."""


MISTAKES: dict[str, tuple[Callable[[World], Any], type[AgileRLError], *tuple[str, ...]]] = {
    # -- agents: constructors ----------------------------------------------------------------------------------------
    "network-class": (lambda w: GRPO(actor_network=torch.nn.Module), ConfigError, "actor_network"),
    "network-layer": (lambda w: GRPO(actor_network=torch.nn.Linear(2, 2)), ConfigError, "Linear"),
    "no-model": (lambda w: GRPO(), ConfigError, "model_name", "none"),
    "two-models": (lambda w: w.grpo(model_name="embedded"), ConfigError, "model_name", "runtime"),
    "unknown-keyword": (lambda w: w.grpo(learning_rate=0.0001), ConfigError, "learning_rate"),
    "group-size-one": (lambda w: w.grpo(group_size=1), ConfigError, "group_size", "1"),
    "pad-beyond": (lambda w: w.grpo(pad_token_id=10**6), ConfigError, "pad_token_id", "1000000"),
    "hp-config-unknown": (
        lambda w: w.grpo(hp_config=HyperparameterConfig(learning_rate=RLParameter(0.1, 1))),
        ConfigError,
        "learning_rate",
    ),
    "config-of-another": (lambda w: w.grpo(config=SFT.Config()), ConfigError, "config", "SFTConfig"),
    "lora-dict": (lambda w: w.grpo(lora_config={"r": 8}), ConfigError, "lora_config", "dict"),
    "lora-number": (lambda w: w.grpo(lora_config=8), ConfigError, "lora_config", "int"),
    "device-unknown": (lambda w: GRPO(model_name="embedded", device="gpu"), ConfigError, "device", "'gpu'"),
    "accelerator-text": (lambda w: w.grpo(accelerator="cuda"), ConfigError, "accelerator", "'cuda'"),
    "seed-huge": (lambda w: w.grpo(seed=2**70), ConfigError, "seed"),
    "sft-with-group": (lambda w: SFT(runtime=w.runtime, group_size=4), ConfigError, "group_size"),
    "gspo-with-loss": (lambda w: GSPO(runtime=w.runtime, loss_type="cispo"), ConfigError, "loss_type"),
    "config-class-unknown": (lambda w: GRPOConfig(rate=1), ConfigError, "rate"),
    "config-assigned": (lambda w: setattr(GRPOConfig(), "lr", "x"), ConfigError, "lr", "'x'"),
    "attribute-true": (lambda w: setattr(w.agent, "lr", True), ConfigError, "lr", "boolean"),
    "attributes-unknown": (lambda w: w.agent.set_hyperparameters({"rate": 1}), ConfigError, "rate"),
    # -- agents: acting ----------------------------------------------------------------------------------------------
    "act-texts": (lambda w: w.agent.get_action(["2+2?"]), ConfigError, "input_ids", "'2+2?'"),
    "act-empty": (lambda w: w.agent.get_action([]), ConfigError, "prompt", "none"),
    "act-tensor": (lambda w: w.agent.get_action(ids(1, 4)), ConfigError, "input_ids"),
    "act-without-ids": (lambda w: w.agent.get_action([{"text": "x"}]), ConfigError, "input_ids", "text"),
    "act-ids-none": (lambda w: w.agent.get_action([{"input_ids": None}]), ConfigError, "input_ids", "None"),
    "act-ids-text": (lambda w: w.agent.get_action([{"input_ids": "12"}]), ConfigError, "input_ids", "'12'"),
    "act-ids-empty": (lambda w: w.agent.get_action({"input_ids": ids(1, 0)}), ConfigError, "(1, 0)"),
    "act-two-rows": (lambda w: w.agent.get_action([{"input_ids": ids(2, 4)}]), ConfigError, "(2, 4)"),
    "act-three-dims": (lambda w: w.agent.get_action([{"input_ids": ids(1, 1, 4)}]), ConfigError, "(1, 1, 4)"),
    "act-fractions": (
        lambda w: w.agent.get_action([{"input_ids": ids(1, 4, fill=1.5, dtype=torch.float32)}]),
        ConfigError,
        "input_ids",
        "float32",
    ),
    "act-booleans": (
        lambda w: w.agent.get_action([{"input_ids": torch.ones(1, 4, dtype=torch.bool)}]),
        ConfigError,
        "input_ids",
        "bool",
    ),
    "act-beyond": (lambda w: w.agent.get_action([w.prompt(5, 10**6)]), ConfigError, "1000000", "vocabulary"),
    "act-negative": (lambda w: w.agent.get_action([w.prompt(5, -1)]), ConfigError, "-1", "vocabulary"),
    "act-too-long": (lambda w: w.agent.get_action([{"input_ids": ids(1, 500)}]), ConfigError, "500", "128"),
    # -- agents: learning --------------------------------------------------------------------------------------------
    "learn-two": (lambda w: w.agent.learn((1, 2)), ConfigError, "(1, 2)"),
    "learn-numbers": (lambda w: w.agent.learn((1, 2, 3)), ConfigError, "completion_ids", "1"),
    "learn-empty": (lambda w: w.agent.learn(([], [], torch.zeros(0))), ConfigError, "completion_ids", "none"),
    "learn-no-masks": (lambda w: w.agent.learn(w.learned(masks=None)), ConfigError, "action_masks", "None"),
    "learn-no-rewards": (lambda w: w.agent.learn(w.learned(rewards=None)), ConfigError, "rewards", "None"),
    "learn-word-rewards": (lambda w: w.agent.learn(w.learned(rewards="good")), ConfigError, "rewards", "'good'"),
    "learn-few-rewards": (lambda w: w.agent.learn(w.learned(rewards=[1.0, 2.0])), ConfigError, "rewards", "8"),
    "learn-turned-rewards": (
        lambda w: w.agent.learn(
            w.learned(ids=[ids(4, 10)] * 2, masks=[ids(4, 9, fill=1)] * 2, rewards=torch.ones(4, 2))
        ),
        ConfigError,
        "[2, 4]",
        "[4, 2]",
    ),
    "learn-cube-of-rewards": (lambda w: w.agent.learn(w.learned(rewards=torch.ones(1, 8, 1))), ConfigError, "8"),
    "learn-meta-rewards": (
        lambda w: w.agent.learn(w.learned(rewards=torch.ones(8, device="meta"))),
        ConfigError,
        "rewards",
        "meta",
    ),
    "learn-few-masks": (lambda w: w.agent.learn(w.learned(masks=[ids(4, 9, fill=1)])), ConfigError, "(4, 9)"),
    "learn-no-rows": (lambda w: w.agent.learn(w.learned(ids=[ids(0, 4)], masks=[ids(1, 3, fill=1)])), ConfigError, "0"),
    "learn-scalar": (lambda w: w.agent.learn(w.learned(ids=[torch.tensor(5)])), ConfigError, "shape ()"),
    "learn-cubes": (lambda w: w.agent.learn(w.learned(ids=[ids(2, 4, 10)])), ConfigError, "(2, 4, 10)"),
    "learn-fractions": (lambda w: w.agent.learn(w.learned(ids=[torch.rand(8, 10)])), ConfigError, "float32"),
    "learn-beyond": (lambda w: w.agent.learn(w.learned(ids=[ids(8, 10, fill=10**6)])), ConfigError, "1000000"),
    "learn-negative": (lambda w: w.agent.learn(w.learned(ids=[ids(8, 10, fill=-1)])), ConfigError, "-1"),
    "learn-half-mask": (
        lambda w: w.agent.learn(w.learned(masks=[torch.full((8, 9), 0.5)])),
        ConfigError,
        "action_masks",
        "0.5",
    ),
    "learn-mask-two": (lambda w: w.agent.learn(w.learned(masks=[ids(8, 9, fill=2)])), ConfigError, "mask", "2"),
    "learn-too-long": (
        lambda w: w.agent.learn(w.learned(ids=[ids(8, 3000)], masks=[ids(8, 2999, fill=1)])),
        ConfigError,
        "3000",
        "128",
    ),
    "learn-ragged": (lambda w: w.agent.learn(w.learned(ids=[[[1, 2], [3]]])), ConfigError, "completion_ids"),
    "learn-logps": (lambda w: w.agent.learn(w.learned(), sampling_logps=5), ConfigError, "sampling_logps", "5"),
    "learn-few-logps": (
        lambda w: w.agent.learn(w.learned(), sampling_logps=[torch.zeros(3)]),
        ConfigError,
        "sampling_logps",
        "3",
    ),
    "learn-word-logps": (lambda w: w.agent.learn(w.learned(), sampling_logps=["x"]), ConfigError, "sampling_logps"),
    "learn-turns-number": (lambda w: w.turns.learn(w.learned(), turn_ids=5), ConfigError, "turn_ids", "5"),
    "learn-turns-none": (lambda w: w.turns.learn(w.learned()), ConfigError, "turn_ids"),
    "learn-turns-few": (lambda w: w.turns.learn(w.learned(), turn_ids=[ids(2, 9)]), ConfigError, "turn_ids", "8"),
    "learn-turns-fractions": (
        lambda w: w.turns.learn(w.learned(rewards=torch.zeros(8, 2)), turn_ids=torch.full((8, 9), 0.5)),
        ConfigError,
        "turn_ids",
        "float32",
    ),
    "learn-batch-beyond": (lambda w: w.agent.learn(beyond(w)), ConfigError, "1000000"),
    "learn-batch-long": (lambda w: w.agent.learn(long(w)), ConfigError, "128"),
    "sft-learn-tuple": (lambda w: w.sft.learn(w.learned()), ConfigError, "tuple"),
    "sft-learn-none": (lambda w: w.sft.learn(None), ConfigError, "None"),
    "dpo-learn-text": (lambda w: w.dpo.learn("x"), ConfigError, "str"),
    "dpo-learn-gym": (lambda w: w.dpo.learn(w.sft_gym), ConfigError, "SFTGym"),
    "dpo-learn-sft": (lambda w: w.dpo.learn(w.sft_gym.reset()), ConfigError, "pairs"),
    "tangents-shape": (lambda w: w.agent.accumulate_tangents(w.batch(), ids(1)), ConfigError, "(1,)"),
    # -- agents: exams, copies, files --------------------------------------------------------------------------------
    "save-long": (lambda w: w.agent.save_checkpoint("a" * 5000), CheckpointError, "too long"),
    "load-long": (lambda w: w.agent.load_checkpoint("a" * 5000), CheckpointError, "too long"),
    "population-of-a-billion": (
        lambda w: GRPO.population(10**9, runtime=w.runtime, max_output_tokens=4),
        ConfigError,
        "1,000,000,000",
    ),
    "save-onto-file": (lambda w: w.agent.save_checkpoint(w.file), CheckpointError, "file"),
    "save-below-file": (lambda w: w.agent.save_checkpoint(w.file / "x"), CheckpointError, "file"),
    "save-whole": (lambda w: w.agent.save_checkpoint(w.path / "y", False), ConfigError, "lora_only"),
    "load-missing": (lambda w: GRPO.load(w.path / "nowhere"), CheckpointError, "nowhere"),
    "load-file": (lambda w: GRPO.load(w.file, runtime=w.runtime), CheckpointError, "file"),
    "load-other": (lambda w: SFT.load(w.checkpoint, runtime=w.runtime), CheckpointError, "GRPO", "SFT"),
    "load-into-missing": (lambda w: w.agent.load_checkpoint(w.path / "no"), CheckpointError, "no"),
    "adapter-name": (lambda w: w.agent.use_adapter("critic"), ConfigError, "'critic'"),
    "to-device": (lambda w: w.agent.to_device("x"), ConfigError, "'x'"),
    # -- runtime -----------------------------------------------------------------------------------------------------
    "pretrained-missing": (lambda w: Runtime.from_pretrained("./no"), ConfigError, "./no"),
    "pretrained-device": (lambda w: Runtime.from_pretrained("embedded", device="x"), ConfigError, "device", "'x'"),
    "runtime-accelerate": (lambda w: w.runtime.accelerate("x"), ConfigError, "'x'"),
    # -- populations -------------------------------------------------------------------------------------------------
    "agents-empty": (lambda w: Population([], w.task), ConfigError, "0"),
    "agents-twice": (lambda w: Population([w.agent, w.agent], w.task), ConfigError, "twice", "[0, 0]"),
    "agents-kinds": (lambda w: Population([w.agent, w.sft], w.task), ConfigError, "sft"),
    "no-such-agent": (lambda w: w.population.agent(99), ConfigError, "99"),
    "learn-others-rollout": (lambda w: w.population.learn(foreign(w)), ConfigError, "[0, 1]", "[0]"),
    "learn-same-indices": (lambda w: w.population.learn(namesake(w)), ConfigError, "rollout"),
    "evaluate-stranger": (lambda w: w.population.evaluate(agents=[stranger(w)]), ConfigError, "agents"),
    "examples-none": (lambda w: w.population.examples(0), ConfigError, "SFTTask"),
    "draw-from-questions": (lambda w: w.population.draw(), ConfigError, "SFTTask"),
    "evolve-strangers": (lambda w: evolve(w, fitness={5: Fitness(1.0)}), ConfigError, "[5]", "[0, 1]"),
    # -- search ------------------------------------------------------------------------------------------------------
    "parameter-reversed": (lambda w: RLParameter(1, 0), ConfigError, "min=1", "max=0"),
    "parameter-dtype": (lambda w: RLParameter(1, 2, dtype="int"), ConfigError, "dtype", "'int'"),
    "genes-tuple": (lambda w: HyperparameterConfig(lr=(1, 2)), ConfigError, "lr", "(1, 2)"),
    "genes-unknown": (lambda w: HyperparameterConfig()["x"], ConfigError, "'x'"),
    "tournament-large": (lambda w: TournamentSelection(8, True, 4), ConfigError, "8", "4"),
    "select-empty": (lambda w: TournamentSelection(2, True, 4).select([]), ConfigError, "empty"),
    "select-fresh": (lambda w: TournamentSelection(2, True, 2).select([w.agent]), ConfigError, "0"),
    "mutations-layer": (lambda w: Mutations(0, 0, 1, 0, 0, 1), ConfigError, "new_layer_prob", "1"),
    "mutation-from-empty": (lambda w: Mutation.from_dict({}), ConfigError, "{}"),
    "scores-empty": (lambda w: Fitness.from_scores([]), ConfigError, "0"),
    "plan-index": (lambda w: NoSelection().plan({3: Fitness(1.0)}, 0, 0, 1), ConfigError, "next_index", "1"),
    # -- tasks and data ----------------------------------------------------------------------------------------------
    "row-text": (lambda w: ConstantTarget().row("exam", "0"), EnvError, "'0'"),
    "episodes-unknown": (lambda w: EpisodeTask(GridNavigation, {"width": 3}), ConfigError, "width"),
    "episode-seed": (lambda w: EpisodeTask(GridNavigation).episode_seed("x", 0), EnvError, "'x'"),
    "rows-none": (lambda w: DatasetTask(None, ROWS, reward_fn=exact_match), EnvError, "None"),
    "rows-test-number": (lambda w: DatasetTask(ROWS, ROWS, 5, reward_fn=exact_match), EnvError, "5"),
    "rows-template-part": (lambda w: dataset(conversation_template=[{}]), ConfigError, "{}"),
    "curated-none": (lambda w: CuratedTask(None), EnvError, "None"),
    "curated-small": (lambda w: CuratedTask(ROWS), EnvError, "400", "12"),
    "read-none": (lambda w: read_dataset(None), EnvError, "None"),
    # -- environments of llm_envs ------------------------------------------------------------------------------------
    "gym-rows": (lambda w: gym(w, train_dataset=None), EnvError, "None"),
    "gym-state-empty": (lambda w: gym(w).from_state({}), ConfigError, "batches", "{}"),
    "sft-gym-rows": (lambda w: SFTGym(None, ROWS, w.tokenizer), EnvError, "None"),
    "preference-gym-rows": (lambda w: PreferenceGym(5, 5, w.tokenizer), EnvError, "5"),
    "preference-gym-column": (lambda w: PreferenceGym(ROWS, ROWS, w.tokenizer), EnvError, "chosen"),
    "wrapper-env": (lambda w: w.wrapped(env=None), ConfigError, "None"),
    "wrapper-step-rows": (lambda w: w.wrapper.step(ids(2, 9)), ConfigError, "(2, 9)"),
    "wrapper-step-fractions": (lambda w: w.wrapper.step(torch.rand(1, 9)), ConfigError, "float32"),
    "grid-step-early": (lambda w: GridNavigationEnv().step("1"), EnvError, "reset"),
    # -- graders -----------------------------------------------------------------------------------------------------
    "combined-triple": (lambda w: CombinedGrader([(exact_match, 1, 2)]), ConfigError, "2)"),
    # -- runs, reports, manifests ------------------------------------------------------------------------------------
    "run-missing": (lambda w: RunDirectory.open(w.path / "no"), CheckpointError, "no"),
    "genes-above": (
        lambda w: manifest(mutation={"genes_per_mutation": 50, "rl_hp_selection": {"lr": {}}}),
        ConfigError,
        "genes_per_mutation",
        "50",
    ),
    "ranks-reversed": (lambda w: mutations(rank_range=(8, 4)), ConfigError, "rank_range", "(8, 4)"),
    "output-above-context": (
        lambda w: manifest(algorithm={"max_output_tokens": 5000, "max_model_len": 100}),
        ConfigError,
        "max_output_tokens",
        "5000",
    ),
    "task-isolated": (
        lambda w: manifest(environment={"graders": [{"name": "task", "isolate": True}]}),
        ConfigError,
        "isolate",
        "task",
    ),
    "timeout-alone": (
        lambda w: manifest(environment={"graders": [{"name": "exact_match", "timeout": 9.0}]}),
        ConfigError,
        "timeout",
        "isolate",
    ),
    "section-left-out": (lambda w: manifest(pop_size=3), ConfigError, "pop_size", "'training.pop_size'"),
    "unknown-name": (lambda w: Mutations(0, 0, 0, 0, 0, 0), ConfigError, "rl_hp=0"),
    # -- runs from Python --------------------------------------------------------------------------------------------
    "train-task-misspelt": (lambda w: trained(w, task="reasoning_gym:gdc"), ConfigError, "'gcd'"),
    "train-algorithm": (lambda w: trained(w, algorithm="GROP"), ConfigError, "'GROP'", "GRPO"),
    "train-gene": (lambda w: trained(w, evolve=["lrr"]), ConfigError, "lrr"),
    "train-section": (lambda w: trained(w, trainning={"evo_steps": 4}), ConfigError, "trainning"),
    "train-section-number": (lambda w: trained(w, training=5), ConfigError, "training", "5"),
    "train-setting": (lambda w: trained(w, training={"evo_step": 4}), ConfigError, "evo_step", "evo_steps"),
    "train-no-rewards": (lambda w: trained(w, reward=[]), ConfigError, "reward", "none"),
    "train-rows-empty": (lambda w: trained(w, dataset=[]), EnvError, "none"),
    "train-out-taken": (lambda w: trained(w, out=w.finished.path), CheckpointError, "finished"),
    "train-manifest": (lambda w: trained(w, manifest=w.path / "no.yaml"), ConfigError, "no.yaml"),
    "run-nowhere": (lambda w: Run(w.path / "no"), CheckpointError, "no"),
    "run-long": (lambda w: Run("a" * 5000), CheckpointError, "too long"),
    "run-of-a-file": (lambda w: Run(w.file), CheckpointError, "file"),
    "report-twice": (lambda w: build_report([w.finished.path] * 2, w.path / "r"), ConfigError, "twice"),
    "load-any-long": (lambda w: load("a" * 5000), CheckpointError, "too long"),
    "load-any-nowhere": (lambda w: load(w.path / "no"), CheckpointError, "no"),
    "load-nameless": (lambda w: load(w.checkpoint), CheckpointError, "runtime=", "agent"),
    "trainer-algorithm": (lambda w: trainer(algorithm="GRPPO"), ConfigError, "'GRPPO'", "GRPO"),
    "trainer-hyperparameter": (lambda w: trainer(algorithm={"lrr": 1}), ConfigError, "lrr", "'lr'"),
    "trainer-task": (lambda w: trainer(environment="reasoning_gym:gdc"), ConfigError, "'gdc'", "'gcd'"),
    "trainer-weights": (
        lambda w: trainer(load_weights_from=w.path / "no").train(out=w.path / "weights"),
        CheckpointError,
        "adapter",
        "no",
    ),
    "trainer-device": (lambda w: trainer(device="gpu"), ConfigError, "device", "'gpu'"),
    "trainer-env-early": (lambda w: trainer().env, ConfigError, "train()"),
    # -- documented loops and helpers --------------------------------------------------------------------------------
    "loop-pop-empty": (lambda w: questions(w, pop=[]), ConfigError, "pop", "none"),
    "loop-pop-sft": (lambda w: questions(w, pop=[w.sft]), ConfigError, "SFT", "finetune_llm_sft"),
    "loop-no-env": (lambda w: questions(w, env=None), ConfigError, "neither"),
    "loop-two-envs": (lambda w: questions(w, env_fn=lambda: w.gym), ConfigError, "both"),
    "loop-env-fn-none": (lambda w: questions(w, env=None, env_fn=lambda: None), ConfigError, "None"),
    "loop-env-fn-fails": (lambda w: questions(w, env=None, env_fn=lambda: 1 / 0), EnvError, "env_fn", "division"),
    "loop-env-fn-asks": (lambda w: questions(w, env=None, env_fn=lambda x: x), EnvError, "env_fn", "x"),
    "loop-batch": (lambda w: episodes(w, init_hp={"BATCH_SIZE": 0}), ConfigError, "BATCH_SIZE", "0"),
    "loop-misspelt": (lambda w: questions(w, max_step=4), ConfigError, "max_step", "max_steps"),
    "loop-no-mutations": (lambda w: questions(w, tournament=NoSelection()), ConfigError, "mutation"),
    "loop-accelerator": (lambda w: questions(w, accelerator="x"), ConfigError, "accelerator", "'x'"),
    "loop-factory-none": (lambda w: episodes(w, env_factory=lambda: None), ConfigError, "None"),
    "loop-env-setting": (lambda w: episodes(w, env_config={"width": 3}), ConfigError, "GridNavigation", "width"),
    "population-algorithm": (lambda w: create_population("GRPOO"), ConfigError, "'GRPOO'", "GRPO"),
    "mean-of-words": (lambda w: aggregate_metrics_across_gpus(None, "x"), ConfigError, "metric_tensor", "'x'"),
    "mean-accelerator": (lambda w: aggregate_metrics_across_gpus("x", 1.0), ConfigError, "accelerator", "'x'"),
    "actor-onto-file": (lambda w: w.agent.actor.save_pretrained(w.file), CheckpointError, "file"),
    # -- schedules, trackers -------------------------------------------------------------------------------------------
    "fitness-error": (lambda w: Fitness(1.0, -1.0), ConfigError, "stderr", "-1.0"),
    "fitness-state": (lambda w: Fitness.from_state({}), ConfigError, "mean", "{}"),
    "schedule-empty": (lambda w: stretched({}, 9), ConfigError, "genes", "None"),
    "schedule-late": (lambda w: stretched({**LATE, "total_tokens": 9}, 9), ConfigError, "lr", "5"),
    "schedule-no-length": (lambda w: stretched({"genes": {}}, 9), ConfigError, "total_tokens", "None"),
    "schedule-records": (lambda w: hyperparameter_schedule(["x"], 0), CheckpointError, "'x'"),
    "schedule-no-agent": (lambda w: hyperparameter_schedule([], 0), CheckpointError, "0"),
    "tracker-misspelt": (lambda w: check_trackers(["wandbb"]), ConfigError, "'wandbb'", "'wandb'"),
    "judge-shows-nothing": (lambda w: JudgeGrader("m", template="{answer}"), ConfigError, "completion"),
    "judge-shows-one": (lambda w: PairwiseJudgeGrader("m", template="{{ completion_a }}"), ConfigError, "tion_b"),
    "judge-space": (lambda w: JudgeGrader("m", base_url="http://a b"), ConfigError, "base_url"),
    "sft-gym-other-column": (
        lambda w: SFTGym(ROWS, ROWS, w.tokenizer, response_column="anwser"),
        EnvError,
        "anwser",
        "'answer'",
    ),
    "unpaired-gym": (lambda w: UnpairedGym(ROWS, ROWS, w.tokenizer), EnvError, "label"),
    "kto-learns-sft": (lambda w: KTO(runtime=w.runtime).learn(w.sft_gym.reset()), ConfigError, "KTO"),
}
"""By name: what is done, the error, and the words that its sentence must have: the argument, and what was found."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("mistakes"))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_a_sentence_that_names_it(name: str, world: World) -> None:
    make, error, *words = MISTAKES[name]
    with pytest.raises(AgileRLError) as caught:
        make(world)
    assert isinstance(caught.value, error), repr(caught.value)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert len(str(caught.value)) < 1000
