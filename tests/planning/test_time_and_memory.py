"""The formulas of time and memory: numbers computed by hand, and what must grow or shrink with what."""

from dataclasses import replace

import numpy as np
import pytest

from agilerl.planning.footprint import (
    cached_tokens,
    head_bytes,
    layer_bytes,
    memory,
    pass_tokens,
    peak,
    saved_bytes,
    working_bytes,
)
from agilerl.planning.machines import GPUS, Costs, Machine, PhaseCost, gpu
from agilerl.planning.time import (
    ModelShape,
    Split,
    Work,
    Workload,
    adapter_parameters,
    seconds,
    tokens_in_flight,
    work,
)
from agilerl.sizes import padded_length

SHAPE = ModelShape(
    name="small",
    layers=2,
    hidden=4,
    query_width=4,
    kv_width=2,
    feed_forward=8,
    vocabulary=10,
    parameters=200,
    linear=100,
    linear_held=100,
    adapted=6,
    adapted_layers=3,
    context=128,
)
LOAD = Workload(
    agents=2, rank=5, prompts=1, group=2, prompt=32, completion=32, longest=32, window=1, exam_prompts=3, iterations=4
)
# D = 6 * 5 = 30, P_head = 4 * 10 = 40, kappa = 2 * 2 * 2 * 4 = 32, P w = 140 * 4 = 560.


def test_sizes_of_a_shape() -> None:
    assert adapter_parameters(SHAPE, 5) == 30
    assert (SHAPE.head, SHAPE.kv_bytes, SHAPE.weight_bytes, SHAPE.read_bytes) == (40, 32, 800, 560)
    four_bit = replace(SHAPE, linear_width=0.5)
    assert (four_bit.weight_bytes, four_bit.read_bytes) == (450, 210)


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


def test_processes_divide_rows_and_send_gradients() -> None:
    alone, two = work(SHAPE, LOAD), work(SHAPE, LOAD, Split(processes=2))
    assert alone["train"].flops / 2 <= two["train"].flops < alone["train"].flops  # each computes its rows' prompts
    assert two["decode"].flops == alone["decode"].flops / 2
    assert (alone["optimizer"].link, two["optimizer"].link) == (0, 2 * 2 * 4 * 60 / 2)  # 2 steps of 2 (p-1)/p N D
    islands = work(SHAPE, LOAD, Split(islands=2))
    assert islands["train"].flops == alone["train"].flops / 2
    assert islands["optimizer"].link == 0


def test_a_sharded_base_is_collected_in_every_pass() -> None:
    load = replace(LOAD, window=2)
    whole, parts = (work(SHAPE, load, Split(processes=2, sharded=s)) for s in (False, True))
    assert parts["decode"].link - whole["decode"].link == 32 * 400 / 2
    assert parts["train"].link - whole["train"].link == 400  # a pack of one row for each agent: 1 call, 2 passes


def test_tensor_parallel_decoding_reads_less_and_sends_sums() -> None:
    alone, found = (work(SHAPE, LOAD, Split(tensor_parallel=t, vllm=True))["decode"] for t in (1, 2))
    assert (found.flops, found.bytes, found.traffic) == (alone.flops / 2, alone.bytes / 2, alone.traffic / 2)
    assert found.link == 2 * 2 * 128 * 4 * 4 * 1  # two sums a layer, 2 (t - 1) / t of H w a token
    assert alone.link == 0


def test_floor_is_the_slowest_of_four() -> None:
    machine = Machine("m", flops=100.0, bandwidth=10.0, memory=1, link=2.0, disk=4.0)
    assert Work(flops=500, bytes=20, link=1, disk=1).floor(machine) == 5
    assert Work(flops=500, bytes=60).floor(machine) == 6
    assert Work(flops=500, link=14).floor(machine) == 7
    assert Work(disk=32).floor(machine) == 8
    costs = Costs({"train": PhaseCost(2.0, 0.5, 0.25)}, "")
    assert seconds("train", Work(flops=500, traffic=20, layer_calls=4), machine, costs) == 2 * 5 + 0.5 * 2 + 1
    assert seconds("exam_train", Work(flops=500), machine, costs) == 10


def test_memory() -> None:
    parts = memory(SHAPE, LOAD)
    assert parts["base"] == 800
    assert parts["adapters"] == 3 * 16 * 30  # two agents and the elite; parameters, gradients, two moments
    assert parts["decode_cache"] == 6 * 64 * 32 + 6 * 10 * 28  # the exam's 2 * 3 rows
    # 2 rows of 64 tokens, half of them completions; the head has gone before a layer's backward begins
    at_work = max(128 * working_bytes(SHAPE, restored=False), head_bytes(SHAPE, 64))
    assert parts["training_activations"] == 128 * saved_bytes(SHAPE, checkpointing=False) + at_work
    assert peak(parts) == 800 + 1440 + parts["training_activations"]
    assert memory(SHAPE, LOAD, Split(processes=2, sharded=True))["base"] == 600  # embeddings and head stay whole


