import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from agilerl.envs.procedural import ReasoningGymTask
from agilerl.errors import EnvError
from agilerl.llm_envs import ReasoningGym
from tests.probes import ConditionalTarget

TRAIN = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(10)]
TEST = [{"question": f"{i}+2", "answer": str(i + 2)} for i in range(5)]
TEMPLATE = [{"role": "user", "content": "{question}="}]


def exact(completion, answer, question):
    return 1.0 if completion == answer else 0.0


def make(tokenizer, **options):
    settings = {"data_batch_size_per_gpu": 3, "conversation_template": TEMPLATE, "reward_fn": exact, **options}
    return ReasoningGym(TRAIN, TEST, tokenizer, **settings)


def complete(tokenizer, prompts, texts):
    """Return [G, P + L] ids per prompt: each text, an end token, padding and then junk that must not count."""
    width = max(len(t) for t in texts) + 2
    batch = []
    for prompt in prompts:
        rows = []
        for text in texts:
            ids = tokenizer(text.replace("ANSWER", prompt["answer"]), add_special_tokens=False).input_ids
            ids = [*ids, tokenizer.eos_token_id]
            rows.append(prompt["input_ids"][0].tolist() + ids + [tokenizer.pad_token_id] * (width - len(ids)))
        batch.append(torch.tensor(rows))
    return batch


def test_documented_signature():
    parameters = inspect.signature(ReasoningGym).parameters
    assert {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty} == {
        "data_batch_size_per_gpu": 8,
        "accelerator": None,
        "return_raw_completions": False,
        "max_context_length": None,
        "seed": 42,
    }
    assert list(parameters)[:5] == ["train_dataset", "test_dataset", "tokenizer", "reward_fn", "conversation_template"]


@pytest.mark.parametrize("wrap", [list, Dataset.from_list])
def test_a_whole_round(tokenizer, wrap):
    env = ReasoningGym(wrap(TRAIN), wrap(TEST), tokenizer, exact, TEMPLATE, data_batch_size_per_gpu=2)
    prompts = env.reset()
    assert len(prompts) == 2
    for prompt in prompts:
        assert prompt["input_ids"].shape == prompt["attention_mask"].shape == (1, len(tokenizer.encode(prompt["text"])))
        assert prompt["text"] == f"<user>{prompt['question']}=<end><assistant>"
        assert prompt["row"] == {"question": prompt["question"], "answer": prompt["answer"]}
    following, rewards = env.step(complete(tokenizer, prompts, ["ANSWER", "wrong", "ANSWER1"]))
    assert rewards.tolist() == [[1.0, 0.0, 0.0]] * 2
    assert rewards.dtype == torch.float32
    assert {p["question"] for p in following}.isdisjoint(p["question"] for p in prompts)


def test_only_what_follows_the_prompt_is_scored(tokenizer):
    seen = []

    def spy(completion, answer, question):
        seen.append((completion, answer, question))
        return 0.0

    template = [*TEMPLATE, {"role": "assistant", "content": "The sum is "}]
    env = make(tokenizer, reward_fn=spy, conversation_template=template, data_batch_size_per_gpu=1)
    (prompt,) = env.reset()
    assert prompt["text"].endswith("<assistant>The sum is ")
    env.step(complete(tokenizer, [prompt], ["4", " 5 "]))
    assert seen == [("4", prompt["answer"], prompt["question"]), (" 5 ", prompt["answer"], prompt["question"])]


def test_order_depends_on_the_seed_alone(tokenizer):
    def order(**options):
        env = make(tokenizer, **options)
        return [p["question"] for _ in range(4) for p in env.reset()]

    assert order() == order()
    assert order() != order(seed=7)


def test_epochs_are_counted_and_batches_stay_whole(tokenizer):
    env = make(tokenizer, data_batch_size_per_gpu=4)
    questions, epochs = [], []
    for _ in range(5):
        questions += [p["question"] for p in env.reset()]
        epochs.append(env.num_epochs)
    assert epochs == [0, 0, 1, 1, 2]
    assert len(env) == 10
    assert sorted(questions[:10]) == sorted(questions[10:]) == sorted(row["question"] for row in TRAIN)


def test_eval_mode_is_the_same_exam_each_time_and_leaves_training_alone(tokenizer):
    env, undisturbed = make(tokenizer), make(tokenizer)
    prompts = env.reset()
    undisturbed.reset()
    exams = []
    for _ in range(2):
        with env.eval_mode():
            assert len(env) == 5
            batch, exam = env.reset(), []
            for _ in range(2):
                exam += [p["question"] for p in batch]
                batch, rewards = env.step(complete(tokenizer, batch, ["ANSWER"]))
                assert rewards.eq(1.0).all()
            exams.append(exam)
    assert exams[0] == exams[1] == [row["question"] for row in TEST]
    answers = complete(tokenizer, prompts, ["ANSWER"])
    assert [p["question"] for p in env.step(answers)[0]] == [p["question"] for p in undisturbed.step(answers)[0]]


