"""Documented names that mean little for an agent that is one adapter slot, kept for compatibility in this one file."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from agilerl.algorithms.config import CosineLRScheduleConfig, lr_factor
from agilerl.arguments import checked, taken
from agilerl.config.base_model import SharedOptions, split_options
from agilerl.errors import ConfigError
from agilerl.models.slots import Route
from agilerl.runtime import Runtime
from agilerl.validation import validated

# Accepted with exactly these values, because that is how the shared base works already.
_IMPLIED: dict[str, tuple[Any, ...]] = {
    "wrap": (True, False),
    "clone": (False, True),
    "calc_position_embeddings": (True,),
    "reduce_memory_peak": (True, False, None),
}


def _with_options(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of an agent with the options of the shared base, each once."""
    parameters = dict(signature.parameters)
    for name, field in SharedOptions.model_fields.items():
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
    return signature.replace(parameters=sorted(parameters.values(), key=lambda p: p.kind))


class DocumentedSurface:
    """Methods of the documented interface whose job the shared base has taken over."""

    runtime: Runtime
    slot: int
    reference_slot: int | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _with_options(inspect.signature(cls))  # type: ignore[attr-defined]

    @staticmethod
    def _split_documented(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], SharedOptions]:
        """Take out the options of the shared base, and keywords that need no action here.

        Raises ConfigError for an option that is wrong, and for a value that would need an action.
        """
        rest, options = split_options(arguments)
        for name, accepted in _IMPLIED.items():
            if name in rest:
                value = rest.pop(name)
                if not any(value is a or value == a for a in accepted):
                    raise ConfigError(
                        f"{name}={value!r} is not available with the shared base; expected "
                        f"{' or '.join(map(repr, accepted))}"
                    )
        return rest, validated(SharedOptions, options)

    def get_lr_names(self) -> list[str]:
        """Return the names of the learning rates."""
        return ["lr"]

    def get_policy(self) -> Any:
        """Return the base model; an agent's own adapter is active inside its calls only."""
        return self.runtime.base.model

    @checked
    def use_adapter(self, adapter_name: str) -> None:
        """Let direct calls of the base model use this agent's ``actor`` or ``reference`` adapter from here on."""
        self.runtime.store.route = self._route_of(adapter_name)

    @contextmanager
    @checked
    def select_adapter(self, adapter_name: str) -> Iterator[None]:
        """Let direct calls of the base model use an adapter while the context is open."""
        with self.runtime.store.routed(self._route_of(adapter_name)):
            yield

    def _route_of(self, adapter_name: str) -> Route | None:
        slots = {"actor": self.slot, "reference": self.reference_slot}
        if adapter_name not in slots:
            raise ConfigError(f"expected the adapter 'actor' or 'reference', found {adapter_name!r}")
        slot = slots[adapter_name]
        return None if slot is None else Route((slot,), None)

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, Any]:
        """Return what evolution acts on: the adapter's slot and, unless ``networks_only``, the genes' values."""
        found: dict[str, Any] = {"actor": self.slot}
        return found if networks_only else {**found, **self.hyperparameters}  # type: ignore[attr-defined]

    @staticmethod
    def inspect_attributes(agent: Any, input_args_only: bool = False) -> dict[str, Any]:
        """Return the hyperparameters and, unless ``input_args_only``, the counters."""
        found: dict[str, Any] = agent.config.model_dump()
        names = ("index", "mut", "steps", "scores", "fitness", "position", "updates")
        return found if input_args_only else {**found, **{name: getattr(agent, name) for name in names}}

    @staticmethod
    def copy_attributes(agent: Any, clone: Any) -> Any:
        """Copy hyperparameters and counters to a clone."""
        clone.config = agent.config.model_copy(deep=True)
        for name in ("mut", "steps", "position", "updates"):
            setattr(clone, name, getattr(agent, name))
        clone.scores, clone.fitness = list(agent.scores), list(agent.fitness)
        return clone

    def reinit_optimizers(self, optimizer: Any = None) -> None:
        """Forget Adam's moments and step counter."""
        self.runtime.store.clear_moments(self.slot)

    @staticmethod
    @checked
    def update_lr(
        optimizer: torch.optim.Optimizer,
        lr: float | tuple[float, float],
        accelerator: Any = None,
        scheduler_config: CosineLRScheduleConfig | None = None,
    ) -> tuple[Any, LambdaLR | None]:
        """Set the rates of a torch optimizer's groups, with a schedule if one is given; returns accelerator, schedule.

        An agent needs no such call: its rate is its hyperparameter, and assigning that takes effect at the next step.
        """
        rates = lr if isinstance(lr, tuple) else (lr,) * len(optimizer.param_groups)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        if scheduler_config is None:
            return accelerator, None
        return accelerator, LambdaLR(optimizer, lambda update: lr_factor(scheduler_config, update))

    def recompile(self) -> None:
        """Do nothing: ``torch_compiler`` compiles the layers of the base, which no mutation changes."""

    def set_training_mode(self, training: bool) -> None:
        """Do nothing: a frozen base without dropout computes the same in both modes."""

    def to_device(self, *experiences: Tensor) -> tuple[Tensor, ...]:
        """Return tensors on the device of the base."""
        return tuple(
            taken(Tensor, e, "to_device", f"argument {place}").to(self.runtime.base.device)
            for place, e in enumerate(experiences)
        )

    def wrap_models(self) -> None:
        """Do nothing: the base is wrapped once, by its runtime."""

    def unwrap_models(self) -> None:
        """Do nothing: see :meth:`wrap_models`."""

    def preprocess_observation(self, observation: Any) -> Any:
        """Return the observation as it is."""
        return observation

    def register_network_group(self, group: Any) -> None:
        """Do nothing: an agent has one network, its adapter."""

    @staticmethod
    def get_state_dim(observation_space: Any) -> tuple[int, ...]:
        """Return the shape of a gymnasium space (empty for text)."""
        return tuple(getattr(observation_space, "shape", None) or ())

    @staticmethod
    def get_action_dim(action_space: Any) -> tuple[int, ...]:
        """Return the shape of a gymnasium space (empty for text), or its size if it is discrete."""
        size = getattr(action_space, "n", None)
        return (
            (int(np.asarray(size).item()),) if size is not None else tuple(getattr(action_space, "shape", None) or ())
        )
