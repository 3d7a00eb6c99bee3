"""The parts of a server: one process on each node that it is spread over, of which the first answers. Without a cluster there is one.

It lives while all of its parts live. Each is started, watched and ended by the agent of its own node.
"""

import contextvars
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from infra.cluster import connection, node_agent
from infra.cluster.nodes import Node
from infra.failures import EngineUnavailable, NodeLost
from infra.processes import gpu_programs, logs
from infra.processes.children import ProcessRef

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the parts in a rollout."""
BROKEN = re.compile(r"Connection (closed|reset) by peer|Socket (Timeout|closed)|gloo|Gloo|DistBackendError|NCCL error")
"""In the error of a part that misses another one: the cause is elsewhere."""


class Launch(NamedTuple):
    """A program to start for a part."""

    node: Node
    argv: Sequence[str]
    env: Mapping[str, str]


def start(kind: str, program: Launch, log_path: Path, state_file: Path) -> ProcessRef:
    """Start a part on its node. state_file: Where the server is recorded, for one on this machine without a cluster."""
    node, argv, env = program
    if node.key:
        return node.call(node_agent.start, kind, argv, log_path, env)
    return gpu_programs.start(kind, argv, log_path, env, state_file=state_file)


class ServerPart(BaseModel):
    """A process of a server."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    process: ProcessRef
    node: str = ""
    """Key of the cluster's node that it runs on; empty: this machine."""
    log_path: Path
    released: dict[int, int] = {}
    """Bytes by GPU of its node that it released for the trainer, and needs again to wake."""

    def is_alive(self) -> bool:
        """Whether it lives. Raises NodeLost."""
        return connection.node_of(self.node).call(node_agent.is_alive, self.process)


def stop(parts: Sequence[ServerPart], name: str) -> None:
    """End them. Those of lost nodes are not ended by their pids: their agents end with the node or with their driver, and they with the agents."""
    for part in parts:
        try:
            connection.node_of(part.node).call(node_agent.stop, part.process)
        except NodeLost as lost:
            log.info("the server of %s is not ended by its pid: %s", name, lost)


def check(parts: Sequence[ServerPart]) -> None:
    """Check that all but the first live, or have ended because they missed another one: what the first says of the loss of another names no node.

    Raises:
        NodeLost, EngineUnavailable: if one does not; names it, with the end of its log.
    """
    for rank, part in enumerate(parts[1:], start=1):
        if not part.is_alive() and not BROKEN.search(logs.last_traceback(part.log_path)):
            node = connection.node_of(part.node).address
            raise EngineUnavailable(
                f"part {rank} of the engine, on node {node}, is gone; the end of {part.log_path}:\n{logs.last_lines(part.log_path)}"
            )


@contextmanager
def watched(parts: Sequence[ServerPart], end: Callable[[], object]) -> Iterator[None]:
    """Look after the parts of a server while it samples. If one is gone, the server is ended, because the first may wait for it for ever.

    end: Ends the server.

    Raises:
        NodeLost, EngineUnavailable: in place of the error in the block, if another part than the first is gone.
    """
    if len(parts) == 1:
        yield
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            try:
                check(parts)
            except EngineUnavailable as error:
                log.warning("the engine is ended, it has lost a part: %s", str(error).partition("\n")[0])
                end()
                return

    watcher = threading.Thread(target=contextvars.copy_context().run, args=(look,), name="engine parts", daemon=True)
    watcher.start()
    try:
        yield
    except EngineUnavailable as error:
        try:
            check(parts)
        except EngineUnavailable as cause:
            raise cause from error
        raise
    finally:
        over.set()
        watcher.join()


def log_tail(parts: Sequence[ServerPart]) -> str:
    """Return the end of each part's log."""
    return "\n".join(logs.last_lines(part.log_path) for part in parts if part.log_path.exists())


def last_traceback(parts: Sequence[ServerPart]) -> str:
    """Return the last traceback in the log of the first part that has one. Those of parts that missed another one do not count."""
    found = [logs.last_traceback(part.log_path) for part in parts]
    return next((text for text in found if text and (len(parts) == 1 or not BROKEN.search(text))), "")
