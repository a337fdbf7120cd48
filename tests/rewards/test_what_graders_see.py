"""Graders see the whole conversation, and what the prompt has already written of the answer."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from agilerl.compat.gyms import ReasoningGym
from agilerl.data import Completion
from agilerl.envs.answer_format import AnswerFormatTask
from agilerl.envs.core import Task
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.episode_task import Episode, EpisodeLimits
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.envs.prompts import ChatFormat, render_prompt
from agilerl.envs.tools import ToolEnv
from agilerl.rewards import (
    CombinedGrader,
    IsolatedGrader,
    JudgeGrader,
    PairwiseJudgeGrader,
    RewardModelGrader,
    ThreadedGrader,
    call_grader,
    exact_match,
)
from agilerl.rewards.grader import Grades, grades_of
from agilerl.rewards.library import library_grader
from agilerl.rollouts.collect import collect_answers
from agilerl.rollouts.engine import Ask, GenerationRequest, OnCompletion, SamplingSettings
from agilerl.text.contract import contract_of
from tests.envs.scripted import Echo
from tests.envs.tools.family_tokenizers import built
from tests.faults.graders import begins_once
from tests.rewards.chat_server import chat, serve
from tests.tiny_models import llama

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or m.role != 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>OPENING{% endif %}"
)
THINKS = CHAT.replace("OPENING", "<think>{{ '\n' }}")
SYSTEM = [{"role": "system", "content": "In French."}, {"role": "user", "content": "Hello"}]
TURNS = [*SYSTEM, {"role": "assistant", "content": "Bonjour"}, {"role": "user", "content": "One plus one?"}]
REASONED = "First, 2 and 2.\n</think>\n<answer>4</answer>"
FORM = {"tags": ["think", "answer"]}


def tokenizer_of(template: str = THINKS, special: Sequence[str] = ("<system>", "<user>", "<assistant>")) -> Any:
    return built(list(special), template=template)


class Says:
    """An engine that answers each prompt with the same texts, and reports each of them at once."""

    exact = True

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, texts

    def generate(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        groups = []
        for number, _ in enumerate(requests):
            ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in self.texts]
            groups.append([Completion([*one, self.tokenizer.eos_token_id], None, "stop") for one in ids])
            for sample, completion in enumerate(groups[-1]):
                if on_completion is not None:
                    on_completion(number, sample, completion)
        return groups


def rewards(task: Task, tokenizer: Any, *texts: str) -> list[float]:
    """Return the rewards of a rollout of one question in which a model writes these texts."""
    place = task.place_at("train", 0, tokenizer, 4096)
    ask = Ask(0, place, len(texts), lambda length: SamplingSettings(max_new_tokens=64), 4096, 0)
    (group,), report = collect_answers(Says(tokenizer, *texts), task, tokenizer, [ask])  # type: ignore[arg-type]
    assert not report.failures
    return [trajectory.rewards[0] for trajectory in group]


def graded(grader: Any, *texts: str, template: str = THINKS, **row: Any) -> list[float]:
    rows = [{**({"question": "2 + 2?", "answer": "4"} if "prompt" not in row else {}), **row}]
    return rewards(DatasetTask(rows, rows, reward_fn=grader), tokenizer_of(template), *texts)


class Seen:
    """A grader that remembers what it gets."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.prompts: list[Any] = []

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        self.texts += completions
        self.prompts += prompts
        return [1.0] * len(completions)


# -- what is opened ---------------------------------------------------------------------------------------------------

