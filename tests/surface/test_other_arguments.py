"""Every argument of environments, evolution, loops, helpers and manifests acts: as ``test_agents_arguments.py`` has it.

``ENTRIES`` names the documented entry points, each with the scene in which it is looked at and an entry for each of its
arguments. The manifest's documented keys are at the end.
"""

import warnings
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from dataclasses import fields
from functools import cache
from io import StringIO
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig

from agilerl import (
    GRPO,
    SFT,
    HyperparameterConfig,
    LocalTrainer,
    Mutations,
    RLParameter,
    Runtime,
    TournamentSelection,
)
from agilerl.algorithms import CosineLRScheduleConfig
from agilerl.algorithms.config import lr_factor
from agilerl.compat.loops import LoopOptions
from agilerl.config.manifest import load_manifest
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import AgileRLError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.multi_frequency import MultiFrequencySelection
from agilerl.hpo.mutation import Member, mutate_value
from agilerl.hpo.selection import NoSelection
from agilerl.llm_envs import (
    DatasetEnv,
    FormatRewardWrapper,
    PreferenceGym,
    ReasoningGym,
    SearchTool,
    SFTGym,
    SyncMultiTurnVecEnv,
    TokenObservationWrapper,
)
from agilerl.streams import stream
from agilerl.training import llm
from agilerl.training.loop import _evolve, planned_iterations
from agilerl.training.progress import Progress
from agilerl.training.setup import build
from agilerl.utils import llm_utils, utils
from agilerl.utils.probe_envs_llm import (
    ConditionalTargetEnv,
    ConstantTargetEnv,
    GridNavigationEnv,
    MultiInputConditionalEnv,
)
from tests.envs.conftest import make_tokenizer
from tests.envs.scripted import Echo
from tests.hpo.plain_agents import GENES, population
from tests.probes import ConditionalTarget, MultiInputConditional
from tests.surface.acting import Entry, NoOp, Proven, Refused, check, parameters, scratch, to
from tests.training.small_runs import SMALL

pytestmark = pytest.mark.model

# -- evolution: what is selected and changed over some generations ----------------------------------------------------

SCORES = [[0.1, 0.4, 0.3, 0.8, 0.2, 0.6, 0.5, 0.7], [0.9, 0.1, 0.3, 0.2, 0.6, 0.4, 0.8, 0.5], [0.5] * 7 + [0.6]]


def selected(cls: Any, _size: int = 8, **given: Any) -> Any:
    """Return three plans, and whom a population with two exams becomes."""
    strategy, found = cls(**given), []
    for generation in (0, 3, 4):
        fitness = {i: Fitness.from_scores([s, s + 0.1 * (i % 2)]) for i, s in enumerate(SCORES[generation % 3][:_size])}
        found.append(strategy.plan(fitness, generation, 5, _size).to_dict())
    agents = population(*SCORES[0][:_size])
    for agent in agents:
        agent.fitness.append(SCORES[1][agent.index])
    elite, after, nominated = strategy.select(agents)
    return found, elite.index, [(agent.index, agent.weights) for agent in after], nominated


def tournament(**given: Any) -> Any:
    return selected(TournamentSelection, **{"tournament_size": 2, "elitism": True, "population_size": 8, **given})


def frequencies(**given: Any) -> Any:
    return selected(MultiFrequencySelection, **{"population_size": 8, **given})


def mutated(**given: Any) -> Any:
    """Return how 40 agents are changed, with and without a seed of the population's own."""
    chances = {"no_mutation": 1, "architecture": 1, "new_layer_prob": 0, "parameters": 1, "activation": 0, "rl_hp": 1}
    mutations = Mutations(**{**chances, **given})  # type: ignore[arg-type]
    members = [Member(i, {"lr": 1e-5, "group_size": 8}, GENES, 8) for i in range(40)]
    after = mutations.mutation(population(*SCORES[0]))
    plans = [plan.to_dict() for plan in mutations.plan(members, 3, 0, 1)]
    return plans, [(a.mut, a.rank, a.hyperparameters) for a in after], mutations.crossover


def ranged(**given: Any) -> Any:
    gene = RLParameter(**{"min": 1.0, "max": 100.0, **given}).gene("x")
    values = [mutate_value(gene, v, stream(k, "x")) for k, v in enumerate((1.0, 10.0, 50.0, 100.0) * 5)]
    return values, gene.dtype


# -- environments -----------------------------------------------------------------------------------------------------


@cache
def embedded() -> Runtime:
    return Runtime.from_pretrained("embedded")


ROWS = [
    {
        "question": f"{n}+1",
        "answer": str(n + 1),
        "prompt": f"{n}+1",
        "chosen": str(n + 1),
        "rejected": "no",
        "other": "7",
    }
    for n in range(10)
]
TEMPLATE = [{"role": "user", "content": "{question}"}]
SECOND = SimpleNamespace(process_index=1, num_processes=2)


