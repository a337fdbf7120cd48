"""A taskset as its users write it: answers that begin with a digit earn 1."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["EvenDigit"]


class Data(vf.TaskData):
    number: int
    unlucky: int | None


class Question(vf.Task[Data, vf.State]):
    @vf.reward
    async def begins_with_an_even_digit(self, trace: vf.Trace) -> float:
        if self.data.unlucky and self.data.number % self.data.unlucky == 0:
            raise ValueError("an unlucky number")
        return float(trace.last_reply[:1] in set("02468"))


class Config(vf.TasksetConfig):
    size: int = 60
    unlucky: int | None = None


class EvenDigit(vf.Taskset[Question, Config]):
    def load(self) -> Iterator[Question]:
        for number in range(self.config.size):
            number %= 50  # the last ten are the first again
            data = Data(prompt=f"{number % 10}, {number % 7 + 1}.", number=number, unlucky=self.config.unlucky)
            yield Question(data, self.config.task)
