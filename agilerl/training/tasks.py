"""The section ``environment`` of a manifest as a task."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agilerl.envs.core import Message, Row, Task
from agilerl.envs.datasets import fill_template
from agilerl.envs.preference import Mistake, PreferenceTask
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.sft import SFTTask
from agilerl.envs.upstream import known_tasks
from agilerl.errors import ConfigError
from agilerl.training.config import EnvironmentConfig, RunConfig
from agilerl.validation import shown

__all__ = ["task"]


class _TemplateTask(ReasoningGymTask):
    """A reasoning_gym dataset whose questions are put into a conversation."""

    template: Sequence[Message] = ()

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the template with the question filled in."""
        return [{"role": m["role"], "content": fill_template(m["content"], row)} for m in self.template]


def task(config: RunConfig) -> Task:
    """Build the task and draw its panels; raises with a sentence for an unknown one."""
    e = config.environment
    family, _, name = e.task.partition(":")
    if family != "reasoning_gym" or not name:
        meant = f"; did you mean reasoning_gym:{e.task}?" if e.task in known_tasks() else ""
        raise ConfigError(f"environment.task={shown(e.task)} is unknown; expected reasoning_gym:<dataset>{meant}")
    made = _TemplateTask(
        name,
        params=e.params,
        seed=config.training.seed,
        exam_prompts=e.eval_prompts,
        test_prompts=e.test_prompts,
        reward=e.reward,
        holdout=e.holdout,
    )
    made.template = _template(e)
    made.prepare()
    if e.env_type == "sft":
        return SFTTask(made, loss_on=e.loss_on)
    if e.env_type == "preference":
        return PreferenceTask(made, mistake=_careless(), seed=config.training.seed)
    return made


def _careless() -> Mistake:
    """Return the mistakes of the embedded base's demonstrator, for the datasets that it knows."""
    from agilerl.models.tiny.tasks import TASKS  # imports reasoning_gym, which takes a second

    mistakes = {known.name: known.mistake for known in TASKS}

    def careless(row: Row, draws: np.random.Generator) -> str | None:
        mistake = mistakes.get(row["metadata"]["source_dataset"])
        return None if mistake is None else mistake(row, draws)

    return careless


def _template(config: EnvironmentConfig) -> list[Message]:
    where, template = "environment.conversation_template", config.conversation_template
    if template is None:
        return [{"role": "user", "content": "{question}"}]
    for message in template:
        if set(message) != {"role", "content"}:
            raise ConfigError(f"{where}: a message has a role and a content, no more, found {shown(message)}")
    if not any("{question}" in message["content"] for message in template):
        raise ConfigError(f"{where}: expected {{question}} in one of the messages; otherwise every prompt is the same")
    return template
