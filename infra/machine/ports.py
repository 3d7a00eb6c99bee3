"""Free ports of this machine."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

log = logging.getLogger(__name__)

LAST_PORT = 65535

_lock = threading.Lock()
_reserved: set[int] = set()


def port_owner(port: int) -> str:
    """Who listens on a port of this machine, for a message."""
    pids = listeners(port)
    if not pids:
        return "no program any more"
    return "a process of another user" if pids == {None} else ", ".join(f"pid {pid}" for pid in pids if pid)


def listeners(port: int) -> set[int | None]:
    """The pids of the processes that listen on a port; None for one of another user."""
    found = psutil.net_connections(kind="tcp")
    return {each.pid for each in found if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port}


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(first_choice: int, host: str = "127.0.0.1") -> int:
    """Return first_choice, or the next free port, with a line in the log. Raises ValueError if a hundred ports are taken, or all up to the last."""
    last = min(first_choice + 99, LAST_PORT)
    for port in range(min(first_choice, last), last + 1):
        if port in _reserved:
            continue
        if is_free(port, host):
            return port
        log.warning("port %d is taken by %s, trying the next", port, port_owner(port))
    raise ValueError(f"ports {min(first_choice, last)} to {last} are all taken; set another first choice")


@contextmanager
def reserved(first_choice: int, host: str = "127.0.0.1") -> Iterator[int]:
    """A free port that no other thread of this process is given in the block: until a server listens there, it looks free to all."""
    with _lock:
        port = free_port(first_choice, host)
        _reserved.add(port)
    try:
        yield port
    finally:
        _reserved.discard(port)
