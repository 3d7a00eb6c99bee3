"""Evaluations: when, on what, and what follows from them."""

from typing import Self

from pydantic import Field, model_validator

from infra.config.sections.data import DataPart
from infra.config.sections.reward import RewardConfig
from infra.config.sections.sampling import SamplingConfig
from infra.config.tools.base import ConfigBase


class EvalSamplingConfig(SamplingConfig):
    """Sampling of an evaluation, which may also take the likeliest token each time."""

    temperature: float = Field(default=0.0, ge=0)
    """0: the likeliest token."""


class EvalConfig(ConfigBase):
    """An evaluation with every value resolved: figures of equal configurations can be compared."""

    data: DataPart
    """num_prompts questions of it are asked, the same ones in every run."""
    reward: RewardConfig
    pass_reward: float
    max_output_tokens: int
    num_samples: int
    temperature: float
    pass_at_k: tuple[int, ...]

    @property
    def greedy(self) -> EvalSamplingConfig:
        return EvalSamplingConfig(group_size=1, max_output_tokens=self.max_output_tokens)

    @property
    def sampled(self) -> EvalSamplingConfig | None:
        """None where only greedy answers are asked for."""
        if not self.num_samples:
            return None
        return EvalSamplingConfig(
            group_size=self.num_samples, temperature=self.temperature, max_output_tokens=self.max_output_tokens
        )


DECIDE_HELD_OUT = ("evaluation.every", "evaluation.num_prompts", "evaluation.source")
"""Fields that decide how many rows are held out."""
DECIDE_TRAINED = (*DECIDE_HELD_OUT, "evaluation.subset", "evaluation.split")
"""Fields that decide which rows are not trained on, because an evaluation asks them."""


class EvaluationConfig(ConfigBase):
    """How good the adapter is on questions that are not trained on, and what follows from it."""

    every: int = Field(default=5, ge=0)
    """Steps between two evaluations of a run; besides, one before training and one at the end. 0: none at all, and no row of a single data file
    is held out."""
    source: str | None = None
    """As data.source; None: data.source itself."""
    subset: str | None = None
    """As data.subset; where source is None, data.subset is taken."""
    split: str = "test"
    """As data.split; without effect for a single file, of which a part is held out (data.held_out_seed)."""
    num_prompts: int = Field(default=64, ge=1)
    """Held-out questions, the same ones each time; all of them where there are fewer. Of a single file a quarter of the rows at most."""
    num_samples: int = Field(default=0, ge=0)
    """Sampled answers to each question, for pass@k; 0: only the greedy one, for pass@1."""
    pass_at_k: tuple[int, ...] = ()
    """Each k of pass@k, none above num_samples."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampled answers."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """None: sampling.max_output_tokens."""
    pass_reward: float = 1.0
    """An answer with this reward or more passes."""
    patience: int | None = Field(default=None, ge=1)
    """Evaluations in a row without a better result after which the run ends; None: never."""
    min_delta: float = Field(default=0.0, ge=0)
    """Better means better by more than this, in the metric of best_by."""
    best_by: str = "auto"
    """Metric by which the best adapter is chosen and progress is measured: pass_at_1, mean_reward, sampled_pass_at_1 or pass_at_<k> with k of
    pass_at_k. auto: pass_at_1 where each reward was 0 or 1, else mean_reward."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        wrong = [k for k in self.pass_at_k if not 1 <= k <= self.num_samples]
        if wrong:
            raise ValueError(
                f"evaluation.pass_at_k {wrong[0]} needs as many samples or more of each question: evaluation.num_samples is {self.num_samples}"
            )
        sampled = ["sampled_pass_at_1" if k == 1 else f"pass_at_{k}" for k in self.pass_at_k]
        known = ["auto", "pass_at_1", "mean_reward", *sampled]
        if self.best_by not in known:
            raise ValueError(
                f"evaluation.best_by {self.best_by!r} is not measured; with this pass_at_k choose one of {', '.join(known)}"
            )
        if self.num_samples and not self.pass_at_k:
            raise ValueError(
                f"evaluation.num_samples {self.num_samples} without pass_at_k: name a k, such as (1, {self.num_samples}), or leave it 0"
            )
        if self.patience is not None and not self.every:
            raise ValueError(f"evaluation.patience {self.patience} needs evaluations: set evaluation.every to 1 or more")
        return self
