"""The package of an engine that its interpreter would import."""

import os
from pathlib import Path
from typing import NamedTuple


class Installed(NamedTuple):
    """A package that an interpreter would import."""

    version: str
    folder: Path
    """The site-packages folder that contains it."""


def installed(python: Path, pythonpath: str, package: str) -> Installed | None:
    """Return the package that an interpreter with this PYTHONPATH would import, by its metadata. None if that is not known."""
    places = [Path(place) for place in pythonpath.split(os.pathsep) if place]
    for place in [*places, *sorted(python.parent.parent.glob("lib/python*/site-packages"))]:
        if found := sorted(place.glob(f"{package}-*.dist-info")):
            return Installed(found[0].name.removeprefix(f"{package}-").removesuffix(".dist-info"), place)
        if (place / package).is_dir():  # hides all later ones, and has no version
            return None
    return None
