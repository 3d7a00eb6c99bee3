"""The entry of the program `ratchet`: parse, run one command, say errors in one line.

Imports nothing that takes time before signals are handled; a command imports Prefect, MLflow or a model library in its own function.
"""

import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from flows.cli import interrupts, output

FAILED, WRONG_INPUT = 1, 2
"""Exit codes; 0 is success; 128 and its number stand for a signal."""
MODULES = {"drop_steps": "drop", "compare_command": "compare-engines", "command_line": "run"}
"""Modules of `flows` whose command has another name."""


def main() -> None:
    output.install()
    interrupts.install()
    interrupts.run(lambda: run(sys.argv[1:]))
    if why := output.failure():
        end(f"what this command printed is not whole: {why}", FAILED)


def run(words: Sequence[str]) -> None:
    """Run the command that these words name.

    Raises:
        SystemExit: with 2 and one line on stderr for what was wrong with the words or with what they name, with 1 for work that failed.
    """
    from cyclopts import CycloptsError

    from flows.cli import errors
    from flows.cli.program import invoke

    try:
        invoke(words)
    except CycloptsError as error:
        end(errors.line_of(error), WRONG_INPUT)
    except ValueError as error:
        end(errors.said(error), WRONG_INPUT)
    except (RuntimeError, OSError) as error:
        if not errors.is_expected(error):
            raise
        end(str(error), FAILED)


def end(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(code)


def refuse_module(command: Sequence[str]) -> None:
    """End `python -m flows.NAME`, naming the command of `ratchet` that takes its place; a module of another package continues.

    command: The interpreter's, as sys.orig_argv has it.
    """
    name = _module_of(command)
    package, _, module = name.partition(".")
    if package != "flows":
        return
    from flows.cli.program import COMMANDS

    module = module.rpartition(".")[2]

    found = MODULES.get(module, module.replace("_", "-"))
    instead = f"ratchet {found}" if found in COMMANDS else "ratchet --help"
    end(f"{name} is not run by -m: `{instead}` is the command (the program lies in .venv/bin)", WRONG_INPUT)


def _module_of(command: Sequence[str]) -> str:
    """The module that an interpreter runs; its name may follow `-m` in the same word, and other letters may stand before the m."""
    for number, word in enumerate(command):
        if found := re.fullmatch(r"-[^\WWX]*?m(.*)", word):
            return found[1] or command[number + 1]
    return ""
