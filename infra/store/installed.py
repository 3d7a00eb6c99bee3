"""Which files belong to Python or to an installed package. Standard library only: reward workers use it too."""

import sysconfig
from functools import cache
from pathlib import Path

KINDS = ("stdlib", "platstdlib", "purelib", "platlib")


@cache
def places() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(kind) for kind in KINDS})


def is_installed(path: Path) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return any(path.is_relative_to(place) for place in places())
