"""The native fused loss against Liger's: from hidden states to the loss and its gradient, the head included."""

from typing import Any

import pytest
import torch

from agilerl.algorithms import CISPO, GRPO, LLMAlgorithm
from agilerl.data import LossInputs
from agilerl.functional import MetricReducer, linear_logprobs
from agilerl.runtime import Runtime
from tests.oracle.random_tensors import MAX_LENGTH
from tests.tiny_models import PAD, random_model

liger = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger is not installed; make setup installs it")

ROWS, WIDTH, VOCABULARY = 6, 16, 40
CASES: list[tuple[type[LLMAlgorithm], dict[str, Any], dict[str, Any]]] = [
    (GRPO, {"beta": 0.0}, {"loss_type": "grpo", "beta": 0.0}),
    (GRPO, {"beta": 0.04, "temperature": 0.7}, {"loss_type": "grpo", "beta": 0.04, "temperature": 0.7}),
    (GRPO, {"beta": 0.04, "loss_norm": "token-mean"}, {"loss_type": "bnpo", "beta": 0.04}),
    (
        GRPO,
        {"beta": 0.0, "loss_norm": "fixed-length"},
        {"loss_type": "dr_grpo", "beta": 0.0, "max_completion_length": MAX_LENGTH},
    ),
    (CISPO, {"beta": 0.0}, {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.0}),
]


@pytest.mark.model
@pytest.mark.parametrize("chunk_rows", [None, 16])
@pytest.mark.parametrize(("algorithm", "settings", "theirs"), CASES)
def test_the_fused_losses_are_one(
    algorithm: type[LLMAlgorithm], settings: dict[str, Any], theirs: dict[str, Any], chunk_rows: int | None
) -> None:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, MAX_LENGTH, WIDTH, generator=g, dtype=torch.float64)
    head = torch.randn(VOCABULARY, WIDTH, generator=g, dtype=torch.float64) * 0.5
    ids = torch.randint(0, VOCABULARY, (ROWS, MAX_LENGTH), generator=g)
    mask = torch.arange(MAX_LENGTH) < torch.randint(1, MAX_LENGTH + 1, (ROWS, 1), generator=g)
    advantages = torch.randn(ROWS, generator=g, dtype=torch.float64)
    temperature = settings.get("temperature", 1.0)
    agent = algorithm(
        runtime=Runtime.for_model(random_model()),
        pad_token_id=PAD,
        max_output_tokens=MAX_LENGTH,
        **({"use_bias_correction_kl": False} if settings["beta"] > 0 else {}),
        **settings,
    )

    def logp(leaf: torch.Tensor) -> torch.Tensor:
        flat, _ = linear_logprobs(
            leaf.flatten(0, 1), head, ids.flatten(), temperature=temperature, chunk_rows=chunk_rows
        )
        return flat.view(ids.shape)

    noise = 0.3 * torch.randn(ids.shape, generator=g, dtype=torch.float64)
    old, ref = logp(hidden) + noise, logp(hidden) + 0.3 * noise.flip(0)

    ours = hidden.clone().requires_grad_()
    denominator = agent.window_denominator(mask)
    inputs = LossInputs(
        logp=torch.where(mask, logp(ours), 0.0),
        mask=mask,
        old_logp=old,
        advantages=advantages[:, None].expand(mask.shape),
        denominator=denominator,
        ref_logp=ref,
        turn_ids=torch.where(mask, 0, -1),
    )
    loss = agent.objective(inputs, MetricReducer())
    loss.backward()

    fused = liger.LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=True, chunk_size=1, **theirs)
    leaf = hidden.clone().requires_grad_()
    other, _ = fused(leaf, head, ids, mask.double(), advantages, ref_per_token_logps=ref, old_per_token_logps=old)
    other.backward()
    torch.testing.assert_close(loss, other, atol=1e-6, rtol=1e-6, check_dtype=False)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, leaf.grad, atol=1e-6, rtol=1e-5)
