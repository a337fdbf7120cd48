"""The estimate of memory before a run: what it counts, and what it says where the memory does not suffice."""

import json
from typing import Any

import pytest
import torch

from agilerl.algorithms.forward import AgentRows, forward
from agilerl.config.base_model import SharedOptions
from agilerl.config.manifest import load_manifest
from agilerl.config.vllm import VLLMConfig
from agilerl.envs.core import Split
from agilerl.errors import ConfigError
from agilerl.models.slots import AdapterStore
from agilerl.planning import footprint
from agilerl.planning.footprint import head_bytes, layer_bytes, saved_bytes, working_bytes
from agilerl.planning.time import Widths
from agilerl.runtime import Runtime
from agilerl.sizes import CPU_ROWS, VLLM_CPU_CACHE
from agilerl.training import memory
from agilerl.training.setup import build
from tests.distributed.together import ends, started
from tests.models.test_layers import SavedBytes
from tests.models.two_agents import LENGTHS, make_runtime, train_pass
from tests.tiny_models import qwen2, random_model
from tests.training.small_runs import SMALL

WIDTHS = Widths(layers=3, hidden=8, query_width=12, kv_width=4, feed_forward=20, vocabulary=50, width=2)


def parts(*overrides: str) -> dict[str, float]:
    session = build(load_manifest(None, [*SMALL, *overrides]))
    return memory.estimate(session.config, session.population)


def longest_row(*overrides: str) -> int:
    population = build(load_manifest(None, [*SMALL, *overrides])).population
    limit = population.examiner.context_length
    panels: tuple[Split, ...] = ("exam", "test")
    return max(
        population.examiner.lengths(split).row(population.examiner.eval_max_new_tokens or limit, limit)
        for split in panels
    )


