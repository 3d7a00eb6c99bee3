"""SGLang's memory API: drain, release, resume, reload the weights; also used for merged weights.

    stop new requests -> drain -> release -> (NVML confirms) -> ... -> (NVML shows free memory) -> resume -> weights -> continue

The parts in brackets are the same for all engines: ServerEngine.

Facts of SGLang 0.5.17/0.5.18: a release during a request kills the server, and so does a resume without a release. Weights that were
released without a copy are garbage after the resume, and success is reported.
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
"""Timeout for reading all weights from disk."""
DRAIN_DEADLINE_S = 60.0
RELEASED_TAGS: dict[ColocationPlan, list[str]] = {
    "keep_weights": ["kv_cache"],
    "offload": ["kv_cache", "weights"],
    "reload": ["kv_cache", "weights"],
}
"""Memory that a plan releases. `restart` ends the whole server; `separate_gpus` releases nothing."""
BASE_VERSION = "default"
"""SGLang's version name for the weights that it was launched with."""


def release(url: str, plan: ColocationPlan) -> None:
    """Have the server release the memory of the plan."""
    drain(url)
    server_process.post(url, "/release_memory_occupation", {"tags": RELEASED_TAGS[plan]}, CONTROL_TIMEOUT_S)


def drain(url: str) -> None:
    """Accept no new requests and abort those under way, instead of waiting for their answers.

    Raises:
        EngineUnavailable: if some requests keep running.
    """
    server_process.post(url, "/pause_generation", {"mode": "abort"}, CONTROL_TIMEOUT_S)
    _wait_until_idle(url, "a release would kill it")


def empty_cache(url: str, timeout_s: float) -> None:
    """Empty the server's prefix cache. Each request may take timeout_s seconds.

    Requests under way belong to a client that has ended, since an engine has one owner, which runs one rollout at a time. They are
    aborted.

    Raises:
        EngineUnavailable: if some requests keep running.
    """
    if not _is_idle(url, timeout_s):
        server_process.post(url, "/abort_request", {"abort_all": True}, timeout_s)
        _wait_until_idle(url, "its prefix cache cannot be emptied")


def _wait_until_idle(url: str, why: str) -> None:
    """Wait until no request is under way; the cache is empty then. Raises EngineUnavailable after the deadline.

    why: The consequence if the server stays busy, for the message.
    """
    begin = time.monotonic()
    while not _is_idle(url):
        if time.monotonic() - begin > DRAIN_DEADLINE_S:
            raise EngineUnavailable(f"{DRAIN_DEADLINE_S:g} s after they were aborted the engine still works on requests: {why}")
        polling.pause(begin)


def _is_idle(url: str, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
    """Whether the server is idle. SGLang flushes its cache only when it is idle, and reports whether it did."""
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
    """Size of the KV cache in tokens; 0 if the server does not report it."""
    said = server_process.get(url, "/server_info", CONTROL_TIMEOUT_S).json()
    return int(said.get("max_total_num_tokens", 0)) if isinstance(said, dict) else 0


def update_weights(url: str, folder: Path, version: str) -> None:
    """Load weights from a folder: all of a model's weights, or only some of them. Later answers report the version."""
    begin = time.monotonic()
    body: dict[str, Any] = {"model_path": str(folder), "weight_version": version}
    server_process.post(url, "/update_weights_from_disk", body, WEIGHTS_TIMEOUT_S)
    log.info("weights %s were read in %.2f s", version, time.monotonic() - begin)
