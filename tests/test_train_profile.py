"""``benchmarking/train_profile.py`` counts each second once, and the tokens that the run has."""

import json
from pathlib import Path

import pytest

from agilerl.planning.time import Machine
from agilerl.rollouts import torch_engine
from benchmarking.train_profile import (
    BOTH,
    EXAMS,
    LOAD,
    PHASES,
    REST,
    START,
    Clock,
    Clocked,
    floors,
    summary,
    table,
    train,
    watched,
)

TINY = """
algorithm: {name: GRPO, group_size: 4, batch_size: 8, max_output_tokens: 3, beta: 0.1}
environment:
  task: reasoning_gym:spell_backward
  data_batch_size_per_gpu: 4
  eval_prompts: 4
  test_prompts: 4
training: {pop_size: 2, max_steps: 64, evo_steps: 1}
selection_strategy: {name: tournament}
mutation: {rl_hp_selection: {lr: {}}}
network:
  pretrained_model_name_or_path: embedded
  lora_config: {r: 2, lora_alpha: 4}
"""


def test_a_second_counts_for_the_innermost_phase() -> None:
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    clock = Clock(lambda: now[0])
    pass_time(1)
    with clock.during(Clocked("", "", LOAD)):
        pass_time(2)
        with clock.during(Clocked("", "", "rollout: draw")):  # loading holds all that it calls
            pass_time(3)
    pass_time(4)
    with clock.during(Clocked("", "", "rollout: rest")):
        pass_time(5)
        with clock.during(Clocked("", "", "rollout: draw", "rollout")):
            pass_time(6)
        with clock.during(Clocked("", "", "update: lines", "update")):  # not a part of a rollout
            pass_time(7)
    clock.stop()
    assert clock.seconds == {START: 1, LOAD: 5, REST: 4, "rollout: rest": 12, "rollout: draw": 6}


@pytest.mark.model
def test_the_phases_of_a_small_run(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    clock, original = Clock(), torch_engine.TorchEngine.generate
    with watched(clock) as counted:
        assert torch_engine.TorchEngine.generate is not original
        train([str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run"), "--quiet"])
        clock.stop()
    assert torch_engine.TorchEngine.generate is original
    assert set(clock.seconds) <= set(PHASES)
    assert sum(clock.seconds.values()) == pytest.approx(clock._last)
    for phase in ("rollout: prefill", "rollout: draw", "update: forward", "update: backward", EXAMS):
        assert clock.seconds[phase] > 0, phase
    spent = json.loads((tmp_path / "run" / "summary.json").read_text())["tokens"]
    sampled = [d for phase, d in counted.decoded if phase != EXAMS]
    assert round(sum(d["rows"] * d["completion"] for d in sampled)) == spent["generated"]
    # Two iterations, two optimizer steps each, of both agents.
    assert counted.steps == [2, 2, 2, 2]
    assert all(0 < d["tokens"] <= d["length"] * d["rows"] for _, d in counted.forwards)
    least = floors(counted, Machine(1e11, 1e10))
    assert set(least) <= {*PHASES, BOTH}
    found = summary(clock.seconds, least)
    assert found["command"]["seconds"] == pytest.approx(sum(clock.seconds.values()))
    assert 0 < found["iterations"]["fraction_of_limit"] < 1
    assert f"| **{BOTH}** |" in table(found)