OPENINGS = {
    "nothing": ("", ""),
    "thinking": ("<think>\n", "<think>\n"),
    "thinking that is not to be": ("<think>\n\n</think>\n\n", ""),
    "in brackets": ("[THINK]", "[THINK]"),
    "in brackets, closed": ("[THINK][/THINK]", ""),
    "words": ("Let me see. ", "Let me see. "),
    "after what is closed": ("<plan></plan>\n<answer>", "<answer>"),
    "a special token": ("<|think|>so ", "so "),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_what_a_template_leaves_open_belongs_to_the_answer(name: str) -> None:
    written, opening = OPENINGS[name]
    template = CHAT.replace("OPENING", "{{ " + repr(written) + " }}")
    tokenizer = tokenizer_of(template, ("<system>", "<user>", "<assistant>", "<|think|>"))
    assert contract_of(tokenizer).left_open == opening
    seen, rows = Seen(), [{"question": "2 + 2?", "answer": "4"}]
    rewards(DatasetTask(rows, rows, reward_fn=seen), tokenizer, "so\n</think>4")
    assert seen.texts == [opening + "so\n</think>4"]


def test_without_a_template_nothing_is_opened() -> None:
    assert contract_of(built([])).left_open == ""


# -- what each grader reads of it -------------------------------------------------------------------------------------


def test_a_format_that_the_template_begins_is_paid() -> None:
    assert graded(library_grader("format_tags", FORM), REASONED, "no", "<think>a</think><answer>4</answer>") == [
        1,
        0,
        0,
    ]
    assert graded(lambda completion: float(completion.startswith("<think>")), REASONED) == [1.0]
    assert graded(library_grader("regex", {"pattern": "(?s)<think>.*</think>b", "full": True}), "a</think>b") == [1.0]
    # On the rows alone, without a prompt, the text is all that there is.
    assert call_grader(library_grader("format_tags", FORM), [REASONED], [{"question": "q"}]) == [0.0]


def test_answers_are_read_as_before() -> None:
    opened = CHAT.replace("OPENING", "Well: ")
    assert graded(exact_match, "4", template=opened) == [1.0]
    assert graded(library_grader("json_valid"), "{}", template=opened) == [1.0]
    assert graded(library_grader("repetition", {"n": 1}), "Well: well:", template=opened) == [-0.5]
    assert graded(library_grader("exact_match"), "4</answer>", template=CHAT.replace("OPENING", "<answer>")) == [1.0]


class Begun(DatasetTask):
    """A task with a reward of its own."""

    def reads_completions(self) -> bool:
        return False

    def grade(self, completions: Sequence[str], rows: Sequence[Any]) -> Grades:
        return grades_of("begun", [begins_once(text) for text in completions])


def test_a_grader_around_a_grader_adds_nothing_twice() -> None:
    assert graded(ThreadedGrader(begins_once), "yes", "<think>") == [1.0, 0.0]
    assert graded(CombinedGrader([ThreadedGrader(begins_once), (exact_match, 0.0)]), "yes", "<think>") == [1.0, 0.0]
    rows = [{"question": "q", "answer": "a"}]
    own = Begun(rows, rows, reward_fn=exact_match)
    for task in (own, GradedTask(own, TaskGrader(own)), AnswerFormatTask(own, "whole")):
        assert rewards(task, tokenizer_of(), "yes", "<think>") == [1.0, 0.0]


@pytest.mark.processes
def test_a_grader_in_a_process_of_its_own_reads_it_once() -> None:
    with IsolatedGrader("tests.faults.graders:begins_once") as grader:
        assert graded(grader, "so</think>4", "<think>") == [1.0, 0.0]


def test_a_found_answer_is_graded_alone() -> None:
    seen = Seen()
    rows = [{"question": "2 + 2?", "answer": "4"}]
    task = AnswerFormatTask(DatasetTask(rows, rows, reward_fn=CombinedGrader([exact_match, (seen, 1.0)])), "tags")
    assert rewards(task, tokenizer_of(), REASONED) == [2.0]
    assert seen.texts == ["4"]
    whole = AnswerFormatTask(DatasetTask(rows, rows, reward_fn=seen), "whole")
    rewards(whole, tokenizer_of(), "5")
    assert seen.texts[1:] == ["<think>\n5"]
    opened = tokenizer_of(CHAT.replace("OPENING", "<answer>"))
    assert rewards(AnswerFormatTask(DatasetTask(rows, rows, reward_fn=exact_match), "tags"), opened, "4</answer>") == [
        1
    ]


PREFILLED = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>"}]


def test_a_prefill_belongs_to_the_message_and_not_to_the_completion() -> None:
    """As in TRL, messages include it; AgileRL's functions of a completion add it themselves."""
    row = {"prompt": PREFILLED, "answer": "4"}
    assert graded(library_grader("format_tags", FORM), REASONED, **row) == [1.0]
    assert graded(lambda completion, answer, question: float(completion == REASONED), REASONED, **row) == [1.0]
    seen = Seen()
    graded(seen, "a", **row)
    assert (seen.prompts, seen.texts) == ([PREFILLED[:1]], [[{"role": "assistant", "content": "<think>a"}]])
    # The same of rows alone: a prefill is a part of the row.
    assert call_grader(library_grader("format_tags", FORM), [REASONED], [row]) == [1.0]


def test_functions_of_trl_read_messages_from_their_beginning() -> None:
    def think_format_reward(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
        return [float(message["content"] == f"<think>\n{REASONED}") for (message,) in completions]

    think_format_reward.__module__ = "trl.rewards"
    assert graded(think_format_reward, REASONED, "no") == [1.0, 0.0]


def test_a_prefill_behind_what_the_template_has_opened_is_read_with_it() -> None:
    """The template would change the prefill, so that it stands behind the generation prompt."""
    trims, lowers = (THINKS.replace("{{ m.content }}", f"{{{{ m.content | {how} }}}}") for how in ("trim", "lower"))
    for text, template, whole in (
        ("So ", lowers, "<think>\nSo a"),
        ("So ", trims, "So a"),
        ("So", trims, "Soa"),
        ("So ", THINKS, "So a"),
        ("<think>So ", lowers, "<think>So a"),
    ):
        seen, row = Seen(), {"prompt": [PREFILLED[0], {"role": "assistant", "content": text}]}
        graded(seen, "a", template=template, **row)
        assert seen.texts == [[{"role": "assistant", "content": whole}]], (text, whole)
        assert graded(lambda completion: float(completion == "a"), "a", template=template, **row, answer="") == [1.0]


# -- the conversation -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, tokenizer = tmp_path_factory.mktemp("reward_model"), tokenizer_of(CHAT.replace("OPENING", ""))
    config = llama(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id)
    config.max_position_embeddings = 256
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 if p.dim() == 1 else 8.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def score(messages: Sequence[Any]) -> float:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        with torch.no_grad():
            return float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0])

    return folder, score


