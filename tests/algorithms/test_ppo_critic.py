"""PPO's second slot: gradients, exactness in a population, sick critics, copies, checkpoints, evolution."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from agilerl.algorithms import GRPO, PPO
from agilerl.algorithms.forward import AgentRows, fixed_values, forward
from agilerl.algorithms.update import learn_together
from agilerl.data import MicroBatch, collate
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.mutation import Change, Mutation
from agilerl.utils.utils import save_llm_checkpoint
from tests.algorithms.conftest import lora, sample
from tests.algorithms.ppo_agents import batch_of, bits, equal, make_agents, new_runtime, turn_batch
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model


# -- the critic's gradients ------------------------------------------------------------------------------------------


def test_gradients_of_head_and_critic_s_adapter_against_autograd_on_a_merged_copy() -> None:
    agents = make_agents(2)
    store = agents[0].runtime.store
    rng = torch.Generator().manual_seed(0)
    for agent in agents:
        factors = [(a, torch.randn(b.shape, generator=rng) * 0.05) for a, b in store.adapter(agent.critic_slot)]
        store.load_adapter(agent.critic_slot, factors)
    batch = turn_batch(agents[0])
    weigh = torch.randn(batch.action_mask.shape, generator=rng)
    parts = [AgentRows(a.slot, batch, 1.0) for a in agents]
    parts += [AgentRows(a.critic_slot, batch, 1.0, values=True) for a in agents]
    outputs = forward(agents[0].runtime, parts)
    (outputs[2].values * weigh).sum().backward(retain_graph=True)
    (outputs[3].values * -2 * weigh).sum().backward()
    assert store.grad[[a.slot for a in agents]].abs().sum() == 0
    for agent, output, factor in zip(agents, outputs[2:], (1, -2)):
        slot, model = agent.critic_slot, random_model()
        leaves = [(a.requires_grad_(), b.requires_grad_()) for a, b in store.adapter(slot)]
        head = store.heads[slot].clone().requires_grad_()
        merged = {
            f"{layer.name}.weight": model.get_submodule(layer.name).weight + float(store.scaling[slot]) * b @ a
            for layer, (a, b) in zip(store.layers, leaves)
        }
        hidden = torch.func.functional_call(model, merged, (batch.ids,), {"output_hidden_states": True}).hidden_states[
            -1
        ][:, :-1]
        values = torch.where(batch.action_mask, hidden @ head[:-1] + head[-1], 0.0)
        assert torch.allclose(output.values, values, atol=1e-4)
        assert torch.allclose(fixed_values(agent.runtime, slot, batch, MicroBatch(4)), values, atol=1e-4)
        (values * factor * weigh).sum().backward()
        assert_close(store.head_grads[slot], head.grad)
        for (a, b), (bank_a, bank_b) in zip(leaves, store.factor_grads):
            rank = a.shape[0]
            assert_close(bank_a[slot, :rank], a.grad)
            assert_close(bank_b[slot, :, :rank], b.grad)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


# -- populations -----------------------------------------------------------------------------------------------------


def mixed(who: str) -> list[Any]:
    runtime = new_runtime()
    agents: list[Any] = list(make_agents(2, runtime))
    settings = {"lr": 1e-2, "group_size": 4, "batch_size": 8, "beta": 0.02, "max_output_tokens": 9, "seed": 5}
    if who == "PPO + GRPO":
        agents.append(GRPO(runtime=runtime, pad_token_id=PAD, index=2, lora_config=lora(8), **settings))
    return agents


@pytest.mark.parametrize("who", ["PPO", "PPO + GRPO"])
def test_together_is_one_at_a_time_to_the_bit(who: str) -> None:
    agents, tokens = mixed(who), []
    for _ in range(2):
        rollouts = sample(agents)
        tokens.append([[t.token_ids for t in own] for own in rollouts])
        learn_together(agents, [collate(own, PAD) for own in rollouts])
    expected = [bits(a) for a in agents]
    for own in range(len(agents)):
        others = mixed(who)
        start = [bits(a) for a in others]
        for step in tokens:
            (rollout,) = sample([others[own]])
            assert [t.token_ids for t in rollout] == step[own]
            learn_together([others[own]], [collate(rollout, PAD)])
        assert equal(bits(others[own]), expected[own])
        assert all(equal(bits(a), before) for i, (a, before) in enumerate(zip(others, start)) if i != own)
        assert not equal(start[own], expected[own])


def test_turns_together_are_one_at_a_time_to_the_bit() -> None:
    agents = make_agents(2)
    learn_together(agents, [turn_batch(a, 5 + a.index) for a in agents])
    expected = [bits(a) for a in agents]
    for own in range(2):
        agents = make_agents(2)
        agents[own].learn(turn_batch(agents[own], 5 + own))
        assert equal(bits(agents[own]), expected[own])


@pytest.mark.parametrize("where", ["value head", "critic's gradient", "actor's gradient", "reward"])
def test_a_sick_critic_skips_the_whole_step_of_its_agent_only(where: str) -> None:
    expected = mixed("PPO + GRPO")
    batches = [collate(own, PAD) for own in sample(expected)]
    learn_together(expected, batches)
    agents = mixed("PPO + GRPO")
    sick, store = agents[1], agents[0].runtime.store
    if where == "value head":
        store.heads[sick.critic_slot, 3] = float("nan")
    if where == "reward":
        batches[1].rewards[0, 0] = float("inf")  # no grade: the row is left out, the agent goes on
    before = bits(sick)
    if "gradient" in where:
        optimizer = sick.optimizer_settings

        def infected() -> Any:
            """Called before each step: the loss was finite, the gradient is not."""
            store.grad[sick.critic_slot if "critic" in where else sick.slot, 0] = float("inf")
            return optimizer()

        sick.optimizer_settings = infected
    metrics = learn_together(agents, batches)
    assert equal(bits(agents[0]), bits(expected[0]))
    assert equal(bits(agents[2]), bits(expected[2]))
    assert equal(bits(sick), before) is (where != "reward")
    assert metrics[1]["skipped_steps"] == (0 if where == "reward" else 6)


def test_rows_without_a_grade_are_left_out() -> None:
    (agent,) = make_agents(1)
    batch = batch_of(agent)
    batch.rewards[[0, 3]] = float("nan")
    assert len(agent.prepare(batch)) == len(batch) - 2
    several = turn_batch(agent)
    several.rewards[2, 0] = float("inf")  # one turn of three
    assert len(agent.prepare(several)) == len(several) - 1
    batch.rewards[:] = float("nan")
    before = bits(agent)
    assert agent.learn(batch)["loss"] == 0
    assert equal(bits(agent), before)


# -- copies ----------------------------------------------------------------------------------------------------------


def trained(**changes: Any) -> PPO:
    (agent,) = make_agents(1, batch_size=8, **changes)
    agent.learn(batch_of(agent))
    return agent


def test_the_critic_is_a_peft_folder_with_its_head_beside_it(tmp_path: Path) -> None:
    agent = trained(lr_critic=3e-2)
    save_llm_checkpoint(agent, tmp_path)
    files = {p.name for p in (tmp_path / "critic").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "value_head.safetensors"} <= files
    head = load_file(tmp_path / "critic" / "value_head.safetensors")
    assert (head["weight"].shape, head["bias"].shape) == ((1, 64), (1,))
    batch = batch_of(agent)
    model = PeftModel.from_pretrained(random_model(), tmp_path / "critic")
    with torch.no_grad():
        hidden = model(batch.ids, output_hidden_states=True).hidden_states[-1][:, :-1]
    values = torch.where(batch.action_mask, (hidden @ head["weight"].T + head["bias"]).squeeze(-1), 0.0)
    found = fixed_values(agent.runtime, agent.critic_slot, batch, MicroBatch(4))
    assert found.abs().max() > 0.01
    assert torch.allclose(values, found, atol=1e-4)


def test_load_checkpoint_takes_the_critic_or_starts_it_from_the_actor(tmp_path: Path) -> None:
    agent = trained()
    store = agent.runtime.store
    agent.save_checkpoint(tmp_path / "ppo", save_optimizer=False)
    other = GRPO(runtime=agent.runtime, pad_token_id=PAD, lora_config=lora(8), lr=1e-2, batch_size=8, group_size=8)
    other.learn(batch_of(agent))
    other.save_checkpoint(tmp_path / "grpo")

    fresh = PPO(runtime=agent.runtime, pad_token_id=PAD, lora_config=lora(8))
    start = store.theta[fresh.critic_slot].clone()
    fresh.load_checkpoint(tmp_path / "ppo", overwrite_critic_adapter=False)
    assert torch.equal(store.theta[fresh.critic_slot], start)
    assert torch.equal(store.theta[fresh.slot], store.theta[agent.slot])
    fresh.load_checkpoint(tmp_path / "ppo")
    assert torch.equal(store.theta[fresh.critic_slot], store.theta[agent.critic_slot])
    assert store.steps[fresh.critic_slot] == 0
    assert store.exp_avg[fresh.critic_slot].abs().sum() == 0
    with pytest.warns(UserWarning, match="is of GRPO and has no critic: this agent's critic starts from the actor"):
        fresh.load_checkpoint(tmp_path / "grpo")
    assert torch.equal(store.theta[fresh.critic_slot], store.theta[other.slot])
    assert store.heads[fresh.critic_slot].abs().sum() == 0
    assert store.theta[other.slot].abs().sum() > 0


def test_a_damaged_value_head_is_refused(tmp_path: Path) -> None:
    agent = trained()
    agent.save_checkpoint(tmp_path)
    path = tmp_path / "critic" / "value_head.safetensors"
    good = load_file(path)
    save_file({"weight": good["weight"]}, path)
    with pytest.raises(CheckpointError, match=r"value head.*bias"):
        agent.load_checkpoint(tmp_path)
    save_file({**good, "bias": torch.tensor([float("nan")])}, path)
    with pytest.raises(CheckpointError, match="not finite"):
        agent.load_checkpoint(tmp_path)
    save_file({**good, "weight": torch.zeros(1, 3)}, path)
    with pytest.raises(CheckpointError, match="65 numbers, found 4"):
        agent.load_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"value_head.safetensors is missing"):
        agent.load_checkpoint(tmp_path)


def test_direct_calls_of_the_model_can_go_through_the_critic() -> None:
    agent = trained(lr_critic=3e-2)
    ids = torch.tensor([[5, 9, 33]])
    logits = []
    for name in ("critic", "actor", "reference"):
        with agent.select_adapter(name), torch.no_grad():
            logits.append(agent.runtime.base.model(ids).logits)
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    with pytest.raises(ConfigError, match="expected the adapter"):
        agent.use_adapter("nobody")


# -- slots -----------------------------------------------------------------------------------------------------------


def test_slots_are_given_back_once() -> None:
    agents = make_agents(2)
    store = agents[0].runtime.store
    assert store.used == 4
    agents[0].clean_up()
    assert store.used == 2
    child = agents[1].clone()
    taken = {child.slot, child.critic_slot}
    agents.pop(0)  # collected only now: must not give the child's slots away
    assert store.used == 4
    assert store.lowest_free_slot() not in taken
    del child
    assert store.used == 2


def test_a_reference_s_slot_is_given_back_once() -> None:
    agents = make_agents(2)
    store = agents[0].runtime.store
    agents[0].set_reference_policy(1)
    agents[0].clean_up()
    clones = [agents[1].clone(), agents[1].clone()]
    assert store.used == 6
    agents.pop(0)
    assert store.used == 6
    del clones


def test_a_forward_pass_counts_the_critic_s_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = make_agents(2, batch_size=6, beta=0.0, update_epochs=1)
    batches = [turn_batch(a) for a in agents]
    runtime, seen = agents[0].runtime, []

    def counted(runtime: Any, parts: Any, **options: Any) -> Any:
        seen.append(sum(len(p.batch) for p in parts))
        return forward(runtime, parts, **options)

    # Of training alone: what reads the old values is not counted.
    monkeypatch.setattr("agilerl.algorithms.update.forward", counted)
    tokens = sum(2 * batch.distinct_tokens for batch in batches)  # each is read by actor and critic
    for most, expected in ((tokens, [24]), (tokens - 1, [12, 12])):  # 6 rows of 2 agents
        seen.clear()
        runtime.max_tokens = most
        learn_together(agents, batches)
        assert seen == expected


def test_move_takes_the_critic_along() -> None:
    first, second = make_agents(2)
    second.learn(batch_of(second))
    store, before = first.runtime.store, bits(second)
    first.clean_up()
    second.move_to(0)
    assert (second.slot, second.critic_slot) == (0, 1)
    assert store.used == 2
    assert equal(bits(second), before)
    del first
    assert store.used == 2


def test_a_rank_mutation_changes_both_adapters_and_keeps_the_values() -> None:
    agent = trained(lr_critic=1e-2)
    batch = batch_of(agent)
    before = fixed_values(agent.runtime, agent.critic_slot, batch, MicroBatch(4))
    agent.apply_mutation(Mutation(0, "rank", (Change("rank", 8, 16),)))
    assert agent.runtime.store.ranks[agent.critic_slot] == agent.rank == 16
    assert torch.allclose(fixed_values(agent.runtime, agent.critic_slot, batch, MicroBatch(4)), before, atol=1e-5)
    assert equal(bits(agent.clone()), bits(agent))
    head = agent.runtime.store.heads[agent.critic_slot].clone()
    agent.apply_mutation(Mutation(0, "rank", (Change("rank", 16, 4),)))
    assert torch.equal(agent.runtime.store.heads[agent.critic_slot], head)
    agent.learn(batch)
    assert agent.skipped_steps == 0


@pytest.mark.parametrize("rank", [4, 16])
def test_a_rank_mutation_leaves_the_reference_as_it_was(rank: int, tmp_path: Path) -> None:
    agent = trained(lr_actor=1e-2)
    agent.set_reference_policy(1)
    ids = torch.tensor([[5, 9, 33]])

    def reference(of: Any) -> torch.Tensor:
        with of.select_adapter("reference"), torch.no_grad():
            return of.runtime.base.model(ids).logits

    before = reference(agent)
    agent.apply_mutation(Mutation(0, "rank", (Change("rank", 8, rank),)))
    agent.save_checkpoint(tmp_path)
    peft = PeftModel.from_pretrained(random_model(), tmp_path / "reference")(ids).logits
    assert torch.allclose(peft, before, atol=1e-4)
    for copy in (agent.clone(), PPO.load(tmp_path, runtime=agent.runtime)):
        assert torch.allclose(reference(copy), before, atol=1e-5)
    agent.set_reference_policy(2)
    assert agent.runtime.store.ranks[agent.reference_slot] == rank


def test_new_optimizers_forget_the_moments_of_both_adapters() -> None:
    agent = trained()
    agent.reinit_optimizers()
    assert all(t.abs().sum() == 0 for i in (1, 2, 3, 5, 6, 7) for t in [bits(agent)[i]])
