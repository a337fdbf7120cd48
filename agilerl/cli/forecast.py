"""What to expect of a run: the shape of its model, its workload, the rates of this machine; what its exam can see.

The shape comes from config.json alone: the modules are made on the meta device, without weights.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import takewhile
from statistics import NormalDist
from time import perf_counter
from typing import Any

import torch

from agilerl.checks.arguments import counted
from agilerl.config.run import RunConfig
from agilerl.envs.core import Place
from agilerl.errors import AgileRLError, ConfigError
from agilerl.models.adapters import lora_layers
from agilerl.models.base import from_model, is_of_hub, load_tokenizer, resolve_model
from agilerl.models.model_config import auto_class, check_config
from agilerl.models.quantised import imported_peft
from agilerl.planning.layout import Forecast, forecast
from agilerl.planning.machines import CPU_COSTS, GPU_COSTS, GPUS, Costs, Machine, gpu
from agilerl.planning.time import ModelShape, Widths, Workload
from agilerl.population import Population
from agilerl.safety.addresses import is_out_of_reach
from agilerl.sizes import PASS_TOKENS
from agilerl.training.generation import Scale
from agilerl.training.memory import adapter_slots, available_bytes
from agilerl.training.resolved import Resolved, usual_rate
from agilerl.training.setup import first_steps, founders_of, pace_of, steps_of_selection
from agilerl.training.tasks import task

ASSUMED_PROMPT, ASSUMED_COMPLETION = 256, 512
"""Tokens, if nothing else is known."""
# Words that tell no devices of GPUS apart.
_OF_ANY_DEVICE = {"nvidia", "sxm", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"}
_SECONDS = 0.3
"""Seconds for which each rate is measured."""


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row, and where the numbers come from."""

    prompt: float
    completion: int
    notes: tuple[str, ...]
    """A sentence about each number that was not given."""
    common: int = 0
    """Tokens with which all prompts begin."""


