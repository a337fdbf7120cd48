"""What to expect of a run: how long it takes at the rates of this machine, and what its exam can see."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from statistics import NormalDist
from time import perf_counter
from typing import Any

import torch

from agilerl.checks.arguments import counted
from agilerl.models.quantised import stored_size
from agilerl.planning.time import CPU_COSTS, GPU_COSTS, ITERATION, Machine, ModelShape, Widths, Workload, seconds
from agilerl.runtime import Runtime
from agilerl.sizes import CPU_ROWS, stated
from agilerl.training.memory import adapter_slots, common_tokens
from agilerl.training.setup import Session

_SECONDS = 0.3
"""Seconds for which each rate is measured."""


# -- the run ----------------------------------------------------------------------------------------------------------


def shape_of(runtime: Runtime) -> ModelShape:
    """Return the sizes of a loaded base and of the layers that carry adapters."""
    model = runtime.base.model
    config = model.config.get_text_config()
    chosen = stated(config, "num_experts_per_tok")  # of a mixture; a dense model has none
    count = stated(config, "num_experts", "num_local_experts", "n_routed_experts")
    share = chosen / count if chosen and count else 1.0
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    size, active = 0, 0.0  # bytes of all matrices of the layers, and the parameters that one token uses
    for path, parameter in model.named_parameters():
        # Norms and biases are no matrices; embeddings and head are counted apart.
        if parameter.dim() >= 2 and id(parameter) not in outside:
            numbers, stored = stored_size(parameter)
            size, active = size + stored, active + numbers * (share if ".experts." in f".{path}." else 1)
    adapted = sum(layer.in_features + layer.out_features for layer in runtime.store.layers)
    return ModelShape(**vars(Widths.of(runtime.base)), linear=int(active), linear_bytes=size, adapted=adapted)


def workload(session: Session, completion: int) -> Workload:
    """Return the work of an iteration, with the exam's prompts and completions of this length, and of an exam."""
    population, options, t = session.population, session.population.runtime.options, session.config.training
    agent, runtime, scale = population.agents[0], population.runtime, session.scale
    values, micro = session.resolved.hyperparameters.model_dump(), agent.micro_batch
    places, rows_of = population.examiner.places("exam"), math.ceil(scale.prompt + completion)
    return Workload(
        agents=len(population.agents),
        rank=session.config.largest_rank,
        prompts=scale.prompts,
        group=scale.group,
        prompt=scale.prompt,
        common=common_tokens(population),
        completion=completion,
        window=agent.window_rows,
        epochs=values["update_epochs"],
        reference=bool(values.get("beta")) and not scale.learns_from_data,
        old_pass=not scale.learns_from_data and options.use_vllm,
        critic=agent.critic_slot is not None,
        samples=not scale.learns_from_data,
        exam_prompts=len(places) * t.eval_samples,
        slots=adapter_slots(session.config.network, type(agent)),
        checkpointing=options.gradient_checkpointing,
        micro_tokens=micro.rows * rows_of if micro.rows else runtime.pass_size.tokens,
        whole_tokens=micro.rows * rows_of if micro.rows else runtime.pass_size.whole,
        row_multiple=CPU_ROWS if runtime.base.device.type == "cpu" else 1,
        max_tokens=runtime.max_tokens or runtime.pass_size.tokens,
        max_rows=t.max_rows_in_flight,
    )


def expected_seconds(session: Session, completion: int) -> float | None:
    """Return the seconds of a run on this machine: iterations, selections, and the tests of three agents.

    None where they are not known: for several processes, for episodes, and for agent programs.
    """
    environment, t, base = session.config.environment, session.config.training, session.population.runtime.base
    if environment.agent is not None or environment.env_type == "multiturn" or session.processes.size > 1:
        return None
    load, costs = workload(session, completion), CPU_COSTS if base.device.type == "cpu" else GPU_COSTS
    spent = seconds(shape_of(session.population.runtime), load, _measured(str(base.device), base.dtype), costs)
    iterations = session.scale.lone_agent()[0] / load.agents
    iteration = sum(spent[phase] for phase in ITERATION)
    # Not those of the first generation, which are fewer.
    exams = max(iterations / session.evo_steps, 1)
    exam = spent["exam_prefill"] + spent["exam_decode"]
    # Of the base, a median agent and the elite.
    tests = (
        3 * exam * len(session.population.examiner.places("test")) * t.eval_samples / (load.agents * load.exam_prompts)
    )
    between = sum(spent.values()) - iteration
    return min(max(iterations, 1) * iteration + exams * between + tests, t.max_seconds or math.inf)


