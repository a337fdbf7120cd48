"""What surrounds prompts and answers, for tokenizers and templates of many shapes: one set of ends, nothing lost."""

from collections.abc import Callable
from typing import Any

import pytest

from agilerl.envs.examples import render_completion, render_conversation, render_whole
from agilerl.envs.prompts import ChatFormat, decode_completions, render_prompt
from agilerl.errors import ConfigError, EnvError
from agilerl.text.contract import contract_of
from tests.text.shapes import CHATML, IM, SHAPES, Shape, byte_level

ASK = [{"role": "user", "content": "2+2="}]
RULES = {"role": "system", "content": "Add."}
THOUGHT = "<think>\nso\n</think>\n\nyes"
ENDLESS = ("harmony", "alpaca, no end", "chatml, spelled by text", "glm, no end is stated")
"""Templates that do not end an earlier answer with a token that ends answers."""
Load = Callable[[Shape], Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    loaded: dict[str, Any] = {}

    def tokenizer_of(shape: Shape) -> Any:
        if shape.name not in loaded:
            loaded[shape.name] = shape.tokenizer(tmp_path_factory.mktemp("shape"))
        return loaded[shape.name]

    return tokenizer_of


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.name.replace(" ", "_"))
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


@pytest.fixture
def tokenizer(shape: Shape, load: Load) -> Any:
    return load(shape)


def learned(example: Any) -> list[int]:
    return [token for token, marked in zip(example.ids, example.learned) if marked]


def test_a_prompt_begins_once_and_does_not_end(shape: Shape, tokenizer: Any) -> None:
    ids = render_prompt(tokenizer, ASK)
    if shape.template is not None:
        assert ids == tokenizer.apply_chat_template(ASK, add_generation_prompt=True, **dict(shape.kwargs))["input_ids"]
    if shape.start:
        assert tokenizer.convert_ids_to_tokens(ids[0]) == shape.start
    assert ids.count(tokenizer.bos_token_id) <= 1
    assert ids[-1] not in {*contract_of(tokenizer).ends, *contract_of(tokenizer).behind}
    assert contract_of(tokenizer).opened == shape.opened


def test_a_start_in_the_text_is_not_repeated(shape: Shape, tokenizer: Any) -> None:
    if shape.template is None and shape.bos is not None:
        begun = [{"role": "user", "content": f"{shape.bos}2+2="}]
        assert render_prompt(tokenizer, begun).count(tokenizer.bos_token_id) == 1


def test_the_ends_are_one_set(shape: Shape, tokenizer: Any) -> None:
    ends = contract_of(tokenizer).ends
    assert set(tokenizer.convert_ids_to_tokens(list(ends))) == set(shape.ends.split())
    junk = tokenizer("junk", add_special_tokens=False)["input_ids"]
    said = tokenizer("7", add_special_tokens=False)["input_ids"]
    assert {text.strip() for text in decode_completions(tokenizer, [[*said, end, *junk] for end in ends])} == {"7"}


@pytest.mark.parametrize("answer", ["yes", THOUGHT, "  two blanks, and a line\n", "a\n\n b </think> c", ""])
def test_the_whole_answer_is_learned_and_nothing_behind_its_end(shape: Shape, tokenizer: Any, answer: str) -> None:
    if answer == THOUGHT and shape.opened.endswith("</think>\n\n"):
        with pytest.raises(EnvError, match="'<think>' again"):
            render_completion(tokenizer, ASK, answer)
        return
    example, prompt = render_completion(tokenizer, ASK, answer), render_prompt(tokenizer, ASK)
    assert example.ids[: len(prompt)] == prompt
    ids = learned(example)
    assert example.ids == prompt + ids
    assert [token in contract_of(tokenizer).ends for token in ids] == [False] * (len(ids) - 1) + [True]
    whole, start = (tokenizer.decode(one) for one in (example.ids[:-1], prompt))
    lead = shape.learned[answer == THOUGHT] if answer in ("yes", THOUGHT) else None
    written = answer.removeprefix(shape.opened) if shape.opened else answer
    if lead is not None:
        assert whole == f"{start}{lead}{written}{' ' if shape.name == 'llama 2' else ''}"
    else:
        assert written in whole[len(start) :]


