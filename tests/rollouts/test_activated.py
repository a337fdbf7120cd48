"""Activated adapters: PEFT's function and gradients, prompts computed once by the base alone, equal bits alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import agilerl
from agilerl import GRPO
from agilerl.algorithms.forward import AgentRows, forward
from agilerl.cli.app import app
from agilerl.config.manifest import load_manifest
from agilerl.data import RolloutBatch, Trajectory, collate
from agilerl.envs.prompts import generation_prompt, render_prompt
from agilerl.errors import CheckpointError, ConfigError, EnvError
from agilerl.models.tiny import tiny_model_path
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.activated import invocations
from agilerl.rollouts.engine import Conversation
from agilerl.runtime import Runtime
from agilerl.sizes import CPU_ROWS
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.envs.tools.family_tokenizers import hermes
from tests.faults.pieces import go_on, leave_after
from tests.faults.test_resume_kinds import KINDS
from tests.models.test_flat import computed, in_fp64
from tests.models.two_agents import with_adapters
from tests.tiny_models import PAD, random_model
from tests.training.small_runs import SMALL, less_times, lines, run_here

pytestmark = pytest.mark.model

INVOCATION = [7, 9, 7]


def lora(invocation: Sequence[int] | None = INVOCATION) -> LoraConfig:
    tokens = None if invocation is None else list(invocation)
    return LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=tokens
    )


def runtime_of(*, double: bool = False) -> Runtime:
    runtime = Runtime.for_model(in_fp64(random_model()) if double else random_model(), lora_config=lora())
    if double:
        runtime.store.dtype = torch.float64
        runtime.store._allocate_banks(0)
    return with_adapters(runtime)


def words(seed: int, count: int) -> list[int]:
    """Return tokens that hold no invocation."""
    return torch.randint(10, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> list[list[int]]:
    """Return prompts with a long beginning in common, an earlier invocation in one, and something after it in one."""
    common = words(0, 20)
    return [
        [*common, *words(1, 5), *INVOCATION],
        [*common, *words(2, 9), *INVOCATION, *words(3, 3)],
        [*common, *INVOCATION, *words(4, 4), *INVOCATION],
        [*INVOCATION],
    ]


def batch(seed: int = 0) -> RolloutBatch:
    rows = [(0, 5), (0, 9), (1, 4), (1, 4), (2, 1), (2, 12), (3, 6)]
    texts = prompts()
    return collate(
        [
            Trajectory(texts[group], words(100 * seed + i, n), [True] * n, [0.0] * n, [0.0], group=group)
            for i, (group, n) in enumerate(rows)
        ],
        PAD,
    )


def of_peft(runtime: Runtime, rows: RolloutBatch, slot: int) -> tuple[Tensor, list[Tensor]]:
    """Return PEFT's log-probs, and the gradients of their weighted sum."""
    model = get_peft_model(in_fp64(random_model()), lora(), autocast_adapter_dtype=False).double()
    layers = [model.get_submodule(f"base_model.model.{layer.name}") for layer in runtime.store.layers]
    for layer, (a, b) in zip(layers, runtime.store.adapter(slot)):
        with torch.no_grad():
            layer.lora_A["default"].weight.copy_(a)
            layer.lora_B["default"].weight.copy_(b)
    logp = torch.zeros(rows.action_mask.shape, dtype=torch.float64)
    for row, length in enumerate(rows.lengths.tolist()):
        ids = rows.ids[row : row + 1, :length]
        logits = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        logp[row, : length - 1] = logits.gather(-1, ids[0, 1:, None])[:, 0]
    logp = logp * rows.action_mask
    (logp * torch.linspace(-1, 1, logp.numel()).view(logp.shape)).sum().backward()
    factors = [part["default"].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]
    return logp, [factor.grad for factor in factors]


def test_log_probs_and_gradients_are_pefts() -> None:
    runtime, rows = runtime_of(double=True), batch()
    (found,), grad = computed(runtime, [AgentRows(0, rows, 1.0)], entropy=False)
    logp, gradients = of_peft(runtime, rows, 0)
    torch.testing.assert_close(found.logp.double(), logp, atol=1e-12, rtol=0)  # type: ignore[union-attr]
    views = [runtime.store._views(grad, i) for i in range(len(runtime.store.layers))]
    for ours, theirs in zip([part[0] for view in views for part in view], gradients):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-11


# -- sampling ---------------------------------------------------------------------------------------------------------


def requests(slots: Sequence[int | None], samples: int = 3) -> list[GenerationRequest]:
    settings = SamplingSettings(max_new_tokens=10)
    return [
        GenerationRequest(slot, prompt, samples, settings, key=(9 if slot is None else slot, place))
        for slot in slots
        for place, prompt in enumerate(prompts())
    ]


def tokens_of(runtime: Runtime, work: Any) -> list[int]:
    """Return the tokens of each pass through the base."""
    seen: list[int] = []
    hook = runtime.base.body.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    work()
    hook.remove()
    return seen


