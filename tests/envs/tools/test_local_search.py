"""BM25 over passages: the right ones first, always the same, from lists and files."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from agilerl.envs.tools import LocalSearch, Tool
from agilerl.envs.tools.builtin import facts_task, made_up_towns, same_fact
from agilerl.errors import ConfigError, EnvError

PASSAGES = [
    "The otter sleeps in the river.",
    "The heron waits at the river, and the heron is grey.",
    "A grey stone.",
    "The otter sleeps in the river.",
    "",
]


def test_the_best_passages_come_first() -> None:
    assert LocalSearch(PASSAGES, topk=1).search("HERON!") == f"1. {PASSAGES[1]}"
    assert LocalSearch(PASSAGES, topk=2).search("grey stone") == f"1. {PASSAGES[2]}\n2. {PASSAGES[1]}"


def test_equal_passages_keep_the_order_of_the_corpus() -> None:
    copies = [f"{'x' * n} river" for n in range(1, 40)]
    assert LocalSearch(copies, topk=3).search("river") == "1. x river\n2. xx river\n3. xxx river"


@pytest.mark.parametrize("query", ["whale", "", "?!", "é" * 1000])
def test_queries_that_find_nothing(query: str) -> None:
    assert LocalSearch(PASSAGES).search(query) == "No passage has any of these words."


def test_the_same_query_gives_the_same_passages() -> None:
    texts = [town.passage() for town in made_up_towns(100)]
    first, second = LocalSearch(texts), LocalSearch(texts)
    for town in made_up_towns(100)[:20]:
        assert first.search(f"who founded {town.name}") == second.search(f"who founded {town.name}")
        assert first.search(town.river).startswith(f"1. {town.name} is")


@pytest.mark.processes
def test_files(tmp_path: Path) -> None:
    lines = tmp_path / "corpus.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES), encoding="utf-8")
    table = tmp_path / "corpus.parquet"
    pyarrow.parquet.write_table(pa.table({"body": PASSAGES}), table)
    expected = LocalSearch(PASSAGES).search("grey heron")
    assert LocalSearch(lines).search("grey heron") == expected
    assert LocalSearch(str(table), column="body").search("grey heron") == expected
    with pytest.raises(EnvError, match=r"corpus\.jsonl .*'txt'.*'text'"):
        LocalSearch(lines, column="txt")


def test_bad_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 or more for topk"):
        LocalSearch(PASSAGES, topk=0)
    with pytest.raises(EnvError, match="without any"):
        LocalSearch(["", "!"])
    with pytest.raises(EnvError, match=r"passage 1 .*found 3"):
        LocalSearch(["a", 3])
    with pytest.raises(EnvError, match="found nothing"):
        LocalSearch(tmp_path / "missing.jsonl")
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"pip install 'lora-evolution\[search\]'"):
        LocalSearch(PASSAGES)


def test_search_is_a_tool() -> None:
    tool = Tool(LocalSearch(PASSAGES, topk=1).search)
    assert tool.name == "search"
    assert tool.call({"query": "stone"}).text == "1. A grey stone."


def test_made_up_towns_are_a_pure_function_of_count_and_seed() -> None:
    assert made_up_towns(50, 1) == made_up_towns(50, 1) != made_up_towns(50, 2)
    towns = made_up_towns(200)
    names = [name for town in towns for name in (town.name, town.river, town.founder)]
    assert len(set(names)) == 600
    assert towns[0].passage() == (
        "Dortrur is a town on the river Leskrer. It was founded by Tindstum in the year 1135 and is known for its "
        "violins."
    )
    with pytest.raises(ConfigError, match="for count, found 0"):
        made_up_towns(0)
    with pytest.raises(ConfigError, match="found 1"):
        facts_task(made_up_towns(1))


def test_every_question_can_be_answered_from_what_a_search_finds() -> None:
    towns = made_up_towns(200)
    search = LocalSearch([town.passage() for town in towns], topk=1).search
    for row in (row for town in towns[:40] for row in town.rows()):
        assert row["answer"] in search(row["question"])


def test_no_town_of_the_exam_is_in_training() -> None:
    towns = made_up_towns(100)
    task = facts_task(towns)
    splits = {
        "train": [task.row("train", i)["question"] for i in range(task.train_size)],
        "exam": [task.row("exam", i)["question"] for i in range(task.exam_prompts)],
        "test": [task.row("test", i)["question"] for i in range(task.test_prompts)],
    }
    assert sum(map(len, splits.values())) == 600 == len({q for questions in splits.values() for q in questions})
    asked = {
        town.name: {s for s, qs in splits.items() for row in town.rows() if row["question"] in qs} for town in towns
    }
    assert all(found == {"train"} or "train" not in found for found in asked.values())


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("It is <answer> LACE. </answer>", 1.0),
        ("lace", 1.0),
        ("lace and salt", 0.0),
        ("<answer>salt</answer> lace", 0.0),
    ],
)
def test_grading_of_facts(completion: str, score: float) -> None:
    assert same_fact(completion, "lace") == score
