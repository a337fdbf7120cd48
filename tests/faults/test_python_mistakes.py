"""What people get wrong in Python, at every public door: each ends in one sentence that names what was found.

Missing or unknown keyword arguments are Python's own TypeError and not in here, except where a constructor takes
hyperparameters as keywords: those have a sentence of ours. ``test_wrong_values`` hands wrong values to every parameter
of everything public, and looks whether plain ones are named: here are those that say more, or are wrong together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from agilerl import Mutations, Population, Run, Runtime, TournamentSelection, load
from agilerl.algorithms import (
    GRPO,
    GSPO,
    KTO,
    PPO,
    SFT,
    CosineLRScheduleConfig,
    GRPOConfig,
)
from agilerl.config.manifest import load_manifest
from agilerl.envs import (
    CuratedTask,
    DatasetTask,
    GuessTheNumber,
    ReasoningGymTask,
    decode_completions,
    mix,
    read_dataset,
    render_prompt,
    score_completions,
)
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.examples import PreferenceTask, SFTTask
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.envs.tools import ToolEnv
from agilerl.errors import AgileRLError, CheckpointError, ConfigError, EnvError, RewardError
from agilerl.hpo.fitness import Fitness, probability_better
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import Evolve, HyperparameterConfig, RLParameter
from agilerl.hpo.schedule import hyperparameter_schedule, stretched
from agilerl.hpo.selection import NoSelection, Plan
from agilerl.hpo.spread import initial_hyperparameters
from agilerl.hpo.strategies import LRSchedule
from agilerl.llm_envs import (
    FormatRewardWrapper,
    PreferenceGym,
    ReasoningGym,
    SearchTool,
    SFTGym,
    SyncMultiTurnVecEnv,
    UnpairedGym,
)
from agilerl.report import build_report
from agilerl.rewards import (
    CombinedGrader,
    IsolatedGrader,
    JudgeGrader,
    Overlong,
    PairwiseJudgeGrader,
    Regex,
    RewardModelGrader,
    call_grader,
    exact_match,
    library_grader,
    run_python,
)
from agilerl.rollouts.teacher import TeacherEndpoint
from agilerl.runs import RunDirectory, read_lines
from agilerl.training.loop import train as run_session
from agilerl.training.resolved import resolve
from agilerl.training.setup import build
from agilerl.training.trackers import CSVFile, check_trackers
from agilerl.training.train_llm import finetune_llm_preference
from agilerl.utils.algo_utils import VLLMConfig
from agilerl.utils.llm_utils import compare_responses
from agilerl.utils.probe_envs_llm import ConstantTargetEnv, GridNavigationEnv
from agilerl.utils.utils import (
    aggregate_metrics_across_gpus,
    create_population,
    run_selection_and_mutation,
    save_llm_checkpoint,
)
from tests.faults.mistaken import (
    CHAT,
    ROWS,
    World,
    beyond,
    chat,
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
    people,
    questions,
    spelling,
    stranger,
    trained,
    trainer,
)
from tests.probes import ConstantTarget, GridNavigation

pytestmark = pytest.mark.model


class Mistake(NamedTuple):
    name: str
    make: Callable[[World], Any]
    error: type[AgileRLError]
    words: tuple[str, ...]
    """What the message must name: the argument, and what was found."""


LATE = {"genes": {"lr": [{"tokens": 5, "value": 1e-4}]}}
"""A schedule without a value at its beginning."""


MISTAKES = [
    # -- agents: constructors ----------------------------------------------------------------------------------------
    Mistake("network-class", lambda w: GRPO(actor_network=torch.nn.Module), ConfigError, ("actor_network",)),
    Mistake("network-layer", lambda w: GRPO(actor_network=torch.nn.Linear(2, 2)), ConfigError, ("Linear",)),
    Mistake("runtime-model", lambda w: GRPO(runtime=w.runtime.base.model), ConfigError, ("runtime",)),
    Mistake("no-model", lambda w: GRPO(), ConfigError, ("model_name", "none")),
    Mistake("two-models", lambda w: w.grpo(model_name="embedded"), ConfigError, ("model_name", "runtime")),
    Mistake("unknown-keyword", lambda w: w.grpo(learning_rate=1e-4), ConfigError, ("learning_rate",)),
    Mistake("group-size-one", lambda w: w.grpo(group_size=1), ConfigError, ("group_size", "1")),
    Mistake("pad-beyond", lambda w: w.grpo(pad_token_id=10**6), ConfigError, ("pad_token_id", "1000000")),
    Mistake("hp-config-dict", lambda w: w.grpo(hp_config={"lr": (1e-6, 1e-3)}), ConfigError, ("hp_config", "lr")),
    Mistake("hp-config-parameters", lambda w: w.grpo(hp_config={"lr": 1}), ConfigError, ("hp_config", "1")),
    Mistake(
        "hp-config-unknown",
        lambda w: w.grpo(hp_config=HyperparameterConfig(learning_rate=RLParameter(0.1, 1))),
        ConfigError,
        ("learning_rate",),
    ),
    Mistake("config-dict", lambda w: w.grpo(config={"lr": 1}), ConfigError, ("config", "lr")),
    Mistake("config-of-another", lambda w: w.grpo(config=SFT.Config()), ConfigError, ("config", "SFTConfig")),
    Mistake("lora-dict", lambda w: w.grpo(lora_config={"r": 8}), ConfigError, ("lora_config", "dict")),
    Mistake("lora-number", lambda w: w.grpo(lora_config=8), ConfigError, ("lora_config", "int")),
    Mistake("loss-text", lambda w: w.grpo(loss="mse"), ConfigError, ("loss", "'mse'")),
    Mistake("schedule-number", lambda w: w.grpo(cosine_lr_schedule_config=10), ConfigError, ("schedule", "10")),
    Mistake("device-number", lambda w: GRPO(model_name="embedded", device=0), ConfigError, ("device", "0")),
    Mistake("device-unknown", lambda w: GRPO(model_name="embedded", device="gpu"), ConfigError, ("device", "'gpu'")),
    Mistake("accelerator-text", lambda w: w.grpo(accelerator="cuda"), ConfigError, ("accelerator", "'cuda'")),
    Mistake("seed-negative", lambda w: w.grpo(seed=-3), ConfigError, ("seed", "-3")),
    Mistake("seed-huge", lambda w: w.grpo(seed=2**70), ConfigError, ("seed",)),
    Mistake("sft-with-group", lambda w: SFT(runtime=w.runtime, group_size=4), ConfigError, ("group_size",)),
    Mistake("gspo-with-loss", lambda w: GSPO(runtime=w.runtime, loss_type="cispo"), ConfigError, ("loss_type",)),
    Mistake("ppo-gamma", lambda w: PPO(runtime=w.runtime, gamma=2), ConfigError, ("gamma", "2")),
    Mistake("config-class-unknown", lambda w: GRPOConfig(rate=1), ConfigError, ("rate",)),
    Mistake("config-assigned", lambda w: setattr(GRPOConfig(), "lr", "x"), ConfigError, ("lr", "'x'")),
    Mistake("schedule-share", lambda w: CosineLRScheduleConfig(5, 2.0), ConfigError, ("warmup_proportion", "2.0")),
    Mistake("attribute-true", lambda w: setattr(w.agent, "lr", True), ConfigError, ("lr", "boolean")),
    Mistake("attribute-text", lambda w: setattr(w.agent, "batch_size", "x"), ConfigError, ("batch_size", "'x'")),
    Mistake("attributes-unknown", lambda w: w.agent.set_hyperparameters({"rate": 1}), ConfigError, ("rate",)),
    # -- agents: acting ----------------------------------------------------------------------------------------------
    Mistake("act-texts", lambda w: w.agent.get_action(["2+2?"]), ConfigError, ("input_ids", "'2+2?'")),
    Mistake("act-empty", lambda w: w.agent.get_action([]), ConfigError, ("prompt", "none")),
    Mistake("act-tensor", lambda w: w.agent.get_action(ids(1, 4)), ConfigError, ("input_ids",)),
    Mistake("act-without-ids", lambda w: w.agent.get_action([{"text": "x"}]), ConfigError, ("input_ids", "text")),
    Mistake("act-ids-none", lambda w: w.agent.get_action([{"input_ids": None}]), ConfigError, ("input_ids", "None")),
    Mistake("act-ids-text", lambda w: w.agent.get_action([{"input_ids": "12"}]), ConfigError, ("input_ids", "'12'")),
    Mistake("act-ids-empty", lambda w: w.agent.get_action({"input_ids": ids(1, 0)}), ConfigError, ("(1, 0)",)),
    Mistake("act-two-rows", lambda w: w.agent.get_action([{"input_ids": ids(2, 4)}]), ConfigError, ("(2, 4)",)),
    Mistake("act-three-dims", lambda w: w.agent.get_action([{"input_ids": ids(1, 1, 4)}]), ConfigError, ("(1, 1, 4)",)),
    Mistake(
        "act-fractions",
        lambda w: w.agent.get_action([{"input_ids": ids(1, 4, fill=1.5, dtype=torch.float32)}]),
        ConfigError,
        ("input_ids", "float32"),
    ),
    Mistake(
        "act-booleans",
        lambda w: w.agent.get_action([{"input_ids": torch.ones(1, 4, dtype=torch.bool)}]),
        ConfigError,
        ("input_ids", "bool"),
    ),
    Mistake("act-beyond", lambda w: w.agent.get_action([w.prompt(5, 10**6)]), ConfigError, ("1000000", "vocabulary")),
    Mistake("act-negative", lambda w: w.agent.get_action([w.prompt(5, -1)]), ConfigError, ("-1", "vocabulary")),
    Mistake("act-too-long", lambda w: w.agent.get_action([{"input_ids": ids(1, 500)}]), ConfigError, ("500", "128")),
    Mistake("act-training-text", lambda w: w.agent.get_action([w.prompt()], "yes"), ConfigError, ("training", "'yes'")),
    Mistake("logprobs-tuple", lambda w: w.agent.logprobs(w.learned()), ConfigError, ("RolloutBatch", "tuple")),
    # -- agents: learning --------------------------------------------------------------------------------------------
    Mistake("learn-two", lambda w: w.agent.learn((1, 2)), ConfigError, ("(1, 2)",)),
    Mistake("learn-numbers", lambda w: w.agent.learn((1, 2, 3)), ConfigError, ("completion_ids", "1")),
    Mistake("learn-empty", lambda w: w.agent.learn(([], [], torch.zeros(0))), ConfigError, ("completion_ids", "none")),
    Mistake("learn-no-masks", lambda w: w.agent.learn(w.learned(masks=None)), ConfigError, ("action_masks", "None")),
    Mistake("learn-no-rewards", lambda w: w.agent.learn(w.learned(rewards=None)), ConfigError, ("rewards", "None")),
    Mistake(
        "learn-word-rewards", lambda w: w.agent.learn(w.learned(rewards="good")), ConfigError, ("rewards", "'good'")
    ),
    Mistake("learn-few-rewards", lambda w: w.agent.learn(w.learned(rewards=[1.0, 2.0])), ConfigError, ("rewards", "8")),
    Mistake(
        "learn-turned-rewards",
        lambda w: w.agent.learn(
            w.learned(ids=[ids(4, 10)] * 2, masks=[ids(4, 9, fill=1)] * 2, rewards=torch.ones(4, 2))
        ),
        ConfigError,
        ("[2, 4]", "[4, 2]"),
    ),
    Mistake(
        "learn-cube-of-rewards", lambda w: w.agent.learn(w.learned(rewards=torch.ones(1, 8, 1))), ConfigError, ("8",)
    ),
    Mistake(
        "learn-meta-rewards",
        lambda w: w.agent.learn(w.learned(rewards=torch.ones(8, device="meta"))),
        ConfigError,
        ("rewards", "meta"),
    ),
    Mistake("learn-few-masks", lambda w: w.agent.learn(w.learned(masks=[ids(4, 9, fill=1)])), ConfigError, ("(4, 9)",)),
    Mistake(
        "learn-no-rows",
        lambda w: w.agent.learn(w.learned(ids=[ids(0, 4)], masks=[ids(1, 3, fill=1)])),
        ConfigError,
        ("0",),
    ),
    Mistake("learn-scalar", lambda w: w.agent.learn(w.learned(ids=[torch.tensor(5)])), ConfigError, ("shape ()",)),
    Mistake("learn-cubes", lambda w: w.agent.learn(w.learned(ids=[ids(2, 4, 10)])), ConfigError, ("(2, 4, 10)",)),
    Mistake("learn-fractions", lambda w: w.agent.learn(w.learned(ids=[torch.rand(8, 10)])), ConfigError, ("float32",)),
    Mistake(
        "learn-beyond", lambda w: w.agent.learn(w.learned(ids=[ids(8, 10, fill=10**6)])), ConfigError, ("1000000",)
    ),
    Mistake("learn-negative", lambda w: w.agent.learn(w.learned(ids=[ids(8, 10, fill=-1)])), ConfigError, ("-1",)),
    Mistake(
        "learn-half-mask",
        lambda w: w.agent.learn(w.learned(masks=[torch.full((8, 9), 0.5)])),
        ConfigError,
        ("action_masks", "0.5"),
    ),
    Mistake(
        "learn-mask-two", lambda w: w.agent.learn(w.learned(masks=[ids(8, 9, fill=2)])), ConfigError, ("mask", "2")
    ),
    Mistake(
        "learn-too-long",
        lambda w: w.agent.learn(w.learned(ids=[ids(8, 3000)], masks=[ids(8, 2999, fill=1)])),
        ConfigError,
        ("3000", "128"),
    ),
    Mistake("learn-ragged", lambda w: w.agent.learn(w.learned(ids=[[[1, 2], [3]]])), ConfigError, ("completion_ids",)),
    Mistake(
        "learn-logps", lambda w: w.agent.learn(w.learned(), sampling_logps=5), ConfigError, ("sampling_logps", "5")
    ),
    Mistake(
        "learn-few-logps",
        lambda w: w.agent.learn(w.learned(), sampling_logps=[torch.zeros(3)]),
        ConfigError,
        ("sampling_logps", "3"),
    ),
    Mistake(
        "learn-word-logps", lambda w: w.agent.learn(w.learned(), sampling_logps=["x"]), ConfigError, ("sampling_logps",)
    ),
    Mistake("learn-turns-number", lambda w: w.turns.learn(w.learned(), turn_ids=5), ConfigError, ("turn_ids", "5")),
    Mistake("learn-turns-none", lambda w: w.turns.learn(w.learned()), ConfigError, ("turn_ids",)),
    Mistake(
        "learn-turns-few", lambda w: w.turns.learn(w.learned(), turn_ids=[ids(2, 9)]), ConfigError, ("turn_ids", "8")
    ),
    Mistake(
        "learn-turns-fractions",
        lambda w: w.turns.learn(w.learned(rewards=torch.zeros(8, 2)), turn_ids=torch.full((8, 9), 0.5)),
        ConfigError,
        ("turn_ids", "float32"),
    ),
    Mistake("learn-batch-beyond", lambda w: w.agent.learn(beyond(w)), ConfigError, ("1000000",)),
    Mistake("learn-batch-long", lambda w: w.agent.learn(long(w)), ConfigError, ("128",)),
    Mistake("sft-learn-tuple", lambda w: w.sft.learn(w.learned()), ConfigError, ("tuple",)),
    Mistake("sft-learn-none", lambda w: w.sft.learn(None), ConfigError, ("None",)),
    Mistake("dpo-learn-text", lambda w: w.dpo.learn("x"), ConfigError, ("str",)),
    Mistake("dpo-learn-gym", lambda w: w.dpo.learn(w.sft_gym), ConfigError, ("SFTGym",)),
    Mistake("dpo-learn-sft", lambda w: w.dpo.learn(w.sft_gym.reset()), ConfigError, ("pairs",)),
    Mistake("accumulate-loss", lambda w: w.agent.accumulate(w.batch(), "x"), ConfigError, ("'x'",)),
    Mistake(
        "accumulate-denominator",
        lambda w: w.agent.accumulate(w.batch(), denominator="x"),
        ConfigError,
        ("denominator", "'x'"),
    ),
    Mistake(
        "accumulate-zero", lambda w: w.agent.accumulate(w.batch(), denominator=0), ConfigError, ("denominator", "0")
    ),
    Mistake("tangents-none", lambda w: w.agent.accumulate_tangents(None, ids(1)), ConfigError, ("None",)),
    Mistake("tangents-shape", lambda w: w.agent.accumulate_tangents(w.batch(), ids(1)), ConfigError, ("(1,)",)),
    Mistake("reference-text", lambda w: w.agent.set_reference_policy("next"), ConfigError, ("tracker", "'next'")),
    # -- agents: exams, copies, files --------------------------------------------------------------------------------
    Mistake("test-task", lambda w: w.agent.test(w.task), ConfigError, ("env", "Parity")),
    Mistake("test-no-loops", lambda w: w.agent.test(w.gym, loop=0), ConfigError, ("loop", "0")),
    Mistake("test-half-loop", lambda w: w.agent.test(w.gym, loop=1.5), ConfigError, ("loop", "1.5")),
    Mistake("sft-test-none", lambda w: w.sft.test(None), ConfigError, ("env", "None")),
    Mistake("sft-test-no-loops", lambda w: w.sft.test(w.sft_gym, loop=0), ConfigError, ("loop", "0")),
    Mistake("clone-negative", lambda w: w.agent.clone(-2), ConfigError, ("index", "-2")),
    Mistake("save-long", lambda w: w.agent.save_checkpoint("a" * 5000), CheckpointError, ("too long",)),
    Mistake("load-long", lambda w: w.agent.load_checkpoint("a" * 5000), CheckpointError, ("too long",)),
    Mistake(
        "population-of-a-billion",
        lambda w: GRPO.population(10**9, runtime=w.runtime, max_output_tokens=4),
        ConfigError,
        ("1,000,000,000",),
    ),
    Mistake("save-onto-file", lambda w: w.agent.save_checkpoint(w.file), CheckpointError, ("file",)),
    Mistake("save-below-file", lambda w: w.agent.save_checkpoint(w.file / "x"), CheckpointError, ("file",)),
    Mistake("save-whole", lambda w: w.agent.save_checkpoint(w.path / "y", False), ConfigError, ("lora_only",)),
    Mistake("save-llm-none", lambda w: save_llm_checkpoint(None, w.path), ConfigError, ("agent", "None")),
    Mistake("save-llm-path", lambda w: save_llm_checkpoint(w.agent, None), ConfigError, ("path", "None")),
    Mistake("load-missing", lambda w: GRPO.load(w.path / "nowhere"), CheckpointError, ("nowhere",)),
    Mistake("load-file", lambda w: GRPO.load(w.file, runtime=w.runtime), CheckpointError, ("file",)),
    Mistake("load-runtime", lambda w: GRPO.load(w.checkpoint, runtime="x"), ConfigError, ("runtime", "'x'")),
    Mistake("load-other", lambda w: SFT.load(w.checkpoint, runtime=w.runtime), CheckpointError, ("GRPO", "SFT")),
    Mistake("load-into-missing", lambda w: w.agent.load_checkpoint(w.path / "no"), CheckpointError, ("no",)),
    Mistake("from-state-none", lambda w: GRPO.from_state(None, w.runtime), ConfigError, ("state", "None")),
    Mistake("from-state-runtime", lambda w: GRPO.from_state(w.agent.state(), None), ConfigError, ("runtime", "None")),
    Mistake("population-zero", lambda w: GRPO.population(0, runtime=w.runtime), ConfigError, ("size", "0")),
    Mistake("population-init", lambda w: GRPO.population(2, runtime=w.runtime, init="x"), ConfigError, ("init", "'x'")),
    Mistake("population-genes", lambda w: GRPO.population(2, runtime=w.runtime, hp_config=[1]), ConfigError, ("[1]",)),
    Mistake("adapter-name", lambda w: w.agent.use_adapter("critic"), ConfigError, ("'critic'",)),
    Mistake("mutation-text", lambda w: w.agent.apply_mutation("rank"), ConfigError, ("mutation", "'rank'")),
    Mistake("update-lr", lambda w: w.agent.update_lr(None, 0.1), ConfigError, ("optimizer", "None")),
    Mistake("to-device", lambda w: w.agent.to_device("x"), ConfigError, ("'x'",)),
    # -- runtime -----------------------------------------------------------------------------------------------------
    Mistake("pretrained-missing", lambda w: Runtime.from_pretrained("./no"), ConfigError, ("./no",)),
    Mistake(
        "pretrained-dtype", lambda w: Runtime.from_pretrained("embedded", dtype="x"), ConfigError, ("dtype", "'x'")
    ),
    Mistake(
        "pretrained-device", lambda w: Runtime.from_pretrained("embedded", device="x"), ConfigError, ("device", "'x'")
    ),
    Mistake("pretrained-options", lambda w: Runtime.from_pretrained("embedded", options={}), ConfigError, ("options",)),
    Mistake("runtime-tokens", lambda w: Runtime(w.runtime.base, max_tokens=0), ConfigError, ("max_tokens", "0")),
    Mistake("runtime-options", lambda w: Runtime(w.runtime.base, options={"use_vllm": 1}), ConfigError, ("options",)),
    Mistake("runtime-accelerate", lambda w: w.runtime.accelerate("x"), ConfigError, ("'x'",)),
    # -- populations -------------------------------------------------------------------------------------------------
    Mistake("agents-none", lambda w: Population(None, w.task), ConfigError, ("agents", "None")),
    Mistake("agents-count", lambda w: Population(4, w.task), ConfigError, ("agents", "4")),
    Mistake("agents-one", lambda w: Population(w.agent, w.task), ConfigError, ("agents", "GRPO")),
    Mistake("agents-mixed", lambda w: Population([w.agent, "x"], w.task), ConfigError, ("agents", "'x'")),
    Mistake("agents-empty", lambda w: Population([], w.task), ConfigError, ("0",)),
    Mistake("agents-twice", lambda w: Population([w.agent, w.agent], w.task), ConfigError, ("twice", "[0, 0]")),
    Mistake("agents-kinds", lambda w: Population([w.agent, w.sft], w.task), ConfigError, ("sft",)),
    Mistake("task-none", lambda w: Population(w.population.agents, None), ConfigError, ("task", "None")),
    Mistake("task-text", lambda w: Population(w.population.agents, "spell_backward"), ConfigError, ("spell_backward",)),
    Mistake("task-gym", lambda w: Population(w.population.agents, w.gym), ConfigError, ("task", "ReasoningGym")),
    Mistake("task-class", lambda w: Population(w.population.agents, ConstantTarget), ConfigError, ("task",)),
    Mistake("prompts-zero", lambda w: people(w, prompts_per_step=0), ConfigError, ("prompts_per_step", "0")),
    Mistake("exam-tokens", lambda w: people(w, eval_max_new_tokens=0), ConfigError, ("eval_max_new_tokens", "0")),
    Mistake("error-rate", lambda w: people(w, max_error_rate=2), ConfigError, ("max_error_rate", "2")),
    Mistake("no-such-agent", lambda w: w.population.agent(99), ConfigError, ("99",)),
    Mistake("learn-others-rollout", lambda w: w.population.learn(foreign(w)), ConfigError, ("[0, 1]", "[0]")),
    Mistake("learn-same-indices", lambda w: w.population.learn(namesake(w)), ConfigError, ("rollout",)),
    Mistake("evaluate-agents", lambda w: w.population.evaluate(agents=[1]), ConfigError, ("agents", "1")),
    Mistake("evaluate-stranger", lambda w: w.population.evaluate(agents=[stranger(w)]), ConfigError, ("agents",)),
    Mistake("evaluate-base-split", lambda w: w.population.evaluate_base("train"), ConfigError, ("split", "'train'")),
    Mistake("examples-none", lambda w: w.population.examples(0), ConfigError, ("SFTTask",)),
    Mistake("draw-from-questions", lambda w: w.population.draw(), ConfigError, ("SFTTask",)),
    Mistake("evolve-none", lambda w: evolve(w, fitness=None), ConfigError, ("fitness", "None")),
    Mistake("evolve-numbers", lambda w: evolve(w, fitness={0: 1.0, 1: 2.0}), ConfigError, ("fitness", "1.0")),
    Mistake("evolve-strangers", lambda w: evolve(w, fitness={5: Fitness(1.0)}), ConfigError, ("[5]", "[0, 1]")),
    Mistake("evolve-selection", lambda w: evolve(w, selection="tournament"), ConfigError, ("selection", "tournament")),
    Mistake("evolve-mutations", lambda w: evolve(w, mutations=None), ConfigError, ("mutations", "None")),
    Mistake("evolve-seed", lambda w: evolve(w, seed="x"), ConfigError, ("seed", "'x'")),
    Mistake("evolve-generation", lambda w: evolve(w, generation=-1), ConfigError, ("generation", "-1")),
    # -- search ------------------------------------------------------------------------------------------------------
    Mistake("parameter-text", lambda w: RLParameter("a", "b"), ConfigError, ("min", "'a'")),
    Mistake("parameter-none", lambda w: RLParameter(None, 1), ConfigError, ("min", "None")),
    Mistake("parameter-reversed", lambda w: RLParameter(1, 0), ConfigError, ("min=1", "max=0")),
    Mistake("parameter-true", lambda w: RLParameter(True, 4), ConfigError, ("min", "True")),
    Mistake("parameter-dtype", lambda w: RLParameter(1, 2, dtype="int"), ConfigError, ("dtype", "'int'")),
    Mistake("parameter-factor", lambda w: RLParameter(1, 2, shrink_factor="x"), ConfigError, ("shrink_factor", "'x'")),
    Mistake("evolve-mark-text", lambda w: Evolve("a", "b"), ConfigError, ("min", "'a'")),
    Mistake("genes-tuple", lambda w: HyperparameterConfig(lr=(1, 2)), ConfigError, ("lr", "(1, 2)")),
    Mistake("genes-unknown", lambda w: HyperparameterConfig()["x"], ConfigError, ("'x'",)),
    Mistake("tournament-text", lambda w: TournamentSelection("2", True, 4), ConfigError, ("tournament_size", "'2'")),
    Mistake("tournament-none", lambda w: TournamentSelection(2, True, None), ConfigError, ("population_size", "None")),
    Mistake("tournament-half", lambda w: TournamentSelection(1.5, True, 4), ConfigError, ("tournament_size", "1.5")),
    Mistake("tournament-large", lambda w: TournamentSelection(8, True, 4), ConfigError, ("8", "4")),
    Mistake("tournament-elite", lambda w: TournamentSelection(2, "yes", 4), ConfigError, ("elitism", "'yes'")),
    Mistake("select-none", lambda w: TournamentSelection(2, True, 4).select(None), ConfigError, ("pop", "None")),
    Mistake("select-empty", lambda w: TournamentSelection(2, True, 4).select([]), ConfigError, ("empty",)),
    Mistake("select-text", lambda w: TournamentSelection(2, True, 4).select(["x"]), ConfigError, ("pop", "'x'")),
    Mistake("select-fresh", lambda w: TournamentSelection(2, True, 2).select([w.agent]), ConfigError, ("0",)),
    Mistake("frequencies-number", lambda w: MultiFrequencySelection(8, 2, 4), ConfigError, ("ratios", "4")),
    Mistake("mutations-text", lambda w: Mutations("a", 0, 0, 0, 0, 1), ConfigError, ("no_mutation", "'a'")),
    Mistake("mutations-none", lambda w: Mutations(None, 0, 0, 0, 0, 1), ConfigError, ("no_mutation", "None")),
    Mistake("mutations-layer", lambda w: Mutations(0, 0, 1, 0, 0, 1), ConfigError, ("new_layer_prob", "1")),
    Mistake("mutations-sd", lambda w: mutations(mutation_sd="x"), ConfigError, ("mutation_sd", "'x'")),
    Mistake("mutations-genes", lambda w: mutations(genes_per_mutation=1.5), ConfigError, ("genes_per_mutation", "1.5")),
    Mistake("mutations-ranks", lambda w: mutations(rank_range=8), ConfigError, ("rank_range", "8")),
    Mistake("mutations-one-rank", lambda w: mutations(rank_range=(4,)), ConfigError, ("rank_range", "(4,)")),
    Mistake("mutations-seed", lambda w: mutations(rand_seed="x"), ConfigError, ("rand_seed", "'x'")),
    Mistake("mutate-none", lambda w: mutations().mutation(None), ConfigError, ("population", "None")),
    Mistake("mutate-text", lambda w: mutations().mutation(["x"]), ConfigError, ("population", "'x'")),
    Mistake("mutation-from-none", lambda w: Mutation.from_dict(None), ConfigError, ("None",)),
    Mistake("mutation-from-empty", lambda w: Mutation.from_dict({}), ConfigError, ("{}",)),
    Mistake("plan-from-none", lambda w: Plan.from_dict(None), ConfigError, ("None",)),
    Mistake("scores-words", lambda w: Fitness.from_scores(["a"]), ConfigError, ("scores", "'a'")),
    Mistake("scores-empty", lambda w: Fitness.from_scores([]), ConfigError, ("0",)),
    Mistake("plan-none", lambda w: NoSelection().plan(None, 0, 0, 1), ConfigError, ("fitness", "None")),
    Mistake("plan-index", lambda w: NoSelection().plan({3: Fitness(1.0)}, 0, 0, 1), ConfigError, ("next_index", "1")),
    Mistake("spread-size", lambda w: initial_hyperparameters({}, {}, "x", 0), ConfigError, ("size", "'x'")),
    Mistake("better-none", lambda w: probability_better(None, Fitness(1.0)), ConfigError, ("None",)),
    # -- tasks and data ----------------------------------------------------------------------------------------------
    Mistake("task-name-unknown", lambda w: ReasoningGymTask("spell"), ConfigError, ("spell",)),
    Mistake("task-params-list", lambda w: ReasoningGymTask("spell_backward", [1]), ConfigError, ("params", "[1]")),
    Mistake("task-params-text", lambda w: spelling(params={"max_word_len": "x"}), ConfigError, ("max_word_len",)),
    Mistake("task-seed-true", lambda w: spelling(seed=True), ConfigError, ("seed", "True")),
    Mistake("task-exam-zero", lambda w: spelling(exam_prompts=0), ConfigError, ("exam_prompts", "0")),
    Mistake("task-reward", lambda w: spelling(reward="both"), ConfigError, ("reward", "'both'")),
    Mistake("task-curriculum", lambda w: spelling(curriculum=3), ConfigError, ("curriculum", "3")),
    Mistake("probe-seed", lambda w: ConstantTargetEnv("3", seed="x"), ConfigError, ("seed", "'x'")),
    Mistake("row-split", lambda w: ConstantTarget().row("dev", 0), EnvError, ("'dev'",)),
    Mistake("row-index", lambda w: ConstantTarget().row("exam", 99), EnvError, ("99",)),
    Mistake("row-text", lambda w: ConstantTarget().row("exam", "0"), EnvError, ("'0'",)),
    Mistake("sft-task-loss", lambda w: SFTTask(w.task, loss_on="all"), ConfigError, ("loss_on", "'all'")),
    Mistake("preference-mistake", lambda w: PreferenceTask(w.task, mistake="x"), ConfigError, ("mistake", "'x'")),
    Mistake("preference-seed", lambda w: PreferenceTask(w.task, seed="x"), ConfigError, ("seed", "'x'")),
    Mistake("graded-none", lambda w: GradedTask(None, exact_match), ConfigError, ("task", "None")),
    Mistake("graded-grader", lambda w: GradedTask(w.task, "exact"), ConfigError, ("grader", "'exact'")),
    Mistake("task-grader-none", lambda w: TaskGrader(None), ConfigError, ("task", "None")),
    Mistake("episodes-instance", lambda w: EpisodeTask(GridNavigation()), ConfigError, ("GridNavigation",)),
    Mistake("episodes-config", lambda w: EpisodeTask(GridNavigation, [1]), ConfigError, ("env_config", "[1]")),
    Mistake("episodes-unknown", lambda w: EpisodeTask(GridNavigation, {"width": 3}), ConfigError, ("width",)),
    Mistake("episodes-timeout", lambda w: EpisodeTask(GridNavigation, step_timeout="x"), ConfigError, ("'x'",)),
    Mistake("episodes-turns", lambda w: EpisodeTask(GridNavigation, max_turns=0), ConfigError, ("max_turns", "0")),
    Mistake("episode-seed", lambda w: EpisodeTask(GridNavigation).episode_seed("x", 0), EnvError, ("'x'",)),
    Mistake("rows-none", lambda w: DatasetTask(None, ROWS, reward_fn=exact_match), EnvError, ("None",)),
    Mistake("rows-empty", lambda w: DatasetTask([], ROWS, reward_fn=exact_match), EnvError, ("none",)),
    Mistake("rows-numbers", lambda w: DatasetTask([1, 2], ROWS, reward_fn=exact_match), EnvError, ("1",)),
    Mistake("rows-test-number", lambda w: DatasetTask(ROWS, ROWS, 5, reward_fn=exact_match), EnvError, ("5",)),
    Mistake("rows-grader", lambda w: DatasetTask(ROWS, ROWS, reward_fn="x"), ConfigError, ("reward_fn", "'x'")),
    Mistake("rows-template", lambda w: dataset(conversation_template=5), ConfigError, ("conversation_template", "5")),
    Mistake("rows-template-text", lambda w: dataset(conversation_template="{question}"), ConfigError, ("template",)),
    Mistake("rows-template-part", lambda w: dataset(conversation_template=[{}]), ConfigError, ("{}",)),
    Mistake("rows-template-number", lambda w: dataset(conversation_template=chat(5)), ConfigError, ("5",)),
    Mistake("rows-purpose", lambda w: dataset(purpose="x"), ConfigError, ("purpose", "'x'")),
    Mistake("rows-seed", lambda w: dataset(seed="x"), ConfigError, ("seed", "'x'")),
    Mistake("curated-none", lambda w: CuratedTask(None), EnvError, ("None",)),
    Mistake("curated-sizes", lambda w: CuratedTask(ROWS, exam_prompts="x"), ConfigError, ("exam_prompts", "'x'")),
    Mistake("curated-small", lambda w: CuratedTask(ROWS), EnvError, ("400", "12")),
    Mistake("curated-columns", lambda w: CuratedTask(ROWS, columns="question"), ConfigError, ("columns", "'question'")),
    Mistake("read-none", lambda w: read_dataset(None), EnvError, ("None",)),
    Mistake("read-number", lambda w: read_dataset(5), EnvError, ("5",)),
    Mistake("read-missing", lambda w: read_dataset("no.jsonl"), EnvError, ("no.jsonl",)),
    Mistake("read-columns", lambda w: read_dataset(ROWS, columns=5), ConfigError, ("columns", "5")),
    Mistake("mix-rows", lambda w: mix([ROWS]), ConfigError, ("2 values",)),
    Mistake("mix-weight", lambda w: mix([(read_dataset(ROWS), "x")]), ConfigError, ("'x'",)),
    Mistake("prompt-none", lambda w: render_prompt(w.tokenizer, None), ConfigError, ("None",)),
    Mistake("prompt-no-tokenizer", lambda w: render_prompt(None, CHAT), ConfigError, ("tokenizer", "None")),
    Mistake("decode-number", lambda w: decode_completions(w.tokenizer, 5), ConfigError, ("5",)),
    Mistake("decode-no-tokenizer", lambda w: decode_completions("x", []), ConfigError, ("tokenizer", "'x'")),
    Mistake("score-none", lambda w: score_completions(w.task, None, []), ConfigError, ("None",)),
    Mistake("score-task", lambda w: score_completions("x", [], []), ConfigError, ("task", "'x'")),
    # -- environments of llm_envs ------------------------------------------------------------------------------------
    Mistake("gym-rows", lambda w: gym(w, train_dataset=None), EnvError, ("None",)),
    Mistake("gym-tokenizer", lambda w: gym(w, tokenizer=None), ConfigError, ("tokenizer", "None")),
    Mistake("gym-tokenizer-text", lambda w: gym(w, tokenizer="gpt2"), ConfigError, ("tokenizer", "'gpt2'")),
    Mistake("gym-batch", lambda w: gym(w, data_batch_size_per_gpu="x"), ConfigError, ("data_batch_size", "'x'")),
    Mistake("gym-accelerator", lambda w: gym(w, accelerator="x"), ConfigError, ("accelerator", "'x'")),
    Mistake("gym-context", lambda w: gym(w, max_context_length=0), ConfigError, ("max_context_length", "0")),
    Mistake("gym-from-text", lambda w: ReasoningGym.from_task("x", w.tokenizer), ConfigError, ("task", "'x'")),
    Mistake("gym-step-texts", lambda w: w.gym.step(["a", "b"]), ConfigError, ("completion_ids", "'a'")),
    Mistake("gym-step-few", lambda w: w.gym.step([]), EnvError, ("0",)),
    Mistake("gym-step-others", lambda w: w.gym.step([ids(1, 90), ids(1, 90)]), EnvError, ("prompt",)),
    Mistake("gym-state-none", lambda w: gym(w).from_state(None), ConfigError, ("state", "None")),
    Mistake("gym-state-empty", lambda w: gym(w).from_state({}), ConfigError, ("batches", "{}")),
    Mistake("sft-gym-rows", lambda w: SFTGym(None, ROWS, w.tokenizer), EnvError, ("None",)),
    Mistake("sft-gym-column", lambda w: SFTGym(ROWS, ROWS, w.tokenizer, response_column=5), ConfigError, ("5",)),
    Mistake("sft-gym-tokenizer", lambda w: SFTGym(ROWS, ROWS, None), ConfigError, ("tokenizer", "None")),
    Mistake("preference-gym-rows", lambda w: PreferenceGym(5, 5, w.tokenizer), EnvError, ("5",)),
    Mistake("preference-gym-column", lambda w: PreferenceGym(ROWS, ROWS, w.tokenizer), EnvError, ("chosen",)),
    Mistake("wrapper-env", lambda w: w.wrapped(env=None), ConfigError, ("None",)),
    Mistake("wrapper-tokenizer", lambda w: w.wrapped(tokenizer=None), ConfigError, ("tokenizer", "None")),
    Mistake("wrapper-turns", lambda w: w.wrapped(max_turns="3"), ConfigError, ("max_turns", "'3'")),
    Mistake("wrapper-context", lambda w: w.wrapped(max_model_len=-1), ConfigError, ("max_model_len", "-1")),
    Mistake("wrapper-output", lambda w: w.wrapped(max_output_tokens=0), ConfigError, ("max_output_tokens", "0")),
    Mistake("wrapper-pad", lambda w: w.wrapped(pad_id="x"), ConfigError, ("pad_id", "'x'")),
    Mistake("wrapper-step-rows", lambda w: w.wrapper.step(ids(2, 9)), ConfigError, ("(2, 9)",)),
    Mistake("wrapper-step-fractions", lambda w: w.wrapper.step(torch.rand(1, 9)), ConfigError, ("float32",)),
    Mistake("vector-factory", lambda w: SyncMultiTurnVecEnv(None, 1, 1), ConfigError, ("env_factory", "None")),
    Mistake("vector-size", lambda w: SyncMultiTurnVecEnv(w.wrapped, "1", 1), ConfigError, ("batch_size", "'1'")),
    Mistake("vector-logps", lambda w: w.vector.step([ids(1, 9)] * 2, 5), ConfigError, ("sampling_logps", "5")),
    Mistake("bonus-text", lambda w: FormatRewardWrapper(GridNavigation(), "x"), ConfigError, ("format_bonus", "'x'")),
    Mistake("search-query", lambda w: SearchTool(search_url="http://x").search(None), ConfigError, ("query", "None")),
    Mistake("grid-turns", lambda w: GridNavigationEnv(4, "x"), ConfigError, ("max_turns", "'x'")),
    Mistake("grid-seed", lambda w: GridNavigationEnv().reset(seed="x"), ConfigError, ("seed", "'x'")),
    Mistake("grid-step-early", lambda w: GridNavigationEnv().step("1"), EnvError, ("reset",)),
    Mistake("tool-env-task", lambda w: ToolEnv(None, []), ConfigError, ("None",)),
    # -- graders -----------------------------------------------------------------------------------------------------
    Mistake("combined-one", lambda w: CombinedGrader(exact_match), ConfigError, ("exact_match",)),
    Mistake("combined-text", lambda w: CombinedGrader(["x"]), ConfigError, ("'x'",)),
    Mistake("combined-weight", lambda w: CombinedGrader([(exact_match, "x")]), ConfigError, ("'x'",)),
    Mistake("combined-triple", lambda w: CombinedGrader([(exact_match, 1, 2)]), ConfigError, ("2)",)),
    Mistake("overlong-text", lambda w: Overlong("x", 1), ConfigError, ("max_tokens", "'x'")),
    Mistake("regex-open", lambda w: Regex("("), ConfigError, ("'('",)),
    Mistake("regex-timeout", lambda w: Regex("x", timeout="y"), ConfigError, ("timeout", "'y'")),
    Mistake("isolated-lambda", lambda w: IsolatedGrader(lambda completion: 1.0), ConfigError, ("lambda",)),
    Mistake("isolated-timeout", lambda w: IsolatedGrader(exact_match, timeout="x"), ConfigError, ("timeout", "'x'")),
    Mistake("isolated-workers", lambda w: IsolatedGrader(exact_match, workers=1.5), ConfigError, ("workers", "1.5")),
    Mistake("isolated-memory", lambda w: IsolatedGrader(exact_match, memory_bytes=-1), ConfigError, ("memory", "-1")),
    Mistake("judge-url", lambda w: JudgeGrader("m", base_url=5), ConfigError, ("base_url", "5")),
    Mistake("judge-range", lambda w: JudgeGrader("m", low="x"), ConfigError, ("low", "'x'")),
    Mistake("judge-cache", lambda w: JudgeGrader("m", cache=5), ConfigError, ("cache", "5")),
    Mistake("judge-template", lambda w: JudgeGrader("m", template=5), ConfigError, ("template", "5")),
    Mistake("reward-model-batch", lambda w: RewardModelGrader("m", batch_size="x"), ConfigError, ("batch_size", "'x'")),
    Mistake("run-python-none", lambda w: run_python(None), ConfigError, ("None",)),
    Mistake("library-unknown", lambda w: library_grader("exact"), ConfigError, ("'exact'",)),
    Mistake("library-params", lambda w: library_grader("length", 5), ConfigError, ("params", "5")),
    Mistake("library-other", lambda w: library_grader("length", {"tokens": 5}), ConfigError, ("tokens",)),
    Mistake("call-none", lambda w: call_grader(None, ["x"], [{}]), ConfigError, ("None",)),
    Mistake("call-few-rows", lambda w: call_grader(exact_match, ["x"], []), RewardError, ("0",)),
    Mistake("call-none-rows", lambda w: call_grader(exact_match, ["x"], None), ConfigError, ("rows", "None")),
    Mistake("call-row-texts", lambda w: call_grader(exact_match, ["x"], ["y"]), ConfigError, ("rows", "'y'")),
    Mistake("exact-none", lambda w: exact_match(None, "x"), ConfigError, ("None",)),
    # -- runs, reports, manifests ------------------------------------------------------------------------------------
    Mistake("report-none", lambda w: build_report(None, w.path / "r.html"), ConfigError, ("run_dirs", "None")),
    Mistake("report-text", lambda w: build_report("run", w.path / "r.html"), ConfigError, ("run_dirs", "'run'")),
    Mistake("report-empty", lambda w: build_report([], w.path / "r.html"), CheckpointError, ("none",)),
    Mistake("report-nowhere", lambda w: build_report([w.path / "no"], w.path / "r"), CheckpointError, ("no",)),
    Mistake("report-out", lambda w: build_report([w.path], None), ConfigError, ("out", "None")),
    Mistake("run-missing", lambda w: RunDirectory.open(w.path / "no"), CheckpointError, ("no",)),
    Mistake("run-create-none", lambda w: RunDirectory.create(None, {}, 0), ConfigError, ("path", "None")),
    Mistake("run-create-seed", lambda w: RunDirectory.create(w.path / "a", {}, "x"), ConfigError, ("seed", "'x'")),
    Mistake("run-create-config", lambda w: RunDirectory.create(w.path / "a", 5, 0), ConfigError, ("config", "5")),
    Mistake("read-lines-none", lambda w: list(read_lines(None)), ConfigError, ("None",)),
    Mistake("manifest-overrides", lambda w: load_manifest(None, "a=b"), ConfigError, ("overrides", "'a=b'")),
    Mistake("pop-size-true", lambda w: manifest(training={"pop_size": True}), ConfigError, ("pop_size", "boolean")),
    Mistake("steps-true", lambda w: manifest(training={"max_steps": True}), ConfigError, ("max_steps", "boolean")),
    Mistake("rank-true", lambda w: manifest(network={"lora_config": {"r": True}}), ConfigError, ("r", "boolean")),
    Mistake(
        "ranks-true", lambda w: manifest(mutation={"rank_range": [True, 8]}), ConfigError, ("rank_range", "boolean")
    ),
    Mistake("pop-size-flag", lambda w: load_manifest(None, ["training.pop_size=true"]), ConfigError, ("pop_size",)),
    Mistake(
        "genes-above",
        lambda w: manifest(mutation={"genes_per_mutation": 50, "rl_hp_selection": {"lr": {}}}),
        ConfigError,
        ("genes_per_mutation", "50"),
    ),
    Mistake("ranks-reversed", lambda w: mutations(rank_range=(8, 4)), ConfigError, ("rank_range", "(8, 4)")),
    Mistake(
        "output-above-context",
        lambda w: manifest(algorithm={"max_output_tokens": 5000, "max_model_len": 100}),
        ConfigError,
        ("max_output_tokens", "5000"),
    ),
    Mistake(
        "task-isolated",
        lambda w: manifest(environment={"graders": [{"name": "task", "isolate": True}]}),
        ConfigError,
        ("isolate", "task"),
    ),
    Mistake(
        "timeout-alone",
        lambda w: manifest(environment={"graders": [{"name": "exact_match", "timeout": 9.0}]}),
        ConfigError,
        ("timeout", "isolate"),
    ),
    Mistake("section-left-out", lambda w: manifest(pop_size=3), ConfigError, ("pop_size", "'training.pop_size'")),
    Mistake("vllm-config", lambda w: VLLMConfig(gpu_memory_utilization="x"), ConfigError, ("gpu_memory", "'x'")),
    Mistake("unknown-name", lambda w: Mutations(0, 0, 0, 0, 0, 0), ConfigError, ("rl_hp=0",)),
    # -- runs from Python --------------------------------------------------------------------------------------------
    Mistake("train-task-number", lambda w: trained(w, task=5), ConfigError, ("task", "5")),
    Mistake("train-task-misspelt", lambda w: trained(w, task="reasoning_gym:gdc"), ConfigError, ("'gcd'",)),
    Mistake("train-algorithm", lambda w: trained(w, algorithm="GROP"), ConfigError, ("'GROP'", "GRPO")),
    Mistake("train-gene", lambda w: trained(w, evolve=["lrr"]), ConfigError, ("lrr",)),
    Mistake("train-section", lambda w: trained(w, trainning={"evo_steps": 4}), ConfigError, ("trainning",)),
    Mistake("train-section-number", lambda w: trained(w, training=5), ConfigError, ("training", "5")),
    Mistake("train-setting", lambda w: trained(w, training={"evo_step": 4}), ConfigError, ("evo_step", "evo_steps")),
    Mistake("train-no-rewards", lambda w: trained(w, reward=[]), ConfigError, ("reward", "none")),
    Mistake("train-rows-empty", lambda w: trained(w, dataset=[]), EnvError, ("none",)),
    Mistake("train-out-taken", lambda w: trained(w, out=w.finished.path), CheckpointError, ("finished",)),
    Mistake("train-manifest", lambda w: trained(w, manifest=w.path / "no.yaml"), ConfigError, ("no.yaml",)),
    Mistake("run-nowhere", lambda w: Run(w.path / "no"), CheckpointError, ("no",)),
    Mistake("run-long", lambda w: Run("a" * 5000), CheckpointError, ("too long",)),
    Mistake("run-of-a-file", lambda w: Run(w.file), CheckpointError, ("file",)),
    Mistake("report-twice", lambda w: build_report([w.finished.path] * 2, w.path / "r"), ConfigError, ("twice",)),
    Mistake("load-any-long", lambda w: load("a" * 5000), CheckpointError, ("too long",)),
    Mistake("load-any-nowhere", lambda w: load(w.path / "no"), CheckpointError, ("no",)),
    Mistake("load-nameless", lambda w: load(w.checkpoint), CheckpointError, ("runtime=", "agent")),
    Mistake("trainer-algorithm", lambda w: trainer(algorithm="GRPPO"), ConfigError, ("'GRPPO'", "GRPO")),
    Mistake("trainer-hyperparameter", lambda w: trainer(algorithm={"lrr": 1}), ConfigError, ("lrr", "'lr'")),
    Mistake("trainer-task", lambda w: trainer(environment="reasoning_gym:gdc"), ConfigError, ("'gdc'", "'gcd'")),
    Mistake(
        "trainer-weights",
        lambda w: trainer(load_weights_from=w.path / "no").train(out=w.path / "weights"),
        CheckpointError,
        ("adapter", "no"),
    ),
    Mistake("trainer-device", lambda w: trainer(device="gpu"), ConfigError, ("device", "'gpu'")),
    Mistake("trainer-out", lambda w: trainer().train(out=5), ConfigError, ("out", "5")),
    Mistake("trainer-elite", lambda w: trainer().train(elite_path=5), ConfigError, ("elite_path", "5")),
    Mistake("trainer-code", lambda w: trainer().train(allow_code="no"), ConfigError, ("allow_code", "'no'")),
    Mistake("trainer-verbose", lambda w: trainer().train(verbose="no"), ConfigError, ("verbose", "'no'")),
    Mistake("trainer-consumers", lambda w: trainer().train(consumers=print), ConfigError, ("consumers", "print")),
    Mistake("trainer-consumer", lambda w: trainer().train(consumers=["x"]), ConfigError, ("consumers[0]", "'x'")),
    Mistake("trainer-env-early", lambda w: trainer().env, ConfigError, ("train()",)),
    Mistake("build-none", lambda w: build(None), ConfigError, ("config", "None")),
    Mistake("build-dict", lambda w: build({"training": {}}), ConfigError, ("config", "dict")),
    Mistake("resolve-dict", lambda w: resolve({}), ConfigError, ("config", "{}")),
    Mistake("session-none", lambda w: list(run_session(None, w.path / "x")), ConfigError, ("session", "None")),
    # -- documented loops and helpers --------------------------------------------------------------------------------
    Mistake("loop-pop-none", lambda w: questions(w, pop=None), ConfigError, ("pop", "None")),
    Mistake("loop-pop-agent", lambda w: questions(w, pop=w.agent), ConfigError, ("pop", "GRPO")),
    Mistake("loop-pop-empty", lambda w: questions(w, pop=[]), ConfigError, ("pop", "none")),
    Mistake("loop-pop-sft", lambda w: questions(w, pop=[w.sft]), ConfigError, ("SFT", "finetune_llm_sft")),
    Mistake("loop-no-env", lambda w: questions(w, env=None), ConfigError, ("neither",)),
    Mistake("loop-two-envs", lambda w: questions(w, env_fn=lambda: w.gym), ConfigError, ("both",)),
    Mistake("loop-env-task", lambda w: questions(w, env=w.task), ConfigError, ("env", "Parity")),
    Mistake("loop-env-class", lambda w: questions(w, env=ReasoningGym), ConfigError, ("env", "ReasoningGym")),
    Mistake("loop-env-sft", lambda w: questions(w, env=w.sft_gym), ConfigError, ("env", "SFTGym")),
    Mistake("loop-env-fn", lambda w: questions(w, env=None, env_fn=w.gym), ConfigError, ("env_fn", "ReasoningGym")),
    Mistake("loop-env-fn-none", lambda w: questions(w, env=None, env_fn=lambda: None), ConfigError, ("None",)),
    Mistake(
        "loop-env-fn-fails", lambda w: questions(w, env=None, env_fn=lambda: 1 / 0), EnvError, ("env_fn", "division")
    ),
    Mistake("loop-env-fn-asks", lambda w: questions(w, env=None, env_fn=lambda x: x), EnvError, ("env_fn", "x")),
    Mistake("loop-init-hp", lambda w: questions(w, init_hp=5), ConfigError, ("init_hp", "5")),
    Mistake("loop-init-hp-list", lambda w: episodes(w, init_hp=["LR"]), ConfigError, ("init_hp", "['LR']")),
    Mistake("loop-batch", lambda w: episodes(w, init_hp={"BATCH_SIZE": 0}), ConfigError, ("BATCH_SIZE", "0")),
    Mistake("loop-misspelt", lambda w: questions(w, max_step=4), ConfigError, ("max_step", "max_steps")),
    Mistake("loop-no-mutations", lambda w: questions(w, tournament=NoSelection()), ConfigError, ("mutation",)),
    Mistake("loop-elite", lambda w: questions(w, elite_path=5), ConfigError, ("elite_path", "5")),
    Mistake("loop-accelerator", lambda w: questions(w, accelerator="x"), ConfigError, ("accelerator", "'x'")),
    Mistake("loop-turns", lambda w: episodes(w, max_turns="2"), ConfigError, ("max_turns", "'2'")),
    Mistake("loop-factory", lambda w: episodes(w, env_factory=GridNavigation()), ConfigError, ("env_factory",)),
    Mistake("loop-factory-none", lambda w: episodes(w, env_factory=lambda: None), ConfigError, ("None",)),
    Mistake("loop-env-config", lambda w: episodes(w, env_config=[1]), ConfigError, ("env_config", "[1]")),
    Mistake(
        "loop-env-setting", lambda w: episodes(w, env_config={"width": 3}), ConfigError, ("GridNavigation", "width")
    ),
    Mistake("loop-of-data", lambda w: finetune_llm_preference([w.dpo], w.sft_gym), ConfigError, ("env", "SFTGym")),
    Mistake("population-algorithm", lambda w: create_population("GRPOO"), ConfigError, ("'GRPOO'", "GRPO")),
    Mistake("population-values", lambda w: create_population("GRPO", INIT_HP=5), ConfigError, ("INIT_HP", "5")),
    Mistake("select-strategy", lambda w: run_selection_and_mutation("x", [w.agent], None), ConfigError, ("'x'",)),
    Mistake(
        "compare-text", lambda w: compare_responses(w.agent, w.tokenizer, ["2+2"]), ConfigError, ("samples", "'2+2'")
    ),
    Mistake("mean-of-words", lambda w: aggregate_metrics_across_gpus(None, "x"), ConfigError, ("metric_tensor", "'x'")),
    Mistake("mean-accelerator", lambda w: aggregate_metrics_across_gpus("x", 1.0), ConfigError, ("accelerator", "'x'")),
    Mistake("actor-onto-file", lambda w: w.agent.actor.save_pretrained(w.file), CheckpointError, ("file",)),
    Mistake("actor-nowhere", lambda w: w.agent.actor.save_pretrained(None), ConfigError, ("path", "None")),
    # -- schedules, trackers -------------------------------------------------------------------------------------------
    Mistake("fitness-error", lambda w: Fitness(1.0, -1.0), ConfigError, ("stderr", "-1.0")),
    Mistake("fitness-costs", lambda w: Fitness(1.0, costs={"kl": 0.5}), ConfigError, ("costs['kl']", "0.5")),
    Mistake("fitness-state", lambda w: Fitness.from_state({}), ConfigError, ("mean", "{}")),
    Mistake("schedule-empty", lambda w: stretched({}, 9), ConfigError, ("genes", "None")),
    Mistake("schedule-late", lambda w: stretched({**LATE, "total_tokens": 9}, 9), ConfigError, ("lr", "5")),
    Mistake("schedule-no-length", lambda w: stretched({"genes": {}}, 9), ConfigError, ("total_tokens", "None")),
    Mistake("schedule-records", lambda w: hyperparameter_schedule(["x"], 0), CheckpointError, ("'x'",)),
    Mistake("schedule-no-records", lambda w: hyperparameter_schedule(None, 0), ConfigError, ("records", "None")),
    Mistake("schedule-no-agent", lambda w: hyperparameter_schedule([], 0), CheckpointError, ("0",)),
    Mistake("factor-text", lambda w: LRSchedule().factor("x"), ConfigError, ("spent", "'x'")),
    Mistake("tracker-misspelt", lambda w: check_trackers(["wandbb"]), ConfigError, ("'wandbb'", "'wandb'")),
    Mistake("tracker-none", lambda w: check_trackers(None), ConfigError, ("None",)),
    Mistake("tracker-number", lambda w: check_trackers([5]), ConfigError, ("5",)),
    Mistake("tracker-settings", lambda w: check_trackers({"wandb": 5}), ConfigError, ("'wandb'", "5")),
    Mistake("tracker-number-name", lambda w: check_trackers({5: {"key": "hidden"}}), ConfigError, ("5",)),
    Mistake("tracker-folder", lambda w: CSVFile(None), ConfigError, ("folder", "None")),
    Mistake("judge-shows-nothing", lambda w: JudgeGrader("m", template="{answer}"), ConfigError, ("completion",)),
    Mistake(
        "judge-shows-one", lambda w: PairwiseJudgeGrader("m", template="{{ completion_a }}"), ConfigError, ("tion_b",)
    ),
    Mistake("judge-space", lambda w: JudgeGrader("m", base_url="http://a b"), ConfigError, ("base_url",)),
    Mistake("teacher-nowhere", lambda w: TeacherEndpoint(None, "m"), ConfigError, ("url", "None")),
    Mistake("teacher-api", lambda w: TeacherEndpoint("http://x", "m", "x"), ConfigError, ("api", "'x'")),
    Mistake("game-step", lambda w: GuessTheNumber().step(5), ConfigError, ("action", "5")),
    Mistake("gym-reset", lambda w: w.sft_gym.reset("x"), ConfigError, ("reset_dataloaders", "'x'")),
    Mistake(
        "sft-gym-other-column",
        lambda w: SFTGym(ROWS, ROWS, w.tokenizer, response_column="anwser"),
        EnvError,
        ("anwser", "'answer'"),
    ),
    Mistake("unpaired-gym", lambda w: UnpairedGym(ROWS, ROWS, w.tokenizer), EnvError, ("label",)),
    Mistake("kto-learns-sft", lambda w: KTO(runtime=w.runtime).learn(w.sft_gym.reset()), ConfigError, ("KTO",)),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("mistakes"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_ends_in_a_sentence_that_names_it(mistake: Mistake, world: World) -> None:
    with pytest.raises(AgileRLError) as caught:
        mistake.make(world)
    assert isinstance(caught.value, mistake.error), repr(caught.value)
    missing = [words for words in mistake.words if words not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert len(str(caught.value)) < 1000


def test_each_mistake_has_a_name_of_its_own() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
