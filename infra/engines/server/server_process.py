"""A rollout engine that is a server program: started once, adopted by later processes, ended only by us.

`engine.json` in the workspace records which process serves what. A later process adopts that server if it is alive and was started with
the same model, flags and versions. Otherwise it ends the server and starts another. `engine.key` next to it holds the API key of that
launch, readable only by this user. Every request carries it. If the engine has several replicas, each of the others has a state and a key
of its own: `engine-1.json`, `engine-1.key`. A second model that judges has `judge.json` and `judge.key`; its number is JUDGE.
"""

import logging
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from infra.cluster import connection
from infra.config import ColocationPlan
from infra.engines.interface import EngineRefused, EngineUnavailable
from infra.engines.server import parts
from infra.engines.server.parts import Launch, ServerPart
from infra.failures import NodeLost
from infra.machine import devices
from infra.processes import children, gpu_programs
from infra.processes.children import ProcessRef
from infra.progress import work as progress
from infra.progress.brief import brief
from infra.settings import host_port, settings
from infra.store.files import read_note, read_secret, write_json, write_note, write_secret
from infra.store.layout import JUDGE, Workspace

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
_counting = threading.Lock()
KEEP_ALIVE_S = 3600
"""Seconds that a server keeps an idle connection open; the default is 5 s. If the server closes a connection just as a request is sent, the
client gets an error and cannot know whether the request was started."""


class ServerState(BaseModel):
    """The content of engine.json, or of another replica's state."""

    # An engine started by an earlier version of Ratchet is adopted or ended like any other, even if its state has other fields.
    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: str
    replica: int = Field(default=0, exclude=True)
    """Number of the server among the engine's replicas; in the file's name."""
    process: ProcessRef
    node: str = ""
    """Key of the cluster's node that it runs on; empty: this machine."""
    url: str
    identity: str
    """Digest of model, flags and versions. Another identity needs another server."""
    log_path: Path
    launch: int
    """Number of servers that this workspace has started, including this one."""
    is_awake: bool = True
    is_settled: bool = True
    """No change of memory or adapters is unfinished: the other fields are valid."""
    is_verified: bool = False
    """It has passed golden check, prefix cache probe and canary since its last change."""
    backends: dict[str, str] = {}
    """Its backends, as reported after its launch."""
    adapters: tuple[str, ...] = ()
    """Names of loaded adapters. With lora_mode=merged: the adapter in its weights."""
    slept_by: ColocationPlan | None = None
    """The plan that put it to sleep. It must be woken by the same plan, even if the current plan differs. None while it is awake."""
    released: dict[int, int] = {}
    """Bytes by GPU that it released for the trainer, and needs again to wake."""
    others: tuple[ServerPart, ...] = ()
    """Of a server that is spread over several nodes: its parts on the other ones."""
    kv_cache_tokens: int = 0
    """Size of its KV cache in tokens when it was last launched or woken; 0 if not reported."""
    num_answered: int | None = None
    """Requests that it had answered when it fell asleep; of the judge's server only."""

    @property
    def parts(self) -> tuple[ServerPart, ...]:
        """Its processes, in the order of their ranks."""
        return ServerPart(process=self.process, node=self.node, log_path=self.log_path, released=self.released), *self.others

    def with_released(self, of_parts: Sequence[Mapping[int, int]]) -> "ServerState":
        """of_parts: What each part released."""
        first, *rest = of_parts
        others = [part.model_copy(update={"released": dict(found)}) for part, found in zip(self.others, rest, strict=True)]
        return self.but(released=dict(first), others=others)

    def but(self, **changes: object) -> "ServerState":
        return type(self).model_validate(dict(self) | changes)


def state_path(replica: int = 0) -> Path:
    return Workspace.here().state_of_replica(replica)


def recorded(replica: int = 0) -> ServerState | None:
    """Return the recorded state of a replica, whether or not that server is still alive."""
    state = read_note(state_path(replica), ServerState)
    return state.but(replica=replica) if state and replica else state


def all_recorded() -> list[ServerState]:
    """Return the recorded state of each replica, alive or not."""
    found = [recorded(replica) for replica in Workspace.here().recorded_replicas()]
    return [state for state in found if state is not None]


def remember(state: ServerState) -> ServerState:
    write_note(state_path(state.replica), state.model_dump(mode="json", exclude=None if state.node else {"node", "others"}))
    return state