@pytest.mark.model
def test_a_reward_model_reads_the_whole_conversation(reward_model: Any) -> None:
    folder, score = reward_model
    grader = RewardModelGrader(str(folder))
    expected = score([*TURNS, {"role": "assistant", "content": "<think>\nDeux"}])
    assert graded(grader, "Deux", prompt=TURNS) == pytest.approx([expected], abs=1e-5)
    assert abs(expected - score([TURNS[-1], {"role": "assistant", "content": "<think>\nDeux"}])) > 1e-3
    # A system text of the task's template, too.
    rows = [{"question": "2 + 2?", "answer": "4"}]
    template = [{"role": "system", "content": "In French."}, {"role": "user", "content": "Q: {question}"}]
    task = DatasetTask(rows, rows, reward_fn=grader, conversation_template=template)
    asked = [template[0], {"role": "user", "content": "Q: 2 + 2?"}, {"role": "assistant", "content": "<think>\nDeux"}]
    assert rewards(task, tokenizer_of(), "Deux") == pytest.approx([score(asked)], abs=1e-5)
    # A prefill and the completion are one message, and rows alone have their conversation too.
    row = {"prompt": PREFILLED}
    expected = score([PREFILLED[0], {"role": "assistant", "content": "<think>a"}])
    assert graded(grader, "a", **row) == call_grader(grader, ["a"], [row]) == pytest.approx([expected], abs=1e-5)
    whole = score([*TURNS, {"role": "assistant", "content": "a"}])
    assert call_grader(grader, ["a"], [{"prompt": TURNS}]) == pytest.approx([whole], abs=1e-5)
    grader.close()


