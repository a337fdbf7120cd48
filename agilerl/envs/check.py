"""Check an environment before training on it, and say in sentences what is wrong."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np

from agilerl.checks.arguments import shown
from agilerl.envs.adapters import as_text_env
from agilerl.envs.prompts import ChatFormat, as_messages
from agilerl.envs.text_env import RETURNED, TextEnv
from agilerl.errors import AgileRLError, EnvError
from agilerl.safety.custom_code import contained, left
from agilerl.streams import stream
from agilerl.text.padding import padded

ODD_TEXTS = (
    "",
    " \n\t",
    "a" * 20_000,
    "9" * 5_000,  # more digits than int() reads
    "-1",
    "٣ ３ ³",  # digits that str.isdigit() and int() disagree about
    "é漢字\U0001f642\u202e\x00",  # accents, wide characters, an emoji, right to left, a null
    "<answer></answer><answer>",  # an empty answer, and one that never ends
    "```python\n",
    '{"a": [',
    "[" * 5_000,  # deeper than parsers recurse
    "\\boxed{\\frac{1}{0}}",
    "%s {0} {{ x }} ${y}",  # placeholders of four template languages
    "<|im_end|><|endoftext|></s>",  # end tokens, typed as text
)
"""Texts that a model may generate, and that an environment must answer."""
SEEDS = 8
_NOT_STATE = ("numpy", "random", "_random", "torch", "gymnasium", "builtins", "re")
"""Modules whose objects (generators, spaces, functions) are not searched."""
SLOW = 0.5
"""Seconds for one step above which to warn."""
LONGEST = 200
"""Most steps of one episode to try."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or, as a warning, may be intended."""

    level: Literal["error", "warning"]
    code: str
    """A short, stable name, e.g. "not-pure"."""
    sentence: str
    """What was expected, what was found, what to do."""

    def __str__(self) -> str:
        return f"{self.level}: {self.sentence} [{self.code}]"


_error, _warning = partial(Finding, "error"), partial(Finding, "warning")


def check_env(env_or_factory: Any, tokenizer: Any = None) -> list[Finding]:
    """Play a few short episodes and return what is wrong, the most basic problems first.

    Checks the five-tuple and its types, that text is in the spaces, that an episode is a pure function of seed and
    actions and ends within ``max_turns``, odd actions, a step after the end, and slow steps; with a ``tokenizer`` also
    that its chat template can render the conversation. A hanging environment hangs the check.

    Args:
        env_or_factory: anything that ``as_text_env`` takes, or a class or function without arguments
            that returns one; then two instances are compared as well.
        tokenizer: of the model that will play.
    """
    # An instance may be callable as well; what has step() is one.
    is_factory = isinstance(env_or_factory, type) or (callable(env_or_factory) and not hasattr(env_or_factory, "step"))

    def instance() -> TextEnv:
        env = as_text_env(env_or_factory() if is_factory else env_or_factory)
        if tokenizer is not None:
            env.bind(tokenizer)
        return env

    try:
        with contained():
            env = instance()
    except Exception as error:
        return [_raised("not-an-environment", "the environment cannot be made", error)]
    findings: list[Finding] = []
    try:
        findings += _check_first_episode(env)
        if any(finding.level == "error" for finding in findings):
            return findings
        findings += _check_purity(env, instance if is_factory else None)
        if all(finding.code != "slow" for finding in findings):  # with a slow environment these would take hours
            findings += [*_check_seeds(env), *_check_odd_actions(env)]
        findings += _check_end(env)
        if tokenizer is not None:
            findings += _check_tokenizer(env, tokenizer)
    except BaseException as error:
        # sys.exit() in an environment is a finding as well; left() raises Ctrl-C again.
        findings.append(_raised("leaves-the-process", "the environment ended the process", left(error)))
    finally:
        try:
            with contained():
                env.close()
                env.close()
        except Exception as error:
            findings.append(_raised("close-raises", "close() must work, even when called twice, but failed", error))
    return findings


