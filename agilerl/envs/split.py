"""Which questions are kept for exams and tests, and how many."""

import warnings
import zlib

from agilerl.arguments import checked

HELD_OUT_EVERY = 5
LEAST = 2
"""Questions of a panel below which its mean says nothing, and has no standard error."""


@checked
def is_held_out(question: str) -> bool:
    """Say whether ``question`` belongs to the fifth of all questions that nothing may be trained on.

    A question is held out when ``crc32(question as UTF-8) % 5 == 0``. The rule needs no list and no seed, so the
    embedded base model, the training draws and the exams agree on it without knowing of each other.
    """
    return zlib.crc32(question.encode()) % HELD_OUT_EVERY == 0


def fewer(exam: int, test: int, available: int) -> tuple[int, int] | None:
    """Return the sizes of smaller panels that ``available`` questions fill, None where they would be too small.

    Each gets half of the questions; what one does not need goes to the other.
    """
    exam_fits = min(exam, max(-(-available // 2), available - test))
    test_fits = min(test, available - exam_fits)
    enough = exam_fits >= min(exam, LEAST) and test_fits >= min(test, LEAST)
    return (exam_fits, test_fits) if enough else None


def warn_of_fewer(name: str, asked: tuple[int, int], found: tuple[int, int], distinct: str) -> None:
    """Say that the panels are smaller than asked for."""
    warnings.warn(
        f"{name} has only {distinct}: the exam has {found[0]} prompts and the test {found[1]}, in place of {asked[0]} "
        f"and {asked[1]} (eval_prompts, test_prompts); fitness is the less exact for it",
        stacklevel=3,
    )