def is_alive(state: ServerState) -> bool:
    """Whether a server lives, with all its parts. One of a lost node does not."""
    try:
        return all(part.is_alive() for part in state.parts)
    except NodeLost:
        return False


def key_path(replica: int = 0) -> Path:
    """The file with the running server's API key. The server program reads it when it starts."""
    return Workspace.here().key_of_replica(replica)


def authorization(url: str) -> dict[str, str]:
    """Return the header of every request to the server at this address; empty if none was launched."""
    there = [state for state in all_recorded() if f"{url}/".startswith(f"{state.url}/")]
    path = key_path(max(there, key=lambda state: state.launch).replica if there else 0)
    return {"Authorization": f"Bearer {read_secret(path).get_secret_value()}"} if path.exists() else {}


def stop_recorded(first: int | None = None) -> bool:
    """End the servers of this workspace: from this replica of the engine on, or all, the judge's too. Returns whether one was alive."""
    were_alive = [stop_replica(replica) for replica in Workspace.here().recorded_replicas() if first is None or replica >= first]
    return any(were_alive)


def stop_replica(replica: int) -> bool:
    """End a replica, if it is alive. Returns whether it was."""
    state = recorded(replica)
    if state is None:
        return False
    alive = is_alive(state)
    parts.stop(state.parts, f"replica {replica}")
    state_path(replica).unlink(missing_ok=True)
    key_path(replica).unlink(missing_ok=True)
    return alive


def begin_change(state: ServerState) -> ServerState:
    """Mark a server's state as changing, until its new state is recorded. If this process dies in between, the server is not adopted,
    because its state is unknown."""
    remember(state.but(is_settled=False))
    return state.but(is_verified=False)


def adopt(identity: str, ready_path: str, replica: int = 0) -> ServerState | None:
    """Return the running replica with this identity. A dead one, or one of another identity, is removed."""
    state = recorded(replica)
    if state is None:
        return None
    if not is_alive(state):
        log.warning("the engine with pid %d is gone; its log is %s", state.process.pid, state.log_path)
    elif not state.is_settled:
        log.warning("the engine with pid %d was interrupted in the middle of a change: ending it", state.process.pid)
    elif state.identity != identity:
        log.info("the engine with pid %d serves another model or has other flags or versions: ending it", state.process.pid)
    elif is_ready(state.url, ready_path):
        return state
    else:
        log.warning("the engine with pid %d does not answer: ending it", state.process.pid)
    stop_replica(replica)
    return None


def launch(
    kind: str,
    programs: Sequence[Launch],
    *,
    identity: str,
    ready_path: str,
    timeout_s: float,
    port: int,
    replica: int = 0,
) -> ServerState:
    """Start a server with a new API key in `key_path(replica)`, and wait until it answers.

    programs: One, or one for each node that it is spread over. port: On the node of the first, which answers.

    Raises:
        EngineUnavailable: if it does not start; the message contains the end of its log.
    """
    launch_number = _next_launch()
    name = "judge" if replica == JUDGE else kind
    log_path = Workspace.here().logs / f"{name}-{launch_number:04d}.log"
    brief.info("starting %s on port %d; its log is %s", f"{kind} for the judge" if replica == JUDGE else kind, port, log_path)
    write_secret(key_path(replica), SecretStr(secrets.token_urlsafe(32)))
    first, *others = programs
    ref = parts.start(kind, first, log_path, state_path(replica))
    url = f"http://{host_port(first.node.address or settings().own_host, port)}"
    state = ServerState(
        kind=kind,
        replica=replica,
        process=ref,
        node=first.node.key,
        url=url,
        identity=identity,
        log_path=log_path,
        launch=launch_number,
    )
    remember(state)  # before it is ready: if this process dies now, the next one finds it
    try:
        for rank, other in enumerate(others, start=1):
            path = log_path.with_name(f"{log_path.stem}-{rank}{log_path.suffix}")
            process = parts.start(kind, other, path, state_path(replica))
            state = remember(state.but(others=(*state.others, ServerPart(process=process, node=other.node.key, log_path=path))))
        with progress.work(f"starting {kind}"):
            children.wait_until(
                lambda: is_ready(url, ready_path),
                what=kind,
                timeout_s=timeout_s,
                ref=ref,
                log_path=log_path,
                is_alive=lambda: all(part.is_alive() for part in state.parts),
            )
        for part in state.parts:
            connection.node_of(part.node).call(gpu_programs.record_shared_memory, part.process)
    except children.ProgramFailed as error:
        stop_replica(replica)
        tails = parts.log_tail(state.others)
        raise EngineUnavailable("\n".join(filter(None, (str(error), tails))), parts.last_traceback(state.parts)) from error
    except BaseException:
        stop_replica(replica)
        raise
    return state