def test_the_keys_and_values_of_a_prompt_exist_once_for_its_group() -> None:
    # 64 rows in groups of 8: 8 prompts of 256 tokens, and 64 completions of 32.
    assert cached_tokens(64, 8, 0, 256, 288) == 8 * 256 + 64 * 32
    assert cached_tokens(64, 8, 10, 256, 288) == 8 * 256 + 64 * 32
    assert cached_tokens(64, 8, 40, 256, 288) == 40 * 288  # an exam's rows have a prompt each
    assert cached_tokens(64, 8, 10, 256, 288, shared=False) == 64 * 288
    grouped, alone = (memory(SHAPE, replace(LOAD, exam_prompts=1, group=g))["decode_cache"] for g in (4, 1))
    drawn = 10 * 28  # for each row
    assert grouped == (8 * 32 + 2 * 32) * 32 + 8 * drawn  # two agents, a prompt and four completions each
    assert alone == 2 * 64 * 32 + 2 * drawn


def test_a_training_forward_holds_a_micro_batch_of_each_agent() -> None:
    one = Split()
    assert tokens_in_flight(LOAD, one) == 2 * 64  # a step is one row
    assert tokens_in_flight(replace(LOAD, window=9), one) == 2 * (32 + 2 * 32)  # an agent has two, with one prompt
    assert tokens_in_flight(replace(LOAD, window=2, micro_tokens=64), one) == 2 * 64
    assert tokens_in_flight(replace(LOAD, window=2, max_tokens=192), one) == 192
    assert tokens_in_flight(replace(LOAD, window=2, max_tokens=64), one) == 32 + 2 * 32  # it is never divided
    assert tokens_in_flight(replace(LOAD, critic=True), one) == 2 * 2 * 64  # in the same forward
    assert tokens_in_flight(replace(LOAD, window=2), Split(processes=2)) == 2 * 64


def test_a_forward_without_gradient_can_be_the_larger_one() -> None:
    many = replace(LOAD, prompts=512, agents=1)  # a step is one row, but log-probs are those of 2,048 tokens at a time
    scored = 2048 * layer_bytes(SHAPE) + head_bytes(SHAPE, 2048)
    assert memory(SHAPE, many)["training_activations"] == scored
    assert memory(SHAPE, replace(many, window=512))["training_activations"] > scored


def test_checkpointing_takes_less_memory() -> None:
    whole, again = (memory(SHAPE, replace(LOAD, checkpointing=c))["training_activations"] for c in (False, True))
    assert again < whole


def test_vllm_holds_a_base_of_its_own_and_takes_turns() -> None:
    split = Split(vllm=True)
    parts = memory(SHAPE, LOAD, split)
    assert "decode_cache" not in parts
    assert parts["vllm_alone"] == 800 + 6 * 64 * 32
    assert peak(parts) == parts["adapters"] + max(parts["vllm_alone"], parts["base"] + parts["training_activations"])
    together = memory(SHAPE, LOAD, replace(split, takes_turns=False))
    assert peak(together) == sum(together.values()) == sum(parts.values())


GROWS = {"agents": 4, "prompts": 2, "group": 4, "prompt": 64, "rank": 10, "epochs": 2, "critic": True}


@pytest.mark.parametrize("name", GROWS)
def test_more_of_anything_is_more_work_and_never_less_memory(name: str) -> None:
    machine, more = gpu("h200"), replace(LOAD, **{name: GROWS[name]})
    before, after = work(SHAPE, LOAD), work(SHAPE, more)
    assert all(after[phase].floor(machine) >= before[phase].floor(machine) for phase in before)
    assert after["train"].floor(machine) > before["train"].floor(machine)
    assert peak(memory(SHAPE, more)) >= peak(memory(SHAPE, LOAD))


@pytest.mark.parametrize("name", ["flops", "bandwidth", "link"])
def test_a_quicker_machine_is_never_slower(name: str) -> None:
    machine = gpu("l4")
    quicker = replace(machine, **{name: 2 * getattr(machine, name)})
    for found in work(SHAPE, LOAD, Split(processes=2, sharded=True)).values():
        assert found.floor(quicker) <= found.floor(machine)


def test_data_sheets_are_of_dense_products() -> None:
    for sheet in GPUS.values():
        assert 1e14 < sheet.flops < 3e15
        assert sheet.source.startswith("NVIDIA")
        assert sheet.flops / sheet.bandwidth > 100


def test_the_size_of_a_pass_goes_by_the_model_and_the_device() -> None:
    small, large = replace(SHAPE, layers=1), replace(SHAPE, layers=400, feed_forward=4000)
    token = saved_bytes(large, checkpointing=False)
    assert pass_tokens(small, checkpointing=False) == 2048  # of a CPU's caches
    assert pass_tokens(large, checkpointing=False) == 512
    assert pass_tokens(large, checkpointing=False, memory=4e4 * token) == 10_000
    assert pass_tokens(large, checkpointing=False, memory=1e15) == 2**16
    assert pass_tokens(large, checkpointing=True) == 2048  # of which only each layer's input is saved
