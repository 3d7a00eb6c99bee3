"""Disk usage of the parts of a workspace."""

from pathlib import Path

from infra.settings import settings
from infra.store.layout import run_folder


def num_bytes(path: Path) -> int:
    """Return the size of a file or of all files below a folder. Files removed in the meantime count as 0."""
    if path.is_symlink() or not path.exists():
        return 0
    if path.is_file():
        return path.stat().st_size
    return sum(map(num_bytes, list(path.iterdir())))


def parts_of(folder: Path) -> dict[str, int]:
    """Return the sizes of a folder's entries, the largest first."""
    found = {path.name: num_bytes(path) for path in folder.iterdir()} if folder.is_dir() else {}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def run_parts(run: str) -> dict[str, int]:
    """Return the sizes of steps, adapters, evaluations and export of a run."""
    return {name: size for name, size in parts_of(run_folder(run)).items() if (run_folder(run) / name).is_dir()}


def workspace_parts() -> dict[str, int]:
    """Return the sizes of the workspace's entries."""
    return parts_of(settings().workspace)


def shown(size: int) -> str:
    """Format a size with a suitable unit."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
