"""Names of runs, experiments and sweeps: each is a folder's name and part of a URL."""

import re

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def checked_name(name: str, what: str) -> str:
    """Raises ValueError for a name that cannot be that of a folder and part of a URL."""
    if not RUN_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must be 1 to 80 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return name
