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
SHORTCUTS: Mapping[str, Mapping[str, tuple[str, float, float]]] = {
    "game_of_life": {"exact": ("the commonest answer", 0.13, 0.02)},
    "gcd": {"exact": ("`2`", 0.29, 0.17)},
    "gsm_symbolic": {"exact": ("the right answer amid nonsense", 1.0, 0.0)},
    "knight_swap": {"exact": ("`No`", 0.22, 0.02), "score": ("`No`", 0.22, 0.02)},
    "knights_knaves": {"exact": ("the right answer after numbers", 1.0, 0.0)},
    "letter_counting": {"exact": ("`1`", 0.4, 0.17), "score": ("`1`", 0.4, 0.17)},
    "maze": {"exact": ("`5`", 0.38, 0.27), "score": ("`5`", 0.38, 0.27)},
    "number_format": {
        "exact": ("the question's last number", 0.13, 0.0),
        "score": ("the question's last number", 0.13, 0.0),
    },
    "number_sequence": {
        "exact": ("the question's last number", 0.35, 0.1),
        "score": ("the question's last number", 0.35, 0.11),
    },
    "polynomial_equations": {"exact": ("`0`", 0.23, 0.06), "score": ("`0`", 0.34, 0.1)},
    "prime_factorization": {
        "exact": ("the question's first number", 0.15, 0.0),
        "score": ("the question's first number", 0.57, 0.01),
    },
    "propositional_logic": {"score": ("`1e400`", 0.11, 0.0)},
    "rotten_oranges": {"exact": ("`-1`", 0.32, 0.16), "score": ("`-1`", 0.32, 0.16)},
    "self_reference": {"exact": ("`2`", 0.37, 0.25), "score": ("`2`", 0.37, 0.25)},
    "shortest_path": {"exact": ("`infeasible`", 0.36, 0.13), "score": ("`infeasible`", 0.36, 0.13)},
    "sokoban": {"exact": ("the right answer amid nonsense", 0.53, 0.01)},
    "string_manipulation": {
        "exact": ("the question's last line", 0.24, 0.0),
        "score": ("the question's last line", 0.31, 0.01),
    },
    "syllogism": {"exact": ("`Yes`", 0.65, 0.48), "score": ("`Yes`", 0.65, 0.48)},
    "word_sorting": {"score": ("the question's last line", 0.13, 0.0)},
}
