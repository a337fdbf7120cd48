"""Gemma-3-270m, pretrained, of another family: windows, tied embeddings, normalised queries, no chat template."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl import GRPO, Population, Runtime
from agilerl.envs import DatasetTask
from tests.real.commands import ROOT, done, same_when_merged, talk

pytestmark = [pytest.mark.real, pytest.mark.processes, pytest.mark.timeout(900)]

NAME, FOLDER = "gemma3-270m", ROOT / "build/gemma3-270m"
ROW = ("The capital of {} is", " {}")
TEXT = (
    "The capital of France is Paris, which is also its largest city. The river Seine flows through it, and millions of "
    "people visit the Eiffel Tower each year."
)
SETTINGS = (
    f"network.pretrained_model_name_or_path={FOLDER}",
    *("algorithm.name=SFT", "environment.env_type=sft", "environment.dataset=rows.jsonl", "algorithm.batch_size=2"),
    *("environment.data_batch_size_per_gpu=2", "environment.eval_prompts=2", "environment.test_prompts=2"),
    *("algorithm.lr=1e-3", "training.pop_size=1", "training.evo_steps=8"),
)
STEPS = ("training.max_steps=32",)
REWARDED = (
    *(part for part in SETTINGS if not part.startswith(("algorithm.", "environment.env_type"))),
    *("environment.reward=exact", "algorithm.group_size=2", "algorithm.batch_size=2"),
)


def nats(model: torch.nn.Module, ids: list[int], first: int = 1) -> torch.Tensor:
    """Return minus the log-probs of the tokens from ``first`` on."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return -logprobs[first - 1 : -1].gather(1, torch.tensor(ids[first:])[:, None])[:, 0]


def test_texts_begin_as_the_model_was_trained(folder: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    assert (ids[0], tokenizer.decode(ids[1:])) == (tokenizer.bos_token_id, TEXT)
    assert nats(model, ids, 2).mean() < 2.5
    assert nats(model, ids[1:]).mean() > 4  # what the file's tokenizer gave before its BOS was read


def test_the_contract_is_printed(folder: Path, place: Path) -> None:
    table = done(place, "probe", str(folder))
    assert "prompts begin with <bos> (2)" in table
    assert "answers end with <eos> (1)" in table


def test_log_probs_are_those_of_transformers(folder: Path) -> None:
    runtime = Runtime.from_pretrained(str(folder))
    # Alone and beside longer prompts in one batch; as many tokens as the window holds, and more where rows may.
    texts = ["The capital of Italy is", TEXT, TEXT * 12, TEXT * 20]
    rows = [{"question": text, "answer": ""} for text in texts]
    agents = GRPO.population(
        1, runtime=runtime, lr=1e-3, group_size=2, batch_size=2 * len(rows), max_output_tokens=8, max_model_len=800
    )
    task = DatasetTask(rows, rows, reward_fn=lambda completion: float(len(completion)))
    population = Population(agents, task, prompts_per_step=len(rows))
    sampled = population.rollout().trajectories[agents[0].index]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    lengths = {len(t.prompt_ids) for t in sampled}
    assert min(lengths) < 10 < runtime.base.model.config.sliding_window < max(lengths)
    for t in sampled:
        expected = -nats(model, [*t.prompt_ids, *t.token_ids], len(t.prompt_ids))
        torch.testing.assert_close(torch.tensor(t.logprobs), expected, rtol=0, atol=2e-4)


def test_it_learns_and_plain_libraries_load_what_it_learned(run: Path, place: Path, folder: Path) -> None:
    done(place, "export", "run", "exported")
    before, adapted = same_when_merged(place, folder, place / "exported")
    assert (adapted - before).abs().max() > 0.1
    merged = AutoModelForCausalLM.from_pretrained(place / "merged")
    tokenizer = AutoTokenizer.from_pretrained(place / "merged")
    ids = tokenizer("The capital of Spain is", return_tensors="pt")
    answer = merged.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == " Madrid<eos>"
    assert "license: gemma" in (run / "elite/README.md").read_text()


def test_it_is_talked_to(run: Path, place: Path) -> None:
    assert talk(place, "The capital of Spain is")["adapter"] == " Madrid"


def test_an_agent_is_rewarded_and_examined(place: Path, folder: Path) -> None:
    done(place, "train", *REWARDED, "algorithm.max_output_tokens=4", "training.max_steps=8", "--out", "rewarded")
    document = json.loads(done(place, "eval", "rewarded", "--samples", "2", "--json"))
    summary = json.loads((place / "rewarded/summary.json").read_text())
    assert document["adapter"]["greedy"]["mean"] == summary["test"]["elite"]["mean"]
