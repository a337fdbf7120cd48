"""The commands after a run: what they find out, what they write, and what they refuse."""

import base64
import json
import logging
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from io import StringIO
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import agilerl as package
from agilerl.cli.output import readable
from agilerl.envs.answer_format import AnswerFormat
from agilerl.errors import CheckpointError
from agilerl.hpo.fitness import Fitness, difference_interval, paired_difference
from agilerl.models.tiny import tiny_model_path
from agilerl.report.card import model_card
from agilerl.report.load import other_questions
from agilerl.runs import RunDirectory, read_lines, strict_json
from agilerl.runs.atomic import verify_folder
from agilerl.training.evaluation import Answer, Results
from tests.cli.changed_runs import change_settings
from tests.cli.outcome import Agilerl, Outcome
from tests.cli.test_start import started
from tests.loopback import Handler, answering
from tests.report.synthetic_run import ATTACK, make_run
from tests.test_readme import IN_ORDER, fences, shape
from tests.training.small_runs import run_here

QUESTION = "Find the Greatest Common Divisor (GCD) of these numbers: 12, 18. Give only the GCD as your final answer."


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("after") / "mine", "algorithm.lr=1e-3")


@pytest.fixture(scope="module")
def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("after") / "evolved")


@pytest.fixture
def adapter(run: Path, tmp_path: Path) -> Path:
    """The elite's adapter alone, outside any run."""
    shutil.copytree(run / "elite", tmp_path / "adapter")
    for name in ("agent.json", "MANIFEST.json", "README.md"):
        (tmp_path / "adapter" / name).unlink()
    return tmp_path / "adapter"


