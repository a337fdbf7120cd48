"""Reward functions that only need text."""

from agilerl.arguments import checked

OPEN, CLOSE = "<answer>", "</answer>"


@checked
def extract_answer(completion: str) -> str:
    """Return the text between the last ``<answer>`` and ``</answer>``, else the whole completion; stripped."""
    end = completion.rfind(CLOSE)
    start = completion.rfind(OPEN, 0, end) if end >= 0 else -1
    return completion[start + len(OPEN) : end].strip() if start >= 0 else completion.strip()


@checked
def exact_match(completion: str, answer: str) -> float:
    """Return 1.0 if the extracted answer equals ``answer``, ignoring outer whitespace; else 0.0."""
    return 1.0 if extract_answer(completion) == answer.strip() else 0.0
