"""The section ``environment`` of a manifest."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from agilerl.checks.arguments import shown
from agilerl.checks.redaction import secrets_in
from agilerl.checks.validation import LARGEST_FLOAT32
from agilerl.config import Section
from agilerl.safety.custom_code import code_name

_OF_TURNS = ("enable_sliding_window", "apply_chat_template", "strict_chat_template_boundary", "step_timeout")
"""Settings of environments whose turns the run takes."""
_OF_EPISODES = ("env_id", "max_turns", *_OF_TURNS)
"""Settings that only multi-turn environments have."""
_OF_TASKS = ("params", "reward", "holdout", "curriculum")
"""Settings that only reasoning_gym's tasks have."""
_OF_DATASETS = ("dataset_exam", "dataset_test", "columns", "bad_rows")
"""Settings that only datasets have."""


def _without_secrets(params: dict[str, Any]) -> dict[str, Any]:
    """Refuse keys and passwords: settings are written to run.json."""
    for path in secrets_in(params):
        raise ValueError(
            f"{shown(path)} is the name of a secret, and settings are written down; put the secret into an environment "
            "variable, and give the name of that (api_key_env)"
        )
    return params


Params = Annotated[dict[str, Any], AfterValidator(_without_secrets)]


class CurriculumConfig(Section):
    """Training that gets harder."""

    prompts_per_level: Annotated[int, Field(ge=1)] = 512
    """Training prompts of each agent at one level. With any key of ``curriculum`` training gets harder along
    reasoning_gym's curriculum, except for what ``params`` set. Exam and test are of the last level."""
    max_level: Annotated[int | None, Field(ge=1)] = None
    """The last level, counted from 0; None: the highest that there is."""
    attributes: Annotated[list[str], Field(min_length=1)] | None = None
    """What rises, by reasoning_gym's names; the rest keeps its parameters. None: all that can."""


def _printable(path: str) -> str:
    if not path.isprintable():
        raise ValueError(f"expected printable text, found control characters in {shown(path)}")
    return path


class DatasetConfig(Section):
    """Rows to learn from."""

    path: Annotated[str, Field(min_length=1), AfterValidator(_printable)]
    """File (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``) or name of a dataset on the hub. A manifest's
    files are in or below its folder or the working directory; the command line may name any."""
    name: str | None = None
    """Configuration of a dataset on the hub that has several."""
    split: str = "train"
    """Split of a dataset on the hub."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of a mixture, relative to the other datasets of the list."""
    rows: Annotated[int | None, Field(ge=1)] = None
    """Read only the first so many rows; of a dataset on the hub they are streamed, and the rest is not loaded."""
    columns: dict[str, str] = Field(default_factory=dict)
    """In place of ``environment.columns`` for this dataset."""


class GraderConfig(Section):
    """One part of the reward."""

    name: Annotated[str, Field(min_length=1)]
    """``task``, the task's own reward, or a grader of the package: ``accuracy``, ``exact_match``, ``format_tags``,
    ``json_valid``, ``judge``, ``length``, ``overlong``, ``regex``, ``repetition``, ``reward_model``, ``sandbox``.
    With ``--allow-code`` also a custom function or class: ``rewards.py:my_reward``, in the manifest's folder or below,
    or ``module:Name``."""
    weight: Annotated[float, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)] = 1.0
    """Factor on its score; a grader of weight 0 is only logged."""
    params: Params = Field(default_factory=dict)
    """Its parameters, as in Python. No secrets: those come from environment variables."""
    isolate: bool = False
    """Run a custom function in a separate process, which is killed when it hangs; only for functions."""
    timeout: Annotated[float, Field(gt=0)] = 5.0
    """Seconds for one completion of an isolated grader; a slower one has no grade and counts as a failure."""
    workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Threads (with ``isolate``: processes) that call a custom function as completions end. None: one, when all have
    ended."""
    label: Annotated[str | None, Field(pattern=r"^[\w./-]+$")] = None
    """Its name in metrics, instead of ``name``."""

    @property
    def called(self) -> str:
        """What metrics call it: its label, else its name, of code that of the function or class."""
        return self.label or code_name(self.name)


class AgentLimitsConfig(Section):
    """What the program ``environment.agent``, or the harness of a taskset, may use."""

    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds of an episode; a program that needs more has no grade."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 64
    """Episodes at a time. Results do not depend on it."""
    max_calls: Annotated[int, Field(ge=1)] = 64
    """Most calls of the model in an episode; further ones are refused."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Most tokens that an episode may generate; None: no limit beside that of each call."""
    variables: tuple[str, ...] = ()
    """Environment variables that a command gets although their names say that they hold a key, token or password."""