@dataclass(frozen=True)
class Planned:
    """A run to be planned: its settings, of which no weights are loaded."""

    resolved: Resolved
    allow_code: bool = False
    """Whether code that the settings name may run, to make the exam's prompts."""

    @property
    def config(self) -> RunConfig:
        """The settings as given."""
        return self.resolved.config

    def shape(self, device: str) -> ModelShape:
        """Return the shape of a run's base as it would be on a device, ``cpu`` or ``cuda``.

        Raises ConfigError if there is no such model, or its architecture cannot be made from config.json.
        """
        from transformers import AutoConfig

        config, name = self.config, self.config.network.pretrained_model_name_or_path
        path = resolve_model(name)
        try:
            offline = is_of_hub(name) and is_out_of_reach()
            check_config(path, local_files_only=offline)
            architecture = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=offline)
            with torch.device("meta"):
                model = auto_class(architecture).from_config(architecture, trust_remote_code=False)
            lora = imported_peft().LoraConfig(**config.network.lora_config.model_dump(), task_type="CAUSAL_LM")
            dtype: str = config.training.dtype
            settings, quantised = self.resolved.options.quantization_config, None
            if dtype == "auto":
                theirs = getattr(architecture, "dtype", None) or getattr(architecture.get_text_config(), "dtype", None)
                dtype = "float32" if device == "cpu" else str(theirs or "bfloat16").removeprefix("torch.")
            width = float(getattr(torch, dtype).itemsize)
            if settings is not None:
                # One fp32 scale for 64 weights of 4 bits; if scales are quantised too, a little more than one byte.
                scale = 1.03 if settings.bnb_4bit_use_double_quant else 4.0
                quantised = 1.0 if settings.load_in_8bit else 0.5 + scale / 64
            rounded = device == "cpu" and dtype == "bfloat16" and quantised is None  # see round_products
            scope = self.resolved.options.lora_target_scope
            # On a CPU, bfloat16 is the type of linear layers alone: all else is in float32.
            shape = shape_of(model, lora, name=name, width=4.0 if rounded else width, scope=scope)
            return replace(shape, linear_width=quantised or width)
        except AgileRLError:
            raise
        except Exception as error:  # from any library that reads files: no list of their errors is complete
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"cannot read the shape of the model {name!r}: {type(error).__name__}: {reason}; expected a local "
                "folder with config.json, a name on the Hugging Face hub that is reachable, or 'embedded'"
            ) from error

    def lengths(self, shape: ModelShape, prompt: int | None = None, completion: int | None = None) -> Lengths:
        """Return the given lengths, or those of the exam's prompts and of the longest completion allowed.

        Raises ConfigError if they do not fit into the context.
        """
        values = self.resolved.hyperparameters.model_dump()
        limit = min(value for value in (shape.context, values.get("max_model_len")) if value)
        mean, common, notes = float(prompt or 0), 0, []
        if prompt is None:
            try:
                mean, common, note = self._exam_prompts(limit)
            except AgileRLError as error:
                mean = ASSUMED_PROMPT
                note = f"prompts of {ASSUMED_PROMPT} tokens: assumed, because {error}; give --prompt-tokens"
            notes.append(note)
        room = limit - int(mean)
        if room < 1 or (completion or 1) > room:
            raise ConfigError(
                f"a prompt of {mean:,.0f} and a completion of {completion or 1:,} tokens do not fit into the context "
                f"of {limit:,}; lower --prompt-tokens or --completion-tokens, or raise algorithm.max_model_len"
            )
        if completion is None:
            known = values.get("max_output_tokens")
            completion = int(min(known or ASSUMED_COMPLETION, room))
            source = (
                "the most that is allowed: shorter ones take less" if known else "assumed; give --completion-tokens"
            )
            notes.append(f"completions of {counted(completion, 'token')}{', ' if known else ': '}{source}")
        return Lengths(mean, completion, tuple(notes), common)

    def _exam_prompts(self, limit: int) -> tuple[float, int, str]:
        """Return the mean length of the exam's prompts, that of what they begin with, and a sentence about both.

        Raises an AgileRLError if the prompts cannot be made.
        """
        if self.config.environment.agent is not None:
            raise ConfigError("the agent program writes them")
        name = self.config.network.pretrained_model_name_or_path
        if is_of_hub(name) and is_out_of_reach():
            raise ConfigError("the model's tokenizer is not available")
        tokenizer = load_tokenizer(name, **self.config.network.of_tokenizer)
        exam = task(self.config, allow_code=self.allow_code)
        exam.fit(tokenizer, limit - 1)
        places = [exam.place_at("exam", k, tokenizer, limit) for k in range(exam.panel_size("exam"))]
        prompts = exam.lengths(places, tokenizer, limit).prompts
        exam.close()
        mean, common = sum(prompts) / len(prompts), common_tokens(places)
        shared = f", the first {common:,} shared by all prompts" * (common > 0)
        source = "first of an episode" if exam.multi_turn else "mean of the exam"
        return mean, common, f"{counted(round(mean), 'prompt token')} ({source}){shared}"

    def scale(self, rows: Lengths) -> Scale:
        """Return the size of an agent's iterations and exams."""
        config, algorithm, t = self.config, self.resolved.algorithm, self.config.training
        values: Mapping[str, Any] = self.resolved.hyperparameters.model_dump()
        return Scale(
            training=t,
            kl="kl" in (config.selection_strategy.objectives or ()),
            prompts=config.environment.data_batch_size_per_gpu,
            group=values.get("group_size", algorithm.rows_per_unit),
            questions=config.environment.exam_panel,
            prompt=rows.prompt,
            longest=t.eval_max_new_tokens or values.get("max_output_tokens"),
            learns_from_data=algorithm.env_type != "reasoning",
        )

    def workload(self, rows: Lengths, pass_tokens: int = PASS_TOKENS, *, row_multiple: int = 1) -> Workload:
        """Return the workload of a run; ``pass_tokens`` is the size of a forward pass that the user has not chosen."""
        resolved, config, t = self.resolved, self.config, self.config.training
        values, scale = resolved.hyperparameters.model_dump(), self.scale(rows)
        algorithm, micro = resolved.algorithm, values.get("micro_batch_size_per_gpu")
        steps, questions = scale.generation(given=config.environment.eval_prompts is not None)
        pace = pace_of(scale, steps)
        agents = founders_of(resolved.selection, t, pace)
        return Workload(
            agents=agents,
            rank=config.largest_rank,
            prompts=scale.prompts,
            group=scale.group,
            prompt=rows.prompt,
            common=rows.common,
            completion=rows.completion,
            longest=rows.completion,
            window=(values.get("mini_batch_size") or values["batch_size"]) * algorithm.rows_per_unit,
            epochs=values["update_epochs"],
            reference=bool(values.get("beta")) and not scale.learns_from_data,
            old_pass=not scale.learns_from_data and resolved.options.use_vllm,
            critic=algorithm.trained_slots > 1,
            samples=not scale.learns_from_data,
            exam_prompts=(questions or scale.questions) * t.eval_samples,
            iterations=first_steps(resolved.selection, pace, agents),
            slots=adapter_slots(config.network, algorithm),
            checkpointing=resolved.options.gradient_checkpointing,
            pass_tokens=pass_tokens,
            micro_tokens=micro * algorithm.rows_per_unit * math.ceil(rows.prompt + rows.completion)
            if micro
            else pass_tokens,
            row_multiple=row_multiple,
            max_tokens=t.max_tokens_in_flight or pass_tokens,
            max_rows=t.max_rows_in_flight,
            most_islands=config.most_islands,
        )


