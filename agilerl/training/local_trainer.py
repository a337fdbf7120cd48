"""LocalTrainer: a run from Python, by AgileRL's name for it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from agilerl.checks.arguments import Accelerator, Location, Name, checked
from agilerl.config.manifest import config_of, load_manifest
from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError, plain_warnings
from agilerl.training.given import in_manifest

if TYPE_CHECKING:
    from agilerl.training.setup import Session

_OF_NETWORK = ("pretrained_model_name_or_path", "max_context_length", "lora_config")
"""Settings of the base model that a section ``algorithm`` may hold in Python."""


class LocalTrainer:
    """A manifest in Python: its sections as mappings, and ``train`` in place of ``agilerl train``.

    ``algorithm`` is a name or a section, ``environment`` a task (``reasoning_gym:gcd``), an environment's id or a
    section; the others are sections of :doc:`docs/manifest.md`. ``dataset`` and ``reward`` are rows and graders of this
    program, as in :func:`agilerl.train`. The search is off unless ``hpo=True`` or a section ``mutation`` or
    ``selection_strategy`` asks for it. ``resume_from_checkpoint`` is the directory of an unfinished run, which is then
    resumed with its own settings and rows; every agent starts from the adapter of the checkpoint ``load_weights_from``,
    which is also its reference. Raises ConfigError for every wrong setting.
    """

    @checked
    def __init__(
        self,
        algorithm: Name | Mapping[str, Any],
        environment: Name | Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        mutation: Mapping[str, Any] | None = None,
        selection_strategy: Mapping[str, Any] | None = None,
        *,
        dataset: Any = None,
        reward: Any = None,
        network: Mapping[str, Any] | None = None,
        hpo: bool = False,
        resume_from_checkpoint: Location | None = None,
        load_weights_from: Location | None = None,
        device: Name = "cpu",
        accelerator: Accelerator | None = None,
    ) -> None:
        section = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
        base = dict(network or {}) | {name: section.pop(name) for name in _OF_NETWORK if name in section}
        if load_weights_from is not None:
            base["adapter"] = _adapter(load_weights_from)
        given, self._rows = in_manifest(dataset, reward, environment)
        if isinstance(environment, str):
            is_task = environment.startswith("reasoning_gym:")
            environment = {"task": environment} if is_task else {"env_type": "multiturn", "env_id": environment}
        sections = {
            "algorithm": section,
            "environment": environment if not given else {**(environment or {}), **given},
            "training": {"device": device, **(training or {})},
            "network": base,
            "mutation": mutation,
            "selection_strategy": selection_strategy,
        }
        if not hpo and mutation is None and selection_strategy is None:
            sections["selection_strategy"] = {"name": "none"}
        given_sections = {name: section for name, section in sections.items() if section is not None}
        self._begin(config_of(given_sections), resume_from_checkpoint, accelerator)

    @classmethod
    @checked
    def from_manifest(
        cls,
        manifest: Location | Mapping[str, Any],
        *,
        resume_from_checkpoint: Location | None = None,
        load_weights_from: Location | None = None,
        device: Name | None = None,
        accelerator: Accelerator | None = None,
    ) -> Self:
        """Make a trainer from a manifest: a YAML file, or what one holds."""
        adapter = None if load_weights_from is None else _adapter(load_weights_from)
        settings = {"training.device": device, "network.adapter": adapter}
        overrides = [(name, value) for name, value in settings.items() if value is not None]
        trainer = cls.__new__(cls)
        trainer._rows = None
        if isinstance(manifest, Mapping):
            config = config_of(manifest, overrides)
        else:
            config = load_manifest(Path(manifest), overrides)
        trainer._begin(config, resume_from_checkpoint, accelerator)
        return trainer

    def _begin(self, config: RunConfig, resume_from: Any, accelerator: Any) -> None:
        if getattr(accelerator, "num_processes", 1) > 1:
            raise ConfigError(
                f"LocalTrainer trains in one process, found an accelerator of {accelerator.num_processes}; start "
                "several with `accelerate launch -m agilerl.cli train MANIFEST` (docs/distributed.md)"
            )
        from agilerl.envs.upstream import check_task
        from agilerl.training.resolved import resolve

        resolve(config)  # a wrong setting is reported at once, not by train()
        check_task(config.environment)
        self.config = config
        self.resume_from_checkpoint = None if resume_from is None else Path(resume_from)
        self.out: Path | None = None
        """The run directory, once ``train`` was called."""
        self.session: Session | None = None
        """The objects of the run, once ``train`` was called: ``session.population``, ``session.task``."""

    @property
    def algorithm_spec(self) -> SimpleNamespace:
        """The section ``algorithm`` of the settings: ``algorithm_spec.name``."""
        return SimpleNamespace(**self.config.algorithm)

    @property
    def env(self) -> Any:
        """The task (or environment) of the run; ``sample_eval_prompts`` takes it."""
        return self._started().task

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the run."""
        return self._started().population.tokenizer

    def _started(self) -> "Session":
        if self.session is None:
            raise ConfigError("the task and the tokenizer are loaded by train(); call it first")
        return self.session

    @checked
    @plain_warnings()
    def train(
        self,
        *,
        out: Location | None = None,
        save_elite: bool | None = None,
        elite_path: Location | None = None,
        wb: bool = False,
        tensorboard: bool = False,
        tensorboard_log_dir: Location | None = None,
        wandb_api_key: str | None = None,
        wandb_kwargs: Mapping[str, Any] | None = None,
        verbose: bool = True,
        allow_code: bool = False,
        consumers: Sequence[Callable[..., Any]] = (),
    ) -> tuple[list[Any], list[float]]:
        """Train to the end; return the last population and the fitness of each of its agents.

        ``out`` is the run directory, by default ``runs/<task>-<time>``; the elite is in ``out/elite``, and also in
        ``elite_path`` if one is given. ``wb`` and ``tensorboard`` add to the trackers of the settings.
        ``allow_code`` runs code that the settings name. ``consumers`` are called with every event of the run.
        """
        from agilerl.algorithms.codec import save_llm_checkpoint
        from agilerl.training.loops import LoopOptions, announce, trackers
        from agilerl.training.run import reopen, start

        options = LoopOptions(
            wb=wb,
            tensorboard=tensorboard,
            tensorboard_log_dir=tensorboard_log_dir,
            wandb_api_key=wandb_api_key,
            wandb_kwargs=wandb_kwargs,
        )
        wanted = trackers(options)
        if self.resume_from_checkpoint is None:
            directory = None if out is None else Path(out)
            opened = start(self.config, directory, self._rows, allow_code=allow_code, trackers=wanted)
        else:
            opened = reopen(self.resume_from_checkpoint, report=print, allow_code=allow_code, trackers=wanted)
        with opened as run:
            self.session, self.out, self.config, root = run.session, run.root, run.session.config, run.root
            for event in run.events:
                for follow in (*consumers, *([announce] if verbose else [])):
                    follow(event)
        agents = run.session.population.agents
        if elite_path is not None and save_elite is not False and (root / "elite" / "agent.json").exists():
            elite = type(agents[0]).load(root / "elite", runtime=agents[0].runtime)
            save_llm_checkpoint(elite, elite_path, overwrite=True)
            # Its adapter takes a slot on the agents' base.
            elite.clean_up()
        return list(agents), [agent.fitness[-1] if agent.fitness else float("nan") for agent in agents]


def _adapter(path: Location) -> str:
    """Return the adapter's folder of a checkpoint, or of a run's elite."""
    inside = Path(path) / "actor"
    return str(inside if inside.is_dir() else path)
