"""The search for a layout: what is proposed fits, is the quickest, and what cannot be is said with what would do."""

from dataclasses import replace
from itertools import pairwise

import pytest

from agilerl.errors import ConfigError
from agilerl.planning.footprint import SHARE
from agilerl.planning.layout import forecast, named, proposed
from agilerl.planning.machines import GPU_COSTS, gpu
from agilerl.planning.time import ModelShape, Split, Workload

SEVEN = ModelShape(
    name="7B",
    layers=28,
    hidden=3584,
    query_width=3584,
    kv_width=512,
    feed_forward=18944,
    vocabulary=152064,
    parameters=7_615_616_512,
    linear=6_525_000_000,
    linear_held=6_525_000_000,
    adapted=28 * 105_984,
    adapted_layers=196,
    context=32768,
    width=2.0,
    linear_width=2.0,
)
SEVENTY = replace(
    SEVEN,
    name="70B",
    layers=80,
    hidden=8192,
    query_width=8192,
    kv_width=1024,
    feed_forward=28672,
    vocabulary=128256,
    parameters=70_553_706_496,
    linear=68_450_000_000,
    linear_held=68_450_000_000,
    adapted=80 * 178_176,
)
LOAD = Workload(
    agents=8,
    rank=16,
    prompts=16,
    group=8,
    prompt=256,
    completion=512,
    longest=512,
    window=128,
    exam_prompts=64,
    iterations=4,
)


def test_the_proposal_fits_and_is_the_quickest() -> None:
    machine = gpu("h200")
    found = proposed(SEVEN, LOAD, machine, GPU_COSTS, 8)
    assert found.best.peak <= SHARE * machine.memory
    assert all(found.best.generation <= 1.03 * other.generation for other in found.others)
    assert [o.generation for o in found.others] == sorted(o.generation for o in found.others)
    assert found.best.split == Split(islands=8)
    assert len(found.reasons) == 3


def test_a_proposal_is_what_forecast_says_of_it() -> None:
    machine = gpu("h200")
    best = proposed(SEVEN, LOAD, machine, GPU_COSTS, 8).best
    assert forecast(SEVEN, best.load, machine, GPU_COSTS, best.split) == best


@pytest.mark.parametrize("name", ["l40s", "a100-80", "h100", "h200", "b200"])
def test_batch_sizes_keep_within_the_memory_of_each_device(name: str) -> None:
    machine = gpu(name)
    found = proposed(SEVEN, LOAD, machine, GPU_COSTS, 4)
    for option in (found.best, *found.others):
        assert option.peak <= SHARE * machine.memory
        assert option.load.max_tokens >= 768
        assert option.split.devices <= 4


def test_more_devices_never_take_longer() -> None:
    times = [proposed(SEVEN, LOAD, gpu("h200"), GPU_COSTS, count).best.generation for count in (1, 2, 4, 8, 16)]
    assert all(after <= before * 1.03 for before, after in pairwise(times))
    assert times[3] < times[0] / 1.5  # a decoding step has as many calls on each of them


def test_one_agent_on_eight_devices_is_one_island() -> None:
    best = proposed(SEVEN, replace(LOAD, agents=1), gpu("h200"), GPU_COSTS, 8).best
    assert best.split.islands == 1
    assert best.split.processes > 1


def test_no_island_is_without_agents() -> None:
    found = proposed(SEVEN, replace(LOAD, agents=3), gpu("h200"), GPU_COSTS, 8)
    assert all(option.split.islands <= 3 for option in (found.best, *found.others))


def test_what_saves_nothing_is_not_asked_for() -> None:
    tiny = replace(SEVEN, layers=2, linear=10**6, linear_held=10**6, parameters=10**6, adapted=1000, vocabulary=1000)
    small = replace(LOAD, agents=1, prompts=1, group=2, exam_prompts=1, prompt=20, completion=10, longest=10)
    assert proposed(tiny, small, gpu("h200"), GPU_COSTS, 8).best.split.devices == 1


def test_a_base_that_is_too_large_for_one_is_sharded() -> None:
    found = proposed(SEVENTY, LOAD, gpu("h100"), GPU_COSTS, 8)
    assert found.best.split.sharded
    whole = SEVENTY.weight_bytes - SEVENTY.linear_bytes
    assert found.best.memory["base"] == pytest.approx(SEVENTY.linear_bytes / found.best.split.processes + whole)
    assert any("needs" in sentence and "base" in sentence for sentence in found.refused)
    # Activations of 80 layers would not fit beside it, so they are computed again.
    assert found.best.load.checkpointing
    assert "without it nothing fits" in found.reasons[-1]


def test_a_quantised_base_is_never_sharded() -> None:
    found = proposed(replace(SEVEN, linear_width=0.5625), LOAD, gpu("h100"), GPU_COSTS, 8)
    assert not any(option.split.sharded for option in (found.best, *found.others))


def test_each_process_decodes_with_a_vllm_of_its_own_or_not_at_all() -> None:
    found = proposed(SEVEN, replace(LOAD, agents=1), gpu("h200"), GPU_COSTS, 8, vllm=True)
    assert found.best.split.vllm
    options = (found.best, *found.others)
    assert {o.split.tensor_parallel for o in options if o.split.processes * o.split.islands > 1} == {1}
    assert {o.split.tensor_parallel for o in options} == {1, 2, 4, 8}
    assert max(o.split.processes for o in options) == 8
    assert not any(o.split.sharded for o in options)
    with pytest.raises(ConfigError, match=r"algorithm\.use_vllm=false"):
        proposed(SEVENTY, LOAD, gpu("h100"), GPU_COSTS, 8, vllm=True)
    proposed(SEVENTY, LOAD, gpu("h100"), GPU_COSTS, 8)


def test_what_cannot_be_is_said_with_what_would_do() -> None:
    two = replace(LOAD, agents=2)
    with pytest.raises(ConfigError) as raised:
        proposed(SEVENTY, two, gpu("h100"), GPU_COSTS, 1)
    sentence = str(raised.value)
    for words in ("70B", "2 agents", "does not fit on 1 x h100", "sharded", "4 of these", "nf4", "base 131.4 GiB"):
        assert words in sentence
    # What it says would do, does; half of it does not.
    assert proposed(SEVENTY, two, gpu("h100"), GPU_COSTS, 4).best.split.sharded
    assert proposed(replace(SEVENTY, linear_width=0.5625), two, gpu("h100"), GPU_COSTS, 1).best.split.devices == 1
    with pytest.raises(ConfigError):
        proposed(SEVENTY, two, gpu("h100"), GPU_COSTS, 2)


def test_between_machines_an_island_sends_more_slowly() -> None:
    inside, across = (
        forecast(SEVENTY, LOAD, gpu("h100"), GPU_COSTS, Split(processes=count, sharded=True)) for count in (8, 16)
    )
    assert across.floors["decode"] > 2 * inside.floors["decode"]


def test_layouts_in_words() -> None:
    assert named(Split()) == "1 island of 1 process"
    assert named(Split(tensor_parallel=4, vllm=True)) == "1 island of 1 process, vLLM over 4 devices"
    assert named(Split(2, 4, True)) == "2 islands of 4 processes, the base sharded over them"
