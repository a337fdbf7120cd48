import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agilerl.errors import CheckpointError
from agilerl.runs.strict_json import dumps, loads, read_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
).filter(lambda v: not any(word in repr(v) for word in ("'NaN'", "Infinity'")))


@given(values)
def test_round_trip(value):
    assert loads(dumps(value)) == value


def test_non_finite_numbers_are_strict_json_and_come_back():
    text = dumps({"a": math.nan, "b": [math.inf, -math.inf]})
    assert text == '{"a":"NaN","b":["Infinity","-Infinity"]}'
    assert json.loads(text, parse_constant=pytest.fail)["a"] == "NaN"
    back = loads(text)
    assert math.isnan(back["a"])
    assert back["b"] == [math.inf, -math.inf]


def test_equal_values_give_equal_text():
    assert dumps({"b": 1, "a": (1, 2)}) == dumps({"a": [1, 2], "b": 1}) == '{"a":[1,2],"b":1}'
    assert dumps({"x": np.float32(0.5), "n": np.int64(3), "p": Path("a/b"), 7: True}) == (
        '{"7":true,"n":3,"p":"a/b","x":0.5}'
    )


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{", "", "[" * 100_000])
def test_what_is_not_strict_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"JSON|nested|Expecting"):
        loads(text)


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="set"):
        dumps({"x": {1}})


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.json"):
        read_json(tmp_path / "x.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.json.*does not exist"):
        read_json(tmp_path / "x.json")