def test_answers_that_differ_teach_tokens_that_differ(shape: Shape, tokenizer: Any) -> None:
    if shape.opened.endswith("</think>\n\n"):
        return
    answers = (f"<think>\n{why}\n</think>\n\nyes" for why in ("this", "that"))
    better, worse = (render_completion(tokenizer, ASK, answer).ids for answer in answers)
    assert better != worse


def test_what_was_learned_is_what_is_graded(shape: Shape, tokenizer: Any) -> None:
    ids = learned(render_completion(tokenizer, ASK, "yes"))
    junk = tokenizer("junk", add_special_tokens=False)["input_ids"]
    assert decode_completions(tokenizer, [[*ids, *junk]])[0].endswith("yes" + " " * (shape.name == "llama 2"))


def test_an_answer_has_no_end_in_it(shape: Shape, tokenizer: Any) -> None:
    for end in contract_of(tokenizer).end_texts:
        with pytest.raises(EnvError, match="without the end token"):
            render_completion(tokenizer, ASK, f"yes{end}no")


def test_a_whole_text_begins_and_ends_once(shape: Shape, tokenizer: Any) -> None:
    ids, contract = render_whole(tokenizer, "2+2=4").ids, contract_of(tokenizer)
    assert tuple(ids[: len(contract.begins)]) == contract.begins
    middle = ids[len(contract.begins) : -1]
    assert ids[-1] in contract.ends
    assert not {*contract.ends, *contract.behind} & {*middle}
    assert tokenizer.decode(middle).strip() == "2+2=4"


@pytest.mark.parametrize("system", [False, True], ids=["alone", "with_system"])
def test_a_conversation_has_the_tokens_of_the_template_on_the_whole(shape: Shape, tokenizer: Any, system: bool) -> None:
    grows = shape.grows[system]
    if shape.template is None or grows is None:
        return
    chat = ChatFormat(tokenizer, system=system)
    assert chat.rewrites_history is not grows
    opening = [*([RULES] if system else []), *ASK]
    conversation, ids = opening, chat.prompt(opening)
    for said, reply in (("four", "and?"), ("five", "so?"), ("six", "well?")):
        new = [{"role": "user", "content": reply}]
        assert grows or not chat.appends(conversation, new)
        before = tokenizer.decode(ids)
        completion = learned(render_completion(tokenizer, conversation, said))
        ids += completion + chat.between(conversation, completion, new)
        assert tokenizer.decode(ids).startswith(before)
        conversation = [*conversation, {"role": "assistant", "content": said}, *new]
    whole = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, **dict(shape.kwargs))["input_ids"]
    if grows and contract_of(tokenizer).closing:
        assert ids == whole


def test_a_conversation_that_only_grows_is_learned_as_the_template_writes_it(shape: Shape, tokenizer: Any) -> None:
    talk = [*ASK, {"role": "assistant", "content": "4"}, *ASK, {"role": "assistant", "content": "four"}]
    if shape.template is None or shape.opened or shape.name in ENDLESS:
        with pytest.raises(ConfigError, match="chat template"):
            render_conversation(tokenizer, talk)
        return
    example = render_conversation(tokenizer, talk)
    whole = tokenizer.apply_chat_template(talk)["input_ids"]
    assert whole[: len(example.ids) - 1] == example.ids[:-1]
    assert example.ids[-1] == contract_of(tokenizer).end
    assert sum(token in contract_of(tokenizer).ends for token in learned(example)) == 2


def test_pieces_continue_what_precedes_them(shape: Shape, tokenizer: Any) -> None:
    if shape.name.startswith(("sentencepiece", "a space")) and shape.template is None:
        names = tokenizer.convert_ids_to_tokens(render_completion(tokenizer, ASK, "4").ids)
        first = "▁2" if "never" not in shape.name else "2"
        assert names == ["<s>", "Ġ" if "a space" in shape.name else first, *("2" * ("a space" in shape.name)),
                         "+", "2", "=", "4", "</s>"]  # fmt: skip


def test_a_base_with_other_ends_does_not_change_the_tokenizer_of_others() -> None:
    from transformers import PreTrainedTokenizerFast

    from agilerl.text.contract import with_ends

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(IM), eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    other = with_ends(tokenizer, [0, 2])
    assert set(contract_of(other).ends) == {0, 2}
    assert contract_of(tokenizer).ends == (2,)
    assert with_ends(tokenizer, [2]) is tokenizer
