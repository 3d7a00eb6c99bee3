"""Packages with kernels for Hopper GPUs, which the trainer uses where they are installed, after a comparison with what torch computes."""

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

TOLERANCE = 2e-2
"""Of the norm of the difference, by the norm of the float32 result. Rounding to bfloat16 alone makes 0.002 to 0.007 (attention, CPU)."""


class UnusableKernel(ValueError):
    """A package does not compute what torch does."""


def is_installed(package: str) -> bool:
    """By its metadata: another package may have a module of the same name, as flash-attn and flash-attn-4 do."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def function_of(package: str, module: str, name: str) -> Callable[..., Any] | None:
    """Return a package's function; None without the package, on another GPU than a Hopper, or, with a warning, if it does not load."""
    if not is_installed(package) or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        return getattr(import_module(module), name)  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001  # torch has a kernel, too
        log.warning("%s is installed and does not load (%r): torch's kernel computes; repair it, or uninstall it", package, error)
        return None


def compare(package: str, what: str, names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare a package's results with torch's in float32. what: The package computes. names: Of the results.

    Raises UnusableKernel if they are further apart than rounding.
    """
    for name, mine, right in zip(names, found, expected, strict=True):
        apart = float((mine.float() - right).norm() / right.norm())
        if not apart <= TOLERANCE:
            raise UnusableKernel(
                f"{package} {version(package)} computes {what} wrong on this GPU: {name} is {apart:.2g} of its norm from torch's, "
                f"allowed are {TOLERANCE:g}: uninstall it, or install the version in docs/trainer.md"
            )
