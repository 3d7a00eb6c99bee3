"""A mend of SGLang 0.5.18 (and earlier ones, by its issues), loaded by `sglang_server.py`: a request that is aborted while it waits for its
turn keeps its claim on its adapter, so that the adapter can never be unloaded: /unload_lora_adapter does not answer any more
(sgl-project/sglang, issues #29179 and #34205; pull requests #29565 and #34225 mend it in the same place).

Runs in SGLang's own environment and imports nothing of ours.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

RELEASED_BY_WAITER = (500, 503)
"""Statuses for which the request that waits for the answer gives the claim back itself."""
_releases: set[Any] = set()
"""asyncio keeps no task alive by itself."""


def with_release(handle: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`TokenizerManager._handle_abort_req`, and the claim on the adapter given back once where it ended the request."""
    if "lora" in inspect.getsource(handle):  # a version that does it itself: given back twice, a claim blocks the adapter as well
        return handle

    def handled(manager: Any, aborted: Any) -> None:
        state = manager.rid_to_state.get(aborted.rid)
        handle(manager, aborted)
        is_ended = state is not None and aborted.rid not in manager.rid_to_state
        status = (getattr(aborted, "finished_reason", None) or {}).get("status_code")
        if is_ended and manager.enable_lora and getattr(state.obj, "lora_path", None) and status not in RELEASED_BY_WAITER:
            release = asyncio.create_task(manager.lora_registry.release(state.obj.lora_id))
            _releases.add(release)
            release.add_done_callback(_releases.discard)

    return handled


def mend() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    TokenizerManager._handle_abort_req = with_release(TokenizerManager._handle_abort_req)
