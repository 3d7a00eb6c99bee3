"""Three tools: a calculator, a search in the files of a folder, and Python with limits.

Their schemas come from their signatures. The first two have no effect, so they may be called again after a crash; what a piece of Python does is
not known.
"""

import ast
import operator
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from infra.environments.tools import Tool, tool

OPERATORS: dict[type[ast.operator] | type[ast.unaryop], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
MAX_EXPRESSION = 200
MAX_FILE_BYTES = 1 << 20
PYTHON_TIMEOUT_S = 5.0
MAX_PRINTED = 2000


@tool(idempotent=True)
def calculate(expression: str) -> str:
    """Compute an expression of numbers, + - * / // % and brackets."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters, {MAX_EXPRESSION} are allowed")
    return f"{_value(ast.parse(expression, mode='eval').body):.12g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(operand))
    raise ValueError(f"{ast.unparse(node)!r} is no number and no known operation")


def search_in(folder: Path) -> Tool:
    """Return a tool that searches the text files below a folder, and no others."""

    @tool(idempotent=True)
    def search(words: str, limit: int = 5) -> list[str]:
        """Find lines that contain all the words, as `file:line: text`."""
        wanted, found = words.lower().split(), []
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                continue
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if all(word in line.lower() for word in wanted):
                    found.append(f"{path.relative_to(folder)}:{number}: {line.strip()}")
                if len(found) >= limit:
                    return found
        return found

    return search


@tool
def run_python(code: str) -> str:
    """Run Python code and return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-c", code]
        try:
            done = subprocess.run(
                command, cwd=folder, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=PYTHON_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"took longer than {PYTHON_TIMEOUT_S:g} s") from None
    return (done.stdout + (done.stderr if done.returncode else b"")).decode(errors="replace")[-MAX_PRINTED:]
