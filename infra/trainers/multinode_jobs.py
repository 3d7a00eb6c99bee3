"""Announce a training job to the other nodes: a file in the workspace, which all nodes share.

worker's torchrun trainer --trainer-call.json--> `python -m infra.trainers.join_node --follow N` on each other node
"""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.store.files import read_json, write_json
from infra.store.layout import Workspace

POLL_S = 1.0


class MultinodeJob(BaseModel):
    """A job that node 0 starts. The latest call replaces earlier ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """Identifier of the call. Two attempts at one job are two calls."""
    job: Path


def _place() -> Path:
    return Workspace.here().trainer_call


def make(job: Path) -> None:
    write_json(_place(), MultinodeJob(id=uuid.uuid4().hex, job=job.absolute()).model_dump(mode="json"))


def latest() -> MultinodeJob | None:
    return MultinodeJob.model_validate(read_json(_place())) if _place().exists() else None


def progress_of_log(poll_s: float = POLL_S) -> Iterator[MultinodeJob]:
    """Yield each new call as it comes. A call made before is skipped."""
    before = latest()
    while True:
        now = latest()
        if now is not None and now != before:
            before = now
            yield now
        time.sleep(poll_s)
