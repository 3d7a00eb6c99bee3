"""The report: from starts and steps to rows, and from rows to text, Markdown and JSON. One set of figures for all of them."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from infra.comparison import wall_time
from infra.comparison.config import Backend, ComparisonConfig
from infra.comparison.measurement.measures import PASSED, EngineStart, StepMeasures
from infra.comparison.statistics import METRICS, Metric, Summary, difference_percent, relative_to_first, summary, verdict
from infra.engines.health_checks import TOLERANCE_NATS, mean_abs_difference
from infra.machine import devices

TWIN = "A scripted twin stands in for an engine here: its figures say nothing about that engine."
NO_VERDICT = "none: a twin is no engine"
DISAGREEMENT_NATS = 2 * TOLERANCE_NATS["bfloat16"]
"""Difference of two engines' log-probs above which one of them is wrong: each may be that far from the trainer's on its side."""
NO_GPU = "No GPU: memory is the resident memory of the engine's and the trainer's processes on the host."
RULES = (
    "model, prompts, adapters, sampling, concurrency, training configuration and machine are the same for all engines",
    "speed: every prompt and every answer has a fixed length (end of sequence ignored); quality: answers have free length",
    "warm-up requests and checks (golden check, canary) are in no figure",
    "every round starts each engine again, every second round in the opposite order",
    "medians with [lowest, highest] of all sound steps; a difference counts where the two spreads do not overlap",
    "requests are streamed and timed by one client; memory is as reported by NVML",
    "an engine whose golden check failed has no speed; tokens of samples that failed a check are in no goodput",
    "vLLM also decodes text, which its completions cannot leave out; SGLang runs without a tokenizer",
)


class Results(NamedTuple):
    """All measurements of a comparison."""

    config: ComparisonConfig
    digest: str
    starts: tuple[EngineStart, ...]
    steps: tuple[StepMeasures, ...]

    def of(self, backend: Backend) -> list[StepMeasures]:
        return [step for step in self.steps if step.backend == backend]

    def failures(self, backend: Backend) -> list[StepMeasures]:
        return [step for step in self.of(backend) if step.golden != PASSED]


class ComparisonRow(NamedTuple):
    metric: Metric
    summaries: dict[Backend, Summary | None]
    difference_percent: float | None
    verdict: str


def values(results: Results, backend: Backend, metric: str) -> list[float]:
    """Return the values of sound steps. An engine with a failed check has only its errors."""
    if metric == "start_s":
        return [start.start_s for start in results.starts if start.backend == backend]
    if metric == "errors":
        return [float(len(step.errors)) for step in results.of(backend)]
    if results.failures(backend):
        return []
    return [figures[metric] for step in results.of(backend) if step.is_sound and metric in (figures := step.figures())]


def rows_of(results: Results) -> list[ComparisonRow]:
    """Return the rows of metrics that were measured for at least one engine."""
    backends, rows = results.config.backends, []
    for metric in METRICS:
        found = {backend: summary(values(results, backend, metric.name)) for backend in backends}
        if not any(found.values()):
            continue
        difference, said = None, ""
        if len(backends) == 2:
            left, right = (found[backend] for backend in backends)
            difference = difference_percent(left, right) if left and right else None
            is_twin = any(start.is_twin for start in results.starts)
            said = NO_VERDICT if is_twin else verdict(metric, (backends[0], backends[1]), left, right)
        rows.append(ComparisonRow(metric, found, difference, said))
    return rows


def throughput_by_step(results: Results, backend: Backend) -> dict[int, float]:
    """Median tokens/s of each step over the rounds, relative to step 0, which no wake stood before."""
    if results.failures(backend):
        return {}
    by_step: dict[int, list[float]] = {}
    for step in results.of(backend):
        if step.is_sound:
            by_step.setdefault(step.step, []).append(step.figures()["tokens_per_s"])
    return relative_to_first({step: found.median for step, each in by_step.items() if (found := summary(each))})


def agreement(results: Results) -> dict[str, float]:
    """Mean absolute difference of log-probabilities between the two engines on the same texts, in nats; with adapters where both
    had the same."""
    if len(results.config.backends) != 2:
        return {}
    left, right = (
        {(step.round, step.step): step for step in results.of(backend) if step.probe} for backend in results.config.backends
    )
    pairs = [(left[key], right[key]) for key in left.keys() & right.keys()]
    both = [(one.probe, other.probe, one.adapter_sha256 == other.adapter_sha256) for one, other in pairs]
    base = [mean_abs_difference(one.base, other.base) for one, other, _ in both if one and other]
    adapter = [mean_abs_difference(one.adapter, other.adapter) for one, other, is_same in both if one and other and is_same]
    return {name: fmean(each) for name, each in (("base", base), ("adapter", adapter)) if each}


def warnings_of(results: Results) -> list[str]:
    found = [TWIN] if any(start.is_twin for start in results.starts) else []
    found += [NO_GPU] if devices.device() == "cpu" else []
    for backend in results.config.backends:
        found += [
            f"{backend} has no speed: round {step.round}, step {step.step}: {step.golden.splitlines()[0]}"
            for step in results.failures(backend)
        ]
        before = [start.memory_before_gib for start in results.starts if start.backend == backend]
        if before and max(before) > min(start.memory_before_gib for start in results.starts) + 1:
            found.append(f"before a start of {backend} {max(before):.1f} GiB of GPU memory were in use: something was left there")
    if (
        not any(start.is_twin for start in results.starts)
        and (nats := max(agreement(results).values(), default=0.0)) > DISAGREEMENT_NATS
    ):
        found.append(f"the engines' log-probabilities differ by {nats:.3g} nats: one of them does not serve what it should")
    adapters = {(step.round, step.step, step.adapter_sha256) for step in results.steps if step.adapter_sha256}
    if len(adapters) > len({(number, step) for number, step, _ in adapters}):
        found.append("in some steps the engines had adapters of their own: their blocks were made in different workspaces")
    if len({start.origin.unit for start in results.starts if start.origin}) > 1:
        found.append("the blocks were made on different machines of one kind: what differs between these is in the figures")
    for start in results.starts:
        if start.num_starts > 1:
            found.append(f"{start.backend} was started {start.num_starts} times in round {start.round}: interrupted, or replaced")
    return found


def machine() -> dict[str, str]:
    return {"processor": devices.processor(), "gpus": str(devices.num_gpus())}


def label(results: Results, backend: Backend) -> str:
    versions = sorted({start.version for start in results.starts if start.backend == backend})
    return f"{backend} {' / '.join(versions)}".strip()


def short(results: Results, backend: Backend) -> str:
    """For columns and axes."""
    return f"{backend} (twin)" if any(start.is_twin for start in results.starts if start.backend == backend) else backend


def combined(results: Results) -> dict[str, Any]:
    """benchmark_combined.json."""
    return {
        "digest": results.digest,
        "is_twin": any(start.is_twin for start in results.starts),
        "warnings": warnings_of(results),
        "rules": list(RULES),
        "machine": machine(),
        "config": results.config.model_dump(mode="json"),
        "engines": {backend: label(results, backend) for backend in results.config.backends},
        "metrics": [
            {
                "name": row.metric.name,
                "title": row.metric.title,
                "engines": {name: found._asdict() if found else None for name, found in row.summaries.items()},
                "difference_percent": row.difference_percent,
                "verdict": row.verdict,
            }
            for row in rows_of(results)
        ],
        "throughput_relative_to_first_step": {b: throughput_by_step(results, b) for b in results.config.backends},
        "logprob_agreement_nats": agreement(results),
        "quality": {b: [q.model_dump() for q in _quality(results, b)] for b in results.config.backends},
    }


def metrics_of(results: Results, backend: Backend) -> dict[str, Any]:
    """<backend>_metrics.json."""
    return {
        "engine": label(results, backend),
        "warnings": warnings_of(results),
        "starts": [start.model_dump(mode="json") for start in results.starts if start.backend == backend],
        "steps": [
            step.model_dump(mode="json") | {"figures": step.figures() if step.is_sound else {}} for step in results.of(backend)
        ],
    }


def _quality(results: Results, backend: Backend) -> list[Any]:
    return [step.quality for step in results.of(backend) if step.quality]


def markdown(results: Results) -> str:
    config, backends = results.config, results.config.backends
    lines = [f"# Engines under the same RL loop: {' and '.join(label(results, b) for b in backends)}", ""]
    lines += [f"**{warning}**\n" for warning in warnings_of(results)]
    lines += [
        f"Mode `{config.mode}`, model `{config.model}`, {config.rounds} rounds x {config.num_steps} steps x {config.num_rollouts} rollouts, "
        f"{config.max_input_tokens} tokens in, {config.max_output_tokens} out, concurrency {config.concurrency}, "
        f"on {machine()['processor']}, {machine()['gpus']} GPUs.",
        "",
        "## Figures",
        "",
        _table(
            ["metric", *(short(results, b) for b in backends), *(["difference", "verdict"] if len(backends) == 2 else [])],
            [[row.metric.title, *_cells(row, backends)] for row in rows_of(results)],
        ),
        "",
        "## Throughput of each step, by that of the first",
        "",
        _table(
            ["engine", *(f"step {n}" for n in range(config.num_steps))],
            [
                [
                    short(results, b),
                    *(
                        f"{found[n]:.3f}" if n in (found := throughput_by_step(results, b)) else "-"
                        for n in range(config.num_steps)
                    ),
                ]
                for b in backends
            ],
        ),
        "",
        "## Where the time went, seconds",
        "",
        _time_table(results),
        "",
        "## Checks and quality",
        "",
        _table(
            ["engine", "golden checks", "errors", "quality: mean reward", "mean answer tokens", "truncated"],
            [_check_row(results, backend) for backend in backends],
        ),
        "",
    ]
    if nats := agreement(results):
        lines += [
            f"Log-probabilities of the engines differ by {', '.join(f'{each:.3g} nats ({name})' for name, each in nats.items())}.",
            "",
        ]
    lines += ["## Rules", "", *(f"* {rule}" for rule in RULES), "", "## Engines", ""]
    for start in results.starts:
        where = f", on {start.origin.machine}" if start.origin else ""
        plan = f"colocation `{start.colocation}` ({start.reason})"
        lines.append(f"* {start.backend} {start.version}, round {start.round}{where}: {plan}; `{' '.join(start.flags)}`")
    return "\n".join(lines) + "\n"


def _time_table(results: Results) -> str:
    found = {
        b: wall_time.seconds([start for start in results.starts if start.backend == b], results.of(b))
        for b in results.config.backends
    }
    parts = list(found[results.config.backends[0]])
    rows = [
        [short(results, b), *(f"{each[part]:.1f}" for part in parts), f"{sum(each.values()):.1f}"] for b, each in found.items()
    ]
    return _table(["engine", *parts, "all"], rows)


def _cells(row: ComparisonRow, backends: Sequence[Backend]) -> list[str]:
    cells = [str(row.summaries[backend] or "-") for backend in backends]
    if len(backends) == 2:
        cells += ["-" if row.difference_percent is None else f"{row.difference_percent:+.1f}%", row.verdict]
    return cells


def _check_row(results: Results, backend: Backend) -> list[str]:
    steps, quality = results.of(backend), _quality(results, backend)
    passed = sum(step.golden == PASSED for step in steps)
    shown = [
        f"{fmean(getattr(q, name) for q in quality):.3g}" if quality else "-"
        for name in ("mean_reward", "mean_output_tokens", "truncated_frac")
    ]
    return [short(results, backend), f"{passed} of {len(steps)} passed", str(sum(len(step.errors) for step in steps)), *shown]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["--"] * len(head), *rows])


def text(results: Results) -> str:
    """benchmark_report.txt: the Markdown with its tables set in columns."""
    lines = markdown(results).splitlines()
    out: list[str] = []
    while lines:
        line = lines.pop(0)
        if not line.startswith("| "):
            out.append(line.lstrip("# ").replace("**", "").replace("`", ""))
            continue
        table = [line]
        while lines and lines[0].startswith("| "):
            table.append(lines.pop(0))
        cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table]
        widths = [max(len(row[n]) for row in cells if n < len(row)) for n in range(len(cells[0]))]
        cells[1] = ["-" * width for width in widths]
        out += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in cells]
    return "\n".join(out) + "\n"
