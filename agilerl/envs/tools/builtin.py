"""Tools ready to use (a calculator, Python in a sandbox, a search in documents), and environments with them."""

import ast
import math
import operator
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import gymnasium
import httpx2
import numpy as np
from pydantic import Field

from agilerl.checks.arguments import Count, Name, NotNegative, Positive, Seed, Within, checked, nearest, shown
from agilerl.envs.adapters import as_text_env
from agilerl.envs.core import Row, Task, is_held_out
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.sources import read_file
from agilerl.envs.text_env import StepResult, TextEnv
from agilerl.envs.tools.env import ToolEnv
from agilerl.envs.tools.tool import Tool
from agilerl.errors import ConfigError, EnvError, how_to_install
from agilerl.rewards.grader import CLOSE, OPEN, extract_answer
from agilerl.rewards.sandbox import run_python
from agilerl.safety.servers import Many, Reply, parsed, request
from agilerl.streams import stream

MOST_CHARACTERS = 500
MOST_BITS = 4096
"""Most bits of a whole number: about 1,200 digits."""
LARGEST_FACTORIAL = 400

Number = int | float

# Numbers, names, operators, brackets. Anything else, including what Python's parser warns about, is refused here.
_SPELLING = re.compile(r"(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?(?![\w.])|[a-z]\w*|\*\*|//|[-+*/%(),]|\s)*")
# As typed in prose; Python reads ^ as exclusive or.
_TYPED = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})


def calculator(expression: str) -> str:
    """Work out an arithmetic expression and return the number.

    Args:
        expression: for example "(17 + 4) * 3 / 2 ** 5". It may have + - * / // % ** and brackets, the functions abs,
            ceil, cos, exp, factorial, floor, gcd, log, max, min, round, sin, sqrt and tan, and pi and e.
    """
    text = expression.strip().lower().translate(_TYPED)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(text)} characters, at most {MOST_CHARACTERS} are read")
    spelled = _SPELLING.match(text)
    if spelled is None or spelled.end() < len(text):
        raise ValueError(f"expected arithmetic, found {text[spelled.end() if spelled else 0 :][:20]!r}")
    try:
        return _shown(_value(ast.parse(text, mode="eval").body))
    except ZeroDivisionError:
        raise ArithmeticError("division by zero") from None
    except OverflowError:
        raise ArithmeticError("the result is too large") from None
    except (SyntaxError, RecursionError, MemoryError):  # also of brackets that are nested too deeply
        raise ValueError(f"expected arithmetic, found {text[:80]!r}") from None


def _value(node: ast.expr) -> Number:
    """Evaluate one node; refuse anything but arithmetic on numbers."""
    match node:
        # Not isinstance, which takes True for an int.
        case ast.Constant(value) if type(value) in (int, float):
            return _within(value)
        case ast.Name(name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(operation, operand) if type(operation) in OPERATIONS:
            return _within(OPERATIONS[type(operation)](_value(operand)))
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return _within(OPERATIONS[type(operation)](_value(left), _value(right)))
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            values = [_value(argument) for argument in arguments]
            try:
                return _within(FUNCTIONS[name](*values))
            except TypeError:
                raise ValueError(f"{name} does not take {', '.join(map(_shown, values)) or 'nothing'}") from None
        case ast.Name(name) | ast.Call(ast.Name(name)):
            raise ValueError(f"unknown name {name!r}; known: {', '.join([*sorted(FUNCTIONS), *CONSTANTS])}")
    raise ValueError(f"expected arithmetic, found {ast.unparse(node)[:80]!r}")


def _within(value: Any) -> Number:
    if isinstance(value, complex):  # of (-8) ** 0.5
        raise ArithmeticError("the result is no real number")
    if value.bit_length() > MOST_BITS if isinstance(value, int) else not math.isfinite(value):
        raise OverflowError
    return value  # type: ignore[no-any-return]


def _power(base: Number, exponent: Number) -> Number:
    """Refuse a huge power before it is computed: 9**9**9 has 370 million digits."""
    # abs(base) is at least 2 ** (bits - 1), so the result has at least this many bits.
    if isinstance(base, int) and isinstance(exponent, int) and exponent * (abs(base).bit_length() - 1) > MOST_BITS:
        raise OverflowError
    return base**exponent


def _factorial(number: Number) -> int:
    if not isinstance(number, int) or not 0 <= number <= LARGEST_FACTORIAL:
        raise ValueError(f"factorial takes a whole number from 0 to {LARGEST_FACTORIAL}, found {_shown(number)}")
    return math.factorial(number)


def _round(number: Number, digits: Number = 0) -> Number:
    # round(1, -10**9) computes 10 ** 10**9.
    if not isinstance(digits, int) or abs(digits) > 30:
        raise ValueError(f"round takes a whole number of digits up to 30, found {_shown(digits)}")
    return round(number, digits)


def _shown(value: Number) -> str:
    """Whole numbers exactly, others to 12 significant digits."""
    # Far below 2**53, up to which a float holds every whole number.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e}
OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_OF_MATH = ("ceil", "cos", "exp", "floor", "gcd", "log", "sin", "sqrt", "tan")
FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in _OF_MATH}
FUNCTIONS |= {"abs": abs, "factorial": _factorial, "max": max, "min": min, "round": _round}


