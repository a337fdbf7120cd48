import pytest

from agilerl.rewards import exact_match, extract_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        (" 7\n", "7"),
        ("<answer>7</answer>", "7"),
        ("first <answer>6</answer> then <answer>\n7 </answer>!", "7"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>7</answer> and <answer>8", "7"),
        ("<answer><answer>7</answer>", "7"),
        ("<answer></answer>", ""),
        ("<answer>7", "<answer>7"),
        ("7</answer>", "7</answer>"),
        ("</answer>7<answer>", "</answer>7<answer>"),
        ("", ""),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


def test_exact_match():
    assert exact_match("so <answer>7</answer>", " 7 ") == 1.0
    assert exact_match("7.0", "7") == 0.0
    assert exact_match("Abc", "abc") == 0.0
