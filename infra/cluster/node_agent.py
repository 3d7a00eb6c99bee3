"""The agent of one node: a process that starts our programs there and owns them. Ray runs it as an actor; nothing here imports Ray.

Ray ends an actor with its driver, and not always: a worker process survives the SIGKILL of its raylet (tried with Ray 2.60.0). So the agent
watches its parent, which is the raylet. When the raylet is gone it ends its programs and itself. If the agent is killed, the kernel tells its
programs to end (infra/processes/with_owner.py). Either way the node's GPU lock is freed, which the agent holds.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from infra.machine import devices
from infra.processes import children, gpu_lock, gpu_programs, lock_folder
from infra.processes.children import ProcessRef
from infra.settings import settings

log = logging.getLogger(__name__)

WATCH_S = 0.5
"""Seconds between two looks at the raylet."""
LOCK_WAIT_S = 2.0
_programs: dict[str, ProcessRef] = {}
_exit_codes: dict[str, list[int]] = {}
"""By program: its exit code, once it has ended."""
_starter = ThreadPoolExecutor(1, thread_name_prefix="starts programs")
"""One thread for as long as the process lives: the kernel ends an owned program with the thread that forked it."""


class NodeAgent:
    def __init__(self, locks: Path) -> None:
        """locks: Folder of the GPU lock of this node alone, used if it has no GPU. With GPUs it is the one of all users of this machine's."""
        if devices.device() == "cpu":
            os.environ["RATCHET_LOCK_FOLDER"] = str(locks)
            settings.cache_clear()
        self._lock: threading.Event | None = None
        self._lock_error: BaseException | None = None
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def take_lock(self, who: str, ours: frozenset[ProcessRef]) -> str:
        """Take the node's GPU lock, and end what earlier holders left there. Returns what it waits for, or "" once the lock is held. The lock
        is freed when the agent ends.

        ours: Processes of this run, which would keep the lock for as long as they wait for this node.

        Raises:
            ValueError: if the lock's folder cannot be used, or one of ours has the lock.
        """
        if self._lock is None:
            self._lock = threading.Event()
            threading.Thread(target=self._hold_lock, args=(who, self._lock), daemon=True).start()
        is_held = self._lock.wait(LOCK_WAIT_S)
        if self._lock_error:
            raise self._lock_error
        holder = gpu_lock.holder()
        if not is_held and holder and holder.process in ours:
            raise ValueError(
                f"two nodes of the cluster share the GPU lock in {lock_folder.folder()}, held by {holder}: start one node of Ray on a machine, "
                "and let RATCHET_LOCK_FOLDER, if it is set, be a folder that each machine has for itself"
            )
        return "" if is_held else f"its GPUs are held by {holder or 'a run that is starting or ending'}"

    def _hold_lock(self, who: str, held: threading.Event) -> None:
        try:
            with gpu_lock.gpu_lock(who):
                held.set()
                threading.Event().wait()
        except BaseException as error:  # noqa: BLE001  # raised where the lock is asked for
            self._lock_error = error
            held.set()

    def call(
        self, function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, BaseException | None]:
        """Call a function of ours on this node. Returns its result or its error: Ray would wrap the error in one of its own."""
        try:
            return function(*arguments, **named), None
        except Exception as error:  # noqa: BLE001  # raised by the caller
            return None, error


def start(kind: str, argv: Sequence[str], log_path: Path, env: Mapping[str, str], cwd: Path | None = None) -> ProcessRef:
    """Start a program that may use this node's GPUs. It ends with this process."""
    return _starter.submit(_start, kind, argv, log_path, env, cwd).result()


def _start(kind: str, argv: Sequence[str], log_path: Path, env: Mapping[str, str], cwd: Path | None) -> ProcessRef:
    codes: list[int] = []
    ref = gpu_programs.start(kind, argv, log_path, env, state_file=None, cwd=cwd, is_owned=True, on_exit=codes.append)
    _programs[ref.program] = ref
    _exit_codes[ref.program] = codes
    return ref


def exit_code(program: str) -> int | None:
    """Return the exit code of a program that was started here; None while it runs."""
    codes = _exit_codes[program]
    return codes[0] if codes else None


def is_alive(ref: ProcessRef) -> bool:
    return children.find(ref) is not None


def stop(ref: ProcessRef) -> None:
    """End a program with all its descendants, and confirm that it is gone."""
    gpu_programs.stop(ref)
    _programs.pop(ref.program, None)


def own_ref() -> ProcessRef:
    return children.ref_of(os.getpid())


def ping() -> None:
    """Return, as any call to a node that is reached."""


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def _end_with(raylet: int) -> None:
    while os.getppid() == raylet:
        time.sleep(WATCH_S)
    for ref in list(_programs.values()):
        children.kill_program(ref.program)
    os._exit(1)
