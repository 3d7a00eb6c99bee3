"""Adam's state next to an adapter: one file for each moment, tensors named as in the adapter's own file. No torch here.

Two files are written and hashed in parallel, each as large as the adapter's (docs/history/log.md, 2026-11-22). An earlier version of
Ratchet wrote both moments into one file. Training can continue from such an adapter; the new adapter then has two files.
"""

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

# Perf: two files beside the adapter's in 0.482 s, one of both in 0.504 s (CPU, docs/history/log.md).
MOMENTS = {"exp_avg": "state/exp_avg.safetensors", "exp_avg_sq": "state/exp_avg_sq.safetensors"}
"""Paths in the adapter's folder, by AdamW's name of each moment."""
BOTH = "state/optimizer.safetensors"
"""The file of the earlier version, with tensors exp_avg.<name> and exp_avg_sq.<name>."""
NUM_STEPS = "num_optimizer_steps"
"""Metadata key in each file."""


class Place(NamedTuple):
    path: Path
    prefix: str
    """Prefix of its tensors' names."""


def places(folder: Path) -> dict[str, Place]:
    """Return where each moment is, or should be, in an adapter's folder. Raises ValueError if the state is there in both forms."""
    apart = [name for name in MOMENTS.values() if (folder / name).exists()]
    if (folder / BOTH).exists():
        if apart:
            raise ValueError(f"adapter {folder} has {BOTH} and {apart[0]}: which is its optimizer state is not known, remove one")
        return {which: Place(folder / BOTH, f"{which}.") for which in MOMENTS}
    return {which: Place(folder / name, "") for which, name in MOMENTS.items()}


def num_steps(folder: Path) -> int:
    """Read the number of steps that the optimizer of an adapter's folder has taken.

    Raises:
        ValueError: if a file is incomplete or lacks the number, or the two files disagree.
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
