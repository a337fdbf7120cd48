"""Check an environment before training on it, and say in sentences what is wrong."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import numpy as np

from agilerl.custom_code import contained, left
from agilerl.envs.adapters import as_text_env
from agilerl.envs.prompts import ChatFormat, as_messages
from agilerl.envs.text_env import TextEnv
from agilerl.errors import AgileRLError, EnvError
from agilerl.padding import padded
from agilerl.streams import stream

ODD_ACTIONS = (
    "",
    " \n\t",
    "a" * 20_000,
    "9" * 5_000,
    "-1",
    "é漢字\U0001f642\u202e\x00",
    "٣ ３ ³",  # digits that str.isdigit() and int() disagree about
    "{'a': [",
    "\\boxed{} [] <answer></answer>",
    "<|im_end|><|endoftext|></s><eos>",
)
"""Texts that a model may generate, and that an environment must answer."""
SEEDS = 8
MOST_OBJECTS = 10_000
"""Most objects of an environment to search for state that depends on its seed."""
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


@dataclass
class _Played:
    """What an episode with given actions looked like from outside."""

    events: list[str] = field(default_factory=list)
    ended: bool = False


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
    found: list[Finding] = []
    try:
        with contained():
            factory = _factory(env_or_factory)
            env = factory()
            if tokenizer is not None:
                env.bind(tokenizer)
    except Exception as error:
        return [_error("not-an-environment", _told(error, "the environment cannot be made"))]
    try:
        for check in (_check_reset, _check_spaces, _check_steps):
            found += check(env)
            if any(finding.level == "error" for finding in found):
                return found
        found += _check_purity(env, factory, tokenizer)
        if all(finding.code != "slow" for finding in found):  # with a slow environment these would take hours
            found += [*_check_seeds(env), *_check_odd_actions(env)]
        found += _check_end(env)
        if tokenizer is not None:
            found += _check_tokenizer(env, tokenizer)
    except BaseException as error:
        found.append(_error("leaves-the-process", _told(left(error), "the environment ended the process")))
    finally:
        found += _check_close(env)
    return found


# -- one check each ---------------------------------------------------------------------------------------------------


def _check_reset(env: TextEnv) -> Iterator[Finding]:
    turns = env.max_turns
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        yield _error("max-turns", f"expected max_turns to be a whole number of 1 or more, found {turns!r}")
    try:
        begun = env.reset(seed=0)
    except Exception as error:
        yield _error("reset-raises", _told(error, "reset(seed=0) failed"))
        return
    if not isinstance(begun, tuple) or len(begun) != 2:
        yield _error("reset-shape", f"expected reset to return (observation, info), found {_shape(begun)}")
        return
    yield from _check_observation(begun[0], "reset")
    if not isinstance(begun[1], Mapping):
        yield _error("info", f"expected the info of reset to be a dict, found {_shape(begun[1])}")
    prompt = env.system_prompt
    if prompt is not None and not isinstance(prompt, str):
        yield _error("system-prompt", f"expected system_prompt to be text or None, found {_shape(prompt)}")


def _check_spaces(env: TextEnv) -> Iterator[Finding]:
    for name in ("observation_space", "action_space"):
        if getattr(env, name, None) is None:
            yield _error(
                "no-space", f"expected an {name}; gymnasium.spaces.Text(max_length, charset=...) describes text"
            )
            return
    observation, _ = env.reset(seed=0)
    yield from _check_contained(env, observation, "reset")


def _check_steps(env: TextEnv) -> Iterator[Finding]:
    """Play one episode and look at every tuple; later checks rely on their form."""
    env.reset(seed=0)
    seconds: list[float] = []
    for turn, action in enumerate(_actions(env, 0)):
        start = perf_counter()
        try:
            result = env.step(action)
        except Exception as error:
            yield _error("step-raises", _told(error, f"step({_short(action)}) failed in turn {turn + 1}"))
            return
        seconds.append(perf_counter() - start)
        problems = list(_check_tuple(result))
        yield from problems
        if any(problem.level == "error" for problem in problems):
            return
        yield from _once(_check_contained(env, result[0], "step"))
        if result[2] or result[3]:
            break
    if (median := sorted(seconds)[len(seconds) // 2]) > SLOW:
        yield _warning(
            "slow", f"a step takes {median:.1f} s; training takes thousands: load what is slow once, not in each step"
        )
    if not (result[2] or result[3]) and env.max_turns <= LONGEST:
        yield _error(
            "never-ends",
            f"expected the episode to end after at most max_turns = {env.max_turns} actions, but terminated and "
            "truncated are still False",
        )


def _check_tuple(result: Any) -> Iterator[Finding]:
    if not isinstance(result, tuple) or len(result) != 5:
        yield _error(
            "step-shape",
            f"expected step to return (observation, reward, terminated, truncated, info), found {_shape(result)}",
        )
        return
    observation, reward, terminated, truncated, info = result
    yield from _check_observation(observation, "step")
    if isinstance(reward, bool) or not isinstance(reward, int | float | np.number) or not math.isfinite(reward):
        yield _error("reward", f"expected the reward of step to be a finite float, found {reward!r}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            yield _error("flag", f"expected {name} to be True or False, found {flag!r}; wrap it in bool()")
    if not isinstance(info, Mapping):
        yield _error("info", f"expected the info of step to be a dict, found {_shape(info)}")


def _check_observation(observation: Any, where: str) -> Iterator[Finding]:
    try:
        as_messages(observation)
    except AgileRLError:
        yield _error(
            "observation",
            f"expected the observation of {where} to be text, or a list of messages with role and content, found "
            f"{_shape(observation)}",
        )


def _check_contained(env: TextEnv, observation: Any, where: str) -> Iterator[Finding]:
    if observation not in env.observation_space:
        yield _error(
            "outside-space",
            f"expected the observation of {where} to be in {env.observation_space!r:.80}, found {_short(observation)}; "
            "give the space a larger max_length or charset",
        )


def _check_purity(env: TextEnv, factory: Callable[[], TextEnv], tokenizer: Any) -> Iterator[Finding]:
    for seed in range(2):
        first = _play(env, seed)
        _play(env, seed + 1)  # state left behind by this episode would show in the next
        again = _play(env, seed)
        if first.events != again.events:
            yield _error("not-pure", _difference(first, again, seed, "played again"))
            return
        other = factory()
        if tokenizer is not None:
            other.bind(tokenizer)
        fresh = _play(other, seed)
        if other is not env:
            with suppress(Exception):  # _check_close reports it
                other.close()
        if first.events != fresh.events:
            yield _error("not-pure", _difference(first, fresh, seed, "played in a new instance"))
            return


def _check_seeds(env: TextEnv) -> Iterator[Finding]:
    streams = range(4)  # of actions: an environment may refuse all random ones with the same text
    if _hides_a_difference(env):  # e.g. a secret that no random action finds
        return
    if all(len({tuple(_play(env, seed, actions).events) for seed in range(SEEDS)}) == 1 for actions in streams):
        yield _warning(
            "same-episodes",
            f"seeds 0 to {SEEDS - 1} gave the same episode for the same random actions; training on a single episode "
            "is rarely intended: draw from the seed passed to reset",
        )


def _hides_a_difference(env: TextEnv) -> bool:
    """Return whether any state depends on the seed, besides the seed itself and generators."""
    states = []
    for seed in range(SEEDS):
        env.reset(seed=seed)
        states.append(dict(_leaves(vars(env.unwrapped) | vars(env), "", set())))
    return any(
        states[0].get(place) != value and (states[0].get(place), value) != ("0", str(seed))  # not a copy of the seed
        for seed, state in enumerate(states)
        for place, value in state.items()
    )


def _leaves(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the plain values in an object and everything nested in it, by their place."""
    if isinstance(value, str | bytes | int | float | bool | np.ndarray | None):
        yield place, str(value)
        return
    if id(value) in seen or len(seen) > MOST_OBJECTS:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        items = enumerate(sorted(value, key=str) if isinstance(value, set | frozenset) else value)
    elif type(value).__module__.partition(".")[0] in _NOT_STATE:
        return
    else:
        items = getattr(value, "__dict__", {}).items()
    for key, item in list(items):
        yield from _leaves(item, f"{place}.{key}", seen)


