"""What a command prints while it works: few log lines, all of them, warnings only, or each as a JSON object.

The lines of engine and trainer are in their log files; `ratchet logs` shows them. Prefect's own lines are on its pages.
"""

import io
import json
import logging
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Literal, NamedTuple

from rich.console import Console

from flows.cli import interrupts

Amount = Literal["warnings", "brief", "all"]
OURS = ("infra.", "tasks.", "flows.", "ratchet.")
"""Loggers of this project; of others only warnings are shown."""
BRIEF = "infra.progress.brief"
RESULT = "ratchet"
"""Logger of what a command prints itself, in JSON."""
console = Console(highlight=False, soft_wrap=False)


class Logs(NamedTuple):
    """The log lines that a person asked for."""

    amount: Amount = "all"
    as_json: bool = False


_chosen = Logs()


def choose(*, verbose: bool, quiet: bool, log_json: bool) -> None:
    """Take what the options of a command say.

    Raises:
        ValueError: for --verbose with --quiet.
    """
    global _chosen
    if verbose and quiet:
        raise ValueError("--verbose and --quiet exclude each other: give one of them")
    _chosen = Logs("all" if verbose else "warnings" if quiet else "brief", log_json)
    console.file = JsonLines() if log_json else None  # type: ignore[assignment]  # None: what sys.stdout is


def is_verbose() -> bool:
    return _chosen.amount == "all"


def is_quiet() -> bool:
    return _chosen.amount == "warnings"


def is_shown(logger: str, level: int) -> bool:
    """Whether a line of this logger and level is printed."""
    if level >= logging.WARNING or _chosen.amount == "warnings":
        return level >= logging.WARNING
    if logger == BRIEF:
        return level >= logging.INFO
    return _chosen.amount == "all" and level >= logging.INFO and logger.startswith(OURS)


def line_of(moment: datetime, logger: str, level: int, message: str) -> str:
    """A log line as it is printed."""
    if _chosen.as_json:
        return json_line(moment, logger, level, message)
    return f"{moment:%H:%M:%S} {f'{logging.getLevelName(level).lower()}: ' if level >= logging.WARNING else ''}{message}"


def json_line(moment: datetime, logger: str, level: int, message: str) -> str:
    about = {"time": moment.isoformat(timespec="milliseconds"), "level": logging.getLevelName(level).lower()}
    return json.dumps(about | {"logger": logger, "message": message}, ensure_ascii=False)


class LineFormatter(logging.Formatter):
    """The message, with a traceback if there is one, as `line_of` prints it."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).astimezone()
        return line_of(moment, record.name, record.levelno, super().format(record))


class JsonLines(io.TextIOBase):
    """Stdout for text: writes each line which it gets as a JSON object. Lines of white space are left out."""

    def __init__(self) -> None:
        self.rest = ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            if line.strip():
                sys.stdout.write(json_line(datetime.now().astimezone(), RESULT, logging.INFO, line.rstrip()) + "\n")
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def indented(text: str, width: int) -> str:
    """A text whose lines after the first stand below its first letter, which is in column `width`."""
    return text.replace("\n", "\n" + " " * width)


def folded(text: str, width: int) -> str:
    """A text in lines of the terminal's width, each behind `width` blanks. Words are not broken."""
    blanks = " " * width
    return textwrap.fill(
        text, console.width, initial_indent=blanks, subsequent_indent=blanks, break_long_words=False, break_on_hyphens=False
    )


def log_to_terminal() -> None:
    """Print the log lines of this process on stdout. After a Ctrl-C none of Prefect's: the command's last line says what has stopped."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LineFormatter())
    handler.addFilter(lambda record: is_shown(record.name, record.levelno))
    handler.addFilter(lambda record: not (interrupts.has_come() and record.name.startswith("prefect.")))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def show_warnings_only() -> None:
    """From here on: what a command prints is what it is for."""
    global _chosen
    _chosen = _chosen._replace(amount="warnings")


def progress() -> AbstractContextManager[None]:
    """Show progress in the block as the options say: as a display, as log lines for JSON, or on Prefect's pages alone."""
    if not _chosen.as_json and _chosen.amount != "warnings":
        return nullcontext()
    from infra.progress import bars, work
    from tasks.support.progress_artifacts import on_page

    return work.watched_by(*([] if _chosen.amount == "warnings" else [bars.as_lines]), on_page)
