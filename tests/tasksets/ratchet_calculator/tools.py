"""The tool's server, a program that verifiers starts for each episode."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def multiply(self, first: int, second: int) -> str:
        """Multiply two numbers."""
        return str(first * second)


if __name__ == "__main__":
    Calculator.run()
