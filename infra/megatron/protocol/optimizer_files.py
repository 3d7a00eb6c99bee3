"""Adam's state beside an adapter: a file for each moment, tensors named as in the adapter's own file. No torch in here.

Two files are written and hashed beside each other, each as long as the adapter's (docs/history/log.md, 2026-11-22). An earlier version of
Ratchet wrote both moments into one; training goes on from such an adapter too, and what it makes has two.
"""

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

# Perf: two files beside the adapter's in 0.482 s, one of both in 0.504 s (CPU, docs/history/log.md).
MOMENTS = {"exp_avg": "state/exp_avg.safetensors", "exp_avg_sq": "state/exp_avg_sq.safetensors"}
"""By AdamW's names: paths in the adapter's folder."""
BOTH = "state/optimizer.safetensors"
"""Of the earlier version; tensors exp_avg.<name> and exp_avg_sq.<name>."""
NUM_STEPS = "num_optimizer_steps"
"""Metadata of each file."""


class Place(NamedTuple):
    path: Path
    prefix: str
    """Stands before the names of its tensors."""


def places(folder: Path) -> dict[str, Place]:
    """Where each moment lies, or should, in an adapter's folder; raises ValueError for one that has the state in both forms."""
    apart = [name for name in MOMENTS.values() if (folder / name).exists()]
    if (folder / BOTH).exists():
        if apart:
            raise ValueError(f"adapter {folder} has {BOTH} and {apart[0]}: which is its optimizer state is not known, remove one")
        return {which: Place(folder / BOTH, f"{which}.") for which in MOMENTS}
    return {which: Place(folder / name, "") for which, name in MOMENTS.items()}


def num_steps(folder: Path) -> int:
    """Taken by the optimizer whose state lies in an adapter's folder.

    Raises:
        ValueError: if a file is not whole or does not say it, or the two disagree.
    """
    found = {path: _num_steps(path) for path, _ in places(folder).values()}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{path.name} of {steps}" for path, steps in found.items())
        raise ValueError(f"adapter {folder}: its moments do not belong together, by their {NUM_STEPS}: {said}")
    return next(iter(found.values()))


def _num_steps(path: Path) -> int:
    try:
        with safe_open(path, "numpy") as file:
            return int((file.metadata() or {})[NUM_STEPS])
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} does not say its {NUM_STEPS}") from error
