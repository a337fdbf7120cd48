"""What runs on a GPU first runs on one that is pretended: places of tensors, and what the host waits for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agilerl.config.manifest import load_manifest
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.runtime import Runtime
from agilerl.training.run import train
from agilerl.training.setup import build
from benchmarking.same_bits import RUNS
from tests import test_gpu
from tests.pretended_cuda import DEVICE, Device, pretended

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Device]]:
    with pretended(monkeypatch) as device:
        yield device


def test_tensors_of_two_places_do_not_mix() -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    assert (there.device, there.dtype, (there + 1).device) == (DEVICE, torch.float32, DEVICE)
    assert (there.to("cpu").device.type, here.to(DEVICE).device, there[here.bool()].device) == ("cpu", DEVICE, DEVICE)
    for wrong in (
        lambda: here + there,
        lambda: here[there.long()],
        lambda: torch.cat([here, there]),
        lambda: torch.where(here.bool(), there, there),
        lambda: there.index_select(0, torch.tensor([0])),
    ):
        with pytest.raises(RuntimeError, match="device"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(there)
    assert torch.equal((there * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))  # a number may be anywhere


def test_gradients_are_where_their_tensors_are(device: type[Device]) -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    (x.cpu() * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.device == DEVICE
    device.reads.clear()
    assert (float(x.detach().sum()), x.tolist(), bool((x > 0).all())) == (3.0, [1.0] * 3, True)
    assert device.reads.total() >= 3


@pytest.mark.parametrize("name", [name for name in vars(test_gpu) if name.startswith("test_")])
def test_the_tests_of_a_gpu(name: str) -> None:
    call = getattr(test_gpu, name)
    cases = [mark.args[1] for mark in getattr(call, "pytestmark", []) if mark.name == "parametrize"]
    for case in cases[0] if cases else [None]:
        call() if case is None else call(case)


MORE = {
    "GSPO in bf16": (
        *RUNS["default"],
        *("algorithm.name=GSPO", "training.dtype=bfloat16", "algorithm.beta=0.01"),
        *(
            "network.lora_config.lora_dropout=0.1",
            "network.gradient_checkpointing=true",
        ),
    ),
    "packed": (*RUNS["default"], "network.attn_implementation=eager", "network.use_sequence_packing=true"),
}
LATER = ["packed", *(name for name in RUNS if name != "processes")]


@pytest.mark.parametrize("name", ["GSPO in bf16", *(pytest.param(name, marks=pytest.mark.nightly) for name in LATER)])
def test_a_run(name: str, tmp_path: Path) -> None:
    overrides = (*(RUNS | MORE)[name], f"training.device={DEVICE.type}")
    events = [type(event).__name__ for event in train(build(load_manifest(None, overrides)), tmp_path / "run")]
    assert events[-1] == "RunFinished"


def test_the_host_waits_for_the_device_every_eighth_token(device: type[Device]) -> None:
    runtime, waits = Runtime.from_pretrained("embedded", device="cuda"), []
    slot = runtime.store.allocate(4, 2.0)
    for tokens in (8, 40):
        device.reads.clear()
        settings = SamplingSettings(max_new_tokens=tokens, min_new_tokens=tokens)
        (row,) = runtime.engine.generate([GenerationRequest(slot, [5, 6, 7], 4, settings, key=(0,))])
        assert [len(completion.token_ids) for completion in row] == [tokens] * 4
        waits.append(device.reads.total())
    assert (waits[1] - waits[0]) / 32 <= 2 / 8  # tokens, and their log-probs


@pytest.mark.parametrize(("name", "expected"), [("cuda:0", ["cuda:0"]), ("cuda", [])])
def test_the_device_of_the_base_is_the_current_one(
    name: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    Runtime.from_pretrained("embedded", device=name)
    assert chosen == expected
