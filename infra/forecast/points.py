"""The measured points that the forecast is fitted to: points.json, each with the page of docs/results that has it."""

from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

POINTS = Path(__file__).with_name("points.json")


class TrainingPoint(BaseModel):
    """A step of the trainer on one GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """A shape of infra.forecast.rates."""
    gpu: str
    rank: int
    rows: int
    """Tokens that were computed, each prompt once per group."""
    microbatch_rows: int
    """Of the largest micro-batch."""
    microbatch_logits: int
    """Its tokens with logits."""
    num_logits: int | None = None
    """Of all micro-batches; None: as many as rows."""
    sequence: int
    """Tokens of a sample with its prompt."""
    num_layers: int | None = None
    """As many of the shape's layers; None: all."""
    recompute: bool = False
    peak_gib: float | None = None
    """None: not measured, or by older code."""
    seconds: float | None = None
    """Forward, backward and optimizer. None: not measured, or by older code."""
    source: str

    @property
    def logits(self) -> int:
        return self.rows if self.num_logits is None else self.num_logits


class RolloutPoint(BaseModel):
    """A rollout of equally long samples by one engine on one GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    gpu: str
    rank: int
    running: int
    """Samples at a time: all of the rollout."""
    prompts: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    """Sampled tokens."""
    source: str

    @property
    def seconds(self) -> float:
        return self.running * self.output_tokens / self.tokens_per_s


class Points(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    training: tuple[TrainingPoint, ...]
    rollout: tuple[RolloutPoint, ...]


@cache
def measured_points() -> Points:
    return Points.model_validate_json(POINTS.read_bytes())
