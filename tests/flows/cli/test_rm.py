"""`ratchet rm`: what stays of a run that is removed, for the runs after it."""

from pathlib import Path

from flows.cli.work.rm import rm
from infra.rewards.judges.cases import JudgeAnswer
from infra.rewards.judges.ledger import Ledger, step_work
from infra.store.files import write_json
from infra.store.layout import RunFolder


def test_a_new_run_of_a_removed_ones_name_has_a_budget_of_its_own_and_still_pays_nothing_twice(workspace: Path) -> None:
    for run in ("mine", "other"):
        write_json(RunFolder.of(run).path / "id.json", run)
        with Ledger() as ledger:
            ledger.add(run, step_work(0), f"key of {run}", JudgeAnswer("0.5", "stop", 100, 10))
    rm("mine", yes=True)
    with Ledger() as ledger:
        assert (ledger.spent("mine").requests, ledger.spent("other").requests) == (0, 1)
        assert ledger.paid("mine", step_work(0)) == b"", "the new run's step 0 has paid nothing yet"
        assert set(ledger.found(["key of mine"])) == {"key of mine"}
