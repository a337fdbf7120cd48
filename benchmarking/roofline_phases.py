"""The phases of an iteration and a generation, each called and timed alone; see roofline.py."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.algorithms.update import learn_together, optim_step
from agilerl.cli.forecast import copy_rate, matmul_rate, shape_of
from agilerl.data import Trajectory, collate
from agilerl.functional import MetricReducer
from agilerl.models.base import from_model
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.runtime import Runtime


class Bench:
    """A population on one model, with everything that the phases need."""

    def __init__(self, model: Any, load: dict[str, int], rank: int, device: str) -> None:
        self.load, self.device = load, device
        self.clock = process_time if device == "cpu" else perf_counter
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        base = from_model(model, "model")
        self.shape = shape_of(model, lora, name="model", width=base.dtype.itemsize)
        self.runtime = Runtime(base, lora_config=lora)
        rows = load["prompts"] * load["group"]
        self.runtime.store.reserve(load["agents"] + 1)
        self.agents = [
            GRPO(runtime=self.runtime, pad_token_id=0, index=i, group_size=load["group"], batch_size=rows)
            for i in range(load["agents"])
        ]
        generator = torch.Generator().manual_seed(1)
        vocabulary = base.vocabulary_size
        self.prompts = torch.randint(5, vocabulary, (load["prompts"], load["prompt"]), generator=generator).tolist()
        self.batches = [self._batch(generator, vocabulary) for _ in self.agents]
        self.dtype = base.dtype

    def _batch(self, generator: torch.Generator, vocabulary: int) -> Any:
        """Return trajectories of the lengths of the load, with rewards that differ inside each group."""
        length, made = self.load["longest"], []
        for group, prompt in enumerate(self.prompts):
            for sample in range(self.load["group"]):
                tokens = torch.randint(5, vocabulary, (length,), generator=generator).tolist()
                made.append(
                    Trajectory(
                        prompt_ids=prompt,
                        token_ids=tokens,
                        logprobs=[-2.0] * length,
                        rewards=[float(sample % 2)],
                        action_mask=[True] * length,
                        group=group,
                        finish_reason="stop",
                    )
                )
        return collate(made, 0)

    def rates(self) -> tuple[float, float]:
        """Return F and BW as they are just now."""
        return matmul_rate(self.device, self.dtype, self.clock), copy_rate(self.device, self.clock)

    def disk_rate(self) -> float:
        """Return bytes a second of a file written and synchronised."""
        import os

        data = bytes(2**24)
        with tempfile.TemporaryFile() as file:
            start = perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return len(data) / (perf_counter() - start)

    def round(self) -> dict[str, float]:
        """Return the seconds of each phase, all agents together."""
        # The first token of a completion comes from the prefill itself.
        first = self._timed(lambda: self._generate(1))
        whole = self._timed(lambda: self._generate(self.load["longest"] + 1))
        times = {"prefill": first, "decode": max(whole - first, 1e-9)}
        times["logprobs"] = self._timed(self._reference)
        learned = self._timed(lambda: learn_together(self.agents, self.batches))
        times["optimizer"] = self._timed(lambda: optim_step(self.agents, [MetricReducer() for _ in self.agents]))
        times["train"] = max(learned - times["optimizer"], 1e-9)
        times["evolve"] = self._timed(self._clones)
        with tempfile.TemporaryDirectory() as folder:
            times["checkpoint"] = self._timed(
                lambda: [a.save_checkpoint(Path(folder) / str(a.index)) for a in self.agents], perf_counter
            )
        return times

    def _timed(self, call: Callable[[], object], clock: Callable[[], float] | None = None) -> float:
        """Return the seconds of a call: on one CPU thread its CPU time, which other processes do not lengthen."""
        clock = clock or self.clock
        self._wait()
        start = clock()
        call()
        self._wait()
        return clock() - start

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def sampled(self, chosen: Sequence[int], tokens: int | None = None) -> list[list[list[int]]]:
        """Sample the rows of some agents, of the whole length or of so many tokens; returns each agent's tokens."""
        settings = SamplingSettings(max_new_tokens=tokens or self.load["longest"])
        requests = [
            GenerationRequest(self.agents[i].slot, prompt, self.load["group"], settings, key=(i, number))
            for i in chosen
            for number, prompt in enumerate(self.prompts)
        ]
        groups = self.runtime.engine.generate(requests)
        rows = [[completion.token_ids for completion in group] for group in groups]
        assert all(len(row) == settings.max_new_tokens for group in rows for row in group)
        count = len(self.prompts)
        return [[row for group in rows[k * count : (k + 1) * count] for row in group] for k in range(len(chosen))]

    def _generate(self, tokens: int) -> None:
        self.sampled(range(len(self.agents)), tokens)

    def _reference(self) -> None:
        for agent, batch in zip(self.agents, self.batches):
            self.runtime.fixed_logprobs(None, batch, 1.0, agent.micro_batch)

    def _clones(self) -> None:
        for agent in self.agents:
            agent.clone(index=100 + agent.index).clean_up()
