"""Check a comparison before anything is started. Each problem is one line that says what to do."""

import importlib.util
import subprocess
from pathlib import Path

import psutil

from infra.comparison.config import Backend, ComparisonConfig
from infra.comparison.measurement import memory_holder
from infra.comparison.paths import machine_for, output_folder
from infra.engines.server import server_process
from infra.engines.server.installed import installed
from infra.machine import devices, nvml, ports
from infra.models import base_model
from infra.processes import children
from infra.settings import Settings, settings
from infra.telemetry import program_versions
from infra.telemetry.program_versions import COMMANDS, pins_of

GIB = 2**30
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
HELD_GIB = 0.5
"""GPU memory of another process below which it disturbs no measurement."""


def problems(config: ComparisonConfig) -> list[str]:
    """Empty where nothing stands in the way."""
    found = []
    for backend in config.backends:
        found += [_interpreter(backend, machine_for(config, backend)), _port(config, backend)]
    found += [
        _megatron() if config.mode == "training" else None,
        _foreign_memory(),
        _memory(config),
        _train_time(config),
        _output(config),
    ]
    return [problem for problem in found if problem]


def check(config: ComparisonConfig) -> None:
    """Raises ValueError with all problems, one a line."""
    if found := problems(config):
        raise ValueError(
            "preflight:\n" + "\n".join(f"* {problem}" for problem in found) + "\n(--skip-preflight starts all the same)"
        )


def expected_versions(backend: Backend) -> set[str]:
    """Return the versions in the lock files."""
    return {pins[backend] for path in program_versions.LOCKS.glob(f"{backend}-*.txt") if backend in (pins := pins_of([path]))}


def _interpreter(backend: Backend, machine: Settings) -> str | None:
    python, pythonpath = {
        "vllm": (machine.vllm_python, machine.vllm_pythonpath),
        "sglang": (machine.sglang_python, machine.sglang_pythonpath),
    }[backend]
    name, command = NAMES[backend], COMMANDS[backend]
    if not python.exists():
        return f"{name}'s interpreter {python} does not exist: run {command}, or give --{backend}-python"
    found, expected = installed(python, pythonpath, backend), expected_versions(backend)
    if found is None or found.version in expected:
        return None
    is_in_environment = found.folder.is_relative_to(python.parent.parent)
    cure = f"run {command}" if is_in_environment else f"change RATCHET_{backend.upper()}_PYTHONPATH, or run {command} without it"
    return f"{name} {found.version} lies in {found.folder}, the locks say {' or '.join(sorted(expected))}: {cure}"


def _port(config: ComparisonConfig, backend: Backend) -> str | None:
    port = config.port(backend)
    listening = [
        c for c in psutil.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port
    ]
    state = server_process.recorded()
    ours = {process.pid for process in children.members(state.process.program)} if state else set()
    if not listening or {connection.pid for connection in listening} <= ours:
        return None  # a stale server of ours is adopted or ended when the engine is started
    return f"port {port} is used by {_who(listening[0].pid) if listening[0].pid else ports.port_owner(port)}: end it, or give --{backend}-port"


def _who(pid: int) -> str:
    try:
        return f"pid {pid} ({psutil.Process(pid).name()})"
    except psutil.NoSuchProcess:
        return f"pid {pid}"


def _megatron() -> str | None:
    python = settings().trainer_python
    if python is None:
        is_there = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
    else:
        tried = subprocess.run([str(python), "-c", "import megatron.core"], capture_output=True, timeout=300, check=False)
        is_there = tried.returncode == 0
    where = python or "this environment"
    return None if is_there else f"megatron-core is not in {where}: run ./infra/quickstart, or set RATCHET_TRAINER_PYTHON"


def _foreign_memory() -> str | None:
    """GPU memory that is held by processes that are not our engine."""
    if devices.device() == "cpu":
        return None
    state = server_process.recorded()
    ours = {process.pid for process in children.members(state.process.program)} if state else set()
    holders = [each for each in nvml.read().holdings if each.pid not in ours and each.num_bytes / GIB > HELD_GIB]
    if not holders:
        return None
    return f"GPU memory is held by {', '.join(f'{_who(h.pid)}: {h.num_bytes / GIB:.1f} GiB' for h in holders)}: end it first"


def _memory(config: ComparisonConfig) -> str | None:
    weights = sum(path.stat().st_size for path in base_model.locate(config.model).glob("*.safetensors")) / GIB
    if devices.device() == "cpu":
        available = psutil.virtual_memory().available / GIB
        needed = weights + memory_holder.memory_gib(config)
        if needed > available:
            return f"{needed:.1f} GiB of memory are needed for engine and training, {available:.1f} are available: take a smaller model"
        return None
    total = devices.gpu_memory_total_bytes() / GIB
    if weights > total * config.gpu_memory_utilization:
        return (
            f"the weights of {config.model} take {weights:.1f} GiB, --gpu-memory-utilization {config.gpu_memory_utilization} of {total:.1f} GiB "
            f"are {total * config.gpu_memory_utilization:.1f}: raise it, or take a smaller model or more GPUs"
        )
    return None


def _train_time(config: ComparisonConfig) -> str | None:
    """In mode inference the time for which memory is held must be known."""
    if config.mode == "training":
        return None
    try:
        memory_holder.seconds(config)
    except ValueError as error:
        return str(error)
    return None


def _output(config: ComparisonConfig) -> str | None:
    folder = output_folder(config)
    existing: Path = next(parent for parent in [folder, *folder.parents] if parent.exists())
    return None if existing.is_dir() else f"--output {folder}: {existing} is no folder"
