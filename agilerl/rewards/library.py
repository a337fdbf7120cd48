"""Graders that many runs need: correct answers, format, length, repetition.

Each is an object that is called like a function; ``LIBRARY`` maps the names that manifests use to them. Scores are in
[0, 1] unless stated otherwise. Lengths are in tokens and use the column ``completion_ids``, which rollouts provide: the
generated ids, the end token included.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import regex
from pydantic import Field

from agilerl.checks.arguments import Count, Positive, check_fields, checked
from agilerl.errors import ConfigError, RewardTimeoutError, how_to_install
from agilerl.rewards.grader import Grader, Reads, exact_match, extract_answer
from agilerl.rewards.isolated import IsolatedGrader
from agilerl.rewards.judge import JudgeGrader, PairwiseJudgeGrader
from agilerl.rewards.reward_model import RewardModelGrader
from agilerl.rewards.sandbox import SandboxGrader
from agilerl.safety.bounds import compiled_pattern


class Accuracy(IsolatedGrader):
    """1.0 if the answer equals the column ``answer`` as mathematics (``1/2``, ``0.5``, ``\\frac12``), else 0.0.

    A number has to be written, not left to compute (``67 + 89``); ``math_accuracy`` has the rule. None if ``answer`` is
    not mathematics. It runs in a separate process, because a text as short as ``44**19**35`` keeps an algebra system
    busy forever: a timeout gives no score and counts as a failure. A text might also trick an algebra system into
    running it as code, so this process has no privileges and no files.
    """

    # Its answers depend on nothing but the question, so that completions need not wait for their turn.
    remembers = False

    @checked
    def __init__(self, *, timeout: Positive = 5.0, workers: Count = 1) -> None:
        """Set the seconds for one completion and the number of processes; raises ConfigError without math-verify."""
        if find_spec("math_verify") is None:
            raise ConfigError(f"accuracy needs math-verify, which is not installed; run: {how_to_install('math')}")
        function = "agilerl.rewards.mathematics:math_accuracy"
        super().__init__(function, timeout=timeout, workers=workers, name="accuracy", confined=True)


@dataclass(frozen=True)
class _Rule:
    """A grader that is a rule about a text or its tokens, with the settings that are its fields."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class FormatTags(_Rule):
    """1.0 if the completion consists of the given tags in this order, each opened and closed once; else 0.0.

    Only whitespace is allowed outside the tags. With ``partial`` the score is the share of the 2 * T tags that occur
    exactly once, in any order.
    """

    tags: Sequence[str] = ("think", "answer")
    partial: bool = False
    name: ClassVar[str] = "format_tags"
    reads: ClassVar[Reads] = "message"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tags or not all(self.tags):
            raise ConfigError(f"format_tags: expected a list of one or more tag names, found {self.tags!r}")

    def __call__(self, completion: str) -> float:
        """Return the score of a completion's format."""
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        once = [completion.count(mark) == 1 for mark in marks]
        if self.partial:
            return sum(once) / len(once)
        if not all(once):
            return 0.0
        # Each mark is there once, so the pattern can match in one way only; inside a pair anything is allowed.
        pairs = r"\s*".join(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in self.tags)
        return float(re.fullmatch(rf"\s*{pairs}\s*", completion, re.DOTALL) is not None)


@dataclass(frozen=True)
class TokenLength(_Rule):
    """-|tokens - target| / target, at least -1: 0 for exactly ``target`` tokens. Range [-1, 0]."""

    target: Count
    name: ClassVar[str] = "length"

    def __call__(self, completion_ids: Sequence[int]) -> float:
        """Return minus the relative distance from the target."""
        return -min(1.0, abs(len(completion_ids) - self.target) / self.target)


