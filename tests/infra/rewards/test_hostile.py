"""Rewards that do their worst on one sample: it is unjudged with the reason, and the others get what they would have got without it."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import orjson
import psutil
import pytest

from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.config import RewardConfig
from infra.rewards import client
from infra.rewards.outcome import DIED, EXCEPTION, NO_NUMBER, NONE, TIME_OUT, Outcome

TEXTS = ["a", "bb", "BAD", "dddd", "eeeee", "ffffff", "ggggggg", "hhhhhhhh"]
BAD = TEXTS.index("BAD")


class Kind(NamedTuple):
    what: str
    body: str
    """What the function does with the bad sample."""
    reason: str
    """Why it is unjudged; empty where it is judged all the same."""
    message: str = ""
    cpu_s: int | None = None
    """reward.cpu_s."""


KINDS = (
    Kind("raises", "raise KeyError('nothing there')", EXCEPTION, "raised KeyError: 'nothing there' at {file}:"),
    Kind("returns NaN", "return float('nan')", NO_NUMBER, "returned nan for 'reward'"),
    Kind("returns None", "return None", NONE, "returned None"),
    Kind("hangs in Python", "while True: pass", TIME_OUT, "gave no result in 1 s at {file}:"),
    Kind("hangs in C code that holds the interpreter", "import re; re.match('(a+)+$', 'a' * 40 + 'b')", TIME_OUT, "at {file}:"),
    Kind(
        "uses CPU time in C code without end",
        "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
        DIED,
        "used more than 1 s of CPU time, which is reward.cpu_s at {file}:",
        cpu_s=1,
    ),
    Kind(
        "uses CPU time in two threads",
        "threading.Thread(target=burn, daemon=True).start(); burn()",
        DIED,
        "used more than 1 s of CPU time",
        cpu_s=1,
    ),
    Kind(
        "forks 30 children in sessions of their own and hangs",
        "[os.setsid() or time.sleep(600) for _ in range(30) if os.fork() == 0]; time.sleep(600)",
        TIME_OUT,
    ),
    Kind("forks, and the child returns too", "os.fork(); return 3.0", ""),
    Kind("eats memory", "return float(len(bytearray(2**31)))", EXCEPTION, "raised MemoryError"),
    Kind("calls os._exit", "os._exit(7)", DIED, "ended its process, exit code 7"),
    Kind("calls sys.exit", "sys.exit('usage')", EXCEPTION, "raised SystemExit: usage"),
    Kind("crashes in C", "import ctypes; ctypes.string_at(0)", DIED, "ended its process, signal SIGSEGV"),
    Kind("kills itself", "os.kill(os.getpid(), 9); time.sleep(600)", DIED, "ended its process, signal SIGKILL"),
    Kind("prints 50 MB", "print('x' * 50_000_000); return 3.0", ""),
    Kind("writes into all pipes", "[write(n, b'{}' * 999) for n in range(3, 60)]; return 3.0", DIED),
    Kind("closes all descriptors", "os.closerange(0, 256); return 3.0", DIED),
    Kind("closes the standard streams", "sys.stdout.close(); os.close(1); os.close(2); return 3.0", ""),
    Kind("returns text", "return '1.0'", NO_NUMBER, "returned '1.0' for 'reward'"),
    Kind("returns a dict of a million parts", "return dict.fromkeys(map(str, range(10**6)), 1.0)", NO_NUMBER, "1000000 parts"),
    Kind("returns text of 200 MB", "return 'x' * 200_000_000", NO_NUMBER),
    Kind("returns an object that raises", "return Spiteful()", EXCEPTION, "raised RuntimeError: no"),
    Kind("recurses without end", "return score(completion=completion)", EXCEPTION, "raised RecursionError"),
    Kind("leaves a thread behind", "threading.Thread(target=time.sleep, args=(600,)).start(); return 3.0", ""),
    Kind("changes folder, signals and timer", "changes(); return 3.0", ""),
    Kind("raises KeyboardInterrupt", "raise KeyboardInterrupt", EXCEPTION, "raised KeyboardInterrupt"),
    Kind("stops itself", "os.kill(os.getpid(), 19); return 3.0", TIME_OUT),
    Kind("kills the pool", "os.kill(os.getppid(), 9); time.sleep(600)", "lost"),
)
FILE = """import os, signal, sys, threading, time
class Spiteful(float):
    def __float__(self): raise RuntimeError("no")
    __repr__ = __str__ = __class__ = property(__float__)
def write(number, data):
    try: os.write(number, data)
    except OSError: pass
def burn():
    while True: pass
def changes():
    os.chdir("/")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setrecursionlimit(60)
def score(*, completion):
    if completion == "BAD":
        {body}
    print("judged", len(completion))
    assert os.getcwd() == os.path.dirname(os.path.abspath(__file__)) and sys.getrecursionlimit() > 500
    return float(len(completion))
