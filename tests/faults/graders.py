"""A grader in a module that imports nothing: a process that runs it starts in a second."""


def odd_letters(completion: str) -> float:
    return float(sum(map(ord, completion)) % 2)
