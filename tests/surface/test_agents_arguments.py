"""Every argument of an agent, its base and vLLM acts: it is changed, and something that can be seen must change.

A table has an entry for each argument; ``facts`` is a function that uses an agent with some arguments and returns what
can be seen of it. The facts before and after a change are compared, and bits count. If it yields them in stages, the
first that differs ends the comparison. A new argument without an entry fails.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from agilerl import HyperparameterConfig, Mutations, RLParameter
from agilerl.algorithms import ALGORITHMS, GRPO, CosineLRScheduleConfig
from agilerl.config.base_model import SharedOptions
from agilerl.config.vllm import VLLMConfig
from agilerl.data import RolloutBatch, Trajectory, collate
from agilerl.errors import AgileRLError
from agilerl.models.tiny import tiny_model_path
from agilerl.rollouts.vllm.backend import row_of
from agilerl.rollouts.vllm.colocated import ColocatedVLLM
from agilerl.rollouts.vllm.engine import VLLMEngine
from agilerl.runtime import Runtime
from tests.algorithms.conftest import sample
from tests.algorithms.data_agents import examples
from tests.rollouts.test_vllm_requests import REQUEST
from tests.tiny_models import PAD, VOCABULARY, qwen2, random_model

pytestmark = pytest.mark.model


# -- how an argument is changed, and what must come of it --------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Change:
    """Another value; the facts must be others than with ``base`` alone."""

    value: Any
    base: Mapping[str, Any] = field(default_factory=dict)
    """What else has to be set for the argument to matter, in both cases."""


@dataclass(frozen=True)
class Refused:
    """A value that this machine, or the package, does not have: an error that names the argument."""

    value: Any
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Warned:
    """A value that has no effect here, which is said."""

    value: Any


@dataclass(frozen=True)
class Proven:
    """An effect that needs a larger scene than these: the test that shows it, from ``tests/`` on."""

    test: str


@dataclass(frozen=True)
class NoOp:
    """Accepted without effect; docs/coming_from_agilerl.md gives the reason."""

    reason: str


Entry = Change | Refused | Warned | Proven | NoOp


def to(value: Any, **base: Any) -> Change:
    return Change(value, base)


def bits(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def stages(facts: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the facts: all at once, or one stage after the other if ``facts`` is a generator."""
    found = facts(**given)
    yield from found if isinstance(found, Generator) else [found]


class Before:
    """The facts without the change, found out as far as needed. They are the same every time: else a difference would
    prove nothing.
    """

    def __init__(self, facts: Callable[..., Any], given: Mapping[str, Any]) -> None:
        self._both = zip_longest(stages(facts, given), stages(facts, given))
        self._known: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for number in count():
            if number == len(self._known):
                if (both := next(self._both, None)) is None:
                    return
                assert both[0] == both[1]
                self._known.append(both[0])
            yield self._known[number]


_BEFORE: dict[str, Before] = {}


def check(entry: Entry | None, name: str, facts: Callable[..., Any]) -> None:
    """Check that an argument does what its entry says."""
    if isinstance(entry, Change):
        before = _BEFORE.setdefault(f"{facts} {dict(entry.base)}", Before(facts, entry.base))
        after = stages(facts, {**entry.base, name: entry.value})
        assert any(one != other for one, other in zip_longest(before, after))
    elif isinstance(entry, Refused):
        with pytest.raises(AgileRLError, match=name):
            list(stages(facts, {**entry.base, name: entry.value}))
    elif isinstance(entry, Warned):
        with pytest.warns(UserWarning, match=name):
            list(stages(facts, {name: entry.value}))
    elif isinstance(entry, Proven):
        file, _, test = entry.test.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    elif isinstance(entry, NoOp):
        page = (ROOT / "docs" / "coming_from_agilerl.md").read_text(encoding="utf-8")
        section = page.split("## Accepted without effect", 1)[1].split("\n## ", 1)[0]
        rows = " ".join(section.split()).split(" * ")
        assert any(re.search(rf"\b{name}\b", row) and entry.reason in row for row in rows)
    else:
        raise AssertionError(f"{name} has no entry: say how it is changed, and what comes of it")


