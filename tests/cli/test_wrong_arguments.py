"""What a newcomer, a typing error or a shell script may hand to the commands: one sentence and exit code 2, no more.

Each call is made in a folder with odd files, which are as they were afterwards. What the sentences say is tested beside
what they are about; here they are only one line that names no internals.
"""

import os
from pathlib import Path

import pytest

from tests.cli.outcome import Agilerl

TEXTS = {
    "list.yaml": "- 1\n- 2\n",
    "text.yaml": "hello",
    "number.yaml": "3",
    "null.yaml": "training: null\n",
    "twice.yaml": "training: {seed: 1}\ntraining: {seed: 2}\n",
    "tab.yaml": "training:\n\tseed: 1\n",
    "date.yaml": "training: {seed: 2020-01-01}\n",
    "day.yaml": "training: {seed: 2020-13-45}\n",
    "keys.yaml": "1: 2\n? [a, b]\n: 3\ntrue: 4\n",
    "mapping.yaml": "? {a: 1}\n: 2\n",
    "infinite.yaml": "training: {max_seconds: .inf}\n",
    "merge.yaml": "<<: 3\n",
    "broken.jsonl": '{"question":\n',
    "empty.jsonl": "",
    "rows.txt": "hi",
    "items.json": "[1, 2]",
    "run/run.json": "{}",
    "hollow/run.json": "",
    "syntax.py": "class :",
    "exits.py": "import sys; sys.exit(0)",
    "raises.py": "1 / 0",
    "fails.py": "class X(BaseException): pass\nraise X('boo')",
    "env.py": "import sys\nx = 3\ndef nothing(): pass\ndef leaves(): sys.exit(0)\n",
}
BYTES = {
    "bytes.yaml": bytes(range(256)),
    "latin.yaml": b"training: {pop_size: 4} # caf\xe9",
    "nul.yaml": b"training: {seed: 1}\x00",
    "torn/run.json": b"\xff",
    "junk.parquet": b"PAR1junk",
    "junk.csv": b"\xff\xfe\x00",
    "bytes.py": b"\xff\xfe",
}
LONG = "x" * 5000


@pytest.fixture(autouse=True)
def odd_files(tmp_path: Path) -> None:
    for name, content in {**{name: text.encode() for name, text in TEXTS.items()}, **BYTES}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "dangling.yaml").symlink_to("nowhere")


