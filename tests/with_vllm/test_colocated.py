"""The engine around vLLM in this process: the trainer's numbers, fresh adapters, its own randomness, its errors."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from agilerl.algorithms import GRPO
from agilerl.config.vllm import VLLMConfig
from agilerl.data import Completion
from agilerl.errors import ConfigError, EngineError
from agilerl.models.operators import resize
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.vllm.backend import StagedAdapter
from agilerl.rollouts.vllm.colocated import ColocatedVLLM
from agilerl.rollouts.vllm.engine import VLLMEngine, trainer_logprobs
from agilerl.runtime import Runtime
from tests.models.perturbed import perturb
from tests.with_vllm.conftest import World, random_factors

SLOTS = (0, 1, 2)


def prompts(count: int = 4) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 100, 4 + 7 * k).tolist() for k in range(count)]


def requests(
    slots: Sequence[int | None], samples: int = 3, *, purpose: str = "rollout", **settings: float
) -> list[GenerationRequest]:
    sampling = SamplingSettings(**{"max_new_tokens": 16, **settings})
    return [
        GenerationRequest(slot, prompt, samples, sampling, purpose, (0 if slot is None else slot + 1, place))
        for slot in slots
        for place, prompt in enumerate(prompts())
    ]


def trainers(runtime: Runtime, asked: Sequence[GenerationRequest], groups: list[list[Completion]]) -> list[list[float]]:
    """Return the trainer's log-probs of each completion."""
    found = []
    for request, group in zip(asked, groups):
        rows = [(request.slot, request.prompt_ids, c.token_ids) for c in group]
        found += trainer_logprobs(runtime.base, runtime.store, rows, request.sampling.temperature or 1.0)
    return found


def gap(runtime: Runtime, asked: Sequence[GenerationRequest], groups: list[list[Completion]]) -> float:
    theirs = [c.logprobs for group in groups for c in group]
    pairs = zip(trainers(runtime, asked, groups), theirs)
    return max(abs(a - b) for mine, other in pairs for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5, 0.0])
def test_log_probs_of_several_adapters_in_one_batch_are_the_trainer_s(world: World, temperature: float) -> None:
    asked = requests((*SLOTS, None), temperature=temperature)
    groups = world.engine().generate(asked)
    assert [len(group) for group in groups] == [3] * len(asked)
    assert gap(world.runtime, asked, groups) <= 1e-4


def test_greedy_completions_are_the_torch_engine_s(world: World) -> None:
    asked = requests((*SLOTS, None), samples=1, temperature=0.0, max_new_tokens=64)
    theirs, own = world.engine().generate(asked), world.own.generate(asked)
    assert [c.token_ids for (c,) in theirs] == [c.token_ids for (c,) in own]
    assert [c.finish_reason for (c,) in theirs] == [c.finish_reason for (c,) in own]
    assert len({tuple(c.token_ids) for (c,) in theirs}) > len(prompts())  # the adapters do say different things


def test_the_end_token_ends_and_min_new_tokens_holds_it_back(world: World) -> None:
    engine, eos = world.engine(), set(world.runtime.base.eos_token_ids)
    asked = requests(SLOTS, samples=16, max_new_tokens=32)
    ended = [c for group in engine.generate(asked) for c in group]
    assert {c.finish_reason for c in ended} == {"stop", "length"}
    assert all((c.token_ids[-1] in eos) == (c.finish_reason == "stop") for c in ended)
    late = engine.generate(requests(SLOTS, samples=16, max_new_tokens=32, min_new_tokens=10))
    assert all(not eos & set(c.token_ids[:10]) for group in late for c in group)


def test_a_cut_distribution_is_what_is_reported(world: World) -> None:
    asked = requests((0,), samples=8, temperature=0.9, top_k=3)
    groups = world.engine().generate(asked)
    (whole, cut) = ([p for row in trainers(world.runtime, asked, groups) for p in row], [])
    cut = [p for group in groups for c in group for p in c.logprobs]
    # Renormalised over the three most likely tokens: never less, and clearly more somewhere.
    assert all(a <= b + 1e-4 for a, b in zip(whole, cut, strict=True))
    assert max(b - a for a, b in zip(whole, cut)) > 0.1


