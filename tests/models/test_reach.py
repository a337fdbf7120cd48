"""What a configuration says of the tokens that layers see, whatever shape its values have."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3nTextConfig, Gemma4TextConfig, LlamaConfig, Phi3Config, Qwen2Config

from agilerl.models.reach import EVERYTHING, Reach, kinds_with_states, limits_in, longest_row, narrowed, readings
from agilerl.sizes import stated


def test_numbers_of_layers_are_read_as_one() -> None:
    layers = Gemma3nTextConfig(num_hidden_layers=3, intermediate_size=[64, 96, 80], num_kv_shared_layers=0,
                               activation_sparsity_pattern=[0.0] * 3, layer_types=["full_attention"] * 3)  # fmt: skip
    assert stated(layers, "intermediate_size") == 96
    assert stated(Gemma4TextConfig(), "head_dim") == 512  # of the layers that see the whole row, others have 256
    assert stated(LlamaConfig(head_dim=None), "n_inner", "num_attention_heads") == 32
    assert stated(SimpleNamespace(a=None, b=[], c=True), "a", "b", "c", "d") is None


def test_limits_are_numbers_of_tokens_below_the_longest_row() -> None:
    config = Qwen2Config(use_sliding_window=True, sliding_window=8, max_position_embeddings=64)
    assert limits_in(config, 64) == {"sliding_window": 8}
    assert limits_in(config, 8) == {}


@pytest.mark.parametrize(("original", "longest"), [(32, 32), (128, 64)])
def test_a_row_ends_where_all_of_it_would_be_rotated_otherwise(original: int, longest: int) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    config = Phi3Config(
        **sizes, max_position_embeddings=64, original_max_position_embeddings=original, rope_parameters=rope
    )
    assert longest_row(config) == longest


def test_windows_and_chunks_hide_what_lies_before_them() -> None:
    at = torch.arange(6)
    window, chunk = (reach.visible(at[:, None], at)[4].tolist() for reach in (Reach(window=2), Reach(chunk=3)))
    assert window == [False, False, False, True, True, False]
    assert chunk == [False, False, False, True, True, False]
    assert Reach(window=2).visible(at[:, None], at)[3].tolist() != Reach(chunk=3).visible(at[:, None], at)[3].tolist()
    assert (EVERYTHING.visible(at[:, None], at) == torch.ones(6, 6).tril().bool()).all()
    assert [Reach(window=4).hides(n) for n in (4, 5)] == [False, True]


def test_readings_name_the_kinds_of_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    first = readings(SimpleNamespace(sliding_window=8, layer_types=kinds))[0]
    assert first == {"full_attention": EVERYTHING, "sliding_attention": Reach(window=8)}
    assert isinstance(readings(SimpleNamespace(sliding_window=8, layer_types=["mamba"]))[0], Reach)
    assert kinds_with_states(SimpleNamespace(layer_types=[*kinds, "linear_attention", "conv"])) == {
        "linear_attention",
        "conv",
    }


def test_narrow_windows_become_wide_again() -> None:
    layer = torch.nn.Linear(1, 1)
    layer.sliding_window = 8  # type: ignore[assignment]
    config = SimpleNamespace(sliding_window=8)
    config.get_text_config = lambda: config
    model = torch.nn.ModuleList([layer])
    model.config = config  # type: ignore[assignment]
    with narrowed(model, {"sliding_window": 8}):
        assert (layer.sliding_window, config.sliding_window) == (4, 4)
    assert (layer.sliding_window, config.sliding_window) == (8, 8)
