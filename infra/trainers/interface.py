"""The trainer interface: one job in, one adapter version out. A failed job leaves nothing behind that looks like a result."""

from pathlib import Path
from typing import Protocol

from infra.failures import TrainerLost, TrainerOutOfMemory, TrainingFailed
from infra.megatron.protocol.job import TrainJob, TrainResult

__all__ = ["Trainer", "TrainerLost", "TrainerOutOfMemory", "TrainingFailed"]


class Trainer(Protocol):
    def train(self, job: TrainJob, folder: Path) -> TrainResult:
        """Run the job. Writes job.json and trainer.log into folder.

        Raises:
            TrainingFailed, TrainerOutOfMemory, TrainerLost: depending on the cause.
        """