def test_the_same_seeds_draw_the_same_and_others_do_not(world: World) -> None:
    engine = world.engine()
    first = engine.generate(requests(SLOTS))
    assert engine.generate(requests(SLOTS)) == first
    backwards = list(reversed(engine.generate(list(reversed(requests(SLOTS))))))
    assert [[c.token_ids for c in g] for g in backwards] == [[c.token_ids for c in g] for g in first]
    assert [[c.token_ids for c in g] for g in engine.generate(requests(SLOTS, purpose="act"))] != [
        [c.token_ids for c in g] for g in first
    ]
    assert len({tuple(c.token_ids) for c in first[0]}) > 1


def test_samples_are_distributed_as_the_torch_engine_s(world: World) -> None:
    sampling = SamplingSettings(max_new_tokens=1, temperature=1.3)
    request = GenerationRequest(1, [7, 20, 33, 9], 4000, sampling, key=(1, 2))
    counts = [Counter(c.token_ids[0] for c in engine.generate([request])[0]) for engine in (world.engine(), world.own)]
    frequent = [token for token, count in (counts[0] + counts[1]).items() if count >= 20]
    table = [[c[token] for token in frequent] for c in counts]
    assert len(frequent) > 5
    assert chi2_contingency(table).pvalue > 1e-3


# -- fresh adapters ---------------------------------------------------------------------------------------------------


def test_retrained_mutated_and_cloned_agents_have_their_own_adapter_at_once(world: World) -> None:
    runtime, engine = world.runtime, world.engine()
    store = runtime.store
    engine.generate(requests(SLOTS))
    before = {slot: engine.versions.current(SLOTS)[slot] for slot in SLOTS}
    perturb(store, 0, 0.5, 3, (1,))
    resize(store, 1, 16, 3)
    store.load_adapter(1, random_factors(runtime, 1, 9))
    store.release(2)
    clone = store.allocate(store.ranks[0], float(store.scaling[0]))
    store.load_adapter(clone, store.adapter(0))
    assert clone == 2
    asked = requests(SLOTS)
    assert gap(runtime, asked, engine.generate(asked)) <= 1e-4
    after = engine.versions.current(SLOTS)
    assert not {v.name for v in before.values()} & {v.name for v in after.values()}
    assert after[0] == after[2]  # equal until one of them moves
    perturb(store, 2, 0.5, 3, (2,))
    assert gap(runtime, asked, engine.generate(asked)) <= 1e-4


def test_a_stale_adapter_would_be_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = world.engine(), requests((0,))
    engine.generate(asked)
    perturb(world.runtime.store, 0, 0.5, 3, (1,))
    monkeypatch.setattr(engine.versions, "_changed", lambda: False)
    assert gap(world.runtime, asked, engine.generate(asked)) > 1e-2


def test_learning_changes_what_is_sampled_and_corrects_for_the_sampler(world: World) -> None:
    runtime = Runtime.from_pretrained("embedded", seed=3)
    runtime.engine = World(runtime, runtime.engine, world.backend).engine()
    sizes = {"group_size": 4, "batch_size": 8, "max_output_tokens": 12}
    agent = GRPO(runtime=runtime, lr=1e-2, beta=0.0, **sizes)
    probe = requests((agent.slot,))
    observed = [{"input_ids": torch.tensor([p])} for p in prompts(2)]
    before = runtime.engine.generate(probe)
    action = agent.get_action(observed)
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.0]])
    metrics = agent.learn((action.completion_ids, action.action_masks, rewards), sampling_logps=action.sampling_logps)
    assert 0 < metrics["sampling/sampling_logp_difference/max"] <= 1e-4
    after = runtime.engine.generate(probe)
    assert gap(runtime, probe, after) <= 1e-4
    assert [[c.logprobs for c in g] for g in after] != [[c.logprobs for c in g] for g in before]


# -- what ends a completion, and a run --------------------------------------------------------------------------------


