"""Answers that solve nothing and earn more than chance on a reasoning_gym task, measured; plans name them."""

from collections.abc import Iterator, Mapping

from agilerl.config.environment import EnvironmentConfig


def shortcuts(config: EnvironmentConfig) -> Iterator[str]:
    """Yield a sentence for each dataset of a run's task that pays for such an answer under the task's own reward."""
    family, _, name = (config.task or "").partition(":")
    if family != "reasoning_gym" or config.env_type != "reasoning" or config.graders is not None:
        return
    names = [spec["name"] for spec in config.params["datasets"]] if name == "composite" else [name]
    for dataset in dict.fromkeys(names):
        if config.reward in SHORTCUTS.get(dataset, {}):
            answer, mean, chance = SHORTCUTS[dataset][config.reward]
            yield f"{answer} earns {mean:.2f} on {dataset} (chance {chance:.2f}; measured with default parameters)"


# The best-paying answer by task and reward, with its mean reward and that of chance, the right answer of another
# question; written by ``benchmarking/degenerate.py --write``.
SHORTCUTS: Mapping[str, Mapping[str, tuple[str, float, float]]] = {}