def test_a_layer_by_hand() -> None:
    # 4 x 8 + 3 x 12 + 2 x 4 + 4 x 20 numbers of 2 bytes
    assert layer_bytes(WIDTHS) == 156 * 2
    assert saved_bytes(WIDTHS, checkpointing=False) == 3 * 312
    assert saved_bytes(WIDTHS, checkpointing=True) == 3 * 8 * 2
    assert saved_bytes(WIDTHS, checkpointing=False, offload=True) == 0
    assert working_bytes(WIDTHS, restored=False) == 4 * (20 + 8) * 4
    assert working_bytes(WIDTHS, restored=True) == 4 * (20 + 8) * 4 + 312
    assert head_bytes(WIDTHS, 100, 16) == 3 * 16 * 50 * 4 + 3 * 100 * 8 * 2
    assert head_bytes(WIDTHS, 100) == 3 * 100 * 50 * 4 + 3 * 100 * 8 * 2


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_saves_what_is_counted(dtype: torch.dtype) -> None:
    saved = []
    for layers in (2, 5):
        runtime = make_runtime(random_model(qwen2(num_hidden_layers=layers, hidden_size=128)).to(dtype))
        counter = SavedBytes(runtime.base.model)
        with torch.autograd.graph.saved_tensors_hooks(counter, lambda tensor: tensor):
            train_pass(runtime)
        saved.append(counter.total)
    tokens = sum(-(-sum(own) // CPU_ROWS) * CPU_ROWS for own in LENGTHS)
    measured = (saved[1] - saved[0]) / 3 / tokens
    # In attention these short rows are padded by a quarter, to 136 tokens.
    assert layer_bytes(Widths.of(runtime.base)) == pytest.approx(measured, rel=0.1)


@pytest.mark.model
def test_the_estimate_follows_the_settings() -> None:
    plain = parts()
    less = {
        "training_activations": "network.gradient_checkpointing=true",
        "base": "network.quantization_config=nf4",
        "adapters": "training.pop_size=2",
        "decode_cache": "training.max_rows_in_flight=8",
        "rollouts": "algorithm.group_size=2",
    }
    for part, override in less.items():
        changed = parts(override)
        assert changed[part] < plain[part], part
    assert footprint.peak(plain) == sum(plain.values()) - min(plain["decode_cache"], plain["training_activations"])


@pytest.mark.model
@pytest.mark.parametrize(
    ("largest", "cure"),
    [
        ("base", "network.quantization_config=nf4"),
        ("training_activations", "gradient_checkpointing=true"),
        ("adapters", "lower training.pop_size"),
        ("decode_cache", "lower training.max_rows_in_flight"),
    ],
)
def test_what_does_not_fit_is_named_with_its_cure(largest: str, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    sizes = dict.fromkeys(("base", "adapters", "decode_cache", "training_activations", "rollouts"), 2**20)
    memory.check_memory(sizes, "cpu")
    with pytest.raises(ConfigError, match=f"most of it for {largest.replace('_', ' ')} .*{cure}"):
        memory.check_memory({**sizes, largest: 2**30}, "cpu")


def test_files_are_counted_as_they_will_lie_in_memory(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(3000))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2000)
    with pytest.raises(ConfigError, match=r"memory, .*base"):
        memory.check_weights(str(tmp_path), "cpu")
    memory.check_weights(str(tmp_path), "cpu", SharedOptions(quantization_config="nf4").quantization_config)


def test_an_agent_costs_16_bytes_a_number() -> None:
    layers = make_runtime(random_model()).store.layers
    store = AdapterStore(layers, max_rank=8)
    store.reserve(3)
    banks = (store.theta, store.grad, store.exp_avg, store.exp_avg_sq)
    size = sum(8 * (layer.in_features + layer.out_features) for layer in layers)
    assert sum(bank.numel() * bank.element_size() for bank in banks) / 3 <= 1.01 * 16 * size


PPO = "{name: PPO, lr_actor: 1e-3, lr_critic: 1e-3, group_size: 4, batch_size: 8, max_output_tokens: 6}"
CRITIC = (f"algorithm={PPO}", "mutation.rl_hp_selection={lr_actor: {}, lr_critic: {}}")


@pytest.mark.model
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.micro_batch_size_per_gpu=3",),
        ("algorithm.batch_size=16", "training.max_tokens_in_flight=4096"),
        ("algorithm.batch_size=16", "training.max_tokens_in_flight=64"),
        CRITIC,
        (*CRITIC, "training.max_tokens_in_flight=64"),
    ],
)
def test_no_forward_pass_of_an_update_is_larger_than_estimated(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    held: list[int] = []
    added = memory.footprint

    def counting(runtime: Runtime, rows: list[AgentRows], **options: Any) -> Any:
        counted.append(sum(part.batch.distinct_tokens for part in rows) if torch.is_grad_enabled() else 0)
        return forward(runtime, rows, **options)

    def noted(*parts: Any, tokens: int, **others: Any) -> dict[str, float]:
        held.append(tokens)
        return added(*parts, tokens=tokens, **others)

    # Groups of equal rewards would not be computed without a reference.
    beta = () if overrides[: len(CRITIC)] == CRITIC else ("algorithm.beta=0.01",)
    session = build(load_manifest(None, [*SMALL, *overrides, *beta]))
    monkeypatch.setattr("agilerl.algorithms.update.forward", counting)
    monkeypatch.setattr(memory, "footprint", noted)
    memory.estimate(session.config, session.population)
    session.population.learn(session.population.rollout())
    # Estimated are rows of the longest length, each with a prompt of its own.
    assert 0 < max(counted) <= held[0]


DIVIDED = """
import json, sys
from agilerl.config.manifest import load_manifest
from agilerl.processes import joined
from agilerl.training.memory import estimate
from agilerl.training.setup import build

with joined() as processes:
    for size in (4, 3, 1):
        config = load_manifest(None, [*sys.argv[1:], f"training.pop_size={size}"])
        print(json.dumps(estimate(config, build(config, processes=processes).population)))
"""


@pytest.mark.model
@pytest.mark.processes
def test_a_process_counts_what_it_holds_itself() -> None:
    settings = [*SMALL, "training.max_tokens_in_flight=65536"]
    with started(2, "-c", DIVIDED, *settings) as children:
        first, second = ends(children)
    assert first.code == second.code == 0, first.errors + second.errors
    assert first.output == second.output
    of_four, of_three, of_one = map(json.loads, first.output.splitlines())
    # All agents are held and known by both processes; two of four are sampled and trained by each, and of three by one.
    two = parts(*settings, "training.pop_size=2")
    for size, divided in ((4, of_four), (3, of_three)):
        alone = parts(*settings, f"training.pop_size={size}")
        whole = {name: alone[name] for name in ("base", "adapters", "rollouts")}
        assert divided == whole | {name: two[name] for name in ("decode_cache", "training_activations")}
    alone = parts(*settings, "training.pop_size=1")
    assert alone["decode_cache"] / 2 <= of_one["decode_cache"] < alone["decode_cache"]


def test_processes_of_one_machine_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    memory.check_memory({"base": 400}, "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    memory.check_memory({"base": 400}, "cpu")
    with pytest.raises(ConfigError, match=r"2 processes .*start fewer"):
        memory.check_memory({"base": 401}, "cpu")
    memory.check_memory({"base": 800}, "cuda:1")  # a GPU of its own
    with pytest.raises(ConfigError, match="rollouts"):  # which lie in the machine's memory
        memory.check_memory({"base": 800, "rollouts": 401}, "cuda:1")


def test_vllm_keeps_to_its_share_of_a_gpu() -> None:
    share = {"gpu_memory_utilization": 0.5}
    assert memory.vllm_part(VLLMConfig(**share), 300, 1000, offload=True) == {"vllm": 500}
    sleeping = VLLMConfig(**share, sleep_mode=True)
    assert memory.vllm_part(sleeping, 300, 1000, offload=False) == {"vllm_awake": 500}
    assert memory.vllm_part(sleeping, 300, 1000, offload=True) == {"vllm_alone": 500}
    fixed = VLLMConfig(**share, kv_cache_memory_bytes=70, tensor_parallel_size=2)
    assert memory.vllm_part(fixed, 300, 1000, offload=True) == {"vllm": 150 + 70}


def test_vllm_on_a_cpu_holds_weights_and_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert memory.vllm_part(VLLMConfig(), 300, None, offload=False) == {"vllm": 300 + VLLM_CPU_CACHE}
    given = VLLMConfig(kv_cache_memory_bytes=70)
    assert memory.vllm_part(given, 300, None, offload=False) == {"vllm": 370}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert memory.vllm_part(given, 300, None, offload=False) == {"vllm": 300 + 3 * 2**30}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("vllm", 10 + 40 + 30 + 500), ("vllm_awake", 10 + 40 + 500), ("vllm_alone", 10 + 500)],
)
def test_vllm_takes_turns_where_it_sleeps(name: str, expected: int) -> None:
    sizes = {"base": 40, "adapters": 10, "training_activations": 30, name: 500}
    assert footprint.peak(sizes) == expected


