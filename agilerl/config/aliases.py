"""Keys of AgileRL's manifests that have another name here, or no meaning: mapped, or answered with one line."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

from agilerl.arguments import shown
from agilerl.errors import ConfigError

Section = dict[str, Any]

_ALGORITHMS = {"LLMPPO": "PPO", "LLMREINFORCE": "REINFORCE"}
LEARNS_FROM = {"SFT": "sft", "DPO": "preference", "KTO": "unpaired"}
"""``environment.env_type`` of the algorithms that learn from data."""
_SECTIONS = {"tournament_selection": "selection_strategy"}
_NAMES = {
    "algorithm": {"chunk_rows": "fused_logprobs_chunk_rows", "action_granularity": "advantage_granularity"},
    "training": {"max_wall_seconds": "max_seconds", "population_size": "pop_size"},
    "environment": {
        "env_config": "params",
        "rubric_file_path": "reward_file_path",
        "rubric_name": "reward_fn_name",
    },
    "network.lora_config": {"lora_r": "r"},
}
_IDLE = {
    "algorithm.reduce_memory_peak": "a pass holds what memory holds; algorithm.micro_batch_size_per_gpu bounds it",
    "training.eval_loop": "an exam is environment.eval_prompts questions, each answered training.eval_samples times",
    "environment.max_reward": "rewards are logged as they are, and nothing stops at a perfect one",
    "environment.train_test_split": "exam and test take environment.eval_prompts and environment.test_prompts rows",
    "environment.env_packages": "install packages before the run",
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
    values: dict[str, Any] = {}
    for name, section in manifest.items():
        known = _SECTIONS.get(name, name)
        _put(values, known, dict(section) if isinstance(section, Mapping) else section, name)
    for path in ("algorithm", "training", "environment", "network.lora_config"):
        _rename(values, path)
    for path, reason in _IDLE.items():
        if _take(values, path) is not _NOTHING:
            warnings.warn(f"{path} has no meaning here: {reason}", stacklevel=4)
    for path, accepted in _IMPLIED.items():
        found = _take(values, path)
        if found is not _NOTHING and found not in accepted:
            raise ConfigError(f"{path}={shown(found)} is not available; expected {shown(accepted[0])}, or leave it out")
    for step in (_algorithm, _environment, _training, _selection, _mutation):
        step(values)
    return values


def with_two_rates(values: Section) -> None:
    """Let ``lr`` stand for both learning rates of PPO, as a hyperparameter and as a gene."""
    algorithm = _section(values, "algorithm")
    if algorithm is None or algorithm.get("name") not in ("PPO", "LLMPPO"):
        return
    for section in (algorithm, _section(values, "mutation.rl_hp_selection")):
        if section is not None and "lr" in section:
            rate = section.pop("lr")
            for name in ("lr_actor", "lr_critic"):
                section.setdefault(name, rate)


_NOTHING = object()


def _section(values: Section, path: str) -> Section | None:
    """Return a section as a dict that may be changed; None if there is none, or something else in its place."""
    place: Any = values
    for name in path.split("."):
        if not isinstance(place.get(name), Mapping):
            return None
        place[name] = dict(place[name])
        place = place[name]
    return place  # type: ignore[no-any-return]


def _take(values: Section, path: str) -> Any:
    parent, _, key = path.rpartition(".")
    section = _section(values, parent)
    return _NOTHING if section is None else section.pop(key, _NOTHING)


def _put(section: Section, key: str, value: Any, said: str) -> None:
    if key in section and section[key] != value:
        raise ConfigError(f"{said} and {key} mean the same but differ; give one of them")
    section[key] = value


def _rename(values: Section, path: str) -> None:
    section = _section(values, path)
    for old, new in _NAMES[path].items() if section is not None else ():
        assert section is not None
        if old in section:
            _put(section, new, section.pop(old), f"{path}.{old}")


def _algorithm(values: Section) -> None:
    section = _section(values, "algorithm")
    if section is None:
        return
    name = section.get("name")
    if isinstance(name, str):
        section["name"] = _ALGORITHMS.get(name, name)
    if "quantization" in section:
        given = section.pop("quantization")
        if given not in (None, "none"):
            _put(section, "quantization_config", given, "algorithm.quantization")


def _environment(values: Section) -> None:
    section, algorithm = _section(values, "environment"), values.get("algorithm")
    name = str(algorithm.get("name")) if isinstance(algorithm, Mapping) else ""
    if section is None:
        return
    if "env_name" in section:
        known = str(section.pop("env_name"))
        _put(section, "env_id", known if known.startswith(_PREFIXES) else f"gem:{known}", "environment.env_name")
    _source(section)
    kind, objective = section.get("env_type"), section.pop("objective", None)
    if kind in ("rollout", "dataset"):
        section.pop("env_type")
    if objective is not None:
        if kind not in (None, "dataset") or objective not in ("sft", "preference"):
            raise ConfigError(
                "environment.objective: expected sft or preference, with env_type: dataset, found "
                f"{shown(objective)} with env_type: {shown(kind)}"
            )
        section["env_type"] = objective
    if "env_type" not in section and name in LEARNS_FROM:
        section["env_type"] = LEARNS_FROM[name]
    elif "env_type" not in section and "env_id" in section:
        section["env_type"] = "multiturn"
    if "env_id" not in section and section.get("max_turns") == 1:
        section.pop("max_turns")  # how 2.58 says that a rollout has one answer
    if section.get("chat_template_kwargs", _NOTHING) in ({}, None):
        section.pop("chat_template_kwargs")
    elif "chat_template_kwargs" in section and isinstance(values.setdefault("network", {}), Mapping):
        network = _section(values, "network")
        assert network is not None
        given = section.pop("chat_template_kwargs")
        _put(network, "chat_template_kwargs", given, "environment.chat_template_kwargs")
    if "reward_file_path" in section or "reward_fn_name" in section:
        path, function = section.pop("reward_file_path", None), section.pop("reward_fn_name", None)
        if not isinstance(path, str) or not isinstance(function, str):
            raise ConfigError("environment.reward_file_path and environment.reward_fn_name belong together; give both")
        _put(section, "graders", [{"name": f"{path}:{function}"}], "environment.reward_file_path")
    if "prompt_template" in section:
        _put(section, "conversation_template", _messages(section.pop("prompt_template")), "environment.prompt_template")
    if "response_column" in section:
        column, columns = section.pop("response_column"), section.get("columns") or {}
        if not isinstance(columns, Mapping):
            return
        columns = dict(columns)
        if column != "completion":
            _put(columns, "completion", column, "environment.response_column")
            section["columns"] = columns


def _source(section: Section) -> None:
    """Say where episodes come from as ``env_id``: an entry point, or the address of a server."""
    entrypoint, url = section.pop("entrypoint", None), section.pop("env_url", None)
    if entrypoint == "gem:make":
        params = dict(section.get("params") or {})
        if "env_id" not in params:
            raise ConfigError("environment.entrypoint='gem:make' needs environment.env_config.env_id, found none")
        _put(section, "env_id", f"gem:{params.pop('env_id')}", "environment.env_config.env_id")
        section["params"] = params
    elif entrypoint is not None:
        if not isinstance(entrypoint, str) or ":" not in entrypoint:
            raise ConfigError(
                f"environment.entrypoint: expected module:name or path.py:name, found {shown(entrypoint)}"
            )
        _put(section, "env_id", entrypoint, "environment.entrypoint")
    if url is not None:
        _put(section, "env_id", f"openenv:{url}", "environment.env_url")
    if "request_timeout_s" in section:
        _put(section, "step_timeout", section.pop("request_timeout_s") or None, "environment.request_timeout_s")


def _messages(template: Any) -> Any:
    """Return ``{system_0: text, user_1: text}`` as a list of messages, in the order of the numbers; lists stay."""
    if not isinstance(template, Mapping):
        return template
    found = {key: re.fullmatch(r"(system|user|assistant)(?:_(\d+))?", str(key)) for key in template}
    wrong = next((key for key, match in found.items() if match is None), None)
    if wrong is not None:
        raise ConfigError(
            f"environment.prompt_template: expected keys such as system_0, user_1 and assistant_2, found {shown(wrong)}"
        )
    order = sorted(found, key=lambda key: int((found[key] or [0, 0, 0])[2] or 0))
    return [{"role": (found[key] or [0, ""])[1], "content": template[key]} for key in order]


def _training(values: Section) -> None:
    section = _section(values, "training")
    if section is None or "hpo" not in section:
        return
    if not section.pop("hpo"):
        values["selection_strategy"] = {"name": "none"}
        values.pop("mutation", None)


def _selection(values: Section) -> None:
    section, training = _section(values, "selection_strategy"), values.get("training")
    size = training.get("pop_size") if isinstance(training, Mapping) else None
    wanted = None if section is None else section.get("tournament_size")
    if section is not None and isinstance(wanted, int) and size == 1 and wanted > 1:
        section["tournament_size"] = 1
        warnings.warn(
            f"selection_strategy.tournament_size={wanted} has no meaning here: training.pop_size is 1", stacklevel=4
        )


def _mutation(values: Section) -> None:
    genes = _section(values, "mutation.rl_hp_selection")
    for name, gene in list((genes or {}).items()):
        if isinstance(gene, Mapping) and gene.get("min") is not None and gene.get("min") == gene.get("max"):
            (genes or {}).pop(name)
            warnings.warn(
                f"mutation.rl_hp_selection.{name} has no meaning here: its range holds one value, {gene['min']}",
                stacklevel=4,
            )
