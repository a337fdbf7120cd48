"""A wrong value for every parameter of everything public: it works, or it ends in a sentence; and what is taken."""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agilerl import LocalTrainer, Mutations, Population, Run, Runtime, TournamentSelection, load
from agilerl import train as train_run
from agilerl.algorithms import (
    ALGORITHMS,
    GRPO,
    CosineLRScheduleConfig,
    PolicyLoss,
)
from agilerl.compat.loops import LoopOptions
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.envs import (
    AnswerFormatTask,
    CuratedTask,
    Curriculum,
    DatasetTask,
    GuessTheNumber,
    ReasoningGymTask,
    decode_completions,
    is_held_out,
    mix,
    read_dataset,
    render_prompt,
    score_completions,
)
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.examples import PreferenceTask, SFTTask, UnpairedTask
from agilerl.envs.programs import AgentTask, ProgramLimits
from agilerl.envs.tools import (
    Tool,
    ToolEnv,
    parser_for,
    tool_schema,
)
from agilerl.errors import AgileRLError, ConfigError, warn_once
from agilerl.hpo.fitness import Fitness, evidence, pareto_front, probability_better, ranking, reliability
from agilerl.hpo.knockout import KnockoutSelection, PulseSelection
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.mutation import Member
from agilerl.hpo.parameters import Evolve, HyperparameterConfig, RLParameter
from agilerl.hpo.schedule import hyperparameter_schedule, stretched
from agilerl.hpo.selection import SuccessiveHalving, TruncationSelection
from agilerl.hpo.spread import initial_hyperparameters
from agilerl.hpo.strategies import LRSchedule, make_strategy
from agilerl.llm_envs import (
    DatasetEnv,
    FormatRewardWrapper,
    PreferenceGym,
    ReasoningGym,
    RolloutHarness,
    SearchTool,
    SFTGym,
    SyncMultiTurnVecEnv,
    TokenObservationWrapper,
    UnpairedGym,
)
from agilerl.report import build_report
from agilerl.rewards import (
    Accuracy,
    CombinedGrader,
    FormatTags,
    IsolatedGrader,
    JsonValid,
    JudgeGrader,
    Overlong,
    PairwiseJudgeGrader,
    Regex,
    Repetition,
    RewardModelGrader,
    SandboxGrader,
    ThreadedGrader,
    TokenLength,
    call_grader,
    check_score,
    exact_match,
    extract_answer,
    grade,
    library_grader,
)
from agilerl.rollouts import SamplingSettings
from agilerl.rollouts.teacher import TeacherEndpoint
from agilerl.runs import (
    CheckpointStore,
    Journal,
    JsonLines,
    RunDirectory,
    agent_folder,
    newest_agents,
    read_lines,
    read_run,
)
from agilerl.training.resolved import resolve
from agilerl.training.trackers import check_trackers
from agilerl.training.train_llm import (
    finetune_llm_multiturn,
    finetune_llm_preference,
    finetune_llm_reasoning,
    finetune_llm_sft,
    train_llm_dataset,
    train_llm_rollout,
)
from agilerl.utils.algo_utils import VLLMConfig
from agilerl.utils.llm_utils import compare_responses, create_llm_accelerator, sample_eval_prompts
from agilerl.utils.utils import (
    aggregate_metrics_across_gpus,
    create_population,
    run_selection_and_mutation,
    save_llm_checkpoint,
    tournament_selection_and_mutation,
)
from tests.faults.mistaken import (
    CHAT,
    ROWS,
    World,
    chat,
    ids,
    manifest,
    mutations,
    people,
)
from tests.probes import ConstantTarget, GridNavigation
from tutorials.tools.calculator import calculator

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("mistakes"))


# -- generated: a wrong value for every parameter of everything public ------------------------------------------------

WRONG = {
    "None": None,
    "text": "x",
    "empty text": "",
    "zero byte": "a\0b",
    "minus one": -1,
    "a half": 0.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "true": True,
    "an empty list": [],
    "a list": ["x", 1, None],
    "an empty mapping": {},
    "a mapping": {"x": object()},
    "bytes": b"x",
    "an object": object(),
    "a class": int,
    "a tensor": torch.rand(2, 3),
}
PLAIN = ("None", "minus one", "a half", "NaN", "infinity", "true")
"""Of these the sentence names the parameter or the value."""
IN_OTHER_WORDS = ("sft.learn", "library_grader", "create_population")
"""These say what they need instead."""


