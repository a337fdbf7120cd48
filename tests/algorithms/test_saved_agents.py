"""What is loaded is the policy that was saved, what is saved is never mixed, what was cleaned up refuses to work."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from agilerl.algorithms import DPO, GRPO, PPO, SFT
from agilerl.errors import CheckpointError, EngineError
from agilerl.hpo.mutation import Mutation
from agilerl.llm_envs import PreferenceGym, SFTGym
from agilerl.models.operators import rescale
from agilerl.runs.atomic import commit_folder
from agilerl.runtime import Runtime
from agilerl.utils.utils import save_llm_checkpoint
from tests.algorithms.conftest import batch_of, equal, lora, weights
from tests.algorithms.data_agents import embedded_runtime, examples, new_runtime
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model

IDS = torch.tensor([[5, 9, 33, 2, 17, 60]])


def scaled(alpha: float, *, rslora: bool = False, rank: int = 8) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=alpha, use_rslora=rslora, target_modules="all-linear", task_type="CAUSAL_LM")


def logits(agent: Any, adapter: str = "actor") -> torch.Tensor:
    with torch.no_grad(), agent.select_adapter(adapter):
        return agent.runtime.base.model(IDS).logits


def trained(algorithm: type = GRPO, **changes: Any) -> Any:
    settings = {"lr_actor": 1e-2, "lr_critic": 1e-2} if algorithm is PPO else {"lr": 1e-2}
    agent = algorithm(
        runtime=Runtime.for_model(random_model(), lora_config=lora(8), seed=5),
        pad_token_id=PAD,
        lora_config=changes.pop("lora_config", lora(8)),
        **{"batch_size": 8, "group_size": 4, "max_output_tokens": 9, "seed": 5, **settings, **changes},
    )
    agent.learn(batch_of(agent))
    return agent


# -- the scale of what is loaded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [scaled(16), scaled(8, rslora=True), scaled(3)])
@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_a_loaded_policy_is_the_one_that_was_saved_whatever_its_scale(
    tmp_path: Path, config: LoraConfig, algorithm: type
) -> None:
    """Alpha 16 into an agent of alpha 8, or rsLoRA into plain: off by a nat, and so was the reference."""
    saved = trained(algorithm, lora_config=config)
    saved.set_reference_policy(1)
    saved.learn(batch_of(saved))
    saved.save_checkpoint(tmp_path / "a")
    agent = trained(algorithm, lora_config=scaled(8))
    with pytest.warns(UserWarning, match="scale"):
        agent.load_checkpoint(tmp_path / "a", load_optimizer=True)
    assert torch.equal(logits(agent), logits(saved))
    assert torch.equal(logits(agent, "reference"), logits(saved, "reference"))
    assert not torch.equal(logits(agent), logits(agent, "reference"))
    assert (agent.lora_config.lora_alpha, agent.lora_config.use_rslora) == (config.lora_alpha, config.use_rslora)
    if algorithm is PPO:
        assert torch.equal(logits(agent, "critic"), logits(saved, "critic"))
    agent.save_checkpoint(tmp_path / "b")
    assert (
        PeftModel.from_pretrained(random_model(), tmp_path / "b" / "actor")(IDS).logits - logits(saved)
    ).abs().max() < 1e-5
    assert torch.equal(logits(agent.clone()), logits(saved))


def test_a_policy_goes_on_exactly_under_the_scale_it_was_trained_with(tmp_path: Path) -> None:
    saved = trained(lora_config=scaled(16))
    saved.save_checkpoint(tmp_path / "a")
    agent = trained(lora_config=scaled(8))
    with pytest.warns(UserWarning, match="scale"):
        agent.load_checkpoint(tmp_path / "a", load_optimizer=True)
    batch = batch_of(saved)
    agent.updates = saved.updates
    for one in (saved, agent):
        one.learn(batch)
    assert equal(weights(agent), weights(saved))


def test_the_same_scale_written_in_another_way_needs_no_word(tmp_path: Path) -> None:
    saved = trained(lora_config=scaled(16))
    saved.save_checkpoint(tmp_path / "a")
    agent = trained(lora_config=scaled(2 * math.sqrt(8), rslora=True))
    agent.load_checkpoint(tmp_path / "a")  # a warning would fail
    assert torch.equal(logits(agent), logits(saved))


def test_a_critic_that_is_kept_keeps_its_values_under_another_scale(tmp_path: Path) -> None:
    trained(GRPO, lora_config=scaled(16)).save_checkpoint(tmp_path / "a")
    agent = trained(PPO, lora_config=scaled(8))
    before = logits(agent, "critic")
    with pytest.warns(UserWarning, match="scale"):
        agent.load_checkpoint(tmp_path / "a", overwrite_critic_adapter=False)
    assert (logits(agent, "critic") - before).abs().max() < 1e-5
    agent.save_checkpoint(tmp_path / "b")
    assert (logits(PPO.load(tmp_path / "b", runtime=agent.runtime), "critic") - before).abs().max() < 1e-5


def test_rescaled_moments_are_those_of_the_rescaled_factors() -> None:
    """D loss / d B grows with the scale: two runs that differ in it have moments that differ by its powers."""
    agent = trained(lora_config=scaled(8))
    store = agent.runtime.store
    before, delta = store.read(agent.slot), logits(agent)
    rescale(store, agent.slot, 4.0)
    after = store.read(agent.slot)
    assert float(store.scaling[agent.slot]) == 4.0
    assert (logits(agent) - delta).abs().max() < 1e-5
    for name, power in (("theta", 1 / 4), ("exp_avg", 4.0), ("exp_avg_sq", 16.0)):
        assert all(torch.equal(a, x) for (a, _), (x, _) in zip(after[name], before[name]))
        assert all(torch.equal(b, y * power) for (_, b), (_, y) in zip(after[name], before[name]))


def test_scales_of_one_agent_that_disagree_are_refused(tmp_path: Path) -> None:
    agent = trained()
    agent.set_reference_policy(1)
    agent.save_checkpoint(tmp_path / "a")
    for part in ("actor", "reference"):
        path = tmp_path / "a" / part / "adapter_config.json"
        good = path.read_text()
        path.write_text(json.dumps({**json.loads(good), "lora_alpha": 99}))
        before = weights(agent)
        with pytest.raises(CheckpointError, match="scale"):
            agent.load_checkpoint(tmp_path / "a")
        assert equal(weights(agent), before)
        path.write_text(good)


def test_a_checkpoint_of_another_base_is_loaded_with_a_word(tmp_path: Path) -> None:
    agent = trained()
    agent.runtime.base.name, agent.runtime.base.fingerprint = "one/model", None  # as of a quantised base
    agent.save_checkpoint(tmp_path / "a")
    agent.load_checkpoint(tmp_path / "a")
    agent.runtime.base.name = "another/model"
    with pytest.warns(UserWarning, match=r"one/model.*another/model"):
        agent.load_checkpoint(tmp_path / "a")
    with pytest.warns(UserWarning, match=r"one/model.*another/model"):
        GRPO.load(tmp_path / "a", runtime=agent.runtime)


# -- the reference of what is loaded ---------------------------------------------------------------------------------


def test_a_checkpoint_whose_reference_is_the_base_brings_the_base(tmp_path: Path) -> None:
    runtime = new_runtime()
    settings: dict[str, Any] = {"runtime": runtime, "pad_token_id": PAD, "lora_config": lora(8), "lr": 1e-2}
    first, agent = DPO(**settings), DPO(**settings, index=1)
    first.learn(examples(8, pairs=True))
    first.save_checkpoint(tmp_path / "dpo")
    agent.learn(examples(8, 3, pairs=True))
    agent.set_reference_policy(1)
    used, base = runtime.store.used, first.reference_key
    agent.load_checkpoint(tmp_path / "dpo")
    assert (agent.reference_slot, agent.reference_key) == (None, base)
    assert runtime.store.used == used - 1
    batch = examples(8, 5, pairs=True)
    assert torch.equal(agent.reference_logprobs(batch), first.reference_logprobs(batch))


def test_the_reference_of_the_stage_before_is_not_this_stage_s(tmp_path: Path) -> None:
    """An agent whose reference is to stay the base keeps it, whatever reference the stage before had."""
    runtime = new_runtime()
    settings: dict[str, Any] = {"runtime": runtime, "pad_token_id": PAD, "lora_config": lora(8), "lr": 1e-2}
    dpo = DPO(**settings)
    dpo.learn(examples(8, pairs=True))
    dpo.set_reference_policy(1)
    dpo.save_checkpoint(tmp_path / "dpo")
    grpo = GRPO(**settings, index=1, use_separate_reference_adapter=False)
    sft = SFT(**settings, index=2)
    for agent in (grpo, sft):
        agent.load_checkpoint(tmp_path / "dpo")
        assert agent.reference_slot is None


# -- saving ----------------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def save(agent: Any, path: Path, **options: Any) -> None:
    agent.save_checkpoint(path, **options)


@pytest.mark.parametrize("write", [save, save_llm_checkpoint])
def test_a_checkpoint_that_exists_is_replaced_as_a_whole_or_refused(tmp_path: Path, write: Callable[..., None]) -> None:
    """The old reference, critic and optimizer stayed in it, and the next load mixed two agents."""
    old = trained(PPO)
    old.set_reference_policy(1)
    write(old, tmp_path / "a")
    before = files(tmp_path / "a")
    assert {"critic/value_head.safetensors", "reference/adapter_model.safetensors"} <= set(before)
    new = trained(GRPO)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        write(new, tmp_path / "a")
    assert files(tmp_path / "a") == before
    write(new, tmp_path / "a", overwrite=True)
    write(new, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_folder_that_holds_something_else_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = trained()
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            agent.save_checkpoint(tmp_path, overwrite=overwrite)
        with pytest.raises(CheckpointError, match="found a file"):
            agent.save_checkpoint(tmp_path / "notes.txt", overwrite=overwrite)
    assert files(tmp_path) == {"notes.txt": b"mine"}
    (tmp_path / "empty").mkdir()
    agent.save_checkpoint(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="works in"):
        agent.save_checkpoint(".", overwrite=True)
    assert (tmp_path / "empty" / "agent.json").exists()


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = trained()
    save_llm_checkpoint(agent, tmp_path / "a")
    before = files(tmp_path / "a")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agilerl.models.adapters.save_file", full)
    agent.learn(batch_of(agent))
    with pytest.raises(CheckpointError):
        save_llm_checkpoint(agent, tmp_path / "a", overwrite=True)
    assert files(tmp_path / "a") == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_with_and_without_the_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr("agilerl.runs.atomic._exchange", lambda one, other: False)
    for text in ("old", "new"):
        commit_folder(tmp_path / "a", lambda f, t=text: (f / t).write_text(t), manifest=False, overwrite=True)  # type: ignore[misc]
    assert files(tmp_path) == {"a/new": b"new"}
    with pytest.raises(CheckpointError, match="exists"):
        commit_folder(tmp_path / "a", lambda f: None)


# -- cleaning up -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_an_agent_that_was_cleaned_up_refuses_to_work(tmp_path: Path, algorithm: type) -> None:
    """It kept its slot's number: training it moved the adapter of whoever got the slot next."""
    agent = trained(algorithm)
    agent.set_reference_policy(1)
    agent.save_checkpoint(tmp_path / "a")
    batch, runtime = batch_of(agent), agent.runtime
    used = runtime.store.used
    agent.use_adapter("actor")
    agent.clean_up()
    agent.clean_up()
    assert runtime.store.used == 0 < used
    assert runtime.store.route is None
    heir = algorithm(runtime=runtime, pad_token_id=PAD, lora_config=lora(8), index=7)
    before = weights(heir)
    prompt = {"input_ids": IDS}
    uses: dict[str, Callable[[], Any]] = {
        "learn": lambda: agent.learn(batch),
        "accumulate": lambda: agent.accumulate(batch),
        "optim_step": agent.optim_step,
        "get_action": lambda: agent.get_action([prompt]),
        "logprobs": lambda: agent.logprobs(batch),
        "clone": agent.clone,
        "state": agent.state,
        "save": lambda: agent.save_checkpoint(tmp_path / "b"),
        "save_llm": lambda: save_llm_checkpoint(agent, tmp_path / "b"),
        "load": lambda: agent.load_checkpoint(tmp_path / "a"),
        "reference": lambda: agent.set_reference_policy(9),
        "select": lambda: agent.use_adapter("actor"),
        "select_reference": lambda: agent.use_adapter("reference"),
        "mutate": lambda: agent.apply_mutation(Mutation(0, "none", ())),
        "move": lambda: agent.move_to(5),
        "optimizer": agent.reinit_optimizers,
        "rank": lambda: agent.rank,
    }
    for use in uses.values():
        with pytest.raises(EngineError, match="cleaned up"):
            use()
    assert equal(weights(heir), before)
    assert not (tmp_path / "b").exists()
    assert "index=0" in repr(agent)


# -- sick agents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [SFT, DPO])
def test_a_sick_agent_that_learns_from_data_has_no_fitness(algorithm: type) -> None:
    agent = algorithm(runtime=embedded_runtime())
    answers = {"target": "12"} if algorithm is SFT else {"chosen": "12", "rejected": "3"}
    rows = [{"prompt": str(n), **answers} for n in range(8)]
    kind = SFTGym if algorithm is SFT else PreferenceGym
    gym = kind(rows, rows, agent.runtime.tokenizer, data_batch_size_per_gpu=4)
    agent.test(gym)
    agent.sick = "loss, gradient or samples were not finite"
    agent.test(gym)
    assert math.isfinite(agent.fitness[0])
    assert math.isnan(agent.fitness[1])
