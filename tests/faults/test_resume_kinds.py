"""Every kind of agent, and of source to learn from, is saved whole: each iteration in another process, equal files."""

from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.config.named_files import check_unchanged, digests, named_files
from agilerl.errors import CheckpointError
from tests.faults.evidence import differences, evidence
from tests.faults.pieces import an_iteration_each, go_on, whole
from tests.faults.unfinished import change_json, leave_unfinished, newest, sealed
from tests.training.small_runs import lines

pytestmark = pytest.mark.model

TINY = ("training.pop_size=2", "training.max_steps=48", "environment.data_batch_size_per_gpu=2")
TINY += ("environment.eval_prompts=4", "environment.test_prompts=4")
"""3 iterations of 2 agents, a selection after 2."""
HOT = ("algorithm.lr=1e-3", "mutation.rl_hp_selection={lr: {}}")
LONGER = ("training.pop_size=4", "training.max_steps=160", "training.evo_steps=1")
EVERYBODY_MUTATES = "mutation.mutate_elite=true"

KINDS: dict[str, tuple[str, ...]] = {
    "PPO": (
        "algorithm={name: PPO, lr_actor: 1e-3, lr_critic: 1e-3, group_size: 4, batch_size: 8, max_output_tokens: 6}",
        "mutation.rl_hp_selection={lr_actor: {}, lr_critic: {}}",
    ),
    "algorithm as a gene": (
        "algorithm={name: 'choice[GRPO, CISPO]', lr: 1e-3, group_size: 4, batch_size: 8, max_output_tokens: 6}",
        *("training.pop_size=3", "training.max_steps=72"),
    ),
    "rank": (
        *HOT,
        *("mutation.probabilities={arch_mut: 1.0, rl_hp_mut: 0.0}", "mutation.rank_range=[2, 16]", EVERYBODY_MUTATES),
        *("training.pop_size=3", "training.evo_steps=1", "training.max_steps=144", "training.seed=2"),
    ),
    "reference of its own and adaptive KL": (
        *HOT,
        *("algorithm.use_separate_reference_adapter=true", "algorithm.beta=0.05", "algorithm.kl_target=0.001"),
        "algorithm.kl_horizon=64",
    ),
    "reference that follows": (*HOT, "algorithm.ref_sync_steps=1", "algorithm.beta=0.05", "training.max_steps=96"),
    "dynamic sampling": (*HOT, "algorithm.dynamic_sampling=true", "algorithm.update_epochs=2", "training.max_steps=96"),
    "truncation": (*HOT, "selection_strategy={name: truncation}", "training.pop_size=4", "training.max_steps=96"),
    "knockout": (
        *("algorithm.lr=1e-3", "mutation.rl_hp_selection={lr: {}, group_size: {}}", *LONGER, "training.evo_steps=3"),
        *("training.max_steps=240", "selection_strategy={name: knockout, pulses: {every: 2, until: 0.9, guard: 0.5}}"),
    ),
    "multi-frequency": (*HOT, "selection_strategy={name: multi_frequency}", *LONGER),
    "DPO": (
        "algorithm={name: DPO, lr: 1e-3, beta: 0.1, batch_size: 4, max_output_tokens: 6}",
        *("environment.env_type=preference", "training.max_steps=24"),
        "mutation.rl_hp_selection={lr: {}, beta: {}}",
    ),
    "KTO": (
        "algorithm={name: KTO, lr: 1e-3, batch_size: 4, max_output_tokens: 6}",
        *("environment.env_type=unpaired", "training.max_steps=24"),
        "mutation.rl_hp_selection={lr: {}, beta: {}, desirable_weight: {}}",
    ),
    "SFT": (
        "algorithm={name: SFT, lr: 1e-3, batch_size: 2, max_output_tokens: 6}",
        *("environment.env_type=sft", "training.max_steps=12"),
    ),
    "episodes": (
        *HOT,
        "environment={env_type: multiturn, env_id: agilerl/GuessTheNumber-v0, params: {max_number: 9}, "
        "data_batch_size_per_gpu: 2, eval_prompts: 4, test_prompts: 4}",
        "algorithm.max_output_tokens=3",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_iteration_in_another_process(kind: str, tmp_path: Path) -> None:
    """Ranks: agents of a larger one than survives have widened the bank, which decides the others' last bits."""
    settings = (*TINY, *KINDS[kind])
    expected = evidence(whole(tmp_path / "whole", *settings))
    assert an_iteration_each(tmp_path / "pieces", *settings) >= 4
    assert differences(evidence(tmp_path / "pieces"), expected) == []
    trained = [line for line in lines(tmp_path / "whole" / "metrics.jsonl") if line["kind"] == "train"]
    assert any(line["grad_norm"] > 0 for line in trained)  # or else equal files would say little


def test_a_run_that_a_saved_adapter_teaches(tmp_path: Path) -> None:
    """It teaches everybody from the start, is the same after a break, and must not change in between."""
    elite = whole(tmp_path / "teacher", *TINY, *HOT) / "elite"
    settings = (*TINY, *HOT, f"teacher={{weight: 0.5, adapter: {elite}}}")
    root = whole(tmp_path / "whole", *settings)
    assert an_iteration_each(tmp_path / "pieces", *settings) >= 4
    assert differences(evidence(tmp_path / "pieces"), evidence(root)) == []
    trained = [line for line in lines(root / "metrics.jsonl") if line["kind"] == "train"]
    assert all("teacher/kl" in line for line in trained)
    config = load_manifest(None, list(settings))
    recorded = digests(named_files(config))
    assert {Path(path).name for path in recorded["data"]} >= {"adapter_config.json", "adapter_model.safetensors"}
    check_unchanged(named_files(config), recorded, root)
    weights = elite / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="has changed"):
        check_unchanged(named_files(config), recorded, root)


def test_a_bank_of_more_ranks_than_the_run_allows_is_refused(tmp_path: Path) -> None:
    """What a checkpoint says of memory is not believed without limit."""
    run = leave_unfinished(tmp_path / "run")
    change_json(newest(run.root) / "state.json", lambda state: {**state, "bank_rank": 10**9})
    sealed(newest(run.root))
    with pytest.raises(CheckpointError, match=r"rank 1000000000.* 64"):
        next(go_on(run.root))
