"""One agent: constructor, clone, checkpoint, PEFT, mutation, the documented calls."""

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from agilerl.algorithms import GRPO, CosineLRScheduleConfig
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.data import MicroBatch
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.mutation import Change, Mutation
from agilerl.hpo.parameters import HyperparameterConfig, RLParameter
from agilerl.runtime import Runtime
from agilerl.utils.utils import save_llm_checkpoint
from tests.algorithms.conftest import batch_of, equal, lora, make_agents, sample, weights
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model

IDS = torch.tensor([[5, 9, 33, 2, 17, 60]])


def agent_logits(agent: GRPO, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad(), agent.select_adapter("actor"):
        return agent.runtime.base.model(ids).logits


def trained(**changes: Any) -> GRPO:
    (agent,) = make_agents(1, **changes)
    agent.learn(batch_of(agent))
    return agent


# -- construction ----------------------------------------------------------------------------------------------------


def test_keywords_and_config_mean_the_same() -> None:
    runtime = Runtime.for_model(random_model())
    flat = GRPO(runtime=runtime, pad_token_id=PAD, lr="5e-6", group_size=3)
    grouped = GRPO(runtime=runtime, pad_token_id=PAD, config=GRPO.Config(lr=5e-6, group_size=3))
    mixed = GRPO(runtime=runtime, pad_token_id=PAD, config=GRPO.Config(lr=1e-2, group_size=3), lr=5e-6)
    assert flat.config == grouped.config == mixed.config
    assert flat.lr == 5e-6
    assert (GRPO.defaults()["lr"], GRPO.defaults()["group_size"], GRPO.defaults()["runtime"]) == (1e-5, 8, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grup_size": 3}, "did you mean 'group_size'"),
        ({"clip_coef": 1.5}, r"clip_coef=1.5 .* ratio bounds \[-0.5, 2.5\]"),
        ({"clip_coef": (0.8, 0.9)}, "expected a number in"),
        ({"loss_type": "gspo", "importance_sampling_level": "token"}, "pools the ratio over the trajectory"),
        ({"loss_norm": "fixed-length"}, "divides by max_output_tokens"),
        ({"max_output_tokens": 4, "min_output_tokens": 9}, "min_output_tokens=9 is above max_output_tokens=4"),
        ({"lora_config": LoraConfig(use_dora=True)}, "lora_config.use_dora=True"),
        ({"calc_position_embeddings": False}, "calc_position_embeddings=False"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments: dict, message: str) -> None:
    runtime = Runtime.for_model(random_model())
    with pytest.raises(ConfigError, match=message):
        GRPO(runtime=runtime, pad_token_id=PAD, **arguments)


def test_a_checked_assignment_keeps_the_old_value_when_refused() -> None:
    (agent,) = make_agents(1)
    agent.lr = 2e-3
    assert agent.config.lr == 2e-3
    with pytest.raises(ConfigError, match=r"^lr: .*greater than 0"):
        agent.lr = 0
    assert agent.lr == 2e-3


def test_a_peft_model_is_refused_with_a_sentence() -> None:
    from peft import get_peft_model

    with pytest.raises(ConfigError, match="found a PeftModel"):
        GRPO(actor_network=get_peft_model(random_model(), lora(4)), pad_token_id=PAD)


def test_agents_on_one_model_share_one_base_and_leave_it_as_it_was() -> None:
    model = random_model()
    before = model(IDS).logits
    first = GRPO(actor_network=model, pad_token_id=PAD, batch_size=8, group_size=8)
    second = GRPO(actor_network=model, pad_token_id=PAD, index=1)
    assert first.runtime is second.runtime
    assert first.slot != second.slot
    assert torch.equal(model(IDS).logits, before)  # adapters are off outside an agent's own calls
    slot = second.slot
    del second
    assert GRPO(actor_network=model, pad_token_id=PAD).slot == slot


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_clone_with_a_new_index_samples_for_itself() -> None:
    parent = trained()
    same, other = parent.clone(), parent.clone(index=7)
    assert (other.index, other.parent) == (7, parent.index)
    tokens = [[t.token_ids for t in sample([agent])[0]] for agent in (parent, same, other)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


def test_load_checkpoint_takes_weights_and_refuses_other_ranks(tmp_path: Path) -> None:
    agent = trained()
    agent.save_checkpoint(tmp_path / "a", save_optimizer=False)
    fresh = GRPO(runtime=agent.runtime, pad_token_id=PAD, lora_config=lora(8), lr=1e-4)
    fresh.load_checkpoint(tmp_path / "a", overwrite_reference_adapter=True)
    assert torch.equal(agent_logits(fresh), agent_logits(agent))
    assert fresh.lr == 1e-4
    assert fresh.reference_slot is not None
    with pytest.raises(CheckpointError, match="saved without its optimizer"):
        fresh.load_checkpoint(tmp_path / "a", load_optimizer=True)
    small = GRPO(runtime=agent.runtime, pad_token_id=PAD, lora_config=lora(4))
    with pytest.raises(CheckpointError, match=r"rank 8.* rank 4"):
        small.load_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"agent.json is missing"):
        fresh.load_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("rank", [4, 8])
def test_peft_loads_what_an_agent_saved(tmp_path: Path, rank: int) -> None:
    model = random_model()
    agent = GRPO(
        actor_network=model, pad_token_id=PAD, pad_token="<pad>", batch_size=8, group_size=8, lora_config=lora(rank)
    )
    agent.max_output_tokens, agent.lr = 6, 1e-2
    agent.learn(batch_of(agent, 2))
    save_llm_checkpoint(agent, tmp_path / "saved")
    assert not torch.allclose(agent_logits(agent), model(IDS).logits, atol=1e-3)
    for folder in (tmp_path / "saved", tmp_path / "saved" / "actor"):
        loaded = PeftModel.from_pretrained(random_model(), folder)
        assert (loaded(IDS).logits - agent_logits(agent)).abs().max() < 1e-5


def test_an_adapter_that_peft_saved_is_read_back(tmp_path: Path) -> None:
    from peft import get_peft_model

    from agilerl.models.adapters import read_adapter

    other = get_peft_model(random_model(), lora(8))
    with torch.no_grad():
        for name, p in other.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(0), std=0.05)
    other.save_pretrained(tmp_path / "peft")
    (agent,) = make_agents(1)
    factors, config = read_adapter(tmp_path / "peft", agent.runtime.store.layers)
    agent.runtime.store.load_adapter(agent.slot, factors)
    assert config.r == 8
    assert (other(IDS).logits - agent_logits(agent)).abs().max() < 1e-5


def test_a_damaged_adapter_is_refused(tmp_path: Path) -> None:
    agent = trained()
    agent.save_checkpoint(tmp_path / "a")
    path = tmp_path / "a" / "actor" / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        agent.load_checkpoint(tmp_path / "a")
    path.write_bytes(data[:-8] + b"\x00\x00\xc0\x7f" * 2)
    with pytest.raises(CheckpointError, match="not finite"):
        agent.load_checkpoint(tmp_path / "a")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing"):
        agent.load_checkpoint(tmp_path / "a")


# -- mutation --------------------------------------------------------------------------------------------------------


def test_a_learning_rate_mutation_keeps_the_moments_and_the_schedule() -> None:
    schedule = CosineLRScheduleConfig(num_epochs=10, warmup_proportion=0.0)
    runtime = Runtime.for_model(random_model())
    agent = GRPO(
        runtime=runtime,
        pad_token_id=PAD,
        lr=1e-3,
        cosine_lr_schedule_config=schedule,
        max_output_tokens=5,
        batch_size=64,
    )
    for _ in range(5):
        agent.learn(batch_of(agent, 2))
    before = runtime.store.read(agent.slot)
    assert agent.current_lr == pytest.approx(0.5e-3)
    agent.apply_mutation(Mutation(0, "hyperparameters", (Change("lr", 1e-3, 4e-3),)))
    assert agent.current_lr == pytest.approx(2e-3)
    after = runtime.store.read(agent.slot)
    assert all(torch.equal(x, y) for n in before for p, q in zip(before[n], after[n]) for x, y in zip(p, q))
    assert float(runtime.store.steps[agent.slot]) == 5


def test_a_mutation_of_the_rank_acts_on_the_adapter() -> None:
    agent = trained(lr=1e-2)
    before = agent_logits(agent)
    agent.apply_mutation(Mutation(0, "rank", (Change("rank", 8, 16),)))
    assert agent.rank == 16
    assert torch.allclose(agent_logits(agent), before, atol=1e-5)
    agent.learn(batch_of(agent))  # goes on with the larger rank
    assert agent.clone().rank == 16


def test_mutation_hooks_run_and_are_inherited() -> None:
    (agent,) = make_agents(1)
    seen = []
    agent.register_mutation_hook(lambda: seen.append(agent.mut))
    agent.clone().apply_mutation(Mutation(0))
    agent.apply_mutation(Mutation(0, "hyperparameters", (Change("lr", 1e-3, 2e-3),)))
    assert seen == ["None", "lr 0.001 -> 0.002"]


# -- populations and the documented calls ----------------------------------------------------------------------------


def test_population_spreads_over_the_genes() -> None:
    config = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(2, 16, dtype=int))
    runtime = Runtime.for_model(random_model())
    agents = GRPO.population(6, runtime=runtime, pad_token_id=PAD, hp_config=config, lr=1e-5)
    assert [a.index for a in agents] == list(range(6))
    assert (agents[0].lr, agents[0].group_size) == (1e-5, 8)
    assert len({a.lr for a in agents}) == 6
    assert all(1e-6 <= a.lr <= 1e-2 and 2 <= a.group_size <= 16 for a in agents)
    assert torch.equal(runtime.store.theta[0], runtime.store.theta[5])  # all start as the same policy
    same = GRPO.population(2, actor_network=random_model(), pad_token_id=PAD, hp_config=config, init="same")
    assert same[0].hyperparameters == same[1].hyperparameters
    with pytest.raises(ConfigError, match=r"size.*found 0"):
        GRPO.population(0, runtime=runtime, pad_token_id=PAD)


