"""SGLang's memory API: drain, release, resume, read the weights again; and with them, merged weights.

    stop new requests -> drain -> release -> (NVML confirms) -> ... -> (NVML shows free memory) -> resume -> weights -> continue

What stands in brackets is the same for all engines: ServerEngine.

Facts of SGLang 0.5.17/0.5.18: release while a request is under way kills the server, and so does resume without release; weights that
were released without a copy are garbage after the resume, and success is reported.
"""

import logging
import time
from pathlib import Path
from typing import Any

from infra.concurrency import polling
from infra.config import ColocationPlan
from infra.engines.server import server_process
from infra.failures import EngineRefused, EngineUnavailable

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 120.0
WEIGHTS_TIMEOUT_S = 900.0
"""For reading all weights from disk."""
DRAIN_DEADLINE_S = 60.0
RELEASED_TAGS: dict[ColocationPlan, list[str]] = {
    "keep_weights": ["kv_cache"],
    "offload": ["kv_cache", "weights"],
    "reload": ["kv_cache", "weights"],
}
"""What a plan takes off the GPU; with `restart` the whole server goes, with `separate_gpus` nothing does."""
BASE_VERSION = "default"
"""SGLang's word for the weights that it was launched with."""


def release(url: str, plan: ColocationPlan) -> None:
    """Have the server release what the plan says."""
    drain(url)
    server_process.post(url, "/release_memory_occupation", {"tags": RELEASED_TAGS[plan]}, CONTROL_TIMEOUT_S)


def drain(url: str) -> None:
    """Let no new request in and break off those that are under way; they are not waited for.

    Raises:
        EngineUnavailable: if some go on all the same.
    """
    server_process.post(url, "/pause_generation", {"mode": "abort"}, CONTROL_TIMEOUT_S)
    _wait_until_idle(url, "a release would kill it")


def empty_cache(url: str, timeout_s: float) -> None:
    """Have the server forget all texts that it has computed; each request of this may take timeout_s seconds.

    Requests that are under way are those of a client that has ended: an engine has one owner, who does not sample twice at a time. They are
    aborted.

    Raises:
        EngineUnavailable: if some go on all the same.
    """
    if not _is_idle(url, timeout_s):
        server_process.post(url, "/abort_request", {"abort_all": True}, timeout_s)
        _wait_until_idle(url, "its prefix cache cannot be emptied")


def _wait_until_idle(url: str, why: str) -> None:
    """Wait until nothing is under way; its cache is empty then. Raises EngineUnavailable past the deadline.

    why: what follows if it is not.
    """
    begin = time.monotonic()
    while not _is_idle(url):
        if time.monotonic() - begin > DRAIN_DEADLINE_S:
            raise EngineUnavailable(f"{DRAIN_DEADLINE_S:g} s after they were aborted the engine still works on requests: {why}")
        polling.pause(begin)


def _is_idle(url: str, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
    """SGLang flushes its cache only when it is idle, and reports whether it did."""
    try:
        server_process.post(url, "/flush_cache", {}, timeout_s)
    except EngineRefused:
        return False
    return True


def resume(url: str, plan: ColocationPlan, model_folder: Path) -> None:
    """Wake a server that released memory by this plan."""
    server_process.post(url, "/resume_memory_occupation", {"tags": RELEASED_TAGS[plan]}, CONTROL_TIMEOUT_S)
    if plan == "reload":
        update_weights(url, model_folder, BASE_VERSION)
    server_process.post(url, "/continue_generation", {}, CONTROL_TIMEOUT_S)


def kv_cache_tokens(url: str) -> int:
    """Room in the KV cache; 0 where the server does not say."""
    said = server_process.get(url, "/server_info", CONTROL_TIMEOUT_S).json()
    return int(said.get("max_total_num_tokens", 0)) if isinstance(said, dict) else 0


def update_weights(url: str, folder: Path, version: str) -> None:
    """Read weights from a folder: all of a model's, or some of them, and the others stay as they are. Answers name the version."""
    begin = time.monotonic()
    body: dict[str, Any] = {"model_path": str(folder), "weight_version": version}
    server_process.post(url, "/update_weights_from_disk", body, WEIGHTS_TIMEOUT_S)
    log.info("weights %s were read in %.2f s", version, time.monotonic() - begin)
