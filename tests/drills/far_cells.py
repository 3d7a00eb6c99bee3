"""Cells of runs of several steps and of parts that are far away: the queue of rollouts ahead, the store, a replica behind a network.

    queue    three steps, two of them sampled ahead: a group is a whole rollout that waits in the folder of its step
    store    two steps, copied to a bucket of a real S3 server (moto) through a door
    replicas a replica is slow, or in a network namespace of its own whose only link is taken away

Who is struck with groups waiting: step 0 trains, the rollout of step 1 is whole, and that of step 2 has half of its samples.
"""

import json
import math
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import carried_cells
import forks
import in_flight_cells

if TYPE_CHECKING:
    from cell import Running
    from matrix import Cell

    from infra.config import RunConfig

WAITING, WRITING, MARKING = "queue.waiting", "queue.writing", "queue.marking"
"""Groups wait; before the file of a waiting group is written; between that file and the mark that makes it valid."""
SENDING, COPYING = "store.sending", "store.copying"
"""Half of an object of a committed step is in the store; the same of a step that is under way."""
POINTS = (WAITING, WRITING, MARKING, SENDING, COPYING)
TARGETS = ("group file", "group mark", "disk", "store", "node", "engine part")
"""group file, group mark: of step 1, which waits. disk: the file system of the workspace. store: as seen through the door. node, engine part: see
node_cells.py."""
FAULTS = ("slow", "cut", "brief cut", "damaged", "full", "HTTP 403")
"""cut: no packet passes for CUT_S, brief cut: for BRIEF_CUT_S. HTTP 403: the keys are not taken any more. full: no space is left. A slow
disk takes no write for FROZEN_S."""
SIGNALS = ("SIGKILL", "SIGTERM", "hang")
QUEUE: dict[tuple[str, str], tuple[str, ...]] = {
    **{("flow", fault): (WAITING, WRITING, MARKING) for fault in SIGNALS},
    ("flow", "exit 1"): (WRITING, MARKING),
    **{("engine", fault): (WAITING,) for fault in (*SIGNALS, "garbage")},
    **{("worker", fault): (WAITING,) for fault in ("SIGKILL", "SIGTERM")},
    ("disk", "full"): (WRITING,),
    ("disk", "slow"): (WAITING, WRITING),
    ("group file", "damaged"): (WAITING,),
    ("group mark", "damaged"): (WAITING,),
}
STORE: dict[tuple[str, str], tuple[str, ...]] = {
    **{("store", fault): (SENDING, COPYING) for fault in ("SIGKILL", "hang", "HTTP 503", "reset", "HTTP 403", "full", "slow")},
    **{("delivery", fault): (SENDING,) for fault in SIGNALS},
    **{("flow", fault): (COPYING,) for fault in SIGNALS},
}
SLOW_REPLICA: dict[tuple[str, str], tuple[str, ...]] = {
    ("engine", fault): ("roll_out.middle",) for fault in ("slow", "cut", "brief cut")
}
NUM_STEPS = {"queue": 3, "store": 2, **carried_cells.NUM_STEPS} | dict.fromkeys(
    in_flight_cells.VARIANTS, in_flight_cells.NUM_STEPS
)
CUT_S = {"cut": 4.0, "brief cut": 0.7}
"""Longer and shorter than the two seconds after which a replica that answers nothing is lost."""
BUCKET = "drill"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
DISK_MIB = 96
FROZEN_S = 4.0
"""So long a slow disk takes no write: longer than an engine may be silent."""
CURE_LIMIT_S = 60.0


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def num_taken_in(run: Path, config: "RunConfig") -> int:
    """Return how many samples a run has on its disk: in journals, whose first line is no sample, and in rollouts that are whole."""
    size = config.data.num_prompts * config.sampling.group_size
    journals = sum(max(0, num_lines(path) - 1) for path in run.glob("steps/*/samples.journal"))
    return journals + size * len(list(run.glob("steps/*/samples.inputs_key.json")))


class Refused(Exception):
    """This machine cannot make the cell."""


def num_steps(variant: str) -> int:
    return NUM_STEPS.get(variant, 1)


def settings_of(variant: str) -> dict[str, object]:
    """Return sections of the configuration that such a run needs."""
    if variant not in NUM_STEPS:
        return {}
    return {"num_steps": NUM_STEPS[variant], "evaluation": {"every": 0}}


def loss_of(variant: str) -> dict[str, object]:
    ahead = NUM_STEPS["queue"] - 1
    if variant in in_flight_cells.VARIANTS:
        return {"correction": in_flight_cells.CORRECTION}
    return {"correction": {"mode": "decoupled", "kind": "tis", "max_staleness": ahead}} if variant == "queue" else {}


