"""What a tokenizer puts around texts reaches the sampler, rows to learn from, episodes, programs and merged models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from agilerl.config.environment import AgentLimitsConfig
from agilerl.config.run import RunConfig
from agilerl.data import Completion
from agilerl.envs.core import Place
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.examples import PreferenceTask, render_completion
from agilerl.envs.prompts import ChatFormat, decode_completions, render_prompt
from agilerl.errors import ConfigError, EnvError
from agilerl.models.base import BaseModel, from_model
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.endpoint.session import ProgramSession, Rendering
from agilerl.rollouts.engine import Ask
from agilerl.runtime import Runtime
from agilerl.text.contract import contract_of, with_ends
from tests.envs.scripted import Echo
from tests.text.shapes import CHATML, GLM, HARMONY, LLAMA2, MISTRAL, MISTRAL_SYSTEM_LAST, QWEN3, byte_level
from tests.tiny_models import llama, random_model

SAMPLING = SamplingSettings(6, temperature=0.0)


def tokenizer_of(template: str | None = CHATML, special: str = "<|im_end|> <|endoftext|> <|im_start|>") -> Any:
    """The template's end is token 0, the tokenizer's is token 1."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(special), eos_token=special.split()[1], pad_token=special.split()[1]
    )
    tokenizer.chat_template = template
    return tokenizer


def base_that_says_token_0(**changes: Any) -> BaseModel:
    """A base whose logits are all equal, so that greedy sampling draws the first token."""
    model = random_model(llama(vocab_size=300, eos_token_id=1, **changes))
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    return from_model(model)


def test_sampling_stops_at_the_end_that_the_template_writes_and_rows_teach() -> None:
    base, tokenizer = base_that_says_token_0(), tokenizer_of()
    runtime, request = Runtime(base), GenerationRequest(None, [5, 6, 7], 1, SAMPLING)
    ((endless,),) = runtime.engine.generate([request])
    assert (endless.token_ids, endless.finish_reason) == ([0] * 6, "length")
    assert runtime.reading(tokenizer) is tokenizer  # as a population does with the tokenizer of its environment
    for engine in (runtime.engine, Runtime(base, tokenizer=tokenizer).engine):
        ((ended,),) = engine.generate([request])
        assert (ended.token_ids, ended.finish_reason) == ([0], "stop")
    assert set(base.eos_token_ids) == {0, 1}


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [(1, 2, {1}), (None, 2, {2, 1}), (None, [2, 3], {2, 3, 1}), ([1, 2], [2, 3], {1, 2, 3}), ([4], None, {4, 1})],
)
def test_both_configurations_state_ends(generation: Any, config: Any, ends: set[int]) -> None:
    base = base_that_says_token_0()
    base.model.generation_config.eos_token_id, base.model.config.eos_token_id = generation, config
    runtime = Runtime(base, tokenizer=tokenizer_of(None))
    assert set(base.eos_token_ids) == ends
    seven = runtime.tokenizer("7", add_special_tokens=False)["input_ids"]
    assert decode_completions(runtime.tokenizer, [[*seven, end, *seven] for end in ends]) == ["7"] * len(ends)


def test_pairs_that_become_equal_tokens_are_refused() -> None:
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    rows = [{"question": f"q{n}", "answer": "YES", "rejected": "yes"} for n in range(4)]
    task = PreferenceTask(DatasetTask(rows, rows, reward_fn=lambda completion: 0.0))
    with pytest.raises(EnvError, match="makes the same tokens of 'YES' and of 'yes'"):
        task.examples(tokenizer, rows[0])


