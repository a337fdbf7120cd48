"""A base for agents whose objective is compared; the objective never runs it."""

from collections.abc import Callable
from typing import Any

import pytest

from agilerl.algorithms import LLMAlgorithm
from agilerl.runtime import Runtime
from tests.oracle.random_tensors import MAX_LENGTH
from tests.tiny_models import PAD, random_model


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


@pytest.fixture
def make(runtime: Runtime) -> Callable[..., LLMAlgorithm]:
    def build(algorithm: type[LLMAlgorithm], **settings: Any) -> LLMAlgorithm:
        if "max_output_tokens" in algorithm.Config.model_fields:
            settings["max_output_tokens"] = MAX_LENGTH
        return algorithm(runtime=runtime, pad_token_id=PAD, **settings)

    return build