def whole_run(planned: Planned, rows: Lengths, expected: Forecast) -> float:
    """Return the seconds of a run: its generations, and the tests of the base, of a median agent and of the elite."""
    load, t, environment = expected.load, planned.config.training, planned.config.environment
    scale = planned.scale(rows)
    iterations = scale.lone_agent()[0] / load.agents
    # Not those of the first generation, which are fewer.
    exams = max(iterations / scale.generation(given=environment.eval_prompts is not None)[0], 1)
    exam = expected.seconds["exam_prefill"] + expected.seconds["exam_decode"]
    tests = 3 * exam * environment.test_prompts * t.eval_samples / (load.agents * load.exam_prompts)
    between = expected.generation - load.iterations * expected.iteration
    return min(max(iterations, 1) * expected.iteration + exams * between + tests, t.max_seconds or math.inf)


def common_tokens(places: Iterable[Place]) -> int:
    """Return with how many tokens all prompts begin."""
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*(question.prompt_ids for question in places))))


def expected_seconds(planned: Planned, population: Population, completion: int) -> float | None:
    """Return the seconds of a run on this machine, with the exam's prompts and completions of this length.

    None where they are not known: for a GPU without a data sheet here, for episodes, and for agent programs.
    """
    config = planned.config
    kind, environment = "cpu", config.environment
    if environment.agent is not None or environment.env_type == "multiturn":
        return None
    if config.training.device != "cpu" and not (kind := data_sheet(torch.cuda.get_device_name())):
        return None
    (machine, costs), shape = device(kind, config.training.dtype), planned.shape("cpu" if kind == "cpu" else "cuda")
    prompts, common = population.lengths("exam").prompts, common_tokens(population.places("exam"))
    rows = Lengths(sum(prompts) / len(prompts), completion, (), common)
    load = planned.workload(rows, row_multiple=costs.row_multiple)
    return whole_run(planned, rows, forecast(shape, load, machine, costs))


def length_of(planned: Planned, rows: Lengths, load: Workload) -> dict[str, Any]:
    """Return how long a run is and when agents are selected, as :func:`schedule` takes it."""
    scale, config, strategy = planned.scale(rows), planned.config, planned.resolved.selection
    has_exam = config.environment.eval_prompts is not None
    iterations = math.ceil(config.training.max_steps / (load.agents * load.rows))
    return {
        "iterations": min(iterations, math.ceil(scale.lone_agent()[0] / load.agents)),
        "ends_by_tokens": scale.ends_by_tokens,
        "iterations_per_generation": scale.generation(given=has_exam)[0],
        "iterations_of_first_generation": load.iterations,
        "smallest_population": min(config.smallest_population, load.agents),
        "steps_of_selection": steps_of_selection(scale, strategy, load.agents, has_exam=has_exam),
    }


