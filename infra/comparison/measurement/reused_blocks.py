"""Blocks that outlive their workspace: a finished block is copied next to the report, and an empty workspace reuses it from there.

<output>/blocks/<digest>/00-vllm/    as in the workspace, see infra/comparison/paths.py

The digest covers options and model. Everything else that affects figures is a block's origin: blocks of another kind of machine, of other
code or lock files are refused, wherever they lie. Two machines of one kind may share a comparison; its report states this.
"""

import hashlib
import logging
import platform
import shutil
from pathlib import Path

from infra.comparison.config import Block, ComparisonConfig, blocks_of
from infra.comparison.measurement.measures import Provenance
from infra.comparison.paths import block_folder, output_folder
from infra.comparison.results import START, read_start
from infra.machine import devices, nvml
from infra.settings import CHECKOUT
from infra.store import code_digest
from infra.store.files import fresh_folder, publish_folder

log = logging.getLogger(__name__)

MEASURING = (
    "tasks.comparisons.start_engine",
    "tasks.comparisons.measure_step",
    "infra.megatron",
    "infra.engines.launchers",
)
"""The code that measures a block: tasks, and programs that they start."""


def origin() -> Provenance:
    """Return the origin of blocks that are measured here and now."""
    locks = b"".join(path.read_bytes() for path in sorted((CHECKOUT / "infra/setup/locks").glob("*.txt")))
    num_gpus = devices.num_gpus()
    return Provenance(
        machine=f"{num_gpus} x {devices.processor()}" if num_gpus else devices.processor(),
        unit=" ".join(gpu.uuid for gpu in nvml.read().gpus) or platform.node(),
        code=code_digest.digest(*MEASURING)[:12],
        locks=hashlib.sha256(locks).hexdigest()[:12],
    )


def is_kept(config: ComparisonConfig, digest: str, block: Block) -> bool:
    return (_kept(config, digest) / block.name).exists()


def keep(config: ComparisonConfig, digest: str, block: Block) -> None:
    """Copy a finished block to the output folder, atomically."""
    target = _kept(config, digest) / block.name
    staging = fresh_folder(target.with_name(f"{block.name}.partial"))
    shutil.copytree(block_folder(digest, block), staging, dirs_exist_ok=True)
    publish_folder(staging, target)


def take_up(config: ComparisonConfig, digest: str) -> None:
    """Continue with the blocks in the workspace, and with blocks of the output folder that are missing there.

    Raises:
        ValueError: for a block that is not comparable with those measured here. It is left where it was.
    """
    here = origin()
    for block in blocks_of(config):
        ours, kept = block_folder(digest, block), _kept(config, digest) / block.name
        if (ours / START).exists():
            _check_origin(ours, here)
        elif (kept / START).exists():
            _check_origin(kept, here)
            shutil.copytree(kept, fresh_folder(ours), dirs_exist_ok=True)
            log.info("%s is taken up from %s", block.name, kept)
    others = sorted(path.name for path in _kept(config, digest).parent.glob("*") if path.name != digest)
    if others:
        log.info("blocks of other comparisons (other options, another model) are left alone: %s", ", ".join(others))


def _kept(config: ComparisonConfig, digest: str) -> Path:
    return output_folder(config) / "blocks" / digest


def _check_origin(folder: Path, here: Provenance) -> None:
    start = read_start(folder)
    there = start.origin if start else None
    if there is None:
        raise ValueError(f"{folder} does not say where it was made: remove it, or give another --output")
    if found := here.differences(there):
        raise ValueError(
            f"{folder} was made with {' and '.join(found)}: figures of both are not mixed; remove it, or give another --output "
            "(and RATCHET_WORKSPACE, if it lies there)"
        )
