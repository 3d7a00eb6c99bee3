"""Ways to run the trainer program behind one interface; see interface.py."""

from infra.cluster import connection
from infra.config import TrainerConfig
from infra.trainers import resident
from infra.trainers.cluster import ClusterTrainer
from infra.trainers.interface import Trainer
from infra.trainers.resident import PersistentTrainer
from infra.trainers.torchrun import TorchrunTrainer


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
