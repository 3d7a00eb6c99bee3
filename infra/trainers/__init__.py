"""Ways to run the trainer program behind one interface; see interface.py."""

from infra.config import TrainerConfig
from infra.trainers import resident
from infra.trainers.interface import Trainer
from infra.trainers.resident import PersistentTrainer
from infra.trainers.torchrun import TorchrunTrainer


def trainer_of(config: TrainerConfig) -> Trainer:
    match config.mode:
        case "persistent":
            return PersistentTrainer()
        case "per_step":
            resident.stop_recorded()  # a persistent trainer left over from earlier steps would only hold memory
            return TorchrunTrainer()
