"""The parts of gpu.py: each measures rows, and writes them as they come.

    python benchmarking/gpu_parts.py PART [--device cuda|cpu] --out FILE

On a CPU the same rows are measured of a tiny model, which tries the code and says nothing about a GPU. A row that
cannot be had here says why (``not_available``); one that fails says how (``failed``), the others go on, and the exit
code is 1.
"""

import argparse
import gc
import json
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS reads it once, when it starts; deterministic products need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agilerl.algorithms.forward import fixed_logprobs  # noqa: E402
from benchmarking.gpu import Rows, device_facts  # noqa: E402

BASE = {"cuda": "0.5B", "cpu": "0.2M"}
"""The model that most parts measure."""


class Part:
    """A part at work: its rows, and how many of them have failed."""

    def __init__(self, rows: Rows, device: str) -> None:
        self.rows, self.device, self.failed = rows, device, 0
        self.on_gpu = device != "cpu"

    def row(self, measure: Callable[[], Mapping[str, Any]], *, optional: bool = False, **names: Any) -> None:
        """Add a row that begins with names, and ends with what is measured or why it is not.

        With ``optional`` it need not be available on this device, or with what is installed.
        """
        from agilerl.errors import ConfigError

        found: Mapping[str, Any]
        start = perf_counter()
        try:
            found = measure()
        except Exception as error:  # whatever it is, the other rows are worth having
            traceback.print_exc()
            missing = optional and isinstance(error, ConfigError | ImportError)
            self.failed += not missing
            why = (str(error).splitlines() or [""])[0][:300]
            found = {"not_available": why} if missing else {"failed": f"{type(error).__name__}: {why}"}
        self.rows.add(**names, **found, spent=round(perf_counter() - start, 2))
        self.emptied()

    def emptied(self) -> None:
        """Free what the last row has left behind."""
        gc.collect()
        if self.on_gpu:
            import torch

            torch.cuda.empty_cache()

    def bench(self, load: Mapping[str, int], name: str | None = None, **options: Any) -> Any:
        """Return a population on a model, which by default is that of the device."""
        from agilerl.config.base_model import SharedOptions
        from benchmarking.roofline import RANK, made_model
        from benchmarking.roofline_phases import Bench

        model = made_model(name or BASE[self.device], self.device)
        return Bench(model, dict(load), RANK, self.device, SharedOptions(**options))


# -- the tests --------------------------------------------------------------------------------------------------------


def tests(part: Part) -> None:
    """A row for each test marked gpu."""
    import pytest

    class Reporter:
        @staticmethod
        def pytest_runtest_logreport(report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                failed = {"error": str(report.longrepr)[-600:]} if report.failed else {}
                part.rows.add(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), **failed)

    # Its own options would need plugins that may not be there, and other versions of libraries have other warnings.
    marked = "gpu" if part.on_gpu else "gpu and not gpu"
    plain = ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default", "-q", "-m", marked]
    code = int(pytest.main([*plain, "tests/test_gpu.py"], plugins=[Reporter()]))
    if not part.on_gpu:
        part.rows.add(test="pytest -m gpu", outcome="not run on a CPU")
    part.failed += code not in ((0,) if part.on_gpu else (0, 5))


# -- bits -------------------------------------------------------------------------------------------------------------


def bits(part: Part) -> None:
    """The same work twice, and by agents together or alone; what deterministic kernels change, and cost."""
    import torch

    from benchmarking.bits import compared, trained

    models = [("embedded", torch.float32), (BASE[part.device], torch.bfloat16 if part.on_gpu else torch.float32)]
    for name, dtype in models:
        for deterministic in (False, True):

            def measure(name: str = name, dtype: torch.dtype = dtype) -> dict[str, Any]:
                trained(name, part.device, together=True, dtype=dtype)  # warms up
                start = perf_counter()
                first = trained(name, part.device, together=True, dtype=dtype)
                seconds = perf_counter() - start
                again, alone = (trained(name, part.device, together=t, dtype=dtype) for t in (True, False))
                return {"seconds": seconds, "repeated": compared(first, again), "alone": compared(first, alone)}

            torch.use_deterministic_algorithms(deterministic)
            part.row(measure, model=name, dtype=str(dtype).removeprefix("torch."), deterministic=deterministic)
    torch.use_deterministic_algorithms(False)


