"""A second model that judges, in turns with the engine and the trainer: its server, its sizes, and when it holds the GPUs.

rollout: engine -> release -> judging: judge -> release -> training: trainer -> rollout
"""

from typing import NamedTuple

from infra.colocation.engine_memory import at_work_bytes, residue_bytes
from infra.colocation.judge_section import plan_of, server_of
from infra.colocation.machine import GIB, Machine
from infra.colocation.trainer_memory import TRAINER_RESIDUE_BYTES, Model, model_in, trainer_peak_bytes
from infra.config import EngineConfig, RunConfig, TrainerConfig
from infra.models import base_model


class Phase(NamedTuple):
    """A part of a step, and what the programs hold of each GPU meanwhile, in bytes as estimated; 0 on a CPU."""

    name: str
    holder: str
    """Program and model that work."""
    bytes_by_program: dict[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes_by_program.values())


def phases(config: RunConfig, engine: EngineConfig, trainer: TrainerConfig, machine: Machine) -> list[Phase]:
    """Return who holds the GPUs in the parts of a step that a judge's server divides.

    engine, trainer: With their plan and mode resolved.
    """
    judge, own = config.reward.judge, model_in(base_model.locate(config.model))
    server, its = server_of(engine, judge), model_in(base_model.locate(judge.model))
    names = {"engine": f"engine with {_sized(config.model, own)}", "judge": f"judge with {_sized(judge.model, its)}"}
    names |= {"trainer": f"trainer with {_sized(config.model, own)}"}
    if not machine.is_gpu:
        held = {name: dict.fromkeys(names, 0.0) for name in names}
    else:
        alone = machine._replace(judge_bytes=0)
        asleep: dict[str, float] = {
            "engine": residue_bytes(engine.colocation, engine, own),  # type: ignore[arg-type]  # resolved
            "judge": residue_bytes(plan_of(judge), server, its),
            "trainer": TRAINER_RESIDUE_BYTES if trainer.mode == "persistent" else 0,
        }
        awake = {
            "engine": at_work_bytes(engine, alone),
            "judge": at_work_bytes(server, alone),
            "trainer": trainer_peak_bytes(trainer, own),
        }
        held = {name: asleep | {name: awake[name]} for name in names}
    works = {"rollout": "engine", "judging": "judge", "training": "trainer"}
    return [Phase(phase, names[program], held[program]) for phase, program in works.items()]


def words(config: RunConfig, engine: EngineConfig, trainer: TrainerConfig, machine: Machine) -> str:
    """The phases as a sentence for people."""
    found = [f"{phase.name}: {phase.holder}{_shares(phase)}" for phase in phases(config, engine, trainer, machine)]
    asleep = {"offload": "with a copy of its weights on the host", "reload": "its weights are read from disk again"}
    how = asleep.get(plan_of(config.reward.judge), "its server starts again in each step")
    return f"{'; '.join(found)}. The judge sleeps by plan {plan_of(config.reward.judge)}, {how}"


def check_room(config: RunConfig, engine: EngineConfig, trainer: TrainerConfig, machine: Machine) -> None:
    """Raises ValueError for a part of the step whose programs do not fit on a GPU together."""
    fields = {"rollout": "engine.memory_fraction", "judging": "reward.judge.server.memory_fraction"}
    for phase in phases(config, engine, trainer, machine):
        if machine.is_gpu and phase.name in fields and phase.total_bytes > machine.gpu_bytes:
            raise ValueError(
                f"{phase.name} takes {phase.total_bytes / GIB:.0f} GiB of a GPU with {machine.gpu_bytes / GIB:.0f} ({_shares(phase).strip(' ()')}): "
                f"lower {fields[phase.name]}, or set reward.judge.server.colocation to 'restart'"
            )


def _sized(name: str, model: Model) -> str:
    return f"{name} ({model.weight_bytes / GIB:.2g} GiB of weights)"


def _shares(phase: Phase) -> str:
    held = [f"{program} {taken / GIB:.1f}" for program, taken in phase.bytes_by_program.items() if taken]
    return f" (GiB of each GPU: {', '.join(held)})" if held else ""
