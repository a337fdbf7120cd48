"""The training loops that AgileRL documents: agents, environment, selection and mutation of your own in one call.

Each is the :class:`agilerl.training.loop.Loop` of a run without a run directory: all agents sample, learn and take the
exam together.
``max_steps`` and ``checkpoint_steps`` count samples of all agents (prompts; rows, or pairs, of data; turns of
episodes), ``evo_steps`` and ``evaluation_interval`` count iterations, in each of which every agent learns once. A run
that can be killed and resumed, with a report, is ``agilerl train`` (:mod:`agilerl.training.run`).
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypeVar

from agilerl.algorithms import LLMAlgorithm
from agilerl.algorithms.codec import save_llm_checkpoint
from agilerl.checks.arguments import (
    Count,
    Having,
    Hint,
    Location,
    Number,
    Positive,
    check_fields,
    checked,
    described,
    nearest,
    taken,
)
from agilerl.compat.gyms import DataGym, Gym, PreferenceGym, ReasoningGym, SFTGym, UnpairedGym
from agilerl.compat.tokenized import TokenObservationWrapper
from agilerl.data import Trajectory
from agilerl.envs.datasets import CuratedTask, DatasetTask
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError, EnvError
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.guard import quarantined
from agilerl.hpo.mutation import Mutations
from agilerl.models.base import load_tokenizer
from agilerl.population import Population
from agilerl.safety.custom_code import reported
from agilerl.training.events import Event, Evolved, ExamDone, IterationDone
from agilerl.training.loop import Loop, evolved
from agilerl.training.progress import Progress
from agilerl.training.trackers import Trackers, check_trackers

Finetuned = tuple[list[Any], list[float]]
"""The population, and the fitness of each of its agents, NaN for one that took no exam."""

EXAM = 128
"""Most questions (rows, episodes) of an exam, unless ``eval_loop`` says otherwise."""

Strategy = Annotated[Any, Having("a selection strategy", ("plan",), "pass a TournamentSelection, for instance")]
LoopT = TypeVar("LoopT", bound=Callable[..., Finetuned])


@dataclass
class LoopOptions:
    """What all documented loops take besides the agents and the environment."""

    max_steps: Count | None = None
    """Samples of all agents; None: one epoch of the environment's data."""
    num_epochs: Count | None = None
    """Passes over the data, in place of ``max_steps``: of all agents together with ``env``, of each with ``env_fn``."""
    evo_steps: Count | None = None
    """Iterations between selections; needed if there are a strategy and mutations."""
    evaluation_interval: Count = 10
    """Iterations between exams. A selection and the end of training have one of their own if they need it."""
    eval_loop: Count | None = None
    """Batches (episodes) of an exam; None: all of the test set, but at most 128 of its rows."""
    selection_strategy: Strategy | None = None
    """Who survives: a ``TournamentSelection``, or anything else with ``plan``."""
    tournament: Strategy | None = None
    """The same under its older name."""
    mutation: Annotated[Mutations | None, Hint("pass Mutations(...)")] = None
    """What changes in the clones; as in a run, only clones mutate."""
    save_elite: bool | None = None
    """Save the best agent before each selection, and at the end."""
    elite_path: Location | None = None
    """Where; replaced each time. None: ``saved_checkpoints/ALGORITHM``. Alone: save the best agent at the end."""
    checkpoint_steps: Count | None = None
    """Samples between checkpoints of the agent that is best so far."""
    checkpoint_path: Location | None = None
    """Where; replaced each time. None: ``elite_path``, else ``saved_checkpoints/ALGORITHM``."""
    max_reward: Number | None = None
    """Reward of a perfect answer; the metric ``accuracy`` is the share of samples that earn it."""
    max_wall_seconds: Positive | None = None
    """Stop after this many seconds, at the end of an iteration."""
    verbose: bool = True
    """Print a line at every exam and selection."""
    accelerator: Any = None
    """The ``accelerate.Accelerator`` of the agents, for several processes."""
    wb: bool = False
    """Log to Weights & Biases, under the names of docs/trackers.md."""
    wandb_api_key: str | None = None
    """The key for this run; it is not written down. None: that of ``wandb login``, or of ``WANDB_API_KEY``."""
    wandb_kwargs: Mapping[str, Any] | None = None
    """Keywords of ``wandb.init``."""
    tensorboard: bool = False
    """Log to TensorBoard."""
    tensorboard_log_dir: Location | None = None
    """Where; each run has a folder in it, by its time. None: ``tensorboard_logs``, or the run directory."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.selection_strategy is not None and self.tournament is not None:
            raise ConfigError("selection_strategy and tournament are one argument under two names; give one of them")
        self.selection_strategy = self.selection_strategy or self.tournament
        parts = {"selection_strategy": self.selection_strategy, "mutation": self.mutation, "evo_steps": self.evo_steps}
        missing = [name for name, value in parts.items() if value is None]
        # All three or none. Of evo_steps alone a warning is enough: without the others it has no effect.
        if len(missing) == 1 or missing[1:] == ["evo_steps"]:
            raise ConfigError(
                "evolution needs a selection strategy, mutations and evo_steps, the iterations between selections, "
                f"found no {' and no '.join(missing)}; pass all of them, or none"
            )
        if missing == ["selection_strategy", "mutation"]:
            warnings.warn(
                f"evo_steps={self.evo_steps} has no effect: there are no selection strategy and mutations to evolve "
                "agents with",
                stacklevel=5,
            )
        for name, needed in _NEEDS.items():
            if getattr(self, name) is not None and not getattr(self, needed):
                warnings.warn(f"{name} has no effect without {needed}=True", stacklevel=5)


_NEEDS = {"wandb_api_key": "wb", "wandb_kwargs": "wb", "tensorboard_log_dir": "tensorboard"}
"""Arguments that concern a tracker, with the argument that asks for it."""


def documented_loop(**defaults: Any) -> Callable[[LoopT], LoopT]:
    """Give a loop the arguments of :class:`LoopOptions`, which it gets as ``options``."""

    def decorate(loop: LoopT) -> LoopT:
        body, parameters = checked(loop), dict(inspect.signature(loop).parameters)
        del parameters["options"]
        options = {one.name: defaults.get(one.name, one.default) for one in fields(LoopOptions)}
        for name, value in options.items():
            parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)

        @wraps(loop)
        def with_options(*args: Any, **kwargs: Any) -> Finetuned:
            for name in kwargs:
                if name not in parameters:
                    raise ConfigError(f"{loop.__name__} has no argument {name!r}; {nearest(name, parameters)}")
            given = {name: kwargs.pop(name) for name in options if name in kwargs}
            result = body(*args, **kwargs, options=LoopOptions(**{**defaults, **given}))
            population = args[0] if args else kwargs.get("pop")
            if isinstance(population, list):  # programs read their list afterwards, and who was replaced is gone
                population[:] = result[0]
            return result

        # What help() and editors show.
        with_options.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
        return with_options  # type: ignore[return-value]

    return decorate


# -- the documented loops ---------------------------------------------------------------------------------------------


@documented_loop()
def finetune_llm_reasoning(
    pop: Sequence[LLMAlgorithm],
    env: ReasoningGym | None = None,
    env_fn: Callable[[], ReasoningGym] | None = None,
    init_hp: Mapping[str, Any] | None = None,
    *,
    options: LoopOptions,
) -> Finetuned:
    """Train agents by the rewards of their answers to single questions; return them and each agent's fitness.

    With ``env`` the agents share one stream of questions and take its batches in turns; with ``env_fn``, called once,
    each agent reads all of them.
    """
    agents, gym = _checked(pop, "reasoning"), _gym((ReasoningGym,), env, env_fn)
    # A copy: the length of this loop's exams must not change the user's environment.
    task, rows = copy.copy(gym.task), gym.data_batch_size_per_gpu
    if isinstance(task, DatasetTask) and not isinstance(task, CuratedTask):
        task.exam_prompts = min(task.exam_prompts, EXAM if options.eval_loop is None else options.eval_loop * rows)
    return _Training(agents, task, gym.tokenizer, options, gym=gym, shared=env is not None, init_hp=init_hp).run()


@documented_loop()
def finetune_llm_preference(
    pop: Sequence[LLMAlgorithm],
    env: PreferenceGym | UnpairedGym | None = None,
    env_fn: Callable[[], PreferenceGym | UnpairedGym] | None = None,
    init_hp: Mapping[str, Any] | None = None,
    *,
    options: LoopOptions,
) -> Finetuned:
    """Train DPO agents, or KTO agents with an ``UnpairedGym``, as :func:`finetune_llm_reasoning`.

    The fitness of DPO is the share of held-out pairs that they order rightly.
    """
    return _from_data((PreferenceGym, UnpairedGym), pop, env, env_fn, init_hp, options)


@documented_loop()
def finetune_llm_sft(
    pop: Sequence[LLMAlgorithm],
    env: SFTGym | None = None,
    env_fn: Callable[[], SFTGym] | None = None,
    init_hp: Mapping[str, Any] | None = None,
    *,
    options: LoopOptions,
) -> Finetuned:
    """Train SFT agents as :func:`finetune_llm_reasoning`; fitness is the mean log-prob of held-out demonstrations."""
    return _from_data((SFTGym,), pop, env, env_fn, init_hp, options)


@documented_loop(max_steps=32768, evaluation_interval=50)
def finetune_llm_multiturn(
    pop: Sequence[LLMAlgorithm],
    max_turns: Count,
    env_factory: Callable[..., Any],
    env_config: Mapping[str, Any] | None = None,
    init_hp: Mapping[str, Any] | None = None,
    *,
    options: LoopOptions,
) -> Finetuned:
    """Train agents by the returns of episodes with at most ``max_turns`` actions.

    ``env_factory(**env_config)`` returns a new environment: a ``TokenObservationWrapper``, or a plain one, whose
    ``reset`` and ``step`` speak text. An iteration plays ``init_hp["BATCH_SIZE"]`` seeds (by default the first agent's
    ``batch_size`` divided by its ``group_size``, at least one), ``group_size`` times each.
    """
    agents, config = _checked(pop, "reasoning"), dict(env_config or {})
    settings: dict[str, Any] = {}
    limits: list[int | None] = []
    tokenizers = [agents[0].runtime.tokenizer]

    def plain(**given: Any) -> Any:
        env = env_factory(**given)
        if not isinstance(env, TokenObservationWrapper):
            return env
        settings.update(env.settings)
        tokenizers.append(env.tokenizer)
        limits.append(env.max_model_len)
        return env.env

    # Messages name the factory.
    plain.__name__ = getattr(env_factory, "__name__", "env_factory")
    # Made first: the wrapper that the factory returns has settings of the task, which then plays in it.
    first = [EpisodeTask(plain, config, max_turns=max_turns, test_episodes=0).take()]
    task = EpisodeTask(
        lambda **given: first.pop() if first else plain(**given),
        config,
        max_turns=max_turns,
        exam_episodes=options.eval_loop or EXAM,
        test_episodes=0,
        seed=agents[0].config.seed,
        **settings,
    )
    for limit in filter(None, limits):
        for agent in agents:
            if limit < agent.context_length:
                agent.set_hyperparameters({"max_model_len": limit})
    known = [one for one in tokenizers if one is not None]
    tokenizer = known[0] if known else load_tokenizer(agents[0].runtime.base.source)
    return _Training(agents, task, tokenizer, options, init_hp=init_hp).run()


# -- the agents and the environment -----------------------------------------------------------------------------------


def _checked(pop: Sequence[LLMAlgorithm], kind: str) -> list[LLMAlgorithm]:
    """Return the agents, all on the first one's base; raises ConfigError unless they learn from this kind of source."""
    if not pop:
        raise ConfigError("expected a population of at least one agent as pop, found none")
    wrong = next((agent for agent in pop if agent.env_type != kind), None)
    if wrong is not None:
        loops = {"reasoning": "finetune_llm_reasoning", "sft": "finetune_llm_sft"}
        loop = loops.get(wrong.env_type, "finetune_llm_preference")
        raise ConfigError(f"{wrong.algorithm.name} does not learn from this environment; call {loop}")
    runtime = pop[0].runtime
    apart = [agent for agent in pop if agent.runtime is not runtime]
    if not apart or any(agent.runtime.base.source != runtime.base.source for agent in apart):
        return list(pop)  # different models have an error of their own
    warnings.warn(
        f"{len(apart)} of {len(pop)} agents have a separate copy of the base model: they are moved to that of "
        "the first; make them with population(), or pass runtime=pop[0].runtime, to load it once",
        stacklevel=5,
    )
    agents = list(pop)
    for number, agent in enumerate(agents):
        if agent in apart:
            agents[number] = type(agent).from_state(agent.state(), runtime, agent.loss)
            # The user's own object: a state has its genes alone.
            agents[number].hp_config = agent.hp_config
            agent.clean_up()
    return agents