def graded(completion: str, answer: str, question: str) -> float:
    return len(completion) / 10


def gym(**given: Any) -> ReasoningGym:
    own = {"train_dataset": ROWS, "test_dataset": ROWS[:3], "tokenizer": embedded().tokenizer, "reward_fn": graded}
    return ReasoningGym(**{**own, "conversation_template": TEMPLATE, "data_batch_size_per_gpu": 2, **given})


def sft_gym(**given: Any) -> SFTGym:
    own = {
        "train_dataset": ROWS,
        "test_dataset": ROWS[:6],
        "tokenizer": embedded().tokenizer,
        "response_column": "answer",
    }
    return SFTGym(**{**own, "data_batch_size_per_gpu": 2, **given})


def seen(prompts: Any) -> Any:
    """Return what a batch of an environment shows."""
    if isinstance(prompts, list):
        return [(prompt["text"], prompt["input_ids"].tolist()) for prompt in prompts]
    return prompts.ids.tolist(), prompts.action_mask.tolist()


def asked(**given: Any) -> Any:
    """Return two batches of prompts, the rewards of the first, and the exam."""
    env = gym(**given)
    first = env.reset()
    ids = [torch.cat([p["input_ids"], torch.full((1, 2), 7 + k)], dim=1) for k, p in enumerate(first)]
    second, rewards = env.step(ids)
    with env.eval_mode():
        exam = seen(env.reset())
    return seen(first), rewards.tolist(), seen(second), exam, len(env)


def drawn(cls: Any, **given: Any) -> Any:
    own = {"train_dataset": ROWS, "test_dataset": ROWS[:3], "tokenizer": embedded().tokenizer}
    env = cls(**{**own, "data_batch_size_per_gpu": 2, **given})
    first, second = seen(env.reset()), seen(env.step())
    with env.eval_mode():
        return first, second, seen(env.reset()), type(env).__name__


def sft(**given: Any) -> Any:
    return drawn(SFTGym, **{"response_column": "answer", **given})


def from_data(**given: Any) -> Any:
    return drawn(DatasetEnv, **{"objective": "sft", "response_column": "answer", **given})


def pairs(**given: Any) -> Any:
    return drawn(PreferenceGym, **given)


def reset(**given: Any) -> Any:
    env = gym()
    env.reset()
    return seen(env.reset(**given))


def of_task(**given: Any) -> Any:
    own = {"task": ConditionalTarget(), "tokenizer": embedded().tokenizer}
    env = ReasoningGym.from_task(**{**own, **given})
    return seen(env.reset()), len(env)


def returned(state: Any = None) -> Any:
    return seen(gym().from_state(state or {"batches": 1}))


def wrapped(env: Any = None, _says: str = "ab", **given: Any) -> Any:
    """Return an episode, token by token, and what it trains on."""
    own = {"tokenizer": make_tokenizer(), "max_turns": 4}
    wrapper = TokenObservationWrapper(env or Echo(3, 4), **{**own, **given})
    prompt, info = wrapper.reset(seed=3)
    found: list[Any] = [prompt["text"], info]
    over = False
    while not over:
        said = wrapper.tokenizer(_says, add_special_tokens=False)["input_ids"] + [wrapper.tokenizer.eos_token_id]
        ids = torch.cat([prompt["input_ids"], torch.tensor([said])], dim=1)
        prompt, reward, done, cut, info = wrapper.step(ids)
        found.append((prompt.get("text"), reward, done, cut, info))
        over = done or cut
    return found, [(t.token_ids, t.action_mask) for t in wrapper.trajectories()], wrapper.pad_id, wrapper.settings


def stepped(_turns: int = 1, **given: Any) -> Any:
    """Return what a step with these log-probs and this mask is trained on."""
    wrapper = TokenObservationWrapper(Echo(1, 4), make_tokenizer(), 4)
    prompt, _ = wrapper.reset(seed=1)
    said = torch.tensor([[11, 12, wrapper.pad_id, wrapper.pad_id]])
    given = {name: value for name, value in given.items() if value is not None}
    if "action_mask" in given:
        given["action_mask"] = torch.tensor([[False] * (prompt["input_ids"].shape[1] - 1) + given["action_mask"]])
    wrapper.step(torch.cat([prompt["input_ids"], given.pop("completion_ids", said)], dim=1), **given)
    return [(t.token_ids, t.logprobs) for t in wrapper.trajectories()]


