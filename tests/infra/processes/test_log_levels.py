"""The level of a line of a child program."""

import logging

import pytest

from infra.processes.log_levels import level_of


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("[2026-11-25 07:48:27] Prefill batch, #new-seq: 3, #new-token: 97", logging.DEBUG),
        ("[2026-11-25 07:48:27] WARNING: Fail to set RLIMIT_NOFILE", logging.WARNING),
        ("[2026-11-25 07:48:27 TP0] ERROR: Scheduler hit an exception", logging.ERROR),
        ("(EngineCore_DP0 pid=12) WARNING 11-25 07:48:27 [core.py:81] slow", logging.WARNING),
        ("INFO 11-25 07:48:27 [api_server.py:1] started", logging.DEBUG),
        ("ERROR 11-25 07:48:27 [core.py:81] EngineCore failed", logging.ERROR),
        ("micro-batch 1/8  4096 tokens  loss -0.5", logging.DEBUG),
        ("error: the loss is nan", logging.ERROR),
        ("Traceback (most recent call last):", logging.ERROR),
        ("torch.OutOfMemoryError: CUDA out of memory", logging.ERROR),
        ("build  1.2 s", logging.DEBUG),
        (
            "[2026-11-25 07:48:27] ERROR: [http_server] Error: Request is disconnected from the client side (type 1).",
            logging.DEBUG,
        ),
    ],
)
def test_the_level_is_read_off_the_beginning_of_a_line(line: str, level: int) -> None:
    assert level_of(line) == level
