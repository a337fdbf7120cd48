"""The pad token of a base's tokenizer, and devices: what is given acts, what is missing is said in a sentence."""

import logging
import shutil
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoTokenizer

from agilerl import Population
from agilerl.algorithms import GRPO, SFT
from agilerl.compat.gyms import PreferenceGym, ReasoningGym
from agilerl.compat.tokenized import TokenObservationWrapper
from agilerl.config.manifest import load_manifest
from agilerl.envs import DatasetTask
from agilerl.errors import ConfigError
from agilerl.models.base import check_device, load_tokenizer
from agilerl.models.tiny import tiny_model_path
from agilerl.rewards import exact_match
from agilerl.runtime import Runtime
from agilerl.training.resolved import resolve
from agilerl.training.setup import build
from tests.algorithms.conftest import lora
from tests.envs.scripted import Echo
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model

ROWS = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(8)]
PAIRS = [{"prompt": row["question"], "chosen": row["answer"] + "0" * n, "rejected": "x"} for n, row in enumerate(ROWS)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model, whose tokenizer has lost its pad token, as Llama's and GPT-2's never had one."""
    found = tmp_path / "model"
    shutil.copytree(tiny_model_path(), found)
    tokenizer = AutoTokenizer.from_pretrained(found)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(found)
    return found


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token_and_says_so_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="agilerl"):
        agent = GRPO(model_name=str(folder))
    tokenizer = agent.runtime.tokenizer
    assert agent.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    assert [r.getMessage().count(tokenizer.eos_token) for r in caplog.records] == [1]
    caplog.clear()
    Runtime.from_pretrained("embedded")
    assert not caplog.records


@pytest.mark.parametrize("by", ["token", "id", "both"])
def test_a_pad_token_that_is_given_acts_with_a_model_s_name(
    folder: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    token = "z"
    number = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(token)
    given: dict[str, Any] = {"token": {"pad_token": token}, "id": {"pad_token_id": number}}.get(by, {})
    given = given or {"pad_token": token, "pad_token_id": number}
    agent = GRPO(model_name=str(folder), **given)
    assert agent.pad_token_id == agent.runtime.tokenizer.pad_token_id == number
    assert Runtime.from_pretrained(str(folder), **given).tokenizer.pad_token == token
    key, value = next(iter(given.items()))
    session = build(load_manifest(None, [f"network.pretrained_model_name_or_path={folder}", f"network.{key}={value}"]))
    assert {a.pad_token_id for a in session.population.agents} == {number}
    assert resolve(session.config).document()["network"][key] == value
    assert not caplog.records


def test_a_pad_token_given_by_name_acts_on_a_runtime_that_is_there() -> None:
    runtime = Runtime.from_pretrained("embedded")
    end = runtime.tokenizer.eos_token
    assert GRPO(runtime=runtime, pad_token=end).pad_token_id == runtime.tokenizer.eos_token_id
    assert runtime.tokenizer.pad_token_id != runtime.tokenizer.eos_token_id


def test_a_loaded_agent_has_the_padding_it_was_saved_with(folder: Path, tmp_path: Path) -> None:
    agent = SFT(model_name=str(folder), pad_token="z", lora_config=lora(4))
    agent.save_checkpoint(tmp_path / "a")
    loaded = SFT.load(tmp_path / "a")
    assert loaded.pad_token_id == agent.pad_token_id == loaded.runtime.tokenizer.pad_token_id


@pytest.mark.parametrize(
    "given",
    [
        {"pad_token": "no such token"},
        {"pad_token": 7},
        {"pad_token_id": 10**6},
        {"pad_token_id": -1},
        {"pad_token_id": "0"},
        {"pad_token_id": True},
        {"pad_token": "z", "pad_token_id": 1},
    ],
)
def test_a_pad_token_that_is_none_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pad_token"):
        GRPO(model_name="embedded", **given)
    with pytest.raises(ConfigError, match="pad_token"):
        GRPO(runtime=Runtime.from_pretrained("embedded"), **given)


def test_without_any_token_to_pad_with_there_is_a_sentence(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"pad token .*network\.pad_token"):
        load_tokenizer(str(folder))
    assert load_tokenizer(str(folder), pad_token="z").pad_token == "z"
    with pytest.raises(ConfigError, match="pad_token_id"):
        GRPO(actor_network=random_model())


def test_the_tokenizer_of_a_user_is_not_changed() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    before = tokenizer.pad_token
    runtime = Runtime.from_pretrained("embedded", tokenizer=tokenizer, pad_token="z")
    assert (runtime.tokenizer.pad_token, tokenizer.pad_token) == ("z", before)


def test_a_users_tokenizer_without_a_pad_token_pads_with_its_end_token_wherever_it_is_given(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = AutoTokenizer.from_pretrained(folder)
    base = Runtime.from_pretrained("embedded").base
    with caplog.at_level(logging.WARNING, logger="agilerl"):
        runtime = Runtime(base, tokenizer=own)
        agents = GRPO.population(2, runtime=runtime, group_size=2, batch_size=4, max_output_tokens=4)
        people = Population(agents, DatasetTask(ROWS[:4], ROWS[4:], reward_fn=exact_match), tokenizer=own)
        gym = ReasoningGym(ROWS[:4], ROWS[4:], own, exact_match, None, data_batch_size_per_gpu=2)
        pairs = PreferenceGym(PAIRS, PAIRS, own, data_batch_size_per_gpu=2)
        turns = TokenObservationWrapper(Echo(), own, 2)
    end = own.eos_token_id
    found = [runtime.tokenizer, people.tokenizer, gym.tokenizer, pairs.tokenizer, turns.tokenizer]
    assert [one.pad_token_id for one in found] == [end] * 5
    assert (turns.pad_id, agents[0].pad_token_id, own.pad_token_id) == (end, end, None)
    assert len(caplog.records) == 1
    people.learn(people.rollout())
    ids = agents[0].get_action(gym.reset(), training=False).completion_ids
    gym.step(ids)
    batch = pairs.reset()
    padding = torch.arange(batch.ids.shape[1]) >= batch.lengths[:, None]
    assert set(batch.ids[padding].tolist()) == {end}


# -- devices ---------------------------------------------------------------------------------------------------------

ABSENT = ["gpu", "cuda:x", "", "cuda:99", "meta", "cpu:cpu", 3.5, ["cpu"], "cuda:-1"]


@pytest.mark.parametrize("device", ABSENT, ids=repr)
def test_a_device_that_is_not_there_is_refused(device: Any, tmp_path: Path) -> None:
    for make in (
        lambda: check_device(device),
        lambda: GRPO(model_name="embedded", device=device),
        lambda: GRPO(actor_network=random_model(), pad_token_id=PAD, device=device),
        lambda: Runtime.from_pretrained("embedded", device=device),
    ):
        with pytest.raises(ConfigError, match="device"):
            make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_wherever_a_device_is_given(tmp_path: Path) -> None:
    """It was torch's AssertionError, "Torch not compiled with CUDA enabled"."""
    agent = GRPO(model_name="embedded", device="cpu", lora_config=lora(4))
    agent.save_checkpoint(tmp_path / "a")
    model = random_model()
    for make in (
        lambda: GRPO(model_name="embedded", device="cuda"),
        lambda: GRPO(actor_network=model, pad_token_id=PAD, device=torch.device("cuda")),
        lambda: GRPO.load(tmp_path / "a", device="cuda"),
        lambda: Runtime.from_pretrained("embedded", device="cuda:0"),
        lambda: build(load_manifest(None, ["training.device=cuda"])),
    ):
        with pytest.raises(ConfigError, match=r"device='?.*cuda.*needs .*GPU"):
            make()
    assert GRPO(actor_network=model, pad_token_id=PAD).runtime.base.device.type == "cpu"


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    began = monotonic()
    with pytest.raises(ConfigError, match=r"'nobody/nothing'.*'embedded'"):
        GRPO(model_name="nobody/nothing")
    assert monotonic() - began < 15  # the client's own retries take a minute
    assert not constants.HF_HUB_OFFLINE
