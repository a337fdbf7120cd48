"""From a checked configuration to the objects of a run: resolved, loaded, assembled."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

import torch

from agilerl.algorithms import LLMAlgorithm
from agilerl.algorithms.codec import warn_of_another_base
from agilerl.checks.arguments import checked, shown
from agilerl.checks.validation import set_values
from agilerl.config.named_files import digests, given_digests, named_files
from agilerl.config.run import RunConfig
from agilerl.envs.core import TRIED_ROWS, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError, EnvError
from agilerl.hpo.knockout import KnockoutSelection, Pace
from agilerl.hpo.selection import SelectionStrategy
from agilerl.models.adapters import lora_scaling, read_adapter
from agilerl.models.base import check_device
from agilerl.population import Population
from agilerl.processes import ALONE, Processes
from agilerl.rollouts.activated import invocations
from agilerl.runtime import Runtime
from agilerl.safety.custom_code import names_code
from agilerl.text.templates import at_date
from agilerl.training.base import load_runtime
from agilerl.training.checkpoint import SavedCheckpoint, received
from agilerl.training.custom_selection import custom_selection
from agilerl.training.generation import Scale
from agilerl.training.memory import check_memory, estimate
from agilerl.training.probe import Probe
from agilerl.training.resolved import USUAL, Resolved, resolve, usual_rate
from agilerl.training.sampling import check_sampling, start_sampling
from agilerl.training.tasks import task
from agilerl.training.trackers import Tracker, check_trackers, load_trackers


@dataclass
class Session:
    """Everything a run trains with."""

    resolved: Resolved
    task: Task | EpisodeTask
    population: Population
    selection: SelectionStrategy
    saved: SavedCheckpoint | None = None
    """What the run is resumed from; None for a new run."""
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    """sha256 of the files that the configuration names: ``data``, and the allowed ``code``."""
    date: datetime = field(default_factory=datetime.now)
    """The date that chat templates use, local time."""
    trackers: Mapping[str, Callable[..., Tracker]] = field(default_factory=dict)
    """Classes of the user's own trackers, by their names in the configuration."""
    preflight: Probe | None = None
    """What its agents answered before the run; None before that, and if the run has no preflight."""
    begun: bool = False
    """Whether a run has begun with it: its agents have learned, so no other run can."""

    def check_new(self) -> None:
        """Raise ConfigError if a run has begun with this session."""
        if self.begun:
            raise ConfigError(
                "a run has begun with this session, and its agents have learned: build another one, from the "
                "configuration for a new run, or from what open_run() returns to resume one"
            )

    @property
    def config(self) -> RunConfig:
        """The configuration as given."""
        return self.resolved.config

    @property
    def processes(self) -> Processes:
        """The processes of the run, seen from this one."""
        return self.population.runtime.processes

    @property
    def samples_per_iteration(self) -> int:
        """Completions that all agents sample in one iteration."""
        return self.population.prompts_per_step * sum(self.population.group_sizes)

    @property
    def planned_iterations(self) -> int:
        """Iterations that ``max_steps`` allows at the current batch sizes."""
        # Rounded up: an iteration that begins within the budget is carried out as a whole.
        return max(1, -(-self.config.training.max_steps // self.samples_per_iteration))

    @property
    def evo_steps(self) -> int:
        """Iterations between selections."""
        steps = self.config.training.evo_steps
        assert steps is not None, "set while the run is assembled"
        return steps

    @property
    def scale(self) -> Scale:
        """The size of an agent's iterations and exams."""
        group: int = self.resolved.hyperparameters.group_size  # type: ignore[attr-defined]
        return Scale.of(self.config.training, self.population, group)

    @property
    def generation_steps(self) -> int:
        """Iterations of the present generation: ``evo_steps``, or fewer while a knockout has founders."""
        indices = [agent.index for agent in self.population.agents]
        # An index beyond the founders' is a challenger's, and the knockout is over.
        founders = max(indices) < self.config.training.pop_size
        return self._first_steps(self.pace, len(indices)) if founders else self.evo_steps

    def _first_steps(self, pace: Pace, agents: int) -> int:
        """Return the iterations of a generation of so many founders."""
        knockout = isinstance(self.selection, KnockoutSelection) and agents > self.selection.floor
        return pace.founders_steps(agents) if knockout else pace.steps

    @cached_property
    def pace(self) -> Pace:
        """What the budget holds, as far as that is known before training."""
        return self._pace_of(self.scale, self.evo_steps)

    def _pace_of(self, scale: Scale, steps: int) -> Pace:
        """Return what a budget holds, in generations of so many iterations."""
        t = scale.training
        if t.max_seconds is not None:
            return Pace(steps, 0, 0)
        iterations, exam = scale.lone_agent()
        given = self.config.given.training.evo_steps is not None
        # max_steps counts what is sampled for training, so exams take nothing of it.
        return Pace(steps, 1 / iterations, 0 if t.max_tokens is None else exam / iterations, given)

    def steps_of_selection(self) -> int | None:
        """Return the least ``max_steps``, in whole iterations, with which the agents are selected; None if too many."""
        scale, agents = self.scale, len(self.population.agents)
        samples, has_exam = agents * scale.prompts * scale.group, self.config.environment.eval_prompts is not None
        open_steps = {"evo_steps": self.config.given.training.evo_steps}  # a run has it decided
        for iterations in range(2, 1000):
            training = scale.training.model_copy(update={"max_steps": iterations * samples, **open_steps})
            longer = replace(scale, training=training)
            pace = self._pace_of(longer, longer.generation(given=has_exam)[0])
            # What a last selection decides would never train.
            if self._first_steps(pace, agents) < iterations:
                return iterations * samples
        return None

    @property
    def founders(self) -> int:
        """Agents that a new run starts with: those asked for; if nothing was, those that the budget pays.

        A small budget has one, and the usual rate beside a configured one that is far from it.
        """
        strategy, most = self.selection, self.config.training.pop_size
        if self.config.given.training.is_set("pop_size") or not isinstance(strategy, KnockoutSelection):
            return most
        return self.pace.founders(2 if strategy.seeded else 1, most) if strategy.floor == 1 else most

    @property
    def notes(self) -> list[str]:
        """Sentences about what a search does by default, and the budget is too small for."""
        strategy, t = self.selection, self.config.training
        if t.max_seconds is not None or not isinstance(strategy, KnockoutSelection) or strategy.floor > 1:
            return []  # how much a second does is not known before
        later = strategy.pulses
        if not later.factors or not later.until:
            return []
        first = self.pace.first_pulse(self.founders, strategy.period, later.every)
        if first < later.until:
            return []
        only = f"copies start only in the first {later.until:.0%}"
        due = f" (the first copy would start at {first:.0%} of the budget, and {only})" * (first < 1)
        fewer = " or training.pop_size" * (self.founders > 1)
        return [
            f"the budget is too small to try copies of the best agent with a higher learning rate{due}. Raise the "
            f"budget, or lower training.evo_steps{fewer}"
        ]

    @property
    def usual_rate(self) -> float | None:
        """The learning rate that is usual for the base; None if the algorithm does not learn from rewards."""
        return usual_rate(self.population.runtime.base) if self.resolved.algorithm.env_type == "reasoning" else None


@checked
def build(
    config: RunConfig,
    checkpoint: Path | None = None,
    *,
    allow_code: bool = False,
    processes: Processes = ALONE,
    all_rows: bool = False,
    runtime: Runtime | None = None,
) -> Session:
    """Load the base, make the task and the population, new or from a ``checkpoint`` folder; nothing is written.

    ``allow_code`` runs Python that the configuration names, such as ``rewards.py:my_reward``: never allow it for a file
    that you have not read. Of several ``processes`` only the first one needs the ``checkpoint``. Chat templates that
    ask for the date get ``config.date``. ``all_rows`` puts every row of a dataset into the test, for an evaluation.
    ``runtime`` is the base if it is loaded already.

    Raises ConfigError or EnvError for problems that can be found before training, and CheckpointError for a checkpoint
    that does not fit.
    """
    # Before the base, which can take minutes to load, while this fails at once.
    settings = check(config, processes)
    config = settings.config
    trackers = load_trackers(config.training.trackers, allow_code=allow_code)
    custom = custom_selection(config.selection_strategy, allow_code=allow_code)
    # Without microseconds: run.json stores seconds, and a resumed run must see the same date.
    date = (config.date or datetime.now()).replace(microsecond=0)
    device = device_of(config.training.device, processes)
    with at_date(date):
        source = task(config, allow_code=allow_code, all_rows=all_rows)
        try:
            runtime = load_runtime(settings, device) if runtime is None else runtime
            runtime.share(processes, config.distributed.base_sharding())
            rows = source.train_size if isinstance(source, Task) else None
            resolved = settings.settled(usual_rate(runtime.base), rows)
            saved = received(processes, checkpoint, runtime)
            population = _population(resolved, source, runtime, saved)
            try_prompts(population)
            group: int = resolved.hyperparameters.group_size  # type: ignore[attr-defined]
            has_exam = config.environment.eval_prompts is not None
            steps, population.examiner.exam_prompts = Scale.of(config.training, population, group).generation(
                given=has_exam
            )
            check_memory(estimate(config, population), device)
            start_sampling(population, config.training.pop_size, config.largest_rank)
        # Graders and environments may have started processes.
        except BaseException:
            source.close()
            raise
    files = digests(named_files(config))
    files["code"] |= given_digests(config.environment, config.selection_strategy.strategy, config.training)
    selection = custom or resolved.selection
    assert selection is not None, "it has a name, or is custom code"
    session = Session(
        resolved.decided(evo_steps=steps), source, population, selection, saved, files, date, trackers=trackers
    )
    # How many the budget pays depends on lengths of prompts that only a population can measure.
    if saved is None and session.founders < config.training.pop_size:
        population.keep_first(session.founders)
    return session


def _population(
    resolved: Resolved, source: Task | EpisodeTask, runtime: Runtime, saved: SavedCheckpoint | None
) -> Population:
    """Assemble the population, new or from a checkpoint."""
    config = resolved.config
    t, most = config.training, max(config.network.lora_config.r, config.mutation.rank_range[1])
    agents = first_generation(resolved, runtime) if saved is None else saved.agents(runtime, most)
    population = Population(
        agents,
        source,
        prompts_per_step=config.environment.data_batch_size_per_gpu,
        eval_max_new_tokens=t.eval_max_new_tokens or getattr(resolved.hyperparameters, "max_output_tokens", None),
        eval_temperature=t.eval_temperature,
        eval_samples=t.eval_samples,
        max_error_rate=t.max_error_rate,
        test_prompts=config.environment.test_prompts,
        teacher=config.teacher,
    )
    if saved is not None:
        # Not counted from the living agents: indices of the dead are never used again.
        population.next_index = saved.next_index
        # What memory was found to hold, so that it does not run out again.
        runtime.limits.train_tokens, runtime.limits.decode_rows = saved.memory.train_tokens, saved.memory.decode_rows
    return population


def device_of(device: str, processes: Processes) -> str:
    """Return the device of this process: of ``cuda`` its own, as alone it is the first GPU for every process."""
    number = os.environ.get("LOCAL_RANK")
    return f"cuda:{number}" if device == "cuda" and processes.size > 1 and number is not None else device


def check(config: RunConfig, processes: Processes = ALONE) -> Resolved:
    """Return what a configuration resolves to; raises ConfigError for all that needs no model, this machine too."""
    resolved, trackers = resolve(config), config.training.trackers
    check_trackers(trackers, own=filter(names_code, trackers))
    check_sampling(config, resolved.options, processes.size)
    check_device(config.training.device, "training.device")
    return resolved


def load_agent(config: RunConfig) -> LLMAlgorithm:
    """Load the base, and one agent with the adapter ``network.adapter``, without a task; raises as :func:`build`."""
    resolved = resolve(config)
    return first_generation(resolved, load_runtime(resolved))[0]


def first_generation(resolved: Resolved, runtime: Runtime) -> list[LLMAlgorithm]:
    """Return the founders: ``algorithm.population(pop_size, ...)``, from an adapter if there is one."""
    t, network, algorithm = resolved.config.training, resolved.config.network, resolved.algorithm
    # Only what was set, because a default that is passed on would count as set; and in the form of run.json, so that a
    # run restarted from it writes the same files.
    settings = set_values(resolved.hyperparameters, "json")
    first = algorithm(hp_config=dict(resolved.genes) or None, runtime=runtime, **settings)
    ranges = {name: gene for name, gene in resolved.founder_genes().items() if name in first.genes}
    agents = first.founders(t.pop_size, ranges, t.init)
    usual = resolved.usual_instead(usual_rate(runtime.base))
    for agent in agents:
        if usual and agent.index == USUAL:
            agent.set_hyperparameters(usual)
    if network.adapter is not None:
        _start_from(Path(network.adapter).expanduser(), agents)
    if len(resolved.algorithms) > 1 and t.init == "spread":
        # In turn, so that every algorithm has founders.
        for number, agent in enumerate(agents):
            agent.set_hyperparameters({"algorithm": resolved.algorithms[number % len(resolved.algorithms)].__name__})
    return agents


def _start_from(folder: Path, agents: Sequence[LLMAlgorithm]) -> None:
    """Start every agent, and its reference policy, from a PEFT adapter; raises ConfigError if its shape differs."""
    runtime, wanted = agents[0].runtime, agents[0].lora_config
    store = runtime.store
    factors, given = read_adapter(folder, store.layers)
    warn_of_another_base(folder, runtime.base, runtime.loaded)
    if given.alora_invocation_tokens != wanted.alora_invocation_tokens:
        raise ConfigError(
            f"network.adapter={shown(str(folder))} has alora_invocation_tokens={given.alora_invocation_tokens}, this "
            f"run {wanted.alora_invocation_tokens}; set network.lora_config.alora_invocation_tokens to the same"
        )
    if (given.r, lora_scaling(given)) != (wanted.r, lora_scaling(wanted)):
        raise ConfigError(
            f"network.adapter={shown(str(folder))} has rank {given.r} and scale {lora_scaling(given):g}, "
            f"network.lora_config rank {wanted.r} and scale {lora_scaling(wanted):g}; set lora_config r={given.r}, "
            f"lora_alpha={given.lora_alpha}, use_rslora={str(given.use_rslora).lower()}"
        )
    # Room for all reference policies at once: each growth of the bank copies it.
    store.reserve(store.used + len(agents))
    for agent in agents:
        store.load_adapter(agent.slot, factors)
        agent.set_reference(factors)


def try_prompts(population: Population) -> None:
    """Render the panels and the first training prompts, so that one that is too long stops the run early."""
    for split in ("exam", "test"):
        population.examiner.lengths(split)
    if population.learns_from_data:
        for position in range(TRIED_ROWS):
            population.examples(position)
    else:
        population.examiner.places("train")
    if (tokens := population.runtime.invocation) and isinstance(population.task, Task):
        text = population.runtime.tokenizer.decode
        for ids in (asked.prompt_ids for split in ("exam", "test") for asked in population.examiner.places(split)):
            try:
                invocations(torch.tensor([ids]), torch.tensor([len(ids)]), tokens)
            except EnvError as error:
                raise ConfigError(
                    f"network.lora_config.alora_invocation_tokens: expected {text(list(tokens))!r} in every prompt "
                    f"(the tokens {list(tokens)}), found one that ends with {text(ids[-12:])!r}; name a text or tokens "
                    "with which the chat template begins an answer"
                ) from error
