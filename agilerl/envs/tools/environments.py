"""Ready-to-use environments with tools, registered with gymnasium."""

from collections.abc import Mapping
from typing import Any

from agilerl.arguments import Count, Name, Positive, Seed, checked
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.tools.calculator import calculator
from agilerl.envs.tools.corpus import LocalSearch
from agilerl.envs.tools.env import ToolEnv
from agilerl.envs.tools.facts import facts_task, made_up_towns
from agilerl.envs.tools.python import PythonTool

FORM = "Put the final answer, and nothing else, between <answer> and </answer>."


@checked
def calculator_env(task: Name = "chain_sum", params: Mapping[str, Any] | None = None, **settings: Any) -> ToolEnv:
    """Return arithmetic questions with a calculator: ``agilerl/Calculator-v0``.

    Args:
        task: a reasoning_gym dataset, such as chain_sum, products or basic_arithmetic.
        params: its parameters.
        settings: keywords of :class:`ToolEnv`.
    """
    told = {"system_prompt": f"Solve the problem. The calculator is more reliable than you are. {FORM}"}
    return ToolEnv(ReasoningGymTask(task, params), [calculator], **{**told, **settings})


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
    told = {"system_prompt": f"Solve the problem; a short Python program helps. {FORM}"}
    return ToolEnv(ReasoningGymTask(task, params), [PythonTool(timeout=program_timeout)], **{**told, **settings})


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
    told = {"system_prompt": f"Answer the question about a town; search for it, you cannot know it. {FORM}"}
    search = LocalSearch([town.passage() for town in known], topk=topk).search
    return ToolEnv(facts_task(known, seed), [search], **{**told, **settings})
