"""Keys of AgileRL's manifests that have another name here, or no meaning: mapped, or answered with one line."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

from agilerl.checks.arguments import shown
from agilerl.config.base_model import SharedOptions
from agilerl.config.manifest import LEARNS_FROM
from agilerl.errors import ConfigError

Section = dict[str, Any]

_ALGORITHMS = {"LLMPPO": "PPO", "LLMREINFORCE": "REINFORCE"}
_DOCUMENTED = {
    "tournament_selection": "selection_strategy",
    "algorithm.action_granularity": "algorithm.advantage_granularity",
    "algorithm.chunk_rows": "network.fused_logprobs_chunk_rows",
    "algorithm.model_config": "network.config_overrides",
    "algorithm.quantization": "network.quantization_config",
    "environment.env_config": "environment.params",
    "environment.entrypoint": "environment.env_id",
    "network.lora_config.lora_r": "network.lora_config.r",
    "network.max_context_length": "algorithm.max_model_len",
    "training.max_wall_seconds": "training.max_seconds",
    "training.population_size": "training.pop_size",
}
"""Keys that AgileRL documents, with their name here."""
_EARLIER: dict[str, str] = {
    **{f"algorithm.{name}": f"network.{name}" for name in SharedOptions.model_fields},
    "algorithm.fused_loss_chunk_rows": "network.fused_logprobs_chunk_rows",
    "network.quantization": "network.quantization_config",
    "sharing.distillation": "teacher.weight",
    "sharing.teacher": "teacher.adapter",
    **{f"sharing.teacher_{name}": f"teacher.{name}" for name in ("url", "model", "api", "timeout")},
    "distributed.cpus_per_island": "distributed.cpus_per_worker",
    "distributed.gpus_per_island": "distributed.gpus_per_worker",
}
"""Keys that had another name in earlier manifests of this package, with their name of today."""
_OFF = ("new_layer", "params_mut", "act_mut")
"""Mutations that AgileRL's manifests turn off with 0, and that there are none of here."""
_IDLE = {
    "algorithm.use_liger_loss": "there is one fused loss, which is always used",
    "algorithm.reduce_memory_peak": "a pass holds what memory holds; algorithm.micro_batch_size_per_gpu bounds it",
    "training.eval_loop": "an exam is environment.eval_prompts questions, each answered training.eval_samples times",
    "environment.max_reward": "rewards are logged as they are, and nothing stops at a perfect one",
    "environment.train_test_split": "exam and test take environment.eval_prompts and environment.test_prompts rows",
    "network.lora_config.modules_to_save": "PPO's value head is part of its critic, and nothing else is trained",
}
"""Keys without a meaning here, with the reason."""
_IMPLIED = {
    "algorithm.calc_position_embeddings": (True,),
    "network.lora_config.task_type": ("CAUSAL_LM",),
    "network.lora_config.bias": ("none",),
}
"""Keys that say how it works anyway, with the value that does."""
_PREFIXES = ("gem:", "textarena:", "openenv:", "agilerl/")


