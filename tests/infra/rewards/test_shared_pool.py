"""Two threads call one pool: a step's check waits for the rollout that began early, which ends the pool when enough groups are complete."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from infra.config import RewardConfig, RewardFunction
from infra.rewards import client
from infra.rewards.outcome import Outcome

pytestmark = pytest.mark.usefixtures("workspace")


class Enough(Exception):
    """Ends the call that gets it."""


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    client.close_all()


def test_a_pool_that_another_caller_ends_is_opened_again_by_the_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text("def score(*, row):\n    return row\n")
    function = RewardFunction(name=f"{tmp_path / 'own.py'}:score")
    config = RewardConfig.model_validate({"name": function.name, "workers": 1})
    found: list[float | None] = []
    began, close = threading.Event(), os.close

    def call(row: float, take: client.OnOutcome) -> None:
        client.judge(config, function, "digest", [orjson.dumps({"row": row})], take)

    def wait() -> None:
        began.wait()
        call(2.0, lambda index, outcome: found.append(outcome.reward))

    def end(index: int, outcome: Outcome) -> None:
        found.append(outcome.reward)
        began.set()
        time.sleep(0.3)  # the other one waits for the pool by now
        raise Enough

    def close_slowly(descriptor: int) -> None:
        close(descriptor)
        time.sleep(0.2)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING), pytest.raises(Enough):
        patch.setattr(client.os, "close", close_slowly)
        call(1.0, end)
    waiting.join(timeout=60)
    assert found == [1.0, 2.0]
    assert not caplog.records, "what is in order is no warning"
