import contextvars
import time
from pathlib import Path

from shared import becomes

from infra.processes import logs


def test_appended_lines_are_handed_on_whole_and_earlier_ones_are_not(tmp_path: Path) -> None:
    path, seen = tmp_path / "log", list[str]()
    path.write_text("before\n")
    with path.open("a") as stream, logs.followed(path, seen.append, poll_s=0.01):
        print("caf\u00e9", file=stream, flush=True)
        assert becomes(lambda: seen == ["caf\u00e9"])
        print("a line in ", end="", file=stream, flush=True)
        time.sleep(0.1)
        assert seen == ["caf\u00e9"]
        print("two pieces", file=stream, flush=True)
        assert becomes(lambda: seen == ["caf\u00e9", "a line in two pieces"])
        print("just before\nthe end", end="", file=stream, flush=True)
    assert seen[2:] == ["just before", "the end"]


def test_a_log_can_be_followed_before_it_exists_in_the_context_of_the_caller(tmp_path: Path) -> None:
    name, seen = contextvars.ContextVar("name", default="nobody"), list[str]()
    name.set("caller")
    with logs.followed(tmp_path / "log", lambda line: seen.append(f"{name.get()} {line}"), poll_s=0.01):
        (tmp_path / "log").write_text("line\n")
    assert seen == ["caller line"]


def test_the_end_of_a_log_that_does_not_exist_says_so(tmp_path: Path) -> None:
    assert logs.last_lines(tmp_path / "log") == f"({tmp_path / 'log'} does not exist)"


def test_the_end_of_a_log_has_as_many_lines_as_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb\nc\n")
    assert [logs.last_lines(path, count).splitlines() for count in (0, 2, 9)] == [[], ["b", "c"], ["a", "b", "c"]]


def test_the_log_of_an_earlier_attempt_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    for attempt in ("first", "second", "third"):
        logs.fresh_log(path).write_text(attempt)
    assert [(tmp_path / name).read_text() for name in ("trainer.1.log", "trainer.2.log", "trainer.log")] == [
        "first",
        "second",
        "third",
    ]


def test_the_last_traceback_of_a_log_is_found_wherever_it_stands(tmp_path: Path) -> None:
    path, noise = tmp_path / "log", "a line of a thread\n" * 100
    assert logs.last_traceback(path) == ""
    path.write_text(noise)
    assert logs.last_traceback(path) == ""
    told = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    assert x == y\nAssertionError: 48 is not 64'
    first = told.replace("a.py", "b.py")
    path.write_text(f"{first}\n{noise}[2026-11-24 10:00:00] Scheduler hit an exception: {told}\n\n{noise}")
    assert logs.last_traceback(path) == told
    path.write_text(told.replace("AssertionError: 48 is not 64", "KeyboardInterrupt"))
    assert logs.last_traceback(path) == "", "it was ended, it did not crash"