def refusal(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return why a call is refused, or nothing."""
    try:
        function(**arguments)
    except AgileRLError as error:
        return str(error)
    return ""


def own_arguments(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a documented loop with the arguments that the other loops do not share."""
    names = list(inspect.signature(loop).parameters)
    names = names[: names.index("init_hp") + 1]

    def call(**given: Any) -> Any:
        return loop(**given, verbose=False, max_steps=2)

    call.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])  # type: ignore[attr-defined]
    return call


def started(game: Any) -> Any:
    game.reset(seed=0)
    return game


VALID: dict[str, Callable[[World], tuple[Callable[..., Any], Mapping[str, Any]]]] = {
    # Constructors and functions of the package's public names, with one call that works each.
    **{
        name: functools.partial(lambda name, w: (ALGORITHMS[name], {"runtime": w.runtime}), name) for name in ALGORITHMS
    },
    "Runtime": lambda w: (Runtime, {"base": w.runtime.base}),
    "Population": lambda w: (Population, {"agents": w.population.agents, "task": w.task}),
    "EpisodeTask": lambda w: (EpisodeTask, {"env_factory": GridNavigation}),
    "AgentTask": lambda w: (AgentTask, {"task": w.task, "program": ["python", "solve.py"]}),
    "ProgramLimits": lambda w: (ProgramLimits, {}),
    "ReasoningGymTask": lambda w: (ReasoningGymTask, {"name": "spell_backward"}),
    "SFTTask": lambda w: (SFTTask, {"task": w.task}),
    "PreferenceTask": lambda w: (PreferenceTask, {"task": w.task}),
    "UnpairedTask": lambda w: (UnpairedTask, {"task": w.task}),
    "Mutations": lambda w: (Mutations, dict(zip(CHANCES, (1, 0, 0, 0, 0, 1)))),
    "HyperparameterConfig": lambda w: (HyperparameterConfig, {"lr": RLParameter(0.1, 1)}),
    "RLParameter": lambda w: (RLParameter, {"min": 0.1, "max": 1}),
    "TournamentSelection": lambda w: (
        TournamentSelection,
        {"tournament_size": 2, "elitism": True, "population_size": 4},
    ),
    "PolicyLoss": lambda w: (PolicyLoss, {}),
    "CosineLRScheduleConfig": lambda w: (CosineLRScheduleConfig, {"num_epochs": 5}),
    **{f"{name}Config": functools.partial(lambda name, w: (ALGORITHMS[name].Config, {}), name) for name in ALGORITHMS},
    "VLLMConfig": lambda w: (VLLMConfig, {}),
    "save_llm_checkpoint": lambda w: (save_llm_checkpoint, {"agent": w.agent, "path": "saved", "overwrite": True}),
    "TruncationSelection": lambda w: (TruncationSelection, {}),
    "SuccessiveHalving": lambda w: (SuccessiveHalving, {}),
    "MultiFrequencySelection": lambda w: (MultiFrequencySelection, {"population_size": 8}),
    "Evolve": lambda w: (Evolve, {"min": 0.1, "max": 1.0}),
    "initial_hyperparameters": lambda w: (
        initial_hyperparameters,
        {"genes": w.agent.genes, "base_values": w.agent.hyperparameters, "size": 2, "seed": 0},
    ),
    "evidence": lambda w: (evidence, {"a": VECTOR, "b": VECTOR, "confidence": 0.8}),
    "pareto_front": lambda w: (pareto_front, {"fitness": {0: VECTOR}}),
    "probability_better": lambda w: (probability_better, {"a": Fitness(1.0), "b": Fitness(0.0)}),
    "ranking": lambda w: (ranking, {"fitness": {0: Fitness(1.0)}}),
    "reliability": lambda w: (reliability, {"fitness": [Fitness(1.0), Fitness(0.0)]}),
    # agilerl.envs and agilerl.llm_envs
    "AnswerFormatTask": lambda w: (AnswerFormatTask, {"task": w.task, "answer_format": "tags"}),
    "GuessTheNumber": lambda w: (GuessTheNumber, {}),
    "Curriculum": lambda w: (Curriculum, {}),
    "CuratedTask": lambda w: (CuratedTask, {"dataset": ROWS, "exam_prompts": 2, "test_prompts": 2}),
    "DatasetTask": lambda w: (DatasetTask, {"train": ROWS, "exam": ROWS, "reward_fn": exact_match}),
    "decode_completions": lambda w: (decode_completions, {"tokenizer": w.tokenizer, "completions": [[5, 6]]}),
    "is_held_out": lambda w: (is_held_out, {"question": "?"}),
    "mix": lambda w: (mix, {"sources": [(ROWS, 1.0)]}),
    "read_dataset": lambda w: (read_dataset, {"source": ROWS}),
    "render_prompt": lambda w: (render_prompt, {"tokenizer": w.tokenizer, "messages": chat("2+2?")}),
    "score_completions": lambda w: (score_completions, {"task": ConstantTarget(), "rows": ROWS[:1], "texts": ["3"]}),
    "FormatRewardWrapper": lambda w: (FormatRewardWrapper, {"env": GridNavigation()}),
    "PreferenceGym": lambda w: (
        PreferenceGym,
        {"train_dataset": PAIRS, "test_dataset": PAIRS, "tokenizer": w.tokenizer},
    ),
    "UnpairedGym": lambda w: (
        UnpairedGym,
        {"train_dataset": PAIRS, "test_dataset": PAIRS, "tokenizer": w.tokenizer},
    ),
    "SFTGym": lambda w: (SFTGym, {"train_dataset": ROWS, "test_dataset": ROWS, "tokenizer": w.tokenizer}),
    "ReasoningGym": lambda w: (
        ReasoningGym,
        {
            "train_dataset": ROWS,
            "test_dataset": ROWS,
            "tokenizer": w.tokenizer,
            "reward_fn": exact_match,
            "conversation_template": CHAT,
        },
    ),
    "SearchTool": lambda w: (SearchTool, {}),
    "DatasetEnv": lambda w: (
        DatasetEnv,
        {"train_dataset": PAIRS, "test_dataset": PAIRS, "tokenizer": w.tokenizer, "objective": "preference"},
    ),
    "RolloutHarness": lambda w: (
        RolloutHarness,
        {"env": GridNavigation(), "tokenizer": w.tokenizer, "max_turns": 3},
    ),
    "SyncMultiTurnVecEnv": lambda w: (
        SyncMultiTurnVecEnv,
        {"env_factory": w.wrapped, "batch_size": 1, "group_size": 1},
    ),
    "TokenObservationWrapper": lambda w: (
        TokenObservationWrapper,
        {"env": GridNavigation(), "tokenizer": w.tokenizer, "max_turns": 3},
    ),
    "ToolEnv": lambda w: (ToolEnv, {"task": ConstantTarget(), "tools": [calculator]}),
    "Tool": lambda w: (Tool, {"function": calculator}),
    "tool_schema": lambda w: (tool_schema, {"function": calculator}),
    "parser_for": lambda w: (parser_for, {"tokenizer": w.tokenizer}),
    # agilerl.rewards
    "Accuracy": lambda w: (Accuracy, {}),
    "CombinedGrader": lambda w: (CombinedGrader, {"graders": [exact_match]}),
    "FormatTags": lambda w: (FormatTags, {}),
    "IsolatedGrader": lambda w: (IsolatedGrader, {"grader": exact_match}),
    "JsonValid": lambda w: (JsonValid, {}),
    "JudgeGrader": lambda w: (JudgeGrader, {"model": "m"}),
    "PairwiseJudgeGrader": lambda w: (PairwiseJudgeGrader, {"model": "m"}),
    "Overlong": lambda w: (Overlong, {"max_tokens": 8, "cache_tokens": 4}),
    "Regex": lambda w: (Regex, {"pattern": "x"}),
    "Repetition": lambda w: (Repetition, {}),
    "RewardModelGrader": lambda w: (RewardModelGrader, {"model": "m"}),
    "SandboxGrader": lambda w: (SandboxGrader, {}),
    "ThreadedGrader": lambda w: (ThreadedGrader, {"grader": exact_match}),
    "TokenLength": lambda w: (TokenLength, {"target": 5}),
    "call_grader": lambda w: (call_grader, GRADED),
    "check_score": lambda w: (check_score, {"value": 1.0}),
    "exact_match": lambda w: (exact_match, {"completion": "4", "answer": "4"}),
    "extract_answer": lambda w: (extract_answer, {"completion": "4"}),
    "grade": lambda w: (grade, GRADED),
    "library_grader": lambda w: (library_grader, {"name": "length", "params": {"target": 5}}),
    # agilerl.runs, agilerl.report, manifests
    "build_report": lambda w: (build_report, {"run_dirs": [w.path / "no"], "out": "report.html"}),
    "CheckpointStore": lambda w: (CheckpointStore, {"root": w.path / "store"}),
    "Journal": lambda w: (Journal, {"path": w.path / "journal.jsonl"}),
    "JsonLines": lambda w: (JsonLines, {"path": w.path / "lines.jsonl"}),
    "agent_folder": lambda w: (agent_folder, {"checkpoint": w.path, "index": 0}),
    "newest_agents": lambda w: (newest_agents, {"root": w.path}),
    "read_lines": lambda w: (lambda path: list(read_lines(path)), {"path": w.path / "lines.jsonl"}),
    "read_run": lambda w: (read_run, {"path": w.path}),
    "RunDirectory.open": lambda w: (RunDirectory.open, {"path": w.path}),
    "load_manifest": lambda w: (load_manifest, {}),
    "LocalTrainer": lambda w: (LocalTrainer, {"algorithm": "GRPO", "environment": "reasoning_gym:spell_backward"}),
    "LocalTrainer.from_manifest": lambda w: (LocalTrainer.from_manifest, {"manifest": {}}),
    "create_population": lambda w: (create_population, {"algo": "GRPO", "algo_kwargs": {"runtime": w.runtime}}),
    "run_selection_and_mutation": lambda w: (
        run_selection_and_mutation,
        {"selection_strategy": None, "population": [w.spare], "mutation": mutations()},
    ),
    "tournament_selection_and_mutation": lambda w: (
        tournament_selection_and_mutation,
        {"tournament": None, "population": [w.spare], "mutation": mutations()},
    ),
    "aggregate_metrics_across_gpus": lambda w: (aggregate_metrics_across_gpus, {"accelerator": None}),
    "create_llm_accelerator": lambda w: (create_llm_accelerator, {}),
    # The loops: their own arguments, of agents that do not learn from this environment, so that none trains.
    "finetune_llm_reasoning": lambda w: (own_arguments(finetune_llm_reasoning), {"pop": [w.sft], "env": w.gym}),
    "finetune_llm_sft": lambda w: (own_arguments(finetune_llm_sft), {"pop": [w.agent], "env": w.sft_gym}),
    "finetune_llm_preference": lambda w: (own_arguments(finetune_llm_preference), {"pop": [w.dpo], "env": w.sft_gym}),
    "train_llm_dataset": lambda w: (own_arguments(train_llm_dataset), {"pop": [w.agent], "env": w.sft_gym}),
    "finetune_llm_multiturn": lambda w: (
        own_arguments(finetune_llm_multiturn),
        {"pop": [w.sft], "max_turns": 2, "env_factory": GridNavigation},
    ),
    "train_llm_rollout": lambda w: (
        own_arguments(train_llm_rollout),
        {"pop": [w.sft], "max_turns": 2, "env_factory": GridNavigation},
    ),
    "LoopOptions": lambda w: (LoopOptions, {}),
    "check_trackers": lambda w: (check_trackers, {"wanted": []}),
    "LocalTrainer.train": lambda w: (  # of a finished run, so nothing trains
        LocalTrainer("GRPO", "reasoning_gym:gcd", resume_from_checkpoint=w.finished.path).train,
        {},
    ),
    "run.resume": lambda w: (w.finished.resume, {"display": False}),
    "run.report": lambda w: (w.finished.report, {"out": "report.html"}),
    "load": lambda w: (load, {"path": w.checkpoint, "runtime": w.runtime}),
    # The search for other trainers.
    "KnockoutSelection": lambda w: (KnockoutSelection, {"population_size": 4}),
    "PulseSelection": lambda w: (PulseSelection, {}),
    "make_strategy": lambda w: (make_strategy, {"name": "knockout", "population_size": 4, "settings": {}}),
    "LRSchedule": lambda w: (LRSchedule, {}),
    "LRSchedule.factor": lambda w: (LRSchedule().factor, {"spent": 0.5}),
    "stretched": lambda w: (stretched, {"schedule": SCHEDULE, "tokens": 9}),
    "hyperparameter_schedule": lambda w: (
        hyperparameter_schedule,
        {"records": w.finished.lineage, "agent": w.finished.lineage[0]["agent"]},
    ),
    "Fitness": lambda w: (Fitness, {"mean": 1.0}),
    "Fitness.from_state": lambda w: (Fitness.from_state, {"values": Fitness(1.0).state()}),
    "SamplingSettings": lambda w: (SamplingSettings, {"max_new_tokens": 4}),
    "TeacherEndpoint": lambda w: (TeacherEndpoint, {"url": "http://127.0.0.1:9", "model": "m"}),
    "actor.save_pretrained": lambda w: (w.agent.actor.save_pretrained, {"path": "actor"}),
    "gym.reset": lambda w: (w.sft_gym.reset, {}),
    "GuessTheNumber.step": lambda w: (started(GuessTheNumber()).step, {"action": "1"}),
    "sample_eval_prompts": lambda w: (sample_eval_prompts, {"env": w.sft_gym}),
    "compare_responses": lambda w: (
        compare_responses,
        {"agent": w.spare, "tokenizer": w.tokenizer, "samples": [("2+2?", None, None)], "max_new_tokens": 2},
    ),
    "RunConfig.from_dict": lambda w: (RunConfig.from_dict, {"values": {}}),
    # Methods of what is built already.
    "agent.get_action": lambda w: (w.agent.get_action, {"obs": [w.prompt()]}),
    "agent.generate": lambda w: (w.agent.generate, {"prompts": "a"}),
    "agent.learn": lambda w: (w.turns.learn, {"experiences": w.learned(), "turn_ids": [ids(8, 9, fill=0)]}),
    "agent.test": lambda w: (w.agent.test, {"env": w.gym}),
    "agent.logprobs": lambda w: (w.agent.logprobs, {"batch": w.batch()}),
    "agent.accumulate": lambda w: (w.agent.accumulate, {"batch": w.batch()}),
    "agent.clone": lambda w: (w.agent.clone, {"index": 50}),
    "agent.save_checkpoint": lambda w: (w.agent.save_checkpoint, {"path": "agent", "overwrite": True}),
    "agent.load_checkpoint": lambda w: (w.spare.load_checkpoint, {"path": w.checkpoint}),
    "agent.set_reference_policy": lambda w: (w.spare.set_reference_policy, {"reference_update_tracker": 1}),
    "agent.mix_reference": lambda w: (w.spare.mix_reference, {"alpha": 0.5}),
    "agent.set_hyperparameters": lambda w: (w.spare.set_hyperparameters, {"values": {"lr": 1e-4}}),
    "agent.use_adapter": lambda w: (w.agent.use_adapter, {"adapter_name": "actor"}),
    "agent.register_mutation_hook": lambda w: (w.spare.register_mutation_hook, {"hook": print}),
    "GRPO.load": lambda w: (GRPO.load, {"path": w.checkpoint, "runtime": w.runtime}),
    "GRPO.population": lambda w: (GRPO.population, {"size": 1, "runtime": w.runtime}),
    "sft.test": lambda w: (w.sft.test, {"env": w.sft_gym}),
    "sft.learn": lambda w: (w.sft.learn, {"experiences": w.sft_gym.reset()}),
    "Run": lambda w: (Run, {"path": "no/where"}),
    "train": lambda w: (train_run, {"task": "gcd", "max_tokens": 1, "display": False}),
    "Runtime.for_model": lambda w: (Runtime.for_model, {"model": w.runtime.base.model}),
    "Runtime.from_pretrained": lambda w: (Runtime.from_pretrained, {"name": "no/where"}),
    "population.learn": lambda w: (w.population.learn, {"rollout": w.rollout}),
    "population.evaluate": lambda w: (w.population.evaluate, {}),
    "population.agent": lambda w: (w.population.agent, {"index": 0}),
    "population.panel": lambda w: (w.population.panel, {"split": "exam"}),
    "gym.step": lambda w: (w.gym.step, {"completion_ids": [ids(1, 9), ids(1, 9)]}),
    "gym.from_state": lambda w: (w.gym.from_state, {"state": {"batches": 1}}),
    "wrapper.reset": lambda w: (w.wrapped().reset, {}),
    "wrapper.step": lambda w: (w.wrapper.step, {"completion_ids": ids(1, 90)}),
    "vector.step": lambda w: (w.vector.step, {"completion_ids": [ids(1, 90), ids(1, 90)]}),
    "selection.plan": lambda w: (
        TournamentSelection(1, True, 1).plan,
        {"fitness": {0: Fitness(1.0)}, "generation": 0, "seed": 0, "next_index": 1},
    ),
    "mutations.mutation": lambda w: (mutations().mutation, {"population": [w.spare]}),
    "Fitness.from_scores": lambda w: (Fitness.from_scores, {"scores": [1.0]}),
}
SCHEDULE = {"genes": {"lr": [{"tokens": 0, "value": 1e-4}]}, "total_tokens": 8, "not_replayed": []}
VECTOR = Fitness(1.0, costs={"kl": Fitness(0.5)})
CHANCES = ("no_mutation", "architecture", "new_layer_prob", "parameters", "activation", "rl_hp")
PAIRS = [{"prompt": f"{n}+{n}?", "chosen": str(2 * n), "rejected": "no"} for n in range(4)]
GRADED: Mapping[str, Any] = {"grader": exact_match, "completions": ["4"], "rows": [{"answer": "4"}]}

