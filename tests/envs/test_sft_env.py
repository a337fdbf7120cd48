"""Demonstrations: which tokens are learned, and the environment that serves them."""

import json

import pytest
import torch
from datasets import Dataset

from agilerl.envs.datasets import DatasetTask
from agilerl.envs.examples import SFTTask, render_completion, render_conversation, trajectories
from agilerl.envs.prompts import render_prompt
from agilerl.errors import ConfigError, EnvError
from agilerl.llm_envs import SFTGym
from tests.envs.conftest import TEMPLATE, make_tokenizer
from tests.probes import ConditionalTarget

TRAIN = [{"prompt": f"{i}+1=", "target": str(i + 1)} for i in range(10)]
TEST = [{"prompt": f"{i}+2=", "target": str(i + 2)} for i in range(5)]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "four"},
]
ASK = [{"role": "user", "content": "1+1"}]


def parts(tokenizer, example):
    """The texts of the stretches that are learned."""
    found, run = [], []
    for token, learned in [*zip(example.ids, example.learned), (0, False)]:
        if learned:
            run.append(token)
        elif run:
            found.append(tokenizer.decode(run))
            run = []
    return found


def test_a_completion_follows_the_prompt_that_sampling_sees(tokenizer):
    for prompt in (ASK, TALK[:4], [*ASK, {"role": "assistant", "content": "It is "}]):
        example = render_completion(tokenizer, prompt, "2 or so")
        start = render_prompt(tokenizer, prompt)
        assert example.ids[: len(start)] == start
        assert example.learned == [False] * len(start) + [True] * (len(example.ids) - len(start))
        assert tokenizer.decode(example.ids[len(start) :]) == "2 or so<end>"


def test_without_a_template_the_end_token_is_added(tokenizer_without_template):
    tokenizer = tokenizer_without_template
    example = render_completion(tokenizer, ASK, "2")
    assert tokenizer.decode(example.ids) == "1+12<end>"
    assert parts(tokenizer, example) == ["2<end>"]
    with pytest.raises(ConfigError, match="chat template"):
        render_conversation(tokenizer, TALK)


def test_every_message_of_the_assistant_is_learned_and_nothing_else(tokenizer):
    example = render_conversation(tokenizer, TALK)
    assert parts(tokenizer, example) == ["2<end>", "four<end>"]
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(example.ids) == whole
    assert parts(tokenizer, render_completion(tokenizer, TALK[:4], "four")) == ["four<end>"]


def test_what_follows_the_end_token_is_context(tokenizer):
    newline = make_tokenizer(TEMPLATE.replace("<end>", "<end>\n"))
    example = render_conversation(newline, TALK)
    assert parts(newline, example) == ["2<end>", "four<end>"]
    assert newline.decode(example.ids).endswith("four<end>")  # no newline that nobody would see
    assert "2<end>\n<user>" in newline.decode(example.ids)


def test_a_template_that_ends_no_message_gets_an_end_token():
    endless = make_tokenizer(TEMPLATE.replace("<end>", ""))
    assert parts(endless, render_completion(endless, ASK, "2")) == ["2<end>"]


@pytest.mark.parametrize(
    "template",
    [
        # Earlier answers are cut once another message follows, as templates for reasoning models do.
        "{% for m in messages %}<{{ m['role'] }}>"
        "{{ m['content'] if loop.last or m['role'] == 'user' else '...' }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        # The generation prompt is not what an answer begins with.
        TEMPLATE.replace("%}<assistant>", "%}<assistant>think: "),
    ],
    ids=["cuts history", "other generation prompt"],
)
def test_templates_that_do_not_only_append_are_refused(template):
    with pytest.raises(ConfigError, match="changes earlier text"):
        render_conversation(make_tokenizer(template), TALK)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TALK[:4], "has the last word, found the roles system, user, assistant, user"),
        (TALK[2:], "has the last word"),
        (ASK, "has the last word"),
        ([], r"\(no messages\)"),
        ([*ASK, {"role": "assistant", "content": "2<end>3"}], "token, found '<end>'"),
    ],
)
def test_conversations_that_teach_nothing_or_too_much(tokenizer, messages, message):
    with pytest.raises(EnvError, match=message):
        render_conversation(tokenizer, messages)


def test_long_examples_are_refused(tokenizer):
    size = len(render_completion(tokenizer, ASK, "2").ids)
    assert len(render_completion(tokenizer, ASK, "2", size).ids) == size
    with pytest.raises(EnvError, match=f"at most {size - 1} tokens, found {size}"):
        render_completion(tokenizer, ASK, "2", size - 1)