@dataclass(frozen=True)
class Overlong(_Rule):
    """Soft penalty for long completions, in [-1, 0]; eq. 13 of DAPO (https://arxiv.org/abs/2503.14476).

    0 up to ``max_tokens - cache_tokens``; from there it falls linearly to -1 at ``max_tokens``, and stays there.
    """

    max_tokens: int
    cache_tokens: int
    name: ClassVar[str] = "overlong"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.cache_tokens <= self.max_tokens:
            raise ConfigError(
                f"overlong: expected cache_tokens from 1 to max_tokens, found {self.cache_tokens} and {self.max_tokens}"
            )

    def __call__(self, completion_ids: Sequence[int]) -> float:
        """Return the penalty for a completion of these tokens."""
        over = len(completion_ids) - (self.max_tokens - self.cache_tokens)
        return -min(1.0, max(0, over) / self.cache_tokens)


@dataclass(frozen=True)
class Repetition(_Rule):
    """Minus the share of word n-grams that are repetitions, in [-1, 0]: 0 if none is repeated.

    Words are separated by whitespace and compared in lower case; fewer than ``n`` of them give 0. Source:
    https://arxiv.org/abs/2502.03373.
    """

    n: Count = 3
    name: ClassVar[str] = "repetition"
    reads: ClassVar[Reads] = "completion"

    def __call__(self, completion: str) -> float:
        """Return minus the share of repeated n-grams."""
        words = completion.lower().split()
        grams = list(zip(*(words[start:] for start in range(self.n))))
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


@dataclass(frozen=True)
class Regex(_Rule):
    """1.0 if ``pattern`` is found in the completion, else 0.0; with ``full`` it must match all of it.

    The syntax is that of the package regex, a superset of Python's. A search that takes more than ``timeout`` seconds
    (backtracking) is abandoned: there is no score, and it counts as a failure.
    """

    pattern: str
    full: bool = False
    timeout: Annotated[float, Field(gt=0, le=60)] = 1.0
    name: ClassVar[str] = "regex"

    def __post_init__(self) -> None:
        super().__post_init__()
        compiled_pattern(self.pattern, "regex")

    def __call__(self, completion: str) -> float:
        """Return whether the pattern is found; raises RewardTimeoutError if that takes too long."""
        search = regex.fullmatch if self.full else regex.search
        try:
            # By its text: regex remembers what it has compiled.
            return float(search(self.pattern, completion, timeout=self.timeout) is not None)
        except TimeoutError as error:
            raise RewardTimeoutError(f"{self.pattern!r} took more than {self.timeout:g} s") from error


@dataclass(frozen=True)
class JsonValid(_Rule):
    """1.0 if the answer is JSON (and, with ``required``, an object with these keys), else 0.0.

    The answer is the text between answer tags, else the whole completion. ``NaN`` and ``Infinity`` are not JSON.
    """

    required: Sequence[str] = ()
    name: ClassVar[str] = "json_valid"
    reads: ClassVar[Reads] = "answer"

    def __call__(self, completion: str) -> float:
        """Return whether the answer is JSON."""
        try:
            value = json.loads(extract_answer(completion), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return 0.0
        return float(not self.required or (isinstance(value, dict) and set(self.required) <= set(value)))


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


LIBRARY: Mapping[str, Callable[..., Grader]] = {
    "accuracy": Accuracy,
    "exact_match": lambda: exact_match,  # a constructor, as the others are
    "format_tags": FormatTags,
    "json_valid": JsonValid,
    "judge": JudgeGrader,
    "length": TokenLength,
    "overlong": Overlong,
    "pairwise_judge": PairwiseJudgeGrader,
    "regex": Regex,
    "repetition": Repetition,
    "reward_model": RewardModelGrader,
    "sandbox": SandboxGrader,
}
"""The constructors of the package's graders by the name that manifests use."""


@checked
def library_grader(name: str, params: Mapping[str, Any] | None = None) -> Grader:
    """Return the package's grader ``name``, created with ``params``; raises ConfigError if there is no such grader."""
    if name not in LIBRARY:
        raise ConfigError(f"expected one of the graders {', '.join(LIBRARY)}, found {name!r}")
    try:
        return LIBRARY[name](**(params or {}))
    except TypeError as error:
        raise ConfigError(f"the grader {name} does not take the parameters {list(params or {})}: {error}") from error
