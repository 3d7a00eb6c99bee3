"""Patch a module when it has been imported, by a process that needs it: an import of SGLang takes seconds.

Runs in SGLang's own environment and imports nothing of ours.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def patch_after_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Have `patch` called with the module of this name, right after this process has imported it."""
    sys.meta_path.insert(0, _PatchAfterImport(name, patch))


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self.name, self.patch = name, patch

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:  # Any: ModuleSpec, or None
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            self.patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec
