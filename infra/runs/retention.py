"""Which adapter versions of a run stay on the disk; what was removed says so in its place.

runs/<run>/adapters/000003/removed.json   which files are gone, and by whose word
"""

import shutil
from collections.abc import Collection
from pathlib import Path

from infra.config import RetentionConfig
from infra.megatron.protocol.optimizer_files import BOTH, MOMENTS
from infra.store.files import read_json, write_json
from infra.store.layout import REMOVED, RunFolder, adapter_folder


def kept_whole(config: RetentionConfig, latest: int, best: int | None) -> set[int]:
    """Versions that stay as they are; all of them where keep_last is None."""
    versions = range(1, latest + 1)
    if config.keep_last is None:
        return set(versions)
    kept = set(versions[-config.keep_last :])
    if config.keep_every:
        kept |= {version for version in versions if version % config.keep_every == 0}
    if config.keep_best and best is not None:
        kept.add(best)
    return kept


def apply(config: RetentionConfig, run: str, *, latest: int, best: int | None, delivered: Collection[int]) -> list[int]:
    """Remove what need not stay; gives the versions that lost something.

    delivered: versions that MLflow has; another one's adapter is not removed, for it is still to be sent there.
    """
    changed = []
    for version in sorted(set(range(1, latest)) - kept_whole(config, latest, best)):
        whole = config.of_others == "nothing" and version in delivered
        if _remove(adapter_folder(run, version), config, whole=whole):
            changed.append(version)
    return changed


def _remove(folder: Path, config: RetentionConfig, *, whole: bool) -> bool:
    """Write `removed.json` before deleting, so that a missing file always has a recorded reason."""
    state = [folder / name for name in (*MOMENTS.values(), BOTH)]
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
        shutil.rmtree(folder / "state", ignore_errors=True)
    return True


def num_bytes(run: str) -> int:
    """Of all adapters of a run on the disk."""
    return sum(path.stat().st_size for path in RunFolder.of(run).adapters.rglob("*") if path.is_file())
