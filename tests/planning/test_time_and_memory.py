"""The formulas of time and memory: numbers computed by hand, and what must grow or shrink with what."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from agilerl.planning.footprint import cached_tokens, pass_size, saved_bytes, working_bytes
from agilerl.planning.time import (
    Machine,
    ModelShape,
    PhaseCost,
    Work,
    Workload,
    adapter_parameters,
    seconds,
    tokens_in_flight,
    work,
)
from agilerl.sizes import padded_length

SHAPE = ModelShape(
    layers=2,
    hidden=4,
    query_width=4,
    kv_width=2,
    feed_forward=8,
    vocabulary=10,
    linear=100,
    linear_bytes=400,
    adapted=6,
)
LOAD = Workload(agents=2, rank=5, prompts=1, group=2, prompt=32, completion=32, window=1, exam_prompts=3)
# D = 6 * 5 = 30, P_head = 4 * 10 = 40, kappa = 2 * 2 * 2 * 4 = 32, P w = 140 * 4 = 560.


def test_sizes_of_a_shape() -> None:
    assert adapter_parameters(SHAPE, 5) == 30
    assert (SHAPE.head, SHAPE.kv_bytes, SHAPE.read_bytes) == (40, 32, 560)
    assert replace(SHAPE, linear_bytes=50).read_bytes == 210  # in 4 bits


@pytest.mark.parametrize(("length", "expected"), [(0.5, 32), (32, 32), (33, 64), (100, 128)])
def test_lengths_are_padded(length: float, expected: int) -> None:
    assert padded_length(length) == expected


def test_prefill() -> None:
    found = work(SHAPE, LOAD)["prefill"]
    # 2 prompts of 32 tokens: 64 * 2 * (100 + 30), heads 2 * 2 * 40, attention 2 * (2 * 2 * 4 * 32^2)
    assert found.flops == 64 * 260 + 160 + 2 * 16_384
    assert (found.bytes, found.layer_calls) == (560, 2)


def test_decode() -> None:
    found = work(SHAPE, LOAD)["decode"]
    # 4 rows of 32 tokens that see 32 + 16: 128 * (2 * 140 + 2 * 30 + 4 * 2 * 4 * 48)
    assert found.flops == 128 * (280 + 60 + 1536)
    # 32 steps of P w + 2 adapters of 30 * 4 bytes, and 128 tokens that read 32 bytes of 16 tokens, and of half a prompt
    assert found.bytes == 32 * (560 + 240) + 128 * (16 + 32 / 2) * 32
    assert found.layer_calls == 64


def test_rows_that_only_fill_a_batch_have_work_too() -> None:
    plain, filled = work(SHAPE, LOAD), work(SHAPE, replace(LOAD, row_multiple=16))
    assert filled["decode"].flops == plain["decode"].flops * 16 / 4
    assert filled["prefill"] == plain["prefill"]
    assert filled["train"] == plain["train"]


def test_decoding_in_two_batches_reads_the_weights_twice() -> None:
    one, two = work(SHAPE, LOAD)["decode"], work(SHAPE, replace(LOAD, max_rows=2))["decode"]
    assert two.flops == one.flops
    assert two.bytes - one.bytes == 32 * 800
    assert two.layer_calls == 128


def test_logprobs_count_only_the_passes_that_are_needed() -> None:
    assert work(SHAPE, LOAD)["logprobs"] == Work()
    # 2 prompts and 4 completions of 32 tokens: 192 * 2 * 100 + 128 * 2 * 40, and 2 * 2 * 4 times, for each agent, the
    # prompt's 32^2, and 32^2 + 2 * 32 * 32 of each of its 2 completions, which see the prompt as well
    reference = work(SHAPE, replace(LOAD, reference=True))["logprobs"]
    assert reference.flops == 38_400 + 10_240 + 2 * 16 * (1024 + 2 * 3072)
    old = work(SHAPE, replace(LOAD, old_pass=True))["logprobs"]
    assert old.flops == reference.flops + 192 * 2 * 30


def test_a_prompt_counts_once_for_all_its_rows_of_a_step() -> None:
    load = replace(LOAD, prompts=10, group=8)
    assert [load.different_prompts(rows) for rows in (0, 1, 80)] == pytest.approx([0, 1, 10])
    draws = [np.random.default_rng(seed).permutation(80)[:16] // 8 for seed in range(2000)]
    assert load.different_prompts(16) == pytest.approx(np.mean([len(set(drawn)) for drawn in draws]), rel=0.01)
    assert load.tokens(80) == 80 * 32 + 10 * 32
    assert load.tokens(1) == pytest.approx(64)
    begun = replace(load, common=20)  # once in each of the passes
    assert begun.tokens(80) == 80 * 32 + 10 * 12 + 20 * (80 * 32 + 10 * 12) / (2048 - 20)
    assert (begun.tokens(1), begun.tokens(0)) == (pytest.approx(64), 0)
    prefill = (work(SHAPE, one)["prefill"] for one in (load, begun))
    assert next(prefill).flops - next(prefill).flops == LOAD.agents * 9 * 20 * 2 * (100 + 30)
    whole, halves = (work(SHAPE, replace(load, window=window))["train"] for window in (80, 40))
    assert whole.flops < halves.flops < 2 * whole.flops


def test_train() -> None:
    found = work(SHAPE, LOAD)["train"]
    # 4 P_lin T + 4 P_head T_c + 6 D T + 6 L d_q sum s^2
    assert found.flops == 4 * 100 * 256 + 4 * 40 * 128 + 6 * 30 * 256 + 6 * 2 * 4 * 4 * 64**2
    # One row of one agent a window: a forward holds both agents' row, 2 * 64 tokens; 2 passes, each twice P w.
    assert found.bytes == 2 * 2 * 560
    again = work(SHAPE, replace(LOAD, checkpointing=True))["train"]
    assert again.flops == found.flops + 2 * 100 * 256 + 2 * 30 * 256 + 2 * 2 * 4 * 4 * 64**2
    assert work(SHAPE, replace(LOAD, epochs=3))["train"].flops == 3 * found.flops


def test_optimizer_evolve_and_checkpoint() -> None:
    found = work(SHAPE, LOAD)
    assert found["optimizer"].bytes == 2 * 30 * 2 * 30  # 2 steps, 30 N D
    assert found["evolve"].bytes == 2 * 8 * 4 * 30  # 4 banks read and written
    assert found["checkpoint"].disk == 2 * 3 * 4 * 30
    assert work(SHAPE, replace(LOAD, slots=2))["checkpoint"].disk == 2 * found["checkpoint"].disk


def test_algorithms_that_learn_from_data_decode_in_exams_only() -> None:
    found = work(SHAPE, replace(LOAD, samples=False))
    assert found["prefill"] == found["decode"] == Work()
    assert found["exam_decode"].flops > 0


def test_floor_is_the_slowest_of_three() -> None:
    machine = Machine(flops=100.0, bandwidth=10.0, disk=4.0)
    assert Work(flops=500, bytes=20, disk=1).floor(machine) == 5
    assert Work(flops=500, bytes=60).floor(machine) == 6
    assert Work(disk=32).floor(machine) == 8


def test_seconds_are_floor_traffic_and_calls() -> None:
    machine, phases = Machine(flops=100.0, bandwidth=10.0, disk=4.0), set(work(SHAPE, LOAD))
    costs = dict.fromkeys((p.removeprefix("exam_") for p in phases), PhaseCost(2.0, 0.5, 0.25))
    spent = seconds(SHAPE, LOAD, machine, costs)
    assert set(spent) == phases
    for phase, done in work(SHAPE, LOAD).items():
        assert spent[phase] == 2 * done.floor(machine) + 0.5 * done.traffic / 10 + done.layer_calls / 4


def test_the_keys_and_values_of_a_prompt_exist_once_for_its_group() -> None:
    # 64 rows in groups of 8: 8 prompts of 256 tokens, and 64 completions of 32.
    assert cached_tokens(64, 8, 0, 256, 288) == 8 * 256 + 64 * 32
    assert cached_tokens(64, 8, 10, 256, 288) == 8 * 256 + 64 * 32
    assert cached_tokens(64, 8, 40, 256, 288) == 40 * 288  # an exam's rows have a prompt each
    assert cached_tokens(64, 8, 10, 256, 288, shared=False) == 64 * 288


def test_a_training_forward_holds_a_micro_batch_of_each_agent() -> None:
    assert tokens_in_flight(LOAD) == 2 * 64  # a step is one row
    assert tokens_in_flight(replace(LOAD, window=9)) == 2 * (32 + 2 * 32)  # an agent has two, with one prompt
    assert tokens_in_flight(replace(LOAD, window=2, micro_tokens=64)) == 2 * 64
    assert tokens_in_flight(replace(LOAD, window=2, max_tokens=192)) == 192
    assert tokens_in_flight(replace(LOAD, window=2, max_tokens=64)) == 32 + 2 * 32  # it is never divided
    assert tokens_in_flight(replace(LOAD, critic=True)) == 2 * 2 * 64  # in the same forward


GROWS = {"agents": 4, "prompts": 2, "group": 4, "prompt": 64, "rank": 10, "epochs": 2, "critic": True}


@pytest.mark.parametrize("name", GROWS)
def test_more_of_anything_is_more_work(name: str) -> None:
    machine, more = Machine(1e15, 4e12), replace(LOAD, **{name: GROWS[name]})
    before, after = work(SHAPE, LOAD), work(SHAPE, more)
    assert all(after[phase].floor(machine) >= before[phase].floor(machine) for phase in before)
    assert after["train"].floor(machine) > before["train"].floor(machine)


def test_the_size_of_a_pass_goes_by_the_model_and_the_device() -> None:
    small, large = replace(SHAPE, layers=1), replace(SHAPE, layers=400, feed_forward=4000)
    cpu = partial(pass_size, base=0.0, gpu=False, checkpointing=False)
    assert cpu(small, memory=1e12).tokens == 2048  # of a CPU's caches
    assert cpu(small, memory=1e12).whole == 2**16
    assert cpu(large, memory=1e9)[:2] == (512, 512)  # no fewer, however little memory there is
    token = 1.15 * saved_bytes(large, checkpointing=False) + working_bytes(large, restored=False)
    assert cpu(large, memory=3.0001e4 * token)[:2] == (512, 10_000)
    assert pass_size(large, base=0.0, memory=3.0001e4 * token, gpu=True, checkpointing=False)[:2] == (10_000, 10_000)
    # With gradient checkpointing only each layer's input is saved, and without gradient nothing.
    little = cpu(large, memory=300 * token)
    assert little.whole < little.recomputed < little.unsaved < 2**16
    recomputed = pass_size(large, base=0.0, memory=300 * token, gpu=False, checkpointing=True)
    assert (recomputed.tokens, recomputed.whole) == (2048, little.recomputed)


def test_a_pass_leaves_room_for_the_base_and_for_other_processes() -> None:
    large = replace(SHAPE, layers=400, feed_forward=4000)
    token = 1.15 * saved_bytes(large, checkpointing=False) + working_bytes(large, restored=False)
    memory = 3.0001e4 * token
    size = partial(pass_size, large, memory=memory, gpu=False, checkpointing=False)
    assert [size(base=0.0, processes=n).whole for n in (1, 2, 4)] == [10_000, 9_000, 4_500]
    for base, processes in product((0.0, 0.2, 0.5, 0.79, 0.9), (1, 2, 4)):
        whole = size(base=base * memory, processes=processes).whole
        assert whole == 512 or processes * (base * memory + whole * token) <= 0.8 * memory
