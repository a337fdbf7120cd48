"""`agilerl serve`: the command line of vLLM that it writes, against a run directory. tests/with_vllm runs it."""

import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from agilerl import GRPO
from agilerl.config.manifest import load_manifest
from agilerl.config.vllm import installed_vllm
from agilerl.models.tiny import tiny_model_path
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.cli.changed_runs import change_settings
from tests.cli.outcome import Agilerl
from tests.test_readme import SERVING, commands, fences
from tests.text.shapes import CHATML, byte_level
from tests.tiny_models import llama, random_model

OWN_NAME = "runs/all"
"""Where the page has its run."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the page."""
    (command,) = (words for words in map(shlex.split, commands(SERVING)) if words[1] == "train")
    *settings, option, out = command[2:]
    assert (option, out) == ("--out", OWN_NAME)
    root = tmp_path_factory.mktemp("serve") / "made"
    for _ in train(build(load_manifest(None, settings)), root, command=["test"]):
        pass
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / OWN_NAME)
    return tmp_path / OWN_NAME


def options(printed: str) -> dict[str, list[str]]:
    """Return the options of a printed command, with their values; those of vLLM's own come last."""
    found: dict[str, list[str]] = {"": []}
    for word in shlex.split(printed.replace("\\\n", " ")):
        if word.startswith("--"):
            found[latest := word] = []
        else:
            found[latest if len(found) > 1 else ""].append(word)
    return found


def test_the_page_shows_what_is_printed(run: Path, agilerl: Agilerl) -> None:
    shown = 0
    for (kind, block), (_, printed) in pairwise(fences(SERVING)):
        for command in map(shlex.split, block.splitlines() if kind == "bash" else ()):
            if command[0] == "agilerl" and command[1] != "train":
                done = agilerl(*command[1:])
                assert done.code == 0, done.errors
                assert done.output.replace(str(tiny_model_path().parents[2]), "SITE-PACKAGES") == printed
                shown += 1
    assert shown == 3


def test_every_agent_of_the_newest_checkpoint_has_a_name(run: Path, agilerl: Agilerl) -> None:
    found = options(agilerl("serve", str(run), "--population", "--dry-run").output)
    folders = dict(module.split("=", 1) for module in found["--lora-modules"])
    assert list(folders) == ["elite", "agent-0", "agent-1", "agent-2"]
    assert folders["elite"] == str(run / "elite")
    for name in ("agent-0", "agent-1", "agent-2"):
        place = Path(folders[name])
        assert (place.parent.name, place.parent.parent.name) == (name.replace("-", "_"), "000003")
        assert (place / "adapter_model.safetensors").is_file()
    assert found["--max-loras"] == ["5"]


def test_a_run_that_goes_on_has_its_best_agent_so_far(run: Path, agilerl: Agilerl) -> None:
    shutil.rmtree(run / "elite")
    (run / "summary.json").unlink()
    found = options(agilerl("serve", str(run), "--population", "--dry-run").output)
    assert found["--lora-modules"][0] == f"elite={run / 'checkpoints' / '000003' / 'elite' / 'actor'}"
    assert agilerl("serve", str(run), "--dry-run").code == 2


def test_a_damaged_checkpoint_is_passed_over_and_left_as_it_is(run: Path, agilerl: Agilerl) -> None:
    newer = run / "checkpoints" / "000004"
    shutil.copytree(run / "checkpoints" / "000003", newer)
    (newer / "agent_0" / "agent.json").unlink()
    found = options(agilerl("serve", str(run), "--population", "--dry-run").output)
    assert all("000004" not in module for module in found["--lora-modules"])
    assert newer.is_dir()
    shutil.rmtree(run / "checkpoints" / "000003")
    done = agilerl("serve", str(run), "--population", "--dry-run")
    assert (done.code, str(run / "checkpoints") in done.errors) == (2, True)


