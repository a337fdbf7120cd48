"""vLLM on a CPU with Gemma-3-270m, which has windows, tied embeddings and no chat template."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import agilerl
from agilerl.cli.fetch import run_fetch
from agilerl.envs.prompts import render_prompt
from agilerl.rollouts import GenerationRequest, SamplingSettings
from tests.real.commands import CAPITALS
from tests.real.test_gemma import FOLDER, REWARDED, SETTINGS
from tests.with_vllm.test_server import free_port
from tests.with_vllm.test_serving import client, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TOLERANCE = 1e-3
"""Largest difference of a token's log-probs in nats, in float32: its logits are in the tens."""
QUESTIONS = [f"The capital of {country} is" for country in CAPITALS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_fetch("gemma3-270m", FOLDER, quiet=True)
    place = tmp_path_factory.mktemp("gemma")
    rows = [{"question": question, "answer": f" {city}"} for question, city in zip(QUESTIONS, CAPITALS.values())]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    return place


def train(place: Path, out: str, *settings: str) -> Path:
    command = [sys.executable, "-m", "agilerl", "train", *settings, "--out", out, "--quiet"]
    subprocess.run(command, cwd=place, check=True)
    return place / out


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return train(place, "run", *SETTINGS)


def test_the_elite_is_served_as_it_was_trained(run: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "agilerl", "serve", str(run), "--port", str(port)]
    with serving(command, port, run.parent / "log.txt") as url, client(url) as opened:
        served = {
            name: [
                opened.completions.create(
                    model=name,
                    prompt=question,
                    max_tokens=6,
                    temperature=0,
                    logprobs=1,
                    extra_body={"return_token_ids": True},
                ).choices[0]
                for question in QUESTIONS
            ]
            for name in ("base", "elite")
        }
    agent = agilerl.load(str(run))
    tokenizer, sampling = agent.runtime.tokenizer, SamplingSettings(max_new_tokens=6, temperature=0.0)
    for name, slot in (("base", None), ("elite", agent.slot)):
        prompts = [render_prompt(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
        requests = [GenerationRequest(slot, ids, 1, sampling, "test", (n,)) for n, ids in enumerate(prompts)]
        own = [completion for (completion,) in agent.runtime.engine.generate(requests)]
        # vLLM's tokenizer begins a text as ours does.
        assert [choice.prompt_token_ids for choice in served[name]] == prompts
        assert [choice.token_ids for choice in served[name]] == [completion.token_ids for completion in own], name
        for choice, completion in zip(served[name], own):
            assert choice.logprobs.token_logprobs == pytest.approx(completion.logprobs, abs=TOLERANCE)
    assert served["elite"][0].text == " Paris" != served["base"][0].text


def test_a_run_samples_with_it(place: Path) -> None:
    settings = (*REWARDED, "training.max_steps=16", "algorithm.max_output_tokens=4", "network.use_vllm=true")
    summary = json.loads((train(place, "sampled", *settings) / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["iterations"] > 0