# -- a run ------------------------------------------------------------------------------------------------------------


def run(part: Part) -> None:
    """A short run that is stopped and resumed, against one that was not; then the default run."""
    import agilerl
    from agilerl.config.manifest import load_manifest
    from agilerl.runs.stopping import Interrupted, StopRequest
    from agilerl.training.events import Evolved, HeldOutTest, IterationDone
    from agilerl.training.run import train
    from agilerl.training.setup import build
    from benchmarking.same_bits import GRPO, SMALL, differences, digests

    here = f"training.device={part.device}"

    def made(out: Path, overrides: Sequence[str], stop: StopRequest | None = None) -> Iterator[Any]:
        return train(build(load_manifest(None, [*overrides, here])), out, stop=stop)

    def resumed() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            whole, parts, stop = Path(folder, "whole"), Path(folder, "parts"), StopRequest()
            list(made(whole, (*SMALL, *GRPO)))
            try:
                for event in made(parts, (*SMALL, *GRPO), stop):
                    stop.signal = 15 if isinstance(event, IterationDone) else stop.signal
            except Interrupted:
                agilerl.Run(parts).resume(display=False)
            found = differences(digests(whole), digests(parts))
            return {"files": len(digests(whole)), "different_files": found, "same": not found}

    part.row(resumed, what="a resumed run against one that was not stopped")

    start, seconds = perf_counter(), 0.0
    with tempfile.TemporaryDirectory() as folder:

        def whole_run() -> dict[str, Any]:
            nonlocal seconds
            small = ("training.max_steps=512", "environment.eval_prompts=16", "environment.test_prompts=16")
            size = () if part.on_gpu else small
            for event in made(Path(folder, "run"), size):
                seconds = perf_counter() - start
                if isinstance(event, Evolved):
                    best = max(fitness.mean for fitness in event.fitness.values())
                    part.rows.add(what="generation", generation=event.generation, seconds=seconds, exam=best)
                elif isinstance(event, HeldOutTest):
                    part.rows.add(what="test", who=event.who, accuracy=event.fitness.mean, seconds=seconds)
            summary = json.loads(Path(folder, "run", "summary.json").read_text())
            return {"seconds": seconds, "tokens": summary["tokens"], "test": summary["test"]}

        part.row(whole_run, what="the default run")


def real(part: Part) -> None:
    """tutorials/manifests/real/smollm2.yaml in both data types, by generations: what is learned, and the time."""
    from agilerl.config.manifest import load_manifest
    from agilerl.training.events import Evolved, HeldOutTest
    from agilerl.training.run import train
    from agilerl.training.setup import build

    manifest = ROOT / "tutorials" / "manifests" / "real" / "smollm2.yaml"
    small = (
        () if part.on_gpu else ("training.max_steps=256", "environment.test_prompts=16", "environment.eval_prompts=16")
    )
    for dtype in ("bfloat16", "float32") if part.on_gpu else ("float32",):

        def measure(dtype: str = dtype) -> dict[str, Any]:
            start = perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                settings = (f"training.device={part.device}", f"training.dtype={dtype}", *small)
                for event in train(build(load_manifest(manifest, settings)), Path(folder, "run")):
                    seconds = perf_counter() - start
                    if isinstance(event, Evolved):
                        best = max(fitness.mean for fitness in event.fitness.values())
                        part.rows.add(dtype=dtype, generation=event.generation, seconds=seconds, exam=best)
                    elif isinstance(event, HeldOutTest):
                        part.rows.add(dtype=dtype, who=event.who, accuracy=event.fitness.mean, seconds=seconds)
                summary = json.loads(Path(folder, "run", "summary.json").read_text())
            return {"seconds": seconds, "tokens": summary["tokens"], "test": summary["test"]}

        part.row(measure, optional=True, what="tutorials/manifests/real/smollm2.yaml", dtype=dtype)


