"""Whether the same work gives the same bits on a device: done twice, and by agents together or one at a time.

On a CPU in fp32 both hold (the tests say so); on a GPU the first is expected and the second is not promised, because
kernels are chosen by the size of a batch: the largest difference is printed.
"""

from typing import Any

import torch

from agilerl.algorithms.update import learn_together
from benchmarking.roofline import LOADS, RANK, made_model
from benchmarking.roofline_phases import Bench


def trained(name: str, device: str, *, together: bool, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the tokens that fresh agents sample, and the gradients and adapters of one update."""
    load = LOADS[name] | {"agents": 2, "prompts": 2, "group": 4, "longest": min(LOADS[name]["longest"], 32)}
    bench = Bench(made_model(name, device, dtype), load, RANK, device)
    everyone = [[0, 1]] if together else [[0], [1]]
    tokens: list[Any] = [None, None]
    for chosen in everyone:
        for agent, found in zip(chosen, bench.sampled([bench.agents[i].slot for i in chosen])):
            tokens[agent] = [row.token_ids for row in found]
        learn_together([bench.agents[i] for i in chosen], [bench.batches[i] for i in chosen])
    store, slots = bench.runtime.store, [agent.slot for agent in bench.agents]
    # After one step from zero the first moment is the gradient, times a number.
    banks = {"adapters": store.theta, "gradients": store.exp_avg}
    return {"tokens": tokens, **{name: [bank[slot].cpu().clone() for slot in slots] for name, bank in banks.items()}}


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    pairs = list(zip(one["adapters"], other["adapters"]))
    sampled = [list(zip(a, b)) for x, y in zip(one["tokens"], other["tokens"]) for a, b in zip(x, y)]
    distance = max(
        float((a - b).double().norm() / b.double().norm()) for a, b in zip(one["gradients"], other["gradients"])
    )
    return {
        "same_tokens": one["tokens"] == other["tokens"],
        "share_of_equal_tokens": sum(a == b for row in sampled for a, b in row) / sum(map(len, sampled)),
        "distance_of_gradients": distance,
        "same_adapters": all(torch.equal(a, b) for a, b in pairs),
        "largest_difference": max(float((a - b).abs().max()) for a, b in pairs),
    }
