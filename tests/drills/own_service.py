"""A real Prefect or MLflow server of a cell's own, to be killed with everything that it started."""

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING

import forks
from matrix import Cell

if TYPE_CHECKING:
    from cell import Running

START_LIMIT_S = 120.0


def is_own_service(cell: Cell) -> bool:
    return cell.variant == "real" and cell.target in ("prefect", "mlflow")


class OwnService:
    def __init__(self, running: "Running", name: str) -> None:
        self.running, self.name = running, name

    def start(self) -> None:
        """Started, or found alive."""
        running, name = self.running, self.name

        def ensure() -> int:
            from infra.services import servers

            os.environ.pop("PREFECT_API_URL", None)
            servers.ensure_prefect() if name == "prefect" else servers.ensure_mlflow()
            return 0

        ports = {"RATCHET_PREFECT_PORT": str(running.port), "RATCHET_MLFLOW_PORT": str(running.port + 1)}
        log = running.folder / f"{name}.log"
        if forks.wait(forks.fork(ensure, running.environment | ports, log), START_LIMIT_S) != 0:
            raise LookupError(f"{name} did not start, see {log}")

    def kill(self) -> None:
        """-9, and its whole session."""
        pid = json.loads((self.running.workspace / "services" / f"{self.name}.json").read_bytes())["process"]["pid"]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
