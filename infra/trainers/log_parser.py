"""Parse the trainer program's output while it runs: count its progress, and log its warnings and errors. trainer.log has all of its lines.

The lines come from infra/megatron/program/{phase_timer,train_step}.py and infra/megatron/model/base_weights.py.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infra.processes.log_levels import level_of
from infra.progress import work as progress
from infra.progress.work import Work

log = logging.getLogger(__name__)

MICROBATCH = re.compile(r"micro-batch (?:(\d+)/(\d+) )?(\d+)/(\d+) .*?(?:loss (\S+))?$")
LOADED = re.compile(r"loaded ([\d.]+) of ([\d.]+) GiB")
UNITS = ("mini-batches", "micro-batches")
LOADING, TRAINING = "loading weights", "training"
STARTING = "the trainer starts"


@contextmanager
def progress_of_log() -> Iterator[Callable[[str], None]]:
    """Yield the function to call with each line of a job's output, from any thread."""
    with progress.work(TRAINING) as work:
        work.note = STARTING
        yield lambda line: on_log_line(line, work)


def on_log_line(line: str, work: Work) -> None:
    if found := MICROBATCH.match(line):
        minibatch, num_minibatches, microbatch, num_microbatches = (int(part or 1) for part in found.groups()[:4])
        if work.unit not in UNITS:
            work.restart(TRAINING, num_minibatches, UNITS[0])
        if num_minibatches == 1:
            work.total, work.done, work.unit = num_microbatches, microbatch, UNITS[1]
        else:
            work.done = round(minibatch - 1 + microbatch / num_microbatches, 2)
        work.note = f"loss {found[5]}" if found[5] else ""
    elif found := LOADED.match(line):
        if work.what != LOADING:
            work.restart(LOADING, float(found[2]), "GiB")
        work.done = float(found[1])
    else:
        log.log(level_of(line), "trainer: %s", line)
