"""LoRA dropout: PEFT's, with masks that are a function of row, token, layer and channel, whoever shares the batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from agilerl import GRPO, Population, ReasoningGymTask, Runtime
from agilerl.algorithms.forward import AgentRows, forward
from agilerl.config.manifest import load_manifest
from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError
from agilerl.models.lora import _mixed, _Run, token_keys
from agilerl.models.tiny import tiny_model_path
from tests.models.test_flat import computed, in_fp64, padded, runtime_of, two_batches
from tests.tiny_models import qwen2, random_model

RATE, TEMPERATURE = 0.3, 0.8


# -- the oracle: PEFT, with masks from whole numbers of Python ---------------------------------------------------------


def mixed(word: int) -> int:
    word ^= word >> 16
    word = word * 0x7FEB352D % 2**32
    word ^= word >> 15
    word = word * 0x846CA68B % 2**32
    return word ^ word >> 16


def key(row: int, place: int) -> int:
    return mixed(row ^ mixed(place + 1))


def factors(keys: list[list[int]], layer: int, width: int, rate: float) -> Tensor:
    channels = [mixed((c + layer * 0x9E3779B) % 2**32) for c in range(width)]
    kept = [[[(mixed(k ^ c) & 0x7FFFFFFF) >= round(rate * 2**31) for c in channels] for k in row] for row in keys]
    return torch.tensor(kept, dtype=torch.float64) / (1 - rate)


class Mask(nn.Module):
    def __init__(self, keys: list[list[int]], layer: int, rate: float) -> None:
        super().__init__()
        self.place = keys, layer, rate

    def forward(self, x: Tensor) -> Tensor:
        keys, layer, rate = self.place
        return x * factors(keys, layer, x.shape[-1], rate)


def row_keys(batch: RolloutBatch, draws: Tensor) -> list[list[int]]:
    """Return the key of every token; that of a part that rows have in common is the first one's that has it."""
    numbers, tree = [n % 2**32 for n in draws.tolist()], batch.tree
    found = [[key(number, place) for place in range(batch.ids.shape[1])] for number in numbers]
    for row, path in enumerate(tree.paths):
        for part in path:
            places = range(int(tree.starts[part]), int(tree.ends[part]))
            for place in places:
                found[row][place] = key(numbers[int(tree.rows[part])], place)
    return found


def draws(batch: RolloutBatch, seed: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (len(batch),), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


@pytest.mark.model
@pytest.mark.parametrize("checkpointing", [False, True])
def test_outputs_and_gradients_are_pefts_with_the_same_masks(checkpointing: bool) -> None:
    runtime = runtime_of(in_fp64(random_model()), dtype=torch.float64, gradient_checkpointing=checkpointing)
    batch = two_batches()[0]
    own = draws(batch, 0)
    assert (batch.tree.of >= 0).any()
    found, grad = computed(runtime, [AgentRows(0, batch, TEMPERATURE, dropout=RATE, draws=own)], entropy=False)

    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=RATE, task_type="CAUSAL_LM")
    model = get_peft_model(in_fp64(random_model()), config, autocast_adapter_dtype=False).double()
    keys = row_keys(batch, own)
    layers = [model.get_submodule(f"base_model.model.{layer.name}") for layer in runtime.store.layers]
    for number, (layer, (a, b)) in enumerate(zip(layers, runtime.store.adapter(0))):
        layer.lora_dropout["default"] = Mask(keys, number, RATE)
        with torch.no_grad():
            layer.lora_A["default"].weight.copy_(a)
            layer.lora_B["default"].weight.copy_(b)
    logits = model(input_ids=batch.ids).logits[:, :-1].double() / TEMPERATURE
    logp = logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0] * batch.action_mask
    (logp * torch.linspace(-1, 1, logp.numel()).view(logp.shape)).sum().backward()

    torch.testing.assert_close(found[0].logp.double(), logp, atol=1e-5, rtol=0)
    views = [runtime.store._views(grad, i) for i in range(len(layers))]
    for layer, (grad_a, grad_b) in zip(layers, views):
        for ours, theirs in ((grad_a[0], layer.lora_A["default"]), (grad_b[0], layer.lora_B["default"])):
            assert float((ours - theirs.weight.grad).norm() / theirs.weight.grad.norm()) < 1e-5


@pytest.mark.model
def test_without_a_gradient_nothing_is_left_out() -> None:
    runtime = runtime_of(random_model())
    part = AgentRows(0, two_batches()[0], 1.0)
    with torch.no_grad():
        plain = forward(runtime, [part])[0].logp
        same = forward(runtime, [replace(part, dropout=RATE, draws=draws(part.batch, 0))])[0].logp
    other = forward(runtime, [replace(part, dropout=RATE, draws=draws(part.batch, 0))])[0].logp
    assert torch.equal(plain, same)
    assert not torch.allclose(plain, other, atol=1e-2)


@pytest.mark.model
@pytest.mark.parametrize("options", [{}, {"use_sequence_packing": True}], ids=["padded", "packed"])
def test_bases_that_do_not_compute_lines(options: dict[str, Any]) -> None:
    """Each row has its own masks then, prompts included, wherever packing puts it."""
    runtime = runtime_of(in_fp64(random_model(qwen2())), dtype=torch.float64, **options)
    batches = two_batches()
    parts = [AgentRows(i, b, 1.0, dropout=RATE, draws=draws(b, i)) for i, b in enumerate(batches)]
    alone = runtime_of(in_fp64(random_model(qwen2())), dtype=torch.float64)
    found, grad = padded(runtime, parts)
    expected, expected_grad = padded(alone, parts)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours.logp, theirs.logp, atol=1e-6, rtol=0)
    assert float((grad - expected_grad).norm() / expected_grad.norm()) < 1e-6


