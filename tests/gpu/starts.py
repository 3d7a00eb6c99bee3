"""What the start of an engine takes, by part: with nothing compiled before, and again.

    python tests/gpu/starts.py OUT.json --model FOLDER [--cases NAME ...] [--set FIELD=VALUE ...]

cold: no kernel is compiled, and the model's files are not in the page cache (where its file system lets go of them; tmpfs does not).
warm: the same server again, by kernels of the workspace. Nothing may be compiled; otherwise the script fails.
not read ahead: as warm, and only the server reads the weights.
sglang's graphs: as warm, with a CUDA graph for each batch size that SGLang chooses.
bytecode not kept: as warm, but the engine's packages are imported as they lie there, compiled or not, and nothing is added to them.

Each start ends with an adapter that serves, with golden check and canary-free load. The last row of `cold` is the first rollout after it, whose
kernels count too: what it compiles is not compiled again.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench import Bench, parser, timed_rollout

from infra.engines.server import server_process, starts
from infra.models import base_model
from infra.processes import kernel_caches
from infra.records import AdapterVersion
from infra.store.layout import Workspace
from infra.telemetry import program_versions

CASES = ("cold", "warm", "not read ahead", "sglang's graphs", "bytecode not kept")
SHOWN = ("s", "import_s", "distributed_s", "load_s", "graphs_s", "rest_s", "adapter_s", "checks_s", "compiled_files")
SECONDS_LEFT = 100


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = p.parse_args()
    bench, rows, failed = Bench(options, "starts"), dict[str, dict[str, Any]](), list[str]()
    adapter = bench.adapter()
    if "cold" in options.cases:
        shutil.rmtree(Workspace.here().kernels, ignore_errors=True)
    try:
        for name in options.cases:
            if not bench.has_time_for(SECONDS_LEFT):
                failed.append(f"no time for {name}")
                break
            rows[name] = started(bench, adapter, name)
            bench.say(starts=rows)
            if name == "warm" and rows[name]["compiled_files"]:
                failed.append(f"the second start compiled {rows[name]['compiled_files']:.0f} files: {rows[name]['compiled']}")
    finally:
        server_process.stop_recorded()
    print(f"| start | {' | '.join(SHOWN)} |")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{row[key]:.1f}' if key in row else '' for key in SHOWN)} |")
    print("done" if not failed else f"FAILED: {'; '.join(failed)}")


def started(bench: Bench, adapter: AdapterVersion, name: str) -> dict[str, Any]:
    """Figures of one start, of the rollout after it, and of what each of them compiled."""
    of_sglang = ["--cuda-graph-max-bs-decode", str(bench.config.engine.max_running_requests)] if name == CASES[3] else []
    engine = bench.engine(adapter, extra_flags=(*bench.config.engine.extra_flags, *of_sglang))
    evict(base_model.locate(bench.options.model))
    before = kernel_caches.files_in(Workspace.here().kernels)
    without = {"not read ahead": without_reading, "bytecode not kept": without_bytecode}.get(name, nullcontext)
    with without():
        begin = time.monotonic()
        engine.wake()
        engine.load_adapter(adapter)
        ready_s = time.monotonic() - begin
    found: dict[str, Any] = {"ready_s": ready_s} | engine.start_figures()
    between = kernel_caches.files_in(Workspace.here().kernels)
    sampling = bench.config.sampling.but(ignore_eos=True, max_output_tokens=8)
    found["rollout"] = timed_rollout(engine, bench.prompts(), sampling, adapter)
    after = kernel_caches.files_in(Workspace.here().kernels)
    found["compiled"], found["compiled_in_rollout"] = by_library(between - before), by_library(after - between)
    found["bytes"] = sum(path.stat().st_size for path in Workspace.here().kernels.rglob("*") if path.is_file())
    engine.stop()
    return found


def by_library(made: frozenset[str]) -> str:
    """In words, of paths that begin with the folder of GPU and versions."""
    paths = (path.partition(os.sep)[2] for path in made)
    return kernel_caches.describe(frozenset(path for path in paths if not kernel_caches.PASSING.search(path)))


def evict(folder: Path) -> None:
    """Have the kernel forget the files' pages."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def without_reading() -> Iterator[None]:
    read: Callable[..., Any] = starts.read_ahead
    starts.read_ahead = lambda folder: nullcontext()  # type: ignore[assignment]  # the same to its caller
    try:
        yield
    finally:
        starts.read_ahead = read


@contextmanager
def without_bytecode() -> Iterator[None]:
    asked, variable = program_versions.engine_has_bytecode, "PYTHONDONTWRITEBYTECODE"
    program_versions.engine_has_bytecode = lambda kind, machine: True
    before, os.environ[variable] = os.environ.get(variable, ""), "1"
    try:
        yield
    finally:
        program_versions.engine_has_bytecode, os.environ[variable] = asked, before


if __name__ == "__main__":
    main()