def several(**given: Any) -> Any:
    """Return the first prompts and the rewards of episodes that are played together."""
    own = {"env_factory": Echo, "batch_size": 2, "group_size": 2, "tokenizer": make_tokenizer()}
    env = SyncMultiTurnVecEnv(**{**own, **given})
    prompts: Any = env.reset(seed=0)
    first = [prompt["text"] for prompt in prompts]
    while prompts:
        prompts = env.step([torch.cat([p["input_ids"], torch.tensor([[11, 12]])], dim=1) for p in prompts])
    return (
        first,
        env.returns(),
        env.batch().groups.tolist(),
        env.get_trajectories()[4],
        [e.tokenizer.eos_token for e in env.envs],
    )


class Wrong(Echo):
    """An episode whose answer is in tags, and not right."""

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return "", float(self.length), True, False, {"success": False}


def with_bonus(**given: Any) -> Any:
    env = FormatRewardWrapper(**{"env": Wrong(), **given})
    env.reset(seed=1)
    return env.step("<answer>x</answer>")[1]


def probe(cls: Any) -> Callable[..., Any]:
    def played(**given: Any) -> Any:
        env = cls(**given)
        found: list[Any] = []
        for seed in (None, 1, 2, 3):
            found.append(env.reset(seed=seed))
            over = False
            while not over:
                found.append(env.step("1"))
                over = found[-1][2]
        return found

    played.__name__ = cls.__name__
    return played


# -- loops ------------------------------------------------------------------------------------------------------------

HP = {"BATCH_SIZE": 1}


def agents(cls: Any = GRPO, size: int = 2, **given: Any) -> list[Any]:
    own: dict[str, Any] = {"group_size": 2, "batch_size": 4, "max_output_tokens": 3} if cls is not SFT else {}
    genes = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-1))
    return cls.population(size, runtime=embedded(), hp_config=genes, init="same", **{"lr": 1e-2, **own, **given})  # type: ignore[no-any-return]


def looped(loop: Any, **given: Any) -> Any:
    """Return what a loop did: updates, steps, exams, mutations, what it printed and the files that it left."""
    said = StringIO()
    with scratch() as place, chdir(place), redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pop, fitness = loop(**given)
        files = sorted(str(path) for path in Path().rglob("*"))
    kinds = sorted({path.split("/")[0] for path in files if not path.endswith(".py")})
    lines = [line for line in said.getvalue().splitlines() if line.startswith("iteration")]
    found = [(a.index, a.updates, a.steps, len(a.fitness), a.lr, sorted(a.metrics), a.reference_tracker) for a in pop]
    for agent in pop:
        agent.clean_up()
    return found, fitness, lines, kinds


def reasoning(**given: Any) -> Any:
    env = {} if {"env", "env_fn"} & set(given) else {"env": gym()}
    return looped(
        llm.finetune_llm_reasoning, **{"pop": agents(), "max_steps": 8, "verbose": False, "csv": True, **env, **given}
    )


def on_data(loop: Any) -> Callable[..., Any]:
    def run(**given: Any) -> Any:
        env = {} if {"env", "env_fn"} & set(given) else {"env": sft_gym()}
        return looped(loop, **{"pop": agents(SFT), "max_steps": 4, "verbose": False, **env, **given})

    return run


def of_episodes(loop: Any) -> Callable[..., Any]:
    def run(**given: Any) -> Any:
        own = {"max_turns": 2, "env_factory": Echo, "init_hp": {"BATCH_SIZE": 2}, "max_steps": 8, "eval_loop": 2}
        return looped(loop, **{"pop": agents(size=1), **own, "verbose": False, **given})

    return run


SELECTION, MUTATION = TournamentSelection(2, True, 2), Mutations(0, 0, 0, 0, 0, 1)
EVOLVING: dict[str, Any] = {"evo_steps": 1, "mutation": MUTATION, "selection_strategy": SELECTION}
IN_LOOPS = "surface/test_loops.py::"
LOOP: dict[str, Entry] = {
    "max_steps": to(4),
    "num_epochs": to(1),
    "evo_steps": to(2, mutation=MUTATION, selection_strategy=SELECTION, evo_steps=1),
    "evaluation_interval": to(1),
    "eval_loop": to(1),
    "selection_strategy": to(NoSelection(), **EVOLVING),
    "tournament": Proven(IN_LOOPS + "test_evo_steps_counts_iterations"),
    "mutation": to(Mutations(1, 0, 0, 0, 0, 0), **EVOLVING),
    "save_elite": to(True),
    "elite_path": to("best"),
    "checkpoint_steps": to(4),
    "checkpoint_path": to("kept"),
    "max_reward": to(0.1),
    "max_wall_seconds": to(1e-6),
    "verbose": to(True),
    "accelerator": Proven("distributed/test_accelerate.py::test_two_accelerators_on_one_base"),
    "wb": Proven(IN_LOOPS + "test_trackers_get_metrics_of_agents_and_the_selection"),
    "wandb_api_key": Proven(IN_LOOPS + "test_trackers_get_metrics_of_agents_and_the_selection"),
    "wandb_kwargs": Proven(IN_LOOPS + "test_trackers_get_metrics_of_agents_and_the_selection"),
    "tensorboard": to(True),
    "tensorboard_log_dir": Proven(IN_LOOPS + "test_trackers_get_metrics_of_agents_and_the_selection"),
    "csv": to(False),
    "csv_log_dir": to("there"),
}


