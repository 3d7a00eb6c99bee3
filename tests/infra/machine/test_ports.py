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


def test_the_last_port_has_none_after_it() -> None:
    with ports.reserved(ports.LAST_PORT) as port:
        assert port == ports.LAST_PORT
        for first_choice in (ports.LAST_PORT, ports.LAST_PORT + 1):  # a second server asks for the port after the first one's
            with pytest.raises(ValueError, match="ports 65535 to 65535 are all taken; set another first choice"):
                ports.free_port(first_choice)
