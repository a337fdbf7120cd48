"""The elite of a run loads with its algorithm and with PEFT, and is the same policy."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.algorithms import ALGORITHMS
from agilerl.config.run import RunConfig
from agilerl.errors import CheckpointError
from agilerl.models.adapters import WEIGHTS_FILE
from agilerl.models.tiny import tiny_model_path
from agilerl.training.base import check_elite
from agilerl.training.run import train
from agilerl.training.setup import build

pytestmark = pytest.mark.model

IDS = torch.arange(3, 40)[None]


def config(name: str) -> RunConfig:
    kinds = {"SFT": "sft", "DPO": "preference"}
    rates = {"lr_actor": 3e-3, "lr_critic": 3e-3} if name == "PPO" else {"lr": 3e-3}
    return RunConfig.from_dict(
        {
            "algorithm": {"name": name, **rates, "batch_size": 8, "max_output_tokens": 6}
            | ({} if name in ("PPO", *kinds) else {"group_size": 4}),
            "environment": {
                "env_type": kinds.get(name, "reasoning"),
                "task": "reasoning_gym:spell_backward",
                "params": {"min_word_len": 3, "max_word_len": 4},
                "data_batch_size_per_gpu": 4,
                "eval_prompts": 8,
                "test_prompts": 8,
            },
            "training": {"pop_size": 2, "max_steps": 64, "evo_steps": 1, "seed": 3},
            "network": {"lora_config": {"r": 4, "lora_alpha": 8}},
        }
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", ["GRPO", "CISPO", "PPO", "SFT", "DPO"])
def test_the_elite_of_a_run_loads_with_its_algorithm_and_with_peft(tmp_path: Path, name: str) -> None:
    """``GRPO.load("run/elite")`` wanted an agent.json that was only in the checkpoints."""
    algorithm, root = ALGORITHMS[name], tmp_path / "run"
    for _ in train(build(config(name)), root):
        pass
    agent = algorithm.load(root / "elite")
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    plain = logits(base)
    with agent.select_adapter("actor"):
        found = logits(agent.runtime.base.model)
    assert (found - logits(PeftModel.from_pretrained(base, root / "elite"))).abs().max() < 1e-5
    assert (found - plain).abs().max() > 1e-4
    assert type(agent) is algorithm
    assert agent.fitness
    assert agent.lora_config.lora_alpha == 8
    assert len(AutoTokenizer.from_pretrained(root / "elite")) == len(agent.runtime.tokenizer)
    check_elite(root / "elite", agent.runtime, agent.slot)
    damaged = shutil.copytree(root / "elite", tmp_path / "damaged")
    weights = damaged / WEIGHTS_FILE
    save_file({key: 1.1 * tensor for key, tensor in load_file(weights).items()}, weights)
    with pytest.raises(CheckpointError, match="PEFT computes something else"):
        check_elite(damaged, agent.runtime, agent.slot)
    if name == "PPO":
        assert agent.runtime.store.read_head(agent.critic_slot)[0].abs().sum() > 0
    # Another agent may start from it, and the run itself is told where its elite is.
    other = algorithm(runtime=agent.runtime, lora_config=agent.lora_config)
    other.load_checkpoint(root / "elite")
    with other.select_adapter("actor"):
        assert torch.equal(logits(other.runtime.base.model), found)
    with pytest.raises(CheckpointError, match="elite"):
        algorithm.load(root)