class Slow(Echo):
    """Needs a fifth of a second for each answer if the seed is odd."""

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        sleep(0.2 * (self.seed % 2))
        return super().step(action)


# -- helpers ----------------------------------------------------------------------------------------------------------


def created(**given: Any) -> Any:
    """Return what agents of a dictionary are like."""
    own = {"algo": "SFT", "net_config": None, "INIT_HP": {"LR": 1e-3}, "algo_kwargs": {"runtime": embedded()}}
    if {"model_name", "actor_network"} & set(given):
        own["algo_kwargs"] = {}
    pop = utils.create_population(**{**own, **given})
    r = pop[0].runtime
    found = [(a.algo, a.lr if "lr" in a.config.model_dump() else 0, a.rank, a.genes, a.pad_token_id) for a in pop]
    told = r.base.source, r.options.use_vllm, r.options.vllm_config is None, r.tokenizer is None
    for agent in pop:
        agent.clean_up()
    return found, told


def chosen(population: Any = (0.1, 0.9), **given: Any) -> Any:
    """Return whom a loop's own population with these fitnesses becomes, and what was saved."""
    pop = agents()
    for agent, fitness in zip(pop, population):
        agent.fitness.append(fitness)
    own = {"selection_strategy": SELECTION, "mutation": MUTATION}
    with scratch() as place, chdir(place):
        after = utils.run_selection_and_mutation(population=pop, **{**own, **given})
        files = sorted(str(path) for path in Path().glob("*"))
    return [(agent.index, agent.lr) for agent in after], files


def wrote(path: str = "one", overwrite: bool = True, _again: bool = False) -> Any:
    (agent,) = agents(size=1)
    with scratch() as place, chdir(place):
        utils.save_llm_checkpoint(agent, path)
        if _again:
            utils.save_llm_checkpoint(agent, path, overwrite=overwrite)
        return sorted(str(file) for file in Path().glob("*/*"))


def picked(**given: Any) -> Any:
    return llm_utils.sample_eval_prompts(**{"env": sft_gym(), "n": 2, **given})


def compared(**given: Any) -> Any:
    agent = GRPO(runtime=embedded())
    if given.pop("agent", False):
        embedded().store.theta[agent.slot].normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    own = {"tokenizer": embedded().tokenizer, "samples": [("1+1", "2", None)], "max_new_tokens": 6}
    with redirect_stdout(StringIO()):
        return llm_utils.compare_responses(**{**own, **given, "agent": agent})


def averaged(**given: Any) -> Any:
    return utils.aggregate_metrics_across_gpus(
        **{"accelerator": None, "metric_tensor": torch.tensor([1.0, 2.0]), **given}
    )


def trained(**given: Any) -> Any:
    """Return the settings of a run from Python."""
    trainer = LocalTrainer(**{"algorithm": "GRPO", "environment": "reasoning_gym:gcd", **given})
    return trainer.config.model_dump(mode="json"), trainer.resume_from_checkpoint


def from_manifest(**given: Any) -> Any:
    trainer = LocalTrainer.from_manifest(**{"manifest": {"training": {"pop_size": 2}}, **given})
    return trainer.config.model_dump(mode="json"), trainer.resume_from_checkpoint


SMALLEST: dict[str, Any] = {
    "algorithm": {"name": "GRPO", "group_size": 2, "batch_size": 4, "max_output_tokens": 2},
    "environment": {"task": "reasoning_gym:gcd", "eval_prompts": 2, "test_prompts": 2, "data_batch_size_per_gpu": 2},
    "training": {"max_steps": 4, "pop_size": 1},
}


def ran(**given: Any) -> Any:
    """Return the files, the output and the events of a run from Python."""
    said, events = StringIO(), list[str]()
    own = {"out": "run", "verbose": False, "elite_path": "best", "tensorboard": True, "csv": True}
    if given.pop("consumers", False):
        own["consumers"] = (lambda event: events.append(type(event).__name__),)
    with scratch() as place, chdir(place), redirect_stdout(said):
        LocalTrainer(**SMALLEST).train(**{**own, **given})
        found = sorted(str(path) for path in Path().glob("*")), Path("run/tensorboard").exists()
    return found, bool(said.getvalue()), events


def scheduled(**given: Any) -> list[float]:
    course = CosineLRScheduleConfig(**{"num_epochs": 8, **given})
    return [lr_factor(course, update) for update in range(8)]


