"""The trainer program: `torchrun --nproc-per-node N -m infra.megatron job.json`; alone also `python -m infra.megatron job.json`.
With `--resident FOLDER` instead of a job it keeps running and takes jobs from a queue: see infra.megatron.program.serve.

Exit 0 and result.json, or another code and on stderr one line that begins with `error:` (a traceback where we know no better).
"""

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.megatron.program.session import TrainerSession

STARTED = time.perf_counter()
BAD_INPUT, NOT_FINITE = 2, 3
USAGE = "usage: torchrun --nproc-per-node N -m infra.megatron job.json | --resident FOLDER"
REPORT_DELAY_S = 10
"""torchrun ends all ranks as soon as one has failed: the others give rank 0 this time to say why."""


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--resident", folder]:
            _set_up_output()
            from infra.megatron.model.lazy_compile import compiled_at_first_call

            with compiled_at_first_call():
                from infra.megatron.program.serve import serve

            return serve(Path(folder), run)
        case [job]:
            _set_up_output()
            return run(Path(job), None)
    return _fail(BAD_INPUT, USAGE)


def run(path: Path, session: "TrainerSession | None") -> int:
    """One job; on a stage that is kept, or on one of its own. Gives the exit code; errors that it does not expect leave it."""
    begin = STARTED if session is None else time.perf_counter()
    from infra.megatron.model.lazy_compile import compiled_at_first_call
    from infra.megatron.program.check_job import check, read_job

    try:
        job = read_job(path)
        if session:
            session.check(job)
        inputs = check(job, int(os.environ.get("WORLD_SIZE", "1")), is_kept=session is not None and session.holds(job))
    except ValueError as error:
        if session:
            session.forget()
        return _fail(BAD_INPUT, str(error), stays=session is not None)
    # megatron-core takes seconds to import; bad input does not wait for it.
    with compiled_at_first_call():
        from infra.megatron.checkpoint.shared_experts import UnusableExperts
        from infra.megatron.model.base_weights import UnusableBase
        from infra.megatron.model.kernel_packages import UnusableKernel
        from infra.megatron.program.phase_timer import Phases
        from infra.megatron.program.run_job import train
        from infra.megatron.program.session import TrainerSession
        from infra.megatron.program.train_step import NotFinite

    try:
        train(job, inputs, Phases({"import": time.perf_counter() - begin}), session or TrainerSession())
    except NotFinite as error:
        return _fail(NOT_FINITE, str(error), stays=session is not None)
    except (UnusableBase, UnusableKernel) as error:
        is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        code = _fail(BAD_INPUT, str(error), stays=session is not None and is_alone)
        if not is_alone:  # ranks whose part of it is whole would wait for this one: torchrun ends them with it
            raise SystemExit(code) from error
        return code
    except UnusableExperts as error:
        return _fail(BAD_INPUT, str(error), stays=session is not None)
    return 0


class OutputFormatter(logging.Formatter):
    """The message alone; before a warning or an error its level."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return level + super().format(record)


def _set_up_output() -> None:
    """Progress of rank 0 on stdout, line by line."""
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    logging.getLogger().handlers[0].setFormatter(OutputFormatter())
    logging.getLogger("infra").setLevel(logging.INFO if _rank() == 0 else logging.WARNING)
    # megatron-core warns of the GPU packages that it does without.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    # It also warns of every layer whose experts are ours.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    # And it calls collectives by names that torch 2.13 deprecates, with a warning for each rank and name.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def _fail(code: int, message: str, *, stays: bool = False) -> int:
    if _rank() != 0 and not stays:
        time.sleep(REPORT_DELAY_S)
    sys.stderr.write(f"error: {message}\n")
    return code


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # What was to be written is written; Python would take a second or more to clear away torch and megatron-core.
    # Perf: about 1 s at each end of the program (CPU, docs/history/decisions.md).
    os._exit(code)
