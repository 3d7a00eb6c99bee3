"""Log errors that one line explains completely only once and without a traceback, in the terminal and on Prefect's pages."""

import linecache
import logging
import traceback

from infra.failures import NoNodeForEngine, NoNodesForRanks, RewardFailed, StoreRefused, is_disk_full
from infra.settings import CHECKOUT
from infra.store.files import DigestMismatch
from tasks.support.prefect_calls import FlowRunDeleted

LOGGERS = ("prefect.task_runs", "prefect.flow_runs", "prefect.engine")
ONE_LINE = (RewardFailed, StoreRefused, NoNodeForEngine, NoNodesForRanks, DigestMismatch, FlowRunDeleted)
OURS = ("flows", "infra", "tasks")
"""Folders of the checkout whose `raise ValueError` refuses a value, in one line."""


class Once(logging.Filter):
    """Removes the traceback where such an error is logged first, and drops repetitions: Prefect logs an error in each task and flow
    that it passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and says_all(error):
            is_first, self.logged = not self._repeats(error), error
            record.msg, record.args, record.exc_info = str(error), (), None
            return is_first
        return self.logged is None or not any(said in record.getMessage() for said in self._said(self.logged))

    def _repeats(self, error: BaseException) -> bool:
        """Whether an error is the one that was logged, or was raised with the same message while that one was handled."""
        earlier: BaseException | None = error
        while earlier is not None and earlier is not self.logged:
            earlier = earlier.__context__
        return earlier is not None and str(error) == str(earlier)

    @staticmethod
    def _said(error: BaseException) -> tuple[str, str]:
        """The error's message, and the same as the repr of a state's message has it: quotes and backslashes are escaped there."""
        return str(error), repr(str(error))[1:-1]


def says_all(error: BaseException) -> bool:
    """Whether an error's message explains it completely. Of a ValueError only what our own code raises does: one that a library raises in the middle
    of our work is a mistake whose place matters."""
    if isinstance(error, ONE_LINE) or is_disk_full(error):
        return True
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    file, line = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][-1]
    is_ours = any(file.startswith(f"{CHECKOUT / folder}/") for folder in OURS)
    return is_ours and linecache.getline(file, line).lstrip().startswith("raise ")


def install() -> None:
    """Install the filter, once in each process. Further calls change nothing."""
    once = Once()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(found, Once) for found in logger.filters):
            logger.addFilter(once)