# -- the table: each entry point, how it is looked at, and an entry for each argument ----------------------------------


ROWS_7 = [{**row, "question": f"7{row['question']}", "prompt": f"7{row['prompt']}"} for row in ROWS]
OF_GYM: dict[str, Entry] = {
    "train_dataset": to(ROWS_7),
    "test_dataset": to(ROWS_7[:3]),
    "tokenizer": to(make_tokenizer()),
    "data_batch_size_per_gpu": to(3),
    "accelerator": to(SECOND),
    "max_context_length": Refused(2),
    "seed": to(7),
}
OF_SEARCH = "envs/tools/test_search_tool.py::"
CHATS = [
    {"messages": [{"role": role, "content": f"{role[0]}{k}"} for k, role in enumerate(("user", "assistant") * 2)]},
] * 3
OTHER_POP = "surface/test_loops.py::test_fitnesses_are_those_of_the_returned_population"

Scene = Callable[..., Any]
ENTRIES: dict[str, tuple[Callable[..., Any], Scene, dict[str, Entry]]] = {
    "TournamentSelection": (
        TournamentSelection,
        tournament,
        {
            "tournament_size": to(5),
            "elitism": to(False),
            "population_size": Refused(7),
            "eval_loop": to(2),
            "language_model": NoOp("every agent here is a language model"),
            "gate": to(0.99),
            "seed": to(3),
        },
    ),
    "MultiFrequencySelection": (
        MultiFrequencySelection,
        frequencies,
        {
            "population_size": Refused(12),
            "n_subpopulations": to(4),
            "evolution_frequency_ratios": to((1, 2)),
            "n_winners": to(2),
            "n_survivors": Refused(3),
            "n_open_for_migration": to(0),
            "n_losers": to(2),
            "seed": to(3, n_winners=2),
        },
    ),
    "Mutations": (
        Mutations,
        mutated,
        {
            "no_mutation": to(5),
            "architecture": to(0),
            "new_layer_prob": Refused(0.5),
            "parameters": to(0),
            "activation": Refused(0.5),
            "rl_hp": to(0),
            "mutation_sd": to(0.3),
            "activation_selection": NoOp("the frozen base keeps its activations"),
            "mutate_elite": to(True),
            "rand_seed": to(3),
            "device": NoOp("nothing is computed on a device"),
            "accelerator": NoOp("a mutation is planned, identically in every process"),
            "genes_per_mutation": to(2),
            "rank_range": to((8, 16)),
            "crossover": to(0.5),
        },
    ),
    "RLParameter": (
        RLParameter,
        ranged,
        {
            "min": to(5.0),
            "max": to(60.0),
            "shrink_factor": to(0.5),
            "grow_factor": to(2.0),
            "dtype": to(int),
            "monotone": to("up"),
        },
    ),
    "ReasoningGym": (
        ReasoningGym,
        asked,
        {
            **OF_GYM,
            "reward_fn": to(lambda completion, answer, question: 0.5),
            "conversation_template": to([{"role": "user", "content": "What is {question}?"}]),
            "return_raw_completions": NoOp("prompts always carry their text"),
        },
    ),
    "ReasoningGym.from_task": (
        ReasoningGym.from_task,
        of_task,
        {
            "task": to(MultiInputConditional()),
            **{name: OF_GYM[name] for name in ("tokenizer", "data_batch_size_per_gpu", "accelerator")},
            "max_context_length": Refused(2),
        },
    ),
    "ReasoningGym.reset": (ReasoningGym.reset, reset, {"reset_dataloaders": to(True)}),
    "ReasoningGym.from_state": (ReasoningGym.from_state, returned, {"state": to({"batches": 2})}),
    "SFTGym": (
        SFTGym,
        sft,
        {
            **OF_GYM,
            "response_column": to("other"),
            "loss_on": to("assistant", train_dataset=CHATS, test_dataset=CHATS, tokenizer=make_tokenizer()),
        },
    ),
    "PreferenceGym": (PreferenceGym, pairs, OF_GYM),
    "DatasetEnv": (DatasetEnv, from_data, {**OF_GYM, "objective": to("preference"), "response_column": to("other")}),
    "TokenObservationWrapper": (
        TokenObservationWrapper,
        wrapped,
        {
            "env": to(Echo(2, 4)),
            "tokenizer": to(embedded().tokenizer),
            "max_turns": to(2),
            "pad_id": to(5),
            "apply_chat_template": to(False),
            "max_model_len": to(24),
            "max_output_tokens": to(14, max_model_len=30),
            "enable_sliding_window": to(True),
            "strict_chat_template_boundary": to(False),
            "eos_token_ids": to((10,)),
        },
    ),
    "TokenObservationWrapper.step": (
        TokenObservationWrapper.step,
        stepped,
        {
            "completion_ids": to(torch.tensor([[14, 15]])),
            "sampling_logps": to(torch.tensor([-1.0, -2.0])),
            "action_mask": to([True, True, True, False]),
        },
    ),
    "SyncMultiTurnVecEnv": (
        SyncMultiTurnVecEnv,
        several,
        {
            "env_factory": to(Wrong),
            "batch_size": to(3),
            "group_size": to(3),
            "env_config": to({"length": 1}),
            "tokenizer": Refused(None),
        },
    ),
    "SearchTool": (
        SearchTool,
        SearchTool,
        {
            "num_workers": Proven(OF_SEARCH + "test_workers_are_the_most_requests_at_a_time"),
            "search_url": Proven(OF_SEARCH + "test_results_of_a_query"),
            "topk": Proven(OF_SEARCH + "test_results_of_a_query"),
            "timeout": Proven(OF_SEARCH + "test_a_server_that_does_not_answer"),
        },
    ),
    "FormatRewardWrapper": (FormatRewardWrapper, with_bonus, {"env": to(Wrong(length=7)), "format_bonus": to(0.5)}),
    "ConstantTargetEnv": (
        ConstantTargetEnv,
        probe(ConstantTargetEnv),
        {"target_digit": to("1"), "prompt": to("7"), "seed": NoOp("its question is always the same")},
    ),
    "ConditionalTargetEnv": (ConditionalTargetEnv, probe(ConditionalTargetEnv), {"digits": to((7, 8)), "seed": to(8)}),
    "MultiInputConditionalEnv": (
        MultiInputConditionalEnv,
        probe(MultiInputConditionalEnv),
        {"digits": to((7, 8)), "seed": to(8)},
    ),
    "GridNavigationEnv": (
        GridNavigationEnv,
        probe(GridNavigationEnv),
        {"grid_size": to(6), "max_turns": to(2), "step_cost": to(-0.5), "seed": to(8)},
    ),
    "CosineLRScheduleConfig": (CosineLRScheduleConfig, scheduled, {"num_epochs": to(4), "warmup_proportion": to(0.5)}),
    "finetune_llm_reasoning": (
        llm.finetune_llm_reasoning,
        reasoning,
        {
            **LOOP,
            "pop": Proven(OTHER_POP),
            "env": to(gym(data_batch_size_per_gpu=4)),
            "env_fn": to(gym, num_epochs=1),
            "init_hp": Proven(IN_LOOPS + "test_trackers_get_metrics_of_agents_and_the_selection"),
            "io_timeout_s": NoOp("single questions have no steps to wait for"),
        },
    ),
    "finetune_llm_multiturn": (
        llm.finetune_llm_multiturn,
        of_episodes(llm.finetune_llm_multiturn),
        {
            "pop": Proven(OTHER_POP),
            "max_turns": to(1),
            "env_factory": to(Wrong),
            "env_config": to({"length": 1}),
            "init_hp": to({"BATCH_SIZE": 1}),
            "io_timeout_s": to(0.05, env_factory=Slow, max_steps=1),
        },
    ),
    "create_population": (
        utils.create_population,
        created,
        {
            "algo": to("DPO"),
            "net_config": Refused({"a": 1}),
            "INIT_HP": to({"LR": 1e-4}),
            "population_size": to(2),
            "hp_config": to(HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-1))),
            "model_name": Proven("surface/test_helpers.py::test_a_population_of_capital_letters"),
            "actor_network": Proven("surface/test_helpers.py::test_a_model_with_a_value_head_is_the_plain_model"),
            "tokenizer": Proven("surface/test_helpers.py::test_a_model_with_a_value_head_is_the_plain_model"),
            "lora_config": to(LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")),
            "vllm_config": to({"base_url": "http://localhost:9"}, model_name="embedded"),
            "accelerator": Refused(1),
            "device": Refused("cuda" if not torch.cuda.is_available() else "cuda:99"),
            "torch_compiler": Refused("none such"),
            "algo_kwargs": to({"runtime": embedded(), "lr": 1e-2}),
        },
    ),
    "run_selection_and_mutation": (
        utils.run_selection_and_mutation,
        chosen,
        {
            "selection_strategy": to(None),
            "population": to((0.9, 0.1)),
            "mutation": to(Mutations(1, 0, 0, 0, 0, 0)),
            "env_name": NoOp("no files are named after it"),
            "algo": NoOp("an agent knows its algorithm"),
            "elite_path": to("here", save_elite=True),
            "save_elite": to(True),
            "accelerator": NoOp("the agents' is used"),
            "language_model": NoOp("every agent here is a language model"),
        },
    ),
    "save_llm_checkpoint": (
        utils.save_llm_checkpoint,
        wrote,
        {
            "agent": Proven(IN_LOOPS + "test_the_elite_is_saved_before_it_mutates"),
            "path": to("two"),
            "overwrite": Refused(False, {"_again": True}),
        },
    ),
    "sample_eval_prompts": (
        llm_utils.sample_eval_prompts,
        picked,
        {"env": to(sft_gym(test_dataset=ROWS_7)), "n": to(3), "seed": to(2)},
    ),
    "compare_responses": (
        llm_utils.compare_responses,
        compared,
        {
            "agent": to(True),
            "tokenizer": Proven("surface/test_helpers.py::test_a_trainer_runs_resumes_and_hands_over_the_elite"),
            "samples": to([("2+2", "4", None)]),
            "max_new_tokens": to(2, agent=True),
            "temperature": to(9.0, do_sample=True),
            "do_sample": to(True, temperature=9.0),
            "skip_special_tokens": to(False),
            "show_base_model": to(False),
        },
    ),
    "aggregate_metrics_across_gpus": (
        utils.aggregate_metrics_across_gpus,
        averaged,
        {
            "accelerator": to(SimpleNamespace(num_processes=2, device="cpu", gather=lambda t: torch.cat([t, t + 1]))),
            "metric_tensor": to(torch.tensor([4.0])),
        },
    ),
    "LocalTrainer": (
        LocalTrainer,
        trained,
        {
            "algorithm": to("PPO"),
            "environment": to("reasoning_gym:chain_sum"),
            "training": to({"pop_size": 2}),
            "mutation": to({"mutation_sd": 0.2}),
            "selection_strategy": to({"name": "tournament"}),
            "dataset": Refused([{"question": "1 + 1", "answer": "2"}]),  # beside a task
            "reward": to("accuracy"),
            "network": to({"max_context_length": 64}),
            "hpo": to(True),
            "resume_from_checkpoint": to("runs/one"),
            "load_weights_from": to("elite"),
            "device": to("cuda"),
            "accelerator": Refused(1),
        },
    ),
    "LocalTrainer.from_manifest": (
        LocalTrainer.from_manifest,
        from_manifest,
        {
            "manifest": to({"training": {"pop_size": 3}}),
            "resume_from_checkpoint": to("runs/one"),
            "load_weights_from": to("elite"),
            "device": to("cuda"),
            "accelerator": Refused(1),
        },
    ),
    "LocalTrainer.train": (
        LocalTrainer.train,
        ran,
        {
            "out": to("elsewhere"),
            "save_elite": to(False),
            "elite_path": to("other"),
            "wb": Proven(IN_LOOPS + "test_trackers_get_metrics_of_agents_and_the_selection"),
            "wandb_api_key": Proven(IN_LOOPS + "test_trackers_get_metrics_of_agents_and_the_selection"),
            "wandb_kwargs": Proven(IN_LOOPS + "test_trackers_get_metrics_of_agents_and_the_selection"),
            "tensorboard": to(False),
            "tensorboard_log_dir": to("logs"),
            "csv": to(False),
            "csv_log_dir": to("values"),
            "verbose": to(True),
            "allow_code": Proven("surface/test_other_arguments.py::test_a_trainer_runs_code_that_is_allowed"),
            "consumers": to(True),
        },
    ),
}
"""By name: the entry point, its scene, and its arguments. An argument of the scene's own begins with ``_``."""
OTHER_LOOPS = {
    "finetune_llm_sft": ({"pop", "env", "env_fn", "init_hp"}, on_data(llm.finetune_llm_sft)),
    "finetune_llm_preference": ({"pop", "env", "env_fn", "init_hp"}, None),
    "train_llm_dataset": ({"pop", "env", "env_fn", "init_hp"}, on_data(llm.train_llm_dataset)),
    "train_llm_rollout": ({"pop", "max_turns", "env_factory", "init_hp"}, of_episodes(llm.train_llm_rollout)),
    "finetune_llm_multiturn": ({"pop", "max_turns", "env_factory", "env_config", "init_hp"}, None),
}
"""The own arguments of loops that share the others with ``finetune_llm_reasoning``, and a run of some."""