def _check_odd_actions(env: TextEnv) -> Iterator[Finding]:
    for action in ODD_ACTIONS:
        env.reset(seed=0)
        try:
            result = env.step(action)
        except Exception as error:
            what = _told(error, f"step({_short(action)}) failed")
            yield _error(
                "odd-action", f"{what}; a model may say anything, so handle it by a rule (a penalty, a lost turn)"
            )
            continue
        yield from _once(_check_tuple(result))


def _check_end(env: TextEnv) -> Iterator[Finding]:
    if not _play(env, 0).ended:
        return
    try:
        env.step(_actions(env, 1)[0])
    except Exception:
        pass
    else:
        yield _warning(
            "step-after-end",
            "a step after the end of the episode was accepted as if nothing had happened; raise an error there, so "
            "that a caller's mistake is noticed",
        )


def _check_tokenizer(env: TextEnv, tokenizer: Any) -> Iterator[Finding]:
    observation, _ = env.reset(seed=0)
    system = [] if env.system_prompt is None else [{"role": "system", "content": env.system_prompt}]
    try:
        chat = ChatFormat(padded(tokenizer), tools=env.tools)
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
            f"{_short(observation)}",
        )


def _check_close(env: TextEnv) -> Iterator[Finding]:
    try:
        with contained():
            env.close()
            env.close()
    except Exception as error:
        yield _error("close-raises", _told(error, "close() must work, even when called twice, but failed"))