def test_trajectories_begin_with_the_first_learned_token(tokenizer):
    (t,) = trajectories([render_conversation(tokenizer, TALK)], 3, {"a": 1})
    assert t.action_mask[0]
    assert t.action_mask[-1]
    assert not all(t.action_mask)
    assert tokenizer.decode(t.prompt_ids).endswith("1+1<end><assistant>")
    assert (t.group, t.text, t.row) == (3, "four", {"a": 1})


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_a_task_teaches_its_answers_and_keeps_its_exam(tokenizer):
    inner = ConditionalTarget()
    task = SFTTask(inner)
    row = task.row("train", 7)
    (example,) = task.examples(tokenizer, row)
    assert parts(tokenizer, example) == [row["answer"] + "<end>"]
    assert (task.name, task.panel_size("exam"), task.train_size) == (inner.name, 10, None)
    assert task.row("exam", 3) == inner.row("exam", 3)
    assert task.rewards(["1", "2"], [inner.row("exam", 0)] * 2) == [1.0, 0.0]


def test_a_row_without_an_answer_is_refused(tokenizer):
    task = SFTTask(ConditionalTarget())
    with pytest.raises(EnvError, match=r"no answer .*'q'"):
        task.examples(tokenizer, {"question": "q", "answer": None})


def test_examples_in_the_prompt_are_learned_when_asked_for(tokenizer):
    rows = [{"question": "7", "answer": "8"}]
    template = [*TALK[1:3], {"role": "user", "content": "{question}"}, {"role": "assistant", "content": "So "}]
    inner = DatasetTask(rows, rows, reward_fn=lambda completion, answer, question: 1.0, conversation_template=template)
    found = [
        parts(tokenizer, SFTTask(inner, loss_on=loss_on).examples(tokenizer, rows[0])[0])
        for loss_on in ("completion", "assistant")
    ]
    assert found == [["8<end>"], ["2<end>", "So 8<end>"]]


# -- SFTGym ----------------------------------------------------------------------------------------------------------


def make(tokenizer, train=TRAIN, **options):
    return SFTGym(train, TEST, tokenizer, **{"data_batch_size_per_gpu": 4, **options})


def answers(tokenizer, batch):
    mask = torch.nn.functional.pad(batch.action_mask, (1, 0))
    return [tokenizer.decode(ids[own]) for ids, own in zip(batch.ids, mask)]


@pytest.mark.parametrize("wrap", [list, Dataset.from_list])
def test_batches_hold_prompts_and_learn_responses(tokenizer, wrap):
    env = SFTGym(wrap(TRAIN), wrap(TEST), tokenizer, data_batch_size_per_gpu=4)
    seen = []
    for number in range(5):
        batch = env.reset() if number == 0 else env.step()
        assert len(batch) == 4
        for ids, length, answer in zip(batch.ids, batch.lengths, answers(tokenizer, batch)):
            text = tokenizer.decode(ids[:length])
            assert text == f"<user>{int(answer.removesuffix('<end>')) - 1}+1=<end><assistant>{answer}"
            seen.append(text)
    assert sorted(seen[:10]) == sorted(seen[10:])
    assert seen[:10] != seen[10:]  # another order in the second epoch
    assert (env.num_epochs, len(env)) == (2, 10)


def test_columns_may_have_other_names_and_shapes(tokenizer):
    texts = SFTGym([{"prompt": "1", "out": "2"}], [{"prompt": "1", "out": "2"}], tokenizer, response_column="out")
    as_lists = [{"prompt": [{"role": "user", "content": "1"}], "target": [{"role": "assistant", "content": "2"}]}]
    talk = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}]
    batches = [texts.reset(), SFTGym(as_lists, as_lists, tokenizer).reset(), SFTGym(talk, talk, tokenizer).reset()]
    assert all(torch.equal(b.ids, batches[0].ids) for b in batches)
    assert all(torch.equal(b.action_mask, batches[0].action_mask) for b in batches)
    long = [{"messages": TALK}]
    assert answers(tokenizer, SFTGym(long, long, tokenizer, loss_on="assistant").reset())[0] == "2<end>four<end>"
    assert answers(tokenizer, SFTGym(long, long, tokenizer).reset())[0] == "four<end>"