def num_launches() -> int:
    """Number of servers launched in this workspace so far."""
    return read_note(_counter(), int) or 0


def _next_launch() -> int:
    with _counting:  # replicas are launched side by side
        number = num_launches() + 1
        write_json(_counter(), number)
        return number


def _counter() -> Path:
    return Workspace.here().engine_launches


def is_ready(url: str, path: str) -> bool:
    try:
        return request("GET", url + path, PROBE_TIMEOUT_S).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def request(method: str, url: str, timeout_s: float, body: dict[str, object] | None = None) -> httpx.Response:
    """Send one request; raises httpx.HTTPError. Engines use plain HTTP without a proxy. By default httpx reads all certificates of this
    machine for each request, which takes 27 ms; the rest takes 1.4 ms."""
    # Perf: 27 of 28 ms of a control call; last training kernel to first token 0.56 -> 0.35 s (CPU, docs/history/log.md).
    headers = authorization(url)
    with httpx.Client(verify=False, trust_env=False, headers=headers, timeout=timeout_s, follow_redirects=True) as client:
        return client.request(method, url, json=body)


def post(url: str, path: str, body: dict[str, object], timeout_s: float) -> httpx.Response:
    """Send one POST request to a server.

    Raises:
        EngineUnavailable: if it cannot be reached, does not answer in time, or fails (HTTP 5xx).
        EngineRefused: if it rejects the request (HTTP 4xx).
    """
    try:
        response = request("POST", url + path, timeout_s, body)
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{url}{path}: {type(error).__name__} {error}") from error
    return answered(response)


def answered(response: httpx.Response) -> httpx.Response:
    """Check an answer's status. Raises as `post` does."""
    check_status(str(response.request.url), response.status_code, response.text)
    return response


def check_status(url: str, status: int, text: str) -> None:
    """Check an HTTP status. Raises as `post` does."""
    if status >= 500:
        raise EngineUnavailable(f"{url}: HTTP {status} {text[:500]}")
    if status >= 400:
        raise EngineRefused(f"{url}: HTTP {status} {text[:500]}")


def get(url: str, path: str, timeout_s: float) -> httpx.Response:
    """Send one GET request to a server. Raises as `post` does."""
    try:
        return answered(request("GET", url + path, timeout_s))
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{url}{path}: {type(error).__name__} {error}") from error


def kv_cache_tokens(replica: int = 0) -> int:
    """Size of a replica's KV cache in tokens; 0 if not reported, or without an engine."""
    state = recorded(replica)
    return state.kv_cache_tokens if state else 0


def memory_in_use_gib() -> float:
    """Return the GPU memory in use as reported by NVML; on a CPU the resident memory of the engine's processes."""
    if devices.device() == "cuda":
        return devices.gpu_memory_used_bytes() / 2**30
    return sum(_resident_bytes(state) for state in all_recorded()) / 2**30


def _resident_bytes(state: ServerState) -> int:
    try:
        return sum(connection.node_of(part.node).call(children.resident_bytes, part.process) for part in state.parts)
    except NodeLost:
        return 0


def metrics_of(url: str, timeout_s: float) -> list[str]:
    """Return the lines of a server's /metrics, in Prometheus format. Raises EngineUnavailable if it does not answer."""
    try:
        got = request("GET", f"{url}/metrics", timeout_s)
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{url}/metrics: {type(error).__name__} {error}") from error
    return got.text.splitlines()


def number_in(lines: Iterable[str], pattern: str) -> float:
    """Return the first group of the last match. Raises EngineUnavailable if nothing matches."""
    found = [match[1] for line in lines if (match := re.search(pattern, line))]
    if not found:
        raise EngineUnavailable(f"the engine does not say {pattern!r}")
    return float(found[-1].replace(",", ""))
