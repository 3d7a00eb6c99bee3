"""What a trainer's output says of its end."""

import errno
from pathlib import Path

import pytest

from infra import failures
from infra.trainers.interface import TrainerOutOfMemory
from infra.trainers.torchrun import known_cause

LOG = Path("trainer.log")


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("OSError: [Errno 28] No space left on device: 'x'", errno.ENOSPC),
        ("[Errno 122] Disk quota exceeded", errno.EDQUOT),
        ("File too large", errno.EFBIG),
    ],
)
def test_a_full_disk_is_known_and_not_taken_for_a_lost_trainer(output: str, number: int) -> None:
    found = known_cause("ended", output, LOG)
    assert isinstance(found, OSError) and found.errno == number and "trainer.log" in str(found)
    verdict = failures.verdict(found, num_attempts=1, trouble_s=0)
    assert not verdict.is_retried and "make room" in verdict.text


def test_out_of_memory_is_known_and_any_other_end_is_not() -> None:
    assert isinstance(known_cause("ended", "torch.OutOfMemoryError: CUDA out of memory", LOG), TrainerOutOfMemory)
    assert known_cause("ended", "Signal 9 (SIGKILL)", LOG) is None
