"""Of two machines one makes a run: whether the store has it as another machine makes it, asked before anything of a step is made."""

import logging

from infra.mirror import copying
from infra.mirror.copies import BEGINNING, index_name, step_part
from infra.mirror.copying import AnotherRun
from infra.mirror.remote import CHECK_S, Remote, RemoteError
from infra.mirror.under_way import check_writer, read_under_way
from infra.runs import lineage
from infra.settings import settings
from infra.store.files import run_id

log = logging.getLogger(__name__)


def check_is_ours(run: str) -> None:
    """Check that no other machine has begun or continued a run, as far as the store at RATCHET_STORE_URL says. One that is away says nothing.

    Raises:
        AnotherRun: in one line, with what to do.
    """
    url = settings().store_url
    if url is None or copying.is_away(url):
        return
    remote = Remote(url, CHECK_S)
    try:
        if run_id(run):
            _check_begun(remote, run)
        elif copying.there(remote, index_name(run, BEGINNING)) or read_under_way(remote, run):
            raise AnotherRun(
                f"{url} holds a run {run!r} that is not here: `ratchet run --from {url}/{run}` goes on with it; for a new run give another name"
            )
    except RemoteError as error:
        log.info("whether another machine makes run %s is not known: %s", run, error)


def _check_begun(remote: Remote, run: str) -> None:
    """Compare the last step that is here, and ask for the next, which only another machine can have copied."""
    made = lineage.committed_steps(run)
    numbers = (made[-1], made[-1] + 1) if made else (0,)
    for part in (BEGINNING, *map(step_part, numbers)):
        copying.check_part(remote, run, part)
    check_writer(remote, run)
