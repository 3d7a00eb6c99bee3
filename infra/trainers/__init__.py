"""Ways to run the trainer program behind one interface; see interface.py."""

from infra.cluster import connection
from infra.config import TrainerConfig
from infra.machine import devices
from infra.records import AdapterVersion
from infra.trainers import resident
from infra.trainers.cluster import ClusterTrainer
from infra.trainers.interface import Trainer
from infra.trainers.jobs import job_without_batch
from infra.trainers.resident import PersistentTrainer
from infra.trainers.torchrun import TorchrunTrainer


def start_early(config: TrainerConfig, adapter: AdapterVersion) -> None:
    """Start a persistent trainer while the engine starts and samples. On a CPU both would wait for the same cores."""
    if config.mode == "persistent" and devices.device() == "cuda" and not connection.is_set():
        resident.start_early(job_without_batch(config, adapter))


def trainer_of(config: TrainerConfig) -> Trainer:
    """The trainer of a mode. A step resolves `auto` before (infra/colocation/plans.py); a comparison of engines does not: it has a fresh program
    for each of its steps, so that no trainer is beside the engine that is measured."""
    if connection.is_set():
        return ClusterTrainer()
    match config.mode:
        case "persistent":
            return PersistentTrainer()
        case "per_step" | "auto":
            resident.stop_recorded()  # a persistent trainer left over from earlier steps would only hold memory
            return TorchrunTrainer()
