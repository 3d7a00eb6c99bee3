"""What of this machine and this installation keeps a run from working, each finding with its cure."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from infra import engines
from infra.machine import devices, nvml, ports
from infra.processes import children, gpu_lock, gpu_programs
from infra.processes.children import ProcessRef
from infra.runs.run_state import REMOVED_RUNS
from infra.services import flow_runs, servers
from infra.settings import CHECKOUT, LOOPBACK, settings
from infra.store.files import LAYOUT_VERSION, read_note, usable_workspace
from infra.store.layout import Workspace

PYTHONS = ((3, 11), (3, 12))
LOCK = CHECKOUT / "infra/setup/locks/main.txt"
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
MAX_LISTED = 5
MIN_MEMORY_GIB, ROOMY_GIB = 6.0, 10.0
"""Memory that the tiny model's engine and trainer need together, and free disk below which a warning is due."""


class Finding(NamedTuple):
    level: Literal["ok", "warning", "problem"]
    what: str
    cure: str = ""


def findings() -> Iterator[Finding]:
    """Look at everything; a wrong setting ends it, for nothing else can be judged then."""
    yield _python()
    try:
        settings()
    except ValueError as error:
        yield Finding("problem", str(error), "correct or unset the variable")
        return
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        *(_versions, _interpreters, _workspace, _memory, _gpus, _ports, _servers, _leftovers),
    )
    for check in checks:
        yield from check()


def _python() -> Finding:
    found = f"Python {sys.version.split()[0]}"
    if sys.version_info[:2] in PYTHONS:
        return Finding("ok", found)
    return Finding("problem", f"{found}: 3.11 or 3.12 is needed", "PYTHON=/path/to/python3.12 ./infra/quickstart")


def _versions() -> Iterator[Finding]:
    wrong = [f"{name} {found or 'is missing'}, locked is {wanted}" for name, wanted, found in differing(LOCK)]
    if not wrong:
        yield Finding("ok", f"packages are those of {LOCK.relative_to(CHECKOUT)}")
        return
    more = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
    yield Finding("problem", f"{'; '.join(wrong[:MAX_LISTED])}{more}", "python3 infra/setup/bootstrap.py")


def differing(lock: Path) -> list[tuple[str, str, str | None]]:
    """Return name, locked version and installed version of each package that is not what the lock says; a build's name does not count."""
    found = []
    for name, wanted in PINNED.findall(lock.read_text()):
        try:
            installed: str | None = version(name)
        except PackageNotFoundError:
            installed = None
        if installed is None or installed.partition("+")[0] != wanted.partition("+")[0]:
            found.append((name, wanted, installed))
    return found


def _interpreters() -> Iterator[Finding]:
    python = settings().sglang_python
    if python.exists():
        yield Finding("ok", f"SGLang's interpreter {python}")
    else:
        yield Finding(
            "problem", f"SGLang's interpreter {python} does not exist", "./infra/quickstart, or set RATCHET_SGLANG_PYTHON"
        )


def _workspace() -> Iterator[Finding]:
    try:
        root = usable_workspace()
    except ValueError as error:
        yield Finding("problem", str(error), "set RATCHET_WORKSPACE to a folder that you may write to")
        return
    free = shutil.disk_usage(root).free / 2**30
    what = f"workspace {root}, {free:.1f} GiB free"
    if free < settings().min_free_gib:
        yield Finding(
            "problem", f"{what}: a step needs {settings().min_free_gib:g}", "ratchet du, ratchet rm RUN, or RATCHET_WORKSPACE"
        )
    elif free < ROOMY_GIB:
        yield Finding("warning", f"{what}: adapters with optimizer state may fill it", "ratchet du, or retention.keep_last")
    else:
        yield Finding("ok", what)
    layout = read_note(Workspace(root).layout_version, dict[str, int]) or {}
    if layout.get("layout", LAYOUT_VERSION) != LAYOUT_VERSION:
        yield Finding(
            "problem", f"the workspace has layout {layout['layout']}, this version uses {LAYOUT_VERSION}", "set RATCHET_WORKSPACE"
        )


def _memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available / 2**30
    what = f"{free:.1f} GiB of memory available, {psutil.cpu_count()} CPU cores"
    short = free < MIN_MEMORY_GIB
    yield Finding("warning", f"{what}: {MIN_MEMORY_GIB:g} are needed", "end other programs") if short else Finding("ok", what)


def _gpus() -> Iterator[Finding]:
    try:
        numbers = nvml.numbers()
        found = nvml.read()
    except nvml.DriverError as error:
        yield Finding("problem", f"NVIDIA's driver: {error}", "nvidia-smi, then restart the driver or the machine")
        return
    if not numbers:
        if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0:
            hidden = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
            yield Finding(
                "warning", f"nvidia-smi lists GPUs and this process may use none: {hidden}", "unset CUDA_VISIBLE_DEVICES"
            )
        else:
            yield Finding("ok", "no NVIDIA GPU: engine and trainer work on the CPU")
        return
    yield Finding("ok", f"{len(numbers)} x {devices.processor()}, driver {nvml.version()}")
    ours = {member.pid for program in gpu_programs.programs() for member in children.members(program.id)}
    for number, held in found.of(found.pids - ours).items():
        yield Finding(
            "warning", f"GPU {number}: {held / 2**30:.1f} GiB are held by {found.holders(number)}", "end these programs"
        )


def _ports() -> Iterator[Finding]:
    for variable, port, name in (
        ("RATCHET_PREFECT_PORT", settings().prefect_port, servers.PREFECT),
        ("RATCHET_MLFLOW_PORT", settings().mlflow_port, servers.MLFLOW),
        ("RATCHET_ENGINE_PORT", settings().engine_port, "engine"),
    ):
        if ports.is_free(port, LOOPBACK) or (_our_engine_has(port) if name == "engine" else servers.living(name)):
            yield Finding("ok", f"port {port} for {name}")
        else:
            yield Finding(
                "warning", f"port {port} for {name} is taken by {ports.port_owner(port)}: the next one is used", f"set {variable}"
            )


def _our_engine_has(port: int) -> bool:
    return any(urlsplit(state.url).port == port and children.find(state.process) for state in engines.recorded())


def _servers() -> Iterator[Finding]:
    for variable, path in (("PREFECT_API_URL", "/health"), ("RATCHET_MLFLOW_URI", "/health")):
        address = os.environ.get(variable, "")
        if address.startswith("http") and not _answers(address + path):
            yield Finding("problem", f"{variable} {address} does not answer", "start that server, or unset the variable")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code < 500
    except httpx.HTTPError:
        return False


def _leftovers() -> Iterator[Finding]:
    holder = gpu_lock.holder()
    at_work = holder is not None and children.find(holder.process) is not None
    left = [] if at_work else [each for each in gpu_programs.programs() if not each.is_expected and children.members(each.id)]
    for program in left:
        yield Finding(
            "warning", f"a {program.kind} that an ended run has left is still running", "the next run ends it; or: ratchet down"
        )
    dead = [path for path in flow_runs.folder().glob("*.json") if (ref := _process_in(path)) and children.find(ref) is None]
    if dead:
        yield Finding("ok", f"{len(dead)} flow runs have ended without a word to Prefect; the next start closes them")
    if (settings().workspace / REMOVED_RUNS).exists():
        yield Finding("warning", "the removal of a run was interrupted", f"rm -r {settings().workspace / REMOVED_RUNS}")
    if not left:
        yield Finding("ok", "no program is left over")


def _process_in(path: Path) -> ProcessRef | None:
    noted = read_note(path, flow_runs.Note)
    return noted.process if noted else None
