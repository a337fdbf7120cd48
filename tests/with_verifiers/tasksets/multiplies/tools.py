"""The server of the tool, a program."""

import verifiers.v1 as vf


class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b


if __name__ == "__main__":
    Tools.run()
