"""The preflight: a run without a signal stops before its first update, with what to change."""

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

from agilerl.checks.arguments import counted
from agilerl.config.run import RunConfig
from agilerl.config.search import SelectionConfig, TeacherConfig
from agilerl.errors import ConfigError
from agilerl.population import Population
from agilerl.runtime import Runtime
from agilerl.text.templates import at_date
from agilerl.training.base import load_runtime
from agilerl.training.events import PreflightDone
from agilerl.training.generation import Scale
from agilerl.training.probe import Answer, Group, Probe, probe
from agilerl.training.resolved import Resolved
from agilerl.training.setup import Session, build, check

QUESTIONS, MOST = 16, 64
"""Questions that a preflight asks at a time, and those without a signal after which it gives up. If only one group in
20 differed, 64 would all be alike once in 27 times."""
SHARE = 20
"""A run has a preflight if it asks at least this many times ``QUESTIONS``: a short trial is its own preflight."""
NEARLY_ALL = 0.95
"""Share of answers without any reward from which a plan warns."""
CHEAP = 1e12
"""Operations that a plan spends on answers at most: tens of seconds of one core, which a GPU does at once."""


def is_due(session: Session) -> bool:
    """Return whether a run has a preflight: agents that sample, and a budget that is large beside it."""
    population, wanted = session.population, session.config.training.preflight
    if wanted == "off" or population.learns_from_data or session.saved is not None:
        return False
    return not why_none(session.scale)


def why_none(scale: Scale) -> str:
    """Return why a run of this size has no preflight, if its size is the reason."""
    asks = scale.training.preflight != "off" and not scale.learns_from_data
    few = scale.lone_agent()[0] * scale.prompts < SHARE * QUESTIONS
    return f"none: the run answers fewer than {SHARE * QUESTIONS} prompts" * (asks and few)


def preflight(session: Session) -> Probe | None:
    """Ask training questions until a group of answers has a signal; None if the run has no preflight.

    Raises ConfigError, with what to change, if none has after ``MOST`` questions, unless ``training.preflight`` is
    ``warn``. Every process of the run calls it. A second call asks nothing.
    """
    result = session.preflight
    if result is None and is_due(session):
        groups: list[Group] = []
        with at_date(session.date):
            for first in range(0, MOST, QUESTIONS):
                part = probe(session.population, QUESTIONS, first=first)
                groups += part.groups
                result = replace(part, groups=groups)
                if result.has_signal:
                    break
        session.preflight = result
    if result is not None and not result.has_signal and session.config.training.preflight == "stop":
        raise ConfigError(
            f"nothing could be learned: {problem(session, result)}; or start anyway, with "
            "--force (training.preflight=warn)"
        )
    return result


def event_of(probed: Probe, advice: str = "") -> PreflightDone:
    """Return the event of a preflight."""
    first = probed.groups[0]
    answer = next(iter(first.answers), Answer("", math.nan, 0, "error"))
    return PreflightDone(probed.metrics, str(probed), advice, first.prompt, answer.text, answer.score)