def test_ranks_names_and_paths(run: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    folder = tmp_path / "a,b=c" / "-my adapter_"
    shutil.copytree(run / "elite", folder)
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "r": 17}))
    found = options(agilerl("serve", str(folder), "--dry-run").output)
    assert found["--max-lora-rank"] == ["32"]
    assert [json.loads(module) for module in found["--lora-modules"]] == [{"name": "my-adapter", "path": str(folder)}]
    assert "--dtype" not in found  # which machine it will be asked on is not known
    for rank in (513, 0, "16"):
        path.write_text(json.dumps({**settings, "r": rank}))
        assert agilerl("serve", str(folder), "--dry-run").code == 2
    path.write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "safetensors" in agilerl("serve", str(folder), "--dry-run").errors


@pytest.mark.parametrize(
    "base", ["--trust-remote-code", "-x/y", "s3://bucket/model", "http://127.0.0.1:9/model", "a/b/c", "me/model:Q4"]
)
def test_a_base_is_a_folder_or_a_name_on_the_hub(base: str, run: Path, agilerl: Agilerl) -> None:
    change_settings(run, network={"pretrained_model_name_or_path": base})
    done = agilerl("serve", str(run), "--dry-run")
    assert (done.code, done.output) == (2, "")
    assert base in done.errors


def test_what_a_run_did_differently_is_handed_over_or_said(run: Path, agilerl: Agilerl) -> None:
    (run.parent / "chat.jinja").write_text("{{ messages[0].content }}")
    change_settings(
        run,
        network={"pretrained_model_name_or_path": "me/model", "chat_template_path": str(run.parent / "chat.jinja")}
        | {"chat_template_kwargs": {"enable_thinking": False}, "stop_sequences": ["</answer>"]},
        training={"dtype": "bfloat16"},
        environment={
            "answer_format": "boxed",
            "conversation_template": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "{question}"},
            ],
        },
    )
    done = agilerl("serve", str(run), "--dry-run")
    assert done.code == 0, done.errors
    found = options(done.output)
    assert found[""][-1] == "me/model"
    assert found["--dtype"] == ["bfloat16"]
    assert found["--chat-template"] == [str(run / "elite" / "chat_template.jinja")]
    assert json.loads(found["--default-chat-template-kwargs"][0]) == {"enable_thinking": False}
    assert "--trust-remote-code" not in found
    for said in ("Be brief.", "</answer>", "Give your final answer in"):
        assert said in done.errors
    template = run / "elite" / "chat_template.jinja"
    template.unlink()
    template.symlink_to("/etc/passwd")  # clients would be shown what it says
    assert agilerl("serve", str(run), "--dry-run").code == 2


@pytest.mark.skipif(installed_vllm() is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_how_to_install_it(
    run: Path, agilerl: Agilerl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(run))
    done = agilerl("serve", str(run))
    assert (done.code, done.output) == (2, "")
    assert re.search(r"pip install 'lora-evolution\[vllm\]'", done.errors)


def test_a_population_is_of_a_run(run: Path, agilerl: Agilerl) -> None:
    assert agilerl("serve", str(run / "elite"), "--population", "--dry-run").code == 2
    assert agilerl("serve", str(run / "nothing"), "--dry-run").code == 2


def test_an_end_that_only_the_template_writes_is_told(agilerl: Agilerl, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level("<|im_end|> <|endoftext|> <|im_start|>"), eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    random_model(llama(vocab_size=300, eos_token_id=1)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (agent,) = GRPO.population(1, model_name=str(tmp_path / "base"), group_size=2, batch_size=2, max_output_tokens=2)
    agent.save_checkpoint(tmp_path / "agent")
    done = agilerl("serve", "agent/actor", "--dry-run")
    assert done.code == 0, done.errors
    note = "the run's answers end with <|im_end|> (0), which the base's files do not state: send stop_token_ids=[0]"
    assert note in done.errors + done.output