def as_asked(body: Any, number: int) -> tuple[int, str]:
    return 200, chat('{"score": 10, "winner": "A"}')


@pytest.mark.processes
def test_judges_read_the_whole_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "system: In French.\n\nuser: Hello\n\nassistant: Bonjour\n\nuser: One plus one?"
    with serve(as_asked) as server:
        judge = JudgeGrader("j", base_url=server.url, api_key_env=None, template="{{ prompt }}|{{ completion }}")
        with judge:
            assert graded(judge, "Deux", prompt=TURNS) == [1.0]
            assert graded(judge, "4") == [1.0]
        assert [r["messages"][0]["content"] for r in server.requests] == [
            f"{whole}|<think>\nDeux",
            "2 + 2?|<think>\n4",
        ]
        pair = "{{ prompt }}|{{ completion_a }}|{{ completion_b }}"
        with PairwiseJudgeGrader("j", base_url=server.url, api_key_env=None, template=pair) as pairs:
            graded(pairs, "a", "b", prompt=TURNS)
        asked = sorted(r["messages"][0]["content"] for r in server.requests[2:])
        assert asked == [f"{whole}|<think>\na|<think>\nb", f"{whole}|<think>\nb|<think>\na"]


@pytest.mark.processes
def test_a_judge_of_found_answers_is_not_told_of_their_form() -> None:
    rows = [{"question": "2 + 2?", "answer": "4"}]
    with serve(as_asked) as server:
        judge = JudgeGrader("j", base_url=server.url, api_key_env=None, template="{{ prompt }}|{{ completion }}")
        with judge:
            task = AnswerFormatTask(DatasetTask(rows, rows, reward_fn=judge), "tags")
            assert rewards(task, tokenizer_of(), REASONED, "a</think><answer>5</answer>") == [1.0, 1.0]
        # Each was asked about once, although it had begun early.
        assert sorted(r["messages"][0]["content"] for r in server.requests) == ["2 + 2?|4", "2 + 2?|5"]


# -- several turns, and AgileRL's gym ---------------------------------------------------------------------------------


def test_an_environment_reads_the_answers_from_their_beginning() -> None:
    tokenizer = tokenizer_of()
    env = Echo()
    episode = Episode(env, ChatFormat(tokenizer), EpisodeLimits(None, forks=True))
    episode.begin(3)
    for text in ("a</think>1", "b</think>2"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        episode.act(Completion([*ids, tokenizer.eos_token_id], None, "stop"), text)
    assert [m["content"] for m in episode._messages if m["role"] == "assistant"] == [
        "<think>\na</think>1",
        "<think>\nb</think>2",
    ]
    assert ChatFormat(tokenizer, apply_chat_template=False).opening == ""


def test_a_grader_of_a_tool_episode_sees_its_turns() -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    seen: list[Any] = []

    def grader(completion: str, prompt_messages: list[Any]) -> float:
        seen.append((completion, prompt_messages))
        return 1.0

    env = ToolEnv(
        [{"question": "2 + 2?", "answer": "4"}], [add], grader=grader, parser="text", system_prompt="Be brief."
    )
    env.reset(seed=0)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    env.step(call)
    env.step("It is 4")
    ((text, messages),) = seen
    assert text == "It is 4"
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert (messages[2]["content"], messages[3]["content"]) == (call, "4")
    env.reset(seed=0)
    env.step("No")
    assert [m["role"] for m in seen[1][1]] == ["system", "user"]


def test_the_gym_of_agilerl_hands_graders_the_same() -> None:
    tokenizer, seen = tokenizer_of(), Seen()
    rows = [{"prompt": TURNS, "answer": "2"}]
    gym = ReasoningGym(rows, rows, tokenizer, seen, None, data_batch_size_per_gpu=1)
    gym.reset()
    ids = [*render_prompt(tokenizer, TURNS), *tokenizer("Deux", add_special_tokens=False)["input_ids"]]
    gym.step([torch.tensor([ids])])
    assert seen.texts == [[{"role": "assistant", "content": "<think>\nDeux"}]]
    assert seen.prompts == [TURNS]