STARTING = 5.0
"""Seconds beyond the program's own timeout, for starting and cleaning up."""


class PythonTool(Tool):
    """The tool ``python(code)``: runs a program and returns what it printed, errors included.

    Nothing is kept from one call to the next. See :func:`agilerl.rewards.sandbox.run_python` for what a program can
    and cannot do.
    """

    @checked
    def __init__(self, *, name: Name = "python", timeout: Positive = 5.0, memory_bytes: Count = 512 * 2**20) -> None:
        """Set the tool's name for the model, the seconds of wall time of a program, and its address space."""
        self.program_timeout, self.memory_bytes = timeout, memory_bytes
        super().__init__(self.run, name=name, timeout=timeout + STARTING)

    def run(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between programs.

        Args:
            code: the program; print what you want to know.
        """
        done = run_python(code, timeout=self.program_timeout, memory_bytes=self.memory_bytes)
        parts = [done.stdout.rstrip(), done.stderr.rstrip()]
        if done.timed_out:
            parts.append(f"(stopped after {self.program_timeout:g} seconds)")
        elif not done.ok and not parts[1]:
            parts.append(f"(ended with status {done.returncode})")
        return "\n".join(filter(None, parts)) or "(nothing was printed)"


URL_VARIABLE = "SEARCH_URL"
QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
RECONNECTS = 2
OPENING = threading.Lock()
"""Two threads that search for the first time share one client; each with its own would have num_workers connections."""


class _Result(Reply):
    content: str | None = None


class _Results(Reply):
    results: Annotated[Many[_Result], Field(max_length=10_000)]


class SearchTool:
    """A search engine that answers ``GET search_url?q=...&format=json`` with ``{"results": [{"content": ...}]}``.

    This is the interface of SearXNG and of GEM's search server. Pass ``SearchTool(...).search`` to a ToolEnv; or use
    ``execute_action``, which reads ``<search>query</search>`` from a text and answers with
    ``<information>...</information>``, for environments that handle tools by text.
    """

    @checked
    def __init__(
        self, num_workers: Count = 1, search_url: str | None = None, topk: Count = 3, timeout: Positive = 5.0
    ) -> None:
        """Set the address; nothing is requested yet.

        Args:
            num_workers: most requests at the same time, 1 or more.
            search_url: http or https; by default the environment variable SEARCH_URL, read at the first search.
            topk: most results of one search, 1 or more.
            timeout: seconds to connect, and between two chunks of a response.
        """
        self.num_workers, self.search_url, self.topk, self.timeout = num_workers, search_url, topk, timeout
        if search_url is not None:
            _checked_url(search_url)

    @checked
    def search(self, query: str) -> str:
        """Search and return the texts that fit best.

        Args:
            query: a few words.
        """
        url = self.search_url or _checked_url(os.environ.get(URL_VARIABLE) or "")
        try:
            full = httpx2.URL(url).copy_merge_params({"q": query, "format": "json"})
            with OPENING:
                client = self._client
            # A wait for data may take `timeout`, the whole answer four times that.
            answer = request(client, "GET", full, seconds=4 * self.timeout).raise_for_status()
            results = parsed(answer.content, _Results).results
        except httpx2.HTTPStatusError as error:
            raise EnvError(f"the search server answered with status {error.response.status_code}") from error
        except httpx2.HTTPError as error:
            raise EnvError(f"the search server did not answer: {type(error).__name__} {error}".rstrip()) from error
        except ValueError as error:
            expected = 'expected {"results": [{"content": ...}]} from the search server'
            raise EnvError(f"{expected}, found something else: {error}") from error
        return _numbered([result.content or "" for result in results[: self.topk]]) or "Nothing was found."

    @checked
    def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
        """Search for the text between the first ``<search>`` and ``</search>``.

        Returns:
            Whether there was a query; whether something went wrong (no query counts); the observation, empty without a
            query; and the text up to the end of the query.
        """
        query = QUERY.search(action)
        if query is None:
            return False, True, "", ""
        try:
            text, failed = self.search(query[1].strip()), False
        except EnvError as error:
            text, failed = f"[SearchTool Error: {error}]", True
        return True, failed, f"\n\n<information>{text}</information>\n\n", action[: query.end()]

    def instruction_string(self) -> str:
        """Return the instruction for the text protocol."""
        return (
            "A search engine is at hand. To look something up, write <search>your query</search>; what it finds comes "
            "back between <information> and </information>. Search as often as you need, think between searches if "
            "that helps, and finish with <answer>your answer</answer>."
        )

    def close(self) -> None:
        """Close the connections; the next search opens new ones."""
        # Where cached_property keeps it: to ask for self._client would open one.
        if "_client" in vars(self):
            vars(self).pop("_client").close()

    @cached_property
    def _client(self) -> httpx2.Client:
        client = httpx2.Client(
            # Waiting for one of num_workers connections is not a server failure.
            timeout=httpx2.Timeout(self.timeout, pool=None),
            # Only connections are tried again; a request is sent once.
            transport=httpx2.HTTPTransport(retries=RECONNECTS, limits=httpx2.Limits(max_connections=self.num_workers)),
            follow_redirects=True,
        )
        weakref.finalize(self, client.close)  # an environment does not close its tool functions
        return client


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"expected the address of a search server (http:// or https://) as search_url or in the environment "
            f"variable {URL_VARIABLE}, found {shown(url)}"
        )
    return url


WORD = re.compile(r"\w+")


class LocalSearch:
    """Finds the passages that match a query best; ``LocalSearch(...).search`` is the tool.

    By BM25 (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009). The same query gives the same
    passages in the same order; passages of equal score are in the corpus's order. Words are compared in lower case,
    otherwise unchanged. Needs bm25s: ``pip install 'lora-evolution[search]'``.
    """

    @checked
    def __init__(self, corpus: Sequence[Any] | str | Path, *, topk: Count = 3, column: str = "text") -> None:
        """Read and index the corpus.

        Args:
            corpus: passages, or a file of them: JSON lines, JSON, CSV or Parquet.
            topk: most passages of one result, 1 or more.
            column: the file's column of passages.

        Raises:
            ConfigError: bm25s is not installed, or a setting is out of range.
            EnvError: a file that cannot be read or has no such column, no passages, or passages that are not text.
        """
        self.topk = topk
        if isinstance(corpus, str | Path):
            table = read_file(Path(corpus))
            if column not in table.columns:
                raise EnvError(f"{Path(corpus).name} has no column {column!r}; {nearest(column, table.columns)}")
            corpus = [row.get(column) for row in table.rows]
        self.passages = list(corpus)
        for number, text in enumerate(self.passages):
            if not isinstance(text, str):
                raise EnvError(f"expected text as passage {number} of the corpus, found {shown(text)}")
        words = [WORD.findall(text.lower()) for text in self.passages]
        if not any(words):
            raise EnvError(f"expected a corpus with words in it, found {len(words)} passages without any")
        try:
            import bm25s  # optional
        except ImportError as error:
            raise ConfigError(f"search needs bm25s: {how_to_install('search')} ({error})") from error
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    def search(self, query: str) -> str:
        """Search a collection of texts and return the passages that fit best.

        Args:
            query: a few words that the passage is likely to have.
        """
        words = WORD.findall(query.lower())
        scores = self._index.get_scores(words) if words else np.zeros(len(self.passages))
        best = np.argsort(-scores, kind="stable")[: self.topk]
        fitting = [self.passages[number] for number in best if scores[number] > 0]
        return _numbered(fitting) or "No passage has any of these words."


def _numbered(texts: Sequence[str]) -> str:
    return "\n".join(f"{rank}. {text}" for rank, text in enumerate(texts, 1))


# -- environments, registered with gymnasium, and a bonus for the answer format ----------------------------------------


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
    # All names at once, so that no town, river and founder share one.
    names = _names(rng, 3 * count)
    towns, rivers, founders = names[:count], names[count : 2 * count], names[2 * count :]
    years, goods = rng.integers(900, 1900, size=count), rng.integers(len(GOODS), size=count)
    return [
        Town(town, river, founder, int(year), GOODS[good])
        for town, river, founder, year, good in zip(towns, rivers, founders, years, goods)
    ]


def facts_task(towns: Sequence[Town], seed: int = 42) -> DatasetTask:
    """Return the questions as a task: those about a reserved fifth of the towns alternate between exam and test."""
    # By town and not by question: other questions about a town give its facts away.
    train = [row for town in towns if not is_held_out(town.name) for row in town.rows()]
    held_out = [row for town in towns if is_held_out(town.name) for row in town.rows()]
    if not train or not held_out:
        raise ConfigError(f"expected towns for training and for the exam, found {len(towns)} in all; use more")
    return DatasetTask(train, held_out[::2], held_out[1::2], reward_fn=same_fact, seed=seed)


def same_fact(completion: str, answer: str) -> float:
    """Return 1.0 if the extracted answer is the fact, ignoring case and a final full stop; else 0.0."""
    return float(extract_answer(completion).casefold().removesuffix(".") == answer.casefold())


def _names(rng: np.random.Generator, count: int) -> list[str]:
    # A dict and not a set, because it keeps the order of the draws.
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


class FormatRewardWrapper(gymnasium.Wrapper[Any, Any, Any, Any], TextEnv):  # type: ignore[misc]
    """Adds ``format_bonus`` to the last reward of an episode whose answer is in ``<answer>`` tags but wrong.

    A right answer (``info["success"]`` or ``info["correct"]``) gets no bonus, so the best return is unchanged.
    Truncated episodes get none.
    """

    env: TextEnv

    @checked
    def __init__(self, env: Any, format_bonus: NotNegative = 0.1) -> None:
        """Wrap a TextEnv, or any environment that ``as_text_env`` turns into one."""
        super().__init__(as_text_env(env))
        self.format_bonus = format_bonus
        self._read()

    def bind(self, tokenizer: Any) -> None:
        """Bind the wrapped environment."""
        self.env.bind(tokenizer)
        self._read()

    def _read(self) -> None:
        """Copy the attributes of the wrapped environment; binding may change them."""
        self.max_turns, self.system_prompt, self.tools = self.env.max_turns, self.env.system_prompt, self.env.tools

    def step(self, action: str) -> StepResult:
        """Take a step and add the bonus if it is due."""
        return self._paid(action, self.env.step(action))

    def step_ids(self, action: str, token_ids: Sequence[int]) -> StepResult:
        """Take a step and add the bonus if it is due."""
        return self._paid(action, self.env.step_ids(action, token_ids))

    def _paid(self, action: str, result: StepResult) -> StepResult:
        observation, reward, terminated, truncated, info = result
        solved = info.get("success", info.get("correct", False))
        if terminated and not solved and 0 <= action.find(OPEN) < action.rfind(CLOSE):
            reward += self.format_bonus
        return observation, reward, terminated, truncated, info
