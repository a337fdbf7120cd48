"""What holds on a CPU has to hold on a CUDA device, to the rounding of its kernels: `pytest -m gpu` runs these."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch

import agilerl
from agilerl.config.base_model import SharedOptions
from agilerl.config.manifest import load_manifest
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.runs.stopping import Interrupted, StopRequest
from agilerl.runtime import Runtime
from agilerl.training.events import IterationDone
from agilerl.training.run import train
from agilerl.training.setup import build
from benchmarking.same_bits import GRPO, differences, digests
from benchmarking.same_bits import SMALL as TINY
from tests.models.two_agents import Pass, train_pass, with_adapters
from tests.training.small_runs import SMALL

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SAME = 1e-4
"""Relative distance that kernels chosen by the size of a batch may make in fp32."""


def make_runtime(**options: bool) -> Runtime:
    return with_adapters(Runtime.from_pretrained("embedded", device=DEVICE, options=SharedOptions(**options)))


def test_agents_in_one_batch_compute_what_each_computes_alone() -> None:
    runtime = make_runtime()
    together = train_pass(runtime)
    for agent in (0, 1):
        alone = train_pass(runtime, (agent,))
        torch.testing.assert_close(alone.logp[0], together.logp[agent], rtol=SAME, atol=SAME)
        own, other = alone.grad[agent], together.grad[agent]
        assert own.abs().sum() > 0
        assert float((own - other).norm() / other.norm()) < SAME
        assert not alone.grad[1 - agent].any()


def test_log_probs_of_samples_are_those_of_the_training_forward() -> None:
    runtime = make_runtime()
    settings = SamplingSettings(max_new_tokens=12, temperature=1.0)
    asked = [GenerationRequest(slot, [5, 6, 7 + slot], 4, settings, key=(slot,)) for slot in (0, 1)]
    found = runtime.engine.generate(asked)
    alone = [runtime.engine.generate([request])[0] for request in asked]
    for own, both in zip(alone, found):
        for a, b in zip(own, both):
            assert len(a.logprobs) == len(a.token_ids) > 0
            # A token may be drawn differently where rounding decides; up to there all is the same.
            same = next((k for k, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y), len(a.token_ids))
            assert same > 0
            assert a.logprobs[:same] == pytest.approx(b.logprobs[:same], abs=1e-3)


@pytest.mark.parametrize("options", [("gradient_checkpointing",), ("activation_offload",)], ids=str)
def test_saving_memory_changes_no_gradient(options: tuple[str, ...]) -> None:
    expected: Pass = train_pass(make_runtime())
    found = train_pass(make_runtime(**dict.fromkeys(options, True)))
    assert expected.grad.abs().sum() > 0
    assert max(found.distance(expected)) < SAME


def test_a_few_iterations_train_every_agent() -> None:
    session = build(load_manifest(None, [*SMALL, f"training.device={DEVICE}"]))
    population, store = session.population, session.population.runtime.store
    assert store.theta.device.type == DEVICE
    before = copy.deepcopy([store.theta[agent.slot].cpu() for agent in population.agents])
    for _ in range(3):
        metrics = population.learn(population.rollout())
    assert all(torch.isfinite(torch.tensor(own["loss"])) for own in metrics.values())
    for agent, start in zip(population.agents, before):
        after = store.theta[agent.slot].cpu()
        assert torch.isfinite(after).all()
        assert not torch.equal(after, start)
    assert all(0 <= fitness.mean <= 1 for fitness in population.evaluate().values())


def test_a_resumed_run_is_the_run_that_was_not_stopped() -> None:
    def run(out: Path, stop: StopRequest | None = None) -> None:
        for event in train(build(load_manifest(None, [*TINY, *GRPO, f"training.device={DEVICE}"])), out, stop=stop):
            if stop is not None and isinstance(event, IterationDone):
                stop.signal = 15

    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, "whole"), Path(folder, "parts")
        run(whole)
        with pytest.raises(Interrupted):
            run(parts, StopRequest())
        agilerl.Run(parts).resume(display=False)
        assert not differences(digests(whole), digests(parts))
    assert torch.are_deterministic_algorithms_enabled()
