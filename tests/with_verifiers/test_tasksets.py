"""Runs on tasksets of verifiers: ``environment.env_id: verifiers:NAME``."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from agilerl import GRPO, Population, Runtime
from agilerl.config.manifest import config_of
from agilerl.envs.programs import AgentTask
from agilerl.errors import ConfigError, EnvError
from agilerl.training import tasks

OURS = "even-digit"
SMOLLM2 = Path(__file__).resolve().parents[2] / "build" / "smollm2"


def taskset(name: str = OURS, *, allow_code: bool = True, **environment: Any) -> AgentTask:
    environment = {"env_id": f"verifiers:{name}", "eval_prompts": 4, "test_prompts": 4, **environment}
    made = tasks.task(config_of({"environment": environment}), allow_code=allow_code)
    assert isinstance(made, AgentTask)
    return made


def population(task: AgentTask, agents: int = 2, model: str = "embedded", **settings: Any) -> Population:
    runtime = Runtime.from_pretrained(model, seed=0)
    shared = {"group_size": 4, "batch_size": 8, "max_output_tokens": 6, "lr": 1e-2, "beta": 0.0} | settings
    members = [GRPO(runtime=runtime, index=i, seed=0, **shared) for i in range(agents)]
    return Population(members, task, prompts_per_step=2, eval_max_new_tokens=6)


def test_tasks_are_divided_by_their_data() -> None:
    one, two = taskset(), taskset(params={"size": 50})
    assert (one.exam_prompts, one.test_prompts, one.train_size) == (4, 8, 38)  # of 60 tasks ten are there twice
    held = [[t.row("exam", i) for i in range(4)] + [t.row("test", i) for i in range(8)] for t in (one, two)]
    assert held[0] == held[1]
    trained = {one.row("train", i)["task"] for i in range(one.train_size)}
    assert len(trained) == one.train_size
    assert not trained & {row["task"] for row in held[0]}


def test_the_reward_and_the_tokens_are_those_of_the_harness() -> None:
    trained = population(taskset())
    rollout = trained.rollout()
    assert not rollout.failures
    rows = [t for own in rollout.trajectories.values() for t in own]
    assert {t.rewards[0] for t in rows} <= {0.0, 1.0}
    for row in rows:
        assert row.rewards[-1] == float(row.text.strip()[:1] in set("02468"))
        assert row.logprobs is not None
        assert len(row.logprobs) == len(row.token_ids)
    examined = trained.evaluate("exam")
    assert all(0 <= fitness.mean <= 1 for fitness in examined.values())
    trained.task.close()


def test_it_learns() -> None:
    trained = population(taskset(params={"size": 40}), 1, group_size=8, batch_size=32)
    rewards = []
    for _ in range(14):
        rollout = trained.rollout()
        rewards.append(fmean(t.rewards[-1] for t in rollout.trajectories[0]))
        trained.learn(rollout)
    trained.task.close()
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.2, rewards


def test_an_error_of_the_taskset_is_a_failed_episode() -> None:
    task = taskset(params={"unlucky": 1})
    with pytest.raises(EnvError, match=r"all 16 episodes failed; the first: .*TaskError.*an unlucky number"):
        population(task).rollout()
    task.close()


def test_a_harness_of_verifiers_calls_the_tools_of_a_task() -> None:
    """Its program in a process of its own, and its server of tools: the embedded model calls none."""
    task = taskset("multiplies", agent_limits={"timeout": 250.0}, eval_prompts=2, test_prompts=2)
    rollout = population(task, 1, group_size=2, batch_size=2).rollout()
    assert not rollout.failures, rollout.failures
    assert {t.rewards[-1] for t in rollout.trajectories[0]} == {0.0}
    assert all(t.token_ids for t in rollout.trajectories[0])
    task.close()


@pytest.mark.skipif(not SMOLLM2.exists(), reason="its instructions are too long for the embedded model; make real")
def test_a_game_of_verifiers_own_is_played_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hangman of textarena, whose taskset takes the turns itself; nltk's list of words is short and of this folder."""
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("apple\nriver\nstone\nhouse\ngarden\nmountain\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    params = {"game": "Hangman-v0", "agent": {"max_turns": 2}}
    task = taskset("textarena", params=params, agent_limits={"timeout": 250.0}, eval_prompts=2, test_prompts=2)
    rollout = population(task, 1, str(SMOLLM2), group_size=2, batch_size=2, max_output_tokens=4).rollout()
    task.close()
    assert not rollout.failures, rollout.failures
    assert all("[GAME] You are playing Hangman" in t.text for t in rollout.trajectories[0])


def test_without_allow_code_nothing_is_imported() -> None:
    with pytest.raises(ConfigError, match="allow-code"):
        taskset("no-such-taskset", allow_code=False)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"env_id": "verifiers:no-such-taskset"}, "no-such-taskset.*not found"),
        ({"params": {"sizes": 3}}, "sizes"),
        ({"params": {"size": 3}}, "3 different tasks"),
        ({"params": {"agent": {"harness": {"id": "bash"}}}}, "on this machine.*docker"),
        ({"params": {"agent": {"harness": {"id": "no-such-harness"}}}}, "no-such-harness"),
        ({"step_timeout": 3}, "step_timeout"),
        ({"agent_limits": {"concurrency": 0}}, "concurrency"),
    ],
)
def test_what_cannot_be_used_is_refused(environment: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as raised:
        taskset(**environment)
    assert type(raised.value).__module__ == "agilerl.errors"