# -- steps: time, memory, limits, the plan ----------------------------------------------------------------------------


def step(part: Part) -> None:
    """A whole step by its phases; the most telling sizes first."""
    from benchmarking.roofline import LOADS, child, judged

    small, large = ("0.5B", "1.5B") if part.on_gpu else ("0.2M", "0.5M")
    wanted = [(name, n) for name in (small, "135M", large) for n in (1, 8)]
    wanted += [(name, n) for name in (small, "135M") for n in (2, 4, 16)]
    if not part.on_gpu:
        wanted = [(small, 1), (small, 8), (large, 1)]
        LOADS.update({name: LOADS[name] | {"prompts": 1, "group": 4, "longest": 8} for name in (small, large)})
    for name, agents in wanted:

        def measure(name: str = name, agents: int = agents) -> dict[str, Any]:
            raw = child(name, part.device, 1, agents, disk=False)
            found = judged(raw)
            load, seconds = found["load"], found["iteration"]["measured"]
            rows = agents * load["prompts"] * load["group"]
            phases = found["phases"]
            return {
                "parameters": found["parameters"],
                "load": load,
                "step_seconds": seconds,
                "tokens_per_second": rows * load["longest"] / seconds,
                "decode_tokens_per_second": rows * load["longest"] / phases["decode"]["measured"],
                "fraction_of_limit": found["iteration"]["fraction_of_limit"],
                "predicted_over_measured": found["iteration"]["predicted_over_measured"],
                "phases": phases,
                "memory": found["memory"],
                "raw": raw,  # from which roofline.judged and calibrated compute again, with other constants
            }

        part.row(measure, model=name, agents=agents)


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode(part: Part) -> None:
    """Tokens a second against rows and adapters; what the host waits for; what a CUDA graph would save."""
    agents, tokens = (8, 32) if part.on_gpu else (4, 4)
    group, prompt = (8, 120) if part.on_gpu else (2, 8)
    counts = (1, 4, 16) if part.on_gpu else (1, 2)
    for prompts in counts:
        load = {"agents": agents, "prompts": prompts, "group": group, "prompt": prompt, "longest": tokens}

        def measure(load: dict[str, int] = load) -> dict[str, Any]:
            bench = part.bench({**load, "prompts": agents * load["prompts"]})
            slots = [agent.slot for agent in bench.agents]
            every, own = list(bench.prompts), list(bench.prompts)[: load["prompts"]]
            arms: dict[str, tuple[list[int | None], list[list[int]]]] = {
                "with_adapters": (slots, own),  # each agent has its share of the rows
                "one_adapter": (slots[:1], every),
                "no_adapter": ([None], every),
            }
            rows, found = agents * load["prompts"] * load["group"], {}
            for name, (chosen, bench.prompts) in arms.items():
                bench.generated(chosen, 2)  # warms up
                found[name] = rows * tokens / bench.generated(chosen, tokens)["decode"]
            return {"rows": rows, **found, "kept_with_adapters": found["with_adapters"] / found["no_adapter"]}

        part.row(measure, agents=agents, prompt_tokens=prompt, tokens=tokens)
    load = {"agents": agents, "prompts": counts[-1], "group": group, "prompt": prompt, "longest": tokens}
    part.row(lambda: syncs(part, load), what="host syncs")
    part.row(lambda: graph(part, load), what="a decode step as a CUDA graph")