# -- playing ----------------------------------------------------------------------------------------------------------


def _play(env: TextEnv, seed: int, actions_of: int | None = None) -> _Played:
    """Play an episode with the random actions drawn for ``actions_of`` (by default the seed)."""
    played = _Played()
    try:
        observation, _ = env.reset(seed=seed)
        played.events.append(repr(observation))
        for action in _actions(env, seed if actions_of is None else actions_of):
            observation, reward, terminated, truncated, _ = env.step(action)
            over = bool(terminated), bool(truncated)
            played.events.append(f"{observation!r}, reward {float(reward):g}, over {any(over)}")
            if any(over):
                played.ended = True
                break
    except Exception as error:
        played.events.append(f"{type(error).__name__}: {error}")
    return played


def _actions(env: TextEnv, number: int) -> Sequence[str]:
    """Return random actions: samples of the action space, which is reseeded first."""
    draws = stream(number, "check_env")
    env.action_space.seed(int(draws.integers(2**31)))
    return [str(env.action_space.sample()) for _ in range(min(env.max_turns, LONGEST))]


def _factory(given: Any) -> Callable[[], TextEnv]:
    """Return a factory of environments; for an instance, one that returns it each time."""
    if isinstance(given, type) or (callable(given) and getattr(given, "step", None) is None):
        return lambda: as_text_env(given())
    env = as_text_env(given)
    return lambda: env


# -- sentences --------------------------------------------------------------------------------------------------------


def _error(code: str, sentence: str) -> Finding:
    return Finding("error", code, sentence)


def _warning(code: str, sentence: str) -> Finding:
    return Finding("warning", code, sentence)


def _once(findings: Iterator[Finding]) -> list[Finding]:
    return list(findings)[:1]


def _told(error: Exception, what: str) -> str:
    name = "" if isinstance(error, EnvError) else f"{type(error).__name__}: "
    return f"{what}: {name}{error}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _shape(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{size}: {_short(value)}"


def _difference(first: _Played, second: _Played, seed: int, when: str) -> str:
    turn, (a, b) = next(
        (turn, pair) for turn, pair in enumerate(_pairs(first.events, second.events)) if pair[0] != pair[1]
    )
    return (
        f"expected an episode to be a function of seed and actions alone, but the one of seed {seed} differs when it "
        f"is {when}: turn {turn} gave {_short(a)}, then {_short(b)}; draw from a generator seeded in reset, and "
        "initialise all state there"
    )


def _pairs(first: list[str], second: list[str]) -> Iterator[tuple[str, str]]:
    length = max(len(first), len(second))
    nothing = ["nothing"]
    yield from zip((first + nothing * length)[:length], (second + nothing * length)[:length])
