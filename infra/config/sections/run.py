"""What an experiment is. A RunConfig is a flow parameter, a form in the Prefect UI and a file beside the results.

What this machine is (paths, ports, GPUs, secrets) is `infra.settings`; the two never mix. Each section goes whole to the tasks
that use it and is part of their cache key, so a value belongs to the section whose results it changes.
"""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import eval_sets, rules
from infra.config.sections.batch import BatchConfig
from infra.config.sections.data import DataConfig, DataPart
from infra.config.sections.engine import EngineConfig
from infra.config.sections.evaluation import EvalConfig, EvaluationConfig
from infra.config.sections.export import ExportConfig
from infra.config.sections.retention import RetentionConfig
from infra.config.sections.rewards.reward import RewardConfig
from infra.config.sections.sampling import EnvironmentConfig, PlayedEnvironment, SamplingConfig
from infra.config.sections.tracking import TrackingConfig
from infra.config.sections.trainer import TrainerConfig
from infra.config.tools.base import ConfigBase
from infra.config.tools.names import NameInForm, checked_name


class RunConfig(ConfigBase):
    """One training run."""

    name: NameInForm = "run"
    """Names the run's folder and its MLflow run: 1 to 80 letters, digits, '.', '_' or '-', beginning with a letter or digit."""
    model: str = "tiny"
    """`tiny`, `tiny-moe` or, on a GPU, `small` (made here when missing), a Hugging Face folder, or a hub id."""
    seed: int = 0
    """Seed of the order of prompts, of sampling and of the adapter's first weights."""
    num_steps: int = Field(default=20, ge=1)
    """RL steps of the whole run; a run that has fewer goes on up to here."""
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    batch: BatchConfig = BatchConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    layout: Literal["auto", "by_hand"] = "auto"
    """auto: on several GPUs, what is left at its default of engine.tensor_parallel, engine.replicas, engine.colocation and of the trainer's
    num_processes, tensor_parallel, sequence_parallel, expert_parallel, recompute and first_gpu is planned when the run begins, and stays. By
    hand: these fields as they are. The same on one GPU and on a CPU (docs/how-to/plan-a-machine.md)."""
    engine: EngineConfig = EngineConfig()
    retention: RetentionConfig = RetentionConfig()
    export: ExportConfig = ExportConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def played(self) -> PlayedEnvironment | None:
        """The environment that episodes are played with; None: samples are one prompt and one answer."""
        if not self.environment.label:
            return None
        return PlayedEnvironment.model_validate(dict(self.environment) | {"max_failed_frac": self.reward.max_unjudged_frac})

    @property
    def longest_sequence_tokens(self) -> int:
        """Most tokens that a sequence of a batch may have."""
        if self.environment.label:
            return self.engine.max_context_tokens
        return self.data.max_prompt_tokens + self.sampling.max_output_tokens

    @property
    def training(self) -> DataPart:
        """The rows to train on: those that evaluations do not ask."""
        num_held_out = eval_sets.num_held_out(self)
        part = {"part": "training", "num_held_out": num_held_out} if num_held_out else {}
        return DataPart.model_validate(dict(self.data) | part | {"evaluated": eval_sets.evaluated(self)})

    @property
    def eval_configs(self) -> dict[str, EvalConfig]:
        """What evaluations of this run measure, by the set's name; empty is the name of the only one that the section `evaluation` describes."""
        return {asked.name: eval_sets.eval_config(self, asked) for asked in self.evaluation.asked}

    @property
    def eval_config(self) -> EvalConfig:
        """The evaluation by which the best adapter is chosen."""
        return self.eval_configs[self.evaluation.deciding[0]]

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        return checked_name(name, "run name")

    @model_validator(mode="after")
    def _fp8_is_corrected(self) -> Self:
        loss = self.trainer.loss
        if self.engine.is_fp8 and loss.correction.kind == "none":
            corrected = loss.but(correction=loss.correction.but(kind="tis", mode="decoupled"))
            object.__setattr__(self, "trainer", self.trainer.but(loss=corrected))  # the model is frozen from here on
        return self

    @model_validator(mode="after")
    def _engine_serves_the_trainer_s_settings(self) -> Self:
        trainer, engine = self.trainer, self.engine
        if (engine.record_routes, engine.share_experts) != (trainer.routing_replay, trainer.share_experts):
            served = engine.but(record_routes=trainer.routing_replay, share_experts=trainer.share_experts)
            object.__setattr__(self, "engine", served)
        return self

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        for rule in rules.RULES:
            rule(self)
        return self
