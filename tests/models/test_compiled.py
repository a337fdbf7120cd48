"""torch.compile of the layers: the same numbers, the adapters outside the graph."""

import shutil
from typing import Any

import pytest
import torch

from agilerl.errors import ConfigError
from agilerl.models import layers
from tests.models.two_agents import make_runtime, train_pass
from tests.tiny_models import random_model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what crosses a break of the graph: dynamo looks at it
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_compute_the_same() -> None:
    expected = train_pass(make_runtime(random_model()))
    runtime = make_runtime(random_model(), torch_compiler="default")
    assert max(train_pass(runtime).distance(expected)) < 1e-5
    alone = train_pass(runtime, (1,))
    torch.testing.assert_close(alone.grad[1], expected.grad[1], atol=1e-4, rtol=1e-4)
    both = make_runtime(random_model(), torch_compiler="default", gradient_checkpointing=True)
    assert max(train_pass(both).distance(expected)) < 1e-5


@pytest.mark.model
def test_a_machine_that_cannot_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("\n  no working C++ compiler\nlong text")

    layers._check_compiler.cache_clear()
    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ConfigError, match=r"torch_compiler='default' .*C\+\+"):
        make_runtime(random_model(), torch_compiler="default")
