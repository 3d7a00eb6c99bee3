"""Compiled kernels of engine and trainer: kept in the workspace, so that a later start on this machine compiles nothing.

kernels/<GPU>-<key>/triton, inductor, flashinfer, ..., bytecode

The key is a digest of GPU, driver and the versions that a program runs with. Other versions find an empty folder and never another one's
kernels. The libraries choose their files' names by the kernels' source, so programs with the same versions share a folder.
"""

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from infra.store.files import PRIVATE, write_json
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

VARIABLES = {
    "CUDA_CACHE_PATH": "cuda",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "QUACK_CACHE_DIR": "quack",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Environment variables by which the libraries find their caches, and the folders that they get. Read in the source of SGLang 0.5.17 and 0.5.18
(srt/environ.py, kernels/jit/utils/compile.py, layers/deep_gemm_wrapper/compile_utils.py), FlashInfer 0.6.15 (jit/env.py),
apache-tvm-ffi 0.1.11 (cpp/extension.py), flash-attn-4 4.0.0b36 (flash_attn/cute/cache_utils.py) and quack-kernels 0.6.5 (quack/cache).
CUDA and Triton document theirs."""
SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
"""Environment variables without which a library keeps no kernels."""
ABOUT = "about.json"
"""Versions that a folder is for."""
PASSING = re.compile(r"\.(lock|tmp|pid)|\.ninja|/tmp[._]|^about|^bytecode/")
"""Files that are no kernels: locks, logs, what is being written, and Python's bytecode."""
BYTECODE = {"PYTHONPYCACHEPREFIX": "bytecode", "PYTHONDONTWRITEBYTECODE": ""}
"""Environment variables of a program whose packages lie there without compiled bytecode: the folder for it, and that it is written at all
(the second counts as unset if it is empty)."""


def folder_of(versions: Mapping[str, str]) -> Path:
    """Return the folder of a program's kernels, which may not exist yet.

    versions: Of its packages, with the names `gpu` and `driver` on a GPU.
    """
    decides = "\n".join(f"{name} {version}" for name, version in sorted(versions.items()))
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", versions.get("gpu", "cpu")).strip("-")
    return Workspace.here().kernels / f"{gpu}-{hashlib.sha256(decides.encode()).hexdigest()[:12]}"


def variables(versions: Mapping[str, str], *, has_bytecode: bool = True) -> dict[str, str]:
    """Return the environment variables with which a program keeps its kernels in `folder_of(versions)`, which is made.

    has_bytecode: Whether its packages are compiled. If they are not, because they were unpacked only, their folder is read-only or
    PYTHONDONTWRITEBYTECODE is set, Python would compile them at each start; their bytecode is kept with the kernels then.

    The user's own values of these variables do not count: a start could not tell then what it has compiled.
    """
    folder = folder_of(versions)
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)  # what lies there is executed
    if not (folder / ABOUT).exists():
        write_json(folder / ABOUT, dict(versions))
    places = VARIABLES if has_bytecode else VARIABLES | BYTECODE
    return {name: str(folder / place) if place else "" for name, place in places.items()} | SWITCHES


def files_in(folder: Path) -> frozenset[str]:
    """Return the paths of all kernels' files, relative to the folder."""
    found = (os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names)
    return frozenset(path for path in found if not PASSING.search(path))


def describe(made: frozenset[str]) -> str:
    """Return in words what was compiled: `nothing`, or the number of files by library."""
    by_library = Counter(path.partition(os.sep)[0] for path in made)
    return ", ".join(f"{name} {count}" for name, count in sorted(by_library.items())) or "nothing"
