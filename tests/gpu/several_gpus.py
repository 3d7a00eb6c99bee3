"""Two or four GPUs: layouts of engine and trainer, whole steps of the flow. Two tables: seconds beside the forecast, and the parts of a step.

    python tests/gpu/several_gpus.py OUT.json MODEL [--rows 1:0 1+1:1 "1+1:1 in flight" auto:1 ...] [--prompts 32] [--output-tokens 384]
    bash tests/gpu/several_gpus.sh FOLDER MODEL 4        all rows of a machine with 4 GPUs (or 2), small layouts side by side

A row is LAYOUT:MAX_STALENESS, made in the order given. E+T is E replicas of the engine and a trainer over T GPUs, each with GPUs of its own:

    1                   1 GPU, in turns
    1+1                 2 GPUs
    2+DP2, 2+TP2        4 GPUs
    2x DP2, TP2, 4x DP4 in turns: all GPUs are the engine's and the trainer's (2 replicas, one of two GPUs, 4 replicas)
    auto                what layout `auto` chooses for this machine

MAX_STALENESS is 0, 1, 2, or `1 in flight`. Each row is a run of the flow `rl-run`, with its Prefect server and MLflow. The first two steps start
programs and compile; the others count. Programs that the next row needs too go on, and rows find the kernels of those before. When the time
is over, the row under way has the steps that it has committed. Rows that need more GPUs than there are, that failed, or for which no time
is left are named.
"""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import step_parts
from bench import Bench, parser

