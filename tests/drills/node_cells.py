"""Cells of runs over two nodes of a Ray cluster, one of which is struck: Linux, root, `ip` of iproute2, Ray.

flow, head (this machine's namespace) --veth--> second node (a namespace of its own, with an engine server and a rank)

The second node is killed, stopped, or cut off for longer than Ray waits. Then the run must go on without it; and when it is back, what runs
there from before must end by itself.

Where the engine is one server over both nodes, its part on the second one is struck too. A lost part is started again with the rest of the
server. Without the second node the server has no place: the run stops with one line, and goes on when the node is there again.
"""

import contextlib
import ipaddress
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import far_cells
import namespace
import points

if TYPE_CHECKING:
    from cell import Running

NODES: dict[tuple[str, str], tuple[str, ...]] = {
    ("node", fault): ("roll_out.middle", "train.middle") for fault in ("SIGKILL", "hang", "cut")
}
SPREAD: Literal["engine over nodes"] = "engine over nodes"
VARIANTS = ("nodes", SPREAD)
ENGINE_OVER_NODES: dict[tuple[str, str], tuple[str, ...]] = {
    **{("engine part", fault): ("roll_out.middle", "train.middle") for fault in ("SIGKILL", "hang")},
    ("engine", "SIGKILL"): ("roll_out.middle",),
    ("node", "SIGKILL"): ("roll_out.middle", "train.middle"),
    ("node", "cut"): ("roll_out.middle",),
}
PATIENCE_S = 30.0
"""So long an engine over both nodes may take for a sample. A part that is gone is found sooner."""
AWAY_S = 15.0
"""So long a node is stopped or cut off. Ray gives it up after about 5 s."""
GONE_LIMIT_S = 60.0
NUM_STARTS = 5
"""Ray gives up when its node is not there after 30 s, as on a busy machine."""
READY = "Ray runtime started"
NO_PLACE = (
    "replica 0 of the engine has no node: 2 nodes are needed, living nodes are ",
    "failure class: no node for the engine",
)
"""What is said of an engine over two nodes when one is left."""
RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


def engine_of(variant: str) -> dict[str, object]:
    """Return what the engine's section of the configuration has of its own."""
    if variant == SPREAD:
        return {"tensor_parallel": 2, "request_timeout_s": PATIENCE_S}
    return {"replicas": 2} if variant == "nodes" else {}


def refusal() -> str | None:
    """Why there can be no second node here; None: there can."""
    return namespace.refusal() or (None if find_spec("ray") else "Ray is not installed: python3 infra/setup/bootstrap.py --ray")


