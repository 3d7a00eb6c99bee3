"""A run's forecast beside what its steps measured, for pages and terminals."""

from infra.forecast.step_forecast import FIRST_COMPARED, NUM_COMPARED, StepForecast, read_forecast, table
from infra.runs import history, lineage
from infra.runs.history import Figures

COLUMNS = ("", "forecast", "measured", "difference")


def rows_of(run: str, step: int, now: Figures | None = None) -> tuple[StepForecast, list[tuple[str, str, str, str]]] | None:
    """The forecast, and a row for each part with the median of the steps up to this one. The run's first step, which starts the programs,
    does not count. None before the second step, and for a run without a forecast.

    now: Figures of the step, where its report is not written yet.
    """
    first = lineage.first_step(run) + FIRST_COMPARED
    forecast = read_forecast(run) if step >= first else None
    if forecast is None:
        return None
    known = [history.figures_at(run, number) for number in range(max(first, step - NUM_COMPARED + 1), step)]
    steps = [each for each in [*known, now or history.figures_at(run, step)] if each is not None]
    return forecast, table(forecast, steps)


def section(run: str, step: int, now: Figures) -> str:
    """For a page; empty where there is nothing to compare."""
    found = rows_of(run, step, now)
    if found is None:
        return ""
    forecast, rows = found
    lines = [" | ".join(row) for row in (COLUMNS, *rows)]
    body = "\n".join([f"| {lines[0]} |", "|--|--:|--:|--:|", *(f"| {line} |" for line in lines[1:])])
    return f"\n## Forecast\n\n{forecast.sharing}; rates: {forecast.source}\n\n{body}\n"
