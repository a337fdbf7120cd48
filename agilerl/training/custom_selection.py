"""Custom selection strategies: ``selection_strategy.name: strategy.py:MySelection``."""

from collections.abc import Mapping
from typing import Any

from agilerl.checks.arguments import shown
from agilerl.config.search import SelectionConfig
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.selection import AT_THE_START, Plan, SelectionStrategy, Standing
from agilerl.safety.custom_code import load_code, names_code, reported

_WHERE = "selection_strategy.name"


class CustomSelection:
    """Calls a custom strategy, and checks that it returns a plan for these agents."""

    def __init__(self, name: str, inner: Any) -> None:
        self.name, self.inner = f"{_WHERE}={shown(name)}", inner

    def plan(
        self,
        fitness: Mapping[int, Fitness],
        generation: int,
        seed: int,
        next_index: int,
        standing: Standing = AT_THE_START,
    ) -> Plan:
        """Return its plan; raises ConfigError for what it raises, and for a plan that does not fit the agents."""
        with reported(f"{self.name} failed in plan()"):
            # A copy: what the strategy does to it must not reach the run's own exams.
            plan = self.inner.plan(dict(fitness), generation, seed, next_index, standing)
        if not isinstance(plan, Plan):
            raise ConfigError(
                f"{self.name}: expected plan() to return an agilerl.hpo.selection.Plan, found {type(plan).__name__}"
            )
        children, known = [birth.child for birth in plan.births], list(fitness)
        # The agent of the best exam may have left the population; the run keeps a copy of it.
        parents = [birth.parent for birth in plan.births if not birth.from_best]
        donors = {birth.hyperparameters_from for birth in plan.births}
        wrong = ""
        if children != list(range(next_index, next_index + len(children))):
            wrong = f"children get the indices from next_index={next_index} on, found {children}"
        elif not plan.slots or (set(plan.slots) - set(children)) | set(plan.deaths) != set(known):
            wrong = (
                f"each of the agents {known} is in slots or in deaths and at least one in slots, found slots "
                f"{list(plan.slots)} and deaths {list(plan.deaths)}"
            )
        elif plan.elite not in known:
            wrong = f"the elite is one of the agents {known}, found {plan.elite}"
        elif not set(parents) <= set(known):
            wrong = f"parents are among the agents {known}, found {parents}"
        elif donors - {None, *known}:
            wrong = f"hyperparameters_from is one of the agents {known} or None"
        elif standing.best is None and len(parents) < len(children):  # some birth is from_best
            wrong = "from_best needs standing.best, which is None"
        if wrong:
            raise ConfigError(f"{self.name}: in a plan, {wrong}")
        return plan


def custom_selection(section: SelectionConfig, *, allow_code: bool) -> SelectionStrategy | None:
    """Return the custom strategy that a configuration names, made with ``selection_strategy.params``; None for ours."""
    name, params = section.strategy, section.params or {}
    if not names_code(name):
        return None
    strategy = load_code(_WHERE, name, allowed=allow_code)
    with reported(f"{_WHERE}={shown(name)} cannot be made with selection_strategy.params={shown(params)}"):
        inner = strategy(**params)
    if not callable(getattr(inner, "plan", None)):
        raise ConfigError(
            f"{_WHERE}={shown(name)}: expected a class with a method plan(fitness, generation, seed, next_index, "
            f"standing), found {shown(inner)}"
        )
    return CustomSelection(name, inner)
