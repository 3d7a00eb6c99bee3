"""Flow processes by fork: imports of Prefect, transformers and MLflow cost nine seconds, a cell shall take less.

The process that forks has imported everything and started nothing: no thread, no event loop, no connection.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path


def preload() -> None:
    """Import what flow processes need."""
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "infra,tasks")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import mlflow.tracking.client  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    import flows.run
    import flows.step  # noqa: F401


def fork(work: Callable[[], int], environment: Mapping[str, str], log: Path) -> int:
    """Run work in a child with this environment added; its output goes to log. Gives the pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        _redirect(log)
        os.environ.update(environment)
        _read_settings_anew()
        code = work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001  # the child ends here whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)


def _read_settings_anew() -> None:
    from prefect.context import refresh_global_settings_context

    from infra.settings import settings

    settings.cache_clear()
    refresh_global_settings_context()


def exit_code(pid: int) -> int | None:
    """Of a child of ours; None while it lives, and -1 - signal where one ended it."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait(pid: int, limit_s: float) -> int | None:
    """The exit code; a child that still lives after the limit is killed, and None."""
    deadline = time.monotonic() + limit_s
    while (code := exit_code(pid)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return code