def test_order_depends_on_seed_and_position_alone(tokenizer):
    first = make(tokenizer)
    batches = [first.reset() for _ in range(3)]
    assert not torch.equal(batches[0].ids, make(tokenizer, seed=7).reset().ids)
    again = make(tokenizer)
    again.from_state({"batches": 2})
    assert torch.equal(again.reset().ids, batches[2].ids)
    assert first.state() == again.state() == {"batches": 3}
    assert torch.equal(first.reset(reset_dataloaders=True).ids, batches[0].ids)


def test_a_row_that_is_too_long(tokenizer):
    with pytest.raises(EnvError, match="at most 4 tokens"):
        make(tokenizer, max_context_length=4).reset()


# -- whole texts, and conversations with tools, which only the gym learns ---------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "double", "description": "Doubles.", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "double", "arguments": {"n": 2}}}
WITH_TOOLS = (
    "{% for tool in tools or [] %}<system>{{ tool.function.name }}<end>{% endfor %}"
    "{% for m in messages %}<{{ 'user' if m.role == 'tool' else m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLING = [
    {"role": "user", "content": "twice 2"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "double", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


def gym_of(rows, template=TEMPLATE, **options):
    return SFTGym(rows, rows, make_tokenizer(template), data_batch_size_per_gpu=len(rows), **options)


def test_of_a_whole_text_every_token_is_learned():
    gym = gym_of([{"text": "once upon"}, {"text": "<user>hi<end>"}])
    batch = gym.reset()
    texts = {gym.tokenizer.decode(ids[:length]) for ids, length in zip(batch.ids, batch.lengths)}
    assert texts == {"once upon<end>", "<user>hi<end>"}
    assert batch.action_mask.sum(dim=1).tolist() == (batch.lengths - 1).tolist()
    (example,) = gym.task.examples(gym.tokenizer, {"text": "once upon"})
    assert parts(gym.tokenizer, example) == ["nce upon<end>"]
    with pytest.raises(EnvError, match="at most 5 tokens, found 10"):
        gym.task.examples(gym.tokenizer, {"text": "once upon"}, 5)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("messages", "loss_on", "learned"),
    [
        (CALLING, "completion", ["It is 4.<end>"]),
        (CALLING, "assistant", ['[double {"n": 2}]<end>', "It is 4.<end>"]),
        (CALLING[:2], "completion", ['[double {"n": 2}]<end>']),
    ],
)
def test_conversations_with_tools_are_as_the_template_renders_them(messages, loss_on, learned, as_text):
    row = {"messages": messages, "tools": TOOLS}
    if as_text:  # as the APIs write arguments, and as a table keeps what differs between rows
        call = {"type": "function", "function": {"name": "double", "arguments": '{"n": 2}'}, "extra": None}
        row = {"messages": [{**m, "tool_calls": [call] if m.get("tool_calls") else None} for m in messages]}
        row["tools"] = json.dumps(TOOLS)
    gym = gym_of([row], WITH_TOOLS, loss_on=loss_on)
    (example,) = gym.task.examples(gym.tokenizer, row)
    assert parts(gym.tokenizer, example) == learned
    shown = [{**m, "content": m["content"] or ""} for m in messages]
    assert example.ids == gym.tokenizer.apply_chat_template(shown, tools=TOOLS)["input_ids"]
    batch = gym.reset()
    assert batch.ids[0, : batch.lengths[0]].tolist() == example.ids


@pytest.mark.parametrize(
    ("row", "template", "error", "message"),
    [
        ({"messages": CALLING, "tools": TOOLS}, TEMPLATE, ConfigError, "does not show the tool 'double'"),
        ({"messages": CALLING, "tools": TOOLS}, None, ConfigError, "does not show the tool 'double'"),
        (
            {"messages": CALLING, "tools": "[{"},
            WITH_TOOLS,
            EnvError,
            "in the columns messages and tools",
        ),
        ({"messages": CALLING[:3], "tools": TOOLS}, WITH_TOOLS, EnvError, "ends with the assistant"),
        (
            {"messages": [*CALLING[:1], {"role": "assistant", "tool_calls": [{}]}]},
            WITH_TOOLS,
            EnvError,
            "found 'arguments' in",
        ),
        ({"text": 3}, TEMPLATE, EnvError, "in the column text"),
    ],
)
def test_tools_that_cannot_be_learned_are_told_in_a_sentence(row, template, error, message):
    with pytest.raises(error, match=message):
        gym_of([row], template).reset()


def test_a_task_with_an_exam_says_where_tool_calls_are_learned():
    with pytest.raises(EnvError, match="only SFTGym learns"):
        DatasetTask([{"messages": CALLING}], [{"messages": CALLING}], reward_fn=lambda completion: 0.0)
