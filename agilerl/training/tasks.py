"""The task of a run with its panels and graders, from the sections of a manifest."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from agilerl.checks.arguments import nearest, shown
from agilerl.config.environment import DatasetConfig, EnvironmentConfig, GraderConfig
from agilerl.config.run import RunConfig
from agilerl.envs import ENVIRONMENTS
from agilerl.envs.adapters import make_env
from agilerl.envs.adapters.verifiers import make_taskset
from agilerl.envs.answer_format import AnswerFormatTask
from agilerl.envs.core import Message, Row, Task
from agilerl.envs.curation import Purpose
from agilerl.envs.datasets import PLAIN, CuratedTask, DatasetTask, Template, check_template, fill_template
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.examples import Mistake, PreferenceTask, SFTTask, UnpairedTask
from agilerl.envs.graded import GradedTask, TaskGrader, check_parts
from agilerl.envs.procedural import Curriculum, ReasoningGymTask
from agilerl.envs.programs import AgentTask
from agilerl.envs.sources import Rows, mix, read_dataset
from agilerl.envs.upstream import known_tasks
from agilerl.errors import ConfigError, EnvError
from agilerl.gone import instead
from agilerl.models.tiny import MISTAKES
from agilerl.rewards.combine import CombinedGrader
from agilerl.rewards.grader import Grader, exact_match
from agilerl.rewards.isolated import IsolatedGrader
from agilerl.rewards.library import LIBRARY, library_grader
from agilerl.rewards.waiting import ThreadedGrader
from agilerl.safety.addresses import OPENAI, check_key
from agilerl.safety.custom_code import code_name, load_code, names_code, not_allowed, reported


class _TemplateTask(ReasoningGymTask):
    """A reasoning_gym dataset whose questions are put into a conversation."""

    template: Template = PLAIN

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the template with the question filled in."""
        return fill_template(self.template, row)


def task(config: RunConfig, *, allow_code: bool = False, all_rows: bool = False) -> Task | EpisodeTask:
    """Build the task and draw its panels; raises ConfigError for an unknown one.

    ``allow_code`` lets graders and environments be Python code named by the manifest. With ``all_rows``, every row of
    ``environment.dataset`` is in the test, in order: for an evaluation, which trains on none.
    """
    e, seed = config.environment, config.training.seed
    mistake: Mistake | None = None
    built: Task
    if e.env_type == "multiturn":
        build_task = _episodes if e.taskset is None else _of_verifiers
        return build_task(e, seed, allow_code, e.test_prompts + config.second_panel)
    if e.dataset is not None:
        built = _from_data(e, e.dataset, e.env_type, seed, None if all_rows else e.test_prompts + config.second_panel)
    else:
        family, _, name = (e.task or "").partition(":")
        if family != "reasoning_gym" or not name:
            hint = f"; did you mean reasoning_gym:{e.task}?" if e.task in known_tasks() else ""
            raise ConfigError(f"environment.task={shown(e.task)} is unknown; expected reasoning_gym:<dataset>{hint}")
        built, mistake = _procedural(e, seed, name, config.second_panel), _careless
    # What the algorithm learns from
    if e.env_type == "sft":
        return SFTTask(built, loss_on=e.loss_on)
    if e.env_type in ("preference", "unpaired"):
        return (PreferenceTask if e.env_type == "preference" else UnpairedTask)(built, mistake=mistake, seed=seed)
    built = graded(e, built, allow_code=allow_code, typed_addresses=config.typed_addresses)
    if e.answer_format != "whole":
        built = AnswerFormatTask(built, e.answer_format, e.answer_phrase)
        built.check_answers()
    if e.agent is None:
        return built
    if not allow_code:
        raise not_allowed("environment.agent", str(e.agent))
    program = load_code("environment.agent", e.agent, allowed=True) if isinstance(e.agent, str) else e.agent
    return AgentTask(built, program, e.agent_limits)


def _procedural(e: EnvironmentConfig, seed: int, name: str, second: int) -> _TemplateTask:
    """Return a task with its panels drawn; the ``second`` one takes at most what the other two leave."""
    task = _TemplateTask(
        name,
        params=e.params,
        seed=seed,
        exam_prompts=e.exam_panel,
        # The questions of the second panel follow those of the test.
        test_prompts=e.test_prompts + second,
        reward=e.reward,
        holdout=e.holdout,
        curriculum=None if e.curriculum is None else Curriculum(**e.curriculum.model_dump()),
        shrink_panels=True,
    )
    task.template = check_template(e.conversation_template, ())
    try:
        with warnings.catch_warnings():
            if second:  # too few for it need no warning if there are enough for the panels that the user asked for
                warnings.simplefilter("ignore")
            task.prepare()
    except EnvError:
        if not second:
            raise
        return _procedural(e, seed, name, 0)
    missing = e.exam_panel + e.test_prompts + second - task.exam_prompts - task.test_prompts
    if not second or not missing:
        return task
    task.close()
    # As many fewer again: the last questions of a task are found by luck.
    rest = (second - missing) // 2 if second - missing >= LEAST_PANEL else 0
    return _procedural(e, seed, name, rest)