def tried(session: Session) -> PreflightDone | None:
    """Return answers to training questions, for a plan; None if agents do not sample, or if it could take long.

    As many as are cheap, at most those that the preflight of a run begins with; of episodes and with judges one.
    """
    population = session.population
    if population.learns_from_data:
        return None
    base, lengths = population.runtime.base, population.examiner.lengths("exam")
    longest = lengths.row(
        population.examiner.eval_max_new_tokens or population.examiner.context_length,
        population.examiner.context_length,
    )
    # A forward pass takes about two operations for each token and parameter.
    affordable = int(CHEAP * (1 if base.device.type == "cpu" else 100) // (2 * base.parameters * longest))
    if not affordable:
        return None
    # Each answer may be a call of a paid model.
    paid = any("judge" in grader.name for grader in session.config.environment.graders or ())
    questions, group = (
        (1, 1) if population.task.multi_turn or paid else (min(affordable, QUESTIONS), population.group_sizes[0])
    )
    samples = max(1, min(group, affordable // questions))
    with at_date(session.date):
        probed = probe(population, questions, samples)
    count = questions * samples
    graded = f"{count - probed.ungraded} graded answers" if probed.ungraded else counted(count, "answer")
    sentence = f"mean reward {probed.reward:.3f} of {graded}, {probed.cut:.0%} cut at the limit"
    # Fewer answers than the run would see prove nothing, but tell what to expect.
    complete = (questions, samples) == (QUESTIONS, group)
    if complete and not probed.has_signal:
        further = f"; the run asks up to {MOST} questions before it gives up" * is_due(session)
        warnings = [problem(session, probed) + further]
    else:
        warnings = [probed.fault] * bool(probed.fault) + (hints(population, probed) if count >= QUESTIONS else [])
    return replace(event_of(probed, "; ".join(warnings)), shown=sentence)


def hints(population: Population, probed: Probe) -> list[str]:
    """Return what is likely to keep a run from learning, though the answers do not prove it."""
    sentences, zeros = [], fmean(answer.score == 0 for answer in probed.answers)
    if zeros >= NEARLY_ALL and probed.start != "at once":
        sentences = [
            f"{zeros:.0%} of the answers earn 0, so there is little or nothing to learn from yet (agilerl probe)"
        ]
    if probed.cut >= 0.5:
        limit = getattr(population.agents[0].config, "max_output_tokens", None)
        remedy = f"raise algorithm.max_output_tokens, now {limit}" if limit else "raise max_model_len"
        sentences.append(f"{probed.cut:.0%} of the answers are cut at the limit: {remedy}")
    return sentences


def problem(session: Session, probed: Probe) -> str:
    """Return why no answers differ in reward, and what to change: the first cause that explains all of them."""
    e, algorithm = session.config.environment, session.config.algorithm["name"]
    begin = f"{probed.fault}; the other" if probed.fault else "all"
    graded = counted(len(probed.answers) - probed.ungraded, "answer")
    groups = f"{begin} {graded} to {counted(len(probed.groups), 'training question')}"
    limit = getattr(session.population.agents[0].config, "max_output_tokens", None)
    scored = e.task is not None and e.env_type == "reasoning" and e.graders is None and e.reward == "exact"
    where = " (environment.params)" * (e.task is not None)
    easier = ", a reward that also pays partly right answers (environment.reward=score)" if scored else ""
    if probed.fault and probed.reward:  # or NaN
        return probed.fault
    if probed.reward and not probed.differ:
        one = len({answer.score for answer in probed.answers}) == 1
        same = "got the same reward (" if one else "got the same reward as the others to their question (mean "
        return f"{groups} {same}{probed.reward:g}); use harder questions{where} or a finer-grained reward"
    if probed.cut == 1:
        return f"{groups} earn {probed.reward:g} and are cut at {limit or 'the end of the context'}" + (
            " tokens; raise algorithm.max_output_tokens" if limit else "; shorten the prompts or raise max_model_len"
        )
    if probed.empty == 1 and e.answer_format != "whole":
        return (
            f"{groups} hold no answer in the format environment.answer_format={e.answer_format}; take after, "
            "with its phrase as a prefill (environment.conversation_template)"
        )
    formats = e.answer_format == "whole" and e.env_type == "reasoning" and e.graders is None
    asked = "let the prompt ask for a format (environment.answer_format=after), " if formats else ""
    return (
        f"{groups} earn {probed.reward:g}, so {algorithm} has nothing to compare; {asked}take easier questions{where}, "
        f"a stronger base{easier}, or more answers to each (algorithm.group_size)"
    )


# -- one row of a table: settings without a run -----------------------------------------------------------------------


class Bases:
    """The last base that was loaded, for settings that differ only in their task."""

    key: Any = None
    runtime: Runtime | None = None

    def of(self, resolved: Resolved) -> Runtime:
        """Return the base that these settings ask for."""
        t = resolved.config.training
        sizes = (t.seed, t.device, t.dtype, t.threads, t.max_tokens_in_flight, t.max_rows_in_flight)
        key = (resolved.config.network, sizes)
        if self.runtime is None or self.key != key:
            self.runtime = None  # first, so that memory never holds two
            self.key, self.runtime = key, load_runtime(resolved)
        return self.runtime


def session_of_one(config: RunConfig, bases: Bases, *, allow_code: bool = False) -> Session:
    """Return one agent on the task of a configuration; ``close`` its task and ``clean_up`` the agent afterwards.

    It only answers training questions: the panels are the smallest, and nothing is selected. Raises ConfigError or
    EnvError as ``agilerl.training.setup.build`` does, and for algorithms that learn from data.
    """
    config = config.replaced(
        training=config.training.model_copy(update={"pop_size": 1, "init": "same"}),
        environment=config.environment.model_copy(update={"eval_prompts": 2, "test_prompts": 2}),
        selection_strategy=SelectionConfig(name="none"),
        teacher=TeacherConfig(),
    )
    resolved = check(config)
    if resolved.algorithm.env_type != "reasoning":
        raise ConfigError(f"{resolved.algorithm.__name__} learns from data: there are no answers to sample; name GRPO")
    return build(config, allow_code=allow_code, runtime=bases.of(resolved))