def test_leaving_eval_mode_by_an_error_restores_training(tokenizer):
    env = make(tokenizer)
    prompts = env.reset()
    with pytest.raises(EnvError), env.eval_mode():
        env.step(complete(tokenizer, env.reset(), ["ANSWER"])[:1])
    assert env.step(complete(tokenizer, prompts, ["ANSWER"]))[1].eq(1.0).all()


def test_reset_dataloaders_begins_again(tokenizer):
    env = make(tokenizer)
    first, second = ([p["question"] for p in env.reset()] for _ in range(2))
    assert first != second
    assert [p["question"] for p in env.reset(reset_dataloaders=True)] == first


def test_state_goes_on_where_it_was(tokenizer):
    env = make(tokenizer)
    env.reset()
    prompts = env.reset()
    state = env.state()
    assert state == {"batches": 2}
    with env.eval_mode():
        env.reset()
        assert env.state() == state
    resumed = make(tokenizer)
    restored = resumed.from_state(state)
    assert [p["question"] for p in restored] == [p["question"] for p in prompts]
    answers = complete(tokenizer, prompts, ["ANSWER"])
    assert [p["question"] for p in resumed.step(answers)[0]] == [p["question"] for p in env.step(answers)[0]]
    assert make(tokenizer).from_state({"batches": 0}) == []


def test_processes_share_a_batch_without_overlap(tokenizer):
    whole = make(tokenizer, data_batch_size_per_gpu=4)
    shares = [
        make(tokenizer, data_batch_size_per_gpu=2, accelerator=SimpleNamespace(process_index=rank, num_processes=2))
        for rank in (0, 1)
    ]
    for _ in range(3):
        assert [p["question"] for env in shares for p in env.reset()] == [p["question"] for p in whole.reset()]
    assert shares[0].num_epochs == whole.num_epochs == 1
    exam = []
    for env in shares:
        with env.eval_mode():
            exam += [p["question"] for _ in range(2) for p in env.reset()]
    assert sorted(exam) == sorted(row["question"] for row in TEST)


def test_no_grade_is_nan(tokenizer):
    env = make(tokenizer, reward_fn=lambda completion, answer, question: None, data_batch_size_per_gpu=1)
    rewards = env.step(complete(tokenizer, env.reset(), ["1", "2"]))[1]
    assert rewards.shape == (1, 2)
    assert all(math.isnan(r) for r in rewards[0])


@pytest.mark.parametrize(
    "task",
    [ReasoningGymTask("spell_backward", {"max_word_len": 6}, exam_prompts=5, test_prompts=0), ConditionalTarget()],
    ids=["spell_backward", "probe"],
)
def test_any_task_can_be_stepped_through(tokenizer, task):
    env = ReasoningGym.from_task(task, tokenizer, 4)
    prompts = env.reset()
    assert [p["row"] for p in prompts] == [task.row("train", i) for i in range(4)]
    following, rewards = env.step(complete(tokenizer, prompts, ["ANSWER", "ANSWERz"]))
    assert rewards.tolist() == [[1.0, 0.0]] * 4
    assert [p["row"] for p in following] == [task.row("train", i) for i in range(4, 8)]
    assert (len(env), env.num_epochs) == (0, 0)
    with env.eval_mode():
        assert [p["row"] for p in env.reset()] == [task.row("exam", i) for i in range(4)]


def test_a_prompt_that_is_too_long(tokenizer):
    with pytest.raises(EnvError, match="at most 3 tokens, found 7"):
        make(tokenizer, max_context_length=3).reset()


def test_bad_completions(tokenizer):
    env = make(tokenizer)
    with pytest.raises(EnvError, match="reset\\(\\) before step"):
        env.step([])
    prompts = env.reset()
    good = complete(tokenizer, prompts, ["1", "2"])
    with pytest.raises(EnvError, match="completions for 3 prompts, found 2"):
        env.step(good[:2])
    with pytest.raises(EnvError, match="G of 1 or more"):
        env.step([good[0][:1], *good[1:]])
    with pytest.raises(EnvError, match="G of 1 or more"):
        env.step([ids[0] for ids in good])
    with pytest.raises(EnvError, match=r"prompt 1 .* 7 prompt tokens"):
        env.step([good[0], good[1].roll(1, dims=1), good[2]])
    assert env.step(good)[1].shape == (3, 2)
