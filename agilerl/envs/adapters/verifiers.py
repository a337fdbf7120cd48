"""Tasksets of the package ``verifiers``, API ``v1``: a harness plays a task by calls of the run's endpoint."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from itertools import islice
from threading import Lock, Thread
from typing import Any, Self

from agilerl.config.environment import AgentLimitsConfig
from agilerl.envs.core import Row, Split, Task, TrainingOrder, fit_panels, warn_of_fewer
from agilerl.envs.programs import MODEL, AgentTask, client
from agilerl.errors import AgileRLError, ConfigError, EnvError, how_to_install
from agilerl.rewards.grader import Columns
from agilerl.safety.custom_code import contained

MOST_TASKS, MOST_OF_INFINITE = 10_000, 1_000
"""Tasks that are read of a taskset."""


class GradedAnswer(str):
    """The last answer of an episode, and what the taskset gives for it."""

    reward: float

    def __new__(cls, text: str, reward: float) -> Self:
        """Return the text with its reward."""
        answer = super().__new__(cls, text)
        answer.reward = reward
        return answer


class TasksetTask(Task):
    """The tasks of a taskset: some for the test, some for the exam, the others, at least half, for training.

    Tasks with the same data are one. Which are held out depends on their data, not on the seed or their order.
    """

    grader = "taskset"

    def __init__(self, env: Any, name: str, exam: int, test: int, seed: int) -> None:
        """Read the tasks; raises EnvError if there are too few for an exam and a test."""
        self.env, self.name = env, name
        limit = MOST_TASKS if env.taskset.bounded else MOST_OF_INFINITE
        # An index would make equal tasks different.
        distinct = {task.with_data(idx=None).hash: task for task in islice(env.taskset, limit)}
        self._tasks = [distinct[key] for key in sorted(distinct)]
        sizes = fit_panels(exam, test, min(exam + test, len(self._tasks) // 2))
        if sizes is None:
            raise EnvError(f"{name} has {len(self._tasks)} different tasks, too few for an exam and a test; 8 would do")
        self.exam_prompts, self.test_prompts = sizes
        if sizes != (exam, test):
            warn_of_fewer(name, (exam, test), sizes, f"{len(self._tasks)} different tasks")
        self.train_size = len(self._tasks) - sum(sizes)
        self._order = TrainingOrder([self.train_size], [1.0], seed)
        self._lock = Lock()
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def row(self, split: Split, index: int) -> Row:
        """Return the number of a task, and its prompt as text."""
        self.check_index(split, index)
        # The test first, so that an exam of another size leaves it as it is.
        first = {"test": 0, "exam": self.test_prompts, "train": self.test_prompts + self.exam_prompts}[split]
        number = first + (self._order(index) if split == "train" else index)
        return {"question": self._tasks[number].data.prompt_text, "answer": None, "task": number}

    def reward(self, completion: str, row: Columns) -> float | None:
        """Return the reward of the episode; None for a text that no episode has led to."""
        result = row.get("result")
        return result.reward if isinstance(result, GradedAnswer) else None

    async def play(self, client: Any, row: Row) -> GradedAnswer:
        """Run the harness on a task: the program of these tasks.

        Raises EnvError if verifiers reports an error.
        """
        import verifiers.v1 as vf

        if self._serving is None:
            await asyncio.to_thread(self._serve)
        assert self._serving is not None
        # verifiers takes the key of an endpoint from the environment, which others can read, or a header from here.
        asked = vf.EvalClientConfig(
            base_url=str(client.base_url), api_key_var="_", headers={"X-Api-Key": client.api_key}
        )
        episode = self.env.run_episode(self._tasks[row["task"]], vf.ModelContext(model=MODEL, client=asked))
        # Its locks belong to one event loop.
        ended = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(episode, self._serving[0]))
        if not ended.ok:
            errors = [error for trace in ended.traces for error in trace.errors] + ended.errors
            raise EnvError("; ".join(f"{error.type}: {error.message}" for error in errors) or "it did not end")
        (trace,) = ended.traces
        return GradedAnswer(trace.last_reply, float(trace.reward))

    def _serve(self) -> None:
        """Start what all episodes share, its event loop included, unless it runs."""
        with self._lock:
            if self._serving is None:
                ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
                Thread(target=lambda: asyncio.run(self._serving_until(ready)), name="verifiers", daemon=True).start()
                self._serving = ready.result()

    async def _serving_until(self, ready: "Future[Any]") -> None:
        try:
            async with self.env.serving():
                ended = asyncio.Event()
                ready.set_result((asyncio.get_running_loop(), ended))
                await ended.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)

    def close(self) -> None:
        """End what the episodes share."""
        with self._lock:
            if self._serving is not None:
                loop, ended = self._serving
                # By the loop itself: an event of asyncio may not be set from another thread.
                loop.call_soon_threadsafe(ended.set)
                self._serving = None


def make_taskset(
    name: str, params: Mapping[str, Any], *, limits: AgentLimitsConfig, exam: int, test: int, seed: int
) -> AgentTask:
    """Return the tasks of an installed taskset with the harness that plays them.

    ``params`` are the fields of its configuration; ``agent`` among them that of its agent (``harness``, ``runtime``,
    ``max_turns``). Without it the harness is the taskset's own, else ``null``, and programs run on this machine.

    Raises:
        ConfigError: it is not installed, is of several agents, refuses the parameters, or its harness would run what
            the model writes on this machine.
        EnvError: it has too few tasks.
    """
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config
    except ImportError as error:
        raise ConfigError(
            f"environment.env_id=verifiers:{name} needs the package verifiers 0.4, in an environment of its own: "
            f"{how_to_install('verifiers')}; {error}"
        ) from error
    settings = dict(params)
    agent_settings = {"runtime": {"type": "subprocess"}, **dict(settings.pop("agent", {}))}
    try:
        with contained():
            harness = default_harness_id(name)  # "bash" if there is none, which would give the model a shell
            agent = {"harness": {"id": "null" if harness == "bash" else harness}, **agent_settings}
            roles = [
                role
                for role, field in env_config_type(name).model_fields.items()
                if isinstance(field.default, vf.AgentConfig)
            ]
            if len(roles) != 1:
                raise ConfigError(f"expected a taskset of one agent, found {', '.join(roles) or 'none'}")
            config = resolve_env_config({"taskset": {"id": name, **settings}, roles[0]: agent})
            env = load_environment(config)
            task = TasksetTask(env, name, exam, test, seed)
            tools = env.taskset.toolsets(config.taskset) or env.taskset.task_type().toolsets(config.taskset.task)
            # Only without a chosen harness, and if the taskset has neither tools nor its own environment.
            if harness == "bash" and "harness" not in agent_settings and not tools and type(env) is vf.SingleAgentEnv:
                env.setup = _in_this_process
            (harness,) = env._harnesses.values()
            if harness.EXECUTES_CODE and isinstance(getattr(config, roles[0]).runtime, vf.SubprocessConfig):
                raise ConfigError(
                    f"its harness {harness.config.id!r} would run what the model writes on this machine; set "
                    "environment.params.agent.runtime to {type: docker}, or agent.harness to {id: 'null'}"
                )
    except AgileRLError as error:
        raise type(error)(f"environment.env_id=verifiers:{name}: {error}") from error
    except Exception as error:  # its code may raise anything
        raise ConfigError(f"environment.env_id=verifiers:{name}: {type(error).__name__}: {error}") from error
    return AgentTask(task, task.play, limits)


async def _in_this_process(agents: Any) -> None:
    """Give the agent of an episode the harness ``_chat``: by configuration, it would need a package of its own."""
    agents.agent.harness = _chat()(agents.agent.harness.config)


@cache
def _chat() -> Any:
    """Return the harness that asks once, in this process.

    It does what verifiers' harness ``null`` does if there are no tools, some hundred times as fast.
    """
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire

    class Chat(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

        async def launch(self, ctx: Any, *arguments: Any, **_: Any) -> Any:
            """Ask through verifiers' interception, which keeps the conversation."""
            _, _, endpoint, secret, _, data = arguments
            system, prompt = self.resolve_prompt(data)
            conversation = (
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
            )
            messages = [*([{"role": "system", "content": system}] if system else []), *conversation]
            async with client(endpoint, secret, None, asynchronous=True) as asked:
                await asked.chat.completions.create(model=ctx.model, messages=messages)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    return Chat
