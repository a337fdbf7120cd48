"""Tokens per second of rollouts: the torch engine, vLLM where it is installed, and Hugging Face generate, interleaved.

    python benchmarking/rollout.py [--model 0.3M|11M|0.5B|1.5B] [--agents 4] [--prompts 8] [--samples 4] [--tokens 32]
                                   [--rounds 9] [--device cuda] [--out FILE]

All arms sample the same number of tokens of the same prompts with the same adapters on the same weights, in one
process. Nothing ends early: the base has no end token. Every adapter changes before each round, so that vLLM's time
holds what training costs it: new adapters, and their probes. Arms take turns within a round, each round in another
order; a ratio is the median over rounds of the ratio within a round, with a bootstrap interval of 95 %.

The models of 0.5B and 1.5B parameters have the shape of Qwen2's of that size, in bf16, with random weights; on a CPU
they take hours, and are there only for the asking.

On a CPU the clock is the process's CPU time in one thread, which neighbours on the machine disturb less; on a GPU it is
wall time. Prints a table and one JSON object.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: E402

from agilerl.config.vllm import VLLMConfig, installed_vllm  # noqa: E402
from agilerl.models.adapters import default_lora_config, write_adapter  # noqa: E402
from agilerl.models.base import load_base  # noqa: E402
from agilerl.models.tiny import tiny_model_path  # noqa: E402
from agilerl.rollouts import GenerationRequest, SamplingSettings  # noqa: E402
from agilerl.rollouts.vllm.engine import VLLMEngine  # noqa: E402
from agilerl.runtime import Runtime  # noqa: E402
from benchmarking.measuring import interval  # noqa: E402

RANK, PROMPT = 16, 48
MODELS: dict[str, dict[str, int] | None] = {
    "0.3M": None,
    "11M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
VOCABULARIES = {"0.5B": 151_936, "1.5B": 151_936}

Arm = Callable[[int], None]


def made_model(name: str, folder: Path) -> Path:
    """Write the weights that all arms load: the embedded model's, or random ones; without an end token."""
    sizes = MODELS[name]
    if sizes is None:
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    else:
        config = Qwen2Config(
            **sizes,
            num_key_value_heads=2,
            vocab_size=VOCABULARIES.get(name, 4096),
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            dtype=torch.bfloat16 if name in VOCABULARIES else torch.float32,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


class Bench:
    """One workload and the arms that do it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        a = arguments
        self.model = made_model(a.model, folder / "model")
        self.runtime = Runtime(load_base(str(self.model), device=a.device), seed=0)  # only tokens go in and out
        store = self.runtime.store
        store.reserve(a.agents)
        self.slots = [store.allocate(RANK, 2.0) for _ in range(a.agents)]
        for slot in self.slots:
            store.initialise(slot, slot)
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(5, 100, (a.prompts, PROMPT)).tolist()
        self.own = self.runtime.engine
        self.vllm: VLLMEngine | None = None
        self.peft: Any = None

    @property
    def tokens(self) -> int:
        a = self.arguments
        return int(a.agents * a.prompts * a.samples * a.tokens)

    def change(self, turn: int) -> None:
        """Move every adapter a little, as an update would."""
        store = self.runtime.store
        for slot in self.slots:
            store.load_adapter(slot, [(a, b + 0.05 * b.std() * torch.randn_like(b)) for a, b in store.adapter(slot)])

    def requests(self, turn: int) -> list[GenerationRequest]:
        a = self.arguments
        sampling = SamplingSettings(a.tokens)
        return [
            GenerationRequest(slot, prompt, a.samples, sampling, key=(slot, turn, place))
            for slot in self.slots
            for place, prompt in enumerate(self.prompts)
        ]

    def torch_engine(self, turn: int) -> None:
        self._check(self.own.generate(self.requests(turn)))

    def vllm_engine(self, turn: int) -> None:
        assert self.vllm is not None
        self._check(self.vllm.generate(self.requests(turn)))

    def _check(self, groups: Sequence[Sequence[Any]]) -> None:
        found = sum(len(c.token_ids) for group in groups for c in group)
        assert found == self.tokens, f"{found} tokens instead of {self.tokens}"

    def hugging_face(self, turn: int) -> None:
        a, found = self.arguments, 0
        ids = torch.tensor(self.prompts, device=a.device)
        for slot in self.slots:
            self.peft.set_adapter(f"a{slot}")
            with torch.no_grad():
                out = self.peft.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    top_k=0,
                    num_return_sequences=a.samples,
                    max_new_tokens=a.tokens,
                    pad_token_id=0,
                )
            found += (out.shape[1] - ids.shape[1]) * out.shape[0]
        assert found == self.tokens, f"{found} tokens instead of {self.tokens}"

    def load_peft(self) -> None:
        """Give Hugging Face the adapters of this round; outside the clock."""
        config = default_lora_config()
        for slot in self.slots:
            factors = [(a.cpu(), b.cpu()) for a, b in self.runtime.store.adapter(slot)]
            path = self.folder / f"adapter{slot}"
            write_adapter(path, self.runtime.store.layers, factors, config, str(self.model))
            if self.peft is None:
                base = AutoModelForCausalLM.from_pretrained(self.model).to(self.arguments.device)
                self.peft = PeftModel.from_pretrained(base, str(path), adapter_name=f"a{slot}").eval()
            else:
                if f"a{slot}" in self.peft.peft_config and len(self.slots) > 1:
                    self.peft.delete_adapter(f"a{slot}")
                self.peft.load_adapter(str(path), adapter_name=f"a{slot}")

    def arms(self) -> dict[str, Arm]:
        found: dict[str, Arm] = {"torch engine": self.torch_engine}
        if installed_vllm() is not None:
            self.vllm = VLLMEngine(
                self.runtime.base,
                self.runtime.store,
                VLLMConfig(sleep_mode=self.arguments.device != "cpu"),
                seed=0,
                lora_config=self.runtime.lora_config,
                own=self.own,
            )
            self.vllm.start(self.arguments.agents, RANK, PROMPT + self.arguments.tokens)
            found["vLLM"] = self.vllm_engine
        found["Hugging Face generate"] = self.hugging_face
        return found


def clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measured(bench: Bench) -> dict[str, list[float]]:
    """Return the seconds of each arm in each round."""
    arms, device = bench.arms(), bench.arguments.device
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(bench.arguments.rounds + 1):
        bench.change(turn)
        bench.load_peft()
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = clock(device)
            arms[name](turn)
            if turn:  # the first round warms up
                seconds[name].append(clock(device) - start)
    return seconds


def summary(bench: Bench, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    own = np.asarray(seconds["torch engine"])
    arms = {}
    for name, each in seconds.items():
        median, low, high = interval([bench.tokens / s for s in each])
        ratio = interval((own / np.asarray(each)).tolist())
        arms[name] = {
            "tokens_per_second": round(median, 1),
            "interval": [round(low, 1), round(high, 1)],
            "ratio_to_torch_engine": [round(r, 3) for r in ratio],
        }
    a = bench.arguments
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "benchmark": "rollout",
        "commit": commit,
        "machine": platform.platform(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "model": a.model,
        "parameters": bench.runtime.base.parameters,
        "device": torch.cuda.get_device_name() if a.device != "cpu" else platform.processor() or platform.machine(),
        "clock": "cpu seconds, one thread" if a.device == "cpu" else "wall seconds",
        "agents": a.agents,
        "prompts": a.prompts,
        "samples": a.samples,
        "prompt_tokens": PROMPT,
        "completion_tokens": a.tokens,
        "rank": RANK,
        "rounds": a.rounds,
        "versions": {"torch": torch.__version__, "vllm": (installed_vllm() or (None, None))[1]},
        "arms": arms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="0.3M", choices=MODELS)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, Path(folder))
        result = summary(bench, measured(bench))
    for name, arm in result["arms"].items():
        low, high = arm["interval"]
        ratio = arm["ratio_to_torch_engine"]
        print(
            f"{name:22} {arm['tokens_per_second']:>10,.0f} tokens/s [{low:,.0f}, {high:,.0f}]   "
            f"{ratio[0]:.2f} x [{ratio[1]:.2f}, {ratio[2]:.2f}]"
        )
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
