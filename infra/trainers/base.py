"""The trainer border: one job in, one adapter version out; a job that fails leaves nothing behind that looks like a result."""

from pathlib import Path
from typing import Protocol

from infra.megatron.job import TrainJob, TrainResult


class TrainingFailed(RuntimeError):
    """The trainer program ended with an error of its own: bad data, or numbers that are not finite. Trying again will not help."""


class TrainerOutOfMemory(RuntimeError):
    """The trainer ran out of memory; smaller micro-batches may fit."""


class TrainerLost(RuntimeError):
    """The trainer was killed or never came up: the same job may be tried again."""


class Trainer(Protocol):
    def train(self, job: TrainJob, folder: Path) -> TrainResult:
        """Run the job; job.json and trainer.log are written into folder.

        Raises:
            TrainingFailed, TrainerOutOfMemory, TrainerLost: by what went wrong.
        """
