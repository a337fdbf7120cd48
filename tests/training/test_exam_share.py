"""An exam costs about a tenth of what is done between two; completions are bounded unless a run says otherwise."""

from pathlib import Path

import pytest
import torch

from agilerl.config.manifest import load_manifest
from agilerl.population import Population
from agilerl.training.generation import EXAM, GENERATIONS, LEAST_GENERATIONS
from agilerl.training.resolved import COMPLETION, resolve
from agilerl.training.run import train
from agilerl.training.saved import recorded
from agilerl.training.setup import Session, build
from agilerl.training.tasks import LEAST_PANEL
from tests.faults.pieces import go_on, leave_after
from tests.training.small_runs import less_times, lines

pytestmark = pytest.mark.model

BY_ITSELF = (
    *("environment.eval_prompts=null", "environment.test_prompts=10", "environment.data_batch_size_per_gpu=4"),
    *("algorithm.group_size=4", "algorithm.batch_size=16", "training.pop_size=2"),
)


def made(*overrides: str) -> Session:
    return build(load_manifest(None, [*BY_ITSELF, *overrides]))


def cost(population: Population, work: str) -> int:
    """Return the tokens that go through the base; those of a pass with gradients count three times."""
    seen: list[int] = []

    def count(_: object, args: object, inputs: dict[str, torch.Tensor]) -> None:
        seen.append(inputs["input_ids"].numel() * (3 if torch.is_grad_enabled() else 1))

    hook = population.runtime.base.body.register_forward_pre_hook(count, with_kwargs=True)
    if work == "exam":
        population.evaluate()
    else:
        population.learn(population.rollout())
    hook.remove()
    return sum(seen)


@pytest.mark.parametrize("iterations", [64, 1024])
def test_an_exam_costs_a_tenth_of_a_generation(iterations: int) -> None:
    session = made(f"training.max_steps={iterations * 16}")
    panel = len(session.population.examiner.places("exam"))
    assert LEAST_PANEL <= panel <= 128
    assert iterations / GENERATIONS <= session.evo_steps <= iterations / LEAST_GENERATIONS
    trained = sum(cost(session.population, "iteration") for _ in range(3)) / 3
    share = cost(session.population, "exam") / (trained * session.evo_steps)
    # Groups that all earn the same are not trained on, and completions end before their limit.
    assert share < 2 * EXAM or panel == LEAST_PANEL
    assert share > EXAM / 3 or panel == 128


def test_few_iterations_get_small_exams_and_many_get_large_ones() -> None:
    sizes = [len(made(f"training.max_steps={n * 16}").population.examiner.places("exam")) for n in (8, 64, 4096)]
    assert sizes[0] == LEAST_PANEL
    assert sizes == sorted(sizes)
    assert sizes[-1] == 128


def test_an_exam_has_the_size_that_is_given() -> None:
    session = made("environment.eval_prompts=50", "training.max_steps=128")
    assert len(session.population.examiner.places("exam")) == 50
    # So generations become longer, not exams smaller.
    assert session.evo_steps > 128 / 16 / LEAST_GENERATIONS


def test_a_resumed_run_has_the_same_exams(tmp_path: Path) -> None:
    config = load_manifest(None, [*BY_ITSELF, "training.max_steps=160", "training.checkpoint_steps=1"])
    for _ in train(build(config), tmp_path / "whole", command=["test"]):
        pass
    leave_after(train(build(config), tmp_path / "run", command=["test"]), 2)
    for _ in go_on(tmp_path / "run"):
        pass
    for name in ("metrics.jsonl", "lineage.jsonl"):
        assert less_times(lines(tmp_path / "run" / name)) == less_times(lines(tmp_path / "whole" / name))


# -- completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], COMPLETION),
        (["algorithm.max_output_tokens=7"], 7),
        (["algorithm.max_output_tokens=null", "algorithm.max_model_len=100"], None),
        (["algorithm.max_model_len=100"], None),
    ],
)
def test_completions_are_bounded_unless_they_or_the_context_are(overrides: list[str], limit: int | None) -> None:
    config = load_manifest(None, ["algorithm={name: GRPO}", *overrides])
    resolved = resolve(config)
    assert resolved.hyperparameters.max_output_tokens == limit  # type: ignore[attr-defined]
    assert resolved.bounds_completions == (limit == COMPLETION)
    again = resolve(recorded({"config": resolved.document(), "given": resolved.given(), "date": "2026-11-25T00:00:00"}))
    assert again.document() == resolved.document()


def test_a_run_that_began_without_a_limit_has_none() -> None:
    resolved = resolve(load_manifest(None, ["algorithm={name: GRPO}"]))
    before = resolved.document()
    before["algorithm"]["max_output_tokens"] = None
    again = resolve(recorded({"config": before, "given": resolved.given(), "date": "2026-11-24T00:00:00"}))
    assert again.hyperparameters.max_output_tokens is None  # type: ignore[attr-defined]
