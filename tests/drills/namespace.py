"""A server in a network namespace of its own, which can be cut off: Linux, root, `ip` of iproute2.

client --127.0.0.1:PORT--> door (this process) --veth--> server (child, in the namespace)

The door stays reachable while the link is away, as a machine's own kernel does: what was sent is neither acknowledged nor refused.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import door

PR_SET_PDEATHSIG, CLONE_NEWNET = 1, 0x40000000


def refusal() -> str | None:
    """Why no namespace with a link can be made here; None: it can."""
    if os.geteuid():
        return "network namespaces need root"
    command = ["unshare", "--net", "ip", "link", "add", "here", "type", "veth", "peer", "name", "there"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return f"network namespaces need {error.filename}"
    return f"network namespaces are refused here: {done.stderr.strip()}" if done.returncode else None


def link_of(port: int) -> str:
    """This side's end of the link to the server of a port."""
    return f"drill{port}"


def set_link(port: int, state: str) -> None:
    """state: up or down. A server that is gone has taken its link with it."""
    subprocess.run(["ip", "link", "set", link_of(port), state], capture_output=True, check=False)


def port_of(pid: int) -> int:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return int(words[words.index("--port") + 1])


def serve(port: int, run_server: Callable[[str], object]) -> None:
    """Run a server behind a door, for ever.

    run_server: Serves at an address.
    """
    here, there = (f"10.231.{port // 64 % 256}.{port % 64 * 4 + host}" for host in (1, 2))
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        theirs.sendall(b".")
        theirs.recv(1)
        _ip("addr", "add", f"{there}/30", "dev", "far")
        _ip("link", "set", "far", "up")
        with contextlib.suppress(KeyboardInterrupt):
            run_server(there)
        os._exit(0)
    ours.recv(1)
    _ip("link", "add", link_of(port), "type", "veth", "peer", "name", "far", "netns", str(pid))
    _ip("addr", "add", f"{here}/30", "dev", link_of(port))
    _ip("link", "set", link_of(port), "up")
    ours.sendall(b".")
    asyncio.run(door.main(port, port, there))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
