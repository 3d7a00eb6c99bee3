"""Tools of MCP servers, by both transports, and what becomes of servers that fail."""

import argparse
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from mcp_server import Server, handler_of
from tool_journal import recorded

from infra.config.sections.environments.mcp import McpServerSpec
from infra.environments.mcp import servers as mcp
from infra.environments.mcp.protocol import McpConnection, McpFailed
from infra.environments.mcp.servers import McpServers, mcp_tools
from infra.environments.tools import Message, ToolLimits, answers_of

PROGRAM = f"{sys.executable} {Path(__file__).parents[2] / 'mcp_server.py'}"
TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def no_lists() -> None:
    mcp._LISTED.clear()


@contextmanager
def by_address(fault: str = "", token: str = "", notes: Path | None = None) -> Iterator[str]:
    """Serve in this process. Gives the address."""
    options = argparse.Namespace(fault=fault, notes=notes and str(notes))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(Server(options), token)) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()


@contextmanager
def by_program(fault: str = "", token: str = "", notes: Path | None = None) -> Iterator[str]:
    words = (["--fault", fault] if fault else []) + (["--notes", str(notes)] if notes else [])
    yield shlex.join([*shlex.split(PROGRAM), *words])


BOTH = pytest.mark.parametrize("serving", [by_program, by_address])
Serving = Callable[..., "contextmanager[str]"]


def servers_of(*texts: str, timeout_s: float = TIMEOUT_S) -> McpServers:
    return McpServers([McpServerSpec.parse(text) for text in texts], timeout_s)


def answers(servers: McpServers, *calls: tuple[str, str]) -> list[str]:
    """Make calls as a model does, in one episode."""
    message: Message = {
        "tool_calls": [{"id": f"c{n}", "function": {"name": a, "arguments": b}} for n, (a, b) in enumerate(calls)]
    }
    with servers.for_episode(), recorded(ToolLimits(servers.servers[0].timeout_s)):
        return [each["content"] for each in answers_of(mcp_tools(), message)]


@BOTH
def test_an_episode_has_the_tools_of_its_servers(serving: Serving, tmp_path: Path) -> None:
    with serving(notes=tmp_path / "notes") as text:
        servers = servers_of(text)
        with servers.for_episode():
            book, look = mcp_tools()
            assert book.schema["function"]["parameters"]["required"] == ["seat"] and not book.is_idempotent
            assert look.schema["function"]["description"] == "Look at a seat." and look.is_idempotent
            assert book(seat=3) == "booked 3"
        assert mcp_tools() == []
        calls = [("book", '{"seat": 2}'), ("look", '{"seat": 13}'), ("look", "{}"), ("look", "[1]"), ("buy", "{}")]
        assert answers(servers, *calls) == [
            "booked 2\n[image image/png]",
            "error: there is no seat 13",
            "error: arguments of 'look': missing a required argument: 'seat'",
            "error: arguments of 'look': must be an object",
            "error: no tool 'buy'; there are book, look",
        ]
        assert (tmp_path / "notes").read_text() == "book 3 \nbook 2 k1\nlook 13 k1\n"


def test_a_program_is_started_when_it_is_called_and_ends_with_its_episode() -> None:
    with by_program() as text:
        assert answers(servers_of(text)) == [] and not children()  # listed, then ended
        servers = servers_of(text)
        with servers.for_episode():
            look = mcp_tools()[1]
            assert not children()
            look(seat=1)
            assert len(children()) == 1
        assert not children()


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if "mcp_server.py" in " ".join(each.cmdline())]