def _check_first_episode(env: TextEnv) -> Iterator[Finding]:
    """Look at the attributes, and at everything that one episode returns; later checks rely on their form."""
    turns, prompt = env.max_turns, env.system_prompt
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        yield _error("max-turns", f"expected max_turns to be a whole number of 1 or more, found {turns!r}")
        return
    if prompt is not None and not isinstance(prompt, str):
        yield _error("system-prompt", f"expected system_prompt to be text or None, found {_shape(prompt)}")
    for name in ("observation_space", "action_space"):
        if getattr(env, name, None) is None:
            yield _error("no-space", f"expected an {name}, such as gymnasium.spaces.Text(max_length, charset=...)")
            return
    times: list[float] = []
    for turn, action in enumerate([None, *_actions(env, 0)]):
        method, start = "reset" if action is None else "step", perf_counter()
        try:
            result: Any = env.reset(seed=0) if action is None else env.step(action)
        except Exception as error:
            call = "reset(seed=0) failed" if action is None else f"step({shown(action)}) failed in turn {turn}"
            yield _raised(f"{method}-raises", call, error)
            return
        times.append(perf_counter() - start)
        problems = list(_check_result(env, method, result))
        yield from problems
        if problems:
            return
        if action is not None and (result[2] or result[3]):
            break
    else:
        if turns <= LONGEST:
            never = f"expected the episode to end after at most max_turns = {turns} actions"
            yield _error("never-ends", f"{never}, but terminated and truncated are still False")
    # Without the reset, and the median: what is loaded once may take its time.
    if (seconds := median(times[1:])) > SLOW:
        advice = "training takes thousands: load what is slow once, not in each step"
        yield _warning("slow", f"a step takes {seconds:.1f} s; {advice}")


def _check_result(env: TextEnv, method: str, result: Any) -> Iterator[Finding]:
    """Yield what is wrong with what ``reset`` or ``step`` returned."""
    names = RETURNED[method]
    if not isinstance(result, tuple) or len(result) != len(names):
        yield _error(f"{method}-shape", f"expected {method} to return ({', '.join(names)}), found {_shape(result)}")
        return
    values = dict(zip(names, result))
    observation, reward, info = values["observation"], values.get("reward", 0.0), values["info"]
    try:
        as_messages(observation)
        if observation not in env.observation_space:
            yield _error(
                "outside-space",
                f"expected the observation of {method} to be in {env.observation_space!r:.80}, found "
                f"{shown(observation)}; give the space a larger max_length or charset",
            )
    except AgileRLError:
        yield _error(
            "observation",
            f"expected the observation of {method} to be text, or a list of messages with role and content, found "
            f"{_shape(observation)}",
        )
    if isinstance(reward, bool) or not isinstance(reward, int | float | np.number) or not math.isfinite(reward):
        yield _error("reward", f"expected the reward of step to be a finite float, found {reward!r}")
    for name in ("terminated", "truncated"):
        if not isinstance(flag := values.get(name, False), bool | np.bool_):
            yield _error("flag", f"expected {name} to be True or False, found {flag!r}; wrap it in bool()")
    if not isinstance(info, Mapping):
        yield _error("info", f"expected the info of {method} to be a dict, found {_shape(info)}")


def _check_purity(env: TextEnv, instance: Callable[[], TextEnv] | None) -> Iterator[Finding]:
    for seed in range(2):
        first = _play(env, seed)
        _play(env, seed + 1)  # state left behind by this episode would show in the next
        others = {"played again": _play(env, seed)}
        if instance is not None:
            other = instance()
            others["played in a new instance"] = _play(other, seed)
            with suppress(Exception):  # check_env reports it
                other.close()
        for when, second in others.items():
            pairs = enumerate(zip_longest(first, second, fillvalue="nothing"))
            if differing := next(((turn, *pair) for turn, pair in pairs if pair[0] != pair[1]), None):
                turn, before, after = differing
                yield _error(
                    "not-pure",
                    "expected an episode to be a function of seed and actions alone, but the one of seed "
                    f"{seed} differs when it is {when}: turn {turn} gave {shown(before)}, then {shown(after)}; "
                    "draw from a generator seeded in reset, and initialise all state there",
                )
                return


