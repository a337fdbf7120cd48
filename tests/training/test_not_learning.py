"""Each cause of "why is it not learning?", provoked in a real run, is named in its report with the number."""

from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.report.load import load_run
from agilerl.training.loop import train
from agilerl.training.setup import build

GRADERS = """
from zlib import crc32


def constant(completion):
    return 0.25


def rarely(completion, answer):
    return float(crc32((completion + answer).encode()) % 40 == 0)


def noise(completion):
    return float(crc32(completion.encode()) % 7)


def failing(completion):
    if sum(map(ord, completion)) % 3 == 0:
        raise RuntimeError("the judge is away")
    return float(len(completion) % 2)


def first(completion):
    return float(completion[:1] in "1234")
"""
TINY = (
    *("training.pop_size=1", "selection_strategy.name=none", "training.max_steps=96", "training.max_error_rate=1"),
    *("environment.data_batch_size_per_gpu=4", "environment.eval_prompts=4", "environment.test_prompts=2"),
    *("algorithm.group_size=4", "algorithm.batch_size=16"),
)
MANY_GROUPS = ("environment.data_batch_size_per_gpu=32", "algorithm.group_size=2", "training.max_steps=256")
MANY_STEPS = ("algorithm.lr=1e-2", "algorithm.clip_coef=0.001", "algorithm.batch_size=4", "algorithm.update_epochs=4")
CASES = [
    ("constant", (), "earned 0.25"),
    ("rarely", MANY_GROUPS, "of the groups all completions earned the same"),
    ("failing", (), "failing gave no grade to "),
    ("first", ("algorithm.max_output_tokens=1",), "100% of the completions were cut at the limit of 1 "),
    ("first", ("algorithm.max_output_tokens=1", "algorithm.mask_truncated=true"), "the gradient is 0"),
    ("noise", MANY_STEPS, "of the tokens were clipped"),
    ("first", ("algorithm.lr=1e-6",), "the learning rate is 1e-06, and 0.001 is usual"),
]


@pytest.mark.model
@pytest.mark.parametrize(("grader", "settings", "found"), CASES, ids=[case[2] for case in CASES])
def test_the_report_names_the_cause(grader: str, settings: tuple[str, ...], found: str, tmp_path: Path) -> None:
    (tmp_path / "graders.py").write_text(GRADERS)
    reward = f"environment.graders=[{{name: '{tmp_path / 'graders.py'}:{grader}'}}]"
    session = build(load_manifest(None, [*TINY, reward, *settings]), allow_code=True)
    for _ in train(session, tmp_path / "run", command=["test"]):
        pass
    assert found in "\n".join(load_run(tmp_path / "run").symptoms)
