"""A patch of SGLang 0.5.18, loaded by `sglang_server.py`. According to SGLang's issues, earlier versions have the bug too.

A request that is aborted while it is queued keeps its reference to its adapter. The adapter can then never be unloaded:
/unload_lora_adapter hangs (sgl-project/sglang, issues #29179 and #34205; pull requests #29565 and #34225 fix it in the same place).

Runs in SGLang's own environment and imports nothing of ours.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

RELEASED_BY_WAITER = (500, 503)
"""Statuses for which the waiting request releases the reference itself."""
_releases: set[Any] = set()
"""Running tasks: asyncio itself keeps no reference to a task."""


def with_release(handle: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap `TokenizerManager._handle_abort_req`: if it ended the request, release the reference to the adapter once."""
    if "lora" in inspect.getsource(handle):  # this version does it itself: a reference released twice blocks the adapter as well
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
