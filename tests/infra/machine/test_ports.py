import os
import socket

import pytest

from infra.machine import ports


def test_a_taken_port_is_skipped_and_its_owner_named(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        chosen = ports.free_port(port)
    assert port < chosen < port + 100
    assert f"port {port} is taken by pid {os.getpid()}, trying the next" in caplog.text
    caplog.clear()
    assert ports.free_port(port) == port
    assert not caplog.text