class Ruled(Echo):
    """Begins with a system text of its own."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        begun = super().reset(seed=seed)[0]
        return [{"role": "system", "content": "Repeat."}, {"role": "user", "content": begun}], {}


def test_a_system_text_that_the_template_moves_is_refused_before_training() -> None:
    tokenizer = tokenizer_of(MISTRAL_SYSTEM_LAST, "[INST] </s> <s>")
    tokenizer.bos_token = "<s>"
    EpisodeTask(Echo).fit(tokenizer, 100)  # without a system text nothing moves
    with pytest.raises(
        ConfigError, match=r"changes earlier turns .*the system text.*strict_chat_template_boundary=False"
    ):
        EpisodeTask(lambda: Echo(system_prompt="Repeat.")).fit(tokenizer, 100)
    task = EpisodeTask(Ruled)
    task.fit(tokenizer, 100)
    with pytest.raises(EnvError, match="changes earlier turns"):  # where a run measures its prompts
        task.lengths([Place({"seed": 3})], tokenizer, 200)
    allowed = EpisodeTask(lambda: Echo(system_prompt="Repeat."), strict_chat_template_boundary=False)
    episode = allowed.episode(allowed.chat(tokenizer), 200, 1)
    episode.begin(3)
    episode.act(Completion([*tokenizer("a", add_special_tokens=False)["input_ids"], 1], None, "stop"), "a")
    assert tokenizer.decode(episode.prompt_ids) == "<s>[INST] start3[/INST]a</s>[INST] Repeat.\n\necho:a[/INST]"
    assert len(episode.trajectories(0, 0)) == 1


@pytest.mark.parametrize(
    ("template", "opening", "reply", "grows"),
    [
        (MISTRAL_SYSTEM_LAST, [{"role": "system", "content": "Be kind."}], "a", False),
        (MISTRAL_SYSTEM_LAST, [], "a", True),
        (QWEN3, [], "<think>\nso\n</think>\n\na", False),
        (CHATML, [{"role": "system", "content": "Be kind."}], "a", True),
    ],
)
def test_a_program_s_next_call_has_the_tokens_of_the_template(
    template: str, opening: list[dict[str, str]], reply: str, grows: bool
) -> None:
    tokenizer = tokenizer_of(
        template, "<|im_end|> </s> <s> <|im_start|>" if "INST" in template else "<|im_start|> <|im_end|>"
    )
    tokenizer.bos_token = tokenizer.eos_token
    ask = Ask(0, Place({}), 1, lambda length: SAMPLING, 500, 0, key=(0, 0, 0))
    session = ProgramSession(ask, 0, AgentLimitsConfig(), lambda tools: Rendering(ChatFormat(tokenizer)))
    messages = [*opening, {"role": "user", "content": "one"}]
    first = session.of_messages(messages, [])
    ids = [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    session.answered(first, Completion(ids, None, "stop"), reply, {"role": "assistant", "content": reply})
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "two"}]
    second = session.of_messages(messages, [])
    assert second.prompt_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (second.parent is first) is grows
    session.answered(second, Completion([5], None, "stop"), "b", {"role": "assistant", "content": "b"})
    assert session.breaks == 0  # its own reply, whatever the template makes of it


def test_a_template_that_wants_a_system_text_is_read_with_one() -> None:
    refuses = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = tokenizer_of(refuses + CHATML)
    assert set(contract_of(tokenizer).ends) == {0, 1}
    example = render_completion(
        tokenizer, [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "yes"
    )
    assert tokenizer.decode(example.ids[example.learned.index(True) :]) == "yes<|im_end|>"
    assert not ChatFormat(tokenizer).rewrites_history
    with pytest.raises(ConfigError, match="no system"):
        ChatFormat(tokenizer, system=False)


def test_calls_are_learned_whatever_the_template_ends_them_with() -> None:
    calls = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    tokenizer = tokenizer_of(CHATML.replace("<|im_end|>", calls + "{{ '!' if m.tool_calls else '<|im_end|>' }}"))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    for text in ("", "I add: "):
        example = render_completion(tokenizer, [{"role": "user", "content": "q"}], text, calls=[call])
        assert tokenizer.decode(example.ids[example.learned.index(True) :]) == f"{text}[add]!<|im_end|>"


def test_the_next_turn_s_header_may_be_what_ends_an_answer() -> None:
    tokenizer = tokenizer_of(GLM, "<|user|> <|endoftext|> <|assistant|>")
    chat = ChatFormat(with_ends(tokenizer, [0, 1]))
    opening, reply = [{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]
    answer = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer.apply_chat_template([*opening, {"role": "assistant", "content": "a"}, *reply], tokenize=False)
    for end in (0, 1):
        ids = [*chat.prompt(opening), *answer, end, *chat.between(opening, [*answer, end], reply)]
        assert tokenizer.decode([token for token in ids if token != 1]) == f"{whole}<|assistant|>\n"


def test_a_prefill_stands_once_behind_what_the_template_opens() -> None:
    tokenizer = tokenizer_of(QWEN3, "<|im_start|> <|im_end|>")
    start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    empty = "<think>\n\n</think>\n\n"

    def prompt(prefill: str) -> str:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": prefill}]
        return str(tokenizer.decode(render_prompt(tokenizer, messages)))

    assert prompt("The answer is") == f"{start}{empty}The answer is"  # how the template itself goes on
    assert prompt("<think>\nLet me") == f"{start}<think>\nLet me"
    tokenizer.chat_template = QWEN3.replace("enable_thinking is defined and not enable_thinking", "true")
    assert prompt("The answer is") == prompt(f"{empty}The answer is") == f"{start}{empty}The answer is"
    with pytest.raises(EnvError, match="'<think>' again"):
        prompt("<think>\nLet me")


@pytest.mark.parametrize("prefill", ["The answer is", "The answer is ", "A:\n"])
@pytest.mark.parametrize("response", ["42", " 42", "42\n", " 42\n", "\n 42 \n"])
def test_blanks_of_a_response_are_learned_once_though_the_template_trims(prefill: str, response: str) -> None:
    tokenizer = tokenizer_of(CHATML.replace("m.content", "m.content | trim"))
    assert "| trim" in tokenizer.chat_template
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": prefill}]
    example = render_completion(tokenizer, messages, response)
    learned = [token for token, marked in zip(example.ids, example.learned) if marked]
    assert tokenizer.decode(learned) == f"{response}<|im_end|>"


LEADS = {
    LLAMA2: "<s>[INST] 1+1 [/INST] ",
    MISTRAL: "<s>[INST] 1+1 [/INST]",
    HARMONY: "<|start|>user<|message|>1+1<|end|><|start|>assistant<|channel|>final<|message|>",
}


@pytest.mark.parametrize("prefill", ["The answer is ", "The answer is", "A:\n\n", "a </think> B"])
@pytest.mark.parametrize("change", ["", " | trim", " | lower", " | replace('e', 'i')", "[:3]", " | upper"])
@pytest.mark.parametrize("template", LEADS, ids=["llama2", "mistral", "harmony"])
def test_a_prefill_stands_as_it_is_whatever_the_template_makes_of_it(template: str, change: str, prefill: str) -> None:
    tokenizer = tokenizer_of(template.replace("m.content", f"(m.content{change})"), "[INST] </s> <s> [/INST]")
    tokenizer.bos_token = "<s>"
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": prefill}]
    prompt = render_prompt(tokenizer, messages)
    assert tokenizer.decode(prompt) == LEADS[template] + prefill
    ids = render_completion(tokenizer, messages, "two").ids
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids[len(prompt) :]) in ("two</s>", "two </s>")  # as the template ends an answer


def test_a_merged_model_ends_where_it_was_taught_to(tmp_path: Path) -> None:
    from agilerl import GRPO
    from agilerl.training.base import merged_model

    folder = tmp_path / "base"
    base_that_says_token_0().model.save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    (agent,) = GRPO.population(1, model_name=str(folder), group_size=2, batch_size=2, max_output_tokens=2)
    agent.save_checkpoint(str(tmp_path / "agent"))
    config = RunConfig.from_dict({"network": {"pretrained_model_name_or_path": str(folder)}})
    merged, _ = merged_model(tmp_path / "agent" / "actor", config)
    assert set(merged.generation_config.eos_token_id) == {0, 1}
