"""What one process, and each of several that share its agents, computes: run both and compare.

As a program: takes part in the group that RANK and WORLD_SIZE name, runs the cases that are named after the file to
write, and writes what became of the agents, if it is the one of rank 0.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from agilerl.algorithms import DPO, GRPO, PPO, update
from agilerl.algorithms.update import learn_together
from agilerl.data import collate
from agilerl.llm_envs import ReasoningGym
from agilerl.models.lora import attach, detach
from agilerl.models.slots import AdapterStore
from agilerl.processes import ALONE, Processes, joined
from agilerl.runtime import Runtime
from tests.algorithms.conftest import lora, make_agents, reward, sample
from tests.algorithms.data_agents import agents_of, examples
from tests.models.test_flat import in_fp64
from tests.tiny_models import PAD, VOCABULARY, random_model

Found = dict[str, torch.Tensor]
UPDATES = 2


def new_runtime(processes: Processes, *, double: bool = False, sharding: str = "none") -> Runtime:
    """A small random model; with ``double`` base and adapters are fp64."""
    model = in_fp64(random_model()) if double else random_model()
    runtime = Runtime.for_model(model, lora_config=lora(8), seed=5)
    if double:
        detach(model, runtime.store)
        old = runtime.store
        runtime.store = AdapterStore(old.layers, max_rank=8, head_features=old.head_features, dtype=torch.float64)
        attach(model, runtime.store)
        runtime.engine.store = runtime.store
    runtime.share(processes, sharding)
    return runtime


def learned(agent: Any, updates: int = UPDATES) -> Found:
    """Let an agent sample and learn; returns its weights and metrics."""
    metrics: dict[str, float] = {}
    for turn in range(updates):
        prompts = [
            np.random.default_rng(p + 10 * turn).integers(2, VOCABULARY, 4 + p).tolist()
            for p in agent.runtime.processes.share(5)
        ]
        action = agent.get_action([{"input_ids": torch.tensor([ids])} for ids in prompts])
        rows = [
            (ids[mask_start(mask) :]).tolist()
            for ids_group, masks in zip(action.completion_ids, action.action_masks)
            for ids, mask in zip(ids_group, masks)
        ]
        rewards = torch.tensor([reward(tokens) for tokens in rows])
        metrics = agent.learn(
            (action.completion_ids, action.action_masks, rewards), sampling_logps=action.sampling_logps
        )
    return weights(agent) | {"metrics": plain(metrics)}


def mask_start(mask: torch.Tensor) -> int:
    return int(mask.nonzero()[0]) + 1


def weights(agent: Any) -> Found:
    store = agent.runtime.store
    slots = [s for s in (agent.slot, agent.critic_slot) if s is not None]
    banks = {name: getattr(store, name)[slots].clone() for name in ("theta", "exp_avg", "exp_avg_sq")}
    return banks | {"steps": store.steps[slots].clone()}


def plain(metrics: dict[str, float]) -> torch.Tensor:
    return torch.tensor([metrics[name] for name in sorted(metrics)], dtype=torch.float64)


OF_GRPO: dict[str, Any] = {
    "beta": 0.05,
    "update_epochs": 2,
    "group_size": 4,
    "batch_size": 8,
    "lr": 1e-4,
    "max_output_tokens": 9,
}


def grpo(processes: Processes, *, double: bool = False, sharding: str = "none") -> Found:
    runtime = new_runtime(processes, double=double, sharding=sharding)
    return learned(GRPO(pad_token_id=PAD, runtime=runtime, lora_config=lora(8), seed=5, **OF_GRPO))


def at_once(processes: Processes) -> Found:
    """As ``grpo``, with the sums that GPUs make: each process adds up its own gradients, then all add up the sums."""
    before, update._adds_in_order = update._adds_in_order, lambda store: False
    try:
        return grpo(processes)
    finally:
        update._adds_in_order = before


def tight(processes: Processes) -> Found:
    """As ``grpo``, but the memory of the last of several processes holds two rows at once."""
    runtime = new_runtime(processes)
    whole = runtime.forward

    def forward(parts: Any, **options: Any) -> Any:
        if sum(len(part.batch) for part in parts) > 2:
            raise MemoryError
        return whole(parts, **options)

    if processes.rank > 0:
        runtime.forward = forward  # type: ignore[method-assign]
    found = learned(GRPO(pad_token_id=PAD, runtime=runtime, lora_config=lora(8), seed=5, **OF_GRPO))
    return found | {"limit": torch.tensor(runtime.limits.train_tokens or 0)}


def accelerated(processes: Processes, *, stage: int | None = None) -> Found:
    """The same agent, told of the processes, and with a ``stage`` of how to hold the base, by its accelerator."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    accelerator = None
    if processes.size > 1 and stage is None:
        accelerator = Accelerator(cpu=True)
    elif processes.size > 1:
        gloo = [InitProcessGroupKwargs(backend="gloo")]
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage), kwargs_handlers=gloo)
    agent = GRPO(model_name="embedded", lora_config=lora(4), seed=5, accelerator=accelerator, **OF_GRPO)
    assert agent.runtime.processes.size == processes.size
    assert (agent.runtime.lockstep is None) == (stage is None or processes.size == 1)
    rows = [{"question": word, "answer": word[::-1]} for word in ("one", "two", "six", "ten", "bet", "tub", "top")]
    env = ReasoningGym(
        rows,
        rows[:3],  # no multiple of two processes
        agent.runtime.tokenizer,
        lambda completion, answer, question: sum(c in answer for c in completion) / max(len(completion), 1),
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=4 // processes.size,
        accelerator=accelerator,
    )
    prompts = env.reset()
    for _ in range(UPDATES):
        action = agent.get_action(prompts)
        prompts, rewards = env.step(action.completion_ids)
        metrics = agent.learn(
            (action.completion_ids, action.action_masks, rewards), sampling_logps=action.sampling_logps
        )
    scores = torch.from_numpy(np.sort(agent.test(env)))
    return weights(agent) | {"metrics": plain(metrics), "scores": scores}