SEEN_ELSEWHERE = {
    "ALGORITHMS", "LIBRARY",  # tables
    "LLMPPO", "LLMREINFORCE", "RolloutEnv",  # other names
    "HAS_ARENA_DEPENDENCIES", "HAS_DEEPSPEED", "HAS_LIGER_KERNEL", "HAS_LLM_DEPENDENCIES", "HAS_VLLM",  # flags
    "EvolvableAlgorithm", "LLMAlgorithm", "Task", "TextEnv", "BaseGrader", "WaitingGrader",  # to subclass
    "ToolCallParser",  # also
    "Grader", "Row",  # types
    "Grades", "SandboxResult", "MalformedCall", "ToolCall", "ToolResult",  # results
    "RunDirectory", "RunLayout",  # made by create and open
    "TextTagParser", "run_python", "register_environments", "collect_hardware", "collect_versions",
    "find_adapter",  # tests/cli/test_after.py
}  # fmt: skip
"""Public names that take no arguments from a user, or that another test calls."""


@pytest.mark.parametrize("name", VALID)
def test_a_wrong_value_works_or_ends_in_a_sentence(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tmp_path)  # a path that works is one below here
    function, valid = VALID[name](world)
    foreign = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for what, value in WRONG.items():
            try:
                function(**{**valid, parameter.name: value})
            except AgileRLError as error:
                named = parameter.name in str(error) or repr(value) in str(error)
                # Some doors refuse the other arguments as well, so that nothing trains, and speak of those.
                if (
                    what in PLAIN
                    and name not in IN_OTHER_WORDS
                    and not named
                    and str(error) != refusal(function, valid)
                ):
                    foreign.append(f"{parameter.name}={what} is not named: {error}")
            except Exception as error:
                foreign.append(f"{parameter.name}={what}: {type(error).__name__}: {error}")
    assert not foreign, "\n".join(foreign)


