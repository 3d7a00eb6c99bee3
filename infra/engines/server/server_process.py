"""A rollout engine that is a server program: started once, adopted by later processes, ended only by us.

`engine.json` in the workspace says which process serves what. A later process adopts that server if it is alive and was started
with the same model, flags and versions; otherwise it ends it and starts another. `engine.key` beside it holds that launch's API key, for this
user's eyes only; every request carries it.
"""

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict, SecretStr

from infra.config import ColocationPlan
from infra.engines.interface import EngineRefused, EngineUnavailable
from infra.machine import devices
from infra.processes import children, gpu_programs
from infra.processes.children import ProcessRef
from infra.processes.logs import last_traceback
from infra.progress import work as progress
from infra.settings import settings
from infra.store.files import read_note, read_secret, write_json, write_note, write_secret
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 3600
"""For which a server keeps an idle connection open, by default 5 s: one that it closes just when a request is sent is an error
to the client, who cannot know whether the request was begun."""


class ServerState(BaseModel):
    """The content of engine.json."""

    # An engine that an earlier version of Ratchet started is adopted or ended like any other, also with other fields in its state.
    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: str
    process: ProcessRef
    url: str
    identity: str
    """Digest of model, flags and versions; another identity needs another server."""
    log_path: Path
    launch: int
    """How many servers this workspace has started, this one included."""
    is_awake: bool = True
    is_settled: bool = True
    """No change (of memory or adapters) was begun and not finished: what else is said here is so."""
    is_verified: bool = False
    """It has passed golden check, prefix cache probe and canary with what it serves since it last changed."""
    backends: dict[str, str] = {}
    """What it computes with, by its own word after its launch."""
    adapters: tuple[str, ...] = ()
    """Names that are loaded; with lora_mode=merged, that of the adapter in its weights."""
    slept_by: ColocationPlan | None = None
    """The plan by which it fell asleep, and by which it has to be woken, even if today's is another; None while it is awake."""
    released: dict[int, int] = {}
    """Bytes by GPU that it gave to the trainer, and needs again to wake."""
    kv_cache_tokens: int = 0
    """Room in its KV cache when it was last launched or woken; 0 where it does not say."""

    def but(self, **changes: object) -> "ServerState":
        return type(self).model_validate(dict(self) | changes)


def state_path() -> Path:
    return Workspace.here().engine_state


def recorded() -> ServerState | None:
    """What engine.json says, whether or not that server still lives."""
    return read_note(state_path(), ServerState)


def remember(state: ServerState) -> ServerState:
    write_note(state_path(), state.model_dump(mode="json"))
    return state


def key_path() -> Path:
    """The file of the living server's API key; the server program reads it at its start."""
    return Workspace.here().engine_key


def authorization() -> dict[str, str]:
    """The header of every request to the server; empty where none was launched."""
    return {"Authorization": f"Bearer {read_secret(key_path()).get_secret_value()}"} if key_path().exists() else {}


def stop_recorded() -> bool:
    """End the server of this workspace, if one lives; says whether one did."""
    state = recorded()
    if state is None:
        return False
    alive = children.find(state.process) is not None
    gpu_programs.stop(state.process)
    state_path().unlink(missing_ok=True)
    key_path().unlink(missing_ok=True)
    return alive


def begin_change(state: ServerState) -> ServerState:
    """Mark a server's state as changing, until its new state is recorded. Should we die
    between the two, the server is not adopted, since its state is unknown."""
    remember(state.but(is_settled=False))
    return state.but(is_verified=False)


def adopt(identity: str, ready_path: str) -> ServerState | None:
    """The living server with this identity; a dead one, or one of another identity, is cleared away."""
    state = recorded()
    if state is None:
        return None
    if children.find(state.process) is None:
        log.warning("the engine with pid %d is gone; its log is %s", state.process.pid, state.log_path)
    elif not state.is_settled:
        log.warning("the engine with pid %d was interrupted in the middle of a change: ending it", state.process.pid)
    elif state.identity != identity:
        log.info("the engine with pid %d serves another model or has other flags or versions: ending it", state.process.pid)
    elif is_ready(state.url, ready_path):
        return state
    else:
        log.warning("the engine with pid %d does not answer: ending it", state.process.pid)
    stop_recorded()
    return None