def test_get_action_and_learn_as_documented() -> None:
    (agent,) = make_agents(1, lr=1e-2)
    prompts = [{"input_ids": torch.tensor([[3, 4, 5]])}, {"input_ids": torch.tensor([[7, 8, 9, 10, 11]])}]
    result = agent.get_action(prompts)
    assert [len(i) for i in result.completion_ids] == [4, 4]
    for ids, mask, p in zip(result.completion_ids, result.action_masks, prompts):
        assert mask.shape == (4, ids.shape[1] - 1)
        assert torch.equal(ids[:, : p["input_ids"].shape[1]], p["input_ids"].expand(4, -1))
        assert not mask[:, : p["input_ids"].shape[1] - 1].any()
        assert mask[:, p["input_ids"].shape[1] - 1].all()
    assert [len(x) for x in result.sampling_logps] == [int(m.sum()) for mask in result.action_masks for m in mask]
    rewards = torch.arange(8.0).reshape(2, 4)
    before = weights(agent)
    metrics = agent.learn((result.completion_ids, result.action_masks, rewards), sampling_logps=result.sampling_logps)
    assert {"mean_loss", "mean_kl", "grad_norm", "entropy", "clip_ratio/region_mean"} <= set(metrics)
    assert metrics["reward"] == pytest.approx(3.5)
    assert not equal(weights(agent), before)
    greedy = agent.get_action(prompts, training=False)
    assert [i.shape[0] for i in greedy.completion_ids] == [1, 1]
    expanded = agent.get_action(prompts, repeat_prompts=False)
    assert [i.shape[0] for i in expanded.completion_ids] == [1, 1]


