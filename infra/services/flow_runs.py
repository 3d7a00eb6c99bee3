"""Close flow runs whose process is gone: they do not stay Running after the next start.

Each top-level flow run is recorded with its process in `services/flow-runs/` of the workspace. A worker reports the death of a flow run's
process, unless the worker died too. A process in a shell has no worker to report it.
"""

import logging
import platform
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict

from infra.processes import children
from infra.processes.children import ProcessRef
from infra.services import prefect_api
from infra.store.files import read_note, write_note
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

AT_WORK = ["RUNNING", "PENDING", "CANCELLING"]
MESSAGE = "The process that made this flow run is gone. Run the same again."


class Note(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    process: ProcessRef
    host: str
    """Host of the process. Several machines may share a workspace, and they do not see each other's processes."""
    api_url: str


def folder() -> Path:
    return Workspace.here().services / "flow-runs"


def note(flow_run_id: str, api_url: str, pid: int) -> None:
    made = Note(process=children.ref_of(pid), host=platform.node(), api_url=api_url)
    folder().mkdir(parents=True, exist_ok=True)
    write_note(folder() / f"{flow_run_id}.json", made.model_dump(mode="json"))


def close_dead(api_url: str) -> None:
    """Set flow runs to Crashed that a server shows as Running and whose process on this machine is gone, with their subflow runs."""
    dead = [path for path in sorted(folder().glob("*.json")) if _is_dead(path, api_url)]
    if not dead:
        return
    try:
        with prefect_api.api_client(api_url) as client:
            closed = _close(client, [path.stem for path in dead])
    except (httpx.HTTPError, ValueError) as error:
        log.warning("flow runs whose process is gone could not be closed: %s", error)
        return
    for path in dead:
        path.unlink(missing_ok=True)
    if closed:
        log.warning("%d flow runs were Running and their process is gone: they are Crashed now", closed)


def of_process(process: ProcessRef) -> tuple[str, str] | None:
    """Return id and server of the flow run of a process on this machine. None if none is recorded."""
    for path in sorted(folder().glob("*.json")):
        noted = read_note(path, Note)
        same = noted and (noted.process.pid, noted.process.started_ticks) == (process.pid, process.started_ticks)
        if noted and same and noted.host == platform.node():
            return path.stem, noted.api_url
    return None


def cancel(flow_run_id: str, api_url: str) -> None:
    """Have the worker end a flow run."""
    with prefect_api.api_client(api_url) as client:
        body = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True}
        prefect_api.asked(client, "POST", f"/flow_runs/{flow_run_id}/set_state", body)


def _is_dead(path: Path, api_url: str) -> bool:
    noted = read_note(path, Note)
    return (
        noted is not None and (noted.host, noted.api_url) == (platform.node(), api_url) and children.find(noted.process) is None
    )


def _close(client: httpx.Client, roots: list[str]) -> int:
    """Set these flow runs and their subflow runs to Crashed if they are active. A root may be Crashed already while its children are not."""
    found = _at_work(client, {"id": {"any_": roots}})
    below = _at_work(client, {"parent_flow_run_id": {"any_": roots}})
    while below:
        found += below
        below = _at_work(client, {"parent_flow_run_id": {"any_": below}})
    for flow_run in found:
        state = {"type": "CRASHED", "name": "Crashed", "message": MESSAGE}
        prefect_api.asked(client, "POST", f"/flow_runs/{flow_run}/set_state", {"state": state, "force": True})
    return len(found)


def _at_work(client: httpx.Client, by: dict[str, Any]) -> list[str]:
    """Return the ids of the flow runs that the server shows as active."""
    body = {"flow_runs": by | {"state": {"type": {"any_": AT_WORK}}}}
    return [str(each["id"]) for each in prefect_api.asked(client, "POST", "/flow_runs/filter", body)]