def arguments() -> list[tuple[str, str]]:
    found = []
    for entry, (function, _, entries) in ENTRIES.items():
        shared = {one.name for one in fields(LoopOptions)} if entry == "finetune_llm_multiturn" else set()
        found += [(entry, name) for name in parameters(function) if name not in shared - set(entries)]
    return found


@pytest.mark.filterwarnings("ignore:.*(tokens|gene|context|genes_per|copies|pad token)")
@pytest.mark.parametrize(("entry", "name"), arguments())
def test_an_argument_acts(entry: str, name: str) -> None:
    _, scene, entries = ENTRIES[entry]
    check(entries.get(name), name, scene)


def test_the_tables_have_no_argument_that_is_gone() -> None:
    for entry, (function, _, entries) in ENTRIES.items():
        assert set(entries) <= set(parameters(function)), entry


@pytest.mark.parametrize("name", OTHER_LOOPS)
def test_a_loops_arguments_are_the_shared_ones_and_its_own(name: str) -> None:
    own, run = OTHER_LOOPS[name]
    assert set(parameters(getattr(llm, name))) == own | {one.name for one in fields(LoopOptions)}
    if run is not None:
        assert run(max_steps=17, evaluation_interval=1, eval_loop=1) != run(max_steps=17, eval_loop=1)


