"""Environments with tools, ready to use and registered with gymnasium, and a bonus for the answer format."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from agilerl.checks.arguments import Count, Name, NotNegative, Positive, Seed, Within, checked
from agilerl.envs.adapters import as_text_env
from agilerl.envs.core import Row, Task, is_held_out
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.text_env import Begun, Options, StepResult, TextEnv
from agilerl.envs.tools.builtin import LocalSearch, PythonTool, calculator
from agilerl.envs.tools.env import ToolEnv
from agilerl.errors import ConfigError
from agilerl.rewards.grader import CLOSE, OPEN, extract_answer
from agilerl.streams import stream

ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "kr", "st", "tr", "th")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")
CODAS = ("", "", "l", "m", "n", "r", "s", "th", "nd")
GOODS = ("clocks", "salt", "lace", "violins", "cheese", "glass", "rope", "ink", "tiles", "honey", "paper", "bells")


class Town(NamedTuple):
    """The facts about a town."""

    name: str
    river: str
    founder: str
    year: int
    goods: str

    def passage(self) -> str:
        """Return the town's entry in the corpus."""
        return (
            f"{self.name} is a town on the river {self.river}. It was founded by {self.founder} in the year "
            f"{self.year} and is known for its {self.goods}."
        )

    def rows(self) -> list[Row]:
        """Return the questions about it; the last two do not contain its name."""
        answers = {
            f"Which river does {self.name} lie on?": self.river,
            f"Who founded {self.name}?": self.founder,
            f"In which year was {self.name} founded?": str(self.year),
            f"What is {self.name} known for?": self.goods,
            f"What is the town on the river {self.river} known for?": self.goods,
            f"In which year did {self.founder} found a town?": str(self.year),
        }
        return [{"question": question, "answer": answer} for question, answer in answers.items()]


@checked
def made_up_towns(count: Annotated[int, Within(least=1, most=5000)] = 200, seed: Seed = 42) -> list[Town]:
    """Return towns with distinct names, rivers and founders; a pure function of both arguments."""
    rng = stream(seed, "made-up towns")
    names = _names(rng, 3 * count)
    towns, rivers, founders = names[:count], names[count : 2 * count], names[2 * count :]
    years, goods = rng.integers(900, 1900, size=count), rng.integers(len(GOODS), size=count)
    return [
        Town(town, river, founder, int(year), GOODS[good])
        for town, river, founder, year, good in zip(towns, rivers, founders, years, goods)
    ]


def facts_task(towns: Sequence[Town], seed: int = 42) -> DatasetTask:
    """Return the questions as a task: those about a reserved fifth of the towns alternate between exam and test."""
    train = [row for town in towns if not is_held_out(town.name) for row in town.rows()]
    held_out = [row for town in towns if is_held_out(town.name) for row in town.rows()]
    if not train or not held_out:
        raise ConfigError(f"expected towns for training and for the exam, found {len(towns)} in all; use more")
    return DatasetTask(train, held_out[::2], held_out[1::2], reward_fn=same_fact, seed=seed)


def same_fact(completion: str, answer: str) -> float:
    """Return 1.0 if the extracted answer is the fact, ignoring case and a final full stop; else 0.0."""
    return float(extract_answer(completion).casefold().removesuffix(".") == answer.casefold())


def _names(rng: np.random.Generator, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        letters = [part[rng.integers(len(part))] for part in (ONSETS, VOWELS, CODAS) * 2]
        names["".join(letters).capitalize()] = None
    return list(names)


FORM = "Put the final answer, and nothing else, between <answer> and </answer>."


def _tool_env(task: Task, tool: Any, instruction: str, settings: dict[str, Any]) -> ToolEnv:
    return ToolEnv(task, [tool], **{"system_prompt": f"{instruction} {FORM}", **settings})


@checked
def calculator_env(task: Name = "chain_sum", params: Mapping[str, Any] | None = None, **settings: Any) -> ToolEnv:
    """Return arithmetic questions with a calculator: ``agilerl/Calculator-v0``.

    Args:
        task: a reasoning_gym dataset, such as chain_sum, products or basic_arithmetic.
        params: its parameters.
        settings: keywords of :class:`ToolEnv`.
    """
    instruction = "Solve the problem. The calculator is more reliable than you are."
    return _tool_env(ReasoningGymTask(task, params), calculator, instruction, settings)


@checked
def python_env(
    task: Name = "count_primes",
    params: Mapping[str, Any] | None = None,
    *,
    program_timeout: Positive = 5.0,
    **settings: Any,
) -> ToolEnv:
    """Return questions suited to a short program, with a sandboxed Python: ``agilerl/Python-v0``.

    Args:
        task: a reasoning_gym dataset, such as count_primes, prime_factorization or base_conversion.
        params: its parameters.
        program_timeout: seconds for one program.
        settings: keywords of :class:`ToolEnv`.
    """
    instruction = "Solve the problem; a short Python program helps."
    return _tool_env(ReasoningGymTask(task, params), PythonTool(timeout=program_timeout), instruction, settings)


@checked
def search_env(towns: Count = 200, *, seed: Seed = 42, topk: Count = 3, **settings: Any) -> ToolEnv:
    """Return questions about made-up towns, with a search over their corpus: ``agilerl/Search-v0``.

    Args:
        towns: size of the corpus.
        seed: decides the corpus and the order of the questions.
        topk: most passages of one search.
        settings: keywords of :class:`ToolEnv`.
    """
    known = made_up_towns(towns, seed)
    search = LocalSearch([town.passage() for town in known], topk=topk).search
    instruction = "Answer the question about a town; search for it, you cannot know it."
    return _tool_env(facts_task(known, seed), search, instruction, settings)


class FormatRewardWrapper(TextEnv):
    """Adds ``format_bonus`` to the last reward of an episode whose answer is in ``<answer>`` tags but wrong.

    A right answer (``info["success"]`` or ``info["correct"]``) gets no bonus, so the best return is unchanged.
    Truncated episodes get none.
    """

    @checked
    def __init__(self, env: Any, format_bonus: NotNegative = 0.1) -> None:
        """Wrap a TextEnv, or any environment that ``as_text_env`` turns into one."""
        self.env: TextEnv = as_text_env(env)
        self.format_bonus = format_bonus
        self._read()

    @property
    def unwrapped(self) -> TextEnv:
        """The wrapped environment."""
        return self.env.unwrapped  # type: ignore[return-value]

    def reset(self, *, seed: int | None = None, options: Options = None) -> Begun:
        """Begin an episode."""
        return self.env.reset(seed=seed, options=options)

    def bind(self, tokenizer: Any) -> None:
        """Bind the wrapped environment."""
        self.env.bind(tokenizer)
        self._read()

    def step(self, action: str) -> StepResult:
        """Take a step and add the bonus if it is due."""
        return self.step_ids(action, None)

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()

    def _read(self) -> None:
        """Copy the attributes of the wrapped environment; binding may change them."""
        self.max_turns, self.system_prompt, self.tools = self.env.max_turns, self.env.system_prompt, self.env.tools
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def step_ids(self, action: str, token_ids: Sequence[int] | None) -> StepResult:
        """Take a step and add the bonus if it is due."""
        result = self.env.step(action) if token_ids is None else self.env.step_ids(action, token_ids)
        observation, reward, terminated, truncated, info = result
        solved = info.get("success", info.get("correct", False))
        if terminated and not solved and 0 <= action.find(OPEN) < action.rfind(CLOSE):
            reward += self.format_bonus
        return observation, reward, terminated, truncated, info
