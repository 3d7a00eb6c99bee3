"""What a replay is judged by."""

from types import SimpleNamespace
from typing import Any

import pytest

from infra.config import EngineConfig, RunConfig
from infra.machine import devices
from tasks.replays.compare_digests import compared, in_words, must_be_equal, not_as_before

BEFORE = {"prompts": "a", "samples": "b", "batch": "c", "adapter out": "d", "exp_avg out": "e", "canary": "f"}


@pytest.mark.parametrize(
    ("device", "judged"),
    [("cpu", ["samples", "adapter out", "exp_avg out", "canary"]), ("cuda", ["samples"])],
)
def test_what_a_gpu_made_in_training_is_shown_and_not_judged(
    monkeypatch: pytest.MonkeyPatch, device: str, judged: list[str]
) -> None:
    monkeypatch.setattr(devices, "device", lambda: device)
    after = BEFORE | dict.fromkeys(("samples", "adapter out", "exp_avg out", "canary"), "another")
    assert not_as_before(compared(BEFORE, after)) == judged
    assert not_as_before(compared(BEFORE, BEFORE)) == []


def test_a_terminal_gets_a_line_with_what_is_not_equal_and_no_table() -> None:
    assert in_words(compared(BEFORE, BEFORE)) == "6 of 6 digests are equal"
    after = BEFORE | {"adapter out": "x", "canary": "y"}
    assert in_words(compared(BEFORE, after)) == "4 of 6 digests are equal; not equal: adapter out, canary"


def test_an_adapter_that_names_its_model_s_new_place_is_as_it_was() -> None:
    rows = compared(BEFORE | {"adapter config out": "g"}, BEFORE | {"adapter config out": "h"})
    assert not_as_before(rows) == ["adapter config out"]
    assert not_as_before(rows, model_moved=True) == []


@pytest.mark.parametrize(("device", "is_promised"), [("cpu", True), ("cuda", False)])
def test_samples_that_are_made_again_on_a_gpu_are_not_promised_to_be_equal(
    device: str, is_promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device", lambda: device)
    config = RunConfig(name="r", engine=EngineConfig(deterministic=True))
    origin: Any = SimpleNamespace(engine=None, changed=(), replayed_from=SimpleNamespace(differences=()))
    assert must_be_equal(origin, config) is is_promised
    origin.engine = object()  # the samples were taken over
    assert must_be_equal(origin, config)