MANIFESTS = [
    *(name for name in [*TEXTS, *BYTES] if name.endswith(".yaml")),
    *("folder.yaml", "pipe.yaml", "loop.yaml", "dangling.yaml"),
]
PATHS = [
    *("run", "hollow", "torn", "folder", "rows.txt", "pipe.yaml", "loop.yaml", "dangling.yaml", "nowhere", "", "/"),
    *("/dev/null", "/proc", LONG, "a\x1b[31m", "\udcff", "run/run.json", "rows.txt/run"),
]
SETTINGS = [
    *("", "=", "=1", "a=", ".=1", "training.=1", ".training.seed=1", "training..seed=1", "training=1", "training=[]"),
    *("training.seed=null", "training.seed=", "training.seed=nan", "training.seed=.nan", "training.seed=1e400"),
    *("training.seed=[1", "training.seed={", "training.seed=!!python/none", "training.seed=*x", "training.seed=true"),
    *("tr\u0430ining.seed=1", f"training.seed={'9' * 5000}", "training.max_steps=-1", "training.pop_size=2.5"),
    *("training.max_seconds=0", "training.max_seconds=-1", "training.threads=0", "training.dtype=int8"),
    *("training.device=x", "training.device=", "training.device=cuda:99", "training.evo_steps=0"),
    *("environment.dataset=broken.jsonl", "environment.dataset=empty.jsonl", "environment.dataset=junk.parquet"),
    *("environment.dataset=junk.csv", "environment.dataset=rows.txt", "environment.dataset=items.json"),
    *("environment.dataset=folder", "environment.dataset=[]", "environment.dataset=5", "environment.dataset=/dev/zero"),
    *("environment.task=", "environment.task=5", "environment.task=reasoning_gym:", "environment.task=:x"),
    *("environment.params=5", "environment.params={min_word_len: -1}", "environment.params={min_word_len: x}"),
    *("environment.eval_prompts=1", "environment.eval_prompts=2.5", "environment.conversation_template=hi"),
    *("environment.graders=[]", "environment.graders=[x]", "environment.graders=[{name: x}]"),
    *("environment.graders=[{name: task, weight: 1e308}]", "environment.graders=[{name: task, weight: .nan}]"),
    *("environment.graders=[{name: env.py:nothing}]", "environment.env_type=multiturn", "environment.reward=x"),
    *("network.pretrained_model_name_or_path=folder", "network.pretrained_model_name_or_path=rows.txt"),
    *("network.adapter=folder", "network.adapter=nowhere", "network.lora_config.r=0", "network.lora_config.r=2.5"),
    *("network.lora_config.target_modules='('", "algorithm.max_model_len=0"),
    *("algorithm.name=x", "algorithm.name=[]", "algorithm.name=[GRPO,x]", "algorithm.lr=0", "algorithm.lr=1e39"),
    *("algorithm.adv_clip_range=1e39", "algorithm.kl_clamp_value=1e39", "algorithm.delta=1e308"),
    *("algorithm.temperature=0", "algorithm.top_p=2", "algorithm.group_size=1", "algorithm.batch_size=0"),
    *("mutation.probabilities.no_mut=-1", "mutation.rank_range=5"),
    *("mutation.rl_hp_selection=[lr]", "mutation.rl_hp_selection={lr: {min: 1, max: 0}}"),
    *("selection_strategy.tournament_size=0", "selection_strategy.name=x", "distributed.backend=x"),
]
ENVIRONMENTS = [
    *("env.py", "env.py:", "env.py:x", "env.py:nothing", "env.py:leaves", "env.py:A.b", "env.py:1", "syntax.py:X"),
    *(
        "exits.py:X",
        "exits:X",
        "raises.py:X",
        "fails.py:X",
        "bytes.py:X",
        "nowhere.py:X",
        "folder:X",
        "folder",
        "",
        ":",
    ),
    *(":A", "A:", "a b:c", "..:x", "os:path", "builtins:exit", "sys:exit", "gem:x", "textarena:", "openenv:x"),
    *("CartPole-v1", "agilerl/Nope-v0", "agilerl/GuessTheNumber-v99", "a/b/c", LONG, "/etc/hostname/x", "loop.yaml"),
]
OTHERS = [
    *(["train", "--seed", "nan"], ["train", "--seed", ""], ["train", "--seed", "9" * 5000], ["train", "--resume", "x"]),
    *(["train", "--resume", "auto"], ["train", "-x"], ["train", "--dry-run=3"], ["train", "a\x00b.yaml"]),
    *(
        ["train", "--out", f"a\nb\x1b[31m/{'x' * 300}"],
        ["train", "--out", "rows.txt/x"],
        ["train", "--out", "loop.yaml"],
    ),
    *(["train", "--out", "caf\udcc3\udca9"], ["resume"], ["resume", "a", "b"], ["report", *["nowhere"] * 500]),
    *([""], ["TRAIN"], ["\udcff"]),
]
AFTER = {
    **{name: [] for name in ("eval", "chat", "schedule", "compare")},
    **{name: ["folder/new"] for name in ("merge", "export")},
    "push": ["me/mine", "--dry-run"],
}
"""Commands that begin with a run or an adapter, with what else each needs."""
WITH_CODE = ("--allow-code", "--out", "folder/new")
INIT = [
    *(["init", path] for path in PATHS),
    *(["init", "my.yaml", "--data", data] for data in ("broken.jsonl", "empty.jsonl", "junk.parquet", "junk.csv")),
    *(["init", "my.yaml", "--data", data] for data in ("rows.txt", "folder", "nowhere.csv", "reasoning_gym:", "a b")),
    *(["init", "my.yaml", "--data", data] for data in ("reasoning_gym:gdc", "agilerl/GuessTheNumber-v0", "/dev/zero")),
    *(["init", "my.yaml", "--model", model] for model in ("", "./nowhere", "/dev/null", "~/nowhere")),
    *(["init", "my.yaml", "--reward", reward] for reward in ("", "nice")),
]
CALLS = [
    *([command, path, *rest] for path in PATHS for command, rest in AFTER.items()),
    *INIT,
    *(["train", name, "training.pop_size=0"] for name in MANIFESTS),
    *([command, path] for path in PATHS for command in ("resume", "report")),
    *(["report", path, "nowhere"] for path in ("loop.yaml", "run")),
    *(["train", "--resume", "auto", "--out", path] for path in ("run", "hollow", "rows.txt", "loop.yaml", LONG)),
    *(["train", setting, "--out", "folder/new"] for setting in SETTINGS),
    *(["train", "environment.env_type=multiturn", f"environment.env_id='{name}'", *WITH_CODE] for name in ENVIRONMENTS),
    *OTHERS,
]


@pytest.mark.parametrize("arguments", CALLS, ids=lambda a: ascii(" ".join(a))[1:60])
@pytest.mark.processes
def test_one_sentence(arguments: list[str], agilerl: Agilerl, tmp_path: Path) -> None:
    before = sorted(map(str, tmp_path.rglob("*")))
    found = agilerl(*arguments)
    assert (found.code, found.results) == (2, "")
    assert found.errors.startswith("error: ")
    assert found.errors.count("\n") == 1
    assert found.errors[:-1].isprintable()
    assert 10 < len(found.errors) < 2100
    after = (str(path) for path in tmp_path.rglob("*") if "__pycache__" not in path.parts)
    assert sorted(after) == before


@pytest.mark.parametrize("arguments", [["--"], []])
def test_nothing_to_do_shows_the_help(arguments: list[str], agilerl: Agilerl) -> None:
    found = agilerl(*arguments)
    assert (found.code, found.errors) == (0, "")
    assert "train" in found.output


def test_a_function_as_the_reward_is_sent_to_the_graders(agilerl: Agilerl) -> None:
    outcome = agilerl("train", "environment.reward=my_reward.py:close", "--dry-run")
    assert outcome.code == 2
    assert "environment.graders" in outcome.errors
