"""The level of a line that a child program wrote, so that its warnings and errors reach a person and the rest stays in its log file."""

import logging
import re

LEVEL = re.compile(r"^(?:\[[^\]]*\] |\([^)]*\) )*(WARNING|ERROR|CRITICAL)\b")
"""After time stamps and process names in brackets, as SGLang (by its launcher), vLLM and the trainer program write them."""
OUR_OWN_ABORT = "Request is disconnected from the client side"
"""SGLang calls it an error; a rollout that has enough samples, or a Ctrl-C, does this."""
UNMARKED_ERROR = re.compile(r"^(error: |Traceback \(most recent call last\):|[\w.]*(Error|Exception): )")


def level_of(line: str) -> int:
    """Return logging.WARNING or more for a warning or an error, logging.DEBUG for anything else."""
    if OUR_OWN_ABORT in line:
        return logging.DEBUG
    if found := LEVEL.match(line):
        return logging.getLevelNamesMapping()[found[1]]
    return logging.ERROR if UNMARKED_ERROR.match(line) else logging.DEBUG