def test_everything_public_is_called() -> None:
    modules = (
        *("", ".algorithms", ".envs", ".llm_envs", ".rewards", ".envs.tools", ".runs", ".report"),
        *(".training.train_llm", ".utils.utils", ".utils.llm_utils", ".utils.algo_utils"),
    )
    public = {name for module in modules for name in importlib.import_module(f"agilerl{module}").__all__}
    assert public - set(VALID) - SEEN_ELSEWHERE == set()


@pytest.mark.parametrize("name", ["learning_rate", "grp_size"])
def test_an_unknown_keyword_of_an_agent_has_a_sentence(name: str, world: World) -> None:
    with pytest.raises(ConfigError, match=name):
        world.grpo(**{name: 1})


def test_an_unknown_keyword_elsewhere_is_pythons_own_type_error(world: World) -> None:
    with pytest.raises(TypeError, match=r"no argument 'prompts_per_stp'; did you mean 'prompts_per_step'\?"):
        people(world, prompts_per_stp=1)
    with pytest.raises(TypeError, match=r"EpisodeTask.*'exam_prompts'.*exam_episodes"):
        EpisodeTask(GridNavigation, exam_prompts=3)


# -- what is taken rather than refused --------------------------------------------------------------------------------


def test_numbers_of_numpy_are_taken(world: World) -> None:
    population = people(world, prompts_per_step=np.int64(3), max_error_rate=np.float32(0.5))
    assert (population.prompts_per_step, population.max_error_rate) == (3, 0.5)
    assert (type(population.prompts_per_step), type(population.max_error_rate)) == (int, float)
    assert TournamentSelection(np.int32(2), np.bool_(True), 4).tournament_size == 2


