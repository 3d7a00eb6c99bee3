"""What a replay is judged by."""

import pytest

from infra import devices
from tasks.compare_digests import compared, not_as_before

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