@BOTH
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("no tools", "lists no tools"),
        ("garbage at start", "answers with 'what?', which is no JSON"),
        ("hangs at start", "gave no answer in 2 s"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line_before_the_run(serving: Serving, fault: str, problem: str) -> None:
    with serving(fault) as text:
        begin = time.monotonic()
        with pytest.raises(ValueError, match="MCP server") as caught:
            servers_of(text, timeout_s=2.0 if "hangs" in fault else TIMEOUT_S).check()
        assert str(caught.value) == f"MCP server {text!r} {problem}"
        assert time.monotonic() - begin < 50 and not children()


def test_a_program_that_ends_is_one_line_with_its_last_words() -> None:
    with by_program("dies at start") as text, pytest.raises(ValueError, match="ended with 3: no office today"):
        servers_of(text).check()
    with pytest.raises(ValueError, match=r"MCP server './none' cannot be started: No such file or directory"):
        servers_of("./none").check()
    with pytest.raises(ValueError, match="cannot be reached: "):
        servers_of("http://127.0.0.1:1/mcp").check()


@BOTH
@pytest.mark.parametrize(
    ("fault", "problem"), [("hangs", "gave no answer in 2 s"), ("garbage", "answers with 'what?', which is no JSON")]
)
def test_a_server_that_fails_in_a_call_gives_errors_up_to_the_end_of_the_episode(
    serving: Serving, fault: str, problem: str, tmp_path: Path
) -> None:
    with serving(fault, notes=tmp_path / "notes") as text:
        servers_of(text).check()
        servers = servers_of(text, timeout_s=2.0)
        first, second = answers(servers, ("look", '{"seat": 1}'), ("look", '{"seat": 2}'))
        assert (first, second) == (f"error: MCP server {text!r} {problem}", f"error: MCP server {text!r} {problem} before")
        assert (tmp_path / "notes").read_text().count("look") == 1
        if serving is by_program:
            assert not children()


def test_a_refused_call_leaves_the_server_usable() -> None:
    with by_program("refuses") as text:
        found = answers(servers_of(text), *[("look", '{"seat": 1}')] * 2)
        assert found == [f"error: MCP server {text!r} refuses tools/call: 'no such seat'"] * 2


def test_a_token_is_sent_by_its_variable_and_never_shown_or_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hidden")
    with by_address(token="hidden") as url:
        servers_of(f"{url} $MY_TOKEN").check()
        mcp._LISTED.clear()
        monkeypatch.setenv("MY_TOKEN", "other")
        with pytest.raises(ValueError, match="answers with HTTP 401: is the variable of its token right") as caught:
            servers_of(f"{url} $MY_TOKEN").check()
        assert "other" not in str(caught.value)
    with by_address("redirect", token="hidden") as url:
        monkeypatch.setenv("MY_TOKEN", "hidden")
        with pytest.raises(ValueError, match="answers with HTTP 302"):
            servers_of(f"{url} $MY_TOKEN").check()


def test_two_tools_of_one_name_are_refused() -> None:
    with by_program() as first, by_address() as second, pytest.raises(McpFailed, match="has a tool 'book', and so has"):
        servers_of(first, second).tools()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds an empty text"),
        ("python3 'a", "is no command: No closing quotation"),
        ("ftp://host/mcp", "is no address"),
        ("https://user:hidden@host/mcp", "an address with a user, a password or a query"),
        ("https://host/mcp?key=hidden", "an address with a user, a password or a query"),
        ("https://host/mcp hidden", "behind the address may only be the name of the variable"),
    ],
)
def test_what_is_no_server_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        McpServerSpec.parse(text)
    assert "hidden" not in str(caught.value) and "\n" not in str(caught.value)
    assert os.linesep not in str(caught.value)


def test_a_list_of_tools_without_an_end_is_refused() -> None:
    class Endless:
        def request(self, message: Message, timeout_s: float) -> Message:
            tool = {"name": f"t{message['id']}", "inputSchema": {}}
            result = {"protocolVersion": "2025-06-18", "tools": [tool], "nextCursor": "more"}
            return {"jsonrpc": "2.0", "id": message["id"], "result": result}

        def notify(self, message: Message, timeout_s: float) -> None: ...

        def close(self) -> None: ...

    with pytest.raises(McpFailed, match="lists its tools on more than 100 pages"):
        McpConnection(Endless(), 1.0).tools()
