"""Helpers of AgileRL's programs: an accelerator, and a look at answers."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import torch

from agilerl.algorithms import LLMAlgorithm
from agilerl.checks.arguments import (
    Count,
    Having,
    Positive,
    Seed,
    Tokenizer,
    checked,
    described,
)
from agilerl.compat.gyms import DataGym, ReasoningGym
from agilerl.envs.core import Task
from agilerl.envs.prompts import decode_completions, render_prompt
from agilerl.errors import ConfigError
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.streams import stream
from agilerl.utils.utils import aggregate_metrics_across_gpus as aggregate_metrics_across_gpus

Plugin = Annotated[Any, Having("an accelerate.DeepSpeedPlugin", ("deepspeed_config",))]


@checked
def create_llm_accelerator(*, deepspeed_plugin: Plugin | None = None) -> Any:
    """Return an ``accelerate.Accelerator``, or None where there is neither a GPU nor a launcher to need one."""
    from accelerate import Accelerator, PartialState

    if deepspeed_plugin is None and not torch.cuda.is_available() and PartialState().num_processes == 1:
        return None
    return Accelerator(deepspeed_plugin=deepspeed_plugin)


EvalSample = tuple[str, str | None, str | None]
"""A prompt, the answer in the data, and a worse one."""


@checked
def sample_eval_prompts(env: Any, n: Count = 5, seed: Seed = 0) -> list[EvalSample]:
    """Return ``n`` different (prompt, chosen, rejected) of an environment's test set; None for what its rows lack."""
    task = env.task if isinstance(env, ReasoningGym | DataGym) else env
    if not isinstance(task, Task):
        raise ConfigError(f"expected a ReasoningGym, SFTGym, PreferenceGym or task as env, found {described(env)}")
    numbers = stream(seed, "eval prompts").permutation(task.exam_prompts)[:n]
    rows = [task.row("exam", int(number)) for number in numbers]
    return [(str(row["question"]), task.demonstration(row), task.counterexample(row)) for row in rows]


@checked
def compare_responses(
    agent: LLMAlgorithm,
    tokenizer: Tokenizer,
    samples: Sequence[EvalSample],
    max_new_tokens: Count = 200,
    temperature: Positive = 1.0,
    do_sample: bool = False,
    *,
    skip_special_tokens: bool = True,
    show_base_model: bool = True,
) -> list[dict[str, str]]:
    """Print and return the base's and the agent's answer to each prompt, beside those of the data; ``q`` ends it."""
    drawn = temperature if do_sample else 0.0
    slots = {**({"base model": None} if show_base_model else {}), "agent": agent.selected_slot}
    requests = []
    for number, (prompt, _, _) in enumerate(samples):
        ids = render_prompt(tokenizer, [{"role": "user", "content": prompt}])
        room = agent.context_length - len(ids)
        settings = SamplingSettings(max_new_tokens=max(1, min(max_new_tokens, room)), temperature=drawn)
        # One key for all slots: base and agent draw by the same numbers.
        requests += [GenerationRequest(slot, ids, 1, settings, "act", (number,)) for slot in slots.values()]
    groups = agent.runtime.complete(requests)
    sampled = [completion.token_ids for (completion,) in groups]
    texts = decode_completions(tokenizer, sampled) if skip_special_tokens else [tokenizer.decode(i) for i in sampled]
    compared = []
    for number, (prompt, chosen, rejected) in enumerate(samples):
        answers = dict(zip(slots, map(str.strip, texts[number * len(slots) : (number + 1) * len(slots)])))
        of_data = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        compared.append({name: text for name, text in (of_data | answers).items() if text is not None})
        print(f"--- {number + 1} of {len(samples)}")
        for name, text in compared[-1].items():
            print(f"{name}: {text}")
        if sys.stdin.isatty() and number + 1 < len(samples) and input("Enter, or q: ").strip() == "q":
            break
    return compared
