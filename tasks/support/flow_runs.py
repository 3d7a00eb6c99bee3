"""Record each flow run with its process, so that the next start closes dead flow runs that are still Running: infra/services/flow_runs.py."""

import os

from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from infra.services import flow_runs


def note_flow_run() -> None:
    """Record the calling flow run, unless another flow run started it."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    api_url = PREFECT_API_URL.value()
    if api_url and flow_run is not None and flow_run.parent_task_run_id is None:
        flow_runs.note(str(flow_run.id), api_url, os.getpid())