def syncs(part: Part, load: Mapping[str, int]) -> dict[str, Any]:
    """Return how often the host waits for the device for each decoded token: the difference of two lengths."""
    import torch

    if not part.on_gpu:
        return {"not_available": "it needs CUDA; tests/test_pretended_cuda.py counts them without a GPU"}
    bench, found = part.bench(load), []
    slots = [agent.slot for agent in bench.agents]
    bench.sampled(slots, 2)
    for tokens in (16, 48):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                bench.sampled(slots, tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(sum("synchroniz" in str(warning.message) for warning in caught))
    return {"of_16_tokens": found[0], "of_48_tokens": found[1], "a_token": (found[1] - found[0]) / 32}


def graph(part: Part, load: Mapping[str, int]) -> dict[str, Any]:
    """Return the seconds of one decode step as it is, and replayed as a CUDA graph: what graphs could save at most."""
    import torch

    from agilerl.rollouts.torch_engine import _Decoder

    if not part.on_gpu:
        return {"not_available": "it needs CUDA"}
    bench = part.bench(load)
    engine = bench.runtime.engine
    requests = bench.requests([agent.slot for agent in bench.agents], 32)
    every = [(place, sample) for place, request in enumerate(requests) for sample in range(request.samples)]
    with torch.no_grad():
        decoder = _Decoder(engine, requests, engine._units(requests, every), lambda row, completion: None)
        decoder._admit()
        for block in decoder.blocks:
            block.draw(engine._eos)
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            start = perf_counter()
            decoder._step()
            torch.cuda.synchronize()
            times.append(perf_counter() - start)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            decoder._step()
        captured.replay()
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(10):
            captured.replay()
        torch.cuda.synchronize()
        replayed = (perf_counter() - start) / 10
    eager = median(times[2:])
    return {"rows": len(every), "eager_ms": 1e3 * eager, "graph_ms": 1e3 * replayed, "gain": eager / replayed}


# -- training ---------------------------------------------------------------------------------------------------------


def train_rates(part: Part) -> None:
    """Tokens a second and the share of the device's arithmetic, by the operations that a dry run counts."""
    from agilerl.planning.time import work
    from benchmarking.roofline import workload

    lengths = ((256, 128), (1024, 128), (896, 128)) if part.on_gpu else ((16, 8), (64, 8))
    name = part.rows.document["device"]["name"]
    peak = 989e12 if "H100" in name or "H200" in name else None  # dense bf16 products, by the data sheets of both
    for prompt, longest in lengths:
        for agents in (1, 8) if part.on_gpu else (1, 2):
            shared, group = (8, 8) if part.on_gpu else (1, 2)
            load = {"agents": agents, "prompts": shared, "group": group, "prompt": prompt, "longest": longest}

            def measure(load: dict[str, int] = load) -> dict[str, Any]:
                bench = part.bench(load)
                bench.learned()
                spent = median(bench.learned()["train"] for _ in range(2))
                flops_rate, _ = bench.rates()
                counted = workload({"load": load, "device": part.device, "pass_tokens": bench.runtime.pass_tokens})
                flops = work(bench.shape, counted)["train"].flops
                rows = load["agents"] * load["prompts"] * load["group"]
                return {
                    "seconds": spent,
                    # A prompt that a group shares is computed once; counted once, and with each of its rows.
                    "tokens_per_second": load["agents"] * counted.tokens(counted.rows) / spent,
                    "row_tokens_per_second": rows * (load["prompt"] + load["longest"]) / spent,
                    "flops": flops,
                    "of_measured_rate": flops / spent / flops_rate,
                    "mfu": None if peak is None else flops / spent / peak,
                }

            part.row(measure, prompt_tokens=prompt, completion_tokens=longest, agents=agents)


def options(part: Part) -> None:
    """An update under each option of the base: seconds, and the peak of memory above the base and its adapters."""
    import torch

    from benchmarking.roofline import RANK, made_model, peak_bytes, resident_bytes
    from benchmarking.roofline_phases import Bench

    load = {"agents": 4, "prompts": 4, "group": 8, "prompt": 256, "longest": 128}
    if not part.on_gpu:
        load = {"agents": 2, "prompts": 1, "group": 2, "prompt": 16, "longest": 8}
    wanted: dict[str, dict[str, Any]] = {
        "plain": {},
        "gradient checkpointing": {"gradient_checkpointing": True},
        "activation offload": {"activation_offload": True},
        "TF32 for fp32 products": {},
        "eager attention, packed": {"attn_implementation": "eager", "use_sequence_packing": True},
        "FlashAttention 2, packed": {"attn_implementation": "flash_attention_2", "use_sequence_packing": True},
        "4 bits (nf4)": {"quantization_config": "nf4"},
        "FlexAttention, packed": {"attn_implementation": "flex_attention", "use_sequence_packing": True},
        "torch.compile": {"torch_compiler": "default"},
        "torch.compile with CUDA graphs": {"torch_compiler": "reduce-overhead"},
        "Liger's kernels": {"use_liger_kernel": True},
    }

    def made(chosen: dict[str, Any], folder: str) -> Any:
        if "quantization_config" not in chosen:
            return part.bench(load, **chosen)
        from agilerl.config.base_model import SharedOptions
        from agilerl.models.base import load_base

        made_model(BASE[part.device], part.device).save_pretrained(folder)
        base = load_base(folder, device=part.device, options=SharedOptions(**chosen))
        return Bench(base.model, load, RANK, part.device, SharedOptions(**chosen))

    for name, chosen in wanted.items():
        if name.startswith("torch.compile") and not part.on_gpu:
            continue  # minutes of a C++ compiler

        def measure(name: str = name, chosen: dict[str, Any] = chosen) -> dict[str, Any]:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high" if name.startswith("TF32") else before)
            try:
                with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    bench = made(chosen, folder)
                    bench.learned()
                    held = resident_bytes(part.device)
                    spent = median(bench.learned()["train"] for _ in range(2))
                    return {"seconds": spent, "peak_bytes": peak_bytes(part.device) - held}
            finally:
                torch.set_float32_matmul_precision(before)

        part.row(measure, optional=bool(chosen), option=name, **load)


# -- GSPO's ratios ----------------------------------------------------------------------------------------------------


def ratios(part: Part) -> None:
    """How far the decoder's log-probs are from the trainer's, as ratios of whole completions, which GSPO bounds."""
    import torch

    from agilerl.algorithms.gspo import GSPOConfig
    from agilerl.algorithms.learner import behaviour_logprobs, sampled_as_trained
    from agilerl.data import MicroBatch, Trajectory, collate

    low, high = GSPOConfig().clip_coef
    size = {"prompts": 4, "group": 8, "prompt": 120, "longest": 128}
    load = {"agents": 1, **(size if part.on_gpu else {"prompts": 1, "group": 2, "prompt": 8, "longest": 8})}

    def measure() -> dict[str, Any]:
        bench = part.bench(load)
        agent = bench.agents[0]
        store = bench.runtime.store
        noisy = [(a, b + 0.05 * b.std() * torch.randn_like(b)) for a, b in store.adapter(agent.slot)]
        store.load_adapter(agent.slot, noisy)
        (rows,) = bench.sampled([agent.slot])
        batch = collate(
            [
                Trajectory(
                    prompt_ids=bench.prompts[i // load["group"]],
                    token_ids=row.token_ids,
                    logprobs=row.logprobs,
                    rewards=[float(i % 2)],
                    action_mask=[True] * len(row.token_ids),
                    group=i // load["group"],
                    finish_reason="stop",
                )
                for i, row in enumerate(rows)
            ],
            0,
        )
        mask = batch.action_mask[:, 1:] if batch.action_mask.shape[1] == batch.ids.shape[1] else batch.action_mask
        trainer = fixed_logprobs(bench.runtime, agent.slot, batch, 1.0, agent.micro_batch).cpu()
        in_parts = fixed_logprobs(bench.runtime, agent.slot, batch, 1.0, MicroBatch(rows=2)).cpu()
        used = behaviour_logprobs(agent, batch).cpu()
        assert batch.sampling_logps is not None

        def ratio(old: torch.Tensor) -> dict[str, float]:
            gap = torch.where(mask, trainer - old, 0.0).double()
            whole = (gap.sum(1) / mask.sum(1)).exp()
            outside = ((whole < low) | (whole > high)).double().mean()
            return {
                "smallest": float(whole.min()),
                "largest": float(whole.max()),
                "outside_bounds": float(outside),
                "largest_gap_of_a_token": float(gap.abs().max()),
            }

        return {
            "bounds": [low, high],
            "decoder_against_trainer": ratio(batch.sampling_logps.cpu()),
            "trainer_in_smaller_passes": ratio(in_parts),
            "what_gspo_uses": ratio(used),
            "takes_the_decoders": sampled_as_trained(agent, batch),
        }

    part.row(measure, model=BASE[part.device], **load)


# -- engines ----------------------------------------------------------------------------------------------------------


def engines(part: Part) -> None:
    """Our engine, vLLM where it is installed, and Hugging Face generate, on the same prompts."""
    from benchmarking import rollout

    sizes = {"agents": 4, "prompts": 4, "samples": 8, "tokens": 32} if part.on_gpu else {}
    sizes = sizes or {"agents": 2, "prompts": 1, "samples": 2, "tokens": 4}
    model = "0.5B" if part.on_gpu else "0.3M"

    def measure() -> dict[str, Any]:
        given = argparse.Namespace(model=model, device=part.device, rounds=1, **sizes)
        with tempfile.TemporaryDirectory() as folder:
            bench = rollout.Bench(given, Path(folder))
            return {"arms": rollout.summary(bench, rollout.measured(bench))["arms"]}

    part.row(measure, model=model, rounds=1, **sizes)


# -- a divided base ---------------------------------------------------------------------------------------------------


@contextmanager
def alone_in_a_group(cuda: bool) -> Iterator[Any]:
    """Be the only process of a group, as torchrun would start it."""
    from agilerl.processes import joined

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    with joined(cuda=cuda) as processes:
        yield processes


def fsdp(part: Part) -> None:
    """FSDP2 around the layers in a group of one process: the same gradients, and what it costs."""
    import torch
    import torch.distributed as dist

    from agilerl.models.sharding import _fsdp2

    load = {"agents": 2, "prompts": 2, "group": 8, "prompt": 120, "longest": 64}
    load = load if part.on_gpu else {"agents": 2, "prompts": 1, "group": 2, "prompt": 8, "longest": 4}

    def reduced(processes: Any) -> dict[str, Any]:
        numbers = torch.full((1 << 20,), 2.0, device=part.device)
        dist.all_reduce(numbers, group=processes.group)
        return {"backend": dist.get_backend(processes.group), "same": bool((numbers == 2).all())}

    def divided(processes: Any) -> dict[str, Any]:
        whole, shards = part.bench(load), part.bench(load)
        shards.runtime.base.body = _fsdp2(shards.runtime.base, processes)
        found = {}
        for name, bench in (("whole", whole), ("fsdp2", shards)):
            bench.learned()
            found[name] = median(bench.learned()["train"] for _ in range(2))
        ours, theirs = (
            torch.stack([bench.runtime.store.exp_avg[a.slot] for a in bench.agents]) for bench in (shards, whole)
        )
        return {"seconds": found, "distance_of_gradients": float((ours - theirs).norm() / theirs.norm())}

    with alone_in_a_group(part.on_gpu) as processes:
        part.row(lambda: reduced(processes), what="all-reduce")
        part.row(lambda: divided(processes), what="FSDP2")


PARTS: dict[str, Callable[[Part], None]] = {
    "tests": tests,
    "bits": bits,
    "run": run,
    "real": real,
    "step": step,
    "decode": decode,
    "train": train_rates,
    "ratios": ratios,
    "engines": engines,
    "fsdp": fsdp,
    "options": options,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    given = parser.parse_args()
    known = os.environ.get("GPU_DEVICE")
    part = Part(Rows(given.out, given.part, json.loads(known) if known else device_facts(given.device)), given.device)
    if given.part != "tests":  # pytest imports it where its own settings are in force
        import torch
        import transformers

        torch.set_num_threads(1)
        transformers.utils.logging.set_verbosity_error()
    PARTS[given.part](part)
    if part.failed:
        print(f"{part.failed} of {len(part.rows.document['rows'])} rows failed")
    return int(part.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