def test_padding_is_no_part_of_a_prompt(world: World) -> None:
    padded = {"input_ids": torch.tensor([[0, 0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    whole, alone = (world.agent.get_action([p], training=False) for p in (padded, world.prompt(5, 6)))
    assert torch.equal(whole.completion_ids[0], alone.completion_ids[0])


def test_prompts_come_as_lists_and_arrays_too(world: World) -> None:
    given = ([5, 6], [[5, 6]], np.array([[5, 6]]), torch.tensor([5, 6], dtype=torch.int32))
    found = [world.agent.get_action({"input_ids": ids}, training=False).completion_ids[0] for ids in given]
    assert all(torch.equal(found[0], other) for other in found)


def test_masks_of_zero_and_one_of_any_type_are_one_update(world: World) -> None:
    masks = (torch.ones(8, 9), torch.ones(8, 9, dtype=torch.int64), torch.ones(8, 9, dtype=torch.bool))
    results = [world.agent.clone().learn(world.learned(masks=[mask])) for mask in masks]
    assert results[0]["mean_loss"] == results[1]["mean_loss"] == results[2]["mean_loss"]


def test_one_factor_of_a_gene_is_enough() -> None:
    config = manifest(mutation={"rl_hp_selection": {"lr": {"min": 1e-5, "max": 1e-2, "shrink_factor": 0.5}}})
    assert resolve(config).genes["lr"].factors == (0.5, 1.2)


def test_more_genes_a_mutation_than_there_are_is_said_once(world: World) -> None:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="genes_per_mutation=50"):
        mutations(genes_per_mutation=50).plan([Member.of(world.agent)], None, 0, 0)
    mutations(genes_per_mutation=50).plan([Member.of(world.agent)], None, 0, 0)


def test_an_attribute_with_nearly_the_name_of_a_hyperparameter_is_said(world: World) -> None:
    agent = world.spare.clone()
    with pytest.warns(UserWarning, match="grup_size .*'group_size'"):
        agent.grup_size = 4
    agent.grup_size = 5  # it is an attribute by now
    agent.notes = "of the user's own"
    agent.clean_up()


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"wandb_api_key": "key"}, "wb"),
        ({"wandb_kwargs": {"project": "x"}}, "wb"),
        ({"tensorboard_log_dir": "x"}, "tensorboard"),
        ({"csv_log_dir": "x"}, "csv"),
    ],
)
def test_settings_of_a_tracker_that_was_not_asked_for_are_said(given: dict[str, Any], needed: str) -> None:
    with pytest.warns(UserWarning, match=f"{next(iter(given))} .*{needed}=True"):
        LoopOptions(**given)


def test_a_completion_longer_than_the_context_is_said_once(world: World) -> None:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"max_output_tokens=5000.*128"):
        agent = world.grpo(max_output_tokens=5000)
    assert world.grpo(max_output_tokens=5000).sampling(28).max_new_tokens == agent.context_length - 28
