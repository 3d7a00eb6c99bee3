"""Find the processes of a cell by the mark in their environment, and strike one of them."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import points

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "hang": signal.SIGSTOP}


def processes_of(cell: Path) -> list[int]:
    """The living processes with the cell's mark; zombies have no environment any more."""
    mark = f"{points.MARK}={cell}"
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in _environment(pid)]


def find(cell: Path, target: str) -> int | None:
    """The pid of a target, if it lives. Not for the flow process, which the drill forks itself: only one of a worker is found."""
    for pid in processes_of(cell):
        words = _command(pid)
        command = " ".join(words)
        is_second_part = "--node-rank 1 --dist-init-addr" in command
        match target:
            case "engine":
                is_server = "--enable-lora" in words and not _is_child_of_one(pid, "--model-path")
                found = is_server and not is_second_part
            case "engine part":
                found = "--enable-lora" in words and is_second_part
            case "judge server":
                is_server = "--model-path" in words and not _is_child_of_one(pid, "--model-path")
                found = is_server and "--enable-lora" not in words
            case "rank 0" | "rank 1":
                found = f"RANK={target[-1]}" in _environment(pid) and ("rank" in words or "infra.megatron" in words)
            case "torchrun":
                found = "torch.distributed.run" in words and not any(word.startswith("RANK=") for word in _environment(pid))
            case "worker":
                found = "worker" in words and "prefect" in command
            case "flow":
                found = "prefect.flow_engine" in command or "prefect.engine" in command
            case "reward worker":
                found = "infra.rewards.pool" in words and _is_child_of_one(pid, "infra.rewards.pool")
            case "reward model":
                found = "infra.rewards.models.program" in words
            case "delivery":
                found = "infra.tracking.upload" in words
            case "door":
                found = "door.py" in command
            case _:
                raise ValueError(target)
        if found:
            return pid
    return None


def order(cell: Path, target: str, fault: str, pid: int) -> None:
    """A fault that a process commits itself, from now on; its successor does not."""
    partial = cell / "order.json.partial"
    partial.write_text(json.dumps({"target": target, "fault": fault, "pid": pid}))
    partial.rename(cell / "order.json")


def send(pid: int, fault: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNALS[fault])


def left_after(cell: Path, patience_s: float) -> list[str]:
    """What still lives of a cell after a while, for a message."""
    deadline = time.monotonic() + patience_s
    while (alive := processes_of(cell)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{pid} {' '.join(_command(pid))[:120]}" for pid in alive]


def _environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _is_child_of_one(pid: int, word: str) -> bool:
    """SGLang's schedulers show their parent's command line until they rename themselves."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return word in _command(parent)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
