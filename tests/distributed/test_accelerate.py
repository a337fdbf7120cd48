"""accelerate: what its launcher's configurations mean here, and the accelerator that an agent is given."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from agilerl.algorithms import GRPO
from agilerl.config.distributed import check_launch, wanted_sharding
from agilerl.errors import ConfigError
from agilerl.models.sharding import check_accelerator, sharding_of
from tests.algorithms.conftest import lora
from tests.tiny_models import PAD, random_model

CONFIGURATIONS = Path(__file__).parents[2] / "tutorials" / "manifests" / "accelerate"


def environment_of(*arguments: str) -> dict[str, str]:
    """Return the environment that accelerate launch would give each process."""
    arguments = (*arguments, "-m", "agilerl.cli", "train")
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if args.use_deepspeed and not args.cpu:
        args.deepspeed_fields_from_accelerate_config = ""
        return dict(prepare_deepspeed_cmd_env(args)[1])
    if (args.use_fsdp or args.multi_gpu) and not args.cpu:
        return dict(prepare_multi_gpu_env(args))
    return dict(prepare_simple_launcher_cmd_env(args)[1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ddp", "none"), ("zero1", "none"), ("zero2", "none"), ("zero3", "zero3"), ("fsdp2", "fsdp2")],
)
def test_configurations_of_the_tutorials(name: str, expected: str) -> None:
    found = environment_of("--config_file", str(CONFIGURATIONS / f"{name}.yaml"))
    assert wanted_sharding(found) == expected
    check_launch({**found, "WORLD_SIZE": "2", "RANK": "0"})  # as torchrun, which it calls, completes it


def test_a_launcher_that_starts_one_process_of_two_is_found_out() -> None:
    found = environment_of("--cpu", "--num_processes", "2")
    with pytest.raises(ConfigError, match="started only one"):
        check_launch(found)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "expected fsdp_version: 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "9"}, "ZeRO stage 0, 1, 2 or 3"),
    ],
)
def test_what_accelerate_can_be_told_and_this_package_cannot_do(found: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        wanted_sharding(found)


@pytest.fixture
def accelerator() -> Any:
    made = Accelerator(cpu=True)
    yield made
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_an_accelerator_of_one_process_changes_no_bit(accelerator: Any) -> None:
    def theta(**arguments: Any) -> torch.Tensor:
        agent = GRPO(
            pad_token_id=PAD, actor_network=random_model(), lora_config=lora(4), group_size=2, batch_size=4, **arguments
        )
        action = agent.get_action([{"input_ids": torch.tensor([[5, 6, 7]])}, {"input_ids": torch.tensor([[8, 9]])}])
        agent.learn((action.completion_ids, action.action_masks, torch.tensor([1.0, 0.0, 0.0, 1.0])))
        return agent.runtime.store.theta[agent.slot].clone()

    assert torch.equal(theta(accelerator=accelerator), theta())


def test_two_accelerators_on_one_base(accelerator: Any) -> None:
    model = random_model()
    first = GRPO(pad_token_id=PAD, actor_network=model, lora_config=lora(4), accelerator=accelerator)
    assert first.clone(1).runtime.accelerator is accelerator
    with pytest.raises(ConfigError, match="same accelerator"):
        GRPO(pad_token_id=PAD, actor_network=model, lora_config=lora(4), accelerator=Accelerator(cpu=True))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device": torch.device("cuda:0")}, "the accelerator uses cuda:0, but the base model is on cpu"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
        ({"mixed_precision": "bf16"}, r"mixed_precision='bf16' .* bfloat16, found float32"),
        ({"state": None}, "accelerate.Accelerator"),
    ],
)
def test_accelerators_that_do_not_fit(changes: dict[str, Any], sentence: str) -> None:
    fitting = {
        "num_processes": 2,
        "device": torch.device("cpu"),
        "state": SimpleNamespace(),
        "gradient_accumulation_steps": 1,
        "mixed_precision": "no",
    }
    check_accelerator(SimpleNamespace(**fitting), "cpu", "float32")
    with pytest.raises(ConfigError, match=sentence):
        check_accelerator(SimpleNamespace(**{**fitting, **changes}), "cpu", "float32")


def test_plugins_decide_how_the_base_is_held() -> None:
    def of(**state: Any) -> str:
        return sharding_of(SimpleNamespace(state=SimpleNamespace(**state)))

    assert of() == "none"
    assert of(deepspeed_plugin=SimpleNamespace(zero_stage=2)) == "none"
    assert of(deepspeed_plugin=SimpleNamespace(zero_stage=3)) == "zero3"
    assert of(fsdp_plugin=SimpleNamespace(fsdp_version=2)) == "fsdp2"
