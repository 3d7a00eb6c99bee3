"""What grows with the samples of a step: rows of Prefect and MLflow, manifest, CPU and memory of the flow process.

    .venv/bin/python tests/benches/samples.py [--samples 64 4096 65536] [--save OUT.json]

Each number in a process and a workspace of its own: two steps, of which the second counts. Prefect's own server and MLflow's store, both with
SQLite; the scripted engine, whose samples cost next to nothing, and the trainer of the drills, which has no model (twin_trainer.py).
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from orchestration import config_of, random_model_in, rows_of, settled_rows

TWIN = Path(__file__).parents[1] / "drills/twin_trainer.py"
UPLOAD_S = 600.0
MIB = 2**20


def set_up(folder: Path) -> None:
    """Have the scripted trainer run in place of torchrun, in a workspace of its own."""
    from shared import write_interpreter

    program = write_interpreter(folder / "python-of-trainer", f"{sys.executable} {TWIN}", {"scripted": "1"}, num_words_less=0)
    os.environ |= {"RATCHET_WORKSPACE": str(folder), "RATCHET_TRAINER_PYTHON": str(program)}
    os.environ.pop("PREFECT_API_URL", None)
    os.environ["PREFECT_LOGGING_EXTRA_LOGGERS"] = "infra,tasks"  # as prefect.yaml has it


def wait_for_upload(delivered: Path) -> None:
    deadline = time.monotonic() + UPLOAD_S
    while not delivered.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{delivered} was not written in {UPLOAD_S:g} s")
        time.sleep(0.2)


def difference(after: dict[str, int], before: dict[str, int]) -> int:
    return sum(after.values()) - sum(before.values())


def measure(num_samples: int, folder: Path) -> dict[str, float]:
    """Figures of the second step of a run."""
    from prefect.settings import temporary_settings

    from flows.cli.session import client_settings
    from flows.step import rl_step
    from infra.services import servers
    from infra.store.layout import DELIVERED, StepFolder
    from infra.telemetry.timings import SECONDS, measures_of

    config = config_of(num_samples, random_model_in(folder / "random-tiny"))
    config = config.but(data=config.data.but(allow_repeats=True))  # the data set has fewer rows than the largest step has prompts
    prefect, mlflow = folder / "prefect/prefect.db", folder / "mlflow/mlflow.db"
    with temporary_settings(client_settings(servers.ensure_prefect())):
        first = rl_step(config)
        wait_for_upload(StepFolder.at(first.run, first.step).path / DELIVERED)
        before, mlflow_before = settled_rows(prefect), rows_of(mlflow)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        made = rl_step(config)
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    step = StepFolder.at(made.run, made.step)
    wait_for_upload(step.path / DELIVERED)
    verbs = {verb: figures[SECONDS] for verb, figures in measures_of(made.run, made.step).items()}
    return {
        "prefect_rows": difference(settled_rows(prefect), before),
        "mlflow_rows": difference(rows_of(mlflow), mlflow_before),
        "manifest_bytes": step.manifest.stat().st_size,
        "step_mib": sum(path.stat().st_size for path in step.path.rglob("*") if path.is_file()) / MIB,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **{f"seconds_{verb}": spent for verb, spent in sorted(verbs.items())},
    }


def in_a_process(num_samples: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run([sys.executable, __file__, "--one", str(num_samples), "--save", str(out), "--folder", folder], check=True)
        found: dict[str, float] = json.loads(out.read_text())
        return found


def slopes(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """By figure: its growth for each sample, between the least and the greatest number of samples; and the power of that growth between
    the two greatest, where 0 is none and 1 proportional."""
    few, many, most = sorted(map(int, found))[0], *sorted(map(int, found))[-2:]
    result = {}
    for name in found[str(most)]:
        low, middle, high = (found[str(count)][name] for count in (few, many, most))
        result[f"{name} a sample"] = (high - low) / (most - few)
        if middle > 0 and high > 0:
            result[f"{name} power"] = math.log(high / middle) / math.log(most / many)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 4096, 65536], metavar="N", help="samples of a step")
    parser.add_argument("--save", type=Path, help="write the figures here")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        set_up(options.folder)
        from flows.cli.services.servers import stop

        try:
            options.save.write_text(json.dumps(measure(options.one, options.folder)))
        finally:
            stop()
        return
    found: dict[str, Any] = {str(count): in_a_process(count) for count in options.samples}
    machine = f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, no GPU"
    text = json.dumps({"machine": machine, "steps": found, "slopes": slopes(found) if len(found) > 2 else {}}, indent=1)
    print(text)
    if options.save:
        options.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