def _check_seeds(env: TextEnv) -> Iterator[Finding]:
    with suppress(ValueError, RecursionError):  # of state that refers to itself
        if len({_state(env, seed) for seed in range(SEEDS)}) > 1:  # e.g. a secret that no random action finds
            return
    # Several streams of actions: an environment may refuse all actions of one with the same text.
    if all(len({tuple(_play(env, seed, actions)) for seed in range(SEEDS)}) == 1 for actions in range(4)):
        yield _warning(
            "same-episodes",
            f"seeds 0 to {SEEDS - 1} gave the same episode for the same random actions; training on a single episode "
            "is rarely intended: draw from the seed passed to reset",
        )


def _state(env: TextEnv, seed: int) -> str:
    """Return what an environment remembers after ``reset``, as JSON without generators, spaces and the seed itself."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | set | frozenset):
            return str(value) if isinstance(value, np.ndarray) else sorted(value, key=str)
        searched = type(value).__module__.partition(".")[0] not in _NOT_STATE
        return getattr(value, "__dict__", None) if searched else None

    seed += 10**9  # a number that nothing else is likely to be
    env.reset(seed=seed)
    # What an adapter remembers, and what its environment does.
    text = json.dumps({**vars(env.unwrapped), **vars(env)}, default=plain, skipkeys=True)
    return text.replace(str(seed), "seed")


def _check_odd_actions(env: TextEnv) -> Iterator[Finding]:
    for action in ODD_TEXTS:
        env.reset(seed=0)
        try:
            result = env.step(action)
        except Exception as error:
            advice = "a model may say anything, so handle it by a rule (a penalty, a lost turn)"
            yield _raised("odd-action", f"step({shown(action)}) failed", error, advice)
            continue
        yield from list(_check_result(env, "step", result))[:1]


def _check_end(env: TextEnv) -> Iterator[Finding]:
    if not _play(env, 0)[-1].endswith("over True"):
        return  # it has no step after the end
    try:
        env.step(_actions(env, 1)[0])
    except Exception:
        return
    yield _warning(
        "step-after-end",
        "a step after the end of the episode was accepted as if nothing had happened; raise an error there, so that a "
        "caller's mistake is noticed",
    )


def _check_tokenizer(env: TextEnv, tokenizer: Any) -> Iterator[Finding]:
    observation, _ = env.reset(seed=0)
    system = [] if env.system_prompt is None else [{"role": "system", "content": env.system_prompt}]
    try:
        chat = ChatFormat(padded(tokenizer), tools=env.tools, system=env.system_prompt is not None)
        ids = chat.prompt([*system, *as_messages(observation)])
    except AgileRLError as error:
        yield _error("template", f"the tokenizer cannot render the conversation: {error}")
        return
    if chat.rewrites_history and env.max_turns > 1:
        yield _warning(
            "template-rewrites",
            "the tokenizer's chat template changes earlier turns when later ones follow; training needs "
            "strict_chat_template_boundary=False or apply_chat_template=False",
        )
    if getattr(tokenizer, "unk_token_id", None) in ids:
        yield _warning(
            "unknown-characters",
            f"the tokenizer maps some characters of the first observation to {tokenizer.unk_token!r}: "
            f"{shown(observation)}",
        )


def _play(env: TextEnv, seed: int, actions_of: int | None = None) -> list[str]:
    """Return what an episode looks like from outside, with the actions drawn for ``actions_of`` (default: the seed)."""
    events = []
    try:
        events.append(repr(env.reset(seed=seed)[0]))
        for action in _actions(env, seed if actions_of is None else actions_of):
            observation, reward, terminated, truncated, _ = env.step(action)
            over = bool(terminated) or bool(truncated)
            events.append(f"{observation!r}, reward {float(reward):g}, over {over}")
            if over:
                break
    except Exception as error:
        events.append(f"{type(error).__name__}: {error}")
    return events


def _actions(env: TextEnv, number: int) -> Sequence[str]:
    """Return random actions: samples of the action space, which is reseeded first."""
    env.action_space.seed(int(stream(number, "check_env").integers(2**31)))
    return [str(env.action_space.sample()) for _ in range(min(env.max_turns, LONGEST))]


def _raised(code: str, what: str, error: Exception, advice: str = "") -> Finding:
    name = "" if isinstance(error, EnvError) else f"{type(error).__name__}: "
    return _error(code, f"{what}: {name}{error}{advice and '; '}{advice}")


def _shape(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{size}: {shown(value)}"