def environment_of(running: "Running") -> dict[str, str]:
    if running.cell.variant != "store":
        return {"RATCHET_MIN_FREE_GIB": "0"} if running.cell.target == "disk" else {}
    return KEYS | {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{running.port}",
        "RATCHET_STORE_URL": url_of(running),
        "RATCHET_STORE_EVERY_S": "1",
    }


def url_of(running: "Running") -> str:
    return f"s3://{BUCKET}/{running.folder.name}"


# -- a disk of the cell's own


def mount_disk(workspace: Path, fault: str) -> None:
    """Raises Refused where no file system can be mounted."""
    commands = [["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(workspace)]]
    if fault == "slow":  # a file system that can be frozen
        if missing := [name for name in ("mkfs.ext4", "fsfreeze") if not shutil.which(name)]:
            raise Refused(f"{missing[0]} is not installed: a slow disk cannot be played")
        image = str(workspace.with_name("disk.img"))
        commands = [
            ["truncate", f"--size={DISK_MIB}M", image],
            ["mkfs.ext4", "-q", image],
            ["mount", "-o", "loop", image, str(workspace)],
        ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"no file system can be mounted here: {done.stderr.strip()}")


def strike_disk(running: "Running") -> None:
    if running.cell.fault == "full":
        fill_disk(running.workspace)
        running.restore = (math.inf, lambda: free_disk(running.workspace))
        return

    def thaw() -> None:
        running.restore = None
        subprocess.run(["fsfreeze", "--unfreeze", str(running.workspace)], check=True)

    subprocess.run(["fsfreeze", "--freeze", str(running.workspace)], check=True)
    running.restore = (time.monotonic() + FROZEN_S, thaw)


def unmount_disk(workspace: Path) -> None:
    if workspace.is_mount():
        subprocess.run(["umount", "--lazy", str(workspace)], check=True)


def fill_disk(workspace: Path) -> None:
    with (workspace / "filler").open("wb", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while stream.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


def free_disk(workspace: Path) -> None:
    (workspace / "filler").unlink(missing_ok=True)


# -- a group that is not what it was


def damage(running: "Running") -> None:
    """Change a byte of the file of the group that waits, or cut its mark in half."""
    folder = running.workspace / "runs" / running.run / "steps/000001"
    if running.cell.target == "group file":
        path = folder / "samples.parquet"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path = folder / "samples.inputs_key.json"
        path.write_bytes(path.read_bytes()[:100])


def cure(running: "Running") -> None:
    """What the message says: give the right keys, or drop the steps from that one on."""
    if running.cell.target == "store":
        running.mend()
    if running.cell.target != "group file":
        return

    def drop() -> int:
        from infra.runs import lineage

        lineage.drop(running.run, 1)
        return 0

    if forks.wait(forks.fork(drop, running.environment, running.folder / "drop.log"), CURE_LIMIT_S) != 0:
        raise LookupError(f"the steps cannot be dropped, see {running.folder}/drop.log")


def samples_again(cell: "Cell") -> bool:
    """Whether samples that were delivered may have to be made again: they are damaged, or on their way when the network is cut or a node is
    stopped, or just being taken in when the flow is struck, which at the moment of a copy waits for no sample."""
    return (
        cell.fault in ("damaged", "cut", "brief cut")
        or (cell.variant, cell.fault) == ("nodes", "hang")
        or (cell.point, cell.target) == (COPYING, "flow")
    )


# -- what must hold


def after(running: "Running", problems: list[str]) -> None:
    if running.cell.variant in ("queue", "episodes ahead", *in_flight_cells.VARIANTS):
        _after_queue(running, problems)
    if running.cell.variant in in_flight_cells.VARIANTS:
        in_flight_cells.after(running, problems)
    if running.cell.variant == "store":
        _after_store(running, problems)
    if running.cell.fault in ("slow", *CUT_S) and running.cell.variant == "replicas":
        _after_slow_replica(running, problems)


LINES = {
    "disk": "No space left on device",
    "group file": "steps/000001/samples.parquet has changed since it was written",
    "group mark": "steps/000001/samples.inputs_key.json is set aside",
}
"""What the user reads of the fault in the first attempt."""


def _after_queue(running: "Running", problems: list[str]) -> None:
    """Every prompt was trained on once, or its loss is counted; none waits any more."""
    import pyarrow.parquet as pq

    steps = range(running.num_steps)
    paths = [running.workspace / "runs" / running.run / f"steps/{step:06d}/samples.parquet" for step in steps]
    prompts = [prompt for path in paths for prompt in pq.read_table(path, columns=["prompt_id"]).to_pydict()["prompt_id"]]
    if sorted(prompts) != sorted([*range(len(steps) * running.config.data.num_prompts)] * running.config.sampling.group_size):
        problems.append(f"the prompts {sorted(set(prompts))} were trained on, not each of them once")
    size = running.config.data.num_prompts * running.config.sampling.group_size
    unused = json.loads((running.workspace / "runs" / running.run / "report.json").read_bytes())["unused"]
    counted = (unused["num_waiting"], unused["num_carried_over"], unused["num_dropped"])
    is_lost = running.cell.target == "group mark"
    # a wrong answer sets its journal aside: as many of its samples as had come are counted as dropped
    if counted != (0, 0, size if is_lost else 0) and running.cell.fault != "garbage":
        problems.append(f"{counted} samples wait, are carried over and were dropped; {size if is_lost else 0} were lost")
    line = None if running.cell.fault == "slow" else LINES.get(running.cell.target)
    if running.cell.fault == "slow" and (running.folder / "attempt-2.log").exists():
        problems.append("a disk that is slow was not waited for: the run ended")
    if line and line not in (running.folder / "attempt-1.log").read_text():
        problems.append(f"attempt-1.log does not say {line!r}")


TROUBLE = ("SIGKILL", "hang", "HTTP 503", "reset", "HTTP 403", "full")
"""Faults of a store that a user is told."""
CHECKED = {
    "hang": "does not answer in time: it did not take .ratchet within",
    "HTTP 403": "does not take .ratchet with these keys",
}
"""What the check before the next step says of them. Of others it says the error, or the same as of a store that hangs: libraries try again."""


def _after_store(running: "Running", problems: list[str]) -> None:
    """Another machine gets the whole run with equal bytes, nothing is left of the steps under way, and a fault is one line."""
    fetched = running.folder / "fetched"
    environment = running.environment | {"RATCHET_WORKSPACE": str(fetched)}

    def fetch() -> int:
        from infra.mirror.fetching import fetch
        from infra.mirror.remote import Remote

        fetch(f"{url_of(running)}/{running.run}")
        left = Remote(url_of(running)).names(f"{running.run}/under-way")
        (running.folder / "under-way.json").write_text(json.dumps(left))
        return 0

    if forks.wait(forks.fork(fetch, environment, running.folder / "fetch.log"), CURE_LIMIT_S) != 0:
        problems.append(f"the store has not the whole run, see {running.folder}/fetch.log")
        return
    if left := json.loads((running.folder / "under-way.json").read_text()):
        problems.append(f"the store still has {left} of steps under way, though all are committed")
    ours, theirs = (_digests(folder / "runs" / running.run) for folder in (running.workspace, fetched))
    if ours != theirs or len(ours) < 3 * NUM_STEPS["store"]:
        problems.append(f"the store's files {sorted(theirs.items())} are not those of the run {sorted(ours.items())}")
    shutil.rmtree(fetched)
    _says_so_once(running, problems)


def _says_so_once(running: "Running", problems: list[str]) -> None:
    """Each step's log has at most one line about copies under way and one of the check before it, the delivery's has one for each attempt; no
    stack of calls."""
    if running.cell.target != "store":
        return
    step = (running.folder / "attempt-1.log").read_text()
    delivery = (running.workspace / "logs/delivery.log").read_text()
    if "Traceback" in step + delivery:
        problems.append("a fault of the store is a stack of calls in the log, not a line")
    num_lines = step.count("is not copied, the next attempt")
    expected = {1, 2} if running.cell.point == COPYING and running.cell.fault in TROUBLE else {0, 1, 2}
    if num_lines not in expected:
        problems.append(f"the step's log has {num_lines} lines about copies that fail, not {sorted(expected)}")
    checked = [line for line in step.splitlines() if "RATCHET_STORE_URL: " in line]
    is_struck_before = running.cell.point == COPYING and running.cell.fault in TROUBLE  # the check of the last step comes later
    words = CHECKED.get(running.cell.fault, "take .ratchet")
    if len(checked) > 1 or (is_struck_before and not checked) or not all(words in line for line in checked):
        problems.append(f"the check before the next step says {checked}, not one line with {words!r}")
    is_told = running.cell.fault in TROUBLE and running.cell.fault != "hang"  # whose time-out the delivery does not live to see
    if running.cell.point == SENDING and is_told and f"run {running.run} is not copied: " not in delivery:
        problems.append("the delivery's log does not say that the run is not copied")


def _digests(run: Path) -> dict[str, str]:
    from infra.store.digests import sha256_of

    patterns = ("steps/*/manifest.json", "steps/*/samples.parquet", "adapters/*/adapter_model.safetensors")
    return {str(path.relative_to(run)): sha256_of(path) for pattern in patterns for path in run.glob(pattern)}


def _after_slow_replica(running: "Running", problems: list[str]) -> None:
    measures = json.loads((running.manifest.parent / "measures/roll_out.json").read_bytes())
    helped = measures["num_reissued_samples"] + measures["num_moved_samples"]
    if running.cell.fault == "brief cut" and measures["num_lost_replicas"]:
        problems.append("a replica that was away for a moment counts as lost")
    if running.cell.fault != "brief cut" and not helped:
        problems.append("the other replica has made no sample of the one that was slow")
