"""Read which versions an interpreter would import, and whether their bytecode is compiled: `python read_versions.py PACKAGE...` prints JSON.

Runs in the environments of engines and trainer: it uses the standard library alone, and imports none of the packages.
"""

import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

TRAINER_PACKAGES = ("torch", "megatron-core", "transformers", "triton", "flash-attn-4", "quack-kernels", "safetensors", "numpy")
"""Packages that affect the trainer's numbers."""
HERE = Path(__file__).resolve().parent
MODULES = {
    "megatron-core": "megatron",
    "sglang-kernel": "sgl_kernel",
    "flash-attn-4": "flash_attn",
    "flashinfer-python": "flashinfer",
    "quack-kernels": "quack",
}
"""Modules whose name differs from their package's name."""


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, of the installed ones of these packages, and of the CUDA for which torch was built."""
    found = {"python": platform.python_version()}
    found |= {package: version for package in packages if (version := _version(package))}
    return found | ({"cuda": cuda} if "torch" in found and (cuda := _cuda_of_torch()) else {})


def _version(package: str) -> str:
    """Return the version of the module that would be imported: a folder without metadata hides the package that the metadata describes."""
    try:
        about = importlib.metadata.distribution(package)
    except PackageNotFoundError:
        about = None
    folder = _folder(MODULES.get(package, package.replace("-", "_")))
    if folder is None:
        return about.version if about else ""
    if about and (Path(str(about.locate_file(""))).resolve() == folder.resolve() or _is_editable(about)):
        return about.version
    return f"unknown, in {folder}"


def _folder(module: str) -> Path | None:
    """Return the folder that contains a module."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    return Path(places[0]).parent if places else None


def has_bytecode(packages: Iterable[str]) -> bool:
    """Whether all of these packages that are installed have compiled bytecode beside them, by their first files."""
    specs = [importlib.util.find_spec(MODULES.get(package, package.replace("-", "_"))) for package in packages]
    files = [spec.origin for spec in specs if spec is not None and spec.origin and spec.origin.endswith(".py")]
    return all(Path(importlib.util.cache_from_source(file)).exists() for file in files)


def _is_editable(about: Distribution) -> bool:
    told = about.read_text("direct_url.json")
    return bool(told and json.loads(told).get("dir_info", {}).get("editable"))


def _cuda_of_torch() -> str:
    """Return the CUDA version from the file that torch itself reads; empty for a build without CUDA."""
    folder = _folder("torch")
    path = folder / "torch/version.py" if folder else None
    told = re.search(r"^cuda\b[^=\n]*= '([^']+)'", path.read_text(), re.MULTILINE) if path and path.is_file() else None
    return told[1] if told else ""


if __name__ == "__main__":
    # A script's own folder comes first in sys.path, and does not belong to an environment.
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE]
    told = {"versions": versions(sys.argv[1:]), "has_bytecode": has_bytecode(sys.argv[1:]), "path": sys.path}
    print(json.dumps(told))