class Nodes:
    """The cluster of a cell."""

    def __init__(self, running: "Running") -> None:
        self.folder, self.port = running.folder, running.port + 50
        self.name = f"ratchet-drill-{self.port}"
        self.link = f"node{self.port}"
        self.here, self.there = (f"10.232.{self.port // 64 % 256}.{self.port % 64 * 4 + host}" for host in (1, 2))
        self.session = Path(tempfile.mkdtemp(prefix="ratchet-drill-ray-"))  # a socket's path has a limit
        self.environment = RAY | {"RAY_AUTH_TOKEN_PATH": str(running.folder / "ray.token"), points.MARK: str(running.folder)}
        self.address = f"{self.here}:{self.port}"
        self.is_spread = running.cell.variant == SPREAD
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> dict[str, str]:
        """Start both nodes; gives the variables of a flow that uses them."""
        token = os.open(self.folder / "ray.token", os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(token, secrets.token_hex(16).encode())
        os.close(token)
        _ip("netns", "add", self.name)
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "far", "netns", self.name)
        _ip("addr", "add", f"{self.here}/30", "dev", self.link)
        _ip("link", "set", self.link, "up")
        _ip("-n", self.name, "addr", "add", f"{self.there}/30", "dev", "far")
        for device in ("lo", "far"):
            _ip("-n", self.name, "link", "set", device, "up")
        of_head = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.session}"]
        self._start("head", [], [f"--node-ip-address={self.here}", *of_head])
        self.start_second("node")
        return self.environment | {"RATCHET_CLUSTER_ADDRESS": self.address, "RATCHET_CLUSTER_NODES": "2"} | self._spread()

    def start_second(self, log: str) -> None:
        """Start Ray on the second node, which must be none of the cluster."""
        self._start(log, ["ip", "netns", "exec", self.name], [f"--node-ip-address={self.there}", f"--address={self.address}"])

    def _spread(self) -> dict[str, str]:
        network = ipaddress.ip_network(f"{self.here}/30", strict=False)
        variables = {"RATCHET_CLUSTER_ENGINE_NODES": "2", "RATCHET_CLUSTER_TRUSTED_NETWORK": str(network)}
        return variables if self.is_spread else {}

    def _start(self, kind: str, where: list[str], arguments: list[str]) -> None:
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", "--object-store-memory=83886080"]
        log = self.folder / f"ray-{kind}.log"
        environment = os.environ | self.environment
        for _ in range(NUM_STARTS):
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*where, *ray, *arguments], stdout=output, stderr=output, env=environment, start_new_session=True
                )
            self.started.append(process)
            while process.poll() is None:
                if READY in log.read_text():
                    return
                time.sleep(0.1)
            self._end(process)
        raise LookupError(f"Ray did not start, see {log}")

    def pids(self) -> list[int]:
        """Of all processes on the second node."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(word) for word in done.stdout.split()]

    def has_ray(self) -> bool:
        """Whether Ray is still there on the second node."""
        return self.started[-1].poll() is None

    def programs(self) -> list[int]:
        """Of the engine server and the rank there."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if b"twin_engine.py" in command or b"twin_trainer.py" in command else []
        return found

    def send(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End Ray on both."""
        self.send(signal.SIGKILL)
        for process in reversed(self.started):
            self._end(process)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.link], capture_output=True, check=False)
        shutil.rmtree(self.session, ignore_errors=True)

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]") -> None:
        """End one Ray with what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare(running: "Running") -> None:
    if why := refusal():
        raise far_cells.Refused(why)
    running.nodes = Nodes(running)
    try:
        running.environment |= running.nodes.start()
    except BaseException:
        running.nodes.end()
        running.nodes = None
        raise


def strike(running: "Running") -> None:
    nodes, fault = running.nodes, running.cell.fault
    assert nodes
    if not nodes.programs():
        raise LookupError("nothing of the run is on the second node")

    def restore() -> None:
        running.restore = None
        if fault == "cut":
            _ip("link", "set", nodes.link, "up")
        else:
            nodes.send(signal.SIGCONT)

    if fault == "SIGKILL":
        nodes.send(signal.SIGKILL)
        return
    running.restore = (time.monotonic() + AWAY_S, restore)
    if fault == "cut":
        _ip("link", "set", nodes.link, "down")
    else:
        nodes.send(signal.SIGSTOP)


def cure(running: "Running", problems: list[str]) -> None:
    """Have the second node back, where the run has stopped because it needs two. When it stopped it said so."""
    if (nodes := running.nodes) is None or not nodes.is_spread:
        return
    deadline = time.monotonic() + GONE_LIMIT_S
    while (nodes.has_ray() or nodes.programs()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if nodes.has_ray():
        problems.append(f"the run stopped, and the second node is still there after {GONE_LIMIT_S:g} s")
    nodes.start_second("node-again")


def _said(nodes: Nodes, running: "Running") -> list[str]:
    """Return what the first attempt has to say of the strike."""
    if running.cell.target == "node":
        return [f"node {nodes.there} is lost", *(NO_PLACE if nodes.is_spread else ())]
    is_noticed = (running.cell.target, running.cell.fault, running.cell.point) == ("engine part", "SIGKILL", "roll_out.middle")
    return [f"part 1 of the engine, on node {nodes.there}, is gone"] if is_noticed else []


def after(running: "Running", problems: list[str]) -> None:
    """The run says what it lost; what ran on a struck node has ended by itself. Then Ray is ended."""
    if (nodes := running.nodes) is None:
        return
    try:
        said = (running.folder / "attempt-1.log").read_text()
        problems += [f"attempt-1.log does not say {line!r}" for line in _said(nodes, running) if line not in said]
        if nodes.is_spread and "\nTraceback" in said:  # those of ranks stand behind "trainer: "
            problems.append("attempt-1.log has a traceback")
        if (
            (running.cell.target, running.cell.fault) == ("engine part", "SIGKILL")
            and running.struck_at
            and running.is_committed()
        ):
            waited_s = running.manifest.stat().st_mtime - running.struck_at
            problems += [f"the part that is gone was waited for: {waited_s:.0f} s"] if waited_s > PATIENCE_S else []
        deadline = time.monotonic() + GONE_LIMIT_S
        while (left := nodes.programs()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            problems.append(f"programs {left} of the run outlive the loss of their node by {GONE_LIMIT_S:g} s")
    finally:
        nodes.end()
    for name in [name for name in running.environment if name.startswith("RATCHET_CLUSTER_")]:  # there is none any more
        del running.environment[name]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