@pytest.fixture
def changed(run: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of the run with other settings in its run.json, as a stranger could have written it."""

    def change(given: Any = None, **sections: dict[str, Any]) -> Path:
        shutil.copytree(run, tmp_path / "changed", ignore=shutil.ignore_patterns("checkpoints"))
        change_settings(tmp_path / "changed", given, **sections)
        return tmp_path / "changed"

    return change


def replace_in(file: Path, text: str, by: str) -> None:
    content = file.read_text()
    assert text in content
    file.write_text(content.replace(text, by))


# -- eval -------------------------------------------------------------------------------------------------------------


def test_eval_finds_the_numbers_of_the_final_test(run: Path, summary: dict[str, Any], agilerl: Agilerl) -> None:
    done = agilerl("eval", str(run), "--json", "--samples", "4")
    assert (done.code, done.errors) == (0, "")
    found = json.loads(done.output)
    for who, name in (("adapter", "elite"), ("base", "base")):
        assert {key: found[who]["greedy"][key] for key in ("mean", "n", "stderr")} == summary["test"][name]
        assert list(found[who]) == ["greedy", "pass@1", "pass@2", "pass@4"]
        assert found[who]["pass@1"]["mean"] <= found[who]["pass@4"]["mean"]
    means = [found[who]["greedy"]["mean"] for who in ("adapter", "base")]
    assert found["difference"]["mean"] == pytest.approx(means[0] - means[1])
    pairs = [(one["adapter"]["greedy"]["score"], one["base"]["greedy"]["score"]) for one in found["answers"]]
    gain = Fitness.from_scores([adapter - base for adapter, base in pairs])
    assert found["difference"]["ci95"] == pytest.approx(difference_interval(gain))
    assert found["questions"] == len(found["answers"]) == summary["test"]["elite"]["n"]
    assert all(len(one["base"]["samples"]) == 4 for one in found["answers"])
    assert summary["answers"] == [
        {
            **{key: one[key] for key in ("question", "answer")},
            **{name: one[who]["greedy"] for who, name in (("base", "base"), ("adapter", "elite"))},
        }
        for one in found["answers"][:10]
    ]
    assert summary["answers"][0]["question"] in (run / "report.html").read_text()


def test_eval_of_the_elite_is_that_of_its_run(run: Path, agilerl: Agilerl) -> None:
    whole, elite = (agilerl("eval", str(path), "--samples", "0", "--no-base") for path in (run, run / "elite"))
    assert whole == elite
    assert "10 questions of gcd, seed 42" in whole.output
    assert "Worst of 10" in whole.output
    assert "base" not in whole.output


def test_eval_takes_other_questions(run: Path, agilerl: Agilerl) -> None:
    def questions(*settings: str) -> list[str]:
        done = agilerl("eval", str(run), *settings, "--json", "--samples", "0", "--no-base")
        return [one["question"] for one in json.loads(done.output)["answers"]]

    own = questions()
    assert own == questions()
    assert set(own) != set(questions("training.seed=7"))
    assert len(questions("environment.test_prompts=12")) == 12
    words = questions("environment.task=reasoning_gym:spell_backward", "environment.params={min_word_len: 3}")
    assert all("backward" in question for question in words)


def test_eval_plays_episodes(run: Path, agilerl: Agilerl) -> None:
    env = (
        "environment.env_type=multiturn",
        "environment.env_id=agilerl/GuessTheNumber-v0",
        "environment.test_prompts=3",
    )
    done = agilerl("eval", str(run), *env, "--samples", "2", "--json")
    assert done.code == 0, done.errors
    found = json.loads(done.output)
    assert [len(one["adapter"]["samples"]) for one in found["answers"]] == [2, 2, 2]


def test_eval_of_rows_of_a_file(run: Path, agilerl: Agilerl) -> None:
    rows = [{"question": QUESTION.replace("12", str(n)), "answer": "6"} for n in range(2, 26)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = agilerl("eval", str(run), "environment.dataset=rows.jsonl", "--json", "--samples", "0")
    assert done.code == 0, done.errors
    assert [one["question"] for one in json.loads(done.output)["answers"]] == [row["question"] for row in rows]


def test_eval_on_the_file_that_the_run_was_trained_on(agilerl: Agilerl, tmp_path: Path) -> None:
    rows = [{"question": QUESTION.replace("12", str(n)), "answer": "6"} for n in range(2, 42)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = ["environment.dataset=rows.jsonl", "environment.reward=exact", "environment.params={}"]
    run = run_here(tmp_path / "rows", *dataset, "environment.task=null", "environment.test_prompts=5")
    for same in ("rows.jsonl", str(Path("rows.jsonl").absolute())):
        done = agilerl("eval", str(run), f"environment.dataset={same}")
        assert (done.code, done.errors.count("\n")) == (2, 1)
        assert "whose rows the run was trained on; leave it out" in done.errors
    done = agilerl("eval", str(run), "--json", "--samples", "0")
    assert json.loads(done.output)["questions"] == 5


def test_eval_of_an_adapter_without_a_run(adapter: Path, agilerl: Agilerl) -> None:
    refused = agilerl("eval", str(adapter))
    assert refused.code == 2
    assert "environment.task=" in refused.errors
    settings = (
        "environment.task=reasoning_gym:gcd",
        "environment.params={max_value: 60}",
        "environment.test_prompts=10",
    )
    done = agilerl("eval", str(adapter), *settings, "--json", "--samples", "0")
    assert done.code == 0, done.errors
    assert json.loads(done.output)["settings"]["base"] == str(tiny_model_path())


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("environment.taks=x", "did you mean 'task'?"),
        ("environment.task=reasoning_gym:gcdd", "did you mean 'gcd'?"),
    ],
)
@pytest.mark.processes
def test_a_wrong_setting_costs_no_import_of_torch(setting: str, word: str, run: Path, tmp_path: Path) -> None:
    _, _, modules, errors = started("eval", str(run), setting, cwd=tmp_path)
    assert errors.startswith("error: ")
    assert word in errors
    assert modules.isdisjoint({"torch", "transformers", "peft"})


def _results(*scores: list[float]) -> Results:
    return Results([], [[Answer("", score, 1, "stop") for score in one] for one in scores])


def test_answers_that_were_cut_are_said(run: Path, agilerl: Agilerl) -> None:
    arguments = ("eval", str(run), "--samples", "0", "--worst", "0")
    short = agilerl(*arguments, "algorithm.max_output_tokens=1")
    assert "cut at the limit of 1 token: 100% of the adapter's" in short.output
    document = json.loads(agilerl(*arguments, "--json").output)
    cut = [one["adapter"]["greedy"]["finish_reason"] == "length" for one in document["answers"]]
    assert document["cut"]["adapter"] == sum(cut) / len(cut) < 0.05
    assert "cut at the limit" not in agilerl(*arguments).output


def test_pass_at_k_is_the_share_of_all_subsets() -> None:
    scores = [[0.0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [0.5, 1, float("nan"), 1]]
    found = _results(*scores).passed(1.0)
    assert list(found) == [1, 2, 4]
    for k in (1, 2):
        shares = []
        for one in scores:
            subsets = list(combinations([s for s in one if s == s], k))
            shares.append(sum(max(subset) >= 1 for subset in subsets) / len(subsets))
        assert found[k].mean == pytest.approx(sum(shares) / 4)
    assert found[4].n == 3
    assert _results(*scores).passed(0.5)[1].mean > found[1].mean


def test_intervals() -> None:
    # Wilson: 10 of 10 has a width; textbook value for 8 of 10 is .490 to .943.
    assert Fitness.from_scores([1.0] * 10).interval == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert Fitness.from_scores([1.0] * 8 + [0.0] * 2).interval == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert Fitness(5.0, 1.0, 11).interval == pytest.approx((5 - 2.2281, 5 + 2.2281), abs=1e-4)
    nan = float("nan")
    both = paired_difference(Fitness(nan, scores=(1.0, 0.0, nan)), Fitness(nan, scores=(0.0, 0.0, 1.0)))
    assert (both.mean, both.n) == (0.5, 2)


def test_the_page_shows_what_is_printed(agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the page, in order, prints what stands under it, but for numbers and the width of columns."""
    Path("questions.txt").write_text(f"{QUESTION}\n")
    shown = 0
    for (language, block), (following, printed) in pairwise([*fences(IN_ORDER), ("", "")]):
        for line in block.splitlines() if language == "bash" else ():
            command, _, source = line.partition(" < ")
            monkeypatch.setattr("sys.stdin", StringIO(Path(source).read_text() if source else ""))
            done = agilerl(*shlex.split(command)[1:])
            assert done.code == 0, done.errors
            if following == "text":
                output = done.output.replace(str(tiny_model_path().parents[2]), "SITE-PACKAGES")
                output = output.replace(f"written: {Path.cwd()}", "written: /home/me")
                assert shape(output) == shape(printed), command
                shown += 1
        if language == "python":
            exec(compile(block, "the page", "exec"), {})
            shown += 1
    assert shown == 7


# -- what a stranger's run may not do ----------------------------------------------------------------------------------


def test_no_code_of_a_run_runs_unasked(changed: Any, agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "mark.py").write_text("open('MARK', 'w').close()\ndef score(completion):\n    return 1.0\n")
    made = changed(environment={"graders": [{"name": f"{tmp_path}/mark.py:score"}]})
    done = agilerl("eval", str(made), "--samples", "0")
    assert done.code == 2
    assert not Path("MARK").exists()


@pytest.mark.parametrize("params", [{"base_url": "http://127.0.0.1:9/v1"}, {}], ids=["named", "known"])
@pytest.mark.parametrize("name", ["judge", "pairwise_judge"])
def test_no_address_of_a_run_is_contacted_unasked(
    name: str, params: dict[str, str], changed: Any, agilerl: Agilerl
) -> None:
    judge = {"name": name, "params": {"model": "m", "api_key_env": None, **params}}
    made = changed(environment={"graders": [judge]})
    done = agilerl("eval", str(made), "--samples", "0")
    assert done.code == 2
    assert "--allow-addresses" in done.errors


def test_no_file_that_the_run_did_not_have_is_read(changed: Any, agilerl: Agilerl, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"question": "my password", "answer": "1"}\n' * 40)
    made = changed(environment={"task": None, "params": {}, "dataset": [{"path": str(secret)}]})
    done = agilerl("eval", str(made))
    assert done.code == 2
    assert str(secret) in done.errors
    assert "password" not in done.output + done.errors


def test_an_elite_with_foreign_files_is_not_sent_away(run: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    secret = tmp_path / "secret"
    secret.write_text((copy / "elite" / "tokenizer.json").read_text())
    (copy / "elite" / "tokenizer.json").unlink()
    (copy / "elite" / "tokenizer.json").symlink_to(secret)
    for command in (["export", str(copy), "out"], ["push", str(copy), "me/x", "--dry-run"]):
        assert agilerl(*command).code == 2
    assert not Path("out").exists()


def test_a_hostile_run_writes_no_markup_into_its_card(tmp_path: Path) -> None:
    make_run(tmp_path / "hostile", hostile=True)
    info = json.loads((tmp_path / "hostile" / "run.json").read_text())
    summary = json.loads((tmp_path / "hostile" / "summary.json").read_text())
    summary["elite"]["hyperparameters"] = {ATTACK: 1.0, "a\n---\nlicense: mit": "`|[x](y)"}
    summary |= {"iterations": 3, "tokens": {}}
    summary["elite"] |= {"step": 3}
    info["config"]["training"]["seed"] = 0
    info["config"]["network"]["lora_config"] = {"r": 4}
    made = RunDirectory.create(tmp_path / "made", info["config"], 0, command=[])
    made.close()
    card = model_card(tmp_path / "made", summary)
    assert not re.search(r"(?<!\\)[<`]script", card)
    assert card.count("\n---\n") == 1
    assert ModelCard(card).data.license is None


def test_a_damaged_summary_is_a_sentence(run: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    summary = json.loads((copy / "summary.json").read_text())
    summary["test"]["elite"] = "good"
    (copy / "summary.json").write_text(json.dumps(summary))
    done = agilerl("export", str(copy), "out")
    assert done.code == 2
    assert "is damaged" in done.errors


def test_a_base_that_is_an_option_is_in_no_command_of_the_card(changed: Any, agilerl: Agilerl) -> None:
    """VLLM would run the code of a repository."""
    made = changed(network={"pretrained_model_name_or_path": "--trust-remote-code"})
    done = agilerl("export", str(made), "out")
    assert done.code == 0, done.errors
    commands = [line for line in Path("out/README.md").read_text().splitlines() if line.startswith(("vllm", "python"))]
    assert commands
    assert not any("--trust-remote-code" in line for line in [*commands, *done.output.splitlines()])


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat_answers_the_lines_of_a_pipe(run: Path, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = f"{QUESTION}\n/new\n{QUESTION}\nand now?\n/quit\nnever read\n"
    monkeypatch.setattr("sys.stdin", StringIO(typed))
    done = agilerl("chat", str(run), "--temperature", "0", "--base", "--json")
    assert done.code == 0, done.errors
    first, again, further = (json.loads(line) for line in done.output.splitlines() if line.startswith("{"))
    assert first == again
    assert further["user"] == "and now?"
    assert first["base"] == _reply(QUESTION)


def test_chat_asks_for_answers_as_the_run_did(
    changed: Callable[..., Path], agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(f"{QUESTION}\n"))
    run = changed(environment={"answer_format": "boxed"})
    done = agilerl("chat", str(run), "--temperature", "0", "--base", "--json")
    assert done.code == 0, done.errors
    found = json.loads(done.output)
    assert found["user"] == QUESTION
    assert found["base"] == _reply(f"{QUESTION}\n\n{AnswerFormat('boxed').instruction}") != _reply(QUESTION)


def _reply(question: str) -> str:
    """Return what transformers lets the embedded base reply."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    end = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(end, skip_special_tokens=True))


def test_a_terminal_is_told_what_begins_anew(run: Path, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(""))
    assert agilerl("chat", str(run)).output.endswith("Drawn at temperature 0.7.\n")  # hints are for those who type
    monkeypatch.setattr("sys.stdin", Terminal(""))
    shown = " ".join(agilerl("chat", str(run)).output.split())
    assert "/new or an empty line begins a new conversation; it was trained on single questions" in shown


class Terminal(StringIO):
    """Standard input that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_chat_forgets_the_beginning_of_a_long_conversation(
    run: Path, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(f"{QUESTION}\n" * 12))
    done = agilerl("chat", str(run), "--temperature", "0", "--quiet", "algorithm.max_model_len=200")
    assert done.code == 0, done.errors
    assert "forgotten" in done.errors


def test_a_model_cannot_command_the_terminal() -> None:
    assert readable("a\x1b[2Jb\nc\x07") == "a\ufffd[2Jb\nc\ufffd"


# -- merge, export, load -----------------------------------------------------------------------------------------------


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(1, 40)[None]).logits
    return logits


def test_a_merged_model_computes_what_the_adapter_does(run: Path, agilerl: Agilerl) -> None:
    done = agilerl("merge", str(run), "merged", "--dtype", "float32")
    assert (done.code, done.errors) == (0, "")
    assert logging.getLogger("bitsandbytes").level == logging.ERROR
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    bare = _logits(base)
    wanted = _logits(PeftModel.from_pretrained(base, str(run / "elite")))
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    assert torch.allclose(_logits(merged), wanted, atol=1e-5)
    assert not torch.allclose(_logits(merged), bare, atol=1e-3)
    assert AutoTokenizer.from_pretrained("merged").chat_template
    assert agilerl("merge", str(run), "merged").code == 2  # never overwritten
    assert agilerl("merge", str(run), "small", "--quiet") == Outcome(0, "", "")
    own = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype="auto").dtype
    assert AutoModelForCausalLM.from_pretrained("small", dtype="auto").dtype == own


def test_an_adapter_of_other_layers_is_not_merged(adapter: Path, agilerl: Agilerl) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["r"] = 8
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    done = agilerl("merge", str(adapter), "merged")
    assert done.code == 2
    assert "does not fit" in done.errors
    assert not Path("merged").exists()


def test_the_elite_has_a_model_card(run: Path, summary: dict[str, Any]) -> None:
    assert "README.md" in verify_folder(run / "elite")
    card = ModelCard.load(run / "elite" / "README.md")
    assert (card.data.library_name, card.data.license) == ("peft", "apache-2.0")
    assert card.data.eval_results[0].metric_value == round(summary["test"]["elite"]["mean"], 4)
    assert f"| elite | {summary['test']['elite']['mean']:.3f} |" in card.text
    for word in ("vllm serve", "convert_lora_to_gguf.py", "### Lineage", "### Schedule", "reasoning\\_gym:gcd"):
        assert word in card.text
    assert "shipped with `agilerl` (Apache-2.0)" in card.text
    assert "FOLDER --base BASE --outfile" in card.text  # BASE is defined above it
    founders = sum(line["event"] == "birth" and line["parent"] is None for line in read_lines(run / "lineage.jsonl"))
    assert founders < 4  # the default of training.pop_size
    assert f"generations that began with {founders} agent" in card.text


@pytest.mark.parametrize(
    ("environment", "messages", "words"),
    [
        ({}, [{"role": "user", "content": "{question}"}], "rendered by the chat template"),
        (
            {
                "answer_format": "boxed",
                "conversation_template": [{"role": "user", "content": "Q: {question}\n```\n# no"}],
            },
            [{"role": "user", "content": f"Q: {{question}}\n```\n# no\n\n{AnswerFormat('boxed').instruction}"}],
            "rendered by the chat template",
        ),
        (
            {
                "conversation_template": [
                    {"role": "user", "content": "{question}"},
                    {"role": "assistant", "content": "So"},
                ]
            },
            [{"role": "user", "content": "{question}"}, {"role": "assistant", "content": "So"}],
            "the model continues the last one",
        ),
    ],
)
def test_the_card_says_how_to_ask(
    environment: dict[str, Any],
    messages: list[dict[str, str]],
    words: str,
    changed: Callable[..., Path],
    summary: dict[str, Any],
) -> None:
    card = model_card(changed(environment=environment), summary)
    (prompt,) = re.findall(r"^```json\n(.*?)\n```$", card, re.DOTALL | re.MULTILINE)
    assert json.loads(prompt) == messages
    assert words in card
    assert "\n# no" not in card


def test_an_export_loads_everywhere(run: Path, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch) -> None:
    done = agilerl("export", str(run), "out")
    assert done.code == 0, done.errors
    written, talk, *others = done.output.splitlines()
    assert written.startswith(f"written: {Path('out').absolute()} (README.md, adapter_config.json, ")
    assert [line.split()[0] for line in others] == ["vLLM", "llama.cpp"]
    assert strict_json.read_json(Path("out/adapter_config.json"))["base_model_name_or_path"] == "embedded"
    command = talk.removeprefix("talk to it   agilerl ").split()
    monkeypatch.setattr("sys.stdin", StringIO(f"{QUESTION}\n"))
    assert agilerl(*command).code == 0
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    wanted = _logits(PeftModel.from_pretrained(base, "out"))
    for place in (run, run / "elite", Path("out")):
        agent = package.load(place)
        with agent.select_adapter("actor"):
            assert torch.allclose(_logits(agent.runtime.base.model), wanted, atol=1e-5)
    assert agilerl("export", str(run), "out").code == 2
    assert agilerl("export", str(run)).code == 2


def test_load_says_what_is_missing(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"agent\.json"):
        package.load(adapter)
    with pytest.raises(CheckpointError, match="expected a run"):
        package.load(tmp_path)
    make_run(tmp_path / "unfinished", finished=False)
    with pytest.raises(CheckpointError, match="resume"):
        package.load(tmp_path / "unfinished")


MISTAKES = {
    "eval RUN training.sede=7": "'seed'",
    "eval RUN trainin.seed=7": "'training'",
    "eval RUN training.pop_size=9": "'training.pop_size' is a setting of training",
    "eval RUN algorithm.lr=1": "setting of training",
    "eval RUN mutation.mutate_elite=true": "setting of training",
    "eval RUN network.adapter=x": "setting of training",
    "eval RUN other.yaml": "other.yaml",
    "eval RUN environment.task=reasoning_gym:gdc": "'gcd'",
    "eval RUN environment.test_prompts=0": "test_prompts",
    "eval RUN --samples -1": "--samples",
    "eval RUN --temperature nan": "--temperature",
    "eval RUN --right-from nan": "nan",
    "eval RUN --worst -1": "--worst",
    "eval RUN --sample 3": "--samples",
    "chat RUN algorithm.lrr=3": "algorithm.lrr",
    "chat RUN --max-tokens 0": "--max-tokens",
    "chat RUN --temperature x": "--temperature",
    "merge RUN": "OUT",
    "merge RUN full": "full",
    "merge RUN file": "file",
    "merge RUN new --dtype int8": "int8",
    "export RUN full": "full",
    "push RUN me": "'me'",
    "push RUN me/x/y": "'me/x/y'",
    "compare RUN": "alone",
    "compare RUN RUN": "twice",
    "compare RUN nowhere": "nowhere",
    "report RUN RUN": "twice",
    "report RUN --out full": "full",
    "schedule EVOLVED --out file": "file",
    "schedule EVOLVED --extrapolate 0": "--extrapolate",
    "resume RUN/elite": "run.json",
    "train --out RUN": "finished",
}
"""What is typed about a finished run, with what the message has to name."""


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_about_a_run_is_one_sentence(
    typed: str, run: Path, evolved: Path, agilerl: Agilerl, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("...")
    (tmp_path / "file").write_text("...")
    before = sorted(tmp_path.rglob("*"))
    places = {"RUN": str(run), "EVOLVED": str(evolved), "RUN/elite": str(run / "elite")}
    found = agilerl(*(places.get(word, word) for word in typed.split()))
    assert (found.code, found.results) == (2, "")
    assert found.errors.startswith("error: ")
    assert found.errors.count("\n") == 1
    assert MISTAKES[typed] in found.errors
    assert sorted(tmp_path.rglob("*")) == before


def test_a_schedule_is_printed_and_written(evolved: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    printed = json.loads(agilerl("schedule", str(evolved), "--json", "--out", "mine.yaml").output)
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["genes"] == printed["genes"]


# -- push --------------------------------------------------------------------------------------------------------------


class _Hub(Handler):
    """What the hub answers to an upload of small files; with ``refuses`` it takes none."""

    received: list[tuple[str, Any]]
    refuses = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        kind = self.path.rpartition("/")[2] if self.path.endswith("create") else self.path.split("/")[-2]
        assert self.headers["Authorization"] == "Bearer hf_test"
        if kind == "commit":
            content: Any = [json.loads(line) for line in body.splitlines()]
        else:
            content = json.loads(body)
        self.received.append((self.path, content))
        here = f"http://127.0.0.1:{self.server.server_address[1]}"
        answers: dict[str, Any] = {
            "create": {"url": f"{here}/me/x"},
            "commit": {"commitUrl": f"{here}/me/x/commit/{'a' * 40}", "commitOid": "a" * 40},
            "api": {"errors": [], "warnings": []},
        }
        if kind == "preupload":
            answers[kind] = {
                "files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in content["files"]]
            }
        answer = json.dumps({"error": "no"} if self.refuses else answers[kind]).encode()
        self.send_response(403 if self.refuses else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    """A server on this machine in the place of the hub."""
    handler = type("Hub", (_Hub,), {"received": []})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with answering(handler) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield handler


def test_push_uploads_the_elite_with_its_card(run: Path, hub: type[_Hub], agilerl: Agilerl) -> None:
    done = agilerl("push", str(run), "me/x", "--json")
    assert done.code == 0, done.errors
    told = json.loads(done.output)
    (_, created), *_, (_, commit) = hub.received
    assert (created["name"], created["organization"], created["visibility"]) == ("x", "me", "private")
    files = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in commit if line["key"] == "file"
    }
    assert set(files) == set(told["files"])
    assert files["adapter_model.safetensors"] == (run / "elite" / "adapter_model.safetensors").read_bytes()
    assert ModelCard(files["README.md"].decode()).data.eval_results[0].metric_type == "reward"
    here = (str(run).encode(), str(tiny_model_path()).encode(), str(Path.home()).encode() + b"/")
    assert not any(place in content for content in files.values() for place in here)


def test_a_hub_that_refuses_is_a_sentence(run: Path, hub: type[_Hub], agilerl: Agilerl) -> None:
    hub.refuses = True
    done = agilerl("push", str(run), "me/x")
    assert done.code == 1
    assert done.errors.startswith("error: the hub did not take me/x")


def test_push_without_a_token_or_a_proper_name(
    run: Path, hub: type[_Hub], agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "HF_TOKEN" in agilerl("push", str(run), "me/x").errors
    assert agilerl("push", str(run), "../x").code == 2
    assert agilerl("push", str(run), "me/x", "--dry-run").code == 0
    assert hub.received == []


# -- compare -----------------------------------------------------------------------------------------------------------


def test_compare_shows_what_differs(run: Path, changed: Any, agilerl: Agilerl) -> None:
    other = changed(algorithm={"lr": 0.5, "seed": 7}, training={"seed": 7})
    replace_in(other / "metrics.jsonl", '"sha256":"', '"sha256":"other ')
    done = agilerl("compare", str(run), str(other))
    assert done.code == 0, done.errors
    lines = done.output.splitlines()
    assert [line.split() for line in lines if line.startswith("algorithm.lr")] == [["algorithm.lr", "0.001", "0.5"]]
    assert not any(line.startswith(("algorithm.beta", "algorithm.seed")) for line in lines)
    assert [line.split()[0] for line in lines if "seed" in line] == ["training.seed", "Elites,"]
    assert "Elites, second minus first: +0.000 ± 0." in done.output
    assert "so the test does not tell them apart; on different questions, as training.seed differs." in done.output
    found = json.loads((run / "summary.json").read_text())["elite"]["hyperparameters"]["lr"]
    assert next(line.split() for line in lines if line.startswith("elite trained"))[3:] == [f"lr={found:.3g}"] * 2
    assert json.loads((run / "run.json").read_text())["genes"] == {"lr": "[1e-06, 0.01]"}
    found = json.loads(agilerl("compare", str(run), str(other), "--json").output)
    assert found["settings"]["algorithm.lr"] == [0.001, 0.5]
    assert found["results"][0] == found["results"][1]
    assert lines[-1].startswith("report written: report-")
    assert agilerl("compare", str(run)).code == 2
    for name in ("x/run", "y/run"):
        shutil.copytree(run, name)
    (Path("y/run") / "summary.json").unlink()
    done = agilerl("compare", "x/run", "y/run")
    assert done.output.split()[:2] == ["x/run", "y/run"]
    assert "\ny/run has not finished.\nNo setting differs.\n" in done.output


def test_compare_shows_what_differs_inside_lists_and_folds_long_values(
    run: Path, changed: Any, agilerl: Agilerl
) -> None:
    other = changed(environment={"graders": [{"name": "exact", "label": "x" * 60, "weight": 2.0}]})
    lines = agilerl("compare", str(run), str(other)).output.splitlines()
    assert next(line.split() for line in lines if line.startswith("environment.graders.0.weight"))[1:] == ["-", "2.0"]
    assert "x" * 60 in "".join(line.split()[-1] for line in lines if "xx" in line)
    assert Path(lines[-1].removeprefix("report written: ")).is_file()


def test_compare_says_which_settings_follow_from_others(run: Path, tmp_path: Path, agilerl: Agilerl) -> None:
    info = json.loads((run / "run.json").read_text())
    info["given"]["training"].pop("evo_steps", None)
    for evo_steps, given in ((5, info["given"]), (3, info["given"] | {"algorithm": {"lr": 0.5}})):
        made = Path(shutil.copytree(run, tmp_path / str(evo_steps), ignore=shutil.ignore_patterns("checkpoints")))
        change_settings(made, given, training={"evo_steps": evo_steps}, algorithm=given["algorithm"])
    done = agilerl("compare", str(tmp_path / "5"), str(tmp_path / "3"))
    rows = [line.split() for line in done.output.splitlines() if line.startswith(("algorithm", "training"))]
    assert rows == [["algorithm.lr", "0.001", "0.5"], ["training.evo_steps", "(derived)", "5", "3"]]
    page = Path(done.output.splitlines()[-1].removeprefix("report written: ")).read_text()
    assert "training.evo_steps (derived)" in page


def test_compare_pairs_the_questions_of_the_test(run: Path, changed: Any, agilerl: Agilerl) -> None:
    other = changed(algorithm={"lr": 0.5})
    line = next(line for line in (run / "metrics.jsonl").read_text().splitlines() if '"who":"elite"' in line)
    scores = json.loads(line)["by_question"]["scores"]
    better = [score + 0.5 for score in scores]
    written = line.replace(json.dumps(scores, separators=(",", ":")), json.dumps(better, separators=(",", ":")))
    replace_in(other / "metrics.jsonl", line, written)
    low, high = difference_interval(Fitness.from_scores([b - a for a, b in zip(scores, better)]))
    verdict = f"(95 % interval {low:+.3f} to {high:+.3f}), {{}}; paired by question."
    assert verdict.format("which is more than chance") in agilerl("compare", str(run), str(other)).output
    replace_in(other / "metrics.jsonl", written, line)
    output = agilerl("compare", str(run), str(other)).output
    assert "Both elites have the same score in every question of the test." in output
    assert "No setting differs." not in output
    one = written.replace(json.dumps(better, separators=(",", ":")), json.dumps([1 - scores[0], *scores[1:]]))
    replace_in(other / "metrics.jsonl", line, one)
    assert "tell them apart; paired by question." in agilerl("compare", str(run), str(other)).output
    replace_in(other / "metrics.jsonl", one, line)
    replace_in(other / "metrics.jsonl", '"sha256":"', '"sha256":"other ')
    assert "apart; on different questions." in agilerl("compare", str(run), str(other)).output
    replace_in(other / "metrics.jsonl", '"by_question"', '"unknown"')  # as of a run of an earlier version
    unpaired = "apart; not paired by question, as not both runs have a score of each."
    assert unpaired in agilerl("compare", str(run), str(other)).output


def test_compare_gives_no_verdict_on_different_tasks(run: Path, changed: Any, agilerl: Agilerl) -> None:
    other = changed(environment={"task": "reasoning_gym:chain_sum", "params": {"max_terms": 3}})
    output = agilerl("compare", str(run), str(other)).output
    assert "Elites," not in output
    asked = "The runs differ in environment.params, environment.task: they were asked or graded differently"
    assert f"{asked}, so their scores cannot be compared." in output


def test_compare_leaves_out_defaults_of_one_run(
    run: Path, changed: Any, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"path": "rows/of/arithmetics/long.jsonl", "split": "train", "weight": 1.0}
    given = {"environment": {"dataset": [{"path": rows["path"]}]}}
    other = changed(given, environment={"task": None, "dataset": [rows]})
    monkeypatch.setenv("COLUMNS", "140")
    output = agilerl("compare", str(run), str(other)).output
    assert "environment.dataset.0.path" in output
    assert "environment.dataset.0.weight" not in output
    assert {"rows/of/arithmetics/long.jsonl", "reasoning_gym:gcd"} <= set(output.split())


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"task": "gcd"}, ["environment.test_prompts", "the size of the exam", "training.seed"]),
        ({"env_id": "a.py:Game"}, ["environment.test_prompts", "training.seed"]),
        ({"dataset": [{"path": "rows.jsonl"}]}, ["environment.test_prompts"]),
    ],
    ids=["task", "episodes", "rows"],
)
def test_which_settings_change_the_questions_of_the_test(environment: dict[str, Any], names: list[str]) -> None:
    runs: Any = [SimpleNamespace(info={"config": {"environment": environment}})] * 2
    differ = ["algorithm.lr", "environment.test_prompts", "exam questions graded", "training.seed"]
    assert other_questions(runs, differ) == names


def test_compare_says_that_the_reward_changed(
    tmp_path: Path, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("training.pop_size=1", "training.max_steps=32", "environment.eval_prompts=4", "environment.test_prompts=4")
    assert agilerl("init", "--quiet").code == 0
    reward = tmp_path / "my_reward.py"
    for name in ("a", "b", "c"):
        assert agilerl("train", "my.yaml", "--allow-code", *short, "--quiet", "--out", name).code == 0
        if name == "b":
            reward.write_text(reward.read_text() + "\n# another one\n")
    assert "cannot be compared" not in agilerl("compare", "a", "b").output
    output = agilerl("compare", "b", "c").output
    assert "The runs differ in 'my_reward.py':" in output
    assert "sha256 of my_reward.py" in output