# -- agents -----------------------------------------------------------------------------------------------------------


GENES = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-1))
COURSE = CosineLRScheduleConfig(num_epochs=5, warmup_proportion=0.5)
OTHER_ENGINE = {"_gap": 0.5}
"""The samples' log-probs are those of another engine, half a nat away."""


def half(inputs: Any) -> torch.Tensor:
    """A loss of the user's."""
    result: torch.Tensor = -(inputs.logp * inputs.mask).sum() / inputs.denominator
    return result


def episodes(group: int) -> RolloutBatch:
    """Two groups of episodes of one to three turns, with a reward a turn and tokens of the environment between them."""
    draws, found = torch.Generator().manual_seed(7), []
    for row in range(2 * group):
        t = Trajectory([5, 9, 3], [], [], [], [], group=row // group)
        for turn in range(1 + row % 3):
            for length, number in ((1 + (row + turn) % 3, turn), (2, -1)):
                t.token_ids += torch.randint(2, VOCABULARY, (length,), generator=draws).tolist()
                t.turn_ids += [number] * length
            t.rewards.append(float(torch.randn((), generator=draws)))
        t.action_mask = [k >= 0 for k in t.turn_ids]
        t.logprobs = [-3.0 * float(torch.rand((), generator=draws)) - 2.5 for _ in t.turn_ids]
        found.append(t)
    return collate(found, PAD)


def agent_facts(
    cls: Any, runtime: Runtime | None = None, _gap: float = 0.0, _episodes: bool = True, **given: Any
) -> Iterator[Any]:
    """Let an agent say something, learn from its own samples and from episodes, and mutate; yield what it then is."""
    data = cls.env_type != "reasoning"
    rates = {"lr_actor": 3e-2, "lr_critic": 1e-2} if "lr" not in cls.Config.model_fields else {"lr": 3e-2}
    sizes = {"batch_size": 4} if data else {"group_size": 4, "batch_size": 8}
    config = given.get("config")
    named = set(given) | (set() if config is None else config.model_fields_set)
    own = {
        name: value
        for name, value in {**rates, **sizes, "update_epochs": 2, "max_output_tokens": 6}.items()
        if name not in named
    }
    place = {} if {"model_name", "actor_network"} & set(given) else {"runtime": runtime or base()}
    agent = cls(**{"pad_token_id": PAD, "hp_config": None, **place, **own, **given})
    store = agent.runtime.store

    def learned(metrics: dict[str, float]) -> Any:
        slots = [s for s in (agent.slot, agent.critic_slot, agent.reference_slot) if s is not None]
        weights = [bits(bank[s]) for s in slots for bank in (store.theta, store.exp_avg, store.exp_avg_sq)]
        return weights, {k: v for k, v in metrics.items() if "time" not in k}

    yield bits(store.theta[agent.slot]), agent.rank, agent.pad_token_id
    said = agent.get_action([{"input_ids": torch.tensor([prompt])} for prompt in ([5, 9, 3, 8], [7, 7])])
    yield [ids.tolist() for ids in said.completion_ids]
    if data:
        for seed in range(2):
            batch = examples(6, seed, pairs=cls.env_type == "preference")
            labels = torch.arange(6) % 2 == 0 if cls.env_type == "unpaired" else None
            yield learned(agent.learn(replace(batch, desirable=labels)))
            agent.set_reference_policy(1)
    else:
        rows = sample([agent], 4)[0]
        for row in rows:
            row.rewards = [1.0] if row.group == 3 else [sum(t % 2 == 0 for t in row.token_ids) / 3]
            row.logprobs = [p - _gap * (k % 3) for k, p in enumerate(row.logprobs or [])]
        agent.runtime.engine.exact = not _gap
        yield learned(agent.learn(collate(rows, PAD)))
        agent.set_reference_policy(1)
        if _episodes:
            yield learned(agent.learn(episodes(agent.config.group_size)))
    if agent.genes:
        Mutations(0, 0, 0, 0, 0, 1).mutation([agent])
    yield learned({}), agent.mut, agent.rank


def base(**options: Any) -> Runtime:
    return Runtime.for_model(random_model(qwen2(num_hidden_layers=1)), seed=5, **options)


AGENT: dict[str, Entry] = {
    "pad_token_id": to(2),
    "pad_token": Proven(
        "models/test_padding_and_devices.py::test_a_pad_token_given_by_name_acts_on_a_runtime_that_is_there"
    ),
    "model_name": Proven("surface/test_agents_arguments.py::test_an_agent_is_on_the_base_that_was_given"),
    "actor_network": Proven("surface/test_agents_arguments.py::test_an_agent_is_on_the_base_that_was_given"),
    "runtime": Proven("surface/test_agents_arguments.py::test_an_agent_is_on_the_base_that_was_given"),
    "lora_config": to(LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")),
    "device": Proven("models/test_padding_and_devices.py::test_a_device_that_is_not_there_is_refused"),
    "accelerator": Proven("distributed/test_accelerate.py::test_two_accelerators_on_one_base"),
    "cosine_lr_schedule_config": to(COURSE),
    "loss": to(half),
    "config": Proven("surface/test_agents_arguments.py::test_a_config_is_the_same_as_its_keywords"),
    "hp_config": to(GENES),
    "index": to(3),
    "wrap": NoOp("the base is wrapped once, by its runtime"),
    "clone": NoOp("a clone is made by `agent.clone()`"),
    "calc_position_embeddings": NoOp("positions are always computed; False is refused"),
    "reduce_memory_peak": NoOp("the size of a pass follows from the memory"),
    "use_liger_loss": NoOp("there is one fused loss, which is always used"),
    # AdamW, and how an update is cut
    "lr": to(1e-3),
    "batch_size": to(4),
    "mini_batch_size": to(4),
    "update_epochs": to(1),
    "max_grad_norm": to(0.01),
    "adam_beta1": to(0.5),
    "adam_beta2": to(0.9),
    "adam_eps": to(1e-2),
    "weight_decay": to(0.1),
    "router_aux_loss_coef": Proven("algorithms/test_router_loss.py::test_the_gradient_is_that_of_transformers"),
    "micro_batch_size_per_gpu": to(1),
    "max_model_len": to(12, _episodes=False),
    "seed": to(7),
    # sampling
    "group_size": to(2),
    "temperature": to(0.5),
    "top_p": to(0.5),
    "top_k": to(2),
    "min_p": to(0.3),
    "repetition_penalty": to(3.0),
    "max_output_tokens": to(3),
    "min_output_tokens": to(6),
    "reward_weights": Proven("algorithms/test_reward_weights.py::test_weights_decide_what_is_learned"),
    # the reference and the KL
    "use_separate_reference_adapter": to(False),
    "ref_sync_steps": to(2, beta=0.5),
    "ref_sync_alpha": to(0.2, ref_sync_steps=2, beta=0.5),
    "beta": to(0.5),
    "kl_estimator": to("k2", beta=0.5),
    "kl_placement": to("reward", beta=0.5),
    "use_kl_advantage_shaping": to(True, beta=0.5),
    "kl_clamp_value": to(1e-3, beta=0.5),
    "use_bias_correction_kl": to(False, beta=0.5, kl_placement="loss"),
    "kl_target": to(0.5, beta=0.5),
    "kl_horizon": to(20, kl_target=0.5, beta=0.5),
    # the surrogate
    "clip_coef": to(0.01),
    "dual_clip": to(1.01, clip_coef=0.01),
    "delta": to(1.05, clip_coef=0.01),
    "adv_clip_range": to(0.1),
    "entropy_coef": to(0.1),
    "vllm_importance_sampling_correction": to(False, **OTHER_ENGINE),
    "vllm_importance_sampling_cap": to(1.01, **OTHER_ENGINE),
    "vllm_importance_sampling_clip_min": to(0.99, **OTHER_ENGINE),
    "vllm_importance_sampling_mode": to("seq_mask", **OTHER_ENGINE),
    "off_policy_token_mask_bounds": to((0.99, 1.01), **OTHER_ENGINE),
    "off_policy_sequence_mask_threshold": to(0.0, **OTHER_ENGINE),
    "loss_type": to("gspo"),
    "loss_norm": to("token-mean"),
    "importance_sampling_level": to("trajectory"),
    "filter_zero_adv": to(True),
    "adv_filter_eps": to(0.9, filter_zero_adv=True),
    "overlong_cache_tokens": to(3),
    "mask_truncated": to(True),
    "top_entropy_quantile": to(0.3),
    # advantages of a group
    "adv_norm": to("mean_only"),
    "adv_eps": to(1.0),
    "whiten_advantages": to(True),
    "advantage_granularity": to("turn"),
    "turn_advantage_trajectory_fallback": to(False, advantage_granularity="turn"),
    "dynamic_sampling": Proven("algorithms/test_dapo.py::test_the_batch_is_refilled"),
    "max_sampling_rounds": Proven("algorithms/test_dapo.py::test_it_gives_up_after_its_rounds"),
    "clip_max": to(1.0, loss_type="cispo"),
    "clip_min": to(0.99, loss_type="cispo"),
}
OF_DATA: dict[str, Entry] = {
    "batch_size": to(2),
    "mini_batch_size": to(2),
    "max_model_len": to(20, max_output_tokens=None),
}
OWN: dict[str, dict[str, Entry]] = {
    "GSPO": {"importance_sampling_level": Refused("token")},
    "CISPO": {"clip_coef": to(0.01), "clip_max": to(1.0), "clip_min": to(0.99), "loss_norm": to("seq-mean-token-mean")},
    "RLOO": {
        "importance_sampling_level": Refused("token"),
        "kl_placement": to("loss", beta=0.5),
        "use_kl_advantage_shaping": to(True, kl_placement="loss", beta=0.5),
    },
    "DPPO": {"divergence": to("kl"), "divergence_limit": to(1e-3), "weight_max": to(1.0)},
    "REINFORCE": {
        "gamma": to(0.5),
        "advantage_estimator": to("reinforce++"),
        "ratio_pooling": to("sum", importance_sampling_level="trajectory"),
        "filter_zero_adv": to(True, adv_filter_eps=0.5),
    },
    "PPO": {
        "lr_actor": to(1e-3),
        "lr_critic": to(1e-4),
        "vf_coef": to(0.01),
        "critic_warmup_steps": to(2),
        "vf_clip_coef": to(None),
        "gamma": to(0.5),
        "gae_lambda": to(0.5),
        "turn_level_clip": to(False),
        "turn_ratio_pooling": to("mean"),
        "turn_value_reduction": to("mean"),
        "advantage_granularity": to("token"),
        "whiten_advantages": to(False),
        "hp_config": to(HyperparameterConfig(lr_actor=RLParameter(min=1e-4, max=1e-1))),
        "dual_clip": to(1.01, clip_coef=0.01),
        "delta": to(1.05, clip_coef=0.01),
        "kl_clamp_value": to(1e-3, beta=0.5),
        "use_kl_advantage_shaping": to(True, beta=0.5),
    },
    "DPO": {
        **OF_DATA,
        "loss_type": to("hinge"),
        "loss_weights": to((1.0, 0.1), loss_type=("sigmoid", "sft")),
        "nll_alpha": to(1.0),
        "label_smoothing": to(0.2),
        "discopop_tau": to(0.5, loss_type="discopop"),
        "simpo_gamma": to(2.0, loss_type="simpo"),
        "reference_free": to(True),
        "ld_alpha": to(0.1),
        "use_weighting": to(True),
    },
    "KTO": {
        **OF_DATA,
        "loss_type": to("apo_zero_unpaired"),
        "desirable_weight": to(2.0),
        "undesirable_weight": to(2.0),
    },
    "SFT": {**OF_DATA, "loss_type": to("dft"), "packing": to(False)},
}

SHARED: dict[str, Entry] = {
    "quantization_config": Proven("models/test_quantised.py::test_four_bits_compute_what_their_dequantised_weights_do"),
    "config_overrides": to({"attn_implementation": "eager"}, model_name="embedded"),
    "attn_implementation": to("eager"),
    "lora_target_scope": to("mlp"),
    "gradient_checkpointing": to(True),
    "activation_offload": Warned(True),
    "torch_compiler": Proven("models/test_compiled.py::test_a_machine_that_cannot_compile_is_told"),
    "use_liger_kernel": Refused(True),
    "use_sequence_packing": to(True, attn_implementation="eager"),
    "cast_logprobs_to_fp32": to(False, _bf16=True),
    "fused_logprobs_chunk_rows": to(16),
    "hf_generate_chunk_size": to(1),
    "use_vllm": Refused(True),
    "vllm_config": Proven("surface/test_agents_arguments.py::test_a_setting_of_vllm_acts"),
    "stop_sequences": Proven(
        "rollouts/test_generation_settings.py::test_a_completion_ends_with_the_token_that_completes_a_text"
    ),
    "use_memory_efficient_params": Proven(
        "rollouts/test_vllm_requests.py::test_the_base_comes_back_bit_for_bit_and_keeps_its_ties"
    ),
}


@cache
def facts_of(algorithm: str) -> Callable[..., Any]:
    return partial(agent_facts, ALGORITHMS[algorithm])


ACCEPTED = ("wrap", "clone", "calc_position_embeddings", "reduce_memory_peak", "use_liger_loss")
"""Documented keywords of agents that are taken and are no parameters."""


def cases() -> list[Any]:
    """Return every argument of every algorithm, those that are tried with another one already as nightly ones."""
    found = []
    for algorithm, cls in ALGORITHMS.items():
        for name in [n for n in cls.defaults() if n not in SharedOptions.model_fields]:
            first = algorithm == "GRPO" or name in OWN.get(algorithm, {}) or name not in AGENT
            marks = () if first else (pytest.mark.nightly,)
            found.append(pytest.param(algorithm, name, marks=marks, id=f"{algorithm}-{name}"))
    return found + [pytest.param("GRPO", name, id=f"GRPO-{name}") for name in ACCEPTED]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("algorithm", "name"), cases())
def test_an_agents_argument_acts(algorithm: str, name: str) -> None:
    check(OWN.get(algorithm, {}).get(name) or AGENT.get(name), name, facts_of(algorithm))


def test_a_config_is_the_same_as_its_keywords() -> None:
    given, keywords = agent_facts(GRPO, config=GRPO.Config(lr=1e-3, beta=0.5)), agent_facts(GRPO, lr=1e-3, beta=0.5)
    assert list(given) == list(keywords)


def test_an_agent_is_on_the_base_that_was_given() -> None:
    model, mine = random_model(), base()
    assert GRPO(actor_network=model, pad_token_id=PAD).runtime.base.model is model
    assert GRPO(runtime=mine, pad_token_id=PAD).runtime is mine
    assert GRPO(model_name="embedded").runtime.base.source == str(tiny_model_path())


# -- options of the base ----------------------------------------------------------------------------------------------


PROMPTS = [{"input_ids": torch.tensor([[5, 9, 3]])}, {"input_ids": torch.tensor([[7, 7, 2]])}]


def rows_of(seed: int = 0) -> RolloutBatch:
    draws, rows = torch.Generator().manual_seed(seed), []
    for k in range(8):
        said = torch.randint(2, VOCABULARY, (2 + k % 3,), generator=draws).tolist()
        rows.append(Trajectory([5, 9, 3], said, [True] * len(said), [-3.0] * len(said), [float(k % 4)], group=k // 4))
    return collate(rows, PAD)


class Work(TorchDispatchMode):
    """Counts operations with their shapes and types: what is computed, where the result is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [(tuple(a.shape), str(a.dtype)) for a in args if isinstance(a, torch.Tensor)]
        self.done[f"{func} {shapes}"] += 1
        return func(*args, **(kwargs or {}))


def work(_bf16: bool = False, **options: Any) -> Counter[str]:
    """Return what is computed for an agent, on a base with these options, that samples and learns once."""
    if "model_name" not in options:
        model = random_model(qwen2(num_hidden_layers=1))
        options["actor_network"] = model.bfloat16() if _bf16 else model
    agent = GRPO(pad_token_id=PAD, batch_size=8, max_output_tokens=2, **options)
    with Work() as counted:
        agent.get_action(PROMPTS, training=False)
        agent.learn(rows_of())
    return counted.done


@pytest.mark.parametrize("name", SharedOptions.model_fields)
def test_an_option_of_the_base_acts(name: str) -> None:
    check(SHARED.get(name), name, work)


VLLM: dict[str, Entry] = {
    "tensor_parallel_size": to(2),
    "gpu_memory_utilization": to(0.5),
    "max_num_seqs": to(8),
    "max_num_batched_tokens": to(64),
    "max_model_len": to(32),
    "max_loras": to(7),
    "max_lora_rank": to(64),
    "enforce_eager": to(False),
    "sleep_mode": to(True),
    "sleep_mode_level": Refused(2),
    "dtype": to("bfloat16"),
    "quantization": to("awq"),
    "vllm_model_name_or_path": to("other"),
    "kv_cache_dtype": to("fp8"),
    "kv_cache_memory_bytes": to(2**20),
    "enable_prefix_caching": to(False),
    "strip_multimodal_towers": to(True),
    "stop_sequences": to(["."]),
    "presence_penalty": to(1.0),
    "frequency_penalty": to(1.0),
    "engine_kwargs": Proven(
        "rollouts/test_generation_settings.py::test_engine_keywords_reach_vllm_beside_the_settings"
    ),
    "lora_staging_dir": Proven("rollouts/test_vllm_requests.py::test_a_staging_folder_of_one_s_own_is_kept"),
    "base_url": Proven("rollouts/test_vllm_server.py::test_a_server_that_answers_is_used"),
    "server_timeout": Proven("rollouts/test_vllm_server.py::test_nobody_there_is_a_sentence_with_the_command"),
    "request_timeout": Proven("surface/test_agents_arguments.py::test_a_server_samples_for_who_asks_for_it"),
    "probe_tokens": Proven("rollouts/test_vllm_engine.py::test_every_new_version_is_probed_and_nothing_else"),
    "probe_tolerance": Proven("rollouts/test_vllm_engine.py::test_a_wrong_adapter_stops_with_a_sentence"),
    "exams": Proven("rollouts/test_vllm_engine.py::test_exams_may_stay_with_the_torch_engine"),
}


def asked_of_vllm(**settings: Any) -> Any:
    """Return what vLLM is started with, and how it is asked for a sample."""
    config, started = VLLMConfig(**settings), list[Any]()
    runtime = base()
    runtime.base.source = "tiny"
    backend = ColocatedVLLM(runtime.base, config, SimpleNamespace(get_vocab=dict))
    vllm = SimpleNamespace(get_tokenizer=lambda: backend.tokenizer)
    backend._launched = lambda options: started.append(options) or vllm  # type: ignore[method-assign]  # not installed here
    backend.start(2, 8, None)
    return started, row_of(REQUEST, 1, adapter=None, room=64, eos=(1,), config=config).sampling


@pytest.mark.parametrize("name", VLLMConfig.model_fields)
def test_a_setting_of_vllm_acts(name: str) -> None:
    check(VLLM.get(name), name, asked_of_vllm)


def test_a_server_samples_for_who_asks_for_it() -> None:
    server = {"base_url": "http://localhost:9", "request_timeout": 7.0}
    agent = GRPO(actor_network=random_model(), pad_token_id=PAD, use_vllm=True, vllm_config=server)
    engine = agent.runtime.engine
    assert isinstance(engine, VLLMEngine)
    assert agent.use_vllm
    backend: Any = engine.backend
    assert (backend.url, backend._server._client.timeout.read) == ("http://localhost:9", 7.0)
