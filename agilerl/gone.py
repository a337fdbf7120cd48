"""What has gone from the product, and what to use instead: whoever still names it gets one sentence."""

from collections.abc import Mapping
from typing import Any

GONE: dict[str, str] = {
    "distributed.islands": "all processes hold all agents and divide the work; distributed.workers is the number of "
    "processes that Ray Train starts",
    "distributed.processes_per_island": "all processes work together, on whole agents or, with fewer agents than "
    "processes, on the rows of each; leave it out",
    "distributed.vllm_servers": "start a server with vllm serve, and name it as network.vllm_config.base_url",
    "distributed.gpus_per_server": "start a server with vllm serve, and name it as network.vllm_config.base_url",
    "--optuna": "lineage.jsonl in the run, and agilerl lineage RUN --json, have every agent with its values and exams",
    "--price": "multiply the duration in the report, or seconds in summary.json, by the price",
    "training.price_per_hour": "multiply the duration in the report, or seconds in summary.json, by the price",
    "agilerl watch": "agilerl report RUN --live rewrites the report until the run ends, and the page reloads itself",
    "agilerl eval --out": "agilerl eval --json prints every number and answer; send its output to a file",
    "agilerl export --name": "it named an Optuna study, which is no longer written; agilerl lineage RUN --json has "
    "every agent with its values and exams",
    "environments=agilerl/Calculator-v0": "use tutorials/tools/calculator.py:calculated with --allow-code",
    "environments=agilerl/GridNavigation-v0": "use agilerl/GuessTheNumber-v0, or with --allow-code "
    "agilerl.utils.probe_envs_llm:GridNavigationEnv",
    "environments=agilerl/Mastermind-v0": "use gem:game:Mastermind-v0-easy or textarena:Mastermind-v0, or a class of "
    "your own (docs/environments.md)",
    "environments=agilerl/Python-v0": "make a tool of agilerl.rewards.run_python (docs/tools.md)",
    "environments=agilerl/Search-v0": "use tutorials/tools/search.py:search_env with --allow-code",
    "environments=agilerl/TicTacToe-v0": "use agilerl/GuessTheNumber-v0, or a class of your own (docs/environments.md)",
    "environment.chat_template_kwargs": "use network.chat_template_kwargs",
    "environment.env_packages": "install packages before the run",
    "environment.env_url": "use environment.env_id: openenv:URL",
    "environment.objective": "environment.env_type is sft or preference",
    "environment.request_timeout_s": "use environment.step_timeout",
    "environment.rubric_file_path": "use environment.graders: [{name: file.py:function}]",
    "environment.rubric_name": "use environment.graders: [{name: file.py:function}]",
    "agilerl check": "agilerl train MANIFEST --dry-run checks a manifest, and the environment that it names; in Python "
    "agilerl.envs.check.check_env checks an environment",
    "agilerl env": "agilerl --version prints the versions, and run.json in a run has the hardware as well",
    "agilerl plan": "agilerl train MANIFEST --dry-run says what a run needs on this machine",
    "graders=trl": "with --allow-code a function of TRL is trl.rewards:accuracy_reward (with isolate: true, as it has "
    "algebra); call get_... in a file of your own, penalty = get_soft_overlong_punishment(80, 20), and name that",
    "parser=llama": "pass the response template LLAMA of tutorials/tools/response_templates.py as parser",
    "parser=mistral": "pass the response template MISTRAL of tutorials/tools/response_templates.py as parser",
    "mutation.crossover": "a clone has one parent; averaging adapters of two gained nothing; leave it out",
    "mutation.probabilities.act_mut": "the base is frozen, so its activations stay; leave it out, or let rl_hp_mut or "
    "arch_mut mutate",
    "mutation.probabilities.new_layer": "the base is frozen, so its layers stay; leave it out, or let arch_mut change "
    "the adapter's rank",
    "mutation.probabilities.params_mut": "noise on weights cost accuracy; leave it out, or let rl_hp_mut or arch_mut "
    "mutate",
    "selection_strategy.between": "use name: knockout, which halves the population, or truncation",
    "selection_strategy.objectives": "selection goes by the reward alone; put a KL or a length that counts into "
    "the reward (algorithm.beta, a grader)",
    "sharing": "agents no longer learn from each other's completions or from the elite, which cost accuracy; the "
    "section teacher has a teacher (teacher.weight, and teacher.adapter or teacher.url)",
    "strategies=halving": "use knockout, which halves the population and protects your configuration",
    "strategies=pulses": "use knockout with training.pop_size=1, which begins with its pulses",
}
"""By name: a manifest's key or section (``sharing``, ``training.x``), a value of one (``strategies=x``), a command
(``agilerl x``), an option of all (``--x``) or of one (``agilerl x --y``). Each sentence says what to use instead, and
fits behind "has gone:"."""


WITHOUT_EFFECT = ("training.price_per_hour",)
"""Settings that changed nothing of what a run computed: one that had them can be resumed without."""


def instead(name: str) -> str | None:
    """Return what to use instead of something that has gone, or that is inside of it; None for other names."""
    while name:
        if name in GONE:
            return f"{name.rpartition('=')[2]} has gone: {GONE[name]}"
        name = name.rpartition(".")[0]
    return None


def keyword_instead(name: str) -> str | None:
    """Return what to use instead of a keyword of Python that a setting of this name had; None for other names."""
    return next((instead(key) for key in GONE if key.rpartition(".")[2] == name), None)


def remaining(settings: Mapping[str, Any], *, given: bool = False, section: str = "") -> dict[str, Any]:
    """Return the settings of a run's record without those that have gone.

    Of what the user had ``given`` only those are left out that were off (0, False, None, empty) or without effect: a
    run that used what has gone cannot be resumed without it.
    """
    left: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{section}.{key}" if section else key
        has_gone = instead(name) is not None
        if isinstance(value, Mapping):
            inner = remaining(value, given=given, section=name)
            if inner or not has_gone:
                left[key] = inner
        elif not has_gone or (given and value and name not in WITHOUT_EFFECT):
            left[key] = value
    return left