def _gym(kinds: tuple[type, ...], env: Any, env_fn: Any) -> Any:
    """Return the environment that is given, or made; raises ConfigError unless it is of one of these kinds."""
    if (env is None) == (env_fn is None):
        raise ConfigError(f"expected exactly one of env and env_fn, found {'neither' if env is None else 'both'}")
    with reported("env_fn could not make an environment", EnvError):
        gym = env if env is not None else env_fn()
    if not isinstance(gym, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"expected a {names} as the environment, found {described(gym)}")
    return gym


def _from_data(
    kinds: tuple[type, ...],
    pop: Sequence[LLMAlgorithm],
    env: DataGym | None,
    env_fn: Callable[[], DataGym] | None,
    init_hp: Mapping[str, Any] | None,
    options: LoopOptions,
) -> Finetuned:
    gym: DataGym = _gym(kinds, env, env_fn)
    agents = _checked(pop, gym.kind)
    return _Training(agents, gym.task, gym.tokenizer, options, gym=gym, shared=env is not None, init_hp=init_hp).run()


# -- the loop ---------------------------------------------------------------------------------------------------------


@dataclass
class _Training(Loop):
    """A population in training, and how far it has come."""

    agents: list[LLMAlgorithm]
    task: Any
    tokenizer: Any
    options: LoopOptions
    gym: Gym[Any] | None = None
    """The environment of single questions, or of data; None for episodes."""
    shared: bool = False
    """Whether the agents take the batches of one stream in turns; else each reads all of it."""
    init_hp: Mapping[str, Any] | None = None
    progress: Progress = field(default_factory=Progress)
    checkpoints: int = 0
    """Checkpoints that were due so far."""

    def __post_init__(self) -> None:
        self.evaluation_interval = self.options.evaluation_interval
        o, runtime, first = self.options, self.agents[0].runtime, self.agents[0].config
        runtime.accelerate(o.accelerator)
        self.rows = len(self.gym) if self.gym is not None else 0
        """Rows of one epoch; 0: endless."""
        # Prompts of an iteration
        if self.gym is not None:
            batch = self.gym.data_batch_size_per_gpu
        else:
            default = max(1, first.batch_size // first.group_size)  # type: ignore[attr-defined]
            batch = taken(Count, (self.init_hp or {}).get("BATCH_SIZE", default), "init_hp", "BATCH_SIZE")
        self.batch = batch * runtime.processes.size
        # Samples of the whole training
        if o.num_epochs is None and o.max_steps is not None:
            self.budget = o.max_steps
        elif self.rows:
            self.budget = (o.num_epochs or 1) * self.rows * (1 if self.shared else len(self.agents))
        else:
            raise ConfigError("this environment has no end, so there are no epochs; pass max_steps=")
        self.population = Population(self.agents, self.task, tokenizer=self.tokenizer, prompts_per_step=self.batch)

    def run(self) -> Finetuned:
        """Train to the end of the budget."""
        wanted, consumers = trackers(self.options), list[Callable[[Event], None]]()
        check_trackers(wanted)
        with ExitStack() as opened:
            opened.callback(self.population.task.close)
            if self.agents[0].runtime.processes.rank == 0:
                consumers += [announce] if self.options.verbose else []
                if wanted:
                    tracked = Trackers(wanted, None, self.init_hp or {})
                    opened.callback(tracked.finish)
                    consumers.append(tracked)
            for event in self._events():
                for consumer in consumers:
                    consumer(event)
        fitness = self.progress.exam or {}
        return self.population.agents, [fitness[agent.index].mean for agent in self.population.agents]

    def _events(self) -> Iterator[Event]:
        o = self.options
        self.progress.started = perf_counter()
        yield from self.generations()
        if self.progress.exam is None:  # time ran out before the first iteration, or in the last selection
            yield self.examine()
        if o.save_elite or (o.save_elite is None and o.elite_path is not None):
            self._save(o.elite_path)
        if o.checkpoint_path is not None or (o.checkpoint_steps is not None and o.elite_path is None):
            self._save(o.checkpoint_path)

    @property
    def generation_steps(self) -> float:
        """Iterations of a generation; without evolution, the whole training is one."""
        return math.inf if self.options.mutation is None else self.options.evo_steps or 1

    def spent(self) -> float:
        """Return the share of the budget of samples; 1 if time is up, by the first process's clock."""
        limit, processes = self.options.max_wall_seconds, self.agents[0].runtime.processes
        is_late = limit is not None and processes.first(lambda: self.progress.seconds >= limit)
        return 1.0 if is_late else self.progress.samples / self.budget

    def iterate(self) -> Event:
        population, progress, start = self.population, self.progress, perf_counter()
        for number, agent in enumerate(population.agents):
            if self.shared:
                # In turns: the next batch of the one stream that all agents share.
                agent.position = (progress.iteration * len(population) + number) * self.batch
            # A pass over the data makes the present policy the reference, as documented.
            if self.rows and getattr(agent.config, "use_separate_reference_adapter", False):
                read = progress.samples if self.shared else agent.position
                agent.set_reference_policy(read // self.rows)
        rollout = population.draw() if population.learns_from_data else population.rollout()
        metrics = population.learn(rollout)
        progress.iteration += 1
        # The last exam was that of other weights.
        progress.exam = None
        for agent in population.agents:
            ends, values = _episode_ends(rollout.trajectories[agent.index]), metrics[agent.index]
            progress.samples += (
                self.batch if self.gym is not None else sum(t.outcome.turns if t.outcome else 1 for t in ends)
            )
            agent.scores.append(values.get("reward", float("nan")))
            if self.options.max_reward is not None:
                perfect = sum(t.episode_return >= self.options.max_reward for t in ends)
                values["accuracy"] = perfect / max(len(ends), 1)
            values["step_time"] = perf_counter() - start
            agent.metrics = dict(values)
        spent = min(progress.samples / self.budget, 1.0)
        outcomes = {agent.index: agent.outcome for agent in population.agents}
        return IterationDone(progress.generation, progress.iteration, spent, metrics, outcomes)

    def examine(self) -> Event:
        population, start = self.population, perf_counter()
        if population.learns_from_data:
            assert self.gym is not None
            batches = self.options.eval_loop
            if batches is None:
                # Inside, the length is that of the test set.
                with self.gym.eval_mode():
                    batches = -(-min(len(self.gym), EXAM) // self.batch)
            scores = {agent.index: agent.test(self.gym, batches).tolist() for agent in population.agents}
            exam = {index: Fitness.from_scores(values) for index, values in scores.items()}
        else:
            exam = population.evaluate("exam")
        self.progress.exam = exam
        tokens = {agent.index: dict(agent.tokens) for agent in population.agents}
        seconds = perf_counter() - start
        return ExamDone(self.progress.generation, exam, self.progress.iteration, tokens, seconds)

    def evolve(self) -> Event:
        o, population, progress = self.options, self.population, self.progress
        assert progress.exam is not None
        assert o.selection_strategy is not None
        assert o.mutation is not None
        if o.save_elite:
            self._save(o.elite_path)  # before anything mutates
        seed = population.agents[0].config.seed if o.mutation.rand_seed is None else o.mutation.rand_seed
        now = {"generation": progress.generation, "iteration": progress.iteration}
        event = evolved(population, progress.exam, o.selection_strategy, o.mutation, **now, seed=seed)
        progress.exam = None
        return event

    def save_iteration(self, *, ends: bool) -> None:
        o, samples = self.options, self.progress.samples
        if o.checkpoint_steps is not None and samples // o.checkpoint_steps > self.checkpoints:
            self.checkpoints = samples // o.checkpoint_steps
            self._save(o.checkpoint_path or o.elite_path)

    def _save(self, path: Location | None) -> None:
        """Save the agent that is best by the latest exam of each; before any exam, the first one."""
        population, exam = self.population, self.progress.exam or {}
        latest = {
            agent.index: exam.get(agent.index) or Fitness.from_scores(agent.fitness[-1:] or [float("nan")])
            for agent in population.agents
        }
        sick = {agent.index: agent.sick for agent in population.agents if agent.sick}
        best = population.agent(ranking(quarantined(latest, sick))[0])
        save_llm_checkpoint(best, path or Path("saved_checkpoints") / best.algorithm.name, overwrite=True)


def _episode_ends(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Return one row of each episode: one may have several, each with the whole return."""
    return list({(t.group, t.episode, number if t.episode is None else 0): t for number, t in enumerate(rows)}.values())


# -- consumers of events ----------------------------------------------------------------------------------------------


def trackers(options: LoopOptions) -> dict[str, Any]:
    """Return the trackers that the options ask for, with the keywords of their libraries' start."""
    wanted: dict[str, Any] = {}
    if options.wb:
        wanted["wandb"] = dict(options.wandb_kwargs or {})
        if options.wandb_api_key is not None:
            # Not by wandb.login, which would write it to the user's .netrc.
            wanted["wandb"]["settings"] = {"api_key": options.wandb_api_key, **wanted["wandb"].get("settings", {})}
    if options.tensorboard:
        folder = options.tensorboard_log_dir
        wanted["tensorboard"] = {} if folder is None else {"logging_dir": str(folder)}
    return wanted


def announce(event: Event) -> None:
    """Print a line about an exam or a selection."""
    if isinstance(event, ExamDone):
        results = ", ".join(f"{index}: {_number(f.mean)} ± {_number(f.stderr)}" for index, f in event.fitness.items())
        print(f"iteration {event.iteration}: exam {results}", flush=True)
    elif isinstance(event, Evolved):
        births = ", ".join(f"{birth.parent} -> {birth.child}" for birth in event.plan.births) or "none"
        print(f"iteration {event.iteration}: elite {event.plan.elite}; born {births}", flush=True)


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
