"""The actual package versions of engine and trainer, read from their own interpreters, and their differences from the lock files.

interpreter --read_versions.py--> versions --> server's identity, inputs key of a rollout, manifest
                                     +-------> one warning if a program starts with other versions than its lock

An interpreter is read once in a process (0.1 to 0.2 s), and again when one of the folders from which it imports has changed.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infra.failures import EngineUnavailable, TrainerLost
from infra.machine import devices, read_versions
from infra.machine.read_versions import TRAINER_PACKAGES
from infra.processes import child_environment
from infra.settings import CHECKOUT, Settings, main_python, settings

log = logging.getLogger(__name__)

LOCKS = CHECKOUT / "infra/setup/locks"
TIMEOUT_S = 120.0
ENGINE_PACKAGES = {
    "sglang": ("sglang", "torch", "transformers", "triton", "sglang-kernel", "flashinfer-python"),
    "vllm": ("vllm", "torch", "transformers", "triton", "flashinfer-python"),
}
COMMANDS = {"sglang": "./infra/quickstart", "vllm": "python3 infra/setup/bootstrap.py --vllm", "trainer": "./infra/quickstart"}
"""The commands that build a program's environment from its lock."""
SCRIPTED = {"scripted": "1"}
"""Versions of the scripted engine, which has no program."""


class _Interpreter(NamedTuple):
    python: Path
    pythonpath: str | None
    """None: the value in this process's environment."""
    packages: tuple[str, ...]


class _Reading(NamedTuple):
    versions: dict[str, str]
    has_bytecode: bool
    folders: tuple[str, ...]
    """Folders from which it imports."""
    stamp: tuple[int, ...]
    """When they were last changed, in nanoseconds."""


_readings: dict[_Interpreter, _Reading] = {}
_warned: set[str] = set()


def of_engine(kind: str, machine: Settings | None = None) -> dict[str, str]:
    """Return the versions that an engine of this kind would run with, and the switches of its libraries in the environment. No package if its
    interpreter does not exist, which its launch will report.

    machine: Settings with its interpreter. None: settings().

    Raises:
        EngineUnavailable: if the interpreter does not answer.
    """
    if kind not in ENGINE_PACKAGES:
        return SCRIPTED
    try:
        versions = _read(_engine_interpreter(kind, machine or settings())).versions
    except _NoAnswer as error:
        raise EngineUnavailable(str(error)) from error
    return versions | child_environment.switches(kind) | devices.gpu_versions((machine or settings()).engine_gpus)


def of_trainer() -> dict[str, str]:
    """Return the versions and switches that the trainer would run with, as its result reports them after a job.

    Raises:
        TrainerLost: if its interpreter does not answer.
    """
    try:
        versions = _read(_trainer_interpreter()).versions
    except _NoAnswer as error:
        raise TrainerLost(str(error)) from error
    return versions | child_environment.switches("trainer") | devices.gpu_versions(settings().trainer_gpus)


def engine_has_bytecode(kind: str, machine: Settings) -> bool:
    """Whether the packages of an engine's interpreter are compiled. Without that its processes compile them at each start."""
    return kind not in ENGINE_PACKAGES or _read(_engine_interpreter(kind, machine)).has_bytecode


def trainer_has_bytecode() -> bool:
    """As engine_has_bytecode."""
    return _read(_trainer_interpreter()).has_bytecode


def key_of(versions: Mapping[str, str]) -> str:
    """Return versions as one text, for a readable key."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def warn_of_engine(kind: str, machine: Settings) -> None:
    """Log the differences of a starting engine from its lock. Each line is logged once per process."""
    if kind in ENGINE_PACKAGES:
        _warn(
            kind,
            _engine_interpreter(kind, machine).python,
            of_engine(kind, machine),
            [[path] for path in sorted(LOCKS.glob(f"{kind}-*.txt"))],
        )


def warn_of_trainer() -> None:
    """Log the differences from the trainer's lock, as `warn_of_engine` does."""
    _warn("trainer", _trainer_interpreter().python, of_trainer(), [sorted(LOCKS.glob("main*.txt"))])


def pins_of(paths: Sequence[Path]) -> dict[str, str]:
    """Return the versions in lock files."""
    lines = [line.partition("==") for path in paths for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name.strip(): version.split()[0] for name, _, version in lines if version.strip()}


def unpinned(versions: Mapping[str, str], locks: Sequence[Sequence[Path]]) -> str:
    """Return how versions differ from the nearest lock; empty if they fit one.

    locks: Each is the set of files that together define an environment.
    """
    differences = []
    for paths in locks:
        pins = pins_of(paths)
        wrong = [(name, version, pins[name]) for name, version in versions.items() if name in pins]
        differences.append([each for each in wrong if not _fits(each[1], each[2])])
    nearest = min(differences, key=len, default=[])
    return ", ".join(f"{name} {version} (lock: {pin})" for name, version, pin in nearest)


def _fits(version: str, pin: str) -> bool:
    """Whether a version fits a pin: a build such as 2.13.0+cpu fits 2.13.0."""
    return pin in (version, version.partition("+")[0])


def _warn(program: str, python: Path, versions: Mapping[str, str], locks: Sequence[Sequence[Path]]) -> None:
    found = unpinned(versions, locks)
    line = f"{program} does not run with what its lock says: {found}; its interpreter is {python}, {COMMANDS[program]} makes the locked one"
    if found and line not in _warned:
        _warned.add(line)
        log.warning("%s", line)


def _engine_interpreter(kind: str, machine: Settings) -> _Interpreter:
    python, pythonpath = {
        "sglang": (machine.sglang_python, machine.sglang_pythonpath),
        "vllm": (machine.vllm_python, machine.vllm_pythonpath),
    }[kind]
    return _Interpreter(python, pythonpath, ENGINE_PACKAGES[kind])


def _trainer_interpreter() -> _Interpreter:
    return _Interpreter(settings().trainer_python or main_python(), None, TRAINER_PACKAGES)


class _NoAnswer(RuntimeError):
    """An interpreter does not report its versions."""


def _read(interpreter: _Interpreter) -> _Reading:
    known = _readings.get(interpreter)
    if known is None or known.stamp != _stamp(known.folders):
        versions, has_bytecode, folders = _ask(interpreter)
        known = _readings[interpreter] = _Reading(versions, has_bytecode, folders, _stamp(folders))
    return known


def _stamp(folders: Sequence[str]) -> tuple[int, ...]:
    return tuple(os.stat(folder).st_mtime_ns if os.path.exists(folder) else 0 for folder in folders)


def _ask(interpreter: _Interpreter) -> tuple[dict[str, str], bool, tuple[str, ...]]:
    python, pythonpath, packages = interpreter
    if python == main_python() and pythonpath is None:
        return read_versions.versions(packages), read_versions.has_bytecode(packages), tuple(sys.path)
    if not python.exists():
        return {}, True, (str(python),)
    environment = child_environment.passed_on() | ({} if pythonpath is None else {"PYTHONPATH": pythonpath})
    argv = [str(python), read_versions.__file__, *packages]
    try:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        told = json.loads(done.stdout)
        return dict(told["versions"]), bool(told["has_bytecode"]), (str(python), *told["path"])
    except subprocess.CalledProcessError as error:
        ends = error.stderr.strip().splitlines()[-1:] or ["without a word"]
        raise _NoAnswer(f"{python} cannot say which versions it has: it gave {error.returncode}, {ends[0]}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise _NoAnswer(f"{python} cannot say which versions it has: {type(error).__name__} {error}") from error