def test_log_probs_of_sampling_are_those_of_training() -> None:
    runtime = runtime_of()
    for slot in (0, 1, None):
        asked = requests([slot])
        for request, group in zip(asked, runtime.engine.generate(asked)):
            rows = [
                Trajectory(list(request.prompt_ids), c.token_ids, [True] * len(c.token_ids), None, [0.0]) for c in group
            ]
            (found,) = forward(runtime, [AgentRows(slot, collate(rows, PAD), 1.0)])
            for row, completion in zip(found.logp, group):  # type: ignore[arg-type]
                said = row[len(request.prompt_ids) - 1 :][: len(completion.token_ids)].tolist()
                assert completion.logprobs == pytest.approx(said, abs=1e-4)


def test_prompts_are_computed_once_for_all_agents_and_without_gradient() -> None:
    runtime, parts = runtime_of(), [AgentRows(slot, batch(), 1.0) for slot in (0, 1)]
    grads: list[bool] = []
    hook = runtime.base.body.register_forward_pre_hook(lambda *_: grads.append(torch.is_grad_enabled()))
    prefix, adapted = tokens_of(runtime, lambda: computed(runtime, parts, entropy=False))
    assert grads == [False, True]
    # The beginnings: 20 tokens in common, 5, 9 and 7 more; one token where the invocation comes first.
    assert prefix == -(-(20 + 5 + 9 + 7 + 1) // CPU_ROWS) * CPU_ROWS
    # They are known now, to the update and to sampling.
    assert tokens_of(runtime, lambda: computed(runtime, parts, entropy=False)) == [adapted]
    assert tokens_of(runtime, lambda: computed(runtime, parts[:1], entropy=False)) == [adapted // 2]
    hook.remove()
    first, second, *_ = tokens_of(runtime, lambda: runtime.engine.generate(requests([0, 1])))
    assert first == 2 * CPU_ROWS  # 3, 6, 3 and 3 tokens from the invocations on, for each agent
    assert second == 2 * CPU_ROWS  # the first step of 24 rows


def test_a_small_cache_forgets_and_computes_again() -> None:
    runtime = runtime_of()
    expected = runtime.engine.generate(requests([0, 1]))
    assert runtime.prompts._bytes > 1000
    runtime.prompts.most = 1000
    assert runtime.engine.generate(requests([0, 1])) == expected
    assert runtime.prompts._bytes <= 1000
    assert runtime.engine.generate(requests([0, 1])) == expected


@pytest.mark.parametrize("agent", [0, 1])
def test_the_bits_of_an_agent_are_its_own(agent: int) -> None:
    runtime = runtime_of()
    together = runtime.engine.generate(requests([0, 1, None]))[4 * agent : 4 * agent + 4]
    assert runtime.engine.generate(requests([agent])) == together
    parts = [AgentRows(slot, batch(slot), 1.0) for slot in (0, 1)]
    outputs, grad = computed(runtime, parts)
    alone, alone_grad = computed(runtime, parts[agent : agent + 1])
    assert torch.equal(alone[0].logp, outputs[agent].logp)  # type: ignore[arg-type]
    assert torch.equal(alone_grad[agent], grad[agent])


def test_fewer_rows_at_a_time_change_no_token() -> None:
    runtime = runtime_of()
    expected = runtime.engine.generate(requests([0, 1]))
    runtime.engine.max_rows = 2  # type: ignore[attr-defined]
    found = runtime.engine.generate(requests([0, 1]))
    assert [[c.token_ids for c in group] for group in found] == [[c.token_ids for c in group] for group in expected]


@pytest.mark.parametrize("keep", [True, False])
def test_in_a_conversation_all_turns_are_active_from_the_first_completion_on(keep: bool) -> None:
    runtime = runtime_of()
    conversations = [Conversation() if keep else None for _ in range(3)]
    texts, firsts = [list(text) for text in prompts()[:3]], [len(text) for text in prompts()[:3]]
    rows = [Trajectory(list(text), [], [], [], [0.0]) for text in texts]
    for turn in range(3):
        asked = [
            GenerationRequest(
                0, text, 1, SamplingSettings(max_new_tokens=4), key=(i, turn), conversation=kept, first_prompt=first
            )
            for i, (text, kept, first) in enumerate(zip(texts, conversations, firsts))
        ]
        for i, (completion,) in enumerate(runtime.engine.generate(asked)):
            heard = [*words(turn, 2), *INVOCATION]
            rows[i].token_ids += [*completion.token_ids, *heard]
            rows[i].action_mask += [True] * len(completion.token_ids) + [False] * len(heard)
            rows[i].logprobs += [*completion.logprobs, *[0.0] * len(heard)]  # type: ignore[operator, misc]
            texts[i] = [*texts[i], *completion.token_ids, *heard]
    whole = collate(rows, PAD)
    (found,) = forward(runtime, [AgentRows(0, whole, 1.0)])
    torch.testing.assert_close(found.logp, whole.sampling_logps, atol=1e-4, rtol=0)


def test_a_prompt_without_an_invocation_is_named() -> None:
    runtime = runtime_of()
    asked = GenerationRequest(0, words(1, 12), 1, SamplingSettings(max_new_tokens=2))
    with pytest.raises(EnvError, match=r"activated adapters begin at the tokens \[7, 9, 7\]"):
        runtime.engine.generate([asked])


# -- in runs ----------------------------------------------------------------------------------------------------------


ACTIVATED = "network.lora_config.alora_invocation_tokens=generation_prompt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("activated") / "run", ACTIVATED, "training.checkpoint_steps=1")


def test_a_run_goes_on_to_the_same_bits(run: Path, tmp_path: Path) -> None:
    config = load_manifest(None, [*SMALL, ACTIVATED, "training.checkpoint_steps=1"])
    leave_after(train(build(config), tmp_path / "run", command=["test"]), 2)
    for _ in go_on(tmp_path / "run"):
        pass
    for name in ("metrics.jsonl", "lineage.jsonl"):
        assert less_times(lines(tmp_path / "run" / name)) == less_times(lines(run / name))


def test_peft_says_what_the_elite_says(run: Path) -> None:
    agent = agilerl.load(str(run))
    tokenizer = agent.runtime.tokenizer
    ids = render_prompt(tokenizer, [{"role": "user", "content": "12, 18"}])
    asked = GenerationRequest(agent.slot, ids, 1, SamplingSettings(max_new_tokens=6, temperature=0.0))
    ((completion,),) = agent.runtime.engine.generate([asked])
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    model = PeftModel.from_pretrained(base, run / "elite")
    logits = model(input_ids=torch.tensor([ids + completion.token_ids])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    said = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist()
    assert completion.logprobs == pytest.approx(said, abs=1e-4)


def test_episodes_and_critics_and_preferences_train(tmp_path: Path) -> None:
    for number, kind in enumerate(("episodes", "PPO", "DPO")):
        folder = run_here(tmp_path / str(number), *KINDS[kind], ACTIVATED)
        assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_what_does_not_know_them_is_refused(run: Path, tmp_path: Path) -> None:
    for command in (["merge", str(run), str(tmp_path / "merged")], ["serve", str(run), "--dry-run"]):
        with pytest.raises(ConfigError, match=r"is activated \(alora_invocation_tokens\)"):
            CliRunner().invoke(app, command, catch_exceptions=False)
    for wrong in ("network.use_vllm=true", "network.attn_implementation=eager"):
        with pytest.raises(ConfigError, match=r"activated adapters|vLLM"):
            build(load_manifest(None, [*SMALL, ACTIVATED, wrong]))
    ordinary = run_here(tmp_path / "ordinary")
    with pytest.raises(ConfigError, match="has alora_invocation_tokens=None"):
        build(load_manifest(None, [*SMALL, ACTIVATED, f"network.adapter={ordinary / 'elite'}"]))
    with pytest.raises(ConfigError, match="must be a list of token ids"):
        Runtime.for_model(random_model(), lora_config=lora([-1]))


def test_it_is_examined_talked_to_and_handed_on(run: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["eval", str(run), "--json"], catch_exceptions=False)
    greedy = json.loads(done.stdout)["adapter"]["greedy"]["mean"]
    assert greedy == json.loads((run / "summary.json").read_text())["test"]["elite"]["mean"]
    talk = runner.invoke(
        app, ["chat", str(run), "--temperature", "0", "--json"], input="12, 18\n", catch_exceptions=False
    )
    assert json.loads(talk.stdout.splitlines()[-1])["user"] == "12, 18"
    handed = runner.invoke(app, ["export", str(run), str(tmp_path / "out")], catch_exceptions=False)
    assert "load it with PEFT" in handed.stdout
    assert "vllm serve" not in handed.stdout
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "The adapter is activated (aLoRA)" in card
    assert not any(command in card for command in ("vllm serve", "agilerl merge", "llama-cli"))


def test_an_adapter_of_another_kind_is_not_taken_for_this_one(run: Path) -> None:
    agent = GRPO(runtime=Runtime.from_pretrained("embedded"), max_output_tokens=4)
    with pytest.raises(CheckpointError, match=r"has alora_invocation_tokens=\[3\], this runtime's adapters None"):
        agent.load_checkpoint(run / "elite")
    assert agent.runtime.invocation == ()
    assert GRPO.load(run / "elite").runtime.invocation == (3,)


def test_a_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = [*SMALL, "network.lora_config.alora_invocation_tokens=zzz"]
    with pytest.raises(ConfigError, match=r"'zzz'.*'.*<sep>'"):
        CliRunner().invoke(app, ["train", *settings, "--out", str(tmp_path / "run")], catch_exceptions=False)
    assert not (tmp_path / "run").exists()


def test_the_mark_is_found_before_a_prefill_that_begins_with_line_breaks() -> None:
    tokenizer = hermes()
    tokens = generation_prompt(tokenizer)
    assert tokenizer.decode(tokens).endswith("<|im_start|>assistant")
    asked = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "\n\nSo"}]
    ids = torch.tensor([render_prompt(tokenizer, asked)])
    start = int(invocations(ids, torch.tensor([ids.shape[1]]), tokens))
    assert ids[0, start : start + len(tokens)].tolist() == tokens
