"""PEFT folders and configurations: what is plain LoRA is read, everything else is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agilerl.algorithms import GRPO
from agilerl.errors import CheckpointError, ConfigError
from agilerl.models.adapters import check_lora_config, lora_layers, read_adapter, read_config
from agilerl.models.slots import LinearShape
from tests.algorithms.conftest import lora
from tests.tiny_models import PAD, random_model

REFUSED: dict[str, Any] = {
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "target_parameters": ["weight"],
    "layer_replication": [[0, 2]],
    "lora_bias": True,
    "use_qalora": True,
    "megatron_config": {"hidden_size": 8},
}


def folder_with(tmp_path: Path, **changes: Any) -> tuple[Path, list[LinearShape]]:
    model = random_model()
    layers = lora_layers(model, lora(8))
    folder = tmp_path / "adapter"
    get_peft_model(model, lora(8)).save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder, layers


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_variant_of_lora_is_refused_by_its_name_when_it_is_read(tmp_path: Path, name: str) -> None:
    """These compute something else than scale * B A: read as plain LoRA, they gave logits that were off by up to 4."""
    folder, layers = folder_with(tmp_path, **{name: REFUSED[name]})
    with pytest.raises(CheckpointError, match=f"has {name}="):
        read_adapter(folder, layers)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"use_of_the_future": True}, "use_of_the_future=True"),
        ({"lora_alpha": "x"}, "lora_alpha must be .* found 'x'"),
        ({"lora_alpha": True}, "lora_alpha must be"),
        ({"lora_alpha": 0}, "lora_alpha must be"),
        ({"lora_alpha": 1e308}, "lora_alpha must be"),
        ({"lora_alpha": 10**400}, "lora_alpha must be"),
        ({"r": 0}, "r must be"),
        ({"r": 8.0}, "r must be"),
        ({"use_rslora": "no"}, "use_rslora must be"),
    ],
)
def test_what_is_not_plain_lora_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    folder, _ = folder_with(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=named):
        read_config(folder)


def test_what_concerns_training_alone_does_not_stop_an_adapter(tmp_path: Path) -> None:
    folder, layers = folder_with(tmp_path, lora_dropout=0.1, init_lora_weights="gaussian", qalora_group_size=8)
    factors, config = read_adapter(folder, layers)
    assert config.r == 8
    assert len(factors) == len(layers)


@pytest.mark.parametrize("name", [*sorted(REFUSED), "init_lora_weights"])
def test_an_option_that_is_not_supported_is_refused_with_its_reason(name: str) -> None:
    value = {**REFUSED, "init_lora_weights": "pissa"}[name]
    config = lora(8)
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=rf"lora_config\.{name}="):
        check_lora_config(config)


@pytest.mark.parametrize("alpha", [1e308, 10**400, 0, -1.0, "x", float("nan"), True])
def test_a_scale_that_fp32_does_not_hold_is_refused(alpha: Any) -> None:
    config = LoraConfig(r=8, lora_alpha=8)
    config.lora_alpha = alpha
    with pytest.raises(ConfigError, match=r"lora_config\.lora_alpha"):
        check_lora_config(config)


@pytest.mark.model
def test_no_variant_is_read_with_other_logits_than_peft_has(tmp_path: Path) -> None:
    """The class of the finding: whatever PEFT would compute is either refused, or computed as PEFT does."""
    from peft import PeftModel

    ids = torch.tensor([[5, 9, 33, 2, 17]])
    for number, changes in enumerate(({"use_rslora": True}, {"lora_alpha": 3}, {"lora_dropout": 0.3})):
        model = get_peft_model(random_model(), lora(8))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(generator=torch.Generator().manual_seed(0), std=0.05)
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        config = read_config(folder)
        config.lora_dropout = 0.0
        agent = GRPO(actor_network=random_model(), pad_token_id=PAD, lora_config=config)
        factors, _ = read_adapter(folder, agent.runtime.store.layers)
        agent.runtime.store.load_adapter(agent.slot, factors)
        with torch.no_grad(), agent.select_adapter("actor"):
            found = agent.runtime.base.model(ids).logits
            expected = PeftModel.from_pretrained(random_model(), folder)(ids).logits
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.model
def test_adapters_start_as_pefts_do() -> None:
    """The same distribution of A for both starts, B zero; draws are our own."""
    for start in (True, "gaussian"):
        config = lora(8)
        config.init_lora_weights = start
        with torch.random.fork_rng():
            theirs = [p for name, p in get_peft_model(random_model(), config).named_parameters() if "lora_A" in name]
        agent = GRPO(actor_network=random_model(), pad_token_id=PAD, lora_config=config)
        ours = agent.runtime.store.adapter(agent.slot)
        for (a, b), other in zip(ours, theirs, strict=True):
            assert a.shape == other.shape
            assert not b.any()
            assert a.std().item() == pytest.approx(other.std().item(), rel=0.2)
            assert (a.abs().max() > 2.5 * a.std()) == (start == "gaussian")
