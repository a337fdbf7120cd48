"""The settings of a command about an adapter: those of its run, with overrides, less all that is about training.

A run may come from a stranger. Nothing in it runs code, is read from elsewhere on this machine, or makes this machine
contact an address, unless the user says so.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.checks.arguments import nearest, shown
from agilerl.cli.running import configuration, manifests_in
from agilerl.config.base_model import NetworkConfig, with_layers_by_weight
from agilerl.config.environment import EnvironmentConfig
from agilerl.config.manifest import config_of_run, key_of
from agilerl.config.named_files import check_unchanged, named_files
from agilerl.config.run import RunConfig
from agilerl.errors import CheckpointError, ConfigError
from agilerl.runs import find_adapter, read_run
from agilerl.runs.directory import ADAPTER_CONFIG, run_date
from agilerl.runs.strict_json import read_json
from agilerl.safety.addresses import addresses_in

_ALGORITHM = ("name", "max_output_tokens", "max_model_len")
_TRAINING = (
    *("seed", "eval_max_new_tokens", "threads", "device", "dtype"),
    *("max_tokens_in_flight", "max_rows_in_flight", "max_error_rate"),
)
_OF_TRAINING = {"network": ("adapter", "lora_config"), "environment": ("data_batch_size_per_gpu", "eval_prompts")}
"""Settings of these two sections that an evaluation does not take from the command line."""
_WITHOUT = ("mutation", "selection_strategy", "teacher", "distributed")
"""Sections that are all about training."""
_OF_SAMPLING = ("use_vllm", "vllm_config")
_SHAPE = ("r", "lora_alpha", "use_rslora", "target_modules", "alora_invocation_tokens")
_ALL = 100_000
"""The largest test that there is."""
_CONTACTS = ("judge", "pairwise_judge")
"""Graders that contact an address although their settings need not name one."""


@dataclass(frozen=True)
class Subject:
    """An adapter, and what its run says of it."""

    folder: Path
    """The PEFT folder."""
    run: Path | None
    """The directory of its run; None: the adapter lies in none."""
    config: RunConfig
    """The settings to load and to examine it with."""
    all_rows: bool = False
    """Whether the test is every row of ``environment.dataset``: rows that the user named for it."""

    @property
    def base(self) -> str:
        """The base's name."""
        return self.config.network.pretrained_model_name_or_path


def subject(
    path: Path, arguments: Sequence[str] = (), *, examined: bool, loaded: bool = True, allow_addresses: bool = False
) -> Subject:
    """Return the adapter that a path stands for with its settings; does not import torch.

    ``arguments`` are overrides ``section.key=value`` and, for an adapter without a run, a manifest. ``examined``: a
    task is needed, so its names, files and addresses are checked too. ``loaded``: the files that the run names for its
    network are read, so they must be those that it recorded. Raises CheckpointError for a path that is neither a run
    nor an adapter, and ConfigError for wrong settings, or for an address that the run names.
    """
    folder, run = find_adapter(path)
    manifests = manifests_in(arguments)
    overrides = [argument for argument in arguments if argument not in manifests]
    # A dict, and not a set, keeps their order: the error names the first wrong one.
    keys = {key_of(override): None for override in overrides}
    _check_keys(keys)
    all_rows = "environment.dataset" in keys and "environment.dataset_test" not in keys
    # Rows that the user names are all asked, so the test is as large as it can be.
    if all_rows and "environment.test_prompts" not in keys:
        overrides.append(f"environment.test_prompts={_ALL}")
    if run is not None:
        if manifests:
            raise ConfigError(
                f"{shown(str(path))} is evaluated with the settings of its run, found the manifest "
                f"{shown(manifests[0])} as well; give settings as section.key=value"
            )
        info = read_run(run)
        settings, given_settings = info["config"], info.get("given") or info["config"]
        algorithm = {key: settings["algorithm"].get(key) for key in _ALGORITHM[:2]}
        document = _drop_training(settings, {**given_settings.get("algorithm", {}), **algorithm})
        # As the run began and with the user's changes: files that both name must be those that the run recorded.
        begun, config = (config_of_run(document, changes) for changes in ((), overrides))
        config = config.dated(run_date(info))
        read, at_first = config, begun
        if not examined:  # of files those of the network alone
            read, at_first = (c.replaced(environment=EnvironmentConfig()) for c in (config, begun))
        if loaded:
            check_unchanged(named_files(read), info.get("files", {}), run, begun=named_files(at_first))
        if examined:
            _check_unseen(config, begun, named="environment.dataset" in keys)
            if not allow_addresses:
                _check_addresses(config.environment, config.network, config.typed_addresses)
    else:
        if examined and not manifests and not any(o.startswith("environment.") for o in overrides):
            raise ConfigError(
                f"{shown(str(path))} belongs to no run that says what it was trained on; name a task or rows, such as "
                "environment.task=reasoning_gym:chain_sum, or give a manifest"
            )
        config = configuration([*manifests, *overrides])
    given_base = run is not None or "network.pretrained_model_name_or_path" in keys
    config = _about(folder, config, given_base=given_base, examined=examined)
    if examined:
        from agilerl.envs.upstream import check_task

        check_task(config.environment)
    return Subject(folder, run, config, all_rows)


