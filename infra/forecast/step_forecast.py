"""The forecast of a run's step, part by part, and how it compares with what was measured."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from infra.forecast.remembered import MeasuredRates
from infra.store.files import read_note
from infra.store.layout import RunFolder

GIB = 2**30
FIRST_COMPARED = 1
"""The first step that is compared: the one before starts both programs."""
NUM_COMPARED = 10


class StepForecast(BaseModel):
    """What a step is expected to take."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    parts: dict[str, float]
    """Part of PARTS -> seconds or GiB, by the ending of its name."""
    source: str
    """Where the rates come from."""
    sharing: str
    """The layout in words."""
    engine_gpus: int = 1
    kv_token_bytes: float = 0.0
    """Bytes of the KV cache for a token of the engine, on each of its GPUs: replicas share the tokens."""


class ForecastPart(NamedTuple):
    label: str
    metrics: tuple[str, ...]
    """What was measured of it: their sum."""


PARTS = {
    "rollout_s": ForecastPart("rollout", ("time/roll_out_s",)),
    "train_s": ForecastPart("train", ("time/train_s",)),
    "hand_over_s": ForecastPart("hand-over, both ways", ("gpu_idle/to_training_s", "gpu_idle/to_sampling_s")),
    "step_s": ForecastPart("step", ("time/step_s",)),
    "engine_weights_gib": ForecastPart("engine's weights, each GPU", ()),
    "kv_cache_gib": ForecastPart("KV cache, each GPU", ("memory/kv_cache_tokens",)),
    "engine_gib": ForecastPart("engine while it samples, each GPU", ("memory/engine_inference_gib",)),
    "trainer_peak_gib": ForecastPart("trainer's peak, each GPU", ("memory/training_gib",)),
}


class ComparedPart(NamedTuple):
    part: str
    forecast: float
    measured: float | None

    @property
    def off(self) -> float | None:
        """By how much the forecast is too high, as a share of what was measured."""
        return self.forecast / self.measured - 1 if self.measured else None


def by_measured(found: MeasuredRates, *, num_prompts: int, group_size: int, prompt_tokens: int) -> dict[str, float]:
    """The parts of a step of as many prompts, with the rates and lengths that a run has measured; on one GPU or on a CPU."""
    tokens = num_prompts * group_size * found.mean_output_tokens
    at_a_time = min(found.running, num_prompts * group_size)
    rollout_s = tokens / found.engine_tokens_per_s * found.running / at_a_time
    train_s = (num_prompts * prompt_tokens + tokens) / found.trainer_rows_per_s
    rest = {"hand_over_s": found.hand_over_s, "engine_gib": found.engine_gib}
    parts = {"rollout_s": rollout_s, "train_s": train_s, "trainer_peak_gib": found.trainer_peak_gib}
    parts |= {name: value for name, value in rest.items() if value is not None}
    return parts | {"step_s": rollout_s + train_s + found.other_s}


def read_forecast(run: str) -> StepForecast | None:
    """The forecast of a run; None: it has none, or its file is damaged, which is said in one line."""
    return read_note(RunFolder.of(run).forecast, StepForecast)


def compared(forecast: StepForecast, steps: Sequence[Mapping[str, float]]) -> list[ComparedPart]:
    """Each part's forecast beside the median of what steps measured.

    steps: Figures of the steps that count.
    """
    return [
        ComparedPart(part, forecast.parts[part], _measured(forecast, part, steps)) for part in PARTS if part in forecast.parts
    ]


def _measured(forecast: StepForecast, part: str, steps: Sequence[Mapping[str, float]]) -> float | None:
    names = PARTS[part].metrics
    sums = [sum(each[name] for name in names) for each in steps if names and all(name in each for name in names)]
    if not sums:
        return None
    unit = {"kv_cache_gib": forecast.kv_token_bytes / GIB, "engine_gib": 1 / forecast.engine_gpus}
    found = median(sums) * unit.get(part, 1.0)
    return found if found > 0 else None  # a hand-over below 0: the next rollout began before the training had ended


def metrics_of(forecast: StepForecast | None, step: int, figures: Mapping[str, float]) -> dict[str, float]:
    """forecast/<part>, and forecast/<part>_off_frac, by how much it is above what this step measured; none before two steps are made.

    step: Place of the step in the run, from 0.
    """
    if forecast is None or step < FIRST_COMPARED:
        return {}
    found = compared(forecast, [figures])
    shown = {f"forecast/{each.part}": each.forecast for each in found}
    return shown | {f"forecast/{each.part}_off_frac": each.off for each in found if each.off is not None}


def table(forecast: StepForecast, steps: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str, str]]:
    """Rows for people: part, forecast, measured, difference."""
    return [_row(each) for each in compared(forecast, steps)]


def _row(each: ComparedPart) -> tuple[str, str, str, str]:
    unit = "s" if each.part.endswith("_s") else "GiB"
    measured = "-" if each.measured is None else f"{each.measured:.3g} {unit}"
    return PARTS[each.part].label, f"{each.forecast:.3g} {unit}", measured, "-" if each.off is None else f"{each.off:+.0%}"
