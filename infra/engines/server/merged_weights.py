"""Merge an adapter into the engine's weights: the tensors that it changes, in a folder that the engine reads.

Each version is merged from the base model again, so errors do not accumulate over steps. Only the folder of the served version is kept.
"""

import logging
import shutil
import threading
import time
from pathlib import Path

from infra.processes import child_environment, children
from infra.records import AdapterVersion
from infra.settings import CHECKOUT, main_python, settings
from infra.store.files import verified_adapter
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

PROGRAM = "infra.megatron.lora.merge"
TIMEOUT_S = 1800.0
_merging = threading.Lock()


def folder_of(adapter: AdapterVersion, model_folder: Path) -> Path:
    """Return the folder with the changed tensors of an adapter version that has weights. Made if missing.

    Raises:
        DigestMismatch: if the adapter does not match its record.
    """
    assert adapter.weights is not None and adapter.served_name is not None
    folder = _place() / adapter.served_name
    with _merging:  # replicas load side by side
        _merge(adapter, model_folder, folder)
    return folder


def _merge(adapter: AdapterVersion, model_folder: Path, folder: Path) -> None:
    if not folder.exists():
        source, begin = verified_adapter(adapter), time.monotonic()
        command = [str(settings().trainer_python or main_python()), "-m", PROGRAM, str(model_folder), str(source), str(folder)]
        children.run(
            [*command, "--only-changed"],
            Workspace.here().logs / "merge.log",
            timeout_s=TIMEOUT_S,
            env={"CUDA_VISIBLE_DEVICES": ""},
            cwd=CHECKOUT,
            inherits=child_environment.passed_on(),
        )
        log.info("adapter %s was merged in %.2f s", adapter.served_name, time.monotonic() - begin)


def keep_only(name: str | None) -> None:
    """Remove the folders of other versions."""
    with _merging:
        for folder in _place().glob("*"):
            if folder.name != name:
                shutil.rmtree(folder)


def _place() -> Path:
    return Workspace.here().merged_weights