def test_an_environment_may_define_its_exam() -> None:
    class Exam:
        def reset(self) -> None: ...
        def step(self) -> None: ...
        def examine(self, agent: GRPO, loop: int) -> list[float]:
            return [agent.lr] * loop

    (agent,) = make_agents(1, lr=0.5)
    assert agent.test(Exam(), 3).tolist() == [0.5] * 3
    assert agent.fitness == [0.5]


@pytest.mark.parametrize(
    ("experiences", "message"),
    [
        (([torch.ones(2, 5, dtype=torch.int64)], [torch.ones(2, 5)], [1.0, 0.0]), "one column less"),
        (([torch.ones(4, 5, dtype=torch.int64)], [torch.zeros(4, 4)], [1.0, 0.0] * 2), "none marked in 4 rows"),
    ],
)
def test_experiences_that_do_not_fit_are_refused(experiences: Any, message: str) -> None:
    (agent,) = make_agents(1)
    with pytest.raises(ConfigError, match=message):
        agent.learn(experiences)


def test_sampled_logprobs_serve_as_old_ones() -> None:
    """Recomputing the old log-probs gives what the engine recorded, so the second forward can be saved."""
    (agent,) = make_agents(1, batch_size=8)
    batch = batch_of(agent)
    again = fixed_logprobs(agent.runtime, agent.slot, batch, agent.temperature, MicroBatch(5))
    assert torch.allclose(again, batch.sampling_logps, atol=2e-4)


