"""The beginning of a command: what it says first, what it imports, and the settings of its process."""

import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agilerl import LocalTrainer, Run, train
from agilerl.algorithms import ALGORITHMS
from agilerl.cli import process_settings
from agilerl.cli.app import app
from agilerl.config.declared import HYPERPARAMETERS
from agilerl.config.manifest import LEARNS_FROM, load_manifest
from agilerl.errors import ConfigError
from agilerl.training import resolved
from agilerl.training.run import train as begin
from agilerl.training.setup import build
from tests.cli.outcome import Agilerl
from tests.training.small_runs import SMALL, environment

TELLS_IMPORTS = """
import sys

class Told:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "scipy", "reasoning_gym", "peft"):
            print("IMPORT", name, flush=True)

sys.meta_path.insert(0, Told())
sys.argv = ["agilerl", *{arguments!r}]
from agilerl.cli import main
try:
    main()
except SystemExit as ended:
    code = ended.code or 0
print()
print(code, *sorted(sys.modules))
"""


def started(*arguments: str, cwd: Path) -> tuple[int, list[str], set[str], str]:
    """Return the exit code of a command, what it and its imports say, the modules at its end, and its errors."""
    program = TELLS_IMPORTS.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, env=environment(), capture_output=True, text=True)
    *said, last = done.stdout.splitlines()
    code, *modules = last.split()
    return int(code), said, set(modules), done.stderr


MISSPELT = {
    "a key": ("training.popsize=4", "unknown key 'training.popsize'; did you mean 'pop_size'?"),
    "a value": ("training.dtype=float23", "training.dtype: input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
}
OF_ALGORITHMS = {
    "an algorithm": ("algorithm.name=GRPPO", "algorithm.name='GRPPO' is unknown; did you mean 'GRPO'?"),
    "a hyperparameter": ("algorithm.gruop_size=4", "unknown key 'algorithm.gruop_size'; did you mean 'group_size'?"),
    "a choice": ("algorithm.name=choice[GRPO, PPO]", "an agent cannot switch to or from PPO"),
    "a gene": ("mutation.rl_hp_selection={lrr: {}}", "GRPO has no hyperparameter 'lrr'; did you mean 'lr'?"),
    "an algorithm of other data": ("environment.env_type=preference", "algorithm.name='GRPO' learns from"),
}


@pytest.mark.parametrize(("override", "words"), MISSPELT.values(), ids=MISSPELT)
@pytest.mark.processes
def test_a_misspelt_name_costs_no_import(override: str, words: str, tmp_path: Path) -> None:
    _, said, modules, errors = started("train", override, cwd=tmp_path)
    assert [line for line in said if line] == []
    assert errors.startswith("error: ")
    assert words in errors
    assert modules.isdisjoint({"torch", "transformers", "scipy", "reasoning_gym", "peft"})


@pytest.mark.parametrize(("override", "words"), OF_ALGORITHMS.values(), ids=OF_ALGORITHMS)
def test_a_misspelt_name_of_an_algorithm_is_an_error(agilerl: Agilerl, override: str, words: str) -> None:
    refused = agilerl("train", override)
    assert (refused.code, refused.results) == (2, "")
    assert words in refused.errors


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("environment.task=reasoning_gym:spel_backward", "did you mean 'spell_backward'?"),
        ("environment.params.min_valu=3", "did you mean 'min_value'?"),
    ],
)
@pytest.mark.processes
def test_a_misspelt_task_or_parameter_is_found_without_torch(override: str, words: str, tmp_path: Path) -> None:
    _, _, modules, errors = started("train", override, cwd=tmp_path)
    assert errors.startswith("error: ")
    assert words in errors
    assert modules.isdisjoint({"torch", "transformers", "peft"})


NEEDLESS = (
    *("bitsandbytes", "matplotlib", "cellpylib", "networkx", "pandas", "ray", "datasets", "vllm"),
    *("plotly", "sklearn", "deepspeed", "torch._inductor.compile_fx", "gem", "textarena", "openenv"),
)


@pytest.mark.model
@pytest.mark.processes
def test_a_dry_run_speaks_first_and_imports_nothing_needless(tmp_path: Path) -> None:
    _, said, modules, errors = started("train", *SMALL, "--dry-run", cwd=tmp_path)
    assert errors == ""
    assert said[0] == "Checking the embedded default, with your settings: loading the libraries and the model."
    assert "IMPORT torch" in said
    assert {name for name in NEEDLESS if name in modules} == set()
    assert any(line.startswith("Plan") for line in said)


