"""Progress on the page of the Prefect run: a progress artifact for each long piece of work in a task.

A thread sends the updates. There are few of them, however long the work is, and none of them can fail the work. While Prefect's API is
unavailable the page is not updated, and one log line reports this.
"""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectException

from infra.progress import bars
from infra.progress import work as progress
from infra.progress.work import Work, looked_at
from tasks.support.prefect_calls import without_waiting

log = logging.getLogger(__name__)

SHOWN_AFTER_S = 10.0
"""Seconds after which work gets an artifact. Each artifact is a call, a row and an event with its resources."""
UPDATE_EVERY_S = 10.0
NUM_UPDATES = 10
"""Updates of one piece of work, besides its start and its end."""
FAILURES = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
"""Errors of a call to an API that is unavailable, or whose server is just ending."""


def progress_artifacts() -> AbstractContextManager[None]:
    """Show long pieces of work in the block with bars or log lines, and with artifacts if they belong to a task."""
    return progress.watched_by(bars.shown, on_page)


@contextmanager
def on_page(work: Work) -> Iterator[None]:
    """Show one piece of work on the page. A watcher: see infra.progress.work."""
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    if flow is None or flow.flow_run is None or task is None:
        yield
        return
    page = Page(work, key=key_of(flow.flow_run.name.partition("/")[0], work.what))
    with looked_at(page.look, UPDATE_EVERY_S):
        yield
        page.is_over = True


def key_of(*names: str) -> str:
    """Make a key in the form that Prefect requires: small letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


class Page:
    """The artifact of one piece of work."""

    def __init__(self, work: Work, key: str) -> None:
        self.work, self.key = work, key
        self.artifact: UUID | None = None
        self.began = time.monotonic()
        self.num_updates = 0
        self.shown = 0.0
        self.is_over = False
        """The work was completed, without an error."""
        self.is_off = False

    def look(self) -> None:
        if self.is_off:
            return
        try:
            with without_waiting():
                self._update()
        except FAILURES as error:
            self.is_off = True
            log.warning("no more progress of %s on its page: %s: %s", self.work.what, type(error).__name__, error)

    def _update(self) -> None:
        percent = 100.0 if self.is_over else 100 * (self.work.fraction or 0.0)
        about = f"{self.work.what}: done" if self.is_over else str(self.work)
        if self.artifact is None:
            if time.monotonic() - self.began < SHOWN_AFTER_S:
                return
            made = create_progress_artifact(percent, key=self.key, description=about)
            assert isinstance(made, UUID)
            self.artifact = made
        elif self.is_over or (self.num_updates < NUM_UPDATES and abs(percent - self.shown) >= 100 / NUM_UPDATES):
            self.num_updates += 1
            update_progress_artifact(self.artifact, percent, description=about)
        else:
            return
        self.shown = percent