from flows.cli.services.servers import stop
from flows.cli.session import with_prefect
from flows.run import rl_run
from infra.colocation import plans
from infra.config import RunConfig
from infra.engines.server import server_process
from infra.forecast.step_forecast import compared, read_forecast
from infra.machine import devices, nvml
from infra.runs import lineage, run_state
from infra.runs.manifest import read_manifest
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import StepFolder, Workspace
from infra.trainers import resident
from tasks.support.planning.layout import laid_out

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at the GPUs; NVML averages over the last 1/6 to 1 s."""
NUM_STARTING = 2
"""Steps in which programs start and kernels are compiled."""
ROW_S = 40
"""Seconds that a row may take at 7B with programs that run already: with less, none begins."""
COLUMNS = ("s_a_step", "forecast_s", "samples_per_s", "staleness", "mismatch_nats", "idle_frac_by_gpu", "chosen")


class Layout(NamedTuple):
    engine_gpus: range
    trainer_gpus: range
    engine: dict[str, Any]
    trainer: dict[str, Any]

    @property
    def num_gpus(self) -> int:
        return max((0, *(gpu + 1 for gpu in (*self.engine_gpus, *self.trainer_gpus))))


def over(num: int, tensor_parallel: int = 1) -> dict[str, Any]:
    """Configuration fields of a trainer that runs on num GPUs."""
    return {"num_processes": num, "tensor_parallel": tensor_parallel, "sequence_parallel": tensor_parallel > 1}


AUTO = "auto"
LAYOUTS = {
    "1": Layout(range(1), range(1), {}, over(1)),
    "1+1": Layout(range(1), range(1, 2), {}, over(1)),
    "2+DP2": Layout(range(2), range(2, 4), {"replicas": 2}, over(2)),
    "2+TP2": Layout(range(2), range(2, 4), {"replicas": 2}, over(2, 2)),
    "2x DP2": Layout(range(2), range(2), {"replicas": 2}, over(2)),
    "TP2": Layout(range(2), range(2), {"tensor_parallel": 2}, over(2, 2)),
    "4x DP4": Layout(range(4), range(4), {"replicas": 4}, over(4)),
    AUTO: Layout(range(0), range(0), {}, {}),
}
STALENESS = ("0", "1", "2", "1 in flight")
ROWS = ("1:0", "1+1:1", "2+DP2:1", "auto:1", "2+TP2:1", "4x DP4:0", "auto:0", "1+1:1 in flight")


class TimeIsOver(KeyboardInterrupt):
    """Not to be caught as an error of a flow."""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("folder", metavar="MODEL", help="folder, hub id, or tiny")
    p.add_argument("--rows", nargs="+", default=ROWS, metavar="LAYOUT:MAX_STALENESS", help=f"default: {' '.join(ROWS)}")
    p.add_argument("--steps", type=int, default=4, help="of each row, the first two included")
    p.add_argument("--also", nargs="*", default=[], type=Path, metavar="JSON", help="earlier results, for the tables")
    p.set_defaults(prompts=32, output_tokens=384, limit_s=480.0)
    options = p.parse_args()
    options.model = options.folder
    asked = [pair_of(words) for words in options.rows]
    bench = Bench(options, "several-gpus")
    earlier = [read_json(path) for path in options.also if path.exists()]
    rows: list[dict[str, Any]] = [row for each in earlier for row in each.get("rows", [])]
    left: list[str] = [line for each in earlier for line in each.get("left", [])]
    signal.signal(signal.SIGUSR1, _end)  # SIGALRM is Prefect's
    timer = threading.Timer(options.limit_s, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        with with_prefect():
            _make(bench, asked, rows, left)
    except TimeIsOver:
        left.append(f"the time was over after {options.limit_s:g} s")
    finally:
        timer.cancel()
        bench.write(rows=rows, left=left)
        print(table(rows), step_parts.table(rows), *left, "done", sep="\n", flush=True)
        end_programs()
        stop()


def pair_of(words: str) -> tuple[str, str]:
    """Raises SystemExit unless it is LAYOUT:MAX_STALENESS."""
    layout, _, staleness = words.partition(":")
    if layout not in LAYOUTS or staleness not in STALENESS:
        raise SystemExit(f"--rows {words!r}: a row is one of {', '.join(LAYOUTS)}, then ':' and one of {', '.join(STALENESS)}")
    return layout, staleness


def _end(*_: object) -> None:
    raise TimeIsOver


def _make(bench: Bench, asked: list[tuple[str, str]], rows: list[dict[str, Any]], left: list[str]) -> None:
    num_gpus, before = devices.num_gpus(), None
    for name, staleness in asked:
        if LAYOUTS[name].num_gpus > num_gpus and not bench.options.small:
            left.append(f"{name}: {LAYOUTS[name].num_gpus} GPUs are needed, here are {num_gpus}")
            continue
        if not bench.has_time_for(ROW_S):
            left.append(f"{name}, max_staleness {staleness}: no time")
            continue
        try:
            config = config_of(bench, name, staleness)
            before = end_others(config, before)
            begin = time.monotonic()
            with busy_gpus() as seen:
                try:
                    rl_run(config)
                finally:
                    with suppress(ValueError):
                        rows.append(row_of(bench, config, seen, name, staleness) | {"row_s": time.monotonic() - begin})
                        bench.write(rows=rows, left=left)
                        print(json.dumps(rows[-1]), flush=True)
        except Exception as error:  # the other rows are made
            log.exception("%s, max_staleness %s", name, staleness)
            left.append(f"{name}, max_staleness {staleness}: {type(error).__name__}: {str(error).splitlines()[0]}")
            end_programs()
            before = None


def end_programs() -> None:
    server_process.stop_recorded()
    resident.stop_recorded()


def end_others(config: RunConfig, before: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """End the programs that the row does not use: they would take its memory. Returns what decides which ones it uses.

    before: The same of the programs that run.
    """
    engine, trainer, plan = plans.resolve_colocation(laid_out(config)[0])
    uses = (
        (plan.colocation, engine.tensor_parallel),
        (devices.trainer_gpus(trainer), trainer.num_processes, trainer.tensor_parallel),
    )
    if before is None or before[0] != uses[0]:
        end_programs()
    elif before != uses:
        resident.stop_recorded()
    return uses


def row_of(
    bench: Bench, config: RunConfig, seen: list[tuple[float, dict[int, int]]], name: str, staleness: str
) -> dict[str, Any]:
    """Raises ValueError if not even two steps are committed."""
    steps = lineage.committed_steps(config.name)
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps")
    folders = [StepFolder.at(config.name, step) for step in steps]
    committed = [read_manifest(folder.path).committed_at for folder in folders]
    first = min(NUM_STARTING, len(steps) - 1)
    each_s = [after - before for before, after in pairwise(committed)]
    metrics = [read_json(folder.report)["metrics"] for folder in folders]
    forecast = read_forecast(config.name)
    beside = {each.part: (each.forecast, each.measured) for each in compared(forecast, metrics[first:])} if forecast else {}
    s_a_step = median(each_s[first - 1 :])
    return {
        "layout": name,
        "max_staleness": staleness,
        "chosen": forecast.sharing if forecast and name == AUTO else "",
        "s_a_step": s_a_step,
        "forecast_s": beside.get("step_s", (None,))[0],
        "samples_per_s": bench.options.prompts * bench.options.group / s_a_step,
        "seconds_of_each": each_s,
        "num_counted": len(each_s) - first + 1,
        "forecast_and_measured": beside,
        "layout_fields": run_state.config_of(config.name).model_dump(mode="json", include={"engine": True, "trainer": True}),
        "idle_frac_by_gpu": {
            gpu: round(1 - fmean(found) / 100, 3)
            for gpu in nvml.numbers()
            if (found := [busy[gpu] for at, busy in seen if committed[first - 1] <= at <= committed[-1]])
        },
        "staleness": median(each.get("rollout/age", 0) for each in metrics[first:]),
        "mismatch_nats": max(each["mismatch/mean_abs_logprob_diff"] for each in metrics),
        "parts": [step_parts.parts_of(config.name, before, after) for before, after in pairwise(steps)],
        "steps": [
            {name: value for name, value in each.items() if name.startswith(("time/", "rollout/", "gpu_idle/"))}
            for each in metrics
        ],
    }


def config_of(bench: Bench, name: str, staleness: str) -> RunConfig:
    """Also shows engine and trainer their GPUs, by the settings."""
    layout, gpus = LAYOUTS[name], nvml.numbers()
    shares_all = layout.engine_gpus == layout.trainer_gpus == range(len(gpus))
    for variable, numbers in {"RATCHET_ENGINE_GPUS": layout.engine_gpus, "RATCHET_TRAINER_GPUS": layout.trainer_gpus}.items():
        os.environ.pop(variable, None)
        if gpus and numbers and not shares_all:
            os.environ[variable] = json.dumps([gpus[number] for number in numbers])
    settings.cache_clear()
    Workspace.here().rates.unlink(missing_ok=True)  # plans and forecasts are those of a machine on which nothing has run
    config = bench.config
    trainer = config.trainer.but(mode="persistent", **layout.trainer)
    num, _, in_flight = staleness.partition(" ")
    if int(num):
        correction = {"mode": "decoupled", "kind": "tis", "max_staleness": int(num), "in_flight_updates": bool(in_flight)}
        trainer = trainer.but(loss=trainer.loss.but(correction=correction))
    words = "-".join([config.name, *name.lower().replace("+", "-").split(), *staleness.split(), str(int(time.time()))])
    return config.but(
        name=words,
        num_steps=bench.options.steps,
        layout="auto" if name == AUTO else "by_hand",
        engine=config.engine.but(**layout.engine),
        trainer=trainer,
        evaluation=config.evaluation.but(every=0),
        export=config.export.but(what="nothing"),
    )


@contextmanager
def busy_gpus() -> Iterator[list[tuple[float, dict[int, int]]]]:
    """Collect (seconds since the epoch, percent of the last moment in which a kernel ran, by GPU) while the block runs."""
    seen: list[tuple[float, dict[int, int]]] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            seen.append((time.time(), {gpu: nvml.busy_percent(gpu) for gpu in nvml.numbers()}))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def table(rows: list[dict[str, Any]]) -> str:
    head = ("layout", "max_staleness", *COLUMNS)
    lines = [f"| {' | '.join(head)} |", f"|--|{'--:|' * (len(head) - 1)}"]
    for each in rows:
        cells = [f"{each[name]:.3g}" if isinstance(each[name], float) else str(each[name]) for name in head]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