def test_a_trainer_runs_code_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def grade(completion):\n    return 0.25\n")
    task = {**SMALLEST["environment"], "graders": [{"name": "mine.py:grade"}]}
    trainer = LocalTrainer(**{**SMALLEST, "environment": task})
    with pytest.raises(AgileRLError, match="allow"):
        trainer.train(out="first", verbose=False)
    _, fitness = trainer.train(out="second", verbose=False, allow_code=True)
    assert fitness == [0.25]


# -- manifests: each documented key, in a run that is built and looked at ----------------------------------------------


KEYS: dict[str, str] = {
    "algorithm.name": "PPO",
    "algorithm.lr": "1e-4",
    "environment.task": "reasoning_gym:chain_sum",
    "environment.params": "{max_numbers: 3}",
    "environment.eval_prompts": "5",
    "environment.test_prompts": "6",
    "training.max_steps": "384",
    "training.evo_steps": "1",
    "training.pop_size": "2",
    "training.evaluation_interval": "1",
    "mutation.probabilities.no_mut": "0.5",
    "mutation.probabilities.arch_mut": "0.5",
    "mutation.probabilities.params_mut": "0.5",
    "mutation.probabilities.rl_hp_mut": "0.1",
    "mutation.rl_hp_selection.lr": "{min: 1e-6, max: 1e-4}",
    "mutation.mutation_sd": "0.3",
    "mutation.rand_seed": "7",
    "selection_strategy.name": "truncation",
    "selection_strategy.tournament_size": "3",
    "selection_strategy.elitism": "false",
    "network.max_context_length": "64",
    "network.lora_config.r": "4",
    "network.lora_config.lora_alpha": "8",
    "network.lora_config.target_modules": "[q_proj]",
    "network.lora_config.lora_dropout": "0.1",
}
NEEDS = {"mutation.mutation_sd": ("mutation.probabilities={params_mut: 1}",)}
REFUSED_KEYS = {
    "mutation.probabilities.new_layer": "0.5",
    "mutation.probabilities.act_mut": "0.5",
    "environment.env_type": "sft",  # it follows from the algorithm, so that it can only contradict
}