# -- the masks are even and independent --------------------------------------------------------------------------------


def test_masks_are_even_and_independent() -> None:
    keys = token_keys(draws(two_batches()[0], 3)[:7].repeat(40) ^ torch.arange(280, dtype=torch.int32) * 7919, 16).view(
        1, -1
    )
    run = _Run((0,), slice(0, 0), torch.zeros(1, 4, 64, dtype=torch.float64), torch.zeros(0), 0.25, keys)
    first, second = (run.kept(layer)[0] * 0.75 for layer in (0, 1))  # type: ignore[index]
    assert set(first.unique().tolist()) == {0.0, 1.0}
    for mask in (first, second):
        assert abs(float(mask.mean()) - 0.75) < 0.002  # 286,720 draws: a standard error of .0008
        assert float((mask.mean(0) - 0.75).abs().max()) < 0.035  # each channel, 4,480 draws
        assert float((mask.mean(1) - 0.75).abs().max()) < 0.25  # each token, 64 draws
    centred = (first - 0.75).flatten(), (second - 0.75).flatten()
    for other in (centred[1], centred[0].roll(1), centred[0].roll(64), centred[0].roll(16 * 64)):
        assert abs(float((centred[0] * other).mean())) / 0.1875 < 0.008


def test_mixing_is_that_of_whole_numbers() -> None:
    words = [0, 1, 2**31, 2**32 - 1, 0x12345678]
    signed = torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32)
    assert [int(w) % 2**32 for w in _mixed(signed)] == [mixed(w) for w in words]


# -- in training -------------------------------------------------------------------------------------------------------


def lora(rate: float) -> LoraConfig:
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=rate)


def trained(rates: dict[int, float], **changes: Any) -> dict[int, Tensor]:
    """Return the adapters of agents with these rates by index, after two updates of two epochs."""
    runtime = Runtime.from_pretrained("embedded", lora_config=lora(0.0))
    settings = {"lr": 3e-3, "group_size": 4, "batch_size": 8, "max_output_tokens": 8, "update_epochs": 2} | changes
    agents = [GRPO(runtime=runtime, index=i, lora_config=lora(rate), **settings) for i, rate in rates.items()]
    population = Population(agents, ReasoningGymTask("spell_backward", exam_prompts=8, test_prompts=2))
    for _ in range(2):
        population.learn(population.rollout())
    return {agent.index: runtime.store.theta[agent.slot].clone() for agent in agents}


@pytest.mark.model
def test_agents_together_have_the_bits_of_each_alone() -> None:
    rates = {0: 0.0, 1: 0.05, 2: 0.3, 3: 0.3}
    together = trained(rates)
    for index, rate in rates.items():
        assert torch.equal(trained({index: rate})[index], together[index]), rate
    assert not torch.equal(together[2], together[3])  # agents draw their own masks
    assert torch.equal(together[0], trained({0: 0.0})[0])


@pytest.mark.model
def test_the_ratio_of_the_first_step_is_one() -> None:
    """What was left out does not count as a change of the policy."""
    runtime = Runtime.from_pretrained("embedded", lora_config=lora(0.5))
    agent = GRPO(runtime=runtime, lr=0.1, group_size=4, batch_size=64, max_output_tokens=8, lora_config=lora(0.5))
    population = Population([agent], ReasoningGymTask("spell_backward", exam_prompts=8, test_prompts=2))
    population.learn(population.rollout())  # an adapter of zeros has nothing to leave out
    metrics = population.learn(population.rollout())[agent.index]
    assert metrics["clip_ratio/region_mean"] == 0.0


@pytest.mark.model
def test_checkpoints_and_clones_keep_it_and_folders_say_it(tmp_path: Path) -> None:
    agent = GRPO(model_name="embedded", lora_config=lora(0.1), group_size=4, batch_size=8, max_output_tokens=8)
    assert agent.clone(5).lora_config.lora_dropout == 0.1
    agent.save_checkpoint(tmp_path / "saved")
    assert GRPO.load(tmp_path / "saved").lora_config.lora_dropout == 0.1
    plain = GRPO(runtime=agent.runtime, lora_config=lora(0.0), index=7)
    assert "lora_dropout" not in plain.state().lora
    plain.save_checkpoint(tmp_path / "plain")
    assert GRPO.load(tmp_path / "plain", runtime=agent.runtime).lora_config.lora_dropout == 0.0
    written = json.loads((tmp_path / "saved" / "actor" / "adapter_config.json").read_text())
    assert written["lora_dropout"] == 0.1
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    loaded = PeftModel.from_pretrained(base, tmp_path / "saved" / "actor")
    assert loaded.peft_config["default"].lora_dropout == 0.1


@pytest.mark.parametrize("rate", [1.0, -0.1, 2, "x", True, float("nan")])
def test_rates_that_are_none_are_refused(rate: Any) -> None:
    config = lora(0.1)
    config.lora_dropout = rate
    with pytest.raises(ConfigError, match="lora_dropout must be a number"):
        GRPO(model_name="embedded", lora_config=config)
    with pytest.raises(ConfigError, match=r"network\.lora_config\.lora_dropout"):
        load_manifest(None, [f"network.lora_config.lora_dropout={json.dumps(rate)}"])
