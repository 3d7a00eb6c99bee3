"""Rules for reusing a task's cached result.

A key has the form `<run>/<step>/<task>-<digest>`. The digest covers the task's inputs, the sources of all code of ours that it runs, and
the ids of run and step. So a run that was removed and restarted under its old name finds no cached result.
"""

import hashlib
import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from prefect.cache_policies import NO_CACHE, CacheKeyFnPolicy, CachePolicy
from prefect.context import TaskRunContext
from pydantic import BaseModel

from infra.records import AdapterVersion, Step, StepRecord
from infra.store import code_digest
from infra.store.files import id_of
from infra.store.layout import run_folder, step_folder_of

__all__ = ["CACHED", "NO_CACHE", "cached"]

Inputs = dict[str, Any]


def cached(also: Callable[[Inputs], str] = lambda inputs: "", without: Container[str] = ()) -> CachePolicy:
    """Cache by inputs and sources.

    also: Further values that decide the result, from the task's inputs.
    without: Names of inputs that do not affect it.
    """

    def key(context: TaskRunContext, given: Inputs) -> str:
        inputs = {name: value for name, value in given.items() if name not in without}
        run, step, folders = _place(inputs)
        code = code_digest.digest(context.task.fn.__module__)
        ids = [id_of(folder) for folder in folders]
        content = json.dumps([ids, context.task.name, _plain(inputs), code, also(inputs)], sort_keys=True)
        return f"{run}/{step:06d}/{context.task.name}-{hashlib.sha256(content.encode()).hexdigest()[:32]}"

    return CacheKeyFnPolicy(cache_key_fn=key)


CACHED = cached()


def _place(inputs: Inputs) -> tuple[str, int, list[Path]]:
    """Return run and step, from whichever input has them, and the folders without which the result is invalid. An adapter may be an input
    before the step that starts from it has been opened."""
    for value in inputs.values():
        match value:
            case Step(run=run, index=step) | StepRecord(run=run, step=step):
                return run, step, [run_folder(run), step_folder_of(run, step)]
            case AdapterVersion(run=run, version=step):
                return run, step, [run_folder(run)]
    raise AssertionError(f"a cached task needs an input that knows its run and step, got {sorted(inputs)}")


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
