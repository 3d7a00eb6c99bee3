"""The pause between two looks at something that is mostly over within a second, and may take a minute."""

import time

FAST_S = 1.0
FAST_POLL_S, POLL_S = 0.005, 0.05
"""One query of NVML and of a program's processes takes 2 to 3 ms."""


def pause(since: float) -> None:
    """since: When the first look was, by time.monotonic."""
    time.sleep(FAST_POLL_S if time.monotonic() - since < FAST_S else POLL_S)
