"""Distillation: agents are drawn to a teacher, an adapter on the same base or a model behind an endpoint.

It changes the advantages of an agent's own tokens (:class:`Experience`), and nothing else: objective, optimizer and
schedule are as without it.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agilerl.algorithms.codec import warn_of_another_base
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.algorithms.learner import Experience, Learner, behaviour_logprobs, temperature_of
from agilerl.checks.arguments import shown
from agilerl.checks.validation import validated
from agilerl.config.search import TeacherConfig
from agilerl.errors import ConfigError
from agilerl.functional import distillation_advantages, masked_mean, nonzero_advantage_rows
from agilerl.models.adapters import lora_scaling, read_adapter
from agilerl.rollouts.teacher import TeacherEndpoint
from agilerl.runtime import Runtime


@dataclass(frozen=True)
class Teacher:
    """What all agents of a population are drawn to, and how strongly."""

    source: int | TeacherEndpoint
    """Slot of an adapter, or an endpoint."""
    weight: float

    def applied(self, agent: Learner, experience: Experience) -> Experience:
        """Return an agent's experience with what the teacher adds."""
        return with_teacher(agent, experience, self.source, self.weight) if len(experience) else experience


def teacher_of(
    agents: Sequence[Learner], tokenizer: Any, settings: TeacherConfig | Mapping[str, Any] | None
) -> Teacher | None:
    """Return the teacher of these settings; None if they name none.

    Raises ConfigError for settings that do not fit, agents that learn from data, and a teacher with another tokenizer,
    and CheckpointError for a folder without a sound adapter.
    """
    if isinstance(settings, Mapping):
        settings = validated(TeacherConfig, settings, "teacher")
    if not settings:
        return None
    if agents[0].env_type != "reasoning":
        raise ConfigError(
            f"teacher is for agents that sample their own completions, found {agents[0].algorithm.name}, which "
            "learns from data; leave it out"
        )
    if settings.adapter is not None:
        runtime = agents[0].runtime
        slot = load_teacher(runtime, Path(settings.adapter).expanduser())
        teacher = Teacher(slot, settings.weight)
        weakref.finalize(teacher, runtime.store.release, slot)
        return teacher
    assert settings.url is not None
    assert settings.model is not None
    for agent in agents:
        check_temperature(agent, agent.genes)
    endpoint = TeacherEndpoint(settings.url, settings.model, settings.api, timeout=settings.timeout)
    teacher = Teacher(endpoint, settings.weight)
    weakref.finalize(teacher, endpoint.close)
    endpoint.check(tokenizer)
    return teacher


def load_teacher(runtime: Runtime, folder: Path) -> int:
    """Read an adapter into a slot of its own and return the slot.

    Raises CheckpointError for a folder without a sound adapter of these layers, ConfigError if its rank is above those
    of the agents: a wider bank would change the last bits of all of them.
    """
    store, inner = runtime.store, folder / "actor"
    folder = inner if inner.is_dir() else folder
    factors, lora = read_adapter(folder, store.layers)
    warn_of_another_base(folder, runtime.base, runtime.loaded)
    if lora.r > store.max_rank:
        raise ConfigError(f"teacher.adapter={shown(str(folder))} has rank {lora.r}, agents at most {store.max_rank}")
    slot = store.allocate(lora.r, lora_scaling(lora))
    store.load_adapter(slot, factors)
    return slot


def check_temperature(agent: Learner, genes: Collection[str] = ()) -> None:
    """Raise ConfigError unless an agent samples at temperature 1, always: an endpoint's log-probs are of it."""
    if temperature_of(agent) != 1 or "temperature" in genes:
        setting = "the gene temperature" if "temperature" in genes else f"temperature={temperature_of(agent):g}"
        raise ConfigError(
            f"teacher.url: an endpoint's log-probs are those at temperature 1, found {setting}; set "
            "algorithm.temperature to 1, and let it be no gene"
        )


def with_teacher(agent: Learner, experience: Experience, teacher: int | TeacherEndpoint, weight: float) -> Experience:
    """Return the experience with ``-weight (log pi - log teacher)`` added to the advantage of each token.

    The log-probs of a teacher in a slot cost a forward, whose tokens count as trained on; those of an endpoint do not.
    """
    batch = experience.batch
    mask = batch.action_mask.cpu()
    ours = experience.old_logp
    if ours is None:
        ours = behaviour_logprobs(agent, batch)
    if isinstance(teacher, TeacherEndpoint):
        check_temperature(agent)
        theirs = teacher.logprobs(batch, agent.runtime.processes, agent.runtime.lockstep)
    else:
        theirs = fixed_logprobs(agent.runtime, teacher, batch, temperature_of(agent), agent.micro_batch).cpu()
        agent.tokens["trained"] += int(batch.lengths.sum())
    advantages = experience.advantages.cpu() + distillation_advantages(ours.cpu(), theirs, mask, weight)
    # A group whose rewards are equal is taught as well, so its rows are no longer idle.
    idle = None if experience.idle is None else ~nonzero_advantage_rows(advantages, mask)
    gap = float(masked_mean(ours.cpu() - theirs, mask))
    metrics = {**experience.metrics, "teacher/kl": gap}
    return replace(experience, advantages=advantages, idle=idle, metrics=metrics)
