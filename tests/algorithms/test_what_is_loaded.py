"""A base and a tokenizer are what a checkpoint was trained on, are loaded as they were, or are said to differ."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import agilerl
from agilerl.algorithms import GRPO, SFT
from agilerl.algorithms.distillation import load_teacher
from agilerl.config.base_model import SharedOptions
from agilerl.config.manifest import load_manifest
from agilerl.data import Trajectory, collate
from agilerl.envs.prompts import render_prompt
from agilerl.errors import CheckpointError, ConfigError
from agilerl.models.base import fingerprint, load_tokenizer, resolve_model, tokenizer_fingerprint
from agilerl.runtime import Runtime
from agilerl.training.base import merged_model
from agilerl.training.run import resume
from agilerl.training.saved import open_run
from agilerl.training.setup import build, load_agent
from tests.algorithms.conftest import lora
from tests.faults.unfinished import change_json, leave_unfinished
from tests.tiny_models import random_model

pytestmark = pytest.mark.model

OVERRIDES = {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
TEMPLATE = "{% if loud is defined %}!{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}="
ROWS = collate([Trajectory([5, 6, 7], [8, 9, 10, 11], [True] * 4, None, [1.0])], 0)
QUESTION = [{"role": "user", "content": "12"}]


def base(**options: Any) -> Runtime:
    return Runtime.from_pretrained("embedded", lora_config=lora(4), **options)


def agent_on(runtime: Runtime, kind: type = GRPO) -> Any:
    agent = kind(runtime=runtime, lora_config=lora(4), seed=3)
    for a, b in runtime.store.factors:
        a[agent.slot].normal_(generator=torch.Generator().manual_seed(1))
        b[agent.slot].normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    return agent


def model_folder(place: Path) -> Path:
    return Path(shutil.copytree(resolve_model("embedded"), place))


def other_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    save_file({**tensors, name: tensors[name] + 0.5}, file, {"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    own = load_tokenizer(str(folder)).chat_template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change_json(folder / "tokenizer_config.json", lambda values: {**values, "chat_template": own + " "})


# -- a base that is loaded with the agent -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["template", "names", "overrides", "stop"])
def test_what_changed_the_base_is_loaded_with_the_agent(what: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    options: dict[str, Any] = {
        "template": {"chat_template_path": tmp_path / "t.jinja"},
        "names": {"chat_template_path": tmp_path / "t.jinja", "chat_template_kwargs": {"loud": True}},
        "overrides": {"options": SharedOptions(config_overrides=OVERRIDES)},
        "stop": {"options": SharedOptions(stop_sequences=["1"])},
    }[what]
    agent, plain = agent_on(base(**options)), agent_on(base())
    agent.save_checkpoint(tmp_path / "a")
    (tmp_path / "t.jinja").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = GRPO.load(tmp_path / "a"), agilerl.load(tmp_path / "a")

    def seen(one: Any) -> Any:
        ids = render_prompt(one.runtime.tokenizer, QUESTION)
        return one.logprobs(ROWS).tolist(), ids, one.runtime.options.stop_sequences

    assert [seen(one) for one in loaded] == [seen(agent)] * 2
    assert seen(agent) != seen(plain)


def test_an_older_checkpoint_loads_and_stays_what_it_was(tmp_path: Path) -> None:
    agent_on(base()).save_checkpoint(tmp_path / "a")
    change_json(tmp_path / "a" / "agent.json", lambda values: values.pop("loaded") and None)
    GRPO.load(tmp_path / "a").save_checkpoint(tmp_path / "b")
    assert "loaded" not in json.loads((tmp_path / "b" / "agent.json").read_text())


def test_a_file_that_asks_for_what_no_base_has_is_refused(tmp_path: Path) -> None:
    agent_on(base()).save_checkpoint(tmp_path / "a")
    for wrong in (
        {"stop_sequences": []},
        {"chat_template": "{% if %}"},
        {"config_overrides": {"num_hidden_layers": 9}},
    ):
        change_json(tmp_path / "a" / "agent.json", lambda values, w=wrong: values["loaded"].update(w))
        with pytest.raises((ConfigError, CheckpointError)):
            GRPO.load(tmp_path / "a")


def test_how_an_adapter_starts_is_part_of_an_agent(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian")
    agent = GRPO(runtime=base(), lora_config=config)
    agent.save_checkpoint(tmp_path / "a")
    for copy in (agent.clone(1), GRPO.load(tmp_path / "a", runtime=agent.runtime)):
        assert copy.lora_config.init_lora_weights == "gaussian"


# -- a base that is there already -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "a"
    agent_on(base()).save_checkpoint(folder)
    return folder


def others(place: Path) -> dict[str, Runtime]:
    folder = model_folder(place)
    same = Runtime.from_pretrained(folder, lora_config=lora(4))
    other_weights(folder)
    weights = Runtime.from_pretrained(folder, lora_config=lora(4))
    (place.parent / "t.jinja").write_text(TEMPLATE)
    return {
        "": same,  # under another name, with the weights that it was trained on
        "weights": weights,
        "tokenizer": base(chat_template_path=place.parent / "t.jinja"),
        "config_overrides": base(options=SharedOptions(config_overrides=OVERRIDES)),
    }


USES: dict[str, Callable[[Path, Runtime], Any]] = {
    "load": lambda folder, runtime: GRPO.load(folder, runtime=runtime),
    "agilerl.load": lambda folder, runtime: agilerl.load(folder, runtime=runtime),
    "load_checkpoint": lambda folder, runtime: agent_on(runtime).load_checkpoint(folder),
    "stage": lambda folder, runtime: agent_on(runtime, SFT).load_checkpoint(folder),
    "teacher": lambda folder, runtime: load_teacher(runtime, folder),
}


@pytest.mark.filterwarnings("ignore:.*temperature")
def test_another_base_or_tokenizer_is_told(saved: Path, tmp_path: Path) -> None:
    for difference, runtime in others(tmp_path / "m").items():
        for use in USES.values():
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                use(saved, runtime)
            assert [difference in str(one.message) for one in told] == ([True] if difference else [])


def test_adapters_of_another_base_are_told_where_runs_start_from_them(saved: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    other_weights(folder)
    shape = "network.lora_config={r: 4, lora_alpha: 8}"
    config = load_manifest(
        None, [f"network.adapter={saved}/actor", f"network.pretrained_model_name_or_path={folder}", shape]
    )
    with pytest.warns(UserWarning, match="weights"):
        load_agent(config)
    with pytest.warns(UserWarning, match="weights"):
        merged_model(saved / "actor", config)
    # A folder that PEFT wrote names its base, and no more.
    bare = Path(shutil.copytree(saved / "actor", tmp_path / "bare"))
    with pytest.warns(UserWarning, match="unless they are the same model"):
        load_agent(config.replaced(network=config.network.model_copy(update={"adapter": str(bare)})))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_agent(load_manifest(None, [f"network.adapter={bare}", shape]))


def test_a_merged_model_has_the_overrides_of_its_base(tmp_path: Path) -> None:
    agent = agent_on(base(options=SharedOptions(config_overrides=OVERRIDES)))
    agent.save_checkpoint(tmp_path / "a")
    config = load_manifest(None, [f"network.config_overrides={json.dumps(OVERRIDES)}"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = merged_model(tmp_path / "a" / "actor", config)
    model.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = merged(ROWS.ids[:, :7]).logits[0, :-1].log_softmax(-1)
    wanted = logits[torch.arange(2, 6), ROWS.ids[0, 3:7]]
    assert torch.allclose(agent.logprobs(ROWS)[0, 2:6], wanted, atol=1e-4)


# -- a run that goes on -----------------------------------------------------------------------------------------------


def test_a_run_does_not_go_on_with_another_base_or_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    unfinished = leave_unfinished(tmp_path / "run", f"network.pretrained_model_name_or_path={folder}")
    kept = {name: (folder / name).read_bytes() for name in ("model.safetensors", "tokenizer_config.json")}
    template = folder / "chat_template.jinja"
    own = template.read_bytes() if template.exists() else None
    for change, word in ((other_weights, "weights"), (other_tokenizer, "tokenizer")):
        change(folder)
        saved = open_run(unfinished.root, report=print)
        with pytest.raises(CheckpointError, match=word):
            build(saved.config, saved.checkpoint)
        saved.run.close()
        for name, data in kept.items():
            (folder / name).write_bytes(data)
        if own is not None:
            template.write_bytes(own)
    saved = open_run(unfinished.root, report=print)
    for _ in resume(build(saved.config, saved.checkpoint), saved.run):
        pass


# -- fingerprints -----------------------------------------------------------------------------------------------------


def test_fingerprints_follow_the_weights_and_nothing_else() -> None:
    model = random_model()
    before = fingerprint(model)
    assert fingerprint(random_model()) == before != fingerprint(random_model(seed=1))
    runtime = Runtime.for_model(model, lora_config=lora(4))
    assert runtime.base.fingerprint == fingerprint(model) == before  # the layers of adapters are no part of it
    assert fingerprint(random_model().to(torch.bfloat16)).partition(":")[0] == "bfloat16"
    assert tokenizer_fingerprint(None) is None
    assert tokenizer_fingerprint(load_tokenizer("embedded")) == tokenizer_fingerprint(load_tokenizer("embedded"))