def _check_keys(keys: Iterable[str]) -> None:
    """Raise ConfigError for settings that an adapter that is trained no further does not have."""
    used = {**dict.fromkeys(_WITHOUT, ()), "algorithm": _ALGORITHM[1:], "training": _TRAINING}
    for key in keys:
        # The name is empty if a section is given as a whole.
        section, name = [*key.split("."), ""][:2]
        names = used.get(section)
        if name in _OF_TRAINING.get(section, ()) or (names is not None and name not in names):
            hint = f"; {nearest(name, names)}" if names else ""
            raise ConfigError(f"{shown(key)} is a setting of training, which an evaluation does not have{hint}")


def _drop_training(document: Mapping[str, Any], algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an evaluation takes from those of a run or a manifest."""
    network, training = document.get("network", {}), document.get("training", {})
    candidates = document.get("selection_strategy", {}).get("candidates", 1)  # on which the panels depend
    return {
        "environment": dict(document.get("environment", {})),
        "network": {k: v for k, v in network.items() if k not in _OF_TRAINING["network"]},
        "algorithm": {k: v for k, v in algorithm.items() if k in _ALGORITHM and v is not None},
        "training": {k: v for k, v in training.items() if k in _TRAINING and v is not None},
        "selection_strategy": {"name": "none", "candidates": candidates},
    }


def _about(folder: Path, config: RunConfig, *, given_base: bool, examined: bool) -> RunConfig:
    """Return the settings of a population of one agent that starts from an adapter, without those of training.

    Without a ``given_base`` the base is the one that the adapter names.
    """
    adapter, agent = with_layers_by_weight(read_json(folder / ADAPTER_CONFIG)), _agent_json(folder)
    document = _drop_training(config.set_values("json"), config.algorithm)
    document["network"] |= {
        "adapter": str(folder.absolute()),
        "lora_config": {key: adapter[key] for key in _SHAPE if key in adapter},
    }
    if not given_base:
        base = agent["base"] if agent else adapter.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ConfigError(
                f"{shown(str(folder / ADAPTER_CONFIG))} does not name a base; give "
                "network.pretrained_model_name_or_path="
            )
        document["network"]["pretrained_model_name_or_path"] = base
    for key in () if examined else _OF_SAMPLING:
        document["network"].pop(key, None)
    document["algorithm"]["name"] = str(agent["algorithm"] if agent else config.algorithm["name"])
    document["training"] |= {"pop_size": 1, "init": "same"}
    document["selection_strategy"]["candidates"] = config.candidates
    complete = RunConfig.from_dict(document).typed_with(config.typed_addresses)
    return complete if config.date is None else complete.dated(config.date)


def _agent_json(folder: Path) -> dict[str, Any] | None:
    """Return what stands beside an adapter that an agent wrote."""
    file = next((file for parent in (folder, folder.parent) if (file := parent / "agent.json").is_file()), None)
    values = None if file is None else read_json(file)
    if values is not None and not all(isinstance(values.get(key), str) for key in ("algorithm", "base")):
        raise CheckpointError(f"{file} does not name the algorithm and the base of an agent; the file is damaged")
    return values


def _check_unseen(config: RunConfig, begun: RunConfig, *, named: bool) -> None:
    """Raise ConfigError if the test would have rows that the run trained on; warn if it may have such questions.

    ``named``: the user named the rows, all of which are then the test.
    """
    e, before = config.environment, begun.environment
    panels = [(c.training.seed, c.environment.test_prompts, c.environment.bad_rows) for c in (config, begun)]
    if e.dataset is not None and e.dataset_test is None:
        trained = {part.path for part in before.dataset or ()} & {part.path for part in e.dataset}
        if trained and named:
            raise ConfigError(
                f"environment.dataset names {shown(min(trained))}, whose rows the run was trained on; leave it out to "
                "ask the rows that the run kept for its test, or name rows that it has not seen"
            )
        if trained and (panels[0] != panels[1] or e.dataset != before.dataset):
            raise ConfigError(
                "with another training.seed, environment.test_prompts, bad_rows or mixture the test would have rows "
                "that the run trained on; leave them as they were, or give other rows: environment.dataset_test=FILE"
            )
    elif e.dataset is None and before.holdout == "any" and (e, panels[0]) != (before, panels[1]):
        warnings.warn(
            "the run trained on all questions but those of its own panels (environment.holdout=any), so it may have "
            "seen some of these",
            stacklevel=2,
        )


def _check_addresses(e: EnvironmentConfig, network: NetworkConfig, typed: Collection[str]) -> None:
    """Raise ConfigError if an evaluation would contact an address that the run names and the user did not type."""
    sampling = network.vllm_config.model_dump(mode="json") if network.vllm_config else {}
    named = [*addresses_in(e.model_dump(mode="json")), *addresses_in(sampling)]
    env_id = e.env_id or ""
    named += [env_id] if env_id.startswith("openenv:") else []
    # A judge whose settings name no address has a default one.
    named += [f"that of its grader {g.called}" for g in e.graders or () if g.name in _CONTACTS and not named]
    unknown = [address for address in named if address not in typed]
    if unknown:
        raise ConfigError(
            f"the settings of this run lead to an address, {shown(unknown[0])}; if you trust it, allow it with "
            "--allow-addresses"
        )
