"""Send our log lines to the pages of the flow run and the task run in which they are written, from any process.

Prefect's setting PREFECT_LOGGING_EXTRA_LOGGERS does this too, but only if it is set before Prefect is imported: in a worker, not in a terminal.
"""

import logging

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

LOGGERS = ("infra", "tasks")


class FlowRunLogHandler(APILogHandler):
    """Sends lines of INFO and above. Lines outside any flow run have no page and are left out."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.addFilter(has_page)


def has_page(record: logging.LogRecord) -> bool:
    """Whether a line is written inside a flow run or a task run."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def install() -> None:
    """Install the handler, once in each process. Further calls change nothing."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            logger.addHandler(FlowRunLogHandler())
