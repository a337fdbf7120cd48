"""Populations that play: all agents and episodes in one batch, exact tokens, failures that stay where they are."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agilerl.algorithms import GRPO, PPO, REINFORCE
from agilerl.data import collate
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.games import GuessTheNumber
from agilerl.errors import ConfigError, EnvError
from agilerl.models.base import load_tokenizer
from agilerl.population import Population
from agilerl.runtime import Runtime
from agilerl.utils.probe_envs_llm import GridNavigationEnv
from tests.envs.scripted import Echo
from tests.probes import GridNavigation
from tests.tiny_models import qwen2, random_model

pytestmark = pytest.mark.model


def make_runtime() -> Runtime:
    tokenizer = load_tokenizer("embedded")
    config = qwen2(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=256,
    )
    return Runtime.for_model(random_model(config, scale=0.5), tokenizer=tokenizer, seed=1)


def make_population(
    task: EpisodeTask, size: int = 2, kind: Any = GRPO, prompts_per_step: int = 4, **settings: Any
) -> Population:
    defaults: dict[str, Any] = {"group_size": 4, "batch_size": 64, "beta": 0.0, "max_output_tokens": 2, "seed": 1}
    if kind is not PPO:
        defaults["lr"] = 1e-2
    agents = kind.population(size, runtime=make_runtime(), **{**defaults, **settings})
    return Population(agents, task, prompts_per_step=prompts_per_step, eval_max_new_tokens=2)


def grid(**settings: Any) -> EpisodeTask:
    return EpisodeTask(GridNavigation, {"size": 3}, **{"exam_episodes": 12, "test_episodes": 6, **settings})


def test_agents_play_the_same_episodes_in_their_own_way() -> None:
    population = make_population(grid(), 3)
    rollout = population.rollout()
    rows = rollout.trajectories
    assert all(len(own) == 16 for own in rows.values())
    prompts = [[t.prompt_ids for t in own] for own in rows.values()]
    assert prompts[0] == prompts[1] == prompts[2]
    assert [t.token_ids for t in rows[0]] != [t.token_ids for t in rows[1]]
    for trajectory in rows[0]:
        assert len(trajectory.rewards) == 2
        assert {turn for turn in trajectory.turn_ids if turn >= 0} == {0, 1}
    by_group = {t.group: t.row["seed"] for t in rows[0]}
    assert len(set(by_group.values())) == 4
    assert population.rollout().trajectories[0][0].row["seed"] not in by_group.values()
    assert all(a.tokens["generated"] for a in population.agents)


def test_together_they_play_what_each_plays_alone() -> None:
    together = make_population(grid(), 3).rollout().trajectories
    alone = make_population(grid(), 3)
    for agent in list(alone.agents):
        alone.agents = [agent]
        (own,) = alone.rollout().trajectories.values()
        assert [t.token_ids for t in own] == [t.token_ids for t in together[agent.index]]
        assert [t.logprobs for t in own] == [t.logprobs for t in together[agent.index]]


def test_sampled_log_probs_are_those_of_the_training_row() -> None:
    """The importance ratio starts at 1: contexts, masks and tokens of training are those of sampling."""
    population = make_population(EpisodeTask(lambda: Echo(length=3)), 1, max_output_tokens=5)
    agent = population.agents[0]
    rows = population.rollout().trajectories[0]
    batch = collate(rows, agent.pad_token_id)
    assert batch.sampling_logps is not None
    assert int(batch.turn_ids.max()) == 2
    difference = (agent.logprobs(batch).cpu() - batch.sampling_logps)[batch.action_mask].abs()
    assert float(difference.max()) < 1e-4
    spoken = sum(sum(t.action_mask) for t in rows)
    assert int(batch.action_mask.sum()) == spoken


def test_the_exam_is_one_for_all_and_repeats_itself() -> None:
    population = make_population(grid(), 2)
    first, second = population.evaluate(), population.evaluate()
    assert {k: f.mean for k, f in first.items()} == {k: f.mean for k, f in second.items()}
    assert first[0].n == 12
    assert population.evaluate_base("test").n == 6
    assert population.agents[0].fitness == [first[0].mean] * 2


def test_the_exam_is_the_mean_return_and_not_the_reward_of_a_turn() -> None:
    task = EpisodeTask(lambda: Echo(length=2), exam_episodes=5)
    expected = [2 * (task.episode_seed("exam", i) % 10) + 3 for i in range(5)]
    assert make_population(task, 1).evaluate()[0].mean == pytest.approx(sum(expected) / 5)


def test_splits_never_share_a_seed() -> None:
    task = grid()
    seeds = {split: {task.episode_seed(split, i) for i in range(6)} for split in ("train", "exam", "test")}  # type: ignore[arg-type]
    assert not (seeds["train"] & seeds["exam"]) | (seeds["exam"] & seeds["test"]) | (seeds["train"] & seeds["test"])
    assert all(0 <= seed < 2**31 for own in seeds.values() for seed in own)


class Moody(Echo):
    """Fails, or hangs, in the episodes of some seeds."""

    def __init__(self, mood: Callable[[], Any], share: int = 2) -> None:
        super().__init__(length=2)
        self.mood, self.share = mood, share

    def step(self, action: str) -> Any:
        if self.seed // 3 % self.share == 0:
            self.mood()
        return super().step(action)


def broken() -> None:
    raise RuntimeError("the board fell off the table")


def test_an_environment_that_raises_is_masked_out_and_does_not_stop_the_others() -> None:
    population = make_population(EpisodeTask(lambda: Moody(broken)), 1, prompts_per_step=8)
    population.max_error_rate = 0.9
    rollout = population.rollout()
    rows = rollout.trajectories[0]
    failed = [t for t in rows if t.outcome is not None and t.outcome.error is not None]
    assert 0 < len(failed) < len(rows)
    assert failed[0].outcome is not None
    assert failed[0].outcome.error == "RuntimeError: the board fell off the table"
    assert all(reward != reward for t in failed for reward in t.rewards)
    metrics = population.learn(rollout)[0]
    assert metrics["env/errors"] == len(failed)
    graded = [t.episode_return for t in rows if t not in failed]
    assert metrics["reward"] == pytest.approx(sum(graded) / len(graded))


def test_an_exam_leaves_out_what_failed_for_anybody_or_stops() -> None:
    task = EpisodeTask(lambda: Moody(broken, share=4), exam_episodes=40)
    fitness = make_population(task, 2).evaluate()
    broken_seeds = [i for i in range(40) if task.episode_seed("exam", i) // 3 % 4 == 0]
    assert 0 < len(broken_seeds) < 20
    assert fitness[0].n == fitness[1].n == 40 - len(broken_seeds)
    assert fitness[0].is_finite

    class MostlyBroken(Echo):
        def step(self, action: str) -> Any:
            if self.seed // 3 % 4:
                broken()
            return super().step(action)

    lost = sum(task.episode_seed("exam", i) // 3 % 4 > 0 for i in range(40))
    with pytest.raises(EnvError, match=f"{lost} of 40 exam episodes failed; .*RuntimeError: the board"):
        make_population(EpisodeTask(MostlyBroken, exam_episodes=40), 1).evaluate()


def test_an_environment_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    task = EpisodeTask(lambda: Moody(release.wait), step_timeout=0.3)
    population = make_population(task, 1, prompts_per_step=8)
    population.max_error_rate = 0.9
    start = time.monotonic()
    rows = population.rollout().trajectories[0]
    assert time.monotonic() - start < 30
    errors = {t.outcome.error for t in rows if t.outcome is not None}
    assert errors == {None, "TimeoutError: no answer within 0.3 seconds"}
    release.set()


def test_an_environment_that_always_fails_stops_with_its_reason() -> None:
    with pytest.raises(EnvError, match=r"all 16.*RuntimeError"):
        make_population(EpisodeTask(lambda: Moody(broken, share=1)), 1).rollout()


def test_an_environment_that_ignores_its_seed_is_refused() -> None:
    started = []

    class Fickle(Echo):
        def reset(self, **options: Any) -> Any:
            super().reset(**options)
            started.append(0)
            return f"start{len(started)}", {}

    with pytest.raises(EnvError, match="two different first observations"):
        make_population(EpisodeTask(Fickle), 1).rollout()


def test_rows_of_one_episode_share_its_advantage_and_count_once() -> None:
    task = EpisodeTask(lambda: Echo(length=4), enable_sliding_window=True)
    population = make_population(task, 1, max_model_len=40, max_output_tokens=6)
    agent = population.agents[0]
    rollout = population.rollout()
    rows = rollout.trajectories[0]
    batch = collate(rows, agent.pad_token_id)
    heads, places = batch.heads()
    assert len(heads) == 16 < len(batch)
    advantages = agent.credit(batch)  # type: ignore[attr-defined]
    for place in range(len(heads)):
        values = advantages[places == place][batch.action_mask[places == place]]
        assert values.unique().numel() == 1
    metrics = population.learn(rollout)[0]
    assert metrics["reward"] == pytest.approx(batch.rewards[heads].nansum(dim=1).mean().item())


@pytest.mark.parametrize("kind", [PPO, REINFORCE])
def test_credit_that_runs_from_token_to_token_refuses_episodes_in_pieces(kind: Any) -> None:
    task = EpisodeTask(lambda: Echo(length=4), enable_sliding_window=True)
    population = make_population(task, 1, kind, max_model_len=40, max_output_tokens=6)
    with pytest.raises(ConfigError, match="several rows each"):
        population.learn(population.rollout())


def digits_tokenizer() -> PreTrainedTokenizerFast:
    """Little more than the ten digits, so that an untrained model walks at all."""
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<end>", *"0123456789", "\n", "?"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")


LEARNERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO by trajectory": (GRPO, {"lr": 5e-3, "group_size": 16, "entropy_coef": 0.01}),
    "GRPO by turn": (
        GRPO,
        {"lr": 5e-3, "group_size": 16, "advantage_granularity": "turn", "importance_sampling_level": "turn"},
    ),
    "REINFORCE by turn": (REINFORCE, {"lr": 5e-3, "group_size": 16, "importance_sampling_level": "turn"}),
    "PPO": (PPO, {"lr_actor": 5e-3, "lr_critic": 1e-2, "group_size": 16, "entropy_coef": 0.02}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "GRPO by turn")) for name in LEARNERS]
)
def test_it_learns_to_walk(name: str) -> None:
    """Two steps on three cells, paid at the end; the best return is 1. Staying put, or one same step, gets a third."""
    kind, settings = LEARNERS[name]
    tokenizer = digits_tokenizer()
    runtime = Runtime.for_model(random_model(qwen2(vocab_size=16), scale=0.5), tokenizer=tokenizer, seed=1)
    fixed = {"batch_size": 64, "beta": 0.0, "max_output_tokens": 1, "seed": 1}
    agents = kind.population(1, runtime=runtime, **{**fixed, **settings})
    population = Population(agents, grid(exam_episodes=30), prompts_per_step=128 // settings["group_size"])
    before = population.evaluate()[0].mean
    for _ in range(50):
        population.learn(population.rollout())
        if population.evaluate()[0].mean >= 0.8:
            break
    assert before <= 0.5
    assert population.evaluate()[0].mean >= 0.8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_sliding_window": True, "strict_chat_template_boundary": False}, "use one of them"),
        ({"env_config": {"grid_size": 1}}, r"2 or more for grid_size, found 1"),
        ({"env_config": {"grid_sice": 1}}, "no argument 'grid_sice'; did you mean 'grid_size'"),
    ],
)
def test_bad_settings_are_sentences(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EpisodeTask(GridNavigationEnv, **{"env_config": {}, **settings})


def test_a_game_is_played_to_its_end() -> None:
    task = EpisodeTask(GuessTheNumber, {"max_number": 3})
    rows = make_population(task, 1).rollout().trajectories[0]
    assert all(t.outcome is not None and t.outcome.turns <= 2 for t in rows)
    assert {t.episode_return for t in rows} <= {0.0, 1.0}
