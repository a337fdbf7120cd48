"""Selection strategies of the user's: ``selection_strategy.name: strategy.py:MySelection``."""

from collections.abc import Mapping
from typing import Any

from agilerl.arguments import shown
from agilerl.config.own_code import load_code, names_code
from agilerl.config.run import RunConfig
from agilerl.custom_code import contained
from agilerl.errors import AgileRLError, ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.selection import AT_THE_START, Plan, SelectionStrategy, Standing

_WHERE = "selection_strategy.name"


class CustomSelection:
    """Calls a strategy of the user's, and checks that what it returns is a plan for these agents."""

    def __init__(self, name: str, inner: Any) -> None:
        self.name, self.inner = name, inner

    def plan(
        self,
        fitness: Mapping[int, Fitness],
        generation: int,
        seed: int,
        next_index: int,
        standing: Standing = AT_THE_START,
    ) -> Plan:
        """Return its plan; raises ConfigError for what it raises, and for a plan that does not fit the agents."""
        try:
            with contained():
                plan = self.inner.plan(dict(fitness), generation, seed, next_index, standing)
        except KeyboardInterrupt:
            raise
        except AgileRLError as error:
            raise ConfigError(f"{_WHERE}={shown(self.name)}: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{_WHERE}={shown(self.name)} failed in plan(): {type(error).__name__}: {error}"
            ) from error
        if not isinstance(plan, Plan):
            raise ConfigError(
                f"{_WHERE}={shown(self.name)}: expected plan() to return an agilerl.hpo.selection.Plan, found "
                f"{type(plan).__name__}"
            )
        self._check(plan, fitness, next_index, standing)
        return plan

    def _check(self, plan: Plan, fitness: Mapping[int, Fitness], next_index: int, standing: Standing) -> None:
        children = [birth.child for birth in plan.births]
        wrong = ""
        if children != list(range(next_index, next_index + len(children))):
            wrong = f"children get the indices from next_index={next_index} on, found {children}"
        elif not plan.slots or (set(plan.slots) - set(children)) | set(plan.deaths) != set(fitness):
            wrong = (
                f"each of the agents {list(fitness)} is in slots or in deaths and at least one in slots, found slots "
                f"{list(plan.slots)} and deaths {list(plan.deaths)}"
            )
        elif plan.elite not in fitness:
            wrong = f"the elite is one of the agents {list(fitness)}, found {plan.elite}"
        elif any(birth.parent not in fitness and not birth.from_best for birth in plan.births):
            wrong = f"parents are among the agents {list(fitness)}, found {[birth.parent for birth in plan.births]}"
        elif any(birth.hyperparameters_from not in {None, *fitness} for birth in plan.births):
            wrong = f"hyperparameters_from is one of the agents {list(fitness)} or None"
        elif standing.best is None and any(birth.from_best for birth in plan.births):
            wrong = "from_best needs standing.best, which is None"
        if wrong:
            raise ConfigError(f"{_WHERE}={shown(self.name)}: in a plan, {wrong}")


def selection_strategy(config: RunConfig, *, allow_code: bool) -> SelectionStrategy:
    """Return the strategy of the user's that a configuration names, made with ``selection_strategy.params``.

    Raises ConfigError if code is not allowed, cannot be loaded, refuses the parameters, or has no ``plan``.
    """
    section = config.selection_strategy
    assert names_code(section.strategy)
    found = load_code(_WHERE, section.strategy, allowed=allow_code)
    try:
        with contained():
            inner = found(**section.params or {})
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise ConfigError(
            f"{_WHERE}={shown(section.strategy)} cannot be made with selection_strategy.params="
            f"{shown(section.params or {})}: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(inner, "plan", None)):
        raise ConfigError(
            f"{_WHERE}={shown(section.strategy)}: expected a class with a method plan(fitness, generation, seed, "
            f"next_index, standing), found {shown(inner)}"
        )
    return CustomSelection(section.strategy, inner)
