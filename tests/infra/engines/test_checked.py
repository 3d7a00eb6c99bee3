"""Waiting for GPU memory after an engine found none."""

import logging

import pytest

from infra.engines.checked import wait_until_free


def test_the_wait_ends_when_the_memory_is_free() -> None:
    used = iter([0.9, 0.5, 0.2, 0.9])
    assert wait_until_free(lambda: next(used), limit=0.2, timeout_s=0.5)
    assert next(used) == 0.9, "it did not ask again once it was free"


def test_the_wait_ends_at_its_deadline_and_says_what_it_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not wait_until_free(lambda: 0.9, limit=0.2, timeout_s=0.05)
    assert "after 0.05 s 90% of the GPU memory are still in use, the engine needs 80%" in caplog.text
