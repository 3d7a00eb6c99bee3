"""Which adapter versions of a run are retained on disk. Each removal is recorded in the adapter's folder.

runs/<run>/adapters/000003/removed.json   which files were removed, and by which rule
"""

import shutil
from collections.abc import Collection
from pathlib import Path

from infra.config import RetentionConfig
from infra.megatron.protocol.job import ENGINE_CONFIG, ENGINE_WEIGHTS
from infra.megatron.protocol.optimizer_files import BOTH, MOMENTS
from infra.store.files import read_json, write_json
from infra.store.layout import REMOVED, RunFolder, adapter_folder


def kept_whole(config: RetentionConfig, latest: int, best: Collection[int]) -> set[int]:
    """Return the versions that are retained completely; all of them if keep_last is None."""
    versions = range(1, latest + 1)
    if config.keep_last is None:
        return set(versions)
    kept = set(versions[-config.keep_last :])
    if config.keep_every:
        kept |= {version for version in versions if version % config.keep_every == 0}
    if config.keep_best:
        kept |= set(best)
    return kept


def apply(config: RetentionConfig, run: str, *, latest: int, best: Collection[int], delivered: Collection[int]) -> list[int]:
    """Remove files that need not be retained. Returns the versions that lost files.

    best: More than one where the source of the reward has changed in the run.
    delivered: Versions that were uploaded to MLflow, and copied to the store where there is one. Other adapters are not removed.
    """
    changed = []
    for version in sorted(set(range(1, latest)) - kept_whole(config, latest, best)):
        whole = config.of_others == "nothing" and version in delivered
        if _remove(adapter_folder(run, version), config, whole=whole):
            changed.append(version)
    return changed


def _remove(folder: Path, config: RetentionConfig, *, whole: bool) -> bool:
    """Write `removed.json` before deleting, so that a missing file always has a recorded reason."""
    state = [folder / name for name in (*MOMENTS.values(), BOTH, ENGINE_WEIGHTS, ENGINE_CONFIG)]
    going = [path for path in folder.rglob("*") if path.is_file() and path.name != REMOVED] if whole else state
    going = [path for path in going if path.exists()]
    if not going:
        return False
    before = read_json(folder / REMOVED)["files"] if (folder / REMOVED).exists() else []
    names = sorted({*before, *(path.relative_to(folder).as_posix() for path in going)})
    write_json(folder / REMOVED, {"files": names, "retention": config.model_dump(mode="json")})
    for path in going:
        path.unlink()
    if whole:
        for name in ("state", "engine"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return True


def num_bytes(run: str) -> int:
    """Return the size of all adapters of a run on the disk."""
    return sum(path.stat().st_size for path in RunFolder.of(run).adapters.rglob("*") if path.is_file())
