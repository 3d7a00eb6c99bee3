"""The log files of child programs: one for each attempt, followed while they grow, quoted in errors."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_TAIL_LINES = 40


def fresh_log(path: Path) -> Path:
    """The path of an attempt's log; what an earlier attempt wrote there is kept as trainer.1.log, trainer.2.log, ..."""
    if path.exists():
        number = 1 + len(list(path.parent.glob(f"{path.stem}.[0-9]*{path.suffix}")))
        path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))
    return path


def last_lines(path: Path, count: int = NUM_TAIL_LINES) -> str:
    """The end of a log, for an error message."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.exists() else f"({path} does not exist)"


@contextlib.contextmanager
def followed(path: Path, on_line: Callable[[str], None], poll_s: float = 0.5) -> Iterator[None]:
    """Hand on each line that is appended to a file while the block runs, once it is whole."""
    done = threading.Event()
    position = path.stat().st_size if path.exists() else 0

    def follow() -> None:
        nonlocal position
        while True:
            ending = done.wait(poll_s)
            if path.exists():
                with path.open("rb") as stream:
                    stream.seek(position)
                    found = stream.read()
                whole = found if ending else found[: found.rfind(b"\n") + 1]
                position += len(whole)
                for line in whole.decode(errors="replace").splitlines():
                    on_line(line)
            if ending:
                return

    # in the caller's context: the lines belong to the task that asked for them
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)
