"""The trainer interface: one job in, one adapter version out; a job that fails leaves nothing behind that looks like a result."""

from pathlib import Path
from typing import Protocol

from infra.failures import TrainerLost, TrainerOutOfMemory, TrainingFailed
from infra.megatron.protocol.job import TrainJob, TrainResult

__all__ = ["Trainer", "TrainerLost", "TrainerOutOfMemory", "TrainingFailed"]


class Trainer(Protocol):
    def train(self, job: TrainJob, folder: Path) -> TrainResult:
        """Run the job; job.json and trainer.log are written into folder.

        Raises:
            TrainingFailed, TrainerOutOfMemory, TrainerLost: by what went wrong.
        """