LEAST_PANEL = 32
"""Questions below which a panel would choose by chance: an exam has as many, a second panel is left out."""


def _from_data(
    config: EnvironmentConfig, dataset: Sequence[DatasetConfig], purpose: Purpose, seed: int, test_prompts: int | None
) -> DatasetTask:
    """Return a task of rows; without ``test_prompts``, every row is in the test."""
    # Rows need an answer only if it is compared.
    compares = config.graders is None or OWN in (config.fitness_grader, *(entry.name for entry in config.graders))
    grader = exact_match if compares else _ungraded
    if test_prompts is None:
        # An evaluation only asks the test, but a task needs rows for the other two splits as well.
        sides, template = [_rows(config, dataset)] * 3, config.conversation_template
        return DatasetTask(*sides, reward_fn=grader, conversation_template=template, purpose=purpose, seed=seed)
    exam, test = (rows and _rows(config, rows) for rows in (config.dataset_exam, config.dataset_test))
    return CuratedTask(
        _rows(config, dataset),
        exam=exam,
        test=test,
        exam_prompts=config.exam_panel,
        test_prompts=test_prompts,
        grader=grader,
        conversation_template=config.conversation_template,
        purpose=purpose,
        bad_rows=config.bad_rows,
        shrink_panels=True,
        seed=seed,
    )


def _ungraded(completion: str) -> None:
    """Give no grade."""


def _rows(config: EnvironmentConfig, dataset: Sequence[DatasetConfig]) -> Rows:
    def read(d: DatasetConfig) -> Rows:
        return read_dataset(d.path, columns=d.columns or config.columns, split=d.split, config=d.name, limit=d.rows)

    return mix([(read(d), d.weight) for d in dataset])


def _episodes(config: EnvironmentConfig, seed: int, allow_code: bool, test_episodes: int) -> EpisodeTask:
    env_id, params = config.env_id or "", dict(config.params)
    if names_code(env_id):
        factory = load_code("environment.env_id", env_id, allowed=allow_code)
    else:
        factory = partial(make_env, env_id)
        if ":" not in env_id:
            _check_id(env_id)
        elif config.max_turns is not None:  # environments of other packages may not declare it
            params.setdefault("max_turns", config.max_turns)
    return EpisodeTask(
        factory,
        params,
        name=code_name(env_id).removeprefix("agilerl/"),
        max_turns=config.max_turns,
        exam_episodes=config.exam_panel,
        test_episodes=test_episodes,
        seed=seed,
        apply_chat_template=config.apply_chat_template,
        strict_chat_template_boundary=config.strict_chat_template_boundary,
        enable_sliding_window=config.enable_sliding_window,
        step_timeout=config.step_timeout,
    )


def _of_verifiers(config: EnvironmentConfig, seed: int, allow_code: bool, test_prompts: int) -> AgentTask:
    name, env_id, params = config.taskset or "", config.env_id or "", dict(config.params)
    if not allow_code:
        raise not_allowed("environment.env_id", env_id)
    if config.max_turns is not None:
        params["agent"] = {**dict(params.get("agent") or {}), "max_turns": config.max_turns}
    return make_taskset(name, params, limits=config.agent_limits, exam=config.exam_panel, test=test_prompts, seed=seed)


def _check_id(env_id: str) -> None:
    """Raise ConfigError for an unregistered id, or for one of gymnasium's, none of which is a text environment."""
    spec = gymnasium.registry.get(env_id)
    if spec is None or str(spec.entry_point).startswith(("gymnasium.", "shimmy.")):
        what = "unknown" if spec is None else "not a text environment"
        hint = f"environment.env_id={shown(env_id)} is {what}; {nearest(env_id, ENVIRONMENTS)}"
        raise ConfigError(instead(f"environments={env_id}") or hint)


def _careless(row: Row, draws: np.random.Generator) -> str | None:
    """Return a mistake like those of the embedded base's demonstrator, for the datasets it knows."""
    mistake = MISTAKES.get(row["metadata"]["source_dataset"])
    return None if mistake is None else mistake(row, draws)


# -- the graders: the keys ``graders`` and ``fitness_grader`` of a manifest -------------------------------------------


OWN = "task"
"""The name of the task's built-in reward in manifests."""


