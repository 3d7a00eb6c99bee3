"""What an experiment is. A RunConfig is a flow parameter, a form in the Prefect UI and a file beside the results.

What this machine is (paths, ports, GPUs, secrets) is `infra.settings`; the two never mix. Each section goes whole to the tasks
that use it and is part of their cache key, so a value belongs to the section whose results it changes.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from infra.config import rules
from infra.config.sections.batch import BatchConfig
from infra.config.sections.data import DataConfig, DataPart
from infra.config.sections.engine import EngineConfig
from infra.config.sections.evaluation import EvalConfig, EvaluationConfig
from infra.config.sections.export import ExportConfig
from infra.config.sections.retention import RetentionConfig
from infra.config.sections.reward import RewardConfig
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
    engine: EngineConfig = EngineConfig()
    retention: RetentionConfig = RetentionConfig()
    export: ExportConfig = ExportConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def played(self) -> PlayedEnvironment | None:
        """The environment that episodes are played with; None: samples are one prompt and one answer."""
        if not self.environment.name:
            return None
        return PlayedEnvironment.model_validate(dict(self.environment) | {"max_failed_frac": self.reward.max_unjudged_frac})

    @property
    def training(self) -> DataPart:
        """The rows to train on: those that evaluations do not ask."""
        part = {"part": "training", "num_held_out": self._num_held_out} if self._num_held_out else {}
        return DataPart.model_validate(dict(self.data) | part | {"evaluated": self._evaluated})

    @property
    def _asks_own_rows(self) -> bool:
        """Whether evaluations ask a part of the rows themselves, which is held out."""
        if self.evaluation.source is None:
            return self.data.is_single_file or self.data.hold_out or bool(self.data.sources)
        asked, trained = (Path(source).expanduser().resolve() for source in (self.evaluation.source, self.data.source))
        return self.data.is_single_file and asked == trained

    @property
    def _num_held_out(self) -> int:
        return self.evaluation.num_prompts if self.evaluation.every and self._asks_own_rows else 0

    @property
    def _evaluated(self) -> DataConfig | None:
        """The data set of evaluations, where it is another one. Two splits of generated problems have nothing in common."""
        if not self.evaluation.every or self._asks_own_rows:
            return None
        found = DataConfig.model_validate(dict(self.data) | {"split": self.evaluation.split} | self._elsewhere)
        return None if found.source == self.data.source == "arithmetic" else found

    @property
    def _elsewhere(self) -> dict[str, object]:
        """Where evaluations find their rows, if that is another data set. What narrows down this one does not hold for it."""
        asked = self.evaluation
        if asked.source is None:
            return {}
        return {"source": asked.source, "sources": (), "subset": asked.subset, "revision": None, "filter": ()}

    @property
    def eval_config(self) -> EvalConfig:
        """What an evaluation of this run measures; when it does, and what follows, is no part of it."""
        asked = self.evaluation
        held_out: dict[str, object] = {}
        if self._asks_own_rows:
            held_out = {"part": "held_out", "num_held_out": self._num_held_out}
            held_out |= {} if self.data.is_single_file else {"split": self.data.split}
        fields = {"split": asked.split, "num_prompts": asked.num_prompts, "num_oversampled_prompts": 0, "partial_rollouts": False}
        return EvalConfig(
            data=DataPart.model_validate(dict(self.data) | fields | self._elsewhere | held_out),
            reward=self.reward.but(shuffle_seed=None),
            pass_reward=asked.pass_reward,
            max_output_tokens=asked.max_output_tokens or self.sampling.max_output_tokens,
            num_samples=asked.num_samples,
            temperature=asked.temperature,
            pass_at_k=tuple(sorted(set(asked.pass_at_k))),
        )

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        return checked_name(name, "run name")

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        for rule in rules.RULES:
            rule(self)
        return self