def test_the_margin_is_for_what_vllm_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    memory.check_memory({"base": 400, "adapters": 80, "training_activations": 300, "vllm_alone": 900}, "cuda:0")
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.*sleep_mode"):
        memory.check_memory({"base": 400, "adapters": 80, "training_activations": 300, "vllm": 900}, "cuda:0")
    memory.check_memory({"base": 400, "vllm": 500}, "cuda:0")
    with pytest.raises(ConfigError):
        memory.check_memory({"base": 401, "vllm": 500}, "cuda:0")


@pytest.mark.model
def test_where_vllm_samples_the_torch_engine_has_no_cache() -> None:
    session = build(load_manifest(None, SMALL))
    runtime, sampling = session.population.runtime, SharedOptions(use_vllm=True)
    own = memory.estimate(session.config, session.population)["decode_cache"]
    expected = {
        (): {"vllm": runtime.base.parameters * 4 + 2**30},
        (("dtype", "bfloat16"),): {"vllm": runtime.base.parameters * 2 + 2**30},
        (("exams", "torch"), ("kv_cache_memory_bytes", 7)): {
            "vllm": runtime.base.parameters * 4 + 7,
            "decode_cache": own,
        },
        (("base_url", "http://localhost:8000"),): {},
    }
    for settings, sizes in expected.items():
        runtime.options = sampling.model_copy(update={"vllm_config": VLLMConfig(**dict(settings))})
        found = memory.estimate(session.config, session.population)
        assert {name: found[name] for name in ("vllm", "decode_cache") if name in found} == sizes
