"""Paid answers of models that judge, which lie in the workspace's ledger, in copies of a run: beside the files of the step or the evaluation.

The ledger is for all runs of a workspace. A step and an evaluation have what they paid in paid.jsonl when they are complete; of one under way
it is read from the ledger.
"""

import logging
from collections.abc import Collection
from pathlib import Path

from infra.mirror.copies import evaluation_part, step_part
from infra.rewards.judges.ledger import Ledger, evaluation_work, step_work
from infra.store.layout import PAID, RunFolder, Workspace

log = logging.getLogger(__name__)


def paid_under_way(run: str, copied: Collection[str]) -> list[tuple[Path, bytes]]:
    """Return what steps and evaluations of a run have paid, as far as it is not in the store with them.

    copied: Names of the parts that the store has.
    """
    if not Workspace.here().judgements.exists():
        return []
    folder = RunFolder.of(run)
    steps = [path for path in sorted(folder.steps.glob("[0-9]*")) if step_part(int(path.name)) not in copied]
    evaluations = [path for path in sorted(folder.evaluations.glob("[0-9]*")) if evaluation_part(path.name) not in copied]
    with Ledger() as ledger:
        found = [(path / PAID, ledger.paid(run, _work(path))) for path in (*steps, *evaluations)]
    return [(path, paid) for path, paid in found if paid]


def take_over(run: str, folder: Path) -> None:
    """Record in this workspace's ledger what a fetched run has paid elsewhere. Again costs nothing: a payment is recorded once.

    folder: The run's, before it is published.

    Raises:
        ValueError: for a file that this version cannot read.
    """
    paths = sorted(folder.glob(f"*/*/{PAID}"))
    if not paths:
        return
    with Ledger() as ledger:
        num_new = sum(ledger.take_over(run, _work(path.parent), path.read_bytes()) for path in paths)
    log.info("%d paid answers of judges of run %s fetched", num_new, run)


def _work(folder: Path) -> str:
    """Name the work of a step's folder or an evaluation's, as the ledger does."""
    if folder.parent.name == RunFolder.of("").steps.name:
        return step_work(int(folder.name))
    return evaluation_work(int(folder.name.partition("-")[0]))