def _no_function(value: Any) -> Any:
    """Refuse a function here, and say that it belongs to the graders."""
    if isinstance(value, str) and ":" in value:
        raise ValueError(f"expected exact or score, found {shown(value)}; a function is one of environment.graders")
    return value


def _as_list(value: Any) -> Any:
    """Let one dataset, or its path alone, stand for a list."""
    values = value if isinstance(value, list) else [value] if isinstance(value, str | Mapping) else value
    return [{"path": v} if isinstance(v, str) else v for v in values] if isinstance(values, list) else values


Datasets = Annotated[Annotated[list[DatasetConfig], Field(min_length=1)] | None, BeforeValidator(_as_list)]


class EnvironmentConfig(Section):
    """What the agents are trained and examined on."""

    env_type: Literal["reasoning", "sft", "preference", "unpaired", "multiturn"] = "reasoning"
    """What is learned from: rewards of the agents' own completions, right answers (``sft``), pairs of a right and a
    careless answer (``preference``), labelled answers (``unpaired``; pairs become two), or returns of the episodes
    of ``env_id`` (``multiturn``)."""
    task: str | None = "reasoning_gym:spell_backward"
    """``reasoning_gym:<dataset>``; ``reasoning_gym:composite`` mixes several. None if there is a ``dataset`` or an
    ``env_id``."""
    dataset: Datasets = None
    """Rows of your own instead of a task: a list of datasets, which are mixed by weight; or one of them; or its path
    alone."""
    dataset_exam: Datasets = None
    """Rows for the exam; None takes ``eval_prompts`` rows of ``dataset``, which training then leaves out."""
    dataset_test: Datasets = None
    """Rows for the test; None takes ``test_prompts`` rows of ``dataset``."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names that the columns of datasets get, with those that they have: ``{question: problem}``."""
    bad_rows: Literal["raise", "drop"] = "raise"
    """Rows with a value that is missing, empty or no text: stop before the run, or leave them out and count them.
    Rows that are too long, or hold special tokens, are always left out and counted."""
    params: Params = Field(default_factory=dict)
    """Parameters of the dataset or of ``env_id``. No secrets. Of a taskset of verifiers: the fields of its
    configuration, and of its ``agent``."""
    curriculum: CurriculumConfig | None = None
    """Levels of a reasoning_gym task, from easy to hard; None: all of training is alike."""
    env_id: str | None = None
    """``multiturn``: id of a text environment that is registered with gymnasium, ``agilerl/GuessTheNumber-v0``. With
    ``--allow-code`` also a custom class: ``env.py:MyEnv``, in the manifest's folder or below, or ``module:Name``; or an
    installed taskset of verifiers: ``verifiers:NAME``."""
    agent: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] | None = None
    """A program that answers the questions of ``task`` or ``dataset`` by calls of the run's OpenAI-compatible endpoint:
    ``agent.py:agent``, a function of a client and a row, or a command line, ``[python, solve.py]``. Both need
    ``--allow-code``."""
    agent_limits: AgentLimitsConfig = AgentLimitsConfig()
    """What such a program may use."""
    max_turns: Annotated[int | None, Field(ge=1)] = None
    """``multiturn``: most actions of an episode; None: the environment's own limit."""
    enable_sliding_window: bool = False
    """``multiturn``: if the context is full, forget the oldest turns; False cuts the episode."""
    apply_chat_template: bool = True
    """``multiturn``: False writes observations as they are, each on separate lines."""
    strict_chat_template_boundary: bool = True
    """``multiturn``: refuse a chat template that rewrites earlier turns; False follows it, one row for each turn."""
    step_timeout: Annotated[float | None, Field(gt=0)] = 60.0
    """``multiturn``: seconds for one step of an environment; an episode that needs more has no grade."""
    reward: Annotated[Literal["exact", "score"], BeforeValidator(_no_function)] = "exact"
    """``exact``: 1 for a full score and 0 otherwise; ``score``: the dataset's own score."""
    graders: Annotated[list[GraderConfig] | None, Field(min_length=1)] = None
    """The parts of the reward, whose weighted sum agents learn from; None: the task's own reward alone."""
    fitness_grader: str | None = None
    """What exams and tests measure if there are ``graders``: ``task``, or one of them by its label or name; None: their
    sum, as in training."""
    data_batch_size_per_gpu: Annotated[int, Field(ge=1)] = 8
    """Prompts of one training batch of each agent."""
    eval_prompts: Annotated[int | None, Field(ge=2, le=100_000)] = None
    """Size of the exam that selection uses; smaller, with a warning, if there are too few questions or rows. None:
    128, or as many, at least 32, as cost a tenth of what an agent does between exams."""
    test_prompts: Annotated[int, Field(ge=2, le=100_000)] = 400
    """Size of the test set that only the final numbers use; smaller if the exam has to be."""
    holdout: Literal["reserved", "any"] = "reserved"
    """``reserved``: exam and test come from a fifth of all questions that no run trains on; ``any``, for few
    questions: from all, and training leaves out those that were drawn."""
    loss_on: Literal["completion", "assistant"] = "completion"
    """``sft``: what is learned of a conversation, the answer or every message of the assistant."""
    answer_format: Literal["whole", "tags", "last_number", "after", "boxed"] = "whole"
    """``reasoning``: how an answer is asked for and found; graders read only what was found, or an empty text.
    ``whole``: the completion. ``tags``, ``boxed``: what the last ``<answer>`` tags or ``\\boxed{}`` hold; ``after``:
    what follows ``answer_phrase``, to the end of its line or sentence; the question asks for all three.
    ``last_number``: the last number, unasked. An answer may begin in a prefill."""
    answer_phrase: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)] = "The answer is"
    """What an answer follows, for ``answer_format: after``."""
    conversation_template: Annotated[list[dict[str, str]], Field(min_length=1)] | None = None
    """Messages with ``{question}``; a last one of the assistant is a prefill. None asks the plain question."""

    @property
    def taskset(self) -> str | None:
        """Name of the taskset of verifiers, if ``env_id`` is one."""
        prefix, _, name = (self.env_id or "").partition(":")
        return name if prefix == "verifiers" else None

    @property
    def exam_panel(self) -> int:
        """Questions or rows that are kept for the exam."""
        return self.eval_prompts or 128

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.env_type != "sft":
            self._refuse(("loss_on",), f"for env_type: sft, found {self.env_type}")
        if self.env_type != "reasoning":
            self._refuse(("graders", "answer_format"), f"for env_type: reasoning, found {self.env_type}")
        if self.answer_format != "after":
            self._refuse(("answer_phrase",), f"for answer_format: after, found {self.answer_format}")
        if self.graders is None:
            self._refuse(("fitness_grader",), "for environment.graders, found none")
        if self.agent is None and self.taskset is None:
            self._refuse(("agent_limits",), "for environment.agent, found none")
        if self.taskset is not None:
            self._refuse(_OF_TURNS, "not for tasksets of verifiers, whose harness takes the turns")
        if self.agent is not None:
            self._refuse(
                ("conversation_template", "answer_format"), "not for environment.agent, which writes its prompts"
            )
            if self.env_type != "reasoning":
                self._refuse(("agent",), f"for env_type: reasoning, found {self.env_type}")
        return self

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        # The default task gives way to a dataset or an environment; one that was given contradicts it.
        given = self.task if self.is_set("task") else None
        if self.env_type == "multiturn":
            if self.dataset is not None:
                raise ValueError("environment.dataset is for single-turn rows, found env_type: multiturn; leave it out")
            self._refuse(("curriculum",), "for reasoning_gym's tasks, found env_type: multiturn")
            if self.env_id is None:
                raise ValueError("env_type='multiturn' needs environment.env_id, such as agilerl/GuessTheNumber-v0")
        else:
            remedy = "set environment.env_type=multiturn, or leave it out"
            self._refuse(_OF_EPISODES, f"for env_type: multiturn, found {self.env_type}", remedy)
        if self.dataset is None:
            self._refuse(_OF_DATASETS, "for environment.dataset, found none")
            if self.task is None and self.env_type != "multiturn":
                raise ValueError("expected environment.task or environment.dataset, found neither; give one of them")
        else:
            self._refuse(_OF_TASKS, "for environment.task, found environment.dataset")
        if self.dataset is not None or self.env_type == "multiturn":
            if given is not None:
                other = "environment.dataset" if self.dataset is not None else "env_type: multiturn"
                raise ValueError(f"environment.task={given!r} and {other} exclude each other; leave one of them out")
            self.task = None
        return self

    def _refuse(self, names: tuple[str, ...], reason: str, remedy: str = "leave it out") -> None:
        for name in names:
            value = getattr(self, name)
            # Not whether it was given: a resolved manifest gives everything.
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"environment.{name}={shown(value)} is {reason}; {remedy}")
