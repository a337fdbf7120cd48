"""What programs and data written for AgileRL bring along, taken as it comes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from agilerl import PPO, HyperparameterConfig, RLParameter, Runtime, TournamentSelection
from agilerl.envs import read_dataset
from agilerl.envs.adapters import as_text_env
from agilerl.envs.adapters.base import _warn_of_no_seed
from agilerl.errors import ConfigError, EnvError
from agilerl.llm_envs import PreferenceGym, ReasoningGym, SyncMultiTurnVecEnv, TokenObservationWrapper
from tests.hpo.plain_agents import PlainAgent

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.from_pretrained("embedded")


# -- environments -----------------------------------------------------------------------------------------------------


class Dice:
    """A plain environment without seeds, which draws from Python's and numpy's global generators."""

    max_turns = 2

    def reset(self) -> tuple[str, dict[str, Any]]:
        self.number = random.randrange(10**6)
        return str(self.number), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return str(np.random.randint(10**6)), 1.0, False, False, {}  # noqa: NPY002


def played(seed: int) -> list[str]:
    env = as_text_env(Dice())
    return [env.reset(seed=seed)[0], env.step("a")[0], env.step("b")[0]]


def test_an_environment_without_seeds_is_seeded_from_outside_and_that_is_said_once() -> None:
    _warn_of_no_seed.cache_clear()
    with pytest.warns(UserWarning, match="takes no seed"):
        first = played(3)
    before = random.getstate()
    assert played(3) == first != played(4)
    assert random.getstate() == before


def test_plain_environments_are_wrapped_if_there_is_a_tokenizer(runtime: Runtime) -> None:
    env = SyncMultiTurnVecEnv(Dice, 1, 2, tokenizer=runtime.tokenizer)
    first, second = env.reset(seed=0)
    assert first["text"] == second["text"]
    assert [wrapped.max_turns for wrapped in env.envs] == [2, 2]
    with pytest.raises(ConfigError, match="for tokenizer, found None"):
        SyncMultiTurnVecEnv(Dice, 1, 2)


# -- data -------------------------------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Letters:
    """What AgileRL's environments call of a tokenizer, and nothing else."""

    pad_token_id, eos_token_id, pad_token, eos_token = 0, 1, "<pad>", "<end>"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(character) % 60 for character in text]}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids if int(i) > 1 or not skip_special_tokens)


class Conversing(Letters):
    """One that writes conversations without a template."""

    def apply_chat_template(self, messages: Any, tokenize: bool = True, add_generation_prompt: bool = False) -> Any:
        text = "".join(f"{m['role']}:{m['content']};" for m in messages) + "assistant:" * add_generation_prompt
        return self(text)["input_ids"] if tokenize else text


@pytest.mark.filterwarnings("ignore:Dice.reset")
@pytest.mark.parametrize(("tokenizer", "shown"), [(Letters(), "ab"), (Conversing(), "user:ab;assistant:")])
def test_a_tokenizer_is_what_has_its_methods(tokenizer: Any, shown: str) -> None:
    rows, template = [{"question": "ab", "answer": "b"}] * 2, [{"role": "user", "content": "{question}"}]
    gym = ReasoningGym(rows, rows, tokenizer, lambda completion: float(len(completion)), template)
    ids = tokenizer(shown)["input_ids"]
    assert gym.reset()[0]["input_ids"][0].tolist() == ids
    _, rewards = gym.step([torch.tensor([[*ids, 5, 6, 1, 0], [*ids, 7, 0, 8, 1]])] * 8)
    assert rewards[0].tolist() == [2.0, 2.0]  # a pad token within a completion is left out of its text
    # In several turns a template has to end answers as sampling does, and neither of these does.
    wrapped = TokenObservationWrapper(as_text_env(Dice()), tokenizer, 1)
    assert wrapped.reset(seed=0)[0]["input_ids"].shape[1] > 0
    pairs = [{"prompt": "ab", "chosen": "c", "rejected": "d"}] * 2
    assert PreferenceGym(pairs, pairs, tokenizer).reset().action_mask.any()


def test_a_torch_dataset_is_a_dataset() -> None:
    rows = read_dataset(Items([{"question": "a", "answer": "b"}, {"question": "c", "answer": "d", "more": 1}]))
    assert (len(rows), rows[1]["answer"], rows.columns) == (2, "d", ["question", "answer", "more"])
    with pytest.raises(EnvError, match="row 0 of the dataset: expected an object"):
        read_dataset(Items([["a", "b"]]))
    with pytest.raises(EnvError, match="at least one"):
        read_dataset(Items([]))


@pytest.mark.parametrize(
    "numbers", [[3, 5, 7], np.array([3, 5, 7]), torch.tensor([3, 5, 7])], ids=lambda v: type(v).__name__
)
def test_a_question_of_numbers_is_shown_and_graded_as_it_is(runtime: Runtime, numbers: Any) -> None:
    seen: list[Any] = []

    def reward(completion: str, answer: int, question: Any) -> float:
        seen.append((answer, question))
        return 0.0

    rows = [{"question": numbers, "answer": 15}]
    template = [{"role": "user", "content": "Make {answer} of {question}."}]
    gym = ReasoningGym(Items(rows), Items(rows), runtime.tokenizer, reward, template, data_batch_size_per_gpu=1)
    (prompt,) = gym.reset()
    assert "Make 15 of [3, 5, 7]." in prompt["text"]
    gym.step([torch.cat([prompt["input_ids"], torch.full((1, 2), 7)], dim=1)])
    assert [answer for answer, _ in seen] == [15]
    assert list(seen[0][1]) == [3, 5, 7]
    assert type(seen[0][1]) is type(numbers)


def test_columns_are_read_in_both_directions(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("nums,target\na,b\n")
    for columns in ({"question": "nums", "answer": "target"}, {"nums": "question", "target": "answer"}):
        assert read_dataset(tmp_path / "rows.csv", columns=columns)[0] == {"question": "a", "answer": "b"}
    with pytest.raises(EnvError, match="rename"):
        read_dataset(tmp_path / "rows.csv", columns={"target": "nums"})
    with pytest.raises(EnvError, match="no column 'problem'"):
        read_dataset(tmp_path / "rows.csv", columns={"question": "problem"})


# -- arguments --------------------------------------------------------------------------------------------------------


def test_ppos_learning_rate_is_both_of_them(runtime: Runtime) -> None:
    genes = HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-2))
    agent = PPO(runtime=runtime, lr=1e-3, hp_config=genes)
    assert (agent.lr_actor, agent.lr_critic) == (1e-3, 1e-3)
    assert list(agent.genes) == ["lr_actor", "lr_critic"]
    assert PPO(runtime=runtime, lr=1e-3, lr_critic=2e-3).hyperparameters == {}
    assert PPO(runtime=runtime, lr=1e-3, lr_critic=2e-3).lr_critic == 2e-3
    assert agent.clone(1).genes == agent.genes


def test_a_tournament_of_five_arguments_compares_the_mean_of_its_exams() -> None:
    pop = [PlainAgent(0, [1.0, 0.5]), PlainAgent(1, [0.0, 0.6])]
    assert TournamentSelection(2, True, 2, 1, True).select(pop)[0].index == 1
    assert TournamentSelection(2, True, 2, 2, False).select(pop)[0].index == 0


def test_a_population_of_one_needs_no_smaller_tournament() -> None:
    pop = [PlainAgent(0, [1.0])]
    assert TournamentSelection(2, True, 1).select(pop)[1] == pop