def session_facts(*overrides: str) -> Any:
    """Return what a run would be like, and what its first selection makes of the agents."""
    session = build(load_manifest(None, [*SMALL, *overrides]))
    pop, strategy = session.population, session.selection
    first, store = pop.agents[0], pop.runtime.store
    start = [(agent.algo, agent.hyperparameters, agent.rank) for agent in pop.agents]
    counts = planned_iterations(session), session.config.training.evo_steps, session.config.training.evaluation_interval
    panels = None if isinstance(session.task, EpisodeTask) else [len(pop.panel("exam")), len(pop.panel("test"))]
    row = panels and str(pop.places("exam")[0])
    adapters = pop.context_length, len(store.layers), float(store.scaling[first.slot]), first.lora_config.lora_dropout
    exam = {agent.index: Fitness.from_scores([s, s]) for agent, s in zip(pop.agents, SCORES[0])}
    members = [Member(i, {"lr": 1e-5, "group_size": 8}, GENES, 8) for i in range(40)]
    planned = [one.to_dict() for one in session.resolved.mutations.plan(members, None, 0, 1)]
    change = _evolve(session, Progress(), exam)
    after = [(agent.index, agent.mut, agent.hyperparameters) for agent in pop.agents]
    settings = {name: str(value) for name, value in vars(strategy).items()}
    return start, counts, session.task.name, panels, row, adapters, planned, change.plan.to_dict(), after, settings


@cache
def unchanged(*needed: str) -> Any:
    first, again = session_facts(*needed), session_facts(*needed)
    assert first == again
    return first


@pytest.mark.parametrize("key", KEYS)
def test_a_documented_key_acts(key: str) -> None:
    needed = NEEDS.get(key, ())
    assert session_facts(f"{key}={KEYS[key]}", *needed) != unchanged(*needed)


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_documented_key_of_what_the_base_cannot_do_is_refused(key: str) -> None:
    with pytest.raises(AgileRLError, match=key.rpartition(".")[2]):
        session_facts(f"{key}={REFUSED_KEYS[key]}")