def launch(
    kind: str, argv: Sequence[str], env: dict[str, str], *, identity: str, ready_path: str, timeout_s: float, port: int
) -> ServerState:
    """Start a server with an API key of its own in `key_path()`, and wait until it answers.

    Raises:
        EngineUnavailable: if it does not come up; the message holds the end of its log.
    """
    launch_number = _next_launch()
    log_path = Workspace.here().logs / f"{kind}-{launch_number:04d}.log"
    log.info("starting %s on port %d; its log is %s", kind, port, log_path)
    write_secret(key_path(), SecretStr(secrets.token_urlsafe(32)))
    ref = gpu_programs.start(kind, argv, log_path, env, state_file=state_path())
    url = f"http://{settings().own_host}:{port}"
    state = ServerState(kind=kind, process=ref, url=url, identity=identity, log_path=log_path, launch=launch_number)
    remember(state)  # before it is ready: should we die now, the next process finds it
    try:
        with progress.work(f"starting {kind}"):
            children.wait_until(lambda: is_ready(url, ready_path), what=kind, timeout_s=timeout_s, ref=ref, log_path=log_path)
        gpu_programs.record_shared_memory(ref)
    except children.ProgramFailed as error:
        stop_recorded()
        raise EngineUnavailable(str(error), last_traceback(log_path)) from error
    except BaseException:
        stop_recorded()
        raise
    return state


def num_launches() -> int:
    """Of servers, in this workspace so far."""
    return read_note(_counter(), int) or 0


def _next_launch() -> int:
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
    """Raises httpx.HTTPError. Engines speak plain HTTP and are reached without a proxy; by default httpx reads all certificates of this
    machine for each request, which takes 27 ms where the rest takes 1.4."""
    # Perf: 27 of 28 ms of a control call; last training kernel to first token 0.56 -> 0.35 s (CPU, docs/history/log.md).
    with httpx.Client(verify=False, trust_env=False, headers=authorization(), timeout=timeout_s, follow_redirects=True) as client:
        return client.request(method, url, json=body)


def post(url: str, path: str, body: dict[str, object], timeout_s: float) -> httpx.Response:
    """One request to a server.

    Raises:
        EngineUnavailable: if it cannot be reached, does not answer in time, or fails (HTTP 5xx).
        EngineRefused: if it calls the request wrong (HTTP 4xx).
    """
    try:
        response = request("POST", url + path, timeout_s, body)
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{url}{path}: {type(error).__name__} {error}") from error
    return answered(response)


def answered(response: httpx.Response) -> httpx.Response:
    """Sort an answer by its status; raises as `post` does."""
    check_status(str(response.request.url), response.status_code, response.text)
    return response


def check_status(url: str, status: int, text: str) -> None:
    """Raises as `post` does."""
    if status >= 500:
        raise EngineUnavailable(f"{url}: HTTP {status} {text[:500]}")
    if status >= 400:
        raise EngineRefused(f"{url}: HTTP {status} {text[:500]}")


def get(url: str, path: str, timeout_s: float) -> httpx.Response:
    """As `post`."""
    try:
        return answered(request("GET", url + path, timeout_s))
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{url}{path}: {type(error).__name__} {error}") from error


def kv_cache_tokens() -> int:
    """Room in the engine's KV cache; 0 where it does not say, or no engine is there."""
    state = recorded()
    return state.kv_cache_tokens if state else 0


def memory_in_use_gib() -> float:
    """GPU memory in use as reported by NVML; on a CPU the resident memory of the engine's processes."""
    if devices.device() == "cuda":
        return devices.gpu_memory_used_bytes() / 2**30
    state = recorded()
    return children.resident_bytes(state.process) / 2**30 if state else 0.0
