"""Each flow run as a person finds it: its name and tags in Prefect, and its process on this machine.

The record of the process lets the next start close dead flow runs that are still Running: infra/services/flow_runs.py.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from infra.config import RunConfig
from infra.reporting.names import tags_of
from infra.services import flow_runs
from tasks.support.flow_logs import outermost_flow_run

PRESET = "preset:"
_made_from: ContextVar[str | None] = ContextVar("made_from", default=None)
"""Tag of flow runs in the block of `made_from`."""
_preset: ContextVar[str | None] = ContextVar("preset", default=None)
"""Tag of the outermost flow run, which the flow runs inside it get too."""


@contextmanager
def made_from(preset: str | None) -> Iterator[None]:
    """Tag the flow runs in the block with a preset's name. None: with none, or with the one of their deployment."""
    token = _made_from.set(preset and f"{PRESET}{preset}")
    try:
        yield
    finally:
        _made_from.reset(token)


def note_flow_run(name: str, config: RunConfig | None = None) -> None:
    """Give the calling flow run its name and its tags, and record its process unless another flow run started it.

    config: The experiment, if it is known.
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    if flow_run is None:
        return
    api_url = PREFECT_API_URL.value()
    if flow_run.parent_task_run_id is None:
        outermost_flow_run.set(str(flow_run.id))
        if api_url:
            flow_runs.note(str(flow_run.id), api_url, os.getpid())
        _preset.set(_chosen_preset(flow_run.tags, context.parameters if context else None) or _made_from.get())
    preset = _preset.get()
    tags = sorted({*flow_run.tags, *(tags_of(config) if config else []), *([preset] if preset else [])})
    if (flow_run.name, sorted(flow_run.tags)) == (name, tags):
        return
    with get_client(sync_client=True) as client:  # one call: Prefect's own `flow_run_name` is another
        client.update_flow_run(flow_run.id, name=name, tags=tags)
    flow_run.name, flow_run.tags = name, tags


def _chosen_preset(tags: Collection[str], parameters: Mapping[str, Any] | None) -> str | None:
    """The tag of the preset that a flow run's tags or its parameters name."""
    named = (parameters or {}).get("preset")
    return next((tag for tag in tags if tag.startswith(PRESET)), None) or (
        f"{PRESET}{named}" if named not in (None, "auto") else None
    )
