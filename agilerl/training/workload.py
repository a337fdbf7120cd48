"""What a manifest asks of a machine: batch sizes and lengths, as the roofline counts them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agilerl.algorithms.from_data import DataAlgorithm
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.hub import is_out_of_reach
from agilerl.errors import AgileRLError, ConfigError
from agilerl.models.base import load_tokenizer, resolve_model
from agilerl.rollouts.sources import EpisodeSource, QuestionSource
from agilerl.training.config import RunConfig
from agilerl.training.memory import adapter_slots
from agilerl.training.roofline import MICRO_TOKENS, ModelShape, Workload
from agilerl.training.sampling import largest_rank
from agilerl.training.setup import algorithm_class, hyperparameters
from agilerl.training.tasks import task

__all__ = ["ASSUMED_COMPLETION", "ASSUMED_PROMPT", "Lengths", "lengths", "workload"]

ASSUMED_PROMPT, ASSUMED_COMPLETION = 256, 512
"""Tokens, where nothing says more."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row, and where the numbers come from."""

    prompt: float
    completion: float
    longest: int
    said: tuple[str, ...]
    """A sentence for each number that was not given."""


def lengths(
    config: RunConfig, shape: ModelShape, prompt: int | None, completion: int | None, *, allow_code: bool = False
) -> Lengths:
    """Return the lengths that were given; else those of the exam's prompts, and the longest completion allowed.

    Raises ConfigError where they leave no room in the context.
    """
    values = hyperparameters(config).model_dump()
    limit = min(value for value in (shape.context, values.get("max_model_len")) if value)
    said = []
    mean: float = prompt or 0
    if prompt is None:
        mean, sentence = _exam_prompts(config, limit, allow_code=allow_code)
        said.append(sentence)
    room = limit - int(mean)
    if room < 1 or (completion or 1) > room:
        raise ConfigError(
            f"a prompt of {mean:,.0f} and a completion of {completion or 1:,} tokens do not fit into the context of "
            f"{limit:,}; lower --prompt-tokens or --completion-tokens, or raise algorithm.max_model_len"
        )
    most = min(values.get("max_output_tokens") or room, room)
    if completion is None:
        known = values.get("max_output_tokens")
        completion = int(most if known else min(ASSUMED_COMPLETION, most))
        said.append(
            f"completions of {completion:,} tokens, the most that is allowed: shorter ones take less"
            if known
            else f"completions of {completion:,} tokens: assumed; give --completion-tokens"
        )
    return Lengths(mean, completion, max(completion, 1), tuple(said))


def _exam_prompts(config: RunConfig, limit: int, *, allow_code: bool) -> tuple[float, str]:
    """Return the mean length of the exam's prompts, in the tokens of the model where its tokenizer is at hand."""
    name = config.network.pretrained_model_name_or_path
    assumed = f"prompts of {ASSUMED_PROMPT} tokens: assumed, because {{}}; give --prompt-tokens"
    try:
        if resolve_model(name) == name and is_out_of_reach():
            return ASSUMED_PROMPT, assumed.format("the model's tokenizer is not at hand")
        tokenizer = load_tokenizer(name, **config.network.padding)
        made = task(config, allow_code=allow_code)
        if isinstance(made, EpisodeTask):
            found = EpisodeSource(made, tokenizer).prompt_lengths("exam", limit)
            made.close()
            return sum(found) / len(found), f"prompts of {sum(found) / len(found):,.0f} tokens: the first of an episode"
        made.fit(tokenizer, limit - 1)
        found = QuestionSource(made, tokenizer).prompt_lengths("exam", limit)
    except AgileRLError as error:
        return ASSUMED_PROMPT, assumed.format(str(error))
    mean = sum(found) / len(found)
    return mean, f"prompts of {mean:,.0f} tokens: the mean of the exam's"


def workload(config: RunConfig, found: Lengths, *, row_multiple: int = 1) -> Workload:
    """Return the workload of a run."""
    algorithm, t = algorithm_class(config), config.training
    values: Mapping[str, Any] = hyperparameters(config).model_dump()
    from_data = issubclass(algorithm, DataAlgorithm)
    group = values.get("group_size", algorithm.rows_per_unit)
    length = found.prompt + found.completion
    micro = values.get("micro_batch_size_per_gpu")
    return Workload(
        agents=t.pop_size,
        rank=largest_rank(config),
        prompts=config.environment.data_batch_size_per_gpu,
        group=group,
        prompt=found.prompt,
        completion=found.completion,
        longest=found.longest,
        window=(values.get("mini_batch_size") or values["batch_size"]) * algorithm.rows_per_unit,
        epochs=values["update_epochs"],
        reference=bool(values.get("beta")) and not from_data,
        old_pass=not from_data and bool(config.algorithm.get("use_vllm")),
        critic=algorithm.trained_slots > 1,
        samples=not from_data,
        exam_prompts=config.environment.eval_prompts,
        iterations=t.evo_steps,
        slots=adapter_slots(config),
        checkpointing=bool(config.algorithm.get("gradient_checkpointing")),
        micro_tokens=int(micro * length) if micro else MICRO_TOKENS,
        row_multiple=row_multiple,
        max_tokens=t.max_tokens_in_flight,
        max_rows=t.max_rows_in_flight,
    )
