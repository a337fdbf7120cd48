"""A taskset with a tool, which verifiers serves by MCP."""

from collections.abc import Iterator

import verifiers.v1 as vf

from multiplies.tools import Tools

__all__ = ["Multiplies"]


class Data(vf.TaskData):
    answer: str


class Product(vf.Task[Data, vf.State]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Tools(vf.ToolsetConfig())]


class Multiplies(vf.Taskset[Product, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Product]:
        number = 0
        while True:
            number += 1
            yield Product(Data(prompt=f"{number} x 7?", answer=str(7 * number)), self.config.task)