def test_reference_is_the_base_at_first_and_moves_when_told() -> None:
    (agent,) = make_agents(1, beta=0.1, lr=1e-2, batch_size=64)
    assert agent.learn(batch_of(agent))["kl"] == 0.0  # the first window is computed before the first step
    assert agent.learn(batch_of(agent))["kl"] > 0
    agent.set_reference_policy(1)
    assert agent.learn(batch_of(agent))["kl"] == pytest.approx(0.0, abs=1e-6)
    agent.set_reference_policy(1)  # the tracker did not advance: the reference stays
    assert agent.learn(batch_of(agent))["kl"] > 1e-6


def test_use_adapter_reaches_direct_calls_of_the_model() -> None:
    agent = trained(lr=1e-2)
    base = agent.runtime.base.model(IDS).logits
    agent.use_adapter("actor")
    assert torch.equal(agent.runtime.base.model(IDS).logits, agent_logits(agent))
    assert not torch.equal(agent_logits(agent), base)
    agent.use_adapter("reference")
    assert torch.equal(agent.runtime.base.model(IDS).logits, base)
    with pytest.raises(ConfigError, match=r"'actor'.*'critic'"):
        agent.use_adapter("critic")


def test_an_adapter_is_selected_without_a_context_too() -> None:
    """The call alone did nothing, and took any name."""
    agent = trained(lr=1e-2)
    base, own = agent.runtime.base.model(IDS).logits, agent_logits(agent)
    with pytest.raises(ConfigError, match=r"'actor'.*'nope'"):
        agent.select_adapter("nope")
    agent.select_adapter("actor")
    gc.collect()
    assert torch.equal(agent.runtime.base.model(IDS).logits, own)
    with agent.select_adapter("reference"), agent.select_adapter("actor"), agent.select_adapter("reference"):
        assert torch.equal(agent.runtime.base.model(IDS).logits, base)
    assert torch.equal(agent.runtime.base.model(IDS).logits, own)


@pytest.mark.parametrize("moved", [False, True], ids=["base", "slot"])
@pytest.mark.parametrize("how", ["select", "use", "disable"])
def test_what_an_agent_says_is_of_the_selected_adapter(how: str, *, moved: bool) -> None:
    """Log-probs were the actor's, whichever adapter was selected."""
    agent = trained(lr=0.3)
    if moved:
        agent.set_reference_policy(1)
        agent.learn(batch_of(agent))
    batch, prompt = batch_of(agent), [{"input_ids": IDS}]
    slot = None if how == "disable" else agent.reference_slot
    expected = fixed_logprobs(agent.runtime, slot, batch, agent.temperature, agent.micro_batch)
    mine, answer = agent.logprobs(batch), agent.get_action(prompt, training=False).completion_ids[0]
    assert not torch.allclose(mine, expected, atol=0.1)
    with {"select": lambda: agent.select_adapter("reference"), "disable": agent.actor.disable_adapter}.get(
        how, nullcontext
    )():
        if how == "use":
            agent.use_adapter("reference")
        assert torch.equal(agent.logprobs(batch), expected)
        assert torch.equal(agent.actor(IDS).logits, agent.runtime.base.model(IDS).logits)
        now = agent.get_action(prompt, training=False).completion_ids[0]
        assert now.tolist() != answer.tolist()
        if agent.reference_slot is None or how == "disable":
            assert torch.equal(now, agent.actor.generate(IDS, max_new_tokens=9, do_sample=False))
    agent.use_adapter("actor")
    assert torch.equal(agent.logprobs(batch), mine)


def test_training_is_of_the_actor_whatever_is_selected() -> None:
    first, second = trained(lr=1e-2, beta=0.1), trained(lr=1e-2, beta=0.1)
    batch = batch_of(first)
    second.use_adapter("reference")
    assert first.learn(batch) == second.learn(batch)
    assert equal(weights(first), weights(second))


def test_load_alone_finds_base_and_layers_by_itself(tmp_path: Path) -> None:
    runtime = Runtime.from_pretrained("embedded", lora_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    agent = GRPO(runtime=runtime, max_output_tokens=5)
    agent.save_checkpoint(tmp_path / "a")
    loaded = GRPO.load(tmp_path / "a")
    assert loaded.runtime is not runtime
    assert [s.name for s in loaded.runtime.store.layers] == [s.name for s in runtime.store.layers]
    assert torch.equal(agent_logits(loaded), agent_logits(agent))
