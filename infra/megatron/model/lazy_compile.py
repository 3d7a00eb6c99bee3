"""Load torch's compiler at the first call of a compiled function, not at its definition.

megatron-core decorates its fused operations with torch.compile when it is imported, and the first of them loads torch._inductor: half of
the program's imports (docs/history/log.md, 2026-11-23), for operations that this trainer never calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch


# Perf: imports 10.3 -> 4.9 s, the whole program 18.2 -> 13.8 s, at each start of a trainer (2 CPU cores, docs/history/log.md).
@contextmanager
def compiled_at_first_call() -> Iterator[None]:
    """Delay the compilation of functions that torch.compile decorates in the block. For imports."""
    compile_now = torch.compile
    torch.compile = partial(_late, compile_now)
    try:
        yield
    finally:
        torch.compile = compile_now


def _late(compile_now: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    if function is None:
        return partial(_late, compile_now, **options)
    compiled = cache(lambda: compile_now(function, **options))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # Any: what the function takes and gives
        return compiled()(*args, **kwargs)

    return call
