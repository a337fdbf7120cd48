"""Memory that runs out at any point: the same gradient in smaller passes, the same tokens with fewer rows in flight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import DPO, GRPO, PPO, REINFORCE, RLOO, SFT
from agilerl.config.manifest import load_manifest
from agilerl.data import collate
from agilerl.envs.examples import PreferenceTask, SFTTask
from agilerl.errors import MemoryExhaustedError
from agilerl.population import Population
from agilerl.runs import strict_json
from agilerl.sizes import CPU_ROWS
from agilerl.training.setup import build
from tests.faults.small_populations import Seen, iterate, make_population, weights
from tests.probes import ConstantTarget
from tests.training.small_runs import SMALL, run_here

pytestmark = pytest.mark.model

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"
    ),
    MemoryError(),
]


class Shortage:
    """Memory that runs out: in calls that ``fails`` picks by their number, their tokens, and the slots they serve."""

    def __init__(self, fails: Callable[[int, int, tuple[int, ...]], bool], error: BaseException = ERRORS[0]) -> None:
        self.fails, self.error = fails, error
        self.tokens: list[int] = []
        self.failed = 0

    def check(self, tokens: int, slots: tuple[int, ...]) -> None:
        self.tokens.append(tokens)
        if self.fails(len(self.tokens) - 1, tokens, slots):
            self.failed += 1
            raise self.error


@contextmanager
def short_of_memory(population: Population, shortage: Shortage, when: str) -> Iterator[None]:
    """Let memory run out at the first layer: in a ``forward`` pass, half-way through a ``backward``, or in one that is
    for ``no gradient``, decoding among them.
    """
    store = population.runtime.store
    layers = population.runtime.base.model.model.layers

    def hook(module: Any, inputs: Any, outputs: Any) -> None:
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        slots = () if store.route is None else store.route.slots
        if when == "backward" and hidden.requires_grad:
            # The second layer's adapters have their gradient by now, those of the first do not.
            hidden.register_hook(lambda _: shortage.check(len(hidden), slots))
        elif when == ("forward" if torch.is_grad_enabled() else "no gradient"):
            shortage.check(len(hidden), slots)

    handle = layers[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def gradients(population: Population) -> torch.Tensor:
    """Return the gradients of one accumulated batch of every agent."""
    rollout = population.rollout()
    for agent in population.agents:
        agent.accumulate(collate(rollout.trajectories[agent.index], agent.pad_token_id))
    return population.runtime.store.grad.clone()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max())
    assert scale > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * max(scale, 1.0))


@pytest.mark.parametrize(
    ("when", "kth", "error"),
    [(when, kth, ERRORS[0]) for when in ("forward", "backward") for kth in (0, 1, 5)]
    + [("backward", 3, error) for error in ERRORS[1:]],
)
def test_the_gradient_is_equal(when: str, kth: int, error: BaseException) -> None:
    settings = {"beta": 0.1, "micro_batch_size_per_gpu": 8}
    expected = gradients(make_population(2, **settings))
    population = make_population(2, **settings)
    shortage = Shortage(lambda call, tokens, slots: call == kth, error)
    with short_of_memory(population, shortage, when):
        found = gradients(population)
    assert shortage.failed == 1
    assert_close(found, expected)
    full, limit = shortage.tokens[kth], population.runtime.limits.train_tokens
    assert limit is not None
    assert full / 2 - CPU_ROWS < limit <= full / 2  # it was filled up
    assert max(shortage.tokens[kth + 1 :]) < full


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_update_is_equal_and_counts_nothing_twice(when: str) -> None:
    settings = {"beta": 0.1, "batch_size": 16, "update_epochs": 2}
    whole = iterate(make_population(3, **settings), 1)
    population = make_population(3, **settings)
    shortage = Shortage(lambda call, tokens, slots: tokens > 64)
    with short_of_memory(population, shortage, when):
        found = iterate(population, 1)
    # All three in one pass, one alone: then it is known that half of its tokens is the most.
    assert shortage.failed == 2
    limit = population.runtime.limits.train_tokens
    assert limit is not None
    assert 32 <= limit <= 64
    for index, seen in found.items():
        assert seen.samples == whole[index].samples
        assert seen.metrics[0].keys() == whole[index].metrics[0].keys()
        for name, value in whole[index].metrics[0].items():
            assert seen.metrics[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert {agent.outcome for agent in population.agents} == {"ok"}


@pytest.mark.parametrize("kind", [GRPO, PPO, RLOO, REINFORCE])
def test_every_algorithm_goes_on_where_memory_runs_out_again_and_again(kind: Any) -> None:
    population = make_population(2, kind)
    with short_of_memory(population, Shortage(lambda call, tokens, slots: tokens > 32), "forward"):
        iterate(population, 1)
        iterate(population, 1)
    assert [agent.outcome for agent in population.agents] == ["ok", "ok"]
    assert [agent.skipped_steps for agent in population.agents] == [0, 0]


@pytest.mark.parametrize("flattens", [True, False])
def test_a_critic_s_second_reading_is_halved_too(flattens: bool) -> None:
    population = make_population(1, PPO)
    population.runtime.base.flattens = flattens
    rollout = population.rollout()
    limit = 64 if flattens else 4
    with short_of_memory(population, Shortage(lambda call, tokens, slots: tokens > limit), "forward"):
        population.learn(rollout)
    assert population.agents[0].outcome == "ok"


@pytest.mark.parametrize(("kind", "wrapped"), [(SFT, SFTTask), (DPO, PreferenceTask)])
def test_data_goes_on_in_smaller_passes_too(kind: Any, wrapped: Any) -> None:
    class Pairs(ConstantTarget):
        def counterexample(self, row: Any) -> str:
            return "9"

    settings = {"batch_size": 4, "max_output_tokens": 2}
    if kind is DPO:
        settings["beta"] = 0.1
    population = make_data_population(kind, wrapped(Pairs()), settings)
    with short_of_memory(population, Shortage(lambda call, tokens, slots: tokens > 32), "backward"):
        population.learn(population.draw())
    assert population.agents[0].outcome == "ok"


def make_data_population(kind: Any, task: Any, settings: dict[str, Any]) -> Population:
    runtime = make_population(1).runtime
    agents = kind.population(1, runtime=runtime, lr=1e-2, seed=1, **settings)
    return Population(agents, task, prompts_per_step=4, eval_max_new_tokens=2)


def test_pending_gradients_are_put_back() -> None:
    def two_batches(population: Population, shortage: Shortage | None) -> torch.Tensor:
        agent = population.agents[0]
        rows = collate(population.rollout().trajectories[0], agent.pad_token_id)
        experience = agent.prepare(rows)
        agent.accumulate(experience.select(slice(0, 16)), denominator=32.0)
        if shortage is None:
            agent.accumulate(experience.select(slice(16, 32)), denominator=32.0)
        else:
            with short_of_memory(population, shortage, "backward"):
                agent.accumulate(experience.select(slice(16, 32)), denominator=32.0)
        return population.runtime.store.grad.clone()

    expected = two_batches(make_population(1, beta=0.1), None)
    assert_close(two_batches(make_population(1, beta=0.1), Shortage(lambda call, tokens, slots: call == 0)), expected)
    population = make_population(1, beta=0.1)
    with pytest.raises(MemoryExhaustedError, match="1 x 32 tokens"):
        two_batches(population, Shortage(lambda call, tokens, slots: True))
    alone = make_population(1, beta=0.1)
    agent = alone.agents[0]
    rows = agent.prepare(collate(alone.rollout().trajectories[0], agent.pad_token_id))
    agent.accumulate(rows.select(slice(0, 16)), denominator=32.0)
    assert torch.equal(population.runtime.store.grad, alone.runtime.store.grad)
    assert population.runtime.limits.train_tokens is None


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_agent_that_does_not_fit_alone_skips_and_the_others_bits_stay(when: str) -> None:
    healthy = iterate(make_population(3), 2)
    population = make_population(3)
    slot = population.agent(1).slot
    before = weights(population.agent(1))
    with short_of_memory(population, Shortage(lambda call, tokens, slots: slot in slots), when):
        found = iterate(population, 2)
    assert {i: found[i] == healthy[i] for i in range(3)} == {0: True, 1: False, 2: True}
    assert all(map(torch.equal, before, weights(population.agent(1))))
    assert [agent.outcome for agent in population.agents] == ["ok", "oom", "ok"]
    assert population.agent(1).outcomes["oom"] == 2
    assert population.agent(1).tokens["trained"] == 0
    assert not population.agent(1).sick
    # It is in order as soon as there is memory.
    iterate(population, 1)
    assert population.agent(1).outcome == "ok"


def test_old_log_probs_are_computed_in_smaller_passes() -> None:
    settings = {"beta": 0.1, "kl_target": 0.1, "top_entropy_quantile": 0.5}
    whole, population = make_population(2, **settings), make_population(2, **settings)
    expected, rollout = whole.learn(whole.rollout()), population.rollout()
    with short_of_memory(population, Shortage(lambda call, tokens, slots: tokens > 48), "no gradient"):
        found = population.learn(rollout)
    limit = population.runtime.limits.train_tokens
    assert limit is not None
    assert 24 <= limit <= 48
    for index in (0, 1):
        for name in ("loss", "kl", "kl_coef", "entropy"):
            assert found[index][name] == pytest.approx(expected[index][name], rel=1e-4, abs=1e-6), name
    slot, rollout = population.agent(1).slot, population.rollout()
    with short_of_memory(population, Shortage(lambda call, tokens, slots: slot in slots), "no gradient"):
        population.learn(rollout)
    assert [agent.outcome for agent in population.agents] == ["ok", "oom"]
    assert population.runtime.limits.train_tokens == limit


# -- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kth", [0, 1, 2])
def test_decoding_goes_on_with_half_the_rows(kth: int) -> None:
    expected = make_population(2).rollout()
    population = make_population(2)
    shortage = Shortage(lambda call, tokens, slots: call == kth)
    with short_of_memory(population, shortage, "no gradient"):
        found = population.rollout()
    assert tokens(found) == tokens(expected)
    assert population.runtime.limits.decode_rows == 32
    shortage = Shortage(lambda call, tokens, slots: False)
    with short_of_memory(population, shortage, "no gradient"):
        population.rollout()
    assert set(shortage.tokens) == {48, 32}  # the prompts of two batches in one line, and steps of 32 rows


def tokens(rollout: Any) -> dict[int, list[list[int]]]:
    return {index: [t.token_ids for t in own] for index, own in rollout.trajectories.items()}


def test_an_agent_whose_single_row_does_not_fit_learns_nothing() -> None:
    healthy = iterate(make_population(3), 1)
    population = make_population(3)
    slot = population.agent(1).slot
    with short_of_memory(population, Shortage(lambda call, tokens, slots: slot in slots), "no gradient"):
        found = iterate(population, 1)
        fitness = population.evaluate()
    assert [agent.outcome for agent in population.agents] == ["ok", "oom", "ok"]
    assert found[0].samples == healthy[0].samples
    assert found[2].samples == healthy[2].samples
    assert all(own == [] for own in found[1].samples)
    assert {index: f.is_finite for index, f in fitness.items()} == {0: True, 1: False, 2: True}
    for index in (0, 2):
        for now, then in zip(found[index].weights, healthy[index].weights):
            torch.testing.assert_close(now, then, rtol=1e-4, atol=1e-5)


def test_other_errors_are_not_taken_for_it() -> None:
    population = make_population(1)
    shortage = Shortage(lambda call, tokens, slots: True, RuntimeError("size mismatch"))
    for when in ("no gradient", "forward", "backward"):
        with short_of_memory(population, shortage, when), pytest.raises(RuntimeError, match="size mismatch"):
            iterate(population, 1)


# -- the rest of the run ----------------------------------------------------------------------------------------------


def test_learned_sizes_are_in_the_checkpoint(tmp_path: Path) -> None:
    small = (*SMALL, "training.max_steps=96")
    session = build(load_manifest(None, small))
    assert session.population.runtime.engine.limits is session.population.runtime.limits  # type: ignore[attr-defined]
    run = run_here(tmp_path / "run", "training.max_steps=96")
    folder = max((run / "checkpoints").iterdir())
    state = strict_json.read_json(folder / "state.json")
    assert state["memory"] == {"train_tokens": None, "decode_rows": None}
    state["memory"] = {"train_tokens": 640, "decode_rows": 12}
    (folder / "state.json").write_text(strict_json.dumps(state))
    limits = build(load_manifest(None, small), folder).population.runtime.limits
    assert (limits.train_tokens, limits.decode_rows) == (640, 12)


def test_seen_compares_what_it_is_for() -> None:
    one, other = Seen([[1]], [{"a": 1.0}], [torch.zeros(1)]), Seen([[1]], [{"a": 1.0}], [torch.ones(1)])
    assert one == Seen([[1]], [{"a": 1.0}], [torch.zeros(1)]) != other
