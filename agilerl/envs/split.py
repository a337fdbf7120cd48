"""Which questions are kept for exams and tests, decided by the question's text alone."""

import zlib

__all__ = ["is_held_out"]

HELD_OUT_EVERY = 5


def is_held_out(question: str) -> bool:
    """Say whether ``question`` belongs to the fifth of all questions that nothing may be trained on.

    A question is held out when ``crc32(question as UTF-8) % 5 == 0``. The rule needs no list and no seed, so the
    embedded base model, the training draws and the exams agree on it without knowing of each other.
    """
    return zlib.crc32(question.encode()) % HELD_OUT_EVERY == 0
