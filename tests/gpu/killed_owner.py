"""Kill -9 the owner of the GPUs in the middle of its work, and see that the next owner finds them empty; then finish the step.

    python tests/gpu/killed_owner.py OUT.json [--set FIELD=VALUE ...]      (as infra.config.tools.overrides takes them)

Three cells: the flow process killed while it samples, together with the engine's first process while it samples, and while it trains.
After each another workspace takes the GPU lock: seconds until it has it, GPU memory by the driver's word before and then, and the
processes that are left of the killed step. At the end the step is made whole again by the workspace that was struck.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from infra.engines.server import server_process
from infra.machine import devices
from infra.processes import children, lock_folder
from infra.settings import settings
from infra.store.files import open_workspace, read_json, write_json
from infra.store.layout import MANIFEST, run_folder

RUN = "killed-owner"
STEP = "import sys; from flows.presets import preset; from flows.step import rl_step; from infra.config.tools.overrides import with_overrides; "
STEP += f"rl_step(with_overrides(preset('smoke'), sys.argv[1:], name='{RUN}'))"
TAKE = "import time\nfrom infra.processes.gpu_lock import gpu_lock\nwith gpu_lock('the next owner'): print('mine', flush=True); time.sleep(3)"
CELLS = {
    "sampling": ("rollout: ", False),
    "sampling, engine too": ("rollout: ", True),
    "training": ("trainer: micro-batch", False),  # last: what was sampled before it is kept, and not sampled again
}
DEADLINE_S = 400.0
IDLE_GIB = 1.5


def main(out: Path, overrides: list[str]) -> None:
    os.environ["RATCHET_LOCK_FOLDER"] = str(settings().workspace / "shared-locks")
    settings.cache_clear()
    open_workspace()
    found: dict[str, Any] = {"gpus": devices.num_gpus(), "idle_gib": memory_gib(), "cells": {}}
    for name, (sign, strike_engine) in CELLS.items():
        found["cells"][name] = cell(sign, strike_engine, overrides)
        write_json(out, found)
        print(name, found["cells"][name], flush=True)
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", STEP, *overrides], check=True, timeout=DEADLINE_S)
    found["made_whole_s"] = time.monotonic() - begin
    manifest = read_json(run_folder(RUN) / "steps/000000" / MANIFEST)
    found["adapter"] = manifest["adapter_out"]["weights"]["sha256"]
    server_process.stop_recorded()
    found["at_the_end_gib"] = memory_gib()
    write_json(out, found)
    print(found)
    assert found["at_the_end_gib"] < found["idle_gib"] + IDLE_GIB
    print(f"{len(CELLS)} cells passed, 0 failed")


def cell(sign: str, strike_engine: bool, overrides: list[str]) -> dict[str, Any]:
    log_path = settings().workspace / f"flow-{time.monotonic_ns()}.log"
    with log_path.open("w") as log:
        flow = subprocess.Popen([sys.executable, "-c", STEP, *overrides], stdout=log, stderr=subprocess.STDOUT)
    wait_for(lambda: sign in log_path.read_text() or flow.poll() is not None, f"{sign!r} in {log_path}")
    assert flow.poll() is None, log_path.read_text()[-3000:]
    tree = psutil.Process(flow.pid).children(recursive=True)
    ours = [process for process in tree if children.PROGRAM.encode() in Path(f"/proc/{process.pid}/environ").read_bytes()]
    held = memory_gib()
    flow.send_signal(signal.SIGKILL)
    if strike_engine and (engine := server_process.recorded()) and (process := children.find(engine.process)):
        process.kill()
    begin = time.monotonic()
    other = {**os.environ, "RATCHET_WORKSPACE": str(settings().workspace / "another")}
    taker = subprocess.Popen([sys.executable, "-c", TAKE], env=other, stdout=subprocess.PIPE, text=True)
    assert taker.stdout is not None and taker.stdout.readline() == "mine\n"
    seconds = time.monotonic() - begin
    left = [process.pid for process in ours if is_alive(process)]
    found = {"turn_after_s": seconds, "held_gib": held, "left_gib": memory_gib(), "processes": len(ours), "left": left}
    taker.communicate()
    flow.wait()
    for process in set(tree) - set(ours):  # the Prefect server that the flow process had started for itself
        process.kill()
    assert not left, left
    assert found["left_gib"] < IDLE_GIB or not devices.num_gpus(), found
    assert not list((lock_folder.folder() / "programs").glob("*"))
    return found


def is_alive(process: psutil.Process) -> bool:
    """It may end while it is looked at."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def memory_gib() -> float:
    return devices.gpu_memory_used_bytes() / 2**30


def wait_for(claim: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not claim():
        if time.monotonic() > deadline:
            sys.exit(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [value for value in sys.argv[2:] if value != "--set"])