"""


@pytest.fixture(autouse=True)
def _ends_pools(workspace: Path) -> Iterator[None]:
    yield
    client.close_all()


def outcomes(config: RewardConfig, texts: list[str], deadline: Deadline = NO_DEADLINE) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}

    def take(index: int, outcome: Outcome) -> None:
        assert index not in found, "a sample was judged twice"
        found[index] = outcome

    client.judge(config, config.called[0], "digest", [orjson.dumps({"completion": text}) for text in texts], take, deadline)
    return found


def of_user(folder: Path) -> list[str]:
    """Command lines of the processes that a pool of this test has left."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return left


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.what)
def test_one_bad_sample_costs_itself_and_no_other(kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(body=kind.body))
    timeout_s = 1.0 if kind.reason == TIME_OUT else 60.0
    config = RewardConfig(name=f"{file}:score", timeout_s=timeout_s, workers=2, memory_mib=512, cpu_s=kind.cpu_s)
    if kind.reason == "lost":
        with pytest.raises(ValueError, match="3 times: does the reward end other processes than its own"):
            outcomes(config, TEXTS)
        return
    found = outcomes(config, TEXTS)
    assert [found[n].reward for n in range(len(TEXTS)) if n != BAD] == [float(len(text)) for text in TEXTS if text != "BAD"]
    bad = found[BAD]
    assert (bad.reward, bad.reason) == ((3.0, "") if not kind.reason else (None, kind.reason)), bad
    assert kind.message.format(file=file) in bad.message and "\n" not in bad.message
    again = outcomes(config, ["a", "bb"])
    assert [again[n].reward for n in range(2)] == [1.0, 2.0], "the pool works on"
    client.close_all()
    deadline = time.monotonic() + 20
    while of_user(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert of_user(tmp_path) == []


def test_each_sample_has_the_cpu_time_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import time\ndef score(*, completion):\n    until = time.process_time() + 0.7\n"
        "    while completion == 'busy' and time.process_time() < until: pass\n    return 1.0\n"
    )
    found = outcomes(RewardConfig(name=f"{file}:score", workers=1, cpu_s=1), ["a"] * 15 + ["busy"] * 4)
    assert [found[n].reward for n in range(19)] == [1.0] * 19, found


def test_at_the_deadline_of_the_whole_scoring_what_is_missing_is_unjudged(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import time\ndef score(*, completion):\n    time.sleep(600 if completion == 'BAD' else 0)\n    return 1.0\n")
    config = RewardConfig(name=f"{file}:score", workers=1)
    client.form_of(config, config.called[0], "digest")
    began, deadline = time.monotonic(), Deadline(4.0).begin()
    found = outcomes(config, ["a", "BAD", "a", "BAD", "a"], deadline)
    assert time.monotonic() - began < 50
    assert [found[n].reward for n in range(5)] == [1.0, None, None, None, None]
    assert {found[n].reason for n in range(1, 5)} == {TIME_OUT}
    assert "had no result when reward.task_timeout_s was over" in found[4].message
    assert f"over at {file}:3" in found[1].message, "the one that held the worker is named with its place"
    assert outcomes(config, ["a"])[0].reward == 1.0, "the pool works on, without a deadline"
    assert outcomes(config, ["a"], deadline)[0].reason == TIME_OUT, "a deadline that is over already"


def test_a_deadline_whose_clock_begins_during_a_call_ends_the_call_and_keeps_what_was_judged(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import time\ndef score(*, completion):\n    time.sleep(600 if completion == 'BAD' else 0)\n    return 1.0\n")
    config, deadline = RewardConfig(name=f"{file}:score", workers=1), Deadline(0.5)
    client.form_of(config, config.called[0], "digest")
    threading.Timer(3.0, deadline.begin).start()
    began = time.monotonic()
    found = outcomes(config, ["a", "BAD", "a"], deadline)
    assert 3.5 <= time.monotonic() - began < 50
    assert [(found[n].reward, found[n].reason) for n in range(3)] == [(1.0, ""), (None, TIME_OUT), (None, TIME_OUT)]
    assert of_user(tmp_path) == [], "the worker that hung is gone"
    assert outcomes(config, ["a"])[0].reward == 1.0


def test_quick_samples_before_leave_no_slow_one_waiting_behind_another(tmp_path: Path) -> None:
    """A worker that was given several at a time would judge the slow ones one after the other, while the other worker had none."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, time\ndef score(*, completion):\n    time.sleep(0.3 if completion == 'slow' else 0)\n    return float(os.getpid())\n"
    )
    config = RewardConfig(name=f"{file}:score", workers=2)
    outcomes(config, ["slow"] * 20)  # both workers have started
    for _ in range(8):
        outcomes(config, ["quick"] * 4)
    found = [outcome.reward for outcome in outcomes(config, ["slow"] * 8).values()]
    assert sorted(found.count(pid) for pid in set(found)) == [4, 4]
