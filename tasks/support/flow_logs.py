"""Send our log lines to the pages of the flow run and the task run in which they are written, from any process.

The brief lines of a run's steps and evaluations are on the run's own page too. Prefect's setting PREFECT_LOGGING_EXTRA_LOGGERS does the
first only if it is set before Prefect is imported: in a worker, not in a terminal.
"""

import copy
import logging
from contextvars import ContextVar

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from infra.progress.brief import brief

LOGGERS = ("infra", "tasks")
outermost_flow_run: ContextVar[str | None] = ContextVar("outermost_flow_run", default=None)
"""Id of the flow run that no other one started, set when it starts."""


class FlowRunLogHandler(APILogHandler):
    """Sends lines of INFO and above. Lines outside any flow run have no page and are left out."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.addFilter(has_page)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        context, outermost = FlowRunContext.get(), outermost_flow_run.get()
        inside = context is not None and context.flow_run is not None and str(context.flow_run.id) != outermost
        if record.name == brief.name and outermost and inside:
            for_run = copy.copy(record)
            for_run.flow_run_id = outermost
            super().emit(for_run)


def has_page(record: logging.LogRecord) -> bool:
    """Whether a line is written inside a flow run or a task run."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def install() -> None:
    """Install the handler, once in each process. Further calls change nothing."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            logger.addHandler(FlowRunLogHandler())
