"""The phases of an iteration and a generation, each called and timed alone; see roofline.py."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.algorithms.update import learn_together, optim_step
from agilerl.cli.forecast import copy_rate, matmul_rate, shape_of
from agilerl.config.base_model import SharedOptions
from agilerl.data import Completion, Trajectory, collate
from agilerl.functional import MetricReducer
from agilerl.models.base import from_model
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.runtime import Runtime


class Bench:
    """A population on one model, with everything that the phases need."""

    def __init__(
        self, model: Any, load: dict[str, int], rank: int, device: str, options: SharedOptions | None = None
    ) -> None:
        self.load, self.device = load, device
        self.clock = process_time if device == "cpu" else perf_counter
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        base = from_model(model, "model")
        self.runtime = Runtime(base, lora_config=lora, options=options)
        self.shape = shape_of(self.runtime)
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

    def round(self, *, disk: bool = True) -> dict[str, float]:
        """Return the seconds of each phase, all agents together; without ``disk`` no checkpoints are written."""
        times = self.generated([a.slot for a in self.agents], self.load["longest"])
        times["logprobs"] = self._timed(self._reference)
        times |= self.learned()
        times["evolve"] = self._timed(self._clones)
        if not disk:
            return times
        with tempfile.TemporaryDirectory() as folder:
            times["checkpoint"] = self._timed(
                lambda: [a.save_checkpoint(Path(folder) / str(a.index)) for a in self.agents], perf_counter
            )
        return times

    def generated(self, slots: Sequence[int | None], tokens: int) -> dict[str, float]:
        """Return the seconds of the prompts of some slots, and of so many further tokens of each row."""
        # The first token of a completion comes from the prefill itself.
        first = self._timed(lambda: self.sampled(slots, 1))
        whole = self._timed(lambda: self.sampled(slots, tokens + 1))
        return {"prefill": first, "decode": max(whole - first, 1e-9)}

    def learned(self) -> dict[str, float]:
        """Return the seconds of an update's passes, and of its optimizer step."""
        whole = self._timed(lambda: learn_together(self.agents, self.batches))
        step = self._timed(lambda: optim_step(self.agents, [MetricReducer() for _ in self.agents]))
        return {"optimizer": step, "train": max(whole - step, 1e-9)}

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

    def requests(self, slots: Sequence[int | None], tokens: int) -> list[GenerationRequest]:
        """Return the rows of some slots; None is the base without an adapter."""
        settings = SamplingSettings(max_new_tokens=tokens)
        return [
            GenerationRequest(slot, prompt, self.load["group"], settings, key=(0 if slot is None else slot, number))
            for slot in slots
            for number, prompt in enumerate(self.prompts)
        ]

    def sampled(self, slots: Sequence[int | None], tokens: int | None = None) -> list[list[Completion]]:
        """Sample the rows of some slots, of the whole length or of so many tokens; returns those of each slot."""
        tokens, count = tokens or self.load["longest"], len(self.prompts)
        groups = self.runtime.engine.generate(self.requests(slots, tokens))
        assert all(len(row.token_ids) == tokens for group in groups for row in group)
        return [[row for group in groups[k * count : (k + 1) * count] for row in group] for k in range(len(slots))]

    def _reference(self) -> None:
        for agent, batch in zip(self.agents, self.batches):
            fixed_logprobs(self.runtime, None, batch, 1.0, agent.micro_batch)

    def _clones(self) -> None:
        for agent in self.agents:
            agent.clone(index=100 + agent.index).clean_up()
