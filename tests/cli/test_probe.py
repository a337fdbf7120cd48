"""``agilerl probe``: a row for each task and setting, the reason of what cannot be made, and a sample."""

import json
import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.cli.outcome import Agilerl
from tests.text.shapes import CHATML, byte_level
from tests.tiny_models import llama, random_model

pytestmark = pytest.mark.model

FEW = ("--questions", "4", "--samples", "3")


def test_one_row_shows_a_question_and_an_answer(agilerl: Agilerl, tmp_path: Path) -> None:
    done = agilerl("probe")
    assert (done.code, done.errors) == (0, "")
    _, head, row, *rest = done.output.splitlines()
    assert head.split() == ["reward", "differ", "cut", "tokens", "learning", "starts"]
    name, reward, differ, cut, tokens, *start = row.split()
    assert (name, cut, start) == ("gcd", "0%", ["at", "once"])
    assert 0 < float(reward) < 1
    assert 0 < int(differ.rstrip("%")) <= 100
    assert 1 <= int(tokens) <= 10
    assert "Greatest Common Divisor" in rest[1]
    assert rest[2].endswith((", reward 0", ", reward 1"))
    assert list(tmp_path.iterdir()) == []


def test_a_row_for_each_task_and_setting_and_reasons_for_the_others(agilerl: Agilerl) -> None:
    tries = (
        "--try",
        "environment.answer_format=tags",
        "--try",
        "algorithm.max_output_tokens=2 algorithm.temperature=2",
    )
    done = agilerl("probe", *FEW, "--task", "chain_sum", "--task", "chain_summ", *tries)
    assert done.code == 0
    rows = done.output.splitlines()[2:6]
    assert max(map(len, rows)) < 80
    assert [row.split()[0] for row in rows] == ["chain_sum", "chain_sum", "chain_summ", "chain_summ"]
    assert rows[0].startswith("chain_sum answer_format=tags ")
    assert rows[1].startswith("chain_sum max_output_tokens...")
    assert rows[1].split()[4] != "0%"  # some answers would be longer
    assert int(rows[1].split()[5]) <= 2
    assert all("expected the name of a reasoning_gym task" in row for row in rows[2:])
    (whole,) = {
        line.partition(": ")[2] for line in done.output.splitlines() if line.startswith("chain_summ ") and ": " in line
    }
    assert "did you mean 'chain_sum'?" in whole


def test_rows_as_json(agilerl: Agilerl) -> None:
    done = agilerl("probe", *FEW, "--task", "gcd", "--task", "nothing", "environment.answer_format=boxed", "--json")
    gcd, nothing = json.loads(done.output)["rows"]
    assert (gcd["task"], gcd["questions"], gcd["samples"]) == ("gcd", 4, 12)
    assert (gcd["reward"], gcd["groups_differ"], gcd["no_answer"]) == (0, 0, 1)
    assert (gcd["start"], gcd["answer"]["graded"]) == ("no signal", "")
    assert "no answer in the format" in gcd["advice"]
    assert "nothing" in nothing["reason"]


def test_every_task_is_listed(agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch) -> None:
    from agilerl.envs import upstream

    known = upstream.known_tasks()
    assert len(known) > 100
    monkeypatch.setattr(upstream, "known_tasks", lambda: ["composite", *known[:2]])
    done = agilerl("probe", "--all", "--questions", "1", "--samples", "2", "--json")
    assert [row["task"] for row in json.loads(done.output)["rows"]] == known[:2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "gdc"), "did you mean 'gcd'"),
        (("algorithm.name=SFT", "environment.env_type=sft"), "SFT learns from data"),
        (("--task", "gcd", "--all"), "expected --task or --all"),
        (("environment.graders=[{name: 'mine.py:f'}]",), "mine.py"),
    ],
)
def test_what_cannot_be_probed_is_exit_code_2(arguments: tuple[str, ...], words: str, agilerl: Agilerl) -> None:
    done = agilerl("probe", *arguments)
    assert done.code == 2
    assert words in done.errors
    assert "Traceback" not in done.errors


def test_a_run_without_a_signal_stops_unless_it_is_forced(agilerl: Agilerl, tmp_path: Path) -> None:
    silent = ("environment.task=reasoning_gym:mini_sudoku", "environment.eval_prompts=2", "environment.test_prompts=2")
    silent = (*silent, "training.pop_size=2", "training.max_steps=2560", "training.evo_steps=1")
    done = agilerl("train", *silent, "--out", "run")
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert done.errors.startswith("error: nothing could be learned: all 512 answers to 64 training questions")
    small = ("environment.data_batch_size_per_gpu=160", "algorithm.group_size=2", "algorithm.batch_size=320")
    small = (*small, "algorithm.max_output_tokens=1", "training.max_steps=640")
    forced = agilerl("train", *silent, *small, "--out", "run", "--force")
    assert forced.code == 0, forced.errors
    assert "Preflight: reward 0.000, 0% of groups differ" in forced.output
    assert "warning: nothing can be learned from these answers: all 128 answers" in forced.output
    assert json.loads((tmp_path / "run/run.json").read_text())["config"]["training"]["preflight"] == "warn"


def test_of_a_model_its_contract_is_told(agilerl: Agilerl) -> None:
    done = agilerl("probe", "embedded")
    assert (done.code, done.errors) == (0, "")
    _, begin, end, whole, *_ = done.output.splitlines()
    assert begin == "begin     prompts begin with <bos> (2)"
    assert end == "end       answers end with <eos> (4)"
    assert whole.startswith("whole     a row is '<bos>2 + 2 =<sep>' [2, 23, ")
    assert " + '4<eos>' [25, 4], of which the answer is learned; one with reasoning is learned as '<think>" in whole
    found = json.loads(agilerl("probe", "embedded", "--json").output)["contract"]
    texts = {row["name"]: row["text"] for row in found}
    assert re.fullmatch(
        r"log-probs of sampling and of transformers with eager attention are within \de-0\d; rows are in one line.*",
        texts["forward"],
    )
    assert re.fullmatch(r"\d+ layers carry adapters, which PEFT loads by their names", texts["adapter"])
    assert re.fullmatch(r"\d layers; rows of up to 1,024 tokens; each layer sees the whole row", texts["shape"])
    assert found[1] == {"name": "end", "holds": True, "text": "answers end with <eos> (4)"}


def test_a_model_has_no_task(agilerl: Agilerl) -> None:
    assert "found a model" in agilerl("probe", "embedded", "--task", "gcd").errors


def test_the_plan_and_the_contract_say_which_reading_was_taken(agilerl: Agilerl, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level("<s> </s> <|im_start|> <|im_end|>", "<s> $A </s>"),
        eos_token="</s>",
        bos_token="<s>",
    )
    tokenizer.chat_template = CHATML
    random_model(llama(vocab_size=300, eos_token_id=1)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    begin = "prompts begin with <|im_start|> (2), as the template writes them; a text alone with <s> (0); "
    begin += "</s> (1), which the tokenizer puts behind a text, is left out"
    end = "answers end with </s> (1) or <|im_end|> (3); rows teach <|im_end|> (3)"
    told = agilerl("probe", "base")
    assert told.code == 0, told.errors
    assert told.output.splitlines()[1:3] == [f"begin     {begin}", f"end       {end}"]
    plan = agilerl("train", "network.pretrained_model_name_or_path=base", "environment.env_type=sft", "--dry-run",
                   "algorithm.name=SFT", "--json")  # fmt: skip
    assert f"{begin}; {end}" in [line["text"] for line in json.loads(plan.output)["lines"]]