@pytest.mark.model
def test_the_first_line_names_manifest_and_directory(agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("training: {pop_size: 1000000000}\n")
    refused = agilerl("train", "mine.yaml", "--out", "here")
    assert refused.code == 2
    assert refused.output == "Starting a run of 'mine.yaml' in 'here': loading the libraries and the model.\n"
    assert (refused.results, refused.errors.count("\n")) == ("", 1)
    assert agilerl("train", "mine.yaml", "--quiet").output == ""
    assert agilerl("train", "mine.yaml", "--json").output == ""


def test_the_table_of_names_is_what_the_algorithms_declare() -> None:
    """`make generated` writes it."""
    names = (name for algorithm in ALGORITHMS.values() for name in algorithm.Config.model_fields)
    assert list(dict.fromkeys(names)) == list(HYPERPARAMETERS)
    data = {name: one.env_type for name, one in ALGORITHMS.items() if one.env_type != "reasoning"}
    assert data == LEARNS_FROM


@pytest.mark.processes
def test_what_is_deferred_works_when_it_is_used(tmp_path: Path) -> None:
    code = """
import sys
from agilerl.envs.upstream import build_dataset, draw
from agilerl.models.quantised import imported_peft
dataset = build_dataset("game_of_life", {}, seed=1, size=3)
helpers = imported_peft().helpers
assert {"matplotlib", "cellpylib", "bitsandbytes"}.isdisjoint(sys.modules)
row = draw(dataset, 0, name="game_of_life", params={}, seed=1)
assert dataset.score_answer(row["answer"], row) == 1.0
assert helpers.bnb.__version__
assert {"matplotlib", "cellpylib", "bitsandbytes"} <= set(sys.modules)
assert helpers.bnb.nn is sys.modules["bitsandbytes"].nn
"""
    pytest.importorskip("bitsandbytes")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the settings of the process --------------------------------------------------------------------------------------


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the collector as it was, and nothing frozen for the rest of the tests."""
    monkeypatch.delenv(process_settings.SWITCH, raising=False)
    monkeypatch.setattr(process_settings, "_freeze_once", cache(gc.freeze))
    frozen = gc.get_freeze_count()
    yield
    process_settings.loading_done()
    gc.enable()
    if not frozen:
        gc.unfreeze()


@pytest.mark.usefixtures("collecting")
def test_garbage_waits_while_a_command_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    process_settings.apply()
    assert not gc.isenabled()
    process_settings.loading_done()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    later = [[0]]
    process_settings.apply()
    process_settings.loading_done()
    assert any(one is later for one in gc.get_objects()), "a second command froze"
    gc.disable()  # as a caller may have done for its own reasons
    process_settings.loading_done()
    assert not gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_the_settings_can_be_left_out(monkeypatch: pytest.MonkeyPatch, agilerl: Agilerl) -> None:
    monkeypatch.setenv(process_settings.SWITCH, "off")
    process_settings.apply()
    assert gc.isenabled()
    monkeypatch.setenv(process_settings.SWITCH, "maybe")
    with pytest.raises(ConfigError, match=r"AGILERL_PROCESS_SETTINGS .*'maybe'"):
        process_settings.apply()
    refused = agilerl("train", "--dry-run")
    assert (refused.code, refused.output) == (2, "")
    assert refused.errors.startswith("error: the environment variable AGILERL_PROCESS_SETTINGS must be on or off")


def test_a_refused_command_leaves_the_collector_on(agilerl: Agilerl) -> None:
    assert agilerl("train", "training.popsize=3").code == 2
    assert gc.isenabled()
    CliRunner().invoke(app, ["probe", "training.popsize=3"])  # without the program around it
    assert gc.isenabled()


glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or later")


@glibc
def test_the_allocator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    assert set(process_settings.keep_memory()) == {"M_MMAP_THRESHOLD", "M_TRIM_THRESHOLD", "M_TOP_PAD"}
    monkeypatch.setenv("MALLOC_TOP_PAD_", "65536")  # the user's own setting stays
    assert set(process_settings.keep_memory()) == {"M_MMAP_THRESHOLD", "M_TRIM_THRESHOLD"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")
    assert process_settings.keep_memory() == {}


MAPPINGS = """
import ctypes, sys

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype, libc.malloc.argtypes = Info, ctypes.c_void_p, [ctypes.c_size_t]
from agilerl.cli import process_settings
import agilerl
if sys.argv[1] == "apply":
    process_settings.apply()
before = libc.mallinfo2().hblks
libc.malloc(8 << 20)
print(libc.mallinfo2().hblks - before)
"""


@glibc
@pytest.mark.parametrize(("when", "mapped"), [("apply", "0"), ("import", "1")])
@pytest.mark.processes
def test_tensors_of_some_mib_come_from_the_heap(when: str, mapped: str, tmp_path: Path) -> None:
    """An import alone changes nothing of the process."""
    command = [sys.executable, "-c", MAPPINGS, when]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == mapped


@pytest.mark.parametrize(("system", "library"), [("darwin", "glibc"), ("win32", "glibc"), ("linux", "libc")])
def test_other_allocators_are_left_alone(system: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, ""))  # "libc" or "" with musl
    assert process_settings.keep_memory() == {}


SHORTEST = (*SMALL, "training.max_steps=1", "training.evo_steps=1")


@pytest.mark.parametrize("door", ["command", "dry run", "train", "resume", "LocalTrainer"])
def test_a_configuration_is_resolved_once(
    door: str, agilerl: Agilerl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the door of the process: what comes after it is handed the result."""
    mutations, count = resolved._mutations, list[object]()
    monkeypatch.setattr(resolved, "_mutations", lambda section: count.append(section) or mutations(section))
    out, manifest = tmp_path / "run", tmp_path / "it.yaml"
    manifest.write_text(json.dumps(load_manifest(None, SHORTEST).model_dump(mode="json", exclude_unset=True)))
    if door in ("command", "dry run"):
        assert agilerl("train", str(manifest), "--out", str(out), *["--dry-run"] * (door == "dry run")).code == 0
    elif door == "train":
        train(manifest=manifest, out=out, display=False)
    elif door == "resume":
        next(run := begin(build(load_manifest(manifest)), out))
        run.close()
        count.clear()
        assert not Run(out).is_finished
        Run(out).resume(display=False)
    else:
        trainer = LocalTrainer.from_manifest(manifest)
        assert len(count) == 1  # a wrong setting is reported at once
        count.clear()
        trainer.train(out=out, verbose=False)
    assert len(count) == 1