def test_texts_end_completions(world: World) -> None:
    plain = world.engine().generate(requests((0,), samples=8, max_new_tokens=24))
    tokenizer = world.runtime.tokenizer
    texts = [tokenizer.decode(c.token_ids[:-1]) for g in plain for c in g if len(c.token_ids) > 4]
    end = Counter(letter for text in texts for letter in set(text[2:]) if letter.isalpha()).most_common(1)[0][0]
    ended = world.engine(stop_sequences=[end]).generate(requests((0,), samples=8, max_new_tokens=24))
    cut = 0
    for before, after in zip((c for g in plain for c in g), (c for g in ended for c in g), strict=True):
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
        if len(after.token_ids) < len(before.token_ids):
            cut += 1
            assert after.finish_reason == "stop"
            assert end in tokenizer.decode(after.token_ids[-1:])
    assert cut > 0


def test_a_deliberately_wrong_adapter_stops_with_a_sentence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    load = world.backend.load

    def falsified(adapter: StagedAdapter) -> None:
        path = adapter.folder / "adapter_config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps({**settings, "lora_alpha": 1.5 * settings["lora_alpha"]}))
        load(adapter)

    monkeypatch.setattr(world.backend, "load", falsified)
    with pytest.raises(EngineError, match=r"agent 1: .*0\.001"):
        world.engine().generate(requests((0,)))


def test_an_adapter_that_vllm_refuses_costs_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, load = world.engine(), world.backend.load

    def lost(adapter: StagedAdapter) -> None:
        shutil.rmtree(adapter.folder)
        load(adapter)

    monkeypatch.setattr(world.backend, "load", lost)
    with pytest.raises(EngineError, match="the adapter"):
        engine.generate(requests((0,)))
    monkeypatch.undo()
    asked = requests((1,))
    assert gap(world.runtime, asked, engine.generate(asked)) <= 1e-4


def test_a_rank_above_max_lora_rank_is_a_sentence(world: World) -> None:
    resize(world.runtime.store, 0, 32, 3)
    with pytest.raises(EngineError, match=r"agent 1 .*rank 32.* rank 16"):
        world.engine().generate(requests((0,)))


def test_a_prompt_beyond_the_context_is_a_sentence(world: World) -> None:
    limit = world.runtime.base.context_length
    request = GenerationRequest(0, [7] * limit, 1, SamplingSettings(4))
    with pytest.raises(EngineError, match=f"{limit} tokens "):
        world.engine().generate([request])
    request = GenerationRequest(0, [7] * (limit - 3), 1, SamplingSettings(8, temperature=0.0))
    ((completion,),) = world.engine().generate([request])
    assert completion.finish_reason in ("context", "stop")
    assert len(completion.token_ids) <= 3


def test_another_tokenizer_is_a_sentence(world: World) -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {**world.runtime.tokenizer.get_vocab(), "more": 105}

    backend = ColocatedVLLM(world.runtime.base, VLLMConfig(stop_sequences=["a"]), Other())
    backend._llm = world.backend._llm
    with pytest.raises(ConfigError, match="105 and 106 tokens, 1 "):
        backend._check_tokenizer("embedded")


def test_a_model_that_vllm_cannot_load_is_a_sentence(tmp_path: Path, world: World) -> None:
    (tmp_path / "config.json").write_text("{}")
    backend = ColocatedVLLM(world.runtime.base, VLLMConfig(vllm_model_name_or_path=str(tmp_path)))
    with pytest.raises(EngineError, match="vLLM could not start: ") as error:
        backend.start(1, 8, None)
    assert "\n" not in str(error.value)


def test_after_a_failure_inside_vllm_it_is_started_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = world.engine(), requests((0,))
    engine.generate(asked)
    perturb(world.runtime.store, 0, 0.1, 3, (1,))

    def lost(adapter: StagedAdapter) -> None:
        shutil.rmtree(adapter.folder)  # vLLM will look for it in the middle of a batch

    monkeypatch.setattr(world.backend, "load", lost)
    with pytest.raises(EngineError, match=r"failed while sampling: .* restarted"):
        engine.generate(asked)
    monkeypatch.undo()
    perturb(world.runtime.store, 0, 0.1, 3, (2,))
    assert gap(world.runtime, asked, engine.generate(asked)) <= 1e-4


def test_the_engine_closes(world: World) -> None:
    engine: VLLMEngine = world.engine()
    engine.generate(requests((0,)))
    folder = engine.versions.folder
    engine.versions.close()
    assert not folder.exists()
