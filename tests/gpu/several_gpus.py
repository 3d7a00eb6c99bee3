"""Two or four GPUs: engine and trainer on GPUs of their own with max_staleness 0, 1 and 2, against colocated layouts. One table.

    python tests/gpu/several_gpus.py OUT.json MODEL [--layouts "1+1" "2+DP2" ...] [--prompts 32] [--output-tokens 384]

Layouts, in order of value; E+T is E replicas of the engine and a trainer over T GPUs, each with GPUs of its own:

    1+1                 2 GPUs, max_staleness 0, 1, 2, and 1 with in-flight updates
    2+DP2, 2+TP2        4 GPUs, max_staleness 0, 1, 2 and 1
    2x DP2, TP2, 4x DP4 colocated: all GPUs are the engine's and the trainer's in turns (2 replicas, one of two GPUs, 4 replicas); on-policy

Each row is a run of the flow `rl-run`, with its Prefect server and MLflow, of 3 or 4 steps after the first, which starts the programs. A
row: seconds a step (from one commit to the next), samples a second, share of each GPU's time without a kernel as reported by NVML,
staleness, mismatch between engine and trainer. Layouts that need more GPUs than there are, and rows for which no time is left, are named.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple

from bench import Bench, parser

from flows.cli.services.servers import stop
from flows.cli.session import with_prefect
from flows.run import rl_run
from infra.config import RunConfig
from infra.engines.server import server_process
from infra.machine import devices, nvml
from infra.runs.manifest import read_manifest
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import StepFolder
from infra.trainers import resident

MIXED, SWITCH_S = "rollout/two_adapters_frac", "rollout/switch_s"
LOOK_S = 0.1
"""Seconds between two looks at the GPUs; NVML averages over the last 1/6 to 1 s."""
COLUMNS = ("s_a_step", "samples_per_s", "staleness", "mismatch_nats", "idle_frac_by_gpu", "two_adapters_frac", "switch_s")


class Layout(NamedTuple):
    name: str
    engine_gpus: range
    trainer_gpus: range
    engine: dict[str, Any]
    trainer: dict[str, Any]
    staleness: tuple[str, ...] = ("0",)
    """Values of max_staleness; `1 in flight`: with in-flight updates."""

    @property
    def num_gpus(self) -> int:
        return max(*self.engine_gpus, *self.trainer_gpus) + 1


def over(num: int, tensor_parallel: int = 1) -> dict[str, Any]:
    """Configuration fields of a trainer that runs on num GPUs."""
    return {"num_processes": num, "tensor_parallel": tensor_parallel, "sequence_parallel": tensor_parallel > 1}


LAYOUTS = (
    Layout("1+1", range(1), range(1, 2), {}, over(1), ("0", "1", "2", "1 in flight")),
    Layout("2+DP2", range(2), range(2, 4), {"replicas": 2}, over(2), ("0", "1", "2")),
    Layout("2x DP2", range(2), range(2), {"replicas": 2}, over(2)),
    Layout("TP2", range(2), range(2), {"tensor_parallel": 2}, over(2, 2)),
    Layout("2+TP2", range(2), range(2, 4), {"replicas": 2}, over(2, 2), ("1",)),
    Layout("4x DP4", range(4), range(4), {"replicas": 4}, over(4)),
)
ROW_S, START_S = 75, 75
"""Seconds that a row, and the start of a layout's programs before its first row, may take at 7B."""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("folder", metavar="MODEL", help="folder, hub id, or tiny")
    p.add_argument("--layouts", nargs="+", choices=[layout.name for layout in LAYOUTS], help="default: all, in order of value")
    p.add_argument("--staleness", nargs="+", choices=("0", "1", "2", "1 in flight"), help="rows of each layout (default: all)")
    p.add_argument("--steps", type=int, default=4, help="of each row, the first included")
    p.set_defaults(prompts=32, output_tokens=384, limit_s=480.0)
    options = p.parse_args()
    options.model = options.folder
    bench = Bench(options, "several-gpus")
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    num_gpus = devices.num_gpus()
    try:
        with with_prefect():
            for layout in LAYOUTS:
                if layout.name not in (options.layouts or [layout.name]):
                    continue
                if layout.num_gpus > num_gpus and not options.small:
                    left.append(f"{layout.name}: {layout.num_gpus} GPUs are needed, here are {num_gpus}")
                    continue
                for number, staleness in enumerate(options.staleness or layout.staleness):
                    if not bench.has_time_for(ROW_S + (0 if number else START_S)):
                        left.append(f"{layout.name}, max_staleness {staleness}: no time")
                        continue
                    rows.append(row(bench, layout, staleness))
                    bench.write(rows=rows, left=left)
                    print(json.dumps(rows[-1]), flush=True)
                end_programs()  # the next layout's have other GPUs
    finally:
        end_programs()
        stop()
    bench.write(rows=rows, left=left)
    print(table(rows), *left, "done", sep="\n")


def end_programs() -> None:
    server_process.stop_recorded()
    resident.stop_recorded()


def row(bench: Bench, layout: Layout, staleness: str) -> dict[str, Any]:
    if gpus := nvml.numbers():
        os.environ |= {
            "RATCHET_ENGINE_GPUS": json.dumps([gpus[number] for number in layout.engine_gpus]),
            "RATCHET_TRAINER_GPUS": json.dumps([gpus[number] for number in layout.trainer_gpus]),
        }
        settings.cache_clear()
    config = config_of(bench, layout, staleness)
    begin = time.monotonic()
    with busy_gpus() as seen:
        rl_run(config)
    folders = [StepFolder.at(config.name, step) for step in range(config.num_steps)]
    committed = [read_manifest(folder.path).committed_at for folder in folders]
    s_a_step = (committed[-1] - committed[0]) / (len(folders) - 1)
    metrics = [read_json(folder.report)["metrics"] for folder in folders]
    return {
        "layout": layout.name,
        "max_staleness": staleness,
        "s_a_step": s_a_step,
        "samples_per_s": bench.options.prompts * bench.options.group / s_a_step,
        "idle_frac_by_gpu": {
            gpu: round(1 - fmean(found) / 100, 3)
            for gpu in gpus[: layout.num_gpus]
            if (found := [busy[gpu] for at, busy in seen if committed[0] <= at <= committed[-1]])
        },
        "two_adapters_frac": [each[MIXED] for each in metrics if MIXED in each],
        "switch_s": [each[SWITCH_S] for each in metrics if SWITCH_S in each],
        "staleness": [each.get("rollout/age", 0) for each in metrics],
        "mismatch_nats": max(each["mismatch/mean_abs_logprob_diff"] for each in metrics),
        "row_s": time.monotonic() - begin,
        "steps": [{name: value for name, value in each.items() if name.startswith("time/")} for each in metrics],
    }


def config_of(bench: Bench, layout: Layout, staleness: str) -> RunConfig:
    config = bench.config
    trainer = config.trainer.but(mode="persistent", **(layout.trainer if not bench.options.small else {}))
    num, _, in_flight = staleness.partition(" ")
    if int(num):
        correction = {"mode": "decoupled", "kind": "tis", "max_staleness": int(num), "in_flight_updates": bool(in_flight)}
        trainer = trainer.but(loss=trainer.loss.but(correction=correction))
    parallel = {name: value for name, value in layout.engine.items() if not bench.options.small or name == "replicas"}
    words = "-".join([config.name, *layout.name.lower().replace("+", "-").split(), *staleness.split(), str(int(time.time()))])
    return config.but(
        name=words,
        num_steps=bench.options.steps,
        engine=config.engine.but(**parallel),
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