def schedule(length: Mapping[str, Any], agents: int, limits: str = "") -> str:
    """Return a phrase about the iterations of a run that begins with so many agents, and about its selections."""
    left, by_tokens = length["smallest_population"], length["ends_by_tokens"]
    longest = length["iterations"] * (agents if left < agents else 1)
    every, first = length["iterations_per_generation"], length["iterations_of_first_generation"]
    counts_iterations, needed, inherits = not by_tokens, length["steps_of_selection"], left < agents
    if counts_iterations and first >= length["iterations"]:  # what a last selection decides would never train
        inherits = False
        selected = "too short for a selection" + f": at least training.max_steps={needed}" * (needed is not None)
    elif first == every:
        selected = f"selection every {every}"
    else:
        later = f", then every {every} with {counted(left, 'agent')} left" * (not counts_iterations or every < longest)
        selected = f"first selection after {first}{later}"
    return (
        f"{'about ' * by_tokens}{counted(length['iterations'], 'iteration')}{' of all agents' * (left < agents)}"
        f"{' (more if answers are short)' * by_tokens}{', ending after ' * bool(limits)}{limits}, {selected}"
        f"{f'; agents that stay inherit the iterations of those that leave (up to {longest})' * inherits}"
    )


# -- the exam -----------------------------------------------------------------------------------------------------


_DISAGREE, _QUANTILE = 0.5, NormalDist().inv_cdf(0.95)
"""Share of the questions on which one of two agents is right and the other is wrong, as if both guessed; the certainty
that is asked for."""


def smallest_difference(questions: int) -> float:
    """Return the smallest difference between two agents' shares of right answers that an exam can see, P = 0.95.

    Both answer the same n questions, so only the share d on which they disagree counts, and the mean difference has
    the variance (d - difference^2) / n (McNemar 1947). Solved for a difference that is z standard errors.
    """
    return math.sqrt(_QUANTILE**2 * _DISAGREE / (questions + _QUANTILE**2))


def questions_for(difference: float) -> int:
    """Return how many questions an exam needs to see a difference: the inverse of :func:`smallest_difference`."""
    return math.ceil(_QUANTILE**2 * (_DISAGREE / difference**2 - 1))


def seen_by_exam(questions: int) -> dict[str, Any]:
    """Return what an exam can see, as numbers and as a sentence that says what it would take to see more."""
    least = smallest_difference(questions)
    finer = next((d for d in (0.2, 0.1, 0.05, 0.02, 0.01) if d < 0.9 * least), 0.005)
    sentence = (
        f"with {questions} questions an exam can detect a difference in accuracy of {least:.2g} or more (95 %); "
        f"detecting {finer:g} takes {questions_for(finer):,}"
    )
    return {"questions": questions, "smallest_difference": least, "sentence": sentence}


# -- devices ---------------------------------------------------------------------------------------------------


Clock = Callable[[], float]


def measure_machine(device: str = "cpu", dtype: torch.dtype = torch.float32, clock: Clock = perf_counter) -> Machine:
    """Return the rates of a device for products in ``dtype``, with the current threads; takes about a second."""
    return Machine(flops=matmul_rate(device, dtype, clock), bandwidth=copy_rate(device, clock))


_measured = cache(measure_machine)
"""Measured once in a process."""


def matmul_rate(device: str = "cpu", dtype: torch.dtype = torch.float32, clock: Clock = perf_counter) -> float:
    """Return the floating point operations per second of the fastest of several products of square matrices."""
    size = 1024 if device == "cpu" else 8192
    left = torch.ones((size, size), dtype=dtype, device=device)
    out = torch.empty_like(left)
    # Each of the size**3 products is added to a sum: two operations.
    return 2 * size**3 / _best(lambda: torch.mm(left, left, out=out), device, clock)


def copy_rate(device: str = "cpu", clock: Clock = perf_counter) -> float:
    """Return the bytes per second, read plus written, of the fastest of several copies too large for any cache."""
    count = 2**26 if device == "cpu" else 2**29
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / _best(lambda: target.copy_(source), device, clock)


def _best(call: Callable[[], object], device: str, clock: Clock) -> float:
    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize(device)
        return clock()

    # Not timed: the first call is slower.
    call()
    best, end = float("inf"), clock() + _SECONDS
    while clock() < end:
        start = now()
        call()
        best = min(best, now() - start)
    return best
