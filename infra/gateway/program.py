"""Run a program of any language as the agent of a session.

It gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL as variables and the task as one JSON object on its standard input. The last line that
it prints is its reward: `{"reward": 1.0}`. A program that fails, hangs or prints no reward has no reward, never 0.
"""

import asyncio
import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from infra.gateway.http.server import OpenSession
from infra.processes.child_environment import of_rewards

MAX_OUTPUT_BYTES = 1 << 20
"""Longest line that a program may print."""


class ProgramOutcome(NamedTuple):
    """What a program made of an episode."""

    reward: float | None
    """None: it could not be judged."""
    problem: str = ""
    """Why there is no reward, in one line."""


async def run_program(opened: OpenSession, command: Sequence[str], task: Mapping[str, Any], timeout_s: float) -> ProgramOutcome:
    """Run a program to its end, and end all that it started.

    timeout_s: Longest time for the whole episode, in seconds.

    Raises:
        ValueError: if the command cannot be started at all.
    """
    variables = {"OPENAI_BASE_URL": opened.base_url, "OPENAI_API_KEY": opened.api_key, "OPENAI_MODEL": opened.model}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=of_rewards(()) | variables,
            start_new_session=True,
            limit=MAX_OUTPUT_BYTES,
        )
    except OSError as error:
        raise ValueError(f"the agent's command {list(command)} cannot be started: {error}") from error
    try:
        line = await asyncio.wait_for(_last_line(process, json.dumps(task)), timeout_s)
    except TimeoutError:
        return ProgramOutcome(None, f"the program was not done after {timeout_s:g} s")
    except ValueError:
        return ProgramOutcome(None, f"the program printed a line of more than {MAX_OUTPUT_BYTES} bytes")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        return ProgramOutcome(None, f"the program ended with {process.returncode}")
    return _outcome_of(line)


async def _last_line(process: asyncio.subprocess.Process, task: str) -> str:
    """The last line that a program prints before it ends."""
    assert process.stdin and process.stdout
    with suppress(ConnectionError):  # it reads no task
        process.stdin.write(task.encode() + b"\n")
        await process.stdin.drain()
        process.stdin.close()
    last = b""
    async for line in process.stdout:
        last = line.strip() or last
    await process.wait()
    return last.decode(errors="replace")


def _outcome_of(line: str) -> ProgramOutcome:
    try:
        reward = json.loads(line)["reward"]
    except (ValueError, TypeError, KeyError, IndexError):
        return ProgramOutcome(None, f'the program\'s last line is {line!r:.80}, must be as {{"reward": 1.0}}')
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        return ProgramOutcome(None, f"the program's reward is {reward!r:.40}, must be a finite number")
    return ProgramOutcome(float(reward))