def translated(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest under this package's keys; a key that has no meaning here is answered with one warning.

    Raises ConfigError for a key that would need an action, and for one that is there under both of its names.
    """
    if "INIT_HP" in manifest:
        raise ConfigError(
            "INIT_HP and MUTATION_PARAMS are settings of a Python program, found them as sections of a manifest; pass "
            "them to create_population, or write the sections algorithm, training and mutation"
        )
    values, sentences = renamed(manifest)
    for sentence in sentences:
        warnings.warn(sentence, stacklevel=4)
    for path, accepted in _IMPLIED.items():
        given = _take(values, path)
        if given is not _NOTHING and given not in accepted:
            raise ConfigError(f"{path}={shown(given)} is not available; expected {shown(accepted[0])}, or leave it out")
    for step in (_algorithm, _environment, _training, _selection, _mutation):
        step(values)
    return values


def renamed(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of settings under today's keys, and a sentence for each that had another name or has no meaning.

    A null under another name is left out: it stands for the default. Raises ConfigError for a key that is there under
    two of its names, with different values.
    """
    values: Section = _copied(settings)
    # The size of what params_mut turns on. Without it nothing may be left of its section.
    if _take(values, "mutation.mutation_sd") is not _NOTHING and not values["mutation"]:
        del values["mutation"]
    chances = _section(values, "mutation.probabilities")
    for name in _OFF:
        if chances.get(name) in (0, None):
            chances.pop(name, None)
    sentences = []
    for old, new in (_DOCUMENTED | _EARLIER | dict.fromkeys(_IDLE)).items():
        if (value := _take(values, old)) is _NOTHING:
            continue
        if new is None:
            sentences.append(f"{old} has no meaning here: {_IDLE[old]}")
        elif value is not None:
            home, name = _home(values, new)
            _put(home, name, value, old)
            if old in _EARLIER:
                sentences.append(f"{old} is called {new} now; it was read as that")
        # A section of which nothing is left.
        parent = old.rpartition(".")[0]
        while parent and not _section(values, parent):
            _take(values, parent)
            parent = parent.rpartition(".")[0]
    return values, sentences


def _home(values: Section, path: str) -> tuple[Section, str]:
    """Return the section that a key belongs to, made if it is not there, and the key's name in it."""
    *parents, name = path.split(".")
    for parent in parents:
        values[parent] = {} if values.get(parent) is None else values[parent]
        values = values[parent]
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected {parent} to be a mapping of settings, found {shown(values)}")
    return values, name


_NOTHING = object()


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _section(values: Section, path: str) -> Section:
    """Return a section; an empty one, which is no part of the manifest, if there is none or something else."""
    for name in filter(None, path.split(".")):
        inner = values.get(name)
        values = inner if isinstance(inner, dict) else {}
    return values


def _take(values: Section, path: str) -> Any:
    parent, _, key = path.rpartition(".")
    return _section(values, parent).pop(key, _NOTHING)


def _put(section: Section, key: str, value: Any, alias: str) -> None:
    if section.get(key) not in (None, value):
        raise ConfigError(f"{alias} and {key} mean the same but differ; give one of them")
    section[key] = value


def _algorithm(values: Section) -> None:
    section = _section(values, "algorithm")
    name = section.get("name")
    if isinstance(name, str):
        section["name"] = _ALGORITHMS.get(name, name)
    network = _section(values, "network")
    if network.get("quantization_config") == "none":
        network.pop("quantization_config")


def _environment(values: Section) -> None:
    section, name = _section(values, "environment"), str(_section(values, "algorithm").get("name"))
    # Where questions come from
    if "env_name" in section:
        known = str(section.pop("env_name"))
        # A name alone is one of GEM's.
        _put(section, "env_id", known if known.startswith(_PREFIXES) else f"gem:{known}", "environment.env_name")
    # What is learned from
    if "env_type" not in section and name in LEARNS_FROM:
        section["env_type"] = LEARNS_FROM[name]
    elif "env_type" not in section and "env_id" in section:
        section["env_type"] = "multiturn"
    # Graders of the user's
    if "reward_file_path" in section or "reward_fn_name" in section:
        path, function = section.pop("reward_file_path", None), section.pop("reward_fn_name", None)
        if not isinstance(path, str) or not isinstance(function, str):
            raise ConfigError("environment.reward_file_path and environment.reward_fn_name belong together; give both")
        _put(section, "graders", [{"name": f"{path}:{function}"}], "environment.reward_file_path")
    # Prompts and columns
    if "prompt_template" in section:
        _put(section, "conversation_template", _messages(section.pop("prompt_template")), "environment.prompt_template")
    if "response_column" in section:
        column, columns = section.pop("response_column"), section.get("columns") or {}
        if not isinstance(columns, dict):
            return
        if column != "completion":
            _put(columns, "completion", column, "environment.response_column")
            section["columns"] = columns


def _messages(template: Any) -> Any:
    """Return ``{system_0: text, user_1: text}`` as a list of messages, in the order of the numbers; lists stay."""
    if not isinstance(template, Mapping):
        return template
    messages = []
    for key, content in template.items():
        match = re.fullmatch(r"(system|user|assistant)(?:_(\d+))?", str(key))
        if match is None:
            raise ConfigError(
                "environment.prompt_template: expected keys such as system_0, user_1 and assistant_2, found "
                f"{shown(key)}"
            )
        messages.append((int(match[2] or 0), {"role": match[1], "content": content}))
    # Stable, so that messages without numbers keep their order.
    return [message for _, message in sorted(messages, key=lambda numbered: numbered[0])]


def _training(values: Section) -> None:
    if not _section(values, "training").pop("hpo", True):
        values["selection_strategy"] = {"name": "none"}
        values.pop("mutation", None)


def _selection(values: Section) -> None:
    section, size = _section(values, "selection_strategy"), _section(values, "training").get("pop_size")
    wanted = section.get("tournament_size")
    if isinstance(wanted, int) and size == 1 and wanted > 1:
        section["tournament_size"] = 1
        warnings.warn(
            f"selection_strategy.tournament_size={wanted} has no meaning here: training.pop_size is 1", stacklevel=4
        )


def _mutation(values: Section) -> None:
    genes = _section(values, "mutation.rl_hp_selection")
    for name, gene in list(genes.items()):
        if isinstance(gene, Mapping) and gene.get("min") is not None and gene.get("min") == gene.get("max"):
            genes.pop(name)
            warnings.warn(
                f"mutation.rl_hp_selection.{name} has no meaning here: its range holds one value, {gene['min']}",
                stacklevel=4,
            )