def ppo(processes: Processes, *, double: bool = False, sharding: str = "none", **settings: Any) -> Found:
    common = {"lr_actor": 1e-4, "lr_critic": 1e-4, "group_size": 3, "batch_size": 5, "beta": 0.05, "update_epochs": 2}
    runtime = new_runtime(processes, double=double, sharding=sharding)
    values = {**common, "max_output_tokens": 9, **settings}
    return learned(PPO(pad_token_id=PAD, runtime=runtime, lora_config=lora(8), seed=5, **values))


def dpo(processes: Processes, *, double: bool = False, sharding: str = "none", **settings: Any) -> Found:
    runtime = new_runtime(processes, double=double, sharding=sharding)
    (agent,) = agents_of(DPO, ({"lr": 1e-4, "batch_size": 3, "update_epochs": 2},), runtime, **settings)
    own = processes.share(5)
    rows = torch.arange(2 * own.start, 2 * own.stop)
    metrics = [agent.learn(examples(5, seed, pairs=True).select(rows)) for seed in range(UPDATES)]
    return weights(agent) | {"metrics": plain(metrics[-1])}


def population(processes: Processes, **changes: Any) -> Found:
    """Three agents that differ in everything learn together, with micro-batches of a size that the user gave."""
    agents = make_agents(**changes)
    agents[0].runtime.share(processes)
    metrics = [learn_together(agents, [collate(own, PAD) for own in sample(agents)]) for _ in range(UPDATES)]
    found: Found = {}
    for agent, own in zip(agents, metrics[-1]):
        found |= {f"{agent.index}.{name}": value for name, value in weights(agent).items()}
        found[f"{agent.index}.metrics"] = plain(own)
    return found


CASES: dict[str, Callable[[Processes], Found]] = {
    "population-exact": lambda p: population(p, micro_batch_size_per_gpu=3),
    "grpo": grpo,
    "at-once": at_once,
    "tight": tight,
    "accelerated": accelerated,
    "accelerated-zero3": lambda p: accelerated(p, stage=3),
    "ppo": ppo,
    "dpo": dpo,
    "grpo-double": lambda p: grpo(p, double=True),
    "ppo-double": lambda p: ppo(p, double=True),
    "dpo-double": lambda p: dpo(p, double=True),
    **{
        f"{name}-{sharding}": lambda p, run=run, sharding=sharding: run(p, sharding=sharding)
        for name, run in (("grpo", grpo), ("ppo", ppo))
        for sharding in ("fsdp2", "zero3")
    },
}


def run(names: list[str], processes: Processes = ALONE) -> Found:
    torch.set_num_threads(1)
    return {f"{name}/{key}": value for name in names for key, value in CASES[name](processes).items()}


def skip_compiling() -> None:
    """Keep DeepSpeed from compiling an operator for shared memory that no result depends on."""
    import deepspeed.comm.torch  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    out, chosen = Path(sys.argv[1]), sys.argv[2:]
    if any("zero3" in name for name in chosen):
        skip_compiling()
    with joined(timeout_seconds=60) as world:
        result = run(chosen, world)
        digest = hashlib.sha256(b"".join(result[key].numpy().tobytes() for key in sorted(result))).hexdigest()
        digests = {part.decode() for part in world.gather(digest.encode())}
        if world.rank == 0:
            save_file(result, out)
            print(json.dumps({"equal": len(digests) == 1}))