def schedule(length: Mapping[str, Any], agents: int, limits: str = "") -> str:
    """Return a phrase about the iterations of a run that begins with so many agents, and about its selections."""
    left, by_tokens = length["smallest_population"], length["ends_by_tokens"]
    most = length["iterations"] * (agents if left < agents else 1)
    every, first = length["iterations_per_generation"], length["iterations_of_first_generation"]
    known, needed = not by_tokens, length["steps_of_selection"]
    if is_too_short(length):
        selected = "too short for a selection" + f": at least training.max_steps={needed}" * (needed is not None)
    elif first == every:
        selected = f"selection every {every}"
    else:
        later = f", then every {every} with {counted(left, 'agent')} left" * (not known or every < most)
        selected = f"first selection after {first}{later}"
    return (
        f"{'about ' * by_tokens}{counted(length['iterations'], 'iteration')}{' of all agents' * (left < agents)}"
        f"{' (more if answers are short)' * by_tokens}{', ending after ' * bool(limits)}{limits}, {selected}"
    )


def is_too_short(length: Mapping[str, Any]) -> bool:
    """Return whether a run ends before its first selection: what a last one decides would never train."""
    return not length["ends_by_tokens"] and length["iterations_of_first_generation"] >= length["iterations"]


def data_sheet(name: str) -> str:
    """Return which of ``GPUS`` a device is by the name that its driver gives it; "" for any other device."""
    words = {word.removesuffix("gb") for word in re.findall(r"\w+", name.lower())}
    for kind, sheet in GPUS.items():
        # All words count: a part of a card (MIG), and a variant with other memory or another link, has other rates.
        known = set(kind.split("-"))
        if known <= words <= known | _OF_ANY_DEVICE | {f"{sheet.memory / 1e9:.0f}"}:
            return kind
    return ""


def shape_of(model: Any, lora_config: Any, *, name: str, width: float, scope: str | None = None) -> ModelShape:
    """Return the shape of a causal language model, which may be on the meta device; ``width``: bytes of a weight.

    ``scope`` is ``lora_target_scope``: the part of the path that all adapted layers share.
    """
    base = from_model(model, name)
    layers = lora_layers(model, lora_config, scope)
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)  # of a mixture; a dense model has none
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next(filter(None, counts), None)
    share = float(chosen) / float(count) if chosen and count else 1.0
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    held, active = 0, 0.0  # parameters in the layers' matrix products: all of them, and those that one token uses
    for path, parameter in model.named_parameters():
        # Norms and biases are no matrices; embeddings and head are counted apart.
        if parameter.dim() >= 2 and id(parameter) not in outside:
            held += parameter.numel()
            active += parameter.numel() * (share if ".experts." in f".{path}." else 1)
    return ModelShape(
        **asdict(Widths.of(base, width)),
        name=name,
        parameters=base.parameters,
        linear=int(active),
        linear_held=held,
        adapted=sum(layer.in_features + layer.out_features for layer in layers),
        adapted_layers=len(layers),
        context=base.context_length,
        linear_width=width,
        usual_rate=usual_rate(base),
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
        f"{questions} questions tell two agents apart (P = 0.95) only if their shares of right answers differ by "
        f"{least:.2g} or more; to detect a difference of {finer:g} takes {questions_for(finer):,} questions"
    )
    return {"questions": questions, "smallest_difference": least, "sentence": sentence}


# -- devices ---------------------------------------------------------------------------------------------------


def device(kind: str, dtype: str) -> tuple[Machine, Costs]:
    """Return a GPU by its name, or ``cpu``, whose rates are measured now for products in ``dtype``; and its costs."""
    if kind == "cpu":
        return _measured(dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32), CPU_COSTS
    return gpu(kind), GPU_COSTS


Clock = Callable[[], float]


def measured_machine(clock: Clock = perf_counter, *, dtype: torch.dtype = torch.float32) -> Machine:
    """Return the CPU with its rates, that of products in ``dtype``, with the current threads; takes about a second."""
    bandwidth = copy_rate(clock=clock)
    return Machine(
        name="cpu",
        flops=matmul_rate(dtype=dtype, clock=clock),
        bandwidth=bandwidth,
        memory=available_bytes("cpu") or 0,
        # Processes of one machine exchange bytes through its memory: one writes, another reads.
        link=bandwidth / 2,
        source="measured on this machine just now",
    )


_measured = cache(measured_machine)
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
