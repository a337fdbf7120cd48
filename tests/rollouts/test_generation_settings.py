"""Stop texts, sampled exams, text in and text out, and engines of one's own."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agilerl import GRPO, Population, Runtime
from agilerl.algorithms.texts import generate, tokenize
from agilerl.cli.app import app
from agilerl.config.base_model import SharedOptions
from agilerl.config.manifest import load_manifest
from agilerl.config.vllm import VLLMConfig
from agilerl.data import Completion, collate
from agilerl.envs import ReasoningGymTask
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.prompts import decode_completions, render_prompt
from agilerl.errors import ConfigError, EngineError, EnvError
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.engine import RolloutEngine
from agilerl.rollouts.torch_engine import TorchEngine
from agilerl.rollouts.vllm.colocated import ColocatedVLLM
from agilerl.training.resolved import resolve
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.envs.scripted import Echo
from tests.faults.pieces import go_on, leave_after
from tests.training.small_runs import SMALL

pytestmark = pytest.mark.model

QUESTION = "Spell this word backward (example: sun -> nus): "


def asked(runtime: Runtime, slots: tuple[int | None, ...], samples: int = 6, **more: Any) -> list[GenerationRequest]:
    settings = SamplingSettings(**{"max_new_tokens": 40, "temperature": 1.5, **more})
    words = ["planet", "orbit", "comet"]
    return [
        GenerationRequest(
            slot,
            render_prompt(runtime.tokenizer, [{"role": "user", "content": QUESTION + word}]),
            samples,
            settings,
            key=(9 if slot is None else slot, n),
        )
        for slot in slots
        for n, word in enumerate(words)
    ]


def stopping(*texts: str, **options: Any) -> Runtime:
    given = SharedOptions(stop_sequences=list(texts)) if texts else None
    runtime = Runtime.from_pretrained("embedded", seed=3, options=given, **options)
    g = torch.Generator().manual_seed(1)
    for _ in range(2):
        slot = runtime.store.allocate(4, 2.0)
        shapes = runtime.store.layers
        factors = [
            (torch.randn(4, s.in_features, generator=g), torch.randn(s.out_features, 4, generator=g)) for s in shapes
        ]
        runtime.store.load_adapter(slot, [(a * 0.05, b * 0.05) for a, b in factors])
    return runtime


def text(runtime: Runtime, ids: list[int]) -> str:
    return runtime.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


STOPS = ("e", "or", "ta")


def test_a_completion_ends_with_the_token_that_completes_a_text() -> None:
    free, runtime = stopping(), stopping(*STOPS)
    requests, cut = asked(free, (0, 1, None)), 0
    for whole, stopped in zip(free.engine.generate(requests), runtime.engine.generate(requests)):
        for one, other in zip(whole, stopped):
            ends = [
                n for n in range(1, len(one.token_ids) + 1) if any(s in text(free, one.token_ids[:n]) for s in STOPS)
            ]
            count = ends[0] if ends else len(one.token_ids)
            assert other.token_ids == one.token_ids[:count]
            assert other.logprobs == one.logprobs[:count]
            assert other.finish_reason == ("stop" if ends else one.finish_reason)
            cut += count < len(one.token_ids)
    assert cut > 10


@pytest.mark.parametrize("read_every", [1, 5])
@pytest.mark.parametrize("max_rows", [64, 5])
def test_stops_do_not_depend_on_the_batch(read_every: int, max_rows: int) -> None:
    runtime = stopping(*STOPS)
    requests = asked(runtime, (0, 1, None))
    engine = TorchEngine(runtime.base, runtime.store, seed=3, max_rows=max_rows)
    engine.stops, engine.read_every = runtime.engine.stops, read_every  # type: ignore[attr-defined]
    together = engine.generate(requests)
    alone = [group for start in (0, 3, 6) for group in engine.generate(requests[start : start + 3])]
    assert together == alone  # the bits that each agent has alone
    for group in runtime.engine.generate(requests), together:
        found = [[(c.token_ids, c.finish_reason) for c in completions] for completions in group]
        assert found == [[(c.token_ids, c.finish_reason) for c in completions] for completions in alone]


def test_the_least_length_holds_for_texts_too() -> None:
    runtime = stopping("e")
    least = asked(runtime, (0,), min_new_tokens=7)
    lengths = [len(c.token_ids) for group in runtime.engine.generate(least) for c in group]
    assert min(lengths) == 8  # more than min_new_tokens, as for end tokens


def test_wrong_stops_are_refused() -> None:
    for texts in ([], [""], "e", [3]):
        with pytest.raises(ValueError, match="stop_sequences"):
            SharedOptions(stop_sequences=texts)
    base = Runtime.from_pretrained("embedded").base
    with pytest.raises(ConfigError, match="no tokenizer"):
        Runtime(base, options=SharedOptions(stop_sequences=["e"]))
    both = SharedOptions(stop_sequences=["e"], vllm_config=VLLMConfig(stop_sequences=["x"]))
    with pytest.raises(ConfigError, match="contradict"):
        Runtime.from_pretrained("embedded", options=both)
    loaded = Runtime.from_pretrained("embedded")
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": ["<over>"]})
    with pytest.raises(ConfigError, match="special token"):  # it would never be found
        Runtime(loaded.base, tokenizer=loaded.tokenizer, options=SharedOptions(stop_sequences=["<over>"]))
    ends = loaded.tokenizer.eos_token
    Runtime(loaded.base, tokenizer=loaded.tokenizer, options=SharedOptions(stop_sequences=[ends]))


def test_a_stop_ends_a_turn_and_the_episode_goes_on() -> None:
    ends = ("a", "e", "r", "t")
    runtime = stopping(*ends)
    task = EpisodeTask(Echo, {"length": 3}, exam_episodes=4, test_episodes=0)
    agents = GRPO.population(2, runtime=runtime, group_size=4, batch_size=8, max_output_tokens=30, temperature=1.5)
    people = Population(agents, task, prompts_per_step=2)
    rows = [t for own in people.rollout().trajectories.values() for t in own]
    cut = 0
    for row in rows:
        assert row.turn_ids is not None
        assert set(row.turn_ids) - {-1} == {0, 1, 2}
        for turn in range(3):
            places = [k for k, one in enumerate(row.turn_ids) if one == turn]
            said = [row.token_ids[k] for k in places]
            assert not any(end in text(runtime, said[:-1]) for end in ends)
            if turn < 2 and any(
                end in text(runtime, said) for end in ends
            ):  # the message is closed as if the agent had ended it
                cut += 1
                assert row.token_ids[places[-1] + 1] == runtime.tokenizer.eos_token_id
    assert cut > 3


TINY = ("training.max_steps=48", "training.evo_steps=1", "environment.test_prompts=4", "environment.eval_prompts=4")


def test_stops_in_a_manifest_end_rollouts_and_exams() -> None:
    session = build(load_manifest(None, [*TINY, "network.stop_sequences=[e]"]))
    population = session.population
    said = [t for rows in population.rollout().trajectories.values() for t in rows]
    assert all("e" not in population.tokenizer.decode(t.token_ids[:-1]) for t in said)
    assert all(t.finish_reason == "stop" for t in said if "e" in t.text)
    assert 0 < sum("e" in t.text for t in said) < len(said)


def test_a_run_with_stops_and_sampled_exams_resumes_to_the_bit(tmp_path: Path) -> None:
    settings = ["network.stop_sequences=[e]", "training.eval_temperature=0.8", "training.eval_samples=2"]
    config = load_manifest(None, [*SMALL, *settings, "training.pop_size=2", "training.checkpoint_steps=1"])
    for _ in train(build(config), tmp_path / "whole"):
        pass
    leave_after(train(build(config), tmp_path / "cut"), 5)
    for _ in go_on(tmp_path / "cut"):
        pass
    for name in ("elite/adapter_model.safetensors", "lineage.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_the_plan_and_the_result_say_it(tmp_path: Path) -> None:
    settings = [*TINY, "network.stop_sequences=[e]", "training.eval_temperature=0.5", "training.eval_samples=2"]
    done = CliRunner().invoke(app, ["train", *settings, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "2 samples a question at temperature 0.5" in said
    assert "completions end with 'e'" in said
    assert "Held-out test (2 samples" in said


def test_run_json_has_these_settings() -> None:
    plain = resolve(load_manifest(None, ["network.use_vllm=true", "network.vllm_config={}"])).document()
    assert plain["network"]["stop_sequences"] is None
    assert plain["network"]["vllm_config"]["engine_kwargs"] == {}
    given = ["network.stop_sequences=[e]", "network.use_vllm=true"]
    config = load_manifest(None, [*given, "network.vllm_config.engine_kwargs.block_size=32"])
    document = resolve(config).document()["network"]
    assert (document["stop_sequences"], document["vllm_config"]["engine_kwargs"]) == (["e"], {"block_size": 32})


# -- exams that sample ------------------------------------------------------------------------------------------------


def words() -> ReasoningGymTask:
    return ReasoningGymTask("spell_backward", {"min_word_len": 3, "max_word_len": 4}, exam_prompts=6, test_prompts=4)


def population(**settings: Any) -> Population:
    agents = GRPO.population(
        2, runtime=Runtime.from_pretrained("embedded"), group_size=2, batch_size=8, max_output_tokens=8
    )
    return Population(agents, words(), **settings)


def test_a_question_scores_the_mean_of_its_samples() -> None:
    four, one = population(eval_temperature=1.0, eval_samples=4), population(eval_temperature=1.0)
    exam = four.evaluate()
    assert exam[0] == exam[1]  # equal adapters: all agents draw by the same numbers
    assert exam[0] == four.evaluate()[0]  # and so do all exams
    engine, groups = four.runtime.engine, []
    for number, place in enumerate(four.examiner.places("exam")):
        sampling = SamplingSettings(8, temperature=1.0)
        (group,) = engine.generate([GenerationRequest(0, place.prompt_ids, 4, sampling, "exam", (number,))])
        texts = decode_completions(four.tokenizer, [c.token_ids for c in group])
        groups.append([four.task.reward(text, place.row) for text in texts])
    assert list(exam[0].scores) == [sum(group) / 4 for group in groups]
    assert list(one.evaluate()[0].scores) == [group[0] for group in groups]
    assert any(0 < score < 1 for score in exam[0].scores)
    assert four.agents[0].tokens["evaluated"] > 2 * one.agents[0].tokens["evaluated"]


def test_sampled_exams_have_the_bits_that_an_agent_has_alone() -> None:
    people = population(eval_temperature=1.0, eval_samples=3)
    for agent in people.agents:
        agent.config = agent.config.model_copy(update={"lr": 1e-2 * (1 + agent.index)})
    people.learn(people.rollout())
    together = people.evaluate()
    assert together[0].scores != together[1].scores
    for agent in people.agents:
        assert people.evaluate(agents=[agent])[agent.index] == together[agent.index]


def test_sampled_exams_in_a_manifest() -> None:
    config = load_manifest(None, [*TINY, "training.eval_temperature=0.7", "training.eval_samples=3"])
    built = build(config).population
    assert (built.examiner.eval_temperature, built.examiner.eval_samples) == (0.7, 3)
    document = resolve(config).document()
    assert document["training"]["eval_samples"] == 3
    assert resolve(load_manifest(None, TINY)).document()["training"]["eval_samples"] == 1


@pytest.mark.parametrize("settings", [{"eval_samples": 2}, {"eval_samples": 0}, {"eval_temperature": -1.0}])
def test_wrong_exams_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="eval_"):
        population(**settings)
    with pytest.raises(ConfigError, match="eval_"):
        load_manifest(None, [f"training.{name}={value}" for name, value in settings.items()])


# -- text in, text out ------------------------------------------------------------------------------------------------


def test_generate_answers_texts_and_conversations() -> None:
    agent = GRPO(runtime=Runtime.from_pretrained("embedded"), group_size=2, max_output_tokens=8)
    words_asked = [QUESTION + word for word in ("sun", "moon", "comet")]
    before = (agent.rollouts, dict(agent.tokens))
    several = agent.generate(words_asked)
    assert [agent.generate(word) for word in words_asked] == several
    conversations = [[{"role": "user", "content": word}] for word in words_asked]
    assert agent.generate(conversations) == several
    assert agent.generate(conversations[0]) == several[0]
    ids = [{"input_ids": torch.tensor([render_prompt(agent.runtime.tokenizer, c)])} for c in conversations]
    action = agent.get_action(ids, training=False)
    rows = [row[0, one["input_ids"].shape[1] :].tolist() for row, one in zip(action.completion_ids, ids)]
    assert decode_completions(agent.runtime.tokenizer, rows) == several
    continued = [*conversations[0], {"role": "assistant", "content": several[0][:1]}]
    assert several[0][:1] + agent.generate(continued) == several[0]  # type: ignore[operator]
    assert (agent.rollouts - 1, agent.tokens["trained"]) == (before[0], before[1]["trained"])  # get_action counts
    hot = [agent.generate(words_asked, temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert hot[0] == hot[1] != hot[2]
    assert len(agent.runtime.tokenizer(agent.generate(words_asked[0], max_new_tokens=2))["input_ids"]) <= 2
    assert agent.generate([]) == []


def test_the_base_answers_texts_without_any_adapter() -> None:
    runtime = Runtime.from_pretrained("embedded")
    asked = [QUESTION + word for word in ("sun", "moon", "comet")]
    alone = generate(runtime, asked, max_new_tokens=8)
    agent = GRPO(runtime=runtime, group_size=2, max_output_tokens=8)
    assert agent.generate(asked) == alone  # an adapter that has learned nothing
    store = runtime.store
    store.load_adapter(agent.slot, [(a, torch.full_like(b, 0.3)) for a, b in store.adapter(agent.slot)])
    assert agent.generate(asked) != alone
    assert generate(runtime, asked, max_new_tokens=8) == alone
    assert generate(runtime, [{"role": "user", "content": asked[0]}], max_new_tokens=8) == alone[0]
    hot = [generate(runtime, asked, max_new_tokens=8, temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert hot[0] == hot[1] != hot[2]


def test_a_conversation_as_tokens_is_what_was_sampled() -> None:
    agent = GRPO(runtime=Runtime.from_pretrained("embedded"), group_size=2, max_output_tokens=8)
    question = [{"role": "user", "content": QUESTION + "sun"}]
    prompt = tokenize(agent.runtime, QUESTION + "sun")
    assert (prompt.prompt_ids, prompt.token_ids) == (render_prompt(agent.runtime.tokenizer, question), [])
    action = agent.get_action([{"input_ids": torch.tensor([prompt.prompt_ids])}], training=False)
    (text,) = decode_completions(
        agent.runtime.tokenizer, [action.completion_ids[0][0, len(prompt.prompt_ids) :].tolist()]
    )
    thread = tokenize(agent.runtime, [*question, {"role": "assistant", "content": text}])
    assert torch.tensor(thread.prompt_ids + thread.token_ids).equal(action.completion_ids[0][0])
    assert (thread.prompt_ids, thread.text, all(thread.action_mask)) == (prompt.prompt_ids, text, True)
    batch = collate([thread, prompt], agent.pad_token_id)
    assert (agent.logprobs(batch) != 0).sum(1).tolist() == [len(thread.token_ids), 0]


def test_every_answer_of_a_conversation_is_marked() -> None:
    """Only the last one was."""
    runtime = Runtime.from_pretrained("embedded")
    first = [{"role": "user", "content": QUESTION + "sun"}, {"role": "assistant", "content": "nus"}]
    one, both = tokenize(runtime, first), tokenize(runtime, [*first, *first])
    assert both.prompt_ids == one.prompt_ids
    marked = [token for token, is_action in zip(both.token_ids, both.action_mask) if is_action]
    assert marked == 2 * one.token_ids
    assert len(both.token_ids) == 2 * len(one.token_ids) + len(one.prompt_ids) - 1  # one start token
    with pytest.raises(EnvError, match=r"found the roles assistant$"):
        tokenize(runtime, first[1:])


@pytest.mark.parametrize("read", [generate, tokenize])
def test_half_a_character_is_named(read: Any) -> None:
    runtime = Runtime.from_pretrained("embedded")
    for thread in ("a\ud800", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\udfff"}]):
        with pytest.raises(ConfigError, match="half of a character"):
            read(runtime, thread)


@pytest.mark.parametrize("prompts", [5, [3], [[]], [[1, 2]], {"role": "user"}, [{"role": "user"}]])
def test_generate_refuses_other_things(prompts: Any) -> None:
    agent = GRPO(runtime=Runtime.from_pretrained("embedded"), group_size=2, max_output_tokens=8)
    for method in (agent.generate, partial(generate, agent.runtime), partial(tokenize, agent.runtime)):
        with pytest.raises(ConfigError):
            method(prompts)


# -- an engine of one's own -------------------------------------------------------------------------------------------


class Recording:
    """Samples with another engine, and damages what it says."""

    def __init__(self, inner: RolloutEngine, damage: Any = None, exact: Any = True) -> None:
        self.inner, self.damage, self.exact = inner, damage, exact
        self.asked = 0

    def generate(self, requests: Any, on_completion: Any = None) -> Any:
        self.asked += len(requests)
        found = self.inner.generate(requests, on_completion)
        return found if self.damage is None else self.damage(found)


def test_an_own_engine_samples_for_everything() -> None:
    made: list[Recording] = []

    def make(runtime: Runtime) -> Recording:
        made.append(Recording(runtime.engine))
        return made[-1]

    found = []
    for engine in (None, make):
        runtime = Runtime.from_pretrained("embedded", engine=engine)
        agents = GRPO.population(2, runtime=runtime, group_size=2, batch_size=8, max_output_tokens=8, lr=1e-3)
        people = Population(agents, words(), prompts_per_step=4)
        metrics = people.learn(people.rollout())
        found.append((metrics, people.evaluate()))
    assert found[0][1] == found[1][1]
    assert found[0][0][0]["loss"] == found[1][0][0]["loss"]
    assert made[0].asked == 2 * 4 + 2 * 6


def broken(change: Any) -> Any:
    return lambda groups: [[change(c) for c in group] for group in groups]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda groups: None, "groups"),
        (lambda groups: groups[1:], "groups"),
        (lambda groups: [group[1:] for group in groups], "completions"),
        (broken(lambda c: c.token_ids), "Completion"),
        (broken(lambda c: replace(c, token_ids=[10**6])), "token ids"),
        (broken(lambda c: replace(c, token_ids=c.token_ids * 99, logprobs=None)), "token ids"),
        (broken(lambda c: replace(c, token_ids=[])), "a token"),
        (broken(lambda c: replace(c, logprobs=[0.0] * 99)), "logprobs"),
        (broken(lambda c: replace(c, logprobs=None)), "exact"),
        (broken(lambda c: Completion(c.token_ids, c.logprobs, "because")), "Completion"),
    ],
)
def test_what_breaks_the_protocol_is_a_sentence(damage: Any, message: str) -> None:
    base = Runtime.from_pretrained("embedded")
    runtime = Runtime(base.base, tokenizer=base.tokenizer, engine=lambda own: Recording(own.engine, damage))
    with pytest.raises(EngineError, match=message):
        runtime.engine.generate(asked(runtime, (None,), samples=2))


@pytest.mark.parametrize(
    "engine", [5, int, object(), lambda runtime: None, lambda runtime: Recording(runtime.engine, exact=1)]
)
def test_what_is_no_engine_is_refused(engine: Any) -> None:
    base = Runtime.from_pretrained("embedded")
    with pytest.raises(ConfigError, match="engine"):
        Runtime(base.base, tokenizer=base.tokenizer, engine=engine)


def test_an_own_engine_excludes_settings_of_others() -> None:
    base = Runtime.from_pretrained("embedded")
    with pytest.raises(ConfigError, match="stop_sequences"):
        Runtime(
            base.base,
            tokenizer=base.tokenizer,
            engine=lambda own: Recording(own.engine),
            options=SharedOptions(stop_sequences=["e"]),
        )


# -- free keywords of vLLM --------------------------------------------------------------------------------------------


def test_engine_keywords_reach_vllm_beside_the_settings() -> None:
    base = Runtime.from_pretrained("embedded").base
    given = {"enable_chunked_prefill": True, "block_size": 32, "swap_space": 1.5}
    plain, more = (
        ColocatedVLLM(base, VLLMConfig(**settings)).options("somewhere", 2)
        for settings in ({}, {"engine_kwargs": given})
    )
    assert plain["enable_chunked_prefill"] is False  # what suits a CPU, unless settings say otherwise
    assert more == {**plain, **given}
    text_alone = ColocatedVLLM(base, VLLMConfig(strip_multimodal_towers=True)).options("somewhere", 2)
    assert text_alone == {**plain, "language_model_only": True}


@pytest.mark.parametrize(
    "given",
    [
        {"trust_remote_code": True},
        {"model": 3},
        {"max_num_seqs": 3},
        {"worker_cls": "evil.module.Worker"},
        {"compilation_config": {"a": 1}},
    ],
)
def test_engine_keywords_that_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="engine_kwargs"):
        VLLMConfig(engine_kwargs=given)
    with pytest.raises(ConfigError, match="engine_kwargs"):
        VLLMConfig(base_url="http://localhost:8000", engine_kwargs={"block_size": 32})