def graded(
    config: EnvironmentConfig, task: Task, *, allow_code: bool = False, typed_addresses: Iterable[str] = ()
) -> Task:
    """Return ``task`` with the manifest's graders, set up, or unchanged if there are none.

    ``allow_code`` allows graders that are functions and classes named by the manifest; ``typed_addresses`` are those
    that a judge's key may be sent to because the user gave them on the command line. Raises ConfigError for a grader
    that is unknown, takes other parameters, or is not for manifests; for duplicate graders, and for a fitness grader
    that is none of them.
    """
    if config.graders is None:
        return task
    named: dict[str, tuple[Grader, float]] = {}
    for number, entry in enumerate(config.graders):
        where, name = f"environment.graders.{number}", entry.called
        if name in named:
            raise ConfigError(f"{where}: two graders are called {name!r}; give one of them a different label")
        if entry.name in ("judge", "pairwise_judge"):
            _check_judge(where, entry, typed_addresses)
        named[name] = (_grader(where, entry, task, allow_code), entry.weight)
    # Weights that evolve may start at 0; they need a fitness grader.
    if not any(weight for _, weight in named.values()) and config.fitness_grader is None:
        raise ConfigError("environment.graders: every weight is 0, so there is nothing to learn; raise one of them")
    fitness: dict[str, Grader] = {OWN: TaskGrader(task), **{name: grader for name, (grader, _) in named.items()}}
    if config.fitness_grader not in (None, *fitness):
        wrong = str(config.fitness_grader)
        raise ConfigError(f"environment.fitness_grader={shown(wrong)} is unknown; {nearest(wrong, fitness)}")
    task = GradedTask(task, CombinedGrader(named), fitness.get(config.fitness_grader or ""))
    task.prepare()
    return task


def own_weights(config: EnvironmentConfig, given: Mapping[str, Any], genes: Iterable[str]) -> dict[str, Any]:
    """Return ``algorithm.reward_weights``: the given ones, and for genes without a start their grader's weight."""
    weights = {entry.called: entry.weight for entry in config.graders or ()}
    evolving = [name.partition(".")[2] for name in genes if name.startswith("reward_weights.")]
    keys = {f"algorithm.reward_weights.{name}": name for name in given}
    keys |= {f"mutation.rl_hp_selection.reward_weights.{name}": name for name in evolving}
    check_parts(keys, weights, "the reward has no parts; list them in environment.graders")
    if evolving and config.fitness_grader is None:
        raise ConfigError(
            f"mutation.rl_hp_selection.reward_weights.{evolving[0]}: a weight that evolves needs "
            "environment.fitness_grader, which does not change: without one, agents win by giving "
            f"weight to what is easy; use one of {', '.join(dict.fromkeys([OWN, *weights]))}"
        )
    return {**{name: weights[name] for name in evolving}, **given}


def _grader(where: str, entry: GraderConfig, task: Task, allow_code: bool) -> Grader:
    if entry.name == OWN:
        if entry.params:
            raise ConfigError(f"{where}: the task's built-in reward has no parameters, found {shown(entry.params)}")
        return TaskGrader(task)
    if names_code(entry.name):
        code = load_code(f"{where}.name", entry.name, allowed=allow_code)
        if entry.isolate and (isinstance(code, type) or entry.params):
            raise ConfigError(
                f"{where}.isolate is for functions without params, found {shown(entry.name)}; write a function that "
                "contains them"
            )
        if entry.isolate:
            return IsolatedGrader(entry.name, timeout=entry.timeout, workers=entry.workers or 1, name=entry.called)
        grader = _configured(where, entry, code)
        return grader if entry.workers is None else ThreadedGrader(grader, workers=entry.workers, name=entry.called)
    if entry.isolate:
        raise ConfigError(f"{where}.isolate is for custom functions, found {shown(entry.name)}; remove it")
    if entry.name not in LIBRARY:
        hint = f"{where}.name={shown(entry.name)} is unknown; {nearest(entry.name, [OWN, *LIBRARY])}"
        raise ConfigError(instead(f"graders={entry.name}") or hint)
    try:
        return library_grader(entry.name, entry.params)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _configured(where: str, entry: GraderConfig, code: Any) -> Grader:
    """Return a custom grader: an instance of a class, or a function with its parameters filled in."""
    if not isinstance(code, type):
        return partial(code, **entry.params) if entry.params else code
    with reported(f"{where}: {entry.called} cannot be made"):
        return code(**entry.params)  # type: ignore[no-any-return]


def _check_judge(where: str, entry: GraderConfig, typed: Iterable[str]) -> None:
    """Raise ConfigError if an untrusted manifest could leak a secret or write outside the working directory."""
    params = entry.params
    variable, address = params.get("api_key_env", "OPENAI_API_KEY"), params.get("base_url", OPENAI)
    # Even without an address, a manifest could choose a key that must not be sent to OpenAI.
    if isinstance(variable, str) and ("base_url" in params or os.environ.get(variable)):
        check_key(f"{where}.params.base_url", variable, str(address), typed, without="set api_key_env to null")
    cache = params.get("cache")
    if cache is None:
        return
    if not isinstance(cache, str) or not Path(cache).resolve().is_relative_to(Path.cwd().resolve()):
        raise ConfigError(f"{where}: expected a cache below the working directory, found {shown(cache)}")
    if not cache.endswith(".jsonl"):  # replies are appended to an existing file
        raise ConfigError(f"{where}: expected a cache named *.jsonl, found {shown(cache)}")
