"""Which modules of this package are commands of `python -m`, and what to use instead of one that is none.

Imports nothing that takes time: the package `flows` asks before a module is imported.
"""

import re
from collections.abc import Sequence

PROGRAMS = ("compare_engines", "drop_steps", "learning_curves", "quickstart", "replay", "run", "sweep")
INSTEAD = {
    "command_line": "python -m flows.run",
    "arguments": "python -m flows.run",
    "compare_command": "python -m flows.compare_engines",
    "evaluate": "prefect deployment run evaluate/local, or python -m flows.run, which evaluates every evaluation.every steps",
    "learning_picture": "python -m flows.learning_curves",
    "step": "./infra/quickstart, or prefect deployment run rl-step/local",
}
"""Module -> what does its work; for any other one, the list of commands."""


def refusal(argv: Sequence[str]) -> str | None:
    """Return one line for a command that names a module which is none; None for any other one.

    argv: of the interpreter, as sys.orig_argv has it.
    """
    named = next((found[1] for each in argv[1:] if (found := re.fullmatch(r"(?:-m)?flows\.(\w+)", each))), None)
    if named is None or named in PROGRAMS:
        return None
    instead = INSTEAD.get(named, ", ".join(f"flows.{program}" for program in PROGRAMS))
    return f"error: python -m flows.{named} is no command; use {instead}"
