"""A Ray cluster of this machine alone, for `RATCHET_CLUSTER_ADDRESS=auto`: started by `ratchet up --cluster`, ended by its pid.

It listens on loopback only and refuses all without the token, which is in the workspace, mode 0600. Other clusters are joined, never ended.
"""

import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr

from infra.machine import ports
from infra.processes import children
from infra.processes.children import ProcessRef
from infra.progress.brief import brief
from infra.settings import LOOPBACK
from infra.store.files import PRIVATE, fresh_folder, read_note, write_note, write_secret
from infra.store.layout import Workspace

PORT = 6379
"""First choice."""
START_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's smallest: nothing of ours is put there."""
MAX_SESSION_PATH = 40
"""Characters. Ray adds up to 66, and the kernel's limit is 107."""
READY = "Ray runtime started"


class Head(BaseModel):
    """The note of a cluster that we started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    process: ProcessRef
    address: str
    log_path: Path
    session: Path
    """Folder of its sockets and logs."""


def running() -> Head | None:
    """Return the cluster of this workspace, if it lives."""
    note = read_note(Workspace.here().ray_head, Head)
    return note if note and children.find(note.process) else None


def environment() -> dict[str, str]:
    """Variables of all that belong to this workspace's cluster."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(Workspace.here().ray_token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Otherwise a node at 127.0.0.1 is moved to another address of the machine, and the driver hangs.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Otherwise Ray kills agents when this machine's memory is 95% full, with their engines and ranks.
        "RAY_memory_monitor_refresh_ms": "0",
        # A node counts as lost after 3 s of silence, not after 14.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "5",
    }


def ensure() -> Head:
    """Return this workspace's cluster, started if it does not live.

    Raises:
        ProgramFailed: if it does not start; the message contains the end of its log.
    """
    if (found := running()) is not None:
        return found
    here = Workspace.here()
    write_secret(here.ray_token, SecretStr(secrets.token_hex(16)))
    with ports.reserved(PORT) as port:
        log_path = here.logs / "ray.log"
        brief.info("starting Ray on port %d; its log is %s", port, log_path)
        log_path.unlink(missing_ok=True)
        argv = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--node-ip-address={LOOPBACK}"]
        argv += [f"--port={port}", "--include-dashboard=false", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        session = _session_folder()
        argv += [f"--temp-dir={session}", "--disable-usage-stats"]
        process = children.start(argv, log_path, environment())
        note = Head(process=process, address=f"{LOOPBACK}:{port}", log_path=log_path, session=session)
        write_note(here.ray_head, note.model_dump(mode="json"))
        children.wait_until(
            lambda: READY in log_path.read_text(errors="replace"),
            what="Ray",
            timeout_s=START_TIMEOUT_S,
            ref=process,
            log_path=log_path,
        )
    return note


def stop() -> bool:
    """End this workspace's cluster by the pid that was noted. Returns whether it lived."""
    note = read_note(Workspace.here().ray_head, Head)
    if note is None:
        return False
    is_alive = children.find(note.process) is not None
    children.stop(note.process)
    for path in (Workspace.here().ray_head, Workspace.here().ray_token):
        path.unlink(missing_ok=True)
    shutil.rmtree(note.session, ignore_errors=True)
    return is_alive


def _session_folder() -> Path:
    """Return an empty private folder: in the workspace, or in /tmp if a socket's path would become longer than the kernel allows."""
    folder = Workspace.here().ray_session
    return (
        fresh_folder(folder, PRIVATE) if len(str(folder)) <= MAX_SESSION_PATH else Path(tempfile.mkdtemp(prefix="ratchet-ray-"))
    )
